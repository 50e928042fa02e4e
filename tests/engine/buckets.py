"""Buckets without a disk: how they are made, and what is done to them step by step."""

from collections.abc import Sequence
from dataclasses import replace

from upr.engine.bucket import Bucket, FlushPlan, Written
from upr.engine.partitions import ACTIVE, Partitions
from upr.engine.producers import ProducerCall
from upr.engine.recovery import recover
from upr.storage.blocks import Encoded
from upr.storage.journal import Commit
from upr.storage.keyspace import PartitionRow, ProducerRow
from upr.storage.store import Identity
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import encode_block

MINE, OTHER = 5, 6


def partition_rows(state: int = ACTIVE, epoch: int = 1) -> dict[int, PartitionRow]:
    """Return the rows of partitions that have nothing; the id of each is one above its number."""
    return {
        p: PartitionRow(state, epoch, 0, 0, 0, FailoverLog.born(p + 1)) for p in range(PARTITIONS)
    }


def bucket(state: int = ACTIVE, epoch: int = 1) -> Bucket:
    rows = partition_rows(state, epoch)
    return Bucket(Identity("b", 1), Partitions.from_rows(list(rows.values())), 1, proven=False)


def with_stored(high: int) -> Bucket:
    """Return a bucket with so much of MINE in its store."""
    b = bucket()
    for column in (b.partitions.stored, b.partitions.high, b.partitions.durable):
        column[MINE] = high
    return b


def stretch_block(start: int, end: int, horizon: int) -> Encoded:
    """Return a stored block of MINE."""
    rows = range(start + 1, end + 1)
    block = build_block([b"%d" % i for i in rows], [b"v"] * len(rows))
    runs = make_runs([MINE], len(rows), start, end, horizon, 1)
    block = sealed(replace(block, runs=runs))
    return Encoded(runs, encode_block(block))


def write(to: Bucket, partition: int, value: bytes = b"v") -> None:
    block = sealed(replace(build_block([b"k"], [value]), runs=make_runs([partition], [1])))
    to.write(block, b"", None, 0, 1)


def commit(of: Bucket) -> None:
    while (taken := of.take_commit()) is not None:
        of.commit_done(taken)


def flush(of: Bucket) -> list[tuple[int, int, bytes]]:
    plan = of.begin_flush()
    assert isinstance(plan, FlushPlan)
    blocks: list[tuple[int, int, bytes]] = []
    for part in plan.prepare():
        merged = plan.merge(part)
        blocks += merged.blocks
        of.slice_stored(merged)
    of.end_flush(complete=True)
    return blocks


class Server:
    """A bucket, what is stored of it, and its journal."""

    def __init__(self) -> None:
        self.ids = iter(range(10**6, 10**9))
        self.rows = partition_rows()
        self.stored: dict[bytes, dict[int, ProducerRow]] = {}
        self.commits: list[Commit] = []
        self.bucket = bucket()

    def open(self, name: bytes = b"p") -> ProducerCall:
        stored = self.stored.get(name, {})
        return self.bucket.open_producer(name, max((r.number for r in stored.values()), default=0))

    def write(
        self, call: ProducerCall, number: int, parts: Sequence[int], key: bytes = b"k"
    ) -> Written:
        """Write a row of that key to each of the partitions."""
        rows = [key] * len(parts)
        block = sealed(replace(build_block(rows, rows), runs=make_runs(parts, [1] * len(parts))))
        stored = self.stored.get(call.name, {})
        return self.bucket.write(block, call.name, call, number, 1, stored)

    def high(self, partition: int) -> int:
        return int(self.bucket.partitions.high[partition])

    def commit(self) -> None:
        commit = self.bucket.take_commit()
        if commit is not None:
            self.commits.append(commit)
            self.bucket.commit_done(commit)

    def flush(self, slices: int = 1024) -> None:
        """Store so many slices of the tail."""
        plan = self.bucket.begin_flush()
        if plan is None:
            return
        parts = plan.prepare()
        for part in parts[:slices]:
            merged = plan.merge(part)
            for name, numbers in plan.producer_rows(part, merged).items():
                for partition, *fields in numbers.table.tolist():
                    self.stored.setdefault(name, {})[partition] = ProducerRow(*fields)
            self.bucket.slice_stored(merged)
            self.rows.update({p: self.bucket.partitions.row(p) for p in merged.ends})
        through = self.bucket.end_flush(slices >= len(parts))
        self.commits = [commit for commit in self.commits if commit.number > through]

    def crash(self) -> None:
        found = recover(
            self.rows, lambda _: [], self.commits, proven=None, new_id=lambda: next(self.ids)
        )
        self.rows.update(found.rows)
        self.bucket = Bucket(Identity("b", 1), found.partitions, found.next_commit, proven=True)
        self.bucket.recovered(found.entries)
        self.bucket.proven = False
