"""Histories filled a frame at a time keep what those filled marker by marker keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol import position
from upr_protocol.limits import MARKERS_MAX, MARKERS_NEWEST
from upr_protocol.position import MarkerHistories, MarkerHistory

steps = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2**20)), max_size=60), max_size=30
)


@given(steps, st.integers(1, 40))
def test_the_same_markers_are_kept(frames: list[list[tuple[int, int]]], gathered: int) -> None:
    seqnos = dict.fromkeys(range(4), 0)
    all_markers: dict[int, list[int]] = {p: [] for p in range(4)}
    batched = MarkerHistories()
    single = {p: MarkerHistory() for p in range(4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(position, "GATHERED_MAX", gathered)
        for frame in frames:
            partitions, ends = [], []
            for partition, step in frame:
                seqnos[partition] += step
                partitions.append(partition)
                ends.append(seqnos[partition])
                single[partition].add(seqnos[partition])
                all_markers[partition].append(seqnos[partition])
            batched.add(np.array(partitions, np.int64), np.array(ends, np.uint64))
    for partition, history in single.items():
        kept, markers = batched.of(partition), all_markers[partition]
        assert (
            kept[-MARKERS_NEWEST:]
            == tuple(markers[-MARKERS_NEWEST:])
            == history.as_tuple()[-MARKERS_NEWEST:]
        )
        assert set(kept) <= set(markers)
        assert len(kept) <= MARKERS_MAX
        # Rolling back to any place costs at most four times the distance that it must.
        for marker in markers:
            back = max(m for m in kept if m <= marker)
            assert seqnos[partition] - back <= max(4 * (seqnos[partition] - marker), 1)


def test_replacing_forgets_what_was_gathered() -> None:
    batched = MarkerHistories()
    batched.add(np.array([1, 2]), np.array([5, 6], np.uint64))
    batched.replace(np.array([1, 3]), np.array([1, 2]), np.array([3, 7, 9], np.uint64))
    batched.add(np.array([3, 3]), np.array([9, 11], np.uint64))
    assert [batched.of(p) for p in range(5)] == [(), (3,), (6,), (7, 9, 11), ()]
