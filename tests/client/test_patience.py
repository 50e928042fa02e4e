"""Silence that may be slowness, and pauses before the next call."""

from upr_client.changes.link import Clock, Patience, Reconnecting
from upr_client.changes.status import Progress
from upr_protocol.errors import PartitionNotActiveError


def test_the_interval_doubles_until_something_is_brought() -> None:
    patience = Patience(5.0)
    seen = []
    for _ in range(7):
        seen.append(patience.interval)
        patience.lost("SILENT")
    assert seen == [5, 10, 20, 40, 80, 160, 160]
    patience.lost("UNAVAILABLE")
    assert patience.interval == 160
    patience.brought()
    assert patience.interval == 5


def test_a_call_that_holds_is_no_slow_one() -> None:
    patience = Patience(1.0)
    patience.lost("SILENT")
    patience.opened(100.0)
    patience.beat(118.0)
    assert patience.interval == 2
    patience.beat(118.1)
    assert patience.interval == 1


def test_the_limit_holds() -> None:
    patience = Patience(3000.0)
    patience.lost("SILENT")
    assert patience.interval == 3600


def test_the_active_server_that_is_named_is_asked_at_once_but_not_again_and_again() -> None:
    clock = Clock(lambda: 0.0, lambda: 0.0, lambda: 1.0)
    calls = Reconnecting(5.0, None, Progress(), lambda words: None, clock)
    elsewhere = PartitionNotActiveError("a replica", retriable=True, owner="b:1")
    pauses = [calls.lost(elsewhere, named=True) for _ in range(4)]
    assert pauses == [0.0, 0.1, 0.2, 0.4]
    calls.answered()
    assert calls.lost(elsewhere) == 0.1
    assert calls.lost(elsewhere, named=True) == 0.0
