"""Cuts of a real server: made at one instant, durable, and served as of it for as long as they are held."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS
from tests.model import ModelBucket, State
from tests.raw import RawClient
from upr_client import AsyncClient, Change, Client, Marker, Only, Rollback, Tuning, UprError
from upr_client._async.bucket import AsyncBucket
from upr_client.admin import Pin
from upr_client.errors import (
    AlreadyExistsError,
    CutNotFoundError,
    InvalidArgumentError,
    SnapshotGoneError,
    StorageFailedError,
    UnavailableError,
)
from upr_client.types import AsyncCut
from upr_protocol.limits import CUT_LEASE_SECONDS_MAX
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

KEYS = 3000
SMALL_TAIL = ("--tail-bytes", "300000", "--flush-seconds", "0.3")
Rows = list[tuple[bytes, bytes | None]]


def batch(rng: random.Random, model: ModelBucket, rows: int = 300) -> Rows:
    """Draw rows, and write them into the model."""
    drawn: Rows = [
        (
            b"key %d" % rng.randrange(KEYS),
            None if rng.random() < 0.2 else b"%d" % rng.getrandbits(40),
        )
        for _ in range(rows)
    ]
    for key, value in drawn:
        model.write(key, value)
    return drawn


def as_of(model: ModelBucket, pins: Mapping[int, Pin]) -> State:
    """The model's state at the pins."""
    return {
        key: value
        for partition, pin in pins.items()
        for key, value in model.partitions[partition].state_at(pin.seqno).items()
    }


def take(state: State, event: Change | Marker | Rollback) -> None:
    assert not isinstance(event, Rollback)
    if isinstance(event, Marker):
        return
    if event.value is None:
        state.pop(event.key, None)
    else:
        state[event.key] = event.value


async def state_at(bucket: AsyncBucket, cut: AsyncCut, stability: str = "disk") -> State:
    """Follow exactly to the cut, and fold."""
    state: State = {}
    async with bucket.changes(until=cut, only=Only(stability=stability)) as changes:
        async for event in changes:
            take(state, event)
        for partition, pin in cut.pins.items():
            assert changes.position(partition).seqno == pin.seqno
    return state


@contextlib.asynccontextmanager
async def opened(target: str) -> AsyncIterator[tuple[AsyncClient, AsyncBucket]]:
    async with AsyncClient(target) as client:
        yield client, client.bucket()


@pytest.mark.asyncio
@pytest.mark.parametrize("stability", ["disk", "memory"])
async def test_readers_get_the_state_at_the_cut_while_writes_go_on(
    server_process: StartServer, stability: str
) -> None:
    server = server_process(*SMALL_TAIL)
    rng, model = random.Random(1), ModelBucket()
    async with opened(server.target) as (client, bucket):
        done = asyncio.Event()

        async def write() -> None:
            while not done.is_set():
                await bucket.write_many(batch(rng, model), durability="memory")
                written.put_nowait(300)

        written: asyncio.Queue[int] = asyncio.Queue()
        writing = asyncio.create_task(write())
        cuts = []
        for number in range(3):
            for _ in range(10):
                await written.get()
            cuts.append(await client.admin.create_cut(bucket, f"cut {number}"))
        readers = [state_at(bucket, cut, stability=stability) for cut in cuts for _ in range(2)]
        states = await asyncio.gather(*readers)
        done.set()
        await writing
        sizes = [sum(cut.seqnos.values()) for cut in cuts]
        assert sizes == sorted(set(sizes))
        for cut, one, two in zip(cuts, states[::2], states[1::2], strict=True):
            assert list(cut.pins) == list(range(1024))
            assert one == two == as_of(model, cut.pins)


@pytest.mark.asyncio
async def test_an_overwritten_bucket_is_served_as_of_the_cut_until_it_is_released(
    server_process: StartServer,
) -> None:
    server = server_process(*SMALL_TAIL)
    rng, model = random.Random(2), ModelBucket()
    async with opened(server.target) as (client, bucket):
        for _ in range(10):
            await bucket.write_many(batch(rng, model))

        async def overwrite() -> None:
            await bucket.write_many([(b"key %d" % n, b"new" * 20) for n in range(KEYS)])

        async with bucket.cut("held") as cut:
            truth = as_of(model, cut.pins)
            for _ in range(6):
                await overwrite()
                assert await state_at(bucket, cut) == truth
        assert await client.admin.cuts(bucket) == []
        deadline = time.monotonic() + WAIT_SECONDS
        gone: SnapshotGoneError | None = None
        while gone is None and time.monotonic() < deadline:
            await overwrite()
            try:
                # Until merging has crossed it, it is still served whole.
                assert await state_at(bucket, cut) == truth
            except SnapshotGoneError as error:
                gone = error
        assert gone is not None
        assert "cannot be served as of seqno" in gone.message


@pytest.mark.long
@pytest.mark.asyncio
async def test_sigkill_after_the_answer(server_process: StartServer) -> None:
    server = server_process(*SMALL_TAIL)
    rng, model = random.Random(3), ModelBucket()
    async with opened(server.target) as (client, bucket):
        for _ in range(30):
            await bucket.write_many(batch(rng, model), durability="memory")
        cut = await client.admin.create_cut(bucket, "kept", lease=600)
        truth = as_of(model, cut.pins)
        writing = asyncio.create_task(
            bucket.write_many(batch(rng, model, 20_000), durability="memory")
        )
        await asyncio.sleep(0)
        server.kill()
        server.start()
        await writing
        (listed,) = await client.admin.cuts(bucket, with_pins=True)
        assert (listed.name, listed.pins, listed.lease_seconds) == ("kept", cut.pins, 600)
        assert listed.expires_time == cut.expires_time
        for partition, log in (await client.admin.failover_logs(bucket)).items():
            assert log.newest.seqno >= cut.pins[partition].seqno
        for _ in range(3):
            await bucket.write_many([(b"key %d" % n, b"new" * 20) for n in range(KEYS)])
            assert await state_at(bucket, cut) == truth


@pytest.mark.asyncio
@pytest.mark.parametrize(("where", "kept"), [("before", False), ("after", True)])
async def test_sigkill_before_the_answer_leaves_a_whole_cut_or_none(
    server_process: StartServer, where: str, kept: bool
) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": f"cuts.{where}_commit=kill"})
    async with opened(server.target) as (client, bucket):
        await bucket.write_many([(b"key %d" % n, b"v") for n in range(KEYS)])
        with pytest.raises(UprError):
            await client.admin.create_cut(bucket, "x")
        server.wait()
        server.start(environment={"UPR_FAILPOINTS": ""})
        found = await client.admin.cuts(bucket, with_pins=True)
        assert [len(cut.pins) for cut in found] == ([1024] if kept else [])
        if kept:
            with pytest.raises(AlreadyExistsError):
                await client.admin.create_cut(bucket, "x")


@pytest.mark.asyncio
async def test_a_failed_journal_takes_the_pin_back(server_process: StartServer) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.before_sync=error:EIO"})
    async with opened(server.target) as (client, bucket):
        await bucket.set(b"a", b"1", durability="memory")
        for _ in range(2):
            with pytest.raises(StorageFailedError):
                await client.admin.create_cut(bucket, "x")
            assert await client.admin.cuts(bucket) == []


@pytest.mark.asyncio
async def test_there_is_no_answer_before_what_is_pinned_is_durable(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    async with opened(server.target) as (client, bucket):
        await bucket.set(b"a", b"1", durability="memory")
        async with AsyncClient(server.target, request_timeout=1) as hasty:
            with pytest.raises(UnavailableError):
                await hasty.admin.create_cut("default", "x")
        hold.unlink()
        await client.admin.create_cut(bucket, "y")
        assert "y" in {cut.name for cut in await client.admin.cuts(bucket)}


@pytest.mark.asyncio
async def test_a_failed_store_takes_the_pin_back(server_process: StartServer) -> None:
    environment = {"UPR_FAILPOINTS": "cuts.before_commit=error:ENOSPC:1"}
    server = server_process(environment=environment)
    async with opened(server.target) as (client, bucket):
        with pytest.raises(StorageFailedError, match="could not be stored"):
            await client.admin.create_cut(bucket, "x")
        await client.admin.create_cut(bucket, "x")
        assert len(await client.admin.cuts(bucket)) == 1


@pytest.mark.asyncio
async def test_a_caller_that_goes_away_leaves_a_whole_cut(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"cuts.before_commit=hold:{hold}"})
    async with opened(server.target) as (client, bucket):
        await bucket.set(b"a", b"1")
        async with AsyncClient(server.target, request_timeout=1) as hasty:
            with pytest.raises(UnavailableError):
                await hasty.admin.create_cut("default", "x")
        # It has its name since it was begun, and is not seen before it is durable.
        with pytest.raises(AlreadyExistsError):
            await client.admin.create_cut(bucket, "x")
        assert await client.admin.cuts(bucket) == []
        hold.unlink()
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := await client.admin.cuts(bucket, with_pins=True)):
            assert time.monotonic() < deadline
        assert len(found[0].pins) == 1024


@pytest.mark.asyncio
async def test_leases_end_by_themselves_and_are_renewed_and_kept(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with opened(server.target) as (client, bucket):
        short = await client.admin.create_cut(bucket, "short", lease=0.05)
        long = await client.admin.create_cut(bucket, "long", partitions=[5, 3], lease=60)
        assert list(long.pins) == [3, 5]
        deadline = time.monotonic() + WAIT_SECONDS
        while "short" in [cut.name for cut in await client.admin.cuts(bucket)]:
            assert time.monotonic() < deadline
        with pytest.raises(CutNotFoundError, match="'short'"):
            await short.renew()
        assert not await short.release()
        before = long.expires_time
        await long.renew()
        assert before < long.expires_time
        await long.renew(3600)
        assert long.lease_seconds == 3600
        assert server.terminate() == 0
        server.start()
        (found,) = await client.admin.cuts(bucket, with_pins=True)
        assert (found.expires_time, dict(found.pins)) == (long.expires_time, dict(long.pins))
        assert await long.release()
        assert not await long.release()
        with pytest.raises(CutNotFoundError):
            await long.renew()
        server.kill()
        server.start()
        assert await client.admin.cuts(bucket) == []


@pytest.mark.asyncio
async def test_bad_input_names_value_and_limit(target: str) -> None:
    async with opened(target) as (client, bucket), RawClient(target) as raw:
        for lease in (-1.0, math.nan, math.inf, CUT_LEASE_SECONDS_MAX + 1):
            with pytest.raises(InvalidArgumentError, match=rf"lease is {lease} s; .*2592000"):
                await client.admin.create_cut(bucket, "x", lease=lease)
        with pytest.raises(InvalidArgumentError, match="1024"):
            await client.admin.create_cut(bucket, "x", partitions=[1024])
        with pytest.raises(InvalidArgumentError, match="twice"):
            await client.admin.create_cut(bucket, "x", partitions=[1, 1])
        for name in ("", "n" * 201, "a\nb"):
            with pytest.raises(grpc.aio.AioRpcError, match=r"cut .*must be 1 to 200"):
                await raw.changes.CreateCut(wire.CreateCutRequest(bucket="default", name=name))
        with pytest.raises(UprError, match="no bucket"):
            await client.admin.create_cut("other", "x")
        assert await client.admin.cuts(bucket) == []
        cut = await client.admin.create_cut(bucket, "x", partitions=[1])
        with pytest.raises(InvalidArgumentError, match="partition 2"):
            bucket.changes(until=cut, only=Only([1, 2]))


@pytest.mark.asyncio
async def test_a_lost_call_in_the_middle_still_ends_at_the_cut(
    server_process: StartServer,
) -> None:
    server = server_process(*SMALL_TAIL)
    rng, model = random.Random(4), ModelBucket()
    async with opened(server.target) as (client, bucket):
        for _ in range(10):
            await bucket.write_many(batch(rng, model))
        cut = await client.admin.create_cut(bucket, "x")
        await bucket.write_many([(b"key %d" % n, b"new") for n in range(KEYS)])
        state: State = {}
        events = 0
        async with bucket.changes(until=cut, tuning=Tuning(credit_bytes=2000)) as changes:
            async for event in changes:
                take(state, event)
                events += 1
                if events == 200:
                    server.kill()
                    await asyncio.to_thread(server.start)
        assert events > 1000
        assert state == as_of(model, cut.pins)


def test_sync_flavour_and_seqnos_by_hand(target: str) -> None:
    with Client(target) as client:
        bucket = client.bucket()
        for value in (b"1", b"2", b"3"):
            bucket.set(b"a", value)
        with bucket.cut("x") as cut:
            ((partition, seqno),) = ((p, s) for p, s in cut.seqnos.items() if s)
            assert seqno == 3
            assert (
                cut.ids[partition]
                == client.admin.failover_logs(bucket, [partition])[partition].newest.failover_id
            )
            bucket.set(b"a", b"4")
            for until in ({partition: 3}, {partition: 2}, {partition: 4}):
                with bucket.changes(until=until) as changes:
                    values = [e.value for e in changes if isinstance(e, Change)]
                assert values == [b"1", b"2", b"3", b"4"][: until[partition]]
            assert [info.name for info in client.admin.cuts(bucket)] == ["x"]
        assert client.admin.cuts(bucket) == []
        with (
            pytest.raises(SnapshotGoneError, match="high seqno is 4"),
            bucket.changes(until={partition: 5}) as changes,
        ):
            next(iter(changes))
