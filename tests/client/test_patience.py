"""Silence that may be slowness."""

from upr_client.changes.link import Patience


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
