"""Thinning of markers and the history of them."""

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import MARKERS_MAX, MARKERS_NEWEST, SEQNO_MAX
from upr_protocol.position import MarkerHistory, check_markers, thin_markers

SEQNOS = st.one_of(st.integers(1, 300), st.integers(1, SEQNO_MAX))
MARKERS = st.lists(SEQNOS, unique=True, max_size=300).map(sorted)


def scales(markers: tuple[int, ...]) -> list[int]:
    return [(markers[-1] - marker).bit_length() for marker in markers]


@given(MARKERS)
def test_thinning_keeps_what_is_promised(markers: list[int]) -> None:
    newest = MARKERS_NEWEST
    thinned = thin_markers(markers)
    assert set(thinned) <= set(markers)
    assert list(thinned[-newest:]) == markers[-newest:]
    assert len(thinned) <= MARKERS_MAX
    assert len(thinned) >= min(2, len(markers))
    assert thinned[:1] == tuple(markers[:1])
    assert thin_markers(thinned) == thinned
    older = scales(thinned)[:-newest] if thinned else []
    assert len(set(older)) == len(older)
    # Nothing is lost without a neighbour of the same scale.
    if len(markers) > newest:
        assert set(older) == set(scales(tuple(markers))[:-newest])


def test_few_markers_stay() -> None:
    assert thin_markers(()) == ()
    assert thin_markers([5]) == (5,)
    assert thin_markers(range(1, 17)) == tuple(range(1, 17))


def test_the_bound_is_reached_and_not_passed() -> None:
    markers = [SEQNO_MAX - 2**power for power in range(47, 3, -1)]
    markers += range(SEQNO_MAX - 15, SEQNO_MAX + 1)
    assert thin_markers(markers) == tuple(markers)
    assert len(markers) == 60 <= MARKERS_MAX


@pytest.mark.parametrize("markers", [[2, 1], [1, 1], [-1], [2**48]])
def test_markers_are_checked(markers: list[int]) -> None:
    with pytest.raises(InvalidArgumentError):
        thin_markers(markers)
    with pytest.raises(InvalidArgumentError):
        check_markers(markers)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_long_history_stays_small_and_reaches_back_evenly(step: int) -> None:
    history = MarkerHistory()
    for count in range(1, 20_001):
        history.add(count * step)
        assert len(history._seqnos) <= 2 * MARKERS_MAX
        if count % 997 == 0:
            kept = history.as_tuple()
            assert len(kept) <= MARKERS_MAX
            assert kept[0] == step
            assert kept[-MARKERS_NEWEST:] == tuple(
                range((count - MARKERS_NEWEST + 1) * step, count * step + 1, step)
            )
            # However far a rollback goes, the stored marker before it is at most eight times as far: a power of two
            # for the scale, one for the next one, and one for what thinning at any time drops in between. Were the
            # newest of each scale kept instead of the oldest, the far scales would run dry.
            for back in range(MARKERS_NEWEST, count, 13):
                target = (count - back) * step
                at = bisect_right(kept, target)
                assert at
                assert count * step - kept[at - 1] <= 8 * back * step


@given(MARKERS)
def test_a_history_knows_the_markers_it_was_given(markers: list[int]) -> None:
    history = MarkerHistory(markers)
    assert history.as_tuple()[-MARKERS_NEWEST:] == tuple(markers[-MARKERS_NEWEST:])
    assert set(history.as_tuple()) <= set(markers)
    assert len(history.as_tuple()) <= MARKERS_MAX
    assert MarkerHistory(history.as_tuple()).as_tuple() == history.as_tuple()


def test_repeated_markers_and_0_are_ignored() -> None:
    assert MarkerHistory([0, 5, 5, 9, 9]).as_tuple() == (5, 9)


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=300))
def test_a_marker_that_was_not_stored_once_is_not_stored_later(
    steps: list[tuple[int, bool]],
) -> None:
    history, at = MarkerHistory(), 0
    offered: set[int] = set()
    gone: set[int] = set()
    for distance, stored in steps:
        at += distance
        history.add(at)
        offered.add(at)
        if stored:
            kept = set(history.as_tuple())
            assert not kept & gone
            gone |= offered - kept
