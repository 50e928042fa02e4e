"""Credit, on both sides of a call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.flow import CreditReturn, CreditWindow, granted_window
from upr_protocol.limits import (
    CREDIT_BYTES,
    CREDIT_BYTES_MAX,
    CREDIT_FRAMES,
    CREDIT_RETURN_FRACTION,
)


@pytest.mark.parametrize("window", [0, -1, CREDIT_BYTES_MAX + 1])
def test_a_window_has_a_range(window: int) -> None:
    with pytest.raises(InvalidArgumentError, match=str(CREDIT_BYTES_MAX)):
        CreditWindow(window)
    with pytest.raises(InvalidArgumentError, match=str(window)):
        CreditReturn(window)


def test_defaults() -> None:
    assert CreditWindow().window == CREDIT_BYTES
    assert CreditWindow(CREDIT_BYTES_MAX).window == CREDIT_BYTES_MAX


def test_what_fits_may_be_sent() -> None:
    window = CreditWindow(100)
    window.spend(60)
    assert window.may_send(40)
    assert not window.may_send(41)
    with pytest.raises(InvalidArgumentError, match=r"41 bytes.*60 of 100"):
        window.spend(41)
    with pytest.raises(InvalidArgumentError):
        window.spend(-1)
    assert window.outstanding == 60
    window.spend(40)
    assert window.may_send(0)
    assert not window.may_send(1)


def test_a_value_larger_than_the_credit_goes_when_less_than_a_quarter_is_out() -> None:
    """A receiver that has consumed everything keeps back up to a quarter, until more comes."""
    window = CreditWindow(100)
    assert window.may_send(101)
    window.spend(25)
    assert not window.may_send(101)
    window.give_back(1)
    window.spend(101)
    assert window.outstanding == 125
    assert not window.may_send(1)
    window.give_back(25)
    assert not window.may_send(1)
    window.give_back(1)
    assert window.may_send(1)


@pytest.mark.parametrize(("returned", "left"), [(0, 10), (4, 6), (10, 0), (11, 0), (2**64 - 1, 0)])
def test_more_than_is_outstanding_gives_all_of_it_back(returned: int, left: int) -> None:
    window = CreditWindow(100)
    window.spend(10)
    window.give_back(returned)
    assert window.outstanding == left
    # What was too much counts for nothing later.
    window.spend(100 - left)
    assert not window.may_send(1)


@pytest.mark.parametrize(
    ("asked", "granted"),
    [(0, CREDIT_BYTES), (1, 1), (CREDIT_BYTES_MAX, CREDIT_BYTES_MAX), (2**63, CREDIT_BYTES_MAX)],
)
def test_a_window_that_is_too_large_is_cut_to_the_limit(asked: int, granted: int) -> None:
    assert granted_window(asked) == granted


def test_credit_is_returned_at_a_quarter() -> None:
    credit = CreditReturn(100)
    assert credit.consumed(24) == 0
    assert credit._held == 24
    assert credit.consumed(1) == 25
    assert credit._held == 0
    assert credit.consumed(0) == 0
    assert credit.consumed(500) == 500
    assert credit.flush() == 0
    assert credit.consumed(3) == 0
    assert credit.flush() == 3
    assert credit.flush() == 0


def test_a_quarter_of_a_window_that_four_does_not_divide() -> None:
    credit = CreditReturn(5)
    assert [credit.consumed(1), credit.consumed(1)] == [0, 2]


@pytest.mark.parametrize("window", [CREDIT_BYTES, CREDIT_FRAMES, 32_100])
def test_no_more_small_frames_are_out_than_a_window_has_parts(window: int) -> None:
    sender, receiver = CreditWindow(window), CreditReturn(window)
    costs = [sender.spend(1) for _ in range(CREDIT_FRAMES)]
    while sender.may_send(1):
        costs.append(sender.spend(1))
    # 32,100 is not so many parts of the same size.
    assert CREDIT_FRAMES <= len(costs) <= CREDIT_FRAMES + 1
    returned = [receiver.consumed(cost) for cost in costs]
    assert sum(map(bool, returned)) >= CREDIT_RETURN_FRACTION - 1
    sender.give_back(sum(returned))
    assert sender.may_send(1)


def test_frames_of_a_steady_writer_do_not_wait_for_a_distant_consumer() -> None:
    # One each 2 ms, and what they cost is back 300 ms later.
    sender, receiver = CreditWindow(), CreditReturn()
    coming: list[tuple[int, int]] = []
    for now in range(0, 3000, 2):
        while coming and coming[0][0] <= now:
            sender.give_back(coming.pop(0)[1])
        assert sender.may_send(100), now
        returned = receiver.consumed(sender.spend(100))
        if returned:
            coming.append((now + 300, returned))


@given(st.integers(1, 2000), st.lists(st.integers(0, 1000), min_size=1, max_size=60))
def test_both_sides_together_never_stall_nor_overrun(window: int, sizes: list[int]) -> None:
    sender, receiver = CreditWindow(window), CreditReturn(window)
    on_the_way: list[int] = []
    for size in sizes:
        while not sender.may_send(size):
            if on_the_way:
                returned = receiver.consumed(on_the_way.pop(0))
            else:
                raise AssertionError("everything was consumed, and the sender waits")
            if returned:
                sender.give_back(returned)
        before = sender.outstanding
        on_the_way.append(sender.spend(size))
        assert on_the_way[-1] == max(size, window // CREDIT_FRAMES)
        # What a small frame costs beyond its size may exceed the window.
        assert sender.outstanding <= window + window // CREDIT_FRAMES or before < window / 4
        assert before + size <= window or before < window / 4
        assert sender.outstanding == sum(on_the_way) + receiver._held
