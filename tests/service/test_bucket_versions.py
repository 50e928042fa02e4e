"""What consumers and writers of a bucket that was dropped learn, whether it was created again or not."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.test_positions import as_json
from tests.harness import WAIT_SECONDS
from tests.service.bucket_state import rows_of
from tests.service.keys import some_keys
from upr_client import (
    AsyncClient,
    Change,
    FilePositions,
    Marker,
    MemoryPositions,
    Only,
    Rollback,
    SqlitePositions,
)
from upr_client.changes.options import Policy
from upr_client.errors import (
    BucketGoneError,
    BucketNotFoundError,
    PositionBucketError,
    RollbackError,
)
from upr_client.lowlevel import hello
from upr_client.positions import PositionStore

(KEY,) = some_keys(7, 1)


class Table:
    """What a consumer derives from the changes, and the rollbacks it was told."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[bytes, bytes | None]] = {}
        self.rollbacks: list[Rollback] = []

    def take(self, event: Change | Marker | Rollback) -> None:
        if isinstance(event, Rollback):
            assert event.seqno == 0
            self.rollbacks.append(event)
            self.rows.pop(event.partition, None)
        elif isinstance(event, Change):
            self.rows.setdefault(event.partition, {})[event.key] = event.value

    def all(self) -> dict[bytes, bytes | None]:
        return {key: value for rows in self.rows.values() for key, value in rows.items()}


@pytest.mark.asyncio
async def test_positions_of_a_dropped_bucket_roll_back_to_0(target: str, tmp_path: Path) -> None:
    old = {b"old %d" % i: b"1" for i in range(40)}
    new = {b"new %d" % i: b"2" for i in range(30)}
    table = Table()
    async with AsyncClient(target) as client:
        await client.admin.create_bucket("orders")
        await client.bucket("orders").write_many(list(old.items()))
        path = tmp_path / "positions"
        async with client.bucket("orders").changes(
            resume=FilePositions(path), until="now"
        ) as changes:
            async for event in changes:
                table.take(event)
        assert table.all() == old
        touched = set(table.rows)
        before = FilePositions(path).load(range(1024))
        await client.admin.drop_bucket("orders")
        with pytest.raises(BucketNotFoundError, match="'orders'"):
            async with client.bucket("orders").changes(resume=FilePositions(path)) as changes:
                await anext(changes)
        made = await client.admin.create_bucket("orders")
        await client.bucket("orders").write_many(list(new.items()))

        with pytest.raises(RollbackError, match="created again"):
            async with client.bucket("orders").changes(resume=FilePositions(path)) as changes:
                await anext(changes)
        unchanged = FilePositions(path).load(range(1024))
        assert all(unchanged[p] == before[p] for p in touched)

        class Killed(Exception):
            pass

        def die(rollback: Rollback) -> None:
            # The data is undone, and then the process dies before anything is stored.
            table.take(rollback)
            raise Killed

        with pytest.raises(Killed):
            async with client.bucket("orders").changes(
                resume=FilePositions(path), on_rollback=die
            ) as changes:
                await anext(changes)
        (first,) = table.rollbacks
        assert FilePositions(path).load([first.partition])[first.partition].seqno > 0

        async with client.bucket("orders").changes(
            resume=FilePositions(path), until="now", on_rollback="event"
        ) as changes:
            async for event in changes:
                table.take(event)
        assert {one.partition for one in table.rollbacks[1:]} == touched
        assert {one.rule for one in table.rollbacks} == {"bucket_gone"}
        assert table.all() == new
        after = FilePositions(path).load(range(1024))
        assert {position.bucket_version for position in after.values()} == {made.version}

        # Nothing more to undo the next time.
        async with client.bucket("orders").changes(
            resume=FilePositions(path), until="now"
        ) as changes:
            assert [event async for event in changes] == []


@pytest.mark.asyncio
async def test_a_connected_consumer_goes_over_to_the_new_bucket(
    target: str,
) -> None:
    async with AsyncClient(target) as client:
        await client.admin.create_bucket("orders")
        await client.bucket("orders").set(KEY, b"old")
        table, store = Table(), MemoryPositions()
        words: list[str] = []
        async with client.bucket("orders").changes(
            resume=store, only=Only([7, 8]), on_rollback="event", on_status=words.append
        ) as changes:
            for _ in range(2):
                table.take(await asyncio.wait_for(anext(changes), WAIT_SECONDS))
            assert table.all() == {KEY: b"old"}
            waiting = asyncio.ensure_future(anext(changes))
            await client.admin.drop_bucket("orders")
            with pytest.raises(BucketNotFoundError):
                await asyncio.wait_for(waiting, WAIT_SECONDS)
            made = await client.admin.create_bucket("orders")
            await client.bucket("orders").set(KEY, b"new")
            for _ in range(3):
                table.take(await asyncio.wait_for(anext(changes), WAIT_SECONDS))
            assert [one.partition for one in table.rollbacks] == [7]
            assert table.all() == {KEY: b"new"}
            waiting = asyncio.ensure_future(anext(changes))
            await client.admin.drop_bucket("orders")
            last = await client.admin.create_bucket("orders")
            try:
                event = await asyncio.wait_for(waiting, WAIT_SECONDS)
            except BucketNotFoundError:
                # It was back before the new one was there.
                event = await asyncio.wait_for(anext(changes), WAIT_SECONDS)
            assert isinstance(event, Rollback)
            assert store.load([7])[7].bucket_version == made.version
            table.take(event)
            await client.bucket("orders").set(KEY, b"newest")
            table.take(await asyncio.wait_for(anext(changes), WAIT_SECONDS))
            assert table.all() == {KEY: b"newest"}
        assert store.load([7])[7].bucket_version == last.version
        assert any("BUCKET_GONE" in line for line in words)


@pytest.mark.asyncio
async def test_a_writer_does_not_go_over_to_the_new_bucket(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.admin.create_bucket("orders")
        bucket = client.bucket("orders")
        await bucket.set(b"a", b"1")
        await client.admin.drop_bucket("orders")
        await client.admin.create_bucket("orders")
        with pytest.raises(BucketGoneError):
            await bucket.set(b"a", b"2")
        with pytest.raises(BucketGoneError):
            await bucket.set(b"a", b"3")
        with pytest.raises(BucketGoneError, match="created again"):
            await hello(bucket, {1: None})
        assert (await client.admin.buckets())[1].mutations == 0
        await client.bucket("orders").set(b"a", b"4")
        assert await rows_of(client, "orders") == {b"a": b"4"}


@pytest.mark.asyncio
async def test_positions_of_a_bucket_of_another_name_are_an_error_that_changes_nothing(
    target: str, tmp_path: Path
) -> None:
    async with AsyncClient(target) as client:
        for name in ("orders", "people"):
            await client.admin.create_bucket(name)
            await client.bucket(name).write_many([(KEY, name.encode())])
        stores: list[Callable[[], PositionStore]] = [
            lambda: FilePositions(tmp_path / "positions"),
            lambda: SqlitePositions(tmp_path / "positions.db"),
        ]
        policies: tuple[Policy, ...] = ("event", "restart")
        for store in stores:
            async with client.bucket("orders").changes(resume=store(), until="now") as changes:
                assert [event.value async for event in changes if isinstance(event, Change)] == [
                    b"orders"
                ]
            before = store().load(range(1024))
            assert {position.bucket for position in before.values()} == {"orders"}
            for policy in policies:
                with pytest.raises(PositionBucketError, match="'orders'; must be 'people'") as told:
                    async with client.bucket("people").changes(
                        resume=store(), on_rollback=policy
                    ) as changes:
                        await anext(changes)
                assert told.value.hint
                assert store().load(range(1024)) == before


@pytest.mark.asyncio
async def test_positions_of_the_format_before_without_a_name_are_completed(
    target: str, tmp_path: Path
) -> None:
    path = tmp_path / "positions"
    async with AsyncClient(target) as client:
        bucket = client.bucket("default")
        await bucket.write_many([(KEY, b"value")])
        async with bucket.changes(resume=FilePositions(path), until="now") as changes:
            async for _ in changes:
                pass
        # As the format before did.
        texts = {}
        for partition, position in FilePositions(path).load(range(1024)).items():
            document = position.to_document()
            del document["bucket"]
            texts[partition] = json.dumps(document, sort_keys=True, separators=(",", ":"))
        path.write_text(as_json(texts))
        assert FilePositions(path).load([7])[7].bucket == ""
        async with bucket.changes(resume=FilePositions(path), until="now") as changes:
            assert [event async for event in changes if isinstance(event, Change)] == []
        found = FilePositions(path).load(range(1024))
        assert {position.bucket for position in found.values()} == {"default"}
        assert found[7].seqno == 1
