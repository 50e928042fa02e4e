"""Small blocks of a frame, joined: the same runs and rows, and nothing damaged gets through."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.raw import all_rows
from upr_client.testing.memory import run_block
from upr_protocol.block import check_block, sealed
from upr_protocol.errors import CorruptBlockError
from upr_protocol.wire import codec
from upr_protocol.wire.codec import block_from_message, block_to_message, joined_blocks
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
    told = [(START + offset, *row) for offset, row in zip(offsets, rows, strict=True)]
    block = run_block(partition, told, START, end, end, 7)
    block = block if values else replace(block, value_offsets=b"", values=b"")
    block = sealed(
        replace(block, times=np.arange(len(rows), dtype="<i8").tobytes() if times else b"")
    )
    check_block(block)
    return block_to_message(block)


def sizes(messages: list[types_pb2.Block]) -> list[int]:
    blocks, _ = joined_blocks(messages, np.zeros(len(messages), np.uint32))
    return [len(block.runs) for block in blocks]


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
    joined, tokens = joined_blocks(messages, np.arange(len(messages), dtype=np.uint32))
    for block in joined:
        check_block(block)
    # Each run under its own token, and those of one partition in their order.
    runs = [run for block in joined for run in block.runs.tolist()]
    assert runs == [apart[token].runs.tolist()[0] for token in tokens.tolist()]
    assert sorted(tokens.tolist()) == list(range(len(messages)))
    for partition in range(6):
        assert [r for r in all_rows(joined) if r[0] == partition] == [
            r for r in all_rows(apart) if r[0] == partition
        ]
        of_it = [t for t in tokens.tolist() if apart[t].runs["partition"][0] == partition]
        assert of_it == sorted(of_it)


def test_each_partition_s_first_blocks_become_one_then_its_second() -> None:
    messages = [stored(partition, PAIR) for partition in (7, 7, 1, 2, 2, 5, 3, 7)]
    assert sizes(messages) == [5, 2, 1]


def test_large_and_keys_only_blocks_stay_by_themselves() -> None:
    large = stored(2, [(b"k", b"v" * (codec.JOINED_BYTES_MAX + 1))])
    bare = stored(3, [(b"k", b"")], values=False)
    messages = [stored(1, PAIR), large, bare, stored(4, PAIR)]
    assert sizes(messages) == [1, 1, 1, 1]


@pytest.mark.parametrize("field", ["runs", "keys", "values", "key_offsets"])
def test_one_damaged_block_among_many_is_refused(field: str) -> None:
    messages = [stored(partition, PAIR) for partition in range(5)]
    data = bytearray(getattr(messages[3], field))
    data[-1] ^= 1
    setattr(messages[3], field, bytes(data))
    with pytest.raises(CorruptBlockError):
        joined_blocks(messages, np.zeros(5, np.uint32))
