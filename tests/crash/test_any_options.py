"""Random options of Follow calls beside writes, merges, purges and kills: each answer is compared with the whole history."""

import asyncio
import random
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.raw import RawClient, all_rows, start_at
from tests.service.keys import some_keys
from tests.service.test_showing import plain_value
from upr_protocol.block import build_block
from upr_protocol.wire.codec import block_from_message, block_to_message, decode_runs
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

pytestmark = [pytest.mark.crash, pytest.mark.long]

ROUNDS = 12
PARTITIONS = (7, 8, 900)
KEYS = [key for partition in PARTITIONS for key in some_keys(partition, 12)]
PREFIXES = sorted({KEYS[0][:1], KEYS[-1][:2], b"none"})
OPTIONS = ("--tail-bytes", "300000", "--flush-seconds", "0.2")
AGES = ("--tombstone-age", "300ms", "--purge-hold", "900ms")


@dataclass
class Read:
    """What one Follow call was sent of a partition, between ``start`` and its end.

    Attributes:
        runs: (start, end, horizon), oldest first.
        rows: key and value by seqno; None without a value.
    """

    start: int
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    rows: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)


class World:
    """A server, and all that was ever written to it: key, value and time by partition, at seqno - 1."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.history: dict[int, list[tuple[bytes, bytes | None, int]]] = {p: [] for p in PARTITIONS}
        self.seen: set[str] = set()
        self._writing = asyncio.Lock()

    async def write(self, client: RawClient) -> None:
        async with self._writing:
            await self._write(client)

    async def _write(self, client: RawClient) -> None:
        keys = self.rng.choices(KEYS, k=self.rng.choice([1, 5, 40]))
        sizes = [self.rng.choice([-1, 0, 20, 3000]) for _ in keys]
        block = build_block(keys, [None if n < 0 else self.rng.randbytes(n) for n in sizes])
        writer = await client.writer()
        await writer.send_block(block_to_message(block))
        result = await writer.result()
        await writer.close()
        rows = all_rows([block])
        for run in decode_runs(result.runs):
            own, rows = rows[: run["count"]], rows[run["count"] :]
            history = self.history[int(run["partition"])]
            assert len(history) == run["start_seqno"]
            history += [(key, value, int(run["time"])) for _, _, key, value in own]

    def _starts(self, ids: dict[int, int], highs: dict[int, int]) -> list[wire.StartPartition]:
        kind = self.rng.choice(["zero", "position", "position", "now", "time"])
        times = [row[2] for rows in self.history.values() for row in rows]
        since = self.rng.choice(times) + self.rng.choice([-1, 0, 1])
        found = []
        for partition in self.rng.sample(PARTITIONS, self.rng.randint(1, len(PARTITIONS))):
            more: dict[str, Any] = {}
            if kind == "position" and highs[partition]:
                seqno = self.rng.randint(1, highs[partition])
                more = {"seqno": seqno, "failover_id": ids[partition], "data_id": ids[partition]}
            elif kind in ("now", "time"):
                more = {"from_now": True} if kind == "now" else {"from_time": since}
            found.append(start_at(partition, until_now=True, **more))
        return found

    async def follow(self, client: RawClient) -> None:
        """Read with random options, and compare."""
        infos = {info.partition: info for info in await client.partitions(*PARTITIONS)}
        highs = {p: len(self.history[p]) for p in PARTITIONS}
        options = {
            "key_prefix": self.rng.choice([b"", b"", *PREFIXES]),
            "keys_only": self.rng.random() < 0.3,
            "plain_rows": self.rng.random() < 0.4,
            "accept_zstd": self.rng.random() < 0.5,
            "credit_bytes": self.rng.choice([1, 5000, 100_000, 2**22]),
            "stability": self.rng.choice([types.STABILITY_DISK, types.STABILITY_MEMORY]),
        }
        starts = self._starts({p: one.failover_id for p, one in infos.items()}, highs)
        call = await client.follow(**options)
        reads: dict[int, Read] = {}
        for start, answer in zip(starts, await call.start(*starts), strict=True):
            if answer.HasField("rollback"):
                assert answer.rollback.rule == "below_purge"
            else:
                started = answer.started
                at = started.start_seqno if started.HasField("start_seqno") else start.seqno
                reads[answer.partition] = Read(at)
        purged: set[int] = set()
        left = len(reads)
        while left:
            message = await call.read()
            self._take(message.frame, reads)
            left -= len(message.ended.streams)
            if message.ended.problem.reason == "PURGED":
                purged |= {stream.partition for stream in message.ended.streams}
        await call.close()
        async with self._writing:
            # The history has what was read of a write that was not answered yet.
            pass
        after = {info.partition: info.purge_seqno for info in await client.partitions(*PARTITIONS)}
        since = {
            start.partition: start.from_time for start in starts if start.HasField("from_time")
        }
        for partition in reads.keys() - purged:
            at_least = 0 if starts[0].from_now else highs[partition]
            self.check(partition, reads[partition], options, at_least, after[partition])
            if partition in since:
                self._check_beginning(partition, reads[partition].start, since[partition])

    def _take(self, frame: wire.Frame, reads: dict[int, Read]) -> None:
        blocks = [block_from_message(one) for one in frame.blocks]
        for block in blocks:
            for run in block.runs:
                numbers = [int(run[name]) for name in ("start_seqno", "end_seqno", "horizon")]
                reads[int(run["partition"])].runs.append((numbers[0], numbers[1], numbers[2]))
        for partition, seqno, key, value in all_rows(blocks):
            reads[partition].rows[seqno] = (key, value)
        for plain in frame.plain_runs:
            read = reads[plain.partition]
            read.runs.append((plain.start_seqno, plain.end_seqno, plain.horizon))
            read.rows |= {row.seqno: (row.key, plain_value(row)) for row in plain.rows}

    def check(
        self, partition: int, read: Read, options: dict[str, Any], at_least: int, purge: int
    ) -> None:
        """Every row is as it was written, and each that is missing was superseded or purged."""
        history, prefix = self.history[partition], options["key_prefix"]
        end = read.start
        horizons: dict[int, int] = {}
        for begin, end_of_run, horizon in read.runs:
            assert begin == end
            horizons |= dict.fromkeys(range(begin + 1, end_of_run + 1), horizon)
            end = end_of_run
        assert end >= at_least
        newer: dict[bytes, int] = {}
        for seqno in range(len(history), 0, -1):
            key, value, _ = history[seqno - 1]
            if seqno in read.rows:
                assert key.startswith(prefix)
                assert read.rows[seqno] == (key, None if options["keys_only"] else value)
            elif read.start < seqno <= end and key.startswith(prefix):
                by = newer.get(key, 0)
                gone = by and history[by - 1][1] is None and by <= purge
                superseded = by and by <= horizons[seqno]
                assert superseded or gone or (value is None and seqno <= purge), (seqno, by, purge)
                self.seen.add("superseded" if superseded else "purged")
            newer[key] = seqno
        assert all(read.start < seqno <= end for seqno in read.rows)

    def _check_beginning(self, partition: int, start: int, since: int) -> None:
        """Nothing of that time or later lies below, but for what a merge has dropped since."""
        history = self.history[partition]
        newest = {key: seqno for seqno, (key, _, _) in enumerate(history, start=1)}
        times = [time for _, _, time in history]
        for seqno in range(bisect_left(times, since) + 1, start + 1):
            key, value, _ = history[seqno - 1]
            assert newest[key] > seqno or value is None, (seqno, start)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_is_asked_for_is_true_to_the_history(
    server_process: StartServer, seed: int
) -> None:
    looks = {"upr.service.buckets.compactor.FIRST_LOOK_SECONDS": 0.1}
    server = server_process(*OPTIONS, *AGES, constants=looks)
    world = World(server, seed)
    purge = admin.PurgeRequest(bucket="default", partitions=PARTITIONS)
    for number in range(ROUNDS):
        async with RawClient(server.target) as client:
            await world.write(client)
            for _ in range(4):
                reads = [asyncio.create_task(world.follow(client)) for _ in range(3)]
                await world.write(client)
                await asyncio.gather(*reads)
                # Rows and tombstones get older.
                await asyncio.sleep(0.1)
            await client.admin.Purge(purge)
        if number % 3 == 2:
            server.kill()
            server.start()
    assert world.seen == {"superseded", "purged"}
