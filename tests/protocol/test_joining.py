"""Small blocks of a frame, joined: the same runs and rows, and nothing damaged gets through."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.raw import all_rows
from upr_protocol.block import Block, check_block, make_runs, sealed
from upr_protocol.errors import CorruptBlockError
from upr_protocol.wire import joining
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.joining import joined_blocks
from upr_protocol.wire.v1 import types_pb2

Rows = list[tuple[bytes, bytes | None]]
START = 10
PAIR: Rows = [(b"key", b"value")]
rows_strategy = st.lists(
    st.tuples(st.binary(min_size=1, max_size=9), st.none() | st.binary(max_size=30)), max_size=6
)


def stored(
    partition: int,
    rows: Rows,
    gap: int = 0,
    *,
    times: bool = False,
    values: bool = True,
) -> types_pb2.Block:
    """A stored block of one run in which ``gap`` seqnos are missing before each row."""
    offsets = [(gap + 1) * (i + 1) for i in range(len(rows))]
    end = START + (offsets[-1] if offsets else 3)
    data = [value or b"" for _, value in rows]

    def ends(cells: list[bytes]) -> bytes:
        return np.array(list(accumulate(map(len, cells), initial=0)), "<i4").tobytes()

    block = Block(
        make_runs([partition], len(rows), START, end, end, 7),
        np.array(offsets, "<u4").tobytes() if gap else b"",
        bytes(value is None for _, value in rows) if None in [v for _, v in rows] else b"",
        ends([key for key, _ in rows]),
        b"".join(key for key, _ in rows),
        ends(data) if values else b"",
        b"".join(data) if values else b"",
        np.arange(len(rows), dtype="<i8").tobytes() if times else b"",
        0,
    )
    block = sealed(block)
    check_block(block)
    return block_to_message(block)


@given(st.data())
def test_joined_blocks_tell_what_the_single_ones_do(data: Any) -> None:
    messages = [
        stored(
            data.draw(st.integers(0, 5)),
            data.draw(rows_strategy),
            data.draw(st.integers(0, 2)),
            times=data.draw(st.booleans()),
        )
        for _ in range(data.draw(st.integers(1, 6)))
    ]
    apart = [block_from_message(message) for message in messages]
    joined = joined_blocks(messages)
    for block in joined:
        check_block(block)
    assert [run for b in joined for run in b.runs.tolist()] == [
        run for b in apart for run in b.runs.tolist()
    ]
    assert list(all_rows(joined)) == list(all_rows(apart))


def test_neighbours_of_ascending_partitions_become_one() -> None:
    messages = [stored(partition, PAIR) for partition in (1, 2, 5, 3, 4)]
    assert [len(block.runs) for block in joined_blocks(messages)] == [3, 2]


def test_large_and_keys_only_blocks_stay_by_themselves() -> None:
    large = stored(2, [(b"k", b"v" * (joining.JOINED_BYTES_MAX + 1))])
    bare = stored(3, [(b"k", b"")], values=False)
    messages = [stored(1, PAIR), large, bare, stored(4, PAIR)]
    assert [len(block.runs) for block in joined_blocks(messages)] == [1, 1, 1, 1]


@pytest.mark.parametrize("field", ["runs", "keys", "values", "key_offsets"])
def test_one_damaged_block_among_many_is_refused(field: str) -> None:
    messages = [stored(partition, PAIR) for partition in range(5)]
    data = bytearray(getattr(messages[3], field))
    data[-1] ^= 1
    setattr(messages[3], field, bytes(data))
    with pytest.raises(CorruptBlockError):
        joined_blocks(messages)
