"""Stored blocks made by hand, and what a reader of them must find."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.engine.buckets import partition_rows
from tests.model import ModelPartition, Row, State, apply
from tests.raw import all_rows, check_cells, with_cells
from upr.storage.blocks import BlockRange, Head
from upr.storage.compact import PurgeLimits
from upr.storage.keyspace import PRODUCER, ConsumerRow, PartitionRow, ProducerNumbers, ProducerRow
from upr.storage.read import read_blocks
from upr.storage.store import Identity, ReadRequest, Store
from upr_client.testing.memory import run_block
from upr_protocol.block import Block, sealed
from upr_protocol.wire.codec import decode_block, encode_block

Change = tuple[bytes, bytes | None]
TIME = 100
"""When every row was written that says nothing else."""


def store_of(folder: Path) -> Store:
    """Make an empty store with its 1024 rows."""
    store = Store(folder)
    store.create(Identity("b", 1), partition_rows())
    return store


def block_of(
    partition: int,
    start: int,
    rows: Sequence[Row],
    *,
    end: int | None = None,
    horizon: int | None = None,
    time: int = TIME,
) -> tuple[int, int, bytes]:
    """Encode one stored block; it ends at its last row, in a marker, unless told otherwise."""
    end = rows[-1].seqno if end is None else end
    block = run_block(partition, rows, start, end, horizon or end, time)
    if not rows:
        # As a compaction leaves it.
        block = sealed(replace(block, key_offsets=bytes(4), value_offsets=bytes(4)))
    return partition, end, encode_block(with_cells(block) if rows else block)


def numbers_of(rows: Mapping[int, ProducerRow], time: int) -> ProducerNumbers:
    """Build a producer's numbers from its rows by partition."""
    fields = [
        (p, r.number, r.failover_id, r.start_seqno, r.end_seqno) for p, r in sorted(rows.items())
    ]
    return ProducerNumbers(np.array(fields, PRODUCER), time)


def rows_of(first: int, *changes: tuple[bytes, bytes | None]) -> list[Row]:
    """Number changes from a seqno on."""
    return [Row(first + i, key, value) for i, (key, value) in enumerate(changes)]


def put(store: Store, *blocks: tuple[int, int, bytes]) -> None:
    """Store blocks as they are."""
    store.put_flush(blocks, {}, {})


def whole_range(store: Store, partition: int) -> BlockRange:
    """Return everything that a partition has stored."""
    return BlockRange(partition, tuple(store.heads(partition)))


def limits_of(
    passed: int, *, never: int | None = None, old: int = TIME, very_old: int = -1
) -> PurgeLimits:
    """The same limits for every partition."""
    return PurgeLimits(
        np.full(1024, passed, np.uint64),
        old,
        np.full(1024, passed if never is None else never, np.uint64),
        very_old,
    )


def stored_rows(store: Store, partition: int) -> list[Row]:
    """Return every stored row of a partition."""
    blocks = store.blocks(partition, [head.end for head in store.heads(partition)])
    found = list(map(decode_block, blocks))
    for block in found:
        check_cells(block)
    return [Row(*row[1:]) for row in all_rows(found)]


def check_reader(
    blocks: Iterable[Block],
    model: ModelPartition,
    at: int,
    state: State,
    horizon: int,
) -> tuple[int, State, int]:
    """Have a reader at a seqno go on with blocks, and compare its state at each marker that it may believe.

    Returns where it is then, what it has, and the horizon that it must reach.
    """
    state = dict(state)
    for block in blocks:
        run = block.runs[0]
        start, end, below = (int(run[name]) for name in ("start_seqno", "end_seqno", "horizon"))
        assert start == at, "a gap or a repeat"
        rows = [Row(*row[1:]) for row in all_rows([block])]
        assert all(start < row.seqno <= end for row in rows)
        apply(state, rows)
        at, horizon = end, max(horizon, below)
        if horizon == at:
            assert state == model.state_at(at), f"wrong at marker {at}"
    return at, state, horizon


def read_above(store: Store, partition: int, seqno: int) -> list[Block]:
    """Return what a reader at a seqno is sent, to the end."""
    (result,) = read_blocks(store, [ReadRequest(partition, seqno)], 1 << 30)
    if result.error is not None:
        raise result.error
    return [decode_block(one.data) for one in result.blocks]


def heads_of(*ends: int, size: int = 1, horizons: dict[int, int] | None = None) -> list[Head]:
    """Make heads that end at these seqnos, one row a seqno."""
    found, start = [], 0
    for end in ends:
        found.append(Head(start, end, (horizons or {}).get(end, end), end - start, size, size))
        start = end
    return found


def filled(store: Store, partition: int, *blocks: list[Change]) -> ModelPartition:
    """Store one block for each list of changes."""
    model = ModelPartition()
    for changes in blocks:
        start = model.high
        for key, value in changes:
            model.write(key, value)
        put(store, block_of(partition, start, model.rows[start:]))
    return model


def ends_of(store: Store, partition: int) -> list[int]:
    return [head.end for head in store.heads(partition)]


def consumers_of(store: Store) -> dict[bytes, dict[int, ConsumerRow]]:
    """Return the consumers' rows by name and partition."""
    rows: dict[bytes, dict[int, ConsumerRow]] = {}
    for name, partition, row in store.consumers():
        rows.setdefault(name, {})[partition] = row
    return rows


def put_rows(store: Store, rows: Mapping[int, PartitionRow]) -> None:
    """Store rows of partitions whole, which only the creation of a bucket and recovery do."""
    with store._writing() as txn:
        store._put_partitions(txn, rows)
