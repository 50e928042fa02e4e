"""Replicas of real servers: they hold what the upstream has, under its numbers, through restarts of either."""

import base64
import functools
import json
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import StartServer
from tests.harness import RunningServer, poll
from tests.raw import RawClient, all_cells, cells_for, with_cells
from tests.replica.sets import SOON, topology, wait_for, wait_until_counted
from tests.service.bucket_state import rows_of
from upr.cli.admin import main
from upr.storage.store import Store
from upr_client import AsyncClient, ServerPositions
from upr_client.lowlevel import build_block, write_blocks
from upr_protocol.block import block_keys
from upr_protocol.errors import UprError
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

UNCOUNTED = {"UPR_SERVER_OPEN_ADMIN": "0"}
"""Environment of servers that do not meet: an owner asks no replica at its start, and flushes without one."""


@pytest.fixture
def server_process(server_process: StartServer) -> StartServer:
    return functools.partial(server_process, constants=SOON)


def pairs(count: int, value: bytes = b"v", first: int = 0) -> list[tuple[bytes, bytes | None]]:
    return [(b"key %d" % i, value) for i in range(first, first + count)]


async def status(server: RunningServer) -> admin.BucketStatus:
    async with RawClient(server.target) as raw:
        answer = await raw.admin.GetStatus(admin.GetStatusRequest())
    found: admin.BucketStatus = next(iter(answer.buckets), admin.BucketStatus())
    return found


async def table(server: RunningServer) -> list[tuple[int, ...]]:
    """Durable seqno, last complete marker and log of each partition."""
    async with RawClient(server.target) as raw:
        infos, logs = await raw.partitions(), await raw.logs()
    return [
        (i.durable_seqno, i.complete_seqno, *sum(log, ()))
        for i, log in zip(infos, logs, strict=True)
    ]


async def in_sync(upstream: RunningServer, replica: RunningServer) -> None:
    """Wait until a replica durably has all that its upstream durably has, under the same logs."""
    expected = await poll(
        lambda: table(upstream), lambda found: all(one[0] == one[1] for one in found)
    )

    async def same() -> bool:
        try:
            return await table(replica) == expected
        except Exception:
            return False

    await poll(same)


async def rows(server: RunningServer, bucket: str = "default") -> dict[bytes, bytes | None]:
    async with AsyncClient(server.target) as client:
        return await rows_of(client, bucket)


def replica_of(start: StartServer, *upstreams: RunningServer, **more: Any) -> RunningServer:
    return start("--replicate-from", ",".join(one.target for one in upstreams), **more)


def shown(*arguments: str) -> str:
    """What upr-admin prints."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.asyncio
async def test_a_replica_joins_a_written_bucket_and_follows(server_process: StartServer) -> None:
    upstream = server_process("--tail-bytes", "200000")
    async with AsyncClient(upstream.target) as client:
        bucket = client.bucket("default")
        # Some of it is in the store, some is in the tail, and writing goes on.
        await bucket.write_many(pairs(5000, b"x" * 100))
        await bucket.write_many([(b"key 1", None)])
        # Less memory than there is to be received.
        replica = server_process("--replicate-from", upstream.target, "--tail-bytes", "100000")
        for n in range(20):
            await bucket.write_many(pairs(50, b"round %d" % n, 10 * n))
        await in_sync(upstream, replica)
        assert await rows(replica) == await rows(upstream)
        await bucket.set(b"late", b"v")
        await in_sync(upstream, replica)
    async with AsyncClient(replica.target) as client:
        copy = client.bucket("default")
        assert await copy.get(b"late", read_from="any") == b"v"
    # With a token it goes to no server that was only named.
    async with AsyncClient(replica.target, token="t", retry_seconds=0) as client:
        with pytest.raises(UprError) as refused:
            await client.bucket("default").set(b"late", b"w")
        assert refused.value.reason == "PARTITION_NOT_ACTIVE"
    here = await poll(lambda: status(replica), lambda found: found.upstream.in_step)
    assert (here.upstream.lag, here.upstream.lag_seconds) == (0, 0)
    assert (here.upstream.address, here.upstream.connected) == (upstream.target, True)
    assert here.version == (await status(upstream)).version
    async with RawClient(replica.target) as raw:
        assert {i.state for i in await raw.partitions()} == {types.PARTITION_STATE_REPLICA}
    there = await poll(
        lambda: status(upstream), lambda found: [r.lag for r in found.replicas] == [0]
    )
    mark = json.loads((replica.data / "upr-stream.json").read_text())
    assert [(r.directory, r.address) for r in there.replicas] == [
        (mark["directory"], replica.target)
    ]
    assert "in step" in shown("status", "--target", replica.target)
    assert mark["directory"] in shown("status", "--target", upstream.target)
    assert mark["cluster"] == json.loads((upstream.data / "upr-stream.json").read_text())["cluster"]


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.crash
async def test_a_replica_goes_on_after_a_kill_of_it_or_of_its_upstream(
    server_process: StartServer,
) -> None:
    upstream = server_process()
    replica = replica_of(server_process, upstream)
    async with AsyncClient(upstream.target) as client:
        bucket = client.bucket("default")
        await bucket.write_many(pairs(500))
        await in_sync(upstream, replica)
        for n in range(2):
            replica.kill()
            await bucket.write_many(pairs(300, b"%d" % n, 100 * n))
            replica.start()
            await bucket.write_many(pairs(300, b"%d, later" % n, 150 * n))
            await in_sync(upstream, replica)
            upstream.kill()
            # Without its upstream it serves what it has.
            assert len(await rows(replica)) >= 500
            upstream.start()
            await bucket.write_many(pairs(10, b"after the start"))
            await in_sync(upstream, replica)
            assert await rows(replica) == await rows(upstream)
    assert (await status(replica)).upstream.undone == 0


def undone(server: RunningServer) -> list[dict[str, Any]]:
    """All lines of all files but the first of each."""
    files = sorted((server.data / "undone").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()[1:]]


@pytest.mark.asyncio
@pytest.mark.crash
@pytest.mark.parametrize("killed", ["", "recovery.before_records", "recovery.after_records"])
async def test_a_replica_undoes_what_its_upstream_lost_and_keeps_it_in_a_file(
    server_process: StartServer, tmp_path: Path, killed: str
) -> None:
    hold = tmp_path / "hold"
    upstream = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    points = f"{killed}=kill" if killed else ""
    # One that is counted would be asked for what it has.
    replica = server_process(
        "--replicate-from",
        upstream.target,
        "--anonymous",
        environment={"UPR_FAILPOINTS": points},
    )
    async with AsyncClient(upstream.target) as client:
        bucket = client.bucket("default")
        await bucket.write_many([*pairs(200), (b"to go", b"old")])
        await in_sync(upstream, replica)
        hold.touch()
        # Only in the memory of the upstream, but on the disk of the replica.
        lost = [(b"to go", b"new"), (b"lost", b"value"), (b"key 7", None)]
        for one in lost:
            await bucket.write_many([one], durability="memory")
        async with AsyncClient(replica.target) as other:
            await poll(
                lambda: other.bucket("default").get(b"key 7", read_from="any"),
                lambda value: value is None,
            )
            upstream.kill()
            hold.unlink()
            upstream.start()
            await bucket.set(b"next", b"v")
            if killed:
                # While it undoes, which the next start does again, or has done.
                assert replica.wait() == -signal.SIGKILL
                replica.start(environment={"UPR_FAILPOINTS": ""})
            await in_sync(upstream, replica)
            assert await rows(replica) == await rows(upstream)
            assert await other.bucket("default").get(b"to go", read_from="any") == b"old"
            assert await other.bucket("default").get(b"key 7", read_from="any") == b"v"
    told = {base64.b64decode(row["key"]): row for row in undone(replica)}
    assert told.keys() == {b"to go", b"lost", b"key 7"}
    assert {key: row["op"] for key, row in told.items()} == {
        b"to go": "set", b"lost": "set", b"key 7": "delete",
    }  # fmt: skip
    assert base64.b64decode(told[b"to go"]["value"]) == b"new"
    assert told[b"lost"]["partition"] == partition_of(b"lost")
    assert (await status(replica)).upstream.undone == (0 if killed.endswith("after_records") else 3)
    listed = json.loads(shown("undone", "list", str(replica.data), "--json"))
    # Killed in between, it is kept twice.
    assert [(one["bucket"], one["mutations"]) for one in listed] == [("default", 3)] * (
        2 if killed.endswith("before_records") else 1
    )
    assert "b'lost'" not in shown("undone", "list", str(replica.data))
    assert "'lost'" in shown("undone", "list", str(replica.data), "--rows")
    replica.terminate()
    shown("check", str(replica.data))


def small_tables(server: RunningServer) -> tuple[Any, Any, Any]:
    """Producers' numbers, consumers' positions and cuts, as a stopped server has stored them."""
    (folder,) = (server.data / "buckets").iterdir()
    store = Store(folder / "store")
    producers = {name: n.table.tolist() for name, n in store.producers_after(b"", 2**30)}
    consumers = {
        (name, partition): row
        for name, partition, row in store.consumers()
        if not name.startswith(b"replica:")
    }
    cuts = store.cuts()
    store.close()
    return producers, consumers, cuts


async def follow(client: AsyncClient, consumer: str) -> None:
    """Follow to what is there now, and acknowledge all of it."""
    async with client.bucket("default").changes(
        until="now", resume=ServerPositions(consumer)
    ) as changes:
        async for batch in changes.batches():
            assert batch.rows


@pytest.mark.asyncio
@pytest.mark.crash
async def test_a_bucket_that_is_opened_anew_is_not_gone(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold, reopening = tmp_path / "hold", tmp_path / "reopening"
    points = {"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"}
    upstream = server_process(environment=points | UNCOUNTED)
    points = {"UPR_FAILPOINTS": f"recovery.before_records=hold:{reopening}"}
    replica = replica_of(server_process, upstream, environment=points | UNCOUNTED)
    async with AsyncClient(upstream.target) as client, RawClient(replica.target) as raw:
        await client.bucket("default").set(b"key", b"v")
        await in_sync(upstream, replica)
        hold.touch()
        reopening.touch()
        await client.bucket("default").set(b"lost", b"v", durability="memory")

        async def listed() -> admin.BucketInfo:
            answer = await raw.admin.ListBuckets(admin.ListBucketsRequest())
            (found,) = answer.buckets
            return found  # type: ignore[no-any-return]

        before = await poll(listed, lambda info: info.mutations == 2)
        upstream.kill()
        hold.unlink()
        upstream.start()
        # Its own replicas would drop what is not listed.
        during = await poll(listed, lambda info: info.HasField("problem"))
        assert (during.version, during.problem.reason) == (before.version, "HISTORY_CHANGED")
        assert during.problem.retriable
        reopening.unlink()
        await in_sync(upstream, replica)


@pytest.mark.long
@pytest.mark.asyncio
@pytest.mark.crash
async def test_an_old_active_server_comes_back_as_a_replica_and_undoes_what_nobody_else_has(
    server_process: StartServer,
) -> None:
    old = server_process("--flush-seconds", "0.2")
    new = replica_of(server_process, old)
    async with AsyncClient(old.target) as client:
        await client.bucket("default").write_many(pairs(400))
        await in_sync(old, new)
        wait_until_counted([old, new], old)
        assert new.terminate() == 0
        lost = [*pairs(5, b"alone"), (b"alone", b"v")]
        block = with_cells(build_block([key for key, _ in lost], [value for _, value in lost]))
        await write_blocks(client.bucket("default"), [block])
    old.kill()
    new.start()
    shown("promote", "--force", "--yes", "--target", new.target)
    async with AsyncClient(new.target) as client, AsyncClient(old.target) as reader:
        await client.bucket("default").write_many([*pairs(3, b"after"), (b"after", b"v")])
        # No flush before it undoes: merged, its rows would go back to the marker before the merged ones.
        old.options = ["--flush-seconds", "600", "--replicate-from", new.target]
        old.start()
        await in_sync(new, old)
        assert await rows(old) == await rows(new)
        assert await reader.bucket("default").get(b"alone", read_from="any") is None
        # What it makes of itself is no history of its own: the log is that of the new one.
        await client.bucket("default").set(b"later", b"v")
        await in_sync(new, old)
        # A replica that is behind is not asked what a key has now.
        old.terminate()
        old.options = ["--replicate-from", "127.0.0.1:1"]
        old.start()
        file = max((old.data / "undone").glob("*.jsonl"))
        put_back = (
            "undone",
            "apply",
            str(file),
            "--if-unchanged",
            "--target",
            f"{old.target},{new.target}",
            "--json",
        )
        for written in (3, 0):
            told = json.loads(shown(*put_back))
            assert told == {"written": written, "changed_since": 6 - written, "elsewhere": 0}
        values = await client.bucket("default").get_many([b"alone", *(key for key, _ in pairs(6))])
        assert list(values.values()) == [b"v", *[b"after"] * 3, *[b"alone"] * 2, b"v"]
        async with client.bucket("default").changes(until="now") as changes:
            blocks = [block async for batch in changes.batches() for block in batch.blocks]
        cells = {
            key: of_row
            for block in blocks
            for key, of_row in zip(block_keys(block), all_cells(block), strict=True)
            if of_row
        }
        # The two rows that have some.
        assert cells == {key: cells_for(key, values[key]) for key in (b"alone", b"key 4")}
    told = [(base64.b64decode(row["key"]), base64.b64decode(row["value"])) for row in undone(old)]
    assert sorted(told) == sorted([*pairs(5, b"alone"), (b"alone", b"v")])
    old.terminate()
    new.terminate()
    for server in (old, new):
        assert "fine" in shown("check", str(server.data))


@pytest.mark.asyncio
@pytest.mark.crash
async def test_a_replica_that_missed_purged_deletions_begins_anew(
    server_process: StartServer,
) -> None:
    options = ("--tombstone-age", "0", "--purge-hold", "0", "--flush-seconds", "0.1")
    upstream = server_process(*options, environment=UNCOUNTED)
    replica = server_process("--replicate-from", upstream.target, *options, environment=UNCOUNTED)
    async with AsyncClient(upstream.target) as client, RawClient(upstream.target) as raw:
        bucket = client.bucket("default")
        await bucket.write_many(pairs(50))
        await in_sync(upstream, replica)
        replica.kill()
        await bucket.write_many([(key, None) for key, _ in pairs(25)])
        # The row at the high seqno is never purged.
        await bucket.write_many([(b"%d, %d" % (i, i), b"v") for i in range(3000)])

        async def purged() -> int:
            await raw.admin.Purge(admin.PurgeRequest(bucket="default"))
            return sum(one.purge_seqno > 0 for one in await raw.partitions())

        await poll(purged, lambda partitions: partitions >= 10)
        replica.start()
        await in_sync(upstream, replica)
        assert await rows(replica) == await rows(upstream)
    assert (await status(replica)).upstream.undone == 0
    assert undone(replica) == []


@pytest.mark.asyncio
async def test_the_small_tables_come_at_the_join_and_with_every_change(
    server_process: StartServer,
) -> None:
    upstream = server_process("--tail-bytes", "100000")
    async with AsyncClient(upstream.target) as client:
        bucket = client.bucket("default")
        await bucket.write_many(pairs(2000, b"x" * 100))
        await follow(client, "before")
        await client.admin.create_cut("default", "early", partitions=[1, 2, 3])
        replica = replica_of(server_process, upstream)
        await poll(lambda: status(replica), lambda found: found.upstream.in_step)
        # And what comes later: numbers beside the blocks, the rows of a consumer, a cut made and one released.
        await bucket.write_many(pairs(700, b"later"))
        await client.admin.create_cut("default", "late", partitions=[4])
        await follow(client, "after")
        await client.admin.release_cut("default", "early")
        await bucket.write_many(pairs(300, b"last"))
        await in_sync(upstream, replica)

        async def told() -> bool:
            async with RawClient(replica.target) as raw:
                cuts = (await raw.changes.ListCuts(wire.ListCutsRequest(bucket="default"))).cuts
                known = await raw.admin.ListConsumers(admin.ListConsumersRequest(bucket="default"))
            names = {one.name for one in known.consumers}
            return {"before", "after"} <= names and [cut.name for cut in cuts] == ["late"]

        await poll(told)
        assert (
            await poll(lambda: status(replica), lambda s: s.upstream.in_step)
        ).upstream.connected
        # What goes while the replica is away is gone there too when it is in step.
        assert replica.terminate() == 0
        await client.admin.forget_consumer("default", "before")
        await client.admin.release_cut("default", "late")
        await client.admin.create_cut("default", "last", partitions=[5])
        replica.start()
        await poll(lambda: status(replica), lambda s: s.upstream.in_step)
        # A cut is told without a row behind it.
        await client.admin.release_cut("default", "last")
        await client.admin.create_cut("default", "end", partitions=[6])

        async def names_of_cuts() -> list[str]:
            async with AsyncClient(replica.target) as other:
                return [cut.name for cut in await other.admin.cuts("default")]

        await poll(names_of_cuts, lambda names: names == ["end"])
    upstream.terminate()
    replica.terminate()
    (producers, consumers, cuts), (told_producers, told_consumers, told_cuts) = (
        small_tables(server) for server in (upstream, replica)
    )
    assert producers
    assert told_producers == producers
    assert {key: row.seqno for key, row in told_consumers.items()} == {
        key: row.seqno for key, row in consumers.items()
    }
    assert told_consumers.keys() == consumers.keys()
    assert b"before" not in {name for name, _ in consumers}
    assert told_cuts.keys() == cuts.keys() == {b"end"}


@pytest.mark.asyncio
async def test_a_chain_and_a_star_of_replicas(server_process: StartServer) -> None:
    upstream = server_process()
    first = replica_of(server_process, upstream)
    # The first address of the second is of nobody.
    second = server_process("--replicate-from", f"127.0.0.1:1,{first.target}")
    third = server_process("--replicate-from", upstream.target, "--anonymous")
    async with AsyncClient(upstream.target) as client:
        await client.bucket("default").write_many(pairs(1000))
        for replica in (first, second, third):
            await in_sync(upstream, replica)
            assert len(await rows(replica)) == 1000
        first.kill()
        await client.bucket("default").write_many(pairs(500, b"w"))
        first.start()
        await in_sync(upstream, second)
        assert await rows(second) == await rows(upstream)
    async with RawClient(upstream.target) as raw:
        known = await raw.admin.ListConsumers(admin.ListConsumersRequest(bucket="default"))
    assert [one.name.partition(":")[0] for one in known.consumers] == ["replica"]
    assert sorted(one.anonymous for one in (await status(upstream)).replicas) == [False, True]


@pytest.mark.asyncio
async def test_buckets_come_and_go_with_those_of_the_upstream(server_process: StartServer) -> None:
    upstream = server_process()
    replica = replica_of(server_process, upstream)
    async with AsyncClient(upstream.target) as client, AsyncClient(replica.target) as copy:
        await client.admin.create_bucket("second", compression="zstd")
        await client.bucket("second").write_many(pairs(300, b"x" * 1000))

        async def copied() -> bool:
            try:
                return len(await rows_of(copy, "second")) == 300
            except UprError:
                return False

        await poll(copied)
        await client.admin.drop_bucket("second")

        async def names() -> list[str]:
            return [one.name for one in await copy.admin.buckets()]

        await poll(names, lambda found: found == ["default"])


@pytest.mark.asyncio
async def test_what_changes_state_is_refused_by_a_replica_and_done_at_the_active_server(
    server_process: StartServer,
) -> None:
    upstream = server_process()
    replica = replica_of(server_process, upstream)
    await in_sync(upstream, replica)
    wait_until_counted([upstream, replica], upstream)

    def changes(client: AsyncClient) -> list[Awaitable[Any]]:
        asked = client.admin
        return [
            asked.create_bucket("mine"),
            asked.set_bucket_quota("default", 10**9),
            asked.create_cut("default", "cut", partitions=[1]),
            asked.renew_cut("default", "cut"),
            asked.release_cut("default", "cut"),
            asked.reset_consumer("default", "c", "now", partitions=[1], create=True),
            asked.forget_consumer("default", "c"),
            asked.drop_bucket("mine"),
        ]

    # With a token it goes to no server that was only named.
    async with AsyncClient(replica.target, token="t", retry_seconds=0) as client:
        for change in changes(client):
            with pytest.raises(UprError) as told:
                await change
            found = told.value.reason, told.value.retriable, told.value.owner
            assert found == ("PARTITION_NOT_ACTIVE", True, upstream.target)
        assert [one.name for one in await client.admin.buckets()] == ["default"]
        assert await client.admin.cuts("default") == []
    async with AsyncClient(replica.target) as client:
        for change in changes(client):
            await change
    async with AsyncClient(replica.target) as client:
        # A consumer whose positions the server keeps is followed where they are kept.
        await follow(client, "named")
        assert client.target == upstream.target


@pytest.mark.asyncio
@pytest.mark.crash
@pytest.mark.parametrize("killed", [False, True])
async def test_a_bucket_that_its_upstream_never_had_is_kept(
    server_process: StartServer, killed: bool
) -> None:
    old = server_process()
    new = replica_of(server_process, old)
    await in_sync(old, new)
    wait_until_counted([old, new], old)
    assert new.terminate() == 0
    async with AsyncClient(old.target) as client:
        await client.admin.create_bucket("second")
        await client.bucket("second").write_many(pairs(20))
    old.kill()
    new.start()
    shown("promote", "--force", "--yes", "--target", new.target)
    if killed:
        old.launch(environment={"UPR_FAILPOINTS": "bucket.before_drop=kill"})
        assert old.wait() == -signal.SIGKILL
    old.start(environment={"UPR_FAILPOINTS": ""})
    wait_until_counted([old, new], new)
    (one,) = json.loads(shown("undone", "list", str(old.data), "--json"))
    assert (one["bucket"], one["mutations"]) == ("second", 20)
    kept = Path(one["file"])
    refused = CliRunner().invoke(
        main, ["undone", "apply", f"{kept}.jsonl", "--if-unchanged", "--target", new.target]
    )
    assert "kept whole" in refused.output
    # The folder is a whole bucket: another server serves it.
    other = server_process()
    assert other.terminate() == 0
    os.rename(kept, other.data / "buckets" / kept.name.partition("-")[0])
    other.start()
    assert await rows(other, "second") == dict(pairs(20))


@pytest.mark.asyncio
async def test_a_bucket_that_cannot_be_made_stops_no_other(
    server_process: StartServer, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    upstream = server_process()
    points = f"bucket.before_create=error-while:ENOSPC:{full}"
    replica = replica_of(server_process, upstream, environment={"UPR_FAILPOINTS": points})

    def in_step() -> bool:
        known = topology(replica.target)
        assert known is not None
        # Of itself alone: another server that it heard of and has not met yet is not in step either, for a moment.
        return all(one.in_step for one in known.members if one.directory == known.directory)

    await in_sync(upstream, replica)
    wait_for(in_step, "the replica to be in step")
    full.touch()
    async with AsyncClient(upstream.target) as client:
        await client.admin.create_bucket("second")
        wait_for(lambda: not in_step(), "the bucket to be missing")
        await client.bucket("default").write_many(pairs(20))
        await in_sync(upstream, replica)
        # A call that is opened anew is served as well.
        upstream.terminate()
        upstream.start()
        await client.bucket("default").write_many(pairs(20, b"w"))
        await in_sync(upstream, replica)
        await poll(lambda: status(replica), lambda found: found.upstream.in_step)
    assert not in_step()
    full.unlink()
    wait_for(in_step, "the missing bucket")


@pytest.mark.asyncio
async def test_an_upstream_of_another_set_is_refused(server_process: StartServer) -> None:
    upstream, other = server_process(), server_process()
    async with AsyncClient(other.target) as client:
        await client.bucket("default").set(b"mine", b"v")
    replica = replica_of(server_process, upstream)
    await in_sync(upstream, replica)
    wait_until_counted([upstream, replica], upstream)
    replica.terminate()
    # It knows who is active in its set, and follows that one whatever it is told.
    replica.options[1] = other.target
    replica.start()
    async with AsyncClient(upstream.target) as client:
        await client.bucket("default").set(b"k", b"v")
    await in_sync(upstream, replica)
    assert await rows(replica) == {b"k": b"v"}
    # A server with data of its own is no replica of another one.
    other.terminate()
    other.options += ["--replicate-from", upstream.target]
    other.start()

    async def problem() -> str:
        found = (await status(other)).upstream.problem
        return str(found.message) if found.reason == "WRONG_REPLICA_SET" else ""

    assert "belongs to the set of servers" in await poll(problem)
    assert await rows(other) == {b"mine": b"v"}
