"""Key prefixes and plain rows of blocks, against what a loop over rows makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.raw import check_cells, with_cells
from upr.storage import read
from upr.storage.read import Showing, plain_messages, with_prefix
from upr_protocol.block import (
    Block,
    block_keys,
    block_ops,
    block_seqnos,
    block_values,
    check_block,
    make_runs,
    sealed,
)
from upr_protocol.errors import CorruptBlockError
from upr_protocol.wire.codec import encode_block
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

SEQNO = st.sampled_from([0, 1, 126, 127, 128, 2**14, 2**35 - 1, 2**47])
KEY = st.one_of(
    st.binary(min_size=1, max_size=6),
    st.sampled_from([b"user/1", b"user/2", b"user", b"\0\0", b"\0", b"\xff\xff", b"u" * 130]),
)
VALUE = st.one_of(st.none(), st.binary(max_size=5), st.just(b"v" * 200))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A numbered block of some runs, with gaps where a superseded row was, with or without times."""
    count = draw(st.integers(1, 4))
    partitions = sorted(draw(st.sets(st.integers(0, 1023), min_size=count, max_size=count)))
    rows: list[tuple[int, bytes, bytes | None, int]] = []
    table = []
    for partition in partitions:
        start = draw(SEQNO)
        kept = draw(st.lists(st.booleans(), min_size=1, max_size=6))
        offsets = [i + 1 for i, keep in enumerate(kept) if keep]
        horizon = start + len(kept) + draw(st.sampled_from([0, 3]))
        table.append((partition, len(offsets), start, start + len(kept), horizon))
        rows += [(offset, draw(KEY), draw(VALUE), draw(SEQNO)) for offset in offsets]
    partitions, counts, starts, ends, horizons = (list(c) for c in zip(*table, strict=True))
    runs = make_runs(partitions, counts, starts, ends, horizons, draw(SEQNO))
    if not rows:
        return sealed(Block(runs, b"", b"", b"", b"", b"", b"", b"", 0))
    dense = all(end - start in (0, held) for _, held, start, end, _ in table)
    values = [value or b"" for _, _, value, _ in rows]
    return sealed(
        Block(
            runs,
            b"" if dense else np.array([row[0] for row in rows], "<u4").tobytes(),
            bytes(row[2] is None for row in rows) if draw(st.booleans()) else b"",
            np.cumsum([0, *(len(row[1]) for row in rows)]).astype("<i4").tobytes(),
            b"".join(row[1] for row in rows),
            np.cumsum([0, *map(len, values)]).astype("<i4").tobytes(),
            b"".join(values),
            np.array([row[3] for row in rows], "<i8").tobytes() if draw(st.booleans()) else b"",
            0,
        )
    )


def rows_of(block: Block) -> list[tuple[int, int, bytes, bytes | None, int, int]]:
    """(run number, seqno, key, value, op, time) of each row."""
    if not block.rows:
        return []
    numbers = np.repeat(np.arange(len(block.runs)), block.runs["count"]).tolist()
    times = np.repeat(block.runs["time"], block.runs["count"]).tolist()
    if block.times:
        times = np.frombuffer(block.times, "<i8").tolist()
    columns = (block_seqnos, block_keys, block_values, block_ops)
    return list(zip(numbers, *(column(block) for column in columns), times, strict=True))


@given(blocks(), st.one_of(KEY, st.sampled_from([b"u", b"user/", b"\xff"])))
def test_a_prefix_leaves_runs_as_they_are_and_the_rows_that_have_it(
    block: Block, prefix: bytes
) -> None:
    block = with_cells(block) if block.rows else block
    cut = with_prefix(block, prefix)
    check_block(cut)
    check_cells(cut)
    for name in ("partition", "start_seqno", "end_seqno", "horizon", "time"):
        assert (cut.runs[name] == block.runs[name]).all()
    assert rows_of(cut) == [row for row in rows_of(block) if row[2].startswith(prefix)]
    keys = Showing(keys_only=True, key_prefix=prefix).of(block)
    check_block(keys)
    assert block_keys(keys) == (block_keys(cut) if cut.rows else [])[: keys.rows]
    assert keys.values == b""
    assert not keys.further


def parsed(messages: list[bytes]) -> list[wire.PlainRun]:
    frames = [wire.FollowResponse.FromString(data).frame for data in messages]
    return [run for frame in frames for run in frame.plain_runs]


def as_rows(runs: list[wire.PlainRun]) -> list[tuple[int, bytes, bytes | None, int, int]]:
    return [
        (r.seqno, r.key, r.value if r.HasField("value") else None, int(r.deleted), r.time)
        for run in runs
        for r in run.rows
    ]


@given(blocks(), st.booleans(), st.integers(1, 300))
def test_plain_rows_are_the_blocks_rows_and_not_larger_than_was_computed(
    block: Block, keys_only: bool, token: int
) -> None:
    block = Showing(keys_only=keys_only).of(block)
    tokens = np.arange(token, token + len(block.runs), dtype=np.uint32)
    (message,) = plain_messages([encode_block(block)], tokens.astype("<u4").tobytes(), 77)
    assert wire.FollowResponse.FromString(message).frame.credit_bytes == 77
    runs = parsed([message])
    assert [run.token for run in runs] == tokens.tolist()
    fields = ("partition", "start_seqno", "end_seqno", "horizon", "time", "count")
    assert [
        (run.partition, run.start_seqno, run.end_seqno, run.horizon, run.time, len(run.rows))
        for run in runs
    ] == [tuple(int(run[name]) for name in fields) for run in block.runs]
    assert as_rows(runs) == [row[1:] for row in rows_of(block)]
    sizes = [len(wire.PlainRun(rows=[row]).SerializeToString()) for run in runs for row in run.rows]
    computed = read._row_bytes(block).tolist()
    assert all(size <= most for size, most in zip(sizes, computed, strict=True))


def test_a_large_run_becomes_several_with_one_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "PLAIN_RUN_BYTES", 300)
    monkeypatch.setattr(read, "MESSAGE_BYTES", 700)
    count = 100
    block = sealed(
        Block(
            make_runs([3, 9], [60, 40], [5, 0], [65, 40], [65, 44], 77),
            b"",
            b"",
            (np.arange(count + 1) * 4).astype("<i4").tobytes(),
            b"".join(b"%04d" % i for i in range(count)),
            (np.arange(count + 1) * 10).astype("<i4").tobytes(),
            b"0123456789" * count,
            b"",
            0,
        )
    )
    tokens = np.array([130, 2], np.uint32)
    messages = list(plain_messages([encode_block(block)], tokens.tobytes(), 77, b"p" * 12))
    runs = parsed(messages)
    assert len(messages) > 2
    assert max(map(len, messages)) < 1100
    frames = [wire.FollowResponse.FromString(data).frame for data in messages]
    assert [frame.purge_seqnos for frame in frames] == [b"p" * 12] + [b""] * (len(frames) - 1)
    assert [frame.credit_bytes for frame in frames] == [0] * (len(frames) - 1) + [77]
    for partition, start, end, horizon in ((3, 5, 65, 65), (9, 0, 40, 44)):
        mine = [run for run in runs if run.partition == partition]
        assert len(mine) > 3
        assert [run.start_seqno for run in mine] == [start, *(r.end_seqno for r in mine[:-1])]
        assert mine[-1].end_seqno == end
        assert {run.horizon for run in mine} == {horizon}
        assert [row.seqno for run in mine for row in run.rows] == list(range(start + 1, end + 1))
        assert all(run.rows[-1].seqno == run.end_seqno for run in mine)


def test_the_largest_write_of_tiny_rows_fits_into_messages() -> None:
    count = 2**18
    block = sealed(
        Block(
            make_runs([1023], [count], [2**47], [2**47 + count], [2**47 + count], 2**50),
            b"",
            b"",
            np.arange(count + 1).astype("<i4").tobytes(),
            b"k" * count,
            np.zeros(count + 1, "<i4").tobytes(),
            b"",
            b"",
            0,
        )
    )
    tokens = np.array([1], np.uint32)
    messages = list(plain_messages([encode_block(block)], tokens.tobytes(), 0))
    assert max(map(len, messages)) < 17 * 2**20
    assert sum(len(run.rows) for run in parsed(messages)) == count


def test_a_block_that_changed_in_memory_is_not_made_into_rows() -> None:
    offsets = np.array([0, 1], "<i4").tobytes()
    runs = make_runs([5], [1], [0], [1], [1], 9)
    data = bytearray(
        encode_block(sealed(Block(runs, b"", b"", offsets, b"k", offsets, b"v", b"", 0)))
    )
    data[data.index(b"v")] ^= 1
    with pytest.raises(CorruptBlockError):
        list(plain_messages([bytes(data)], b"\1\0\0\0", 0))
