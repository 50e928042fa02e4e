"""Closing a client under a call that waits: the call says so, in both flavours."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.client._async.adapter import running as running_async
from tests.client._async.adapter import serve
from tests.client._sync.adapter import running
from tests.client.key_values import Faults, KeyValueServer
from tests.client.scripted import Expect, HalfClosed, Hold, applied, write_opened
from tests.harness import WAIT_SECONDS, pass_turns, poll, until
from upr_client import AsyncClient, Change, Client, Group, MemoryPositions, Tuning
from upr_client._async.call import Follow
from upr_client._sync.position_storage import PositionStorage
from upr_client.errors import ClosedError, InvalidArgumentError, UnavailableError
from upr_client.testing import ServerProcess
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX
from upr_protocol.partitioning import partition_of

KEY = b"key"
P = partition_of(KEY)


@pytest.mark.asyncio
async def test_a_task_learns_that_its_client_was_closed() -> None:
    server = KeyValueServer(Faults(silent=True))
    async with running_async(server):
        client = AsyncClient(server.target)
        waiting = asyncio.create_task(client.bucket().get(b"k"))
        await asyncio.to_thread(server.asked.wait)
        await client.close()
        with pytest.raises(ClosedError, match="the client was closed"):
            await waiting


@pytest.mark.asyncio
async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    server = KeyValueServer(Faults(silent=True))
    async with running_async(server), AsyncClient(server.target) as client:
        waiting = asyncio.create_task(client.bucket().get(b"k"))
        await asyncio.to_thread(server.asked.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(UnavailableError, match="did not answer in time"):
            await client.bucket().get(b"k", seconds=0.05)


@pytest.mark.parametrize("first", range(3))
def test_a_client_of_a_closed_event_loop_says_so(target: str, first: int) -> None:
    client = AsyncClient(target)
    bucket = client.bucket()

    async def follow() -> None:
        async with bucket.changes(until="now") as changes:
            async for _ in changes:
                pass

    uses: list[Callable[[], Awaitable[object]]] = [
        lambda: bucket.get(b"k"),
        lambda: bucket.set(b"k", b"v"),
        follow,
        client.admin.buckets,
    ]

    async def use(which: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await which()

    asyncio.run(use(uses[first]))
    for one in uses:
        with pytest.raises(ClosedError, match="event loop that is closed"):
            asyncio.run(use(one))
    # It holds up nothing either.
    asyncio.run(use(client.close))


async def cancel_all() -> None:
    """Cancel all tasks but this one, the SDK's too, as ``asyncio.run`` does at its end."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_who_ends_after_all_tasks_were_cancelled_may_still_write(target: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.set(b"a", b"1")
        await cancel_all()
        await bucket.set(b"b", b"2")
        async with bucket.writer(linger_seconds=0) as writer:
            await writer.set(b"c", b"3")
            await cancel_all()
            await writer.set(b"d", b"4")
            await cancel_all()
            await writer.flush()
            await writer.set(b"e", b"5")
            await cancel_all()
        written = {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4", b"e": b"5"}
        assert await bucket.get_many(list(written)) == written


@pytest.mark.asyncio
async def test_what_is_under_way_when_all_tasks_are_cancelled_is_sent_again_under_its_number() -> (
    None
):
    first = [Expect("open"), write_opened(), Expect("write"), Hold()]
    second = [Expect("open"), write_opened(1), Expect("write"), applied(1, (P, 0, 1)), HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        writing = asyncio.create_task(client.bucket().set(KEY, b"1"))
        await until(lambda: server.calls["write"] and server.calls["write"][0].of("write"))
        for task in asyncio.all_tasks():
            if task.get_name().startswith("upr-write"):
                task.cancel()
        assert (await asyncio.wait_for(writing, WAIT_SECONDS)).seqno == 1
        numbers = [[one.number for one in call.of("write")] for call in server.calls["write"]]
        assert numbers == [[1], [1]]


@pytest.mark.asyncio
async def test_what_was_put_right_before_all_tasks_were_cancelled_is_written(target: str) -> None:
    """No task of the SDK has begun then."""

    async def write(number: int) -> None:
        async with bucket.writer(linger_seconds=0, batch_rows=1) as writer:
            try:
                await writer.set(b"%d" % number, b"v")
                await asyncio.sleep(WAIT_SECONDS)
            finally:
                await writer.flush()

    turns = range(6)
    for number in turns:
        async with asyncio.timeout(WAIT_SECONDS), AsyncClient(target) as client:
            bucket = client.bucket()
            task = asyncio.create_task(write(number))
            for _ in range(number):
                await asyncio.sleep(0)
            await cancel_all()
            await asyncio.wait([task])
            assert task.cancelled()
    async with AsyncClient(target) as client:
        written = await client.bucket().get_many([b"%d" % number for number in turns])
    # Of the first one the task had not begun.
    assert written.keys() == {b"%d" % number for number in turns[1:]}


@pytest.mark.asyncio
async def test_a_batch_that_waits_for_room_when_all_tasks_are_cancelled_is_written_and_told_once(
    target: str,
) -> None:
    told, telling = list[bytes](), asyncio.Event()

    async def tell(rows: list[tuple[bytes, bytes | None]], _: object) -> None:
        told.extend(key for key, _ in rows)
        telling.set()
        await pass_turns(50)

    keys = [b"%d" % number for number in range(3 * WRITES_IN_FLIGHT_MAX)]
    async with asyncio.timeout(WAIT_SECONDS), AsyncClient(target) as client:
        bucket = client.bucket()
        for on_results in (None, tell):
            async with bucket.writer(
                linger_seconds=0, batch_rows=1, on_results=on_results
            ) as writer:
                for key in keys:
                    await writer.set(key, b"v" + key)
                    if len(writer._under_way) == WRITES_IN_FLIGHT_MAX:
                        await cancel_all()
                flushing = asyncio.create_task(writer.flush())
                if on_results is not None:
                    telling.clear()
                    await telling.wait()
                await cancel_all()
                await asyncio.gather(flushing, return_exceptions=True)
                await writer.flush()
            assert await bucket.get_many(keys) == {key: b"v" + key for key in keys}
    assert sorted(told) == sorted(keys)


class NoPositions(MemoryPositions):
    """A store that cannot be written."""

    def save(self, positions: object) -> None:
        raise OSError("no disk")


@pytest.mark.asyncio
async def test_what_fails_when_a_client_is_closed_holds_up_nothing_else(target: str) -> None:
    client = AsyncClient(target)
    bucket = client.bucket()
    await bucket.set(b"a", b"1")
    changes = await bucket.changes(resume=NoPositions()).__aenter__()
    await anext(changes)
    await anext(changes)
    writer = await bucket.writer(linger_seconds=3600).__aenter__()
    await writer.set(b"b", b"2")
    with pytest.raises(OSError, match="no disk"):
        await client.close()
    async with AsyncClient(target) as other:
        assert await other.bucket().get(b"b") == b"2"


def test_closing_waits_for_a_server_that_stands_still_once_and_not_for_each_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = list[float]()
    save_last = PositionStorage.save_last

    def noted(storage: PositionStorage, seconds: float) -> None:
        longest.append(seconds)
        save_last(storage, seconds)

    monkeypatch.setattr(PositionStorage, "save_last", noted)
    with ServerProcess() as server:
        # A call that is not ended by then would wait for as long.
        client = Client(server.target, request_timeout=1, connect_timeout=3600)
        bucket = client.bucket()
        bucket.write_many([(b"%d" % number, b"v") for number in range(10)])
        groups = [Group(f"g{number}") for number in range(4)]
        for group in groups:
            changes = bucket.changes(resume=group, tuning=Tuning(save_seconds=3600)).__enter__()
            next(changes)
            next(changes)
        server.pause()
        client.close()
    assert len(longest) == len(groups)
    assert sum(longest) < 2


@pytest.mark.asyncio
async def test_only_the_event_loop_acknowledges_with_asyncio(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.set(KEY, b"v")
        async with bucket.changes(acknowledge="manual") as changes:
            batch = await anext(changes.batches())
            (change,) = batch.changes
            for ack in (partial(changes.ack, change), partial(changes.ack_batch, batch)):
                with pytest.raises(InvalidArgumentError, match=r"call_soon_threadsafe"):
                    await asyncio.to_thread(ack)
            assert changes.ack(change)


@pytest.mark.asyncio
async def test_a_member_that_is_cancelled_while_it_renews_its_lease_misses_nothing(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    keys = [b"%d" % i for i in range(10)]
    async with asyncio.timeout(WAIT_SECONDS), AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many([(key, b"v") for key in keys])
        seen = list[object]()
        async with bucket.changes(resume=Group("g", member="m")) as changes:
            # Each change, and the marker behind it.
            while len(seen) < 2 * len(keys):
                seen.append(await anext(changes))
                if changes._following.taken is not None:
                    with monkeypatch.context() as patch:
                        patch.setattr(changes, "_keep_share", cancelled)
                        with pytest.raises(asyncio.CancelledError):
                            await anext(changes)
        assert sorted(one.key for one in seen if isinstance(one, Change)) == keys


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_member_that_leaves_while_it_connects_leaves_its_group(
    target: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def members() -> int:
        return sum([len(one.members) for one in await client.admin.consumers("default")])

    async def nobody() -> bool:
        return not await members()

    async def leave(follow: Follow) -> object:
        await poll(members)
        if how == "cancel":
            raise asyncio.CancelledError
        changes.stop()
        await changes._ending.wait()
        return await opened(follow)

    async with asyncio.timeout(WAIT_SECONDS), AsyncClient(target) as client:
        # For so long a member that does not leave keeps all partitions.
        group = Group("g", lease_seconds=3600)
        async with client.bucket().changes(resume=group) as changes:
            opened = changes._opened
            monkeypatch.setattr(changes, "_opened", leave)
            joining = asyncio.ensure_future(anext(changes))
            (end,) = await asyncio.gather(joining, return_exceptions=True)
            assert isinstance(end, asyncio.CancelledError) == (how == "cancel")
        await poll(nobody)


@pytest.mark.asyncio
async def test_who_is_cancelled_twice_does_not_wait_for_the_server() -> None:
    async with serve([[Expect("open"), Hold()]]) as server, AsyncClient(server.target) as client:
        changes = await client.bucket().changes(resume=Group("g")).__aenter__()
        joining = asyncio.ensure_future(anext(changes))
        await until(lambda: server.calls["follow"] and server.calls["follow"][0].of("open"))
        follow = changes._follow
        joining.cancel()
        await until(lambda: changes._follow is None)
        joining.cancel()
        await asyncio.wait([joining])
        assert joining.cancelled()
        assert follow is not None
        await until(lambda: follow._call._ended.is_set())


def test_a_thread_learns_that_its_client_was_closed() -> None:
    server = KeyValueServer(Faults(silent=True))
    with running(server):
        client = Client(server.target)
        errors: list[Exception] = []

        def get() -> None:
            try:
                client.bucket().get(b"k")
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=get)
        thread.start()
        server.asked.wait()
        client.close()
        thread.join()
    assert [type(error) for error in errors] == [ClosedError]
