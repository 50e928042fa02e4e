"""Silence that may be slowness, and pauses before the next call."""

from upr_client.changes.link import Clock, Reconnecting
from upr_client.changes.status import Progress
from upr_protocol.errors import PartitionNotActiveError, UnavailableError

SILENT = UnavailableError("silent", reason="SILENT")


def calls_at(now: list[float], interval: float = 5.0) -> Reconnecting:
    """Calls at the time that the list holds, with the longest pauses."""
    clock = Clock(lambda: now[0], lambda: 0.0, lambda: 1.0)
    return Reconnecting(interval, None, Progress(), lambda words: None, clock)


def test_the_interval_doubles_until_something_is_brought() -> None:
    calls = calls_at([0.0])
    seen = []
    for _ in range(7):
        seen.append(calls.interval)
        calls.lost(SILENT)
    assert seen == [5, 10, 20, 40, 80, 160, 160]
    calls.lost(UnavailableError("away"))
    assert calls.interval == 160
    calls.brought()
    assert calls.interval == 5


def test_a_call_that_holds_is_no_slow_one() -> None:
    now = [100.0]
    calls = calls_at(now, 1.0)
    calls.lost(SILENT)
    calls.opened()
    now[0] = 118.0
    calls.beat()
    assert calls.interval == 2
    now[0] = 118.1
    calls.beat()
    assert calls.interval == 1


def test_the_limit_holds() -> None:
    calls = calls_at([0.0], 3000.0)
    calls.lost(SILENT)
    assert calls.interval == 3600


def test_a_pause_that_is_bounded_is_no_attempt() -> None:
    calls = calls_at([0.0])
    elsewhere = PartitionNotActiveError("a replica", retriable=True, owner="b:1")
    assert calls.lost(elsewhere) == 0.1
    assert [calls.lost(elsewhere, longest) for longest in (0.0, 0.1, 0.1)] == [0.0, 0.1, 0.1]
    assert calls.lost(elsewhere) == 0.2
    calls.answered()
    assert calls.lost(elsewhere) == 0.1


def test_a_server_that_is_behind_is_left_for_each_other_once_and_again_ever_later() -> None:
    now = [0.0]
    calls = calls_at(now)

    def asked(servers: int, endpoints: str) -> list[bool]:
        return [calls.leaves(endpoint, servers) for endpoint in endpoints]

    assert asked(1, "a") == [False]
    assert asked(3, "abca") == [True, True, False, False]
    now[0] = 1.99
    assert asked(3, "a") == [False]
    now[0] = 2.0
    # Two of four are away.
    assert asked(4, "aba") == [True, True, False]
    now[0] = 5.99
    assert asked(3, "b") == [False]
    # Nothing is behind any more: what is behind later is a new beginning.
    calls.all_started()
    assert asked(2, "aba") == [True, False, False]
    now[0] = 8.0
    assert asked(2, "a") == [True]
