"""Merging and purging under a real server: followers of every kind end with the right state."""

import asyncio
import errno
import gc
import random
import threading
import weakref
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, poll, until
from tests.model import ModelPartition, Row, State, apply, partition_of
from tests.raw import RawClient, RawFollow, RawWriter, all_rows, seqnos_of, start_at
from tests.service.bucket_state import started
from tests.service.keys import some_keys
from upr.config import ServerConfig
from upr.engine.bucket import FlushPlan
from upr.service.buckets.bucket_service import BucketService
from upr.storage.compact import FlushSlice, Merged
from upr_protocol.block import Block, build_block
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

USED = range(16)
OPTIONS = ("--tail-bytes", "65536", "--tombstone-age", "0.5s", "--purge-hold", "600s")
MARKERS_KEPT = 8


def keys_in_use(how_many: int) -> list[bytes]:
    found: Iterator[bytes] = (
        key for key in (b"key-%d" % i for i in count()) if partition_of(key) in USED
    )
    return list(islice(found, how_many))


class Writer:
    """Writes zipfian overwrites and deletes, and keeps every version."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.keys = keys_in_use(2000)
        self.model = {p: ModelPartition() for p in USED}

    def batch(self, size: int) -> list[tuple[bytes, bytes | None]]:
        rows: list[tuple[bytes, bytes | None]] = []
        for _ in range(size):
            rank = int(self.rng.paretovariate(0.6)) - 1
            key = self.keys[min(rank, 10**9) % len(self.keys)]
            value = b"%d" % self.rng.randrange(10**9) * self.rng.randint(1, 12)
            rows.append((key, None if self.rng.random() < 0.2 else value))
        return rows

    def note(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        """Number rows as the server will: there is no other writer."""
        for key, value in rows:
            self.model[partition_of(key)].write(key, value)

    async def write(self, writer: RawWriter, size: int = 100) -> None:
        rows = self.batch(size)
        # Followers may see it before it is answered.
        self.note(rows)
        block = build_block([k for k, _ in rows], [v for _, v in rows])
        await writer.send_block(block_to_message(block))
        for partition, (_, end) in seqnos_of(await writer.result()).items():
            assert end == self.model[partition].high

    async def restarted(self, client: RawClient) -> None:
        """Forget what was not durable when the server was killed."""
        for info in await client.partitions(*USED):
            model = self.model[info.partition]
            assert info.high_seqno <= model.high
            if info.failover_id != model.newest_id:
                model.restart_unclean(info.high_seqno, info.failover_id)


class Follower:
    """Remembers its position, and compares its state with the model at each marker that it may believe."""

    def __init__(self, name: str, writer: Writer, credit: int = 0) -> None:
        self.name = name
        self.writer = writer
        self.credit = credit
        self.ids: dict[int, int] = {}
        self.seqnos = dict.fromkeys(USED, 0)
        self.horizons = dict.fromkeys(USED, 0)
        self.states: dict[int, State] = {p: {} for p in USED}
        self.marked: dict[int, dict[int, State]] = {p: {0: {}} for p in USED}
        self.markers = self.rollbacks = 0

    async def open(self, client: RawClient) -> RawFollow:
        follow = await client.follow(credit_bytes=self.credit)
        await self.start(follow, list(USED))
        return follow

    async def start(self, follow: RawFollow, partitions: list[int]) -> None:
        """Start streams; frames of those that are open already may come in between."""
        left = [
            start_at(p, self.seqnos[p], self.ids.get(p), data_id=self.ids.get(p))
            for p in partitions
        ]
        while left:
            await follow.send(start=wire.Start(partitions=left))
            left = []
            while (message := await follow.read()).WhichOneof("message") != "start_answers":
                self.take(message)
            for answer in message.start_answers.answers:
                p = answer.partition
                if answer.HasField("started"):
                    self.ids[p] = answer.started.failover_id
                    continue
                assert answer.HasField("rollback"), answer
                self.roll_back(p, answer.rollback.rollback_seqno, answer.rollback.failover_id)
                left.append(start_at(p, self.seqnos[p], self.ids[p], data_id=self.ids[p]))

    def roll_back(self, p: int, limit: int, newest_id: int) -> None:
        self.rollbacks += 1
        self.ids[p] = newest_id
        if max(self.seqnos[p], self.horizons[p]) > limit or limit == 0:
            at = max((m for m in self.marked[p] if m < limit), default=0)
            self.states[p] = dict(self.marked[p].get(at, {}))
            self.marked[p] = {m: s for m, s in self.marked[p].items() if m <= at} | {0: {}}
            self.seqnos[p] = self.horizons[p] = at

    def take(self, message: wire.FollowResponse) -> list[int]:
        """Take a frame; returns the partitions whose streams have ended."""
        for one in message.frame.blocks:
            self.take_block(block_from_message(one))
        return [stream.partition for stream in message.ended.streams]

    def take_block(self, block: Block) -> None:
        rows: dict[int, list[Row]] = {}
        for p, seqno, key, value in all_rows([block]):
            rows.setdefault(p, []).append(Row(seqno, key, value))
        for run in block.runs:
            p, start, end, horizon = (
                int(run[name]) for name in ("partition", "start_seqno", "end_seqno", "horizon")
            )
            assert start == self.seqnos[p], f"{self.name}: partition {p}, a gap or a repeat"
            apply(self.states[p], rows.get(p, []))
            self.seqnos[p] = end
            self.horizons[p] = max(self.horizons[p], horizon)
            if self.horizons[p] == end:
                truth = self.writer.model[p].state_at(end)
                assert self.states[p] == truth, f"{self.name}: partition {p} is wrong at {end}"
                self.markers += 1
                self.marked[p][end] = dict(self.states[p])
                if len(self.marked[p]) > MARKERS_KEPT:
                    del self.marked[p][next(m for m in self.marked[p] if m)]

    @property
    def has_all(self) -> bool:
        return all(self.seqnos[p] == self.writer.model[p].high for p in USED)

    async def run(
        self, target: str, done: asyncio.Event, calls: random.Random | None = None
    ) -> None:
        """Follow until everything is there and nothing more comes; call anew at random."""
        while not (done.is_set() and self.has_all):
            async with RawClient(target) as client:
                follow = await self.open(client)
                messages = calls.randint(1, 25) if calls is not None else 10**9
                while messages > 0 and not (done.is_set() and self.has_all):
                    messages -= 1
                    ended = self.take(await follow.read())
                    if ended:
                        await self.start(follow, ended)


def check(follower: Follower) -> None:
    assert follower.has_all
    for p in USED:
        assert follower.states[p] == follower.writer.model[p].state_at(follower.seqnos[p])


async def purged(client: RawClient) -> dict[int, int]:
    return {info.partition: info.purge_seqno for info in await client.partitions(*USED)}


async def until_purged(client: RawClient, above: dict[int, int]) -> dict[int, int]:
    """Wait until purge seqnos have risen in most partitions."""

    def most(found: dict[int, int]) -> bool:
        return sum(found[p] > above[p] for p in USED) > len(USED) // 2

    return await poll(lambda: purged(client), most)


@pytest.mark.asyncio
async def test_followers_of_every_kind_beside_merging_and_purging(
    server_process: StartServer,
) -> None:
    # A heartbeat now and then gets a follower with nothing to read to look whether it is done.
    server = server_process(*OPTIONS, "--heartbeat-seconds", "1")
    writer = Writer(1)
    done = asyncio.Event()
    fast = Follower("fast", writer)
    slow = Follower("slow", writer, credit=2000)
    anew = Follower("reconnecting", writer, credit=20_000)
    async with RawClient(server.target) as client:
        writing = await client.writer("")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fast.run(server.target, done))
            tasks.create_task(slow.run(server.target, done))
            tasks.create_task(anew.run(server.target, done, random.Random(2)))
            for _ in range(120):
                await writer.write(writing)
            done.set()
        for follower in (fast, slow, anew):
            check(follower)
        assert fast.rollbacks == 0, "a follower that keeps up begins anew"
        assert fast.markers > 500
        before = await purged(client)
        # Nobody follows any more; what is stored from here on lets the older tombstones go.
        async with asyncio.timeout(WAIT_SECONDS):
            while (rose := await purged(client)) == before:
                await writer.write(writing)
        assert any(rose.values())
        fresh = Follower("fresh", writer)
        await fresh.run(server.target, done)
        check(fresh)
        found = await until_purged(client, dict.fromkeys(USED, 0))
        # Who stands below a purge seqno is told to begin at 0, and is right in the end.
        late = Follower("late", writer)
        for p in USED:
            late.ids[p], late.seqnos[p] = fresh.ids[p], max(found[p] - 1, 0)
        await late.run(server.target, done)
        check(late)
        assert late.rollbacks >= sum(1 for p in USED if found[p] > 1)
    assert server.terminate() == 0


async def write_and_flush(host: BucketService, keys: list[bytes]) -> None:
    block = build_block(keys, [b"v" for _ in keys])
    await host.durable((await host.write(block, b"", None, 0)).entry)
    assert await host.flusher.flush(wanted=True)


@pytest.mark.asyncio
async def test_a_cut_made_while_ranges_are_chosen_is_not_crossed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, ServerConfig(data=folder)))
    compactor, partition = host.compactor, 9
    async with compactor.turn:
        look = compactor._look
        # It was asked what is pinned before the cut was made.
        monkeypatch.setattr(compactor, "_look", lambda pins: look(dict.fromkeys(pins, ())))
        await write_and_flush(host, some_keys(partition, 3))
        cut = host.bucket.create_cut("cut", [partition], 10**9, host.disk.clock.now())
        await write_and_flush(host, some_keys(partition, 3))
        compactor._backlog.waiting.clear()
        await compactor._merge([partition])
        assert [head.end for head in host.disk.store.heads(partition)] == [3, 6]
        assert compactor.waiting == 1, "it is not looked at again"
        host.bucket.cuts.forget(cut)
        await compactor._merge([partition])
        assert [head.end for head in host.disk.store.heads(partition)] == [6]
    assert await host.close()


async def write_until_killed(server: RunningServer, writer: Writer) -> None:
    async with RawClient(server.target) as client:
        writing = await client.writer("")
        try:
            for _ in range(2000):
                await writer.write(writing)
        except (grpc.aio.AioRpcError, EOFError, asyncio.InvalidStateError):
            return
    raise AssertionError("the failpoint was not reached")


@pytest.mark.asyncio
@pytest.mark.crash
@pytest.mark.parametrize("failpoint", ["merge.before_commit=kill:4", "merge.after_commit=kill:4"])
async def test_killed_while_merging(server_process: StartServer, failpoint: str) -> None:
    server = server_process(*OPTIONS)
    writer = Writer(3)
    done = asyncio.Event()
    done.set()
    async with RawClient(server.target) as client:
        writing = await client.writer("")
        for _ in range(10):
            await writer.write(writing)
        stays = Follower("stays", writer)
        await stays.run(server.target, done)
    assert server.terminate() == 0
    server.start(environment={"UPR_FAILPOINTS": failpoint})
    await write_until_killed(server, writer)
    assert server.wait() == -9
    server.start()
    async with RawClient(server.target) as client:
        await writer.restarted(client)
        for follower in (Follower("fresh", writer), stays):
            await follower.run(server.target, done)
            check(follower)
        # Merging goes on where it was cut off, and so does purging.
        before = await purged(client)
        writing = await client.writer("")
        async with asyncio.timeout(WAIT_SECONDS):
            while (await purged(client)) == before:
                await writer.write(writing)
        fresh = Follower("fresh again", writer)
        for follower in (fresh, stays):
            await follower.run(server.target, done)
            check(follower)
    assert server.terminate() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", ["to be stored", "to be merged ahead"])
async def test_what_a_flush_that_failed_had_in_memory_is_let_go(
    folder: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be tens of MiB, and there is another one at every attempt."""
    host = started(BucketService(folder, ServerConfig(data=folder)))
    keys = [*some_keys(9, 3), *some_keys(10, 3), *some_keys(11, 3)]
    block = build_block(keys, [b"v" for _ in keys])
    await host.durable((await host.write(block, b"", None, 0)).entry)
    prepare, merge = FlushPlan.prepare, FlushPlan.merge
    plans, left = list[weakref.ref[Any]](), list[int]()

    def preparing(plan: FlushPlan) -> list[FlushSlice]:
        left.append(sum(of() is not None for of in plans))
        plans.append(weakref.ref(plan.stored))
        return prepare(plan)

    def failing(*args: Any) -> None:
        raise OSError(errno.EIO, "broken") from ValueError("its cause")

    def merging(plan: FlushPlan, part: FlushSlice) -> Merged:
        if part.first >= 10:
            failing()
        return merge(plan, part)

    with monkeypatch.context() as broken:
        broken.setattr("upr.storage.compact.SLICE_BYTES", 1)
        broken.setattr(FlushPlan, "prepare", preparing)
        if fails == "to be stored":
            broken.setattr(host.disk.store, "put_flush", failing)
        else:
            broken.setattr(FlushPlan, "merge", merging)
        gc.disable()
        try:
            host.flusher.wanted.set()
            await until(lambda: len(left) > 2)
        finally:
            gc.enable()
    assert sum(left) == 0
    await until(lambda: host.bucket.tail.first == host.bucket.tail.end)
    assert await host.close()


@pytest.mark.asyncio
async def test_a_slice_of_a_flush_is_merged_while_the_one_before_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, ServerConfig(data=folder)))
    monkeypatch.setattr("upr.storage.compact.SLICE_BYTES", 1)
    following, merged = threading.Event(), list[FlushSlice]()
    merge, put = FlushPlan.merge, host.disk.store.put_flush

    def merging(plan: FlushPlan, part: FlushSlice) -> Merged:
        merged.append(part)
        if len(merged) == 2:
            following.set()
        return merge(plan, part)

    def putting(*args: Any) -> None:
        assert following.wait(WAIT_SECONDS), "it is merged only when the one before is stored"
        put(*args)

    monkeypatch.setattr(FlushPlan, "merge", merging)
    monkeypatch.setattr(host.disk.store, "put_flush", putting)
    await write_and_flush(host, [*some_keys(9, 3), *some_keys(10, 3), *some_keys(11, 3)])
    assert len(merged) > 2
    assert [host.disk.store.heads(p)[-1].end for p in (9, 10, 11)] == [3, 3, 3]
    assert await host.close()
