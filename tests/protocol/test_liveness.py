"""Heartbeats and silence, on a clock that the tests turn."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.flow import Liveness
from upr_protocol.limits import HEARTBEAT_SECONDS_MAX, HEARTBEAT_SECONDS_MIN


@pytest.mark.parametrize("interval", [0.0, -1.0, 0.049, 3600.1, math.nan, math.inf])
def test_the_interval_has_a_range(interval: float) -> None:
    with pytest.raises(InvalidArgumentError, match="heartbeat interval"):
        Liveness(interval, 0.0)


def test_a_heartbeat_is_due_after_one_interval_without_sending() -> None:
    timers = Liveness(5.0, 100.0)
    assert not timers.heartbeat_due(104.9)
    assert timers.heartbeat_due(105.0)
    timers.sent(104.0)
    assert not timers.heartbeat_due(108.9)
    assert timers.heartbeat_due(109.0)
    timers.heard(108.0)
    assert timers.heartbeat_due(109.0)


def test_a_peer_is_gone_after_three_silent_intervals() -> None:
    timers = Liveness(5.0, 100.0)
    assert not timers.peer_is_gone(114.9)
    assert timers.peer_is_gone(115.0)
    timers.sent(114.0)
    assert timers.peer_is_gone(115.0)
    timers.heard(114.0)
    assert not timers.peer_is_gone(128.9)
    assert timers.peer_is_gone(129.0)
    # One is late when it has been silent for half of that.
    assert not timers.peer_is_late(121.4)
    assert timers.peer_is_late(121.5)


def test_the_next_deadline_is_the_first_of_both() -> None:
    timers = Liveness(5.0, 100.0)
    assert timers.next_deadline() == 105.0
    timers.sent(112.0)
    assert timers.next_deadline() == 115.0
    timers.heard(112.0)
    assert timers.next_deadline() == 117.0


def test_late_news_do_not_turn_the_timers_back() -> None:
    timers = Liveness(5.0, 100.0)
    timers.sent(110.0)
    timers.sent(101.0)
    timers.heard(110.0)
    timers.heard(101.0)
    assert timers.next_deadline() == 115.0
    assert not timers.peer_is_gone(124.9)


def test_a_peer_that_has_nothing_to_say_for_a_while_is_silent_from_then_on() -> None:
    timers = Liveness(1.0, 0.0)
    timers.excuse(10.0)
    # A standstill of this side, and what comes meanwhile, end none of that.
    timers.woke(5.0, 1.0)
    timers.heard(6.0)
    assert not timers.peer_is_gone(12.9)
    assert timers.peer_is_gone(13.0)


def test_what_has_come_is_no_excuse_any_more() -> None:
    timers = Liveness(1.0, 0.0)
    timers.excuse(10.0)
    timers.heard(6.0)
    timers.excuse(6.0)
    assert not timers.peer_is_gone(8.9)
    assert timers.peer_is_gone(9.0)


def test_a_time_in_which_this_side_stood_still_is_no_silence_of_the_peer() -> None:
    timers = Liveness(5.0, 100.0)
    timers.heard(104.0)
    timers.woke(300.0, due=105.0)
    assert not timers.peer_is_gone(300.0)
    # What was silent before counts.
    assert timers.next_deadline() == 105.0
    timers.sent(300.0)
    assert timers.next_deadline() == 305.0
    timers.sent(310.0)
    assert timers.next_deadline() == 314.0
    # A little late is on time; never is more heard than until now.
    timers.woke(313.9, due=309.0)
    assert timers.peer_is_gone(314.0)
    timers.heard(320.0)
    timers.woke(330.0, due=315.0)
    assert not timers.peer_is_gone(344.9)
    assert timers.peer_is_gone(345.0)


@given(
    st.floats(HEARTBEAT_SECONDS_MIN, HEARTBEAT_SECONDS_MAX),
    st.floats(0, 1e9),
    st.lists(st.floats(0, 1e5), max_size=5),
)
def test_at_the_deadline_something_is_due(interval: float, began: float, sent: list[float]) -> None:
    timers = Liveness(interval, began)
    for seconds in sent:
        timers.sent(began + seconds)
    deadline = timers.next_deadline()
    assert timers.heartbeat_due(deadline) or timers.peer_is_gone(deadline)
    before = math.nextafter(deadline, -math.inf)
    assert not timers.heartbeat_due(before)
    assert not timers.peer_is_gone(before)
