"""The ring of keys received last: what it says is complete is complete."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.test_consumer_model import block_of
from tests.model import Row, Run
from upr_client.changes.events import RecentKeys
from upr_protocol.block import join_blocks


def run_of(start: int, end: int) -> Run:
    return Run(
        start, end, end, [Row(s, b"key %d" % (s % 7), b"v") for s in range(start + 1, end + 1)]
    )


def test_the_keys_above_a_seqno_each_once() -> None:
    keys = RecentKeys()
    keys.add([block_of(3, run_of(0, 5)), block_of(4, run_of(0, 2))])
    keys.add([block_of(3, run_of(5, 9))])
    assert keys.above(3, 7) == ((b"key 1", b"key 2"), True)
    assert keys.above(3, 0) == (tuple(b"key %d" % (s % 7) for s in range(1, 8)), True)
    assert keys.above(5, 0) == ((), True)


def test_what_was_received_before_it_began_is_not_known() -> None:
    keys = RecentKeys()
    keys.begin(np.array([3]), np.array([5], np.uint64))
    keys.add([block_of(3, run_of(5, 6))])
    assert keys.above(3, 5) == ((b"key 6",), True)
    assert keys.above(3, 4) == ((b"key 6",), False)


def test_nothing_is_kept_without_room() -> None:
    keys = RecentKeys(0)
    keys.add([block_of(3, run_of(0, 5))])
    assert keys.above(3, 0) == ((), False)
    assert keys.above(3, 5) == ((), True)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((3, 4, 5)), st.integers(1, 6), st.booleans()), max_size=20),
    st.integers(0, 2000),
)
def test_against_everything_ever_received(steps: list[tuple[int, int, bool]], limit: int) -> None:
    keys = RecentKeys(limit)
    held: dict[int, list[int]] = {3: [], 4: []}
    ends: dict[int, list[int]] = {3: [0], 4: [0]}
    for which, count, back in steps:
        # Of 5 both get as many, in one block.
        partitions = [3, 4] if which == 5 else [which]
        received = []
        for partition in partitions:
            start = ends[partition][-1]
            if not back:
                received.append(block_of(partition, run_of(start, start + count)))
                held[partition] += range(start + 1, start + count + 1)
                ends[partition].append(start + count)
            elif start:
                ends[partition].pop()
                at = ends[partition][-1]
                held[partition] = [s for s in held[partition] if s <= at]
                keys.drop_above(partition, at)
        if received:
            keys.add([join_blocks(received)])
        for partition, its_ends in ends.items():
            for at in its_ends:
                told, complete = keys.above(partition, at)
                true = {b"key %d" % (s % 7) for s in held[partition] if s > at}
                assert set(told) <= true
                assert not complete or set(told) == true
