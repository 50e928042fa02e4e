"""A closed data directory with something of everything in it, made through storage alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.storage.stored_blocks import numbers_of, put_rows
from upr.service.buckets.catalog import create_bucket
from upr.storage.directory import DataDirectory
from upr.storage.journal import Commit, Journal, JournalEntry, NumberedWrite
from upr.storage.keyspace import (
    ConsumerRow,
    CutRow,
    PartitionRow,
    Pin,
    ProducerRow,
    hashes_of,
    pack_hashes,
)
from upr.storage.store import Store
from upr_client.testing.memory import run_block
from upr_protocol.block import Block
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import encode_block

NEVER = 2**62
"""When the leases of cuts end, microseconds since the epoch."""


def block_of(
    partition: int,
    start: int,
    end: int,
    *,
    horizon: int | None = None,
    seqnos: Sequence[int] | None = None,
    value: bytes = b"v",
) -> Block:
    """One run ``(start, end]`` with a row at each of ``seqnos``, by default at all."""
    told = range(start + 1, end + 1) if seqnos is None else seqnos
    rows = [(seqno, b"key %d" % seqno, value) for seqno in told]
    return run_block(partition, rows, start, end, end if horizon is None else horizon, 1)


class Closed:
    """A data directory under ``folder`` with the one bucket ``default``; ``store`` and ``journal`` are reopened."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        directory = DataDirectory(folder)
        self.bucket = create_bucket(directory, "default")
        directory.close()
        self.version = int(self.bucket.name, 16)

    @property
    def data_file(self) -> Path:
        return self.bucket / "store" / "data.mdb"

    @property
    def journal_files(self) -> list[Path]:
        return sorted((self.bucket / "journal").iterdir())

    def store(self) -> Store:
        return Store(self.bucket / "store")

    def row(self, partition: int) -> PartitionRow:
        """What the store knows of a partition."""
        store = self.store()
        found = store.partitions()[partition]
        store.close()
        assert isinstance(found, PartitionRow)
        return found

    def put(self, *blocks: Block, **row: Any) -> None:
        """Store blocks of one partition; its row says what they say, and what else is given."""
        partition = int(blocks[0].runs["partition"][0])
        old = self.row(partition)
        store = self.store()
        horizon, complete = old.horizon, old.complete
        for block in blocks:
            end = int(block.runs["end_seqno"][0])
            horizon = max(horizon, int(block.runs["horizon"][0]))
            complete = end if horizon == end else complete
        told = {"stored_high": end, "complete": complete, "horizon": horizon}
        rows = {partition: replace(old, **{**told, **row})}
        ends = [int(block.runs["end_seqno"][0]) for block in blocks]
        store.put_flush(
            [(partition, e, encode_block(b)) for e, b in zip(ends, blocks, strict=True)],
            {},
            {},
            [
                pack_hashes(
                    partition,
                    int(b.runs["start_seqno"][0]),
                    e,
                    hashes_of(np.frombuffer(b.key_offsets or bytes(4), "<i4").astype(int), b.keys),
                )
                for e, b in zip(ends, blocks, strict=True)
            ],
        )
        put_rows(store, rows)
        store.clear_proof()
        store.close()

    def journal(self, *commits: tuple[int, Sequence[Block]]) -> None:
        """Append commits, given as number and blocks."""
        journal = Journal(self.bucket / "journal", self.version)
        list(journal.replay())
        for number, blocks in commits:
            entries = tuple(
                JournalEntry(encode_block(block), (NumberedWrite(b"p", number),))
                for block in blocks
            )
            journal.append(Commit(number, entries))
        journal.close()


def filled(folder: Path, seed: int) -> Closed:
    """A directory with blocks small and large, freed pages, rows of every table, and a journal."""
    rng = random.Random(seed)
    closed = Closed(folder)
    highs = dict.fromkeys(range(PARTITIONS), 0)
    for _ in range(3):
        for partition in rng.sample(range(PARTITIONS), 12):
            start = highs[partition]
            end = highs[partition] = start + rng.randint(1, 40)
            value = rng.randbytes(rng.choice([1, 10, 100, 2000]))
            closed.put(block_of(partition, start, end, value=value))
    store = closed.store()
    rows = store.partitions()
    chosen = rng.sample([p for p in highs if highs[p]], 10)
    pins: dict[int, Pin] = {}
    for partition in chosen:
        row = rows[partition]
        assert isinstance(row, PartitionRow)
        failover_id = row.log.newest.failover_id
        high = highs[partition]
        pins[partition] = Pin(failover_id, high)
        store.put_consumers({(b"indexer", partition): ConsumerRow(1, failover_id, high, 5)})
        told = numbers_of({partition: ProducerRow(3, failover_id, 0, high)}, 9)
        store.put_flush([], {}, {b"loader": told})
    whole = np.array([max(highs[p] - 1, 0) for p in range(PARTITIONS)], np.uint64)
    store.put_joining(whole)
    for partition, pin in pins.items():
        for number, end in ((2, pin.seqno - 1), (3, pin.seqno)):
            told = numbers_of({partition: ProducerRow(number, pin.failover_id, 0, end)}, 9)
            store.put_flush([], {}, {b"joined": told}, counts=lambda *_: True)
    store.put_cuts({b"nightly": CutRow(1, NEVER, 1, pins)})
    store.close()
    for number in range(1, 9):
        partition = rng.choice(chosen)
        start = highs[partition]
        end = highs[partition] = start + rng.randint(1, 20)
        closed.journal((number, [block_of(partition, start, end, value=rng.randbytes(50))]))
    return closed
