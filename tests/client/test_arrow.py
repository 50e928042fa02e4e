"""Changes as Arrow record batches."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.client.scripted import run_block
from upr_client import ChangeBatch, Client
from upr_client.arrow import record_batch, schema
from upr_client.changes.events import block_changes
from upr_client.errors import MissingPackageError
from upr_protocol.block import Block, build_block, check_block, make_runs, sealed


def many_runs(rows: int) -> Block:
    """A numbered block of many partitions, every third row a delete."""
    keys = [b"key-%d" % row for row in range(rows)]
    block = build_block(keys, [None if row % 3 == 1 else b"v" * (row % 9) for row in range(rows)])
    counts = block.runs["count"].astype(np.int64)
    starts = block.runs["partition"].astype(np.int64) * 2**37
    ends = starts + counts
    runs = make_runs(
        block.runs["partition"], counts, starts, ends, ends, counts + 1_700_000_000_000_000
    )
    block = sealed(replace(block, runs=runs))
    check_block(block)
    return block


def check_same(batch: pa.RecordBatch, blocks: list[Block]) -> None:
    batch.validate(full=True)
    assert batch.schema == schema()
    columns = batch.to_pydict()
    names = ("partition", "seqno", "deleted", "key", "value")
    got = list(zip(*(columns[name] for name in names), strict=True))
    changes = [change for block in blocks for change in block_changes(block)]
    assert got == [(c.partition, c.seqno, c.op == "delete", c.key, c.value) for c in changes]
    times = np.concatenate([np.repeat(b.runs["time"], b.runs["count"]) for b in blocks])
    assert batch.column("time").cast(pa.int64()).to_pylist() == times.tolist()


@pytest.mark.parametrize(
    "block",
    [
        many_runs(1),
        many_runs(1000),
        run_block(3, 5, 12),
        run_block(3, 5, 9),
        run_block(3, 0, 40, 50, [4, 17, 40]),
        run_block(3, 0, 5, None, []),
        replace(run_block(3, 5, 12), value_offsets=b"", values=b""),
    ],
    ids=["one", "many", "deletes", "sets", "gaps", "empty", "keys only"],
)
def test_a_block_as_it_is(block: Block) -> None:
    batch = record_batch(block)
    check_same(batch, [block])
    check_same(ChangeBatch([block]).to_arrow(), [block])
    if block.keys:
        assert batch.column("key").buffers()[2].address == pa.py_buffer(block.keys).address
    if block.values:
        assert batch.column("value").buffers()[2].address == pa.py_buffer(block.values).address


def test_several_blocks_become_one_batch() -> None:
    blocks = [run_block(1, 0, 8), many_runs(300), run_block(2, 0, 4, None, []), run_block(2, 4, 9)]
    check_same(ChangeBatch(blocks).to_arrow(), blocks)
    blocks.insert(2, run_block(4, 0, 40, 50, [4, 17, 40]))
    check_same(ChangeBatch(blocks).to_arrow(), blocks)


def test_several_blocks_of_keys_only() -> None:
    blocks = [run_block(1, 0, 8), run_block(2, 4, 9)]
    blocks = [replace(block, value_offsets=b"", values=b"") for block in blocks]
    check_same(ChangeBatch(blocks).to_arrow(), blocks)


def test_a_batch_without_changes() -> None:
    batch = ChangeBatch([]).to_arrow()
    assert (batch.num_rows, batch.schema) == (0, schema())


def test_the_times_of_a_merged_block() -> None:
    block = run_block(1, 0, 3)
    times = np.array([5, 7, 2**53], "<i8")
    batch = record_batch(sealed(replace(block, times=times.tobytes())))
    batch.validate(full=True)
    assert batch.column("time").cast(pa.int64()).to_pylist() == times.tolist()
    other = run_block(2, 0, 2)
    joined = ChangeBatch([other, sealed(replace(block, times=times.tobytes()))]).to_arrow()
    joined.validate(full=True)
    assert joined.column("time").cast(pa.int64()).to_pylist() == [1, 1, *times.tolist()]


def test_without_pyarrow_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'upr-stream\[arrow\]'"):
        ChangeBatch([run_block(1, 0, 3)]).to_arrow()


def test_the_first_batch_imports_nothing_that_pyarrow_does_not() -> None:
    code = (
        "import sys, pyarrow; from upr_client.arrow import record_batch; "
        "from tests.client.scripted import run_block; before = set(sys.modules); "
        "record_batch(run_block(1, 0, 3)); print(set(sys.modules) - before)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set()\n"


def test_changes_of_a_server(target: str, tmp_path: Path) -> None:
    rows = {b"key-%d" % row: b"v%d" % row for row in range(3000)}
    with Client(target) as client:
        bucket = client.bucket()
        bucket.write_many(rows.items())
        bucket.write_many((b"key-%d" % row, None) for row in range(0, 3000, 10))
        with bucket.changes(until="now") as changes:
            table = pa.Table.from_batches([batch.to_arrow() for batch in changes.batches()])
    table.validate(full=True)
    state: dict[bytes, bytes | None] = {}
    for row in table.to_pylist():
        assert row["deleted"] == (row["value"] is None)
        state[row["key"]] = row["value"]
    expected = {key: None if int(key[4:]) % 10 == 0 else value for key, value in rows.items()}
    assert state == expected
