"""The buffered writer and reading keys, against a real server."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.harness import RunningServer
from upr_client import AsyncClient, Change
from upr_client.errors import BucketGoneError, InvalidArgumentError

StartServer = Callable[..., RunningServer]


@pytest.mark.asyncio
async def test_what_was_buffered_is_there_in_order(target: str) -> None:
    rows = [(b"%d" % (i % 501), None if i % 7 == 6 else b"v%d" % i) for i in range(20_000)]
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        async with bucket.writer(batch_rows=700, max_outstanding_bytes=200_000) as writer:
            for key, value in rows:
                if value is None:
                    await writer.delete(key)
                else:
                    await writer.set(key, value)
        expected = {key: value for key, value in dict(rows).items() if value is not None}
        assert await bucket.get_many(key for key, _ in rows) == expected
        seqnos: dict[int, int] = {}
        state = {}
        async with bucket.changes(until="now") as changes:
            async for event in changes:
                if isinstance(event, Change):
                    assert event.seqno > seqnos.get(event.partition, 0)
                    seqnos[event.partition] = event.seqno
                    state[event.key] = event.value
        assert state == dict(rows)


@pytest.mark.asyncio
async def test_what_is_no_rows_no_keys_or_no_durability_is_refused() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        bucket: Any = client.bucket()
        for use, words in (
            (partial(bucket.get_many, None), "keys are None; must be several"),
            (partial(bucket.get_many, 7), "keys are 7"),
            (partial(bucket.write_many, None), "rows are None; must be several"),
            (partial(bucket.set, b"k", b"v", durability=["disk"]), r"durability is \['disk'\]"),
            (partial(bucket.changes, read_from=["any"]), "read_from is"),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                await use()


@pytest.mark.asyncio
async def test_a_cut_ends_only_what_follows_its_own_bucket(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.admin.create_bucket("other")
        async with client.bucket("other").cut("c") as cut:
            with pytest.raises(InvalidArgumentError, match=r"cut of bucket 'other'; .* 'default'"):
                client.bucket().changes(until=cut)
            async with client.bucket("other").changes(until=cut) as changes:
                assert [event async for event in changes] == []


@pytest.mark.asyncio
async def test_an_object_of_a_bucket_that_was_created_anew_stays_with_the_old_one(
    server_process: StartServer,
) -> None:
    server = server_process("--open-admin")
    async with AsyncClient(server.target) as client:
        await client.admin.create_bucket("b")
        wrote, read, knows_nothing = (client.bucket("b") for _ in range(3))
        await wrote.set(b"a", b"old")
        await read.get(b"a")
        await client.admin.drop_bucket("b")
        await client.admin.create_bucket("b")
        newer = await client.bucket("b").set(b"a", b"new")
        for bucket in (wrote, read):
            with pytest.raises(BucketGoneError, match="since it was used first"):
                await bucket.get(b"a", at_least=newer)
        for bucket in (wrote, read, wrote, read):
            for use in (partial(bucket.get, b"a"), partial(bucket.set, b"b", b"1")):
                with pytest.raises(BucketGoneError) as caught:
                    await use()
                assert caught.value.hint.startswith("ask the client for the bucket again")
            # It is followed in the new one, and that changes nothing.
            async with bucket.changes(until="now") as changes:
                assert [e.value async for e in changes if isinstance(e, Change)] == [b"new"]
        async with knows_nothing.changes(until="now") as changes:
            await anext(changes)
        assert await knows_nothing.get(b"a") == b"new"


@pytest.mark.crash
@pytest.mark.asyncio
async def test_a_buffered_writer_outlives_kills_of_the_server(server_process: StartServer) -> None:
    server = server_process()
    rows = [(b"%d" % (i % 97), b"%d" % i) for i in range(6000)]
    async with AsyncClient(server.target, retry_seconds=None) as client:
        async with client.bucket().writer(batch_rows=50) as writer:
            for number, (key, value) in enumerate(rows):
                if number in (1500, 3000, 4500):
                    server.kill()
                    server.start()
                await writer.set(key, value)
        history: dict[bytes, list[bytes | None]] = {}
        async with client.bucket().changes(until="now") as changes:
            async for event in changes:
                if isinstance(event, Change):
                    history.setdefault(event.key, []).append(event.value)
    # Nothing twice, nothing out of turn; what a flush merged away is a prefix that newer values superseded.
    for key, values in history.items():
        written = [value for k, value in rows if k == key]
        assert values == written[-len(values) :]
    assert len(history) == 97


@pytest.mark.asyncio
async def test_a_server_that_was_stopped_is_left_for_the_next(server_process: StartServer) -> None:
    first, second = server_process(), server_process()
    async with AsyncClient(f"{first.target},{second.target}") as client:
        assert client.target == first.target
        await client.bucket().set(b"k", b"first")
        first.terminate()
        # Another bucket object: the data of these two servers has nothing in common.
        bucket = client.bucket()
        await bucket.set(b"k", b"second")
        assert client.target == second.target
        assert await bucket.get(b"k") == b"second"
        assert len(await client.admin.partitions("default")) == 1024
