"""Positions that consumers keep in the server: durable before the answer, and fenced."""

import asyncio
import struct
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import lmdb
import pytest
from google.protobuf.message import DecodeError

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, poll
from tests.raw import RawClient, error_of, start_at
from tests.service.bucket_state import connected
from tests.service.keys import some_keys
from tests.storage.stored_blocks import consumers_of, store_of
from upr.service import change_stream
from upr.storage import keyspace
from upr.storage.check.contents import Finding, StoreCheck
from upr.storage.keyspace import DAMAGED_POSITION, ConsumerRow
from upr.storage.undone import forget_future
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

PARTITION = 9
NAME = "indexer"


async def fill(client: RawClient, rows: int, partition: int = PARTITION) -> None:
    writer = await client.writer("")
    await writer.write([(key, b"value") for key in some_keys(partition, rows)])
    await writer.close()


async def version_of(client: RawClient) -> int:
    return (await client.hello({PARTITION: None})).bucket_version


def position(seqno: int, partition: int = PARTITION, **fields: Any) -> wire.Position:
    """A position with all that it can have."""
    given: dict[str, Any] = {
        "failover_id": 7,
        "data_id": 5,
        "horizon": seqno + 3,
        "markers": [seqno] if seqno else [],
        "failover_log": [
            types.FailoverRecord(failover_id=5, seqno=0),
            types.FailoverRecord(failover_id=7, seqno=1),
        ],
    } | fields
    return wire.Position(partition=partition, seqno=seqno, **given)


async def save(
    client: RawClient,
    generation: int,
    *positions: wire.Position,
    consumer: str = NAME,
    member: str = "",
    version: int = 0,
) -> list[int]:
    """Save positions, and return the partitions that were refused, all of them with FENCED.

    Args:
        version: of the bucket; 0 asks for it first, so that saves begun together are sent in any order.
    """
    request = wire.SavePositionsRequest(
        bucket="default",
        bucket_version=version or await version_of(client),
        consumer=consumer,
        member=member,
        generation=generation,
        positions=positions,
    )
    answer = await client.changes.SavePositions(request, timeout=WAIT_SECONDS)
    assert all(one.problem.reason == "FENCED" for one in answer.refused_partitions)
    return [one.partition for one in answer.refused_partitions]


async def load(
    client: RawClient, *partitions: int, consumer: str = NAME
) -> dict[int, wire.Position]:
    request = wire.LoadPositionsRequest(bucket="default", consumer=consumer, partitions=partitions)
    answer = await client.changes.LoadPositions(request, timeout=WAIT_SECONDS)
    assert answer.bucket_version
    for one in answer.positions:
        assert one.generation
        one.ClearField("generation")
    return {one.partition: one for one in answer.positions}


async def is_saving(client: RawClient) -> bool:
    """Whether a save is under way: loading waits for it."""
    request = wire.LoadPositionsRequest(bucket="default", consumer=NAME)
    loading = client.changes.LoadPositions(request, timeout=0.1)
    return bool(await loading.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


async def own(client: RawClient, consumer: str = NAME) -> int:
    """Become the owner, and return the generation."""
    return (await client.follow(consumer=consumer)).opened.generation


async def info(client: RawClient, consumer: str = NAME) -> admin.ConsumerInfo:
    request = admin.ListConsumersRequest(bucket="default", with_positions=True)
    answer = await client.admin.ListConsumers(request, timeout=WAIT_SECONDS)
    found: list[admin.ConsumerInfo] = [one for one in answer.consumers if one.name == consumer]
    assert len(found) == 1
    return found[0]


async def reset(client: RawClient, *, create: bool = True, **to: Any) -> dict[int, int]:
    request = admin.ResetConsumerRequest(bucket="default", name=NAME, create=create, **to)
    answer = await client.admin.ResetConsumer(request, timeout=WAIT_SECONDS)
    return {one.partition: one.seqno for one in answer.positions}


@pytest.mark.asyncio
async def test_what_was_saved_survives_a_crash_whole(server_process: StartServer) -> None:
    server = server_process()
    saved = [position(7), wire.Position(partition=3, seqno=0)]
    async with RawClient(server.target) as client:
        await fill(client, 10)
        assert await load(client) == {}
        generation = await own(client)
        assert await save(client, generation, *saved) == []
        assert await load(client) == {9: saved[0], 3: saved[1]}
        assert await load(client, 3, 4) == {3: saved[1]}
        assert await load(client, consumer="another") == {}
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await load(client) == {9: saved[0], 3: saved[1]}
        found = await info(client)
        assert (found.generation, found.partitions) == (generation, 2)
        assert [(at.partition, at.seqno, at.failover_id) for at in found.positions] == [
            (3, 0, 0),
            (9, 7, 7),
        ]


@pytest.mark.asyncio
async def test_nothing_is_acknowledged_before_it_is_stored(
    server_process: StartServer, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"positions.before_commit=hold:{held}"})
    async with RawClient(server.target) as client:
        await fill(client, 10)
        saving = asyncio.create_task(save(client, await own(client), position(7)))
        async with asyncio.timeout(WAIT_SECONDS):
            while not await is_waiting(client):
                assert not saving.done()
        # Of a consumer that saves nothing there is nothing to wait for; of this one there is.
        assert await load(client, consumer="another") == {}
        loading = asyncio.create_task(load(client))
        for _ in range(20):
            await client.hello({PARTITION: None})
        assert not saving.done()
        assert not loading.done()
        held.unlink()
        assert await saving == []
        assert (await loading)[PARTITION].seqno == 7


async def is_any_registered(client: RawClient) -> bool:
    request = admin.ListConsumersRequest(bucket="default")
    return bool((await client.admin.ListConsumers(request, timeout=WAIT_SECONDS)).consumers)


async def is_waiting(client: RawClient) -> bool:
    """Whether a load of the consumer has to wait for a save."""
    try:
        async with asyncio.timeout(0.2):
            await load(client)
    except TimeoutError:
        return True
    return False


@pytest.mark.asyncio
async def test_a_former_owner_is_fenced_and_stores_nothing(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 10)
        first = await client.follow(consumer=NAME)
        generation = first.opened.generation
        assert await save(client, generation, position(3)) == []
        newer = await own(client)
        assert newer > generation
        for wrong in (generation, newer + 1, 0):
            error = await error_of(save(client, wrong, position(9)))
            assert (error.reason, error.retriable) == ("FENCED", False)
            assert "load the positions" in error.hint
        assert (await load(client))[PARTITION].seqno == 3
        # Also lower: the newest word of the owner counts.
        assert await save(client, newer, position(2)) == []
        assert (await load(client))[PARTITION].seqno == 2
        assert (await error_of(save(client, newer, position(1), consumer="x"))).reason == "FENCED"


@pytest.mark.asyncio
async def test_an_owner_whose_call_is_gone_may_save_until_the_server_starts_anew(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await client.follow(consumer=NAME)
        generation = follow.opened.generation
        await follow.close()
        assert await save(client, generation, position(3)) == []
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        assert (await error_of(save(client, generation, position(4)))).reason == "FENCED"
        newer = await own(client)
        assert newer > generation
        assert await save(client, newer, position(4)) == []


@pytest.mark.asyncio
async def test_a_position_above_the_high_seqno_is_refused_by_name(
    target: str,
) -> None:
    async with RawClient(target) as client:
        await fill(client, 10)
        generation = await own(client)
        error = await error_of(save(client, generation, position(0, partition=3), position(11)))
        assert error.reason == "INVALID_ARGUMENT"
        assert "partition 9 is at seqno 11; must be at most its high seqno 10" in error.message
        assert await load(client) == {}
        assert await save(client, generation, position(10)) == []


def log_of(records: int) -> list[types.FailoverRecord]:
    return [types.FailoverRecord(failover_id=i + 1, seqno=i) for i in range(records)]


@pytest.mark.asyncio
async def test_positions_out_of_range_are_refused_and_nothing_is_stored(
    target: str,
) -> None:
    wrong = {
        "partition is 1024": [position(1, partition=1024)],
        "named twice": [position(1), position(2)],
        str(2**48): [position(2**48)],
        "horizon is 1": [position(5, horizon=1)],
        # The largest stands for none where positions lie in a table.
        f"horizon is {2**64 - 1}": [position(5, horizon=2**64 - 1)],
        "markers is 6": [position(5, markers=[6])],
        "markers in the position of partition 9 are 65; must be at most 64": [
            position(9, markers=range(65))
        ],
        "failover records in the position of partition 9 are 1001; must be at most 1000": [
            position(9, failover_log=log_of(1001))
        ],
        "failover id is 0": [position(5, failover_id=0)],
    }
    async with RawClient(target) as client:
        await fill(client, 10)
        generation = await own(client)
        for words, positions in wrong.items():
            error = await error_of(save(client, generation, position(1, partition=3), *positions))
            assert error.reason == "INVALID_ARGUMENT"
            assert words in error.message
        assert await load(client) == {}
        good = [position(9, markers=range(10), failover_log=log_of(25))]
        assert await save(client, generation, *good) == []
        assert list((await load(client)).values()) == good
        # Of a log that another server kept longer, what this one would keep.
        longer = position(9, failover_log=log_of(40))
        assert await save(client, generation, longer) == []
        assert list((await load(client))[PARTITION].failover_log) == log_of(40)[-25:]


@pytest.mark.asyncio
async def test_what_the_server_does_not_know_of_a_position_is_not_stored(
    target: str,
) -> None:
    async with RawClient(target) as client:
        await fill(client, 10)
        generation = await own(client)
        # Field 1000, 100 bytes.
        unknown = b"\xc2\x3e\x64" + b"x" * 100
        sent = wire.Position.FromString(position(5).SerializeToString() + unknown)
        assert sent.ByteSize() == position(5).ByteSize() + len(unknown)
        assert await save(client, generation, sent) == []
        assert (await load(client))[PARTITION] == position(5)


@pytest.mark.asyncio
async def test_a_save_counts_as_an_ack_and_an_ack_leaves_it_as_it_is(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        ((newest, _),) = (await client.logs(PARTITION))[0]
        follow = await client.follow(consumer=NAME)
        await follow.start(start_at(PARTITION))
        await follow.until("frame")
        generation = follow.opened.generation
        assert await save(client, generation, position(6, failover_id=newest)) == []
        found = await info(client)
        assert (found.lag, found.positions[0].seqno, found.positions[0].high_seqno) == (4, 6, 10)
        await follow.send(ack=wire.Ack(positions=struct.pack("<IQ", PARTITION, 8)))
        await poll(partial(info, client), lambda told: told.positions[0].seqno == 8)
        assert (await load(client))[PARTITION].seqno == 6
    assert server.terminate() == 0
    server.start()
    async with RawClient(server.target) as client:
        assert (await info(client)).positions[0].seqno == 8
        assert (await load(client))[PARTITION] == position(6, failover_id=newest)


@pytest.mark.asyncio
async def test_a_forgotten_consumer_has_no_positions_until_it_saves_again(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        generation = await own(client)
        assert await save(client, generation, position(6), position(0, partition=3)) == []
        request = admin.ForgetConsumerRequest(bucket="default", name=NAME)
        assert (await client.admin.ForgetConsumer(request)).forgotten
        assert await load(client) == {}
        assert await save(client, generation, position(7)) == []
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert {p: at.seqno for p, at in (await load(client)).items()} == {PARTITION: 7}


def damage(server: RunningServer, partitions: Iterable[int]) -> None:
    """Change a byte of stored rows of the consumer, while the server is down."""
    store = next((server.data / "buckets").glob("*/store"))
    with lmdb.open(str(store), max_dbs=16) as environment:
        table = environment.open_db(b"consumers", create=False)
        with environment.begin(write=True) as txn:
            for partition in partitions:
                key = NAME.encode() + b"\0" + struct.pack(">H", partition)
                value = bytearray(txn.get(key, db=table) or b"")
                value[40] ^= 1
                txn.put(key, bytes(value), db=table)


@pytest.mark.asyncio
async def test_a_damaged_position_is_an_error_with_a_remedy(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        generation = await own(client)
        assert await save(client, generation, position(6), position(0, partition=3)) == []
    assert server.terminate() == 0
    damage(server, [PARTITION])
    server.start()
    async with RawClient(server.target) as client:
        error = await error_of(load(client))
        assert (error.reason, error.retriable) == ("POSITION_DAMAGED", False)
        assert "(9)" in error.message
        assert "upr-admin consumers reset" in error.hint
        assert list(await load(client, 3, 4)) == [3]
        assert await reset(client, to_beginning=True, partitions=[PARTITION]) == {}
        assert list(await load(client)) == [3]


# Resetting


@pytest.mark.asyncio
async def test_a_reset_to_the_beginning_removes_positions_and_fences_their_owner(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        follow = await client.follow(consumer=NAME)
        await follow.start(start_at(PARTITION))
        generation = follow.opened.generation
        assert await save(client, generation, position(6), position(0, partition=3)) == []
        assert await reset(client, to_beginning=True, partitions=[PARTITION]) == {}
        while not (message := await follow.read()).HasField("ended"):
            pass
        assert message.ended.problem.reason == "POSITIONS_RESET"
        assert message.ended.problem.retriable
        assert list(await load(client)) == [3]
        assert (await error_of(save(client, generation, position(7)))).reason == "FENCED"
        assert (await info(client)).generation > generation
        newer = await own(client)
        assert await save(client, newer, position(7)) == []
        await reset(client, to_beginning=True)
        assert not await is_any_registered(client)
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await load(client) == {}


@pytest.mark.asyncio
async def test_a_reset_of_an_unknown_name_changes_nothing(target: str) -> None:
    async with RawClient(target) as client:
        for to in ({"to_now": True}, {"to_beginning": True}, {"to_time": 1}):
            error = await error_of(reset(client, create=False, **to))
            assert (error.reason, error.retriable) == ("CONSUMER_NOT_FOUND", False)
        assert await load(client) == {}
        # One that follows is known, although nothing was acknowledged or saved yet.
        generation = await own(client)
        await reset(client, create=False, to_now=True, partitions=[PARTITION])
        assert (await info(client)).generation > generation
        await reset(client, create=False, to_beginning=True)


@pytest.mark.asyncio
async def test_saves_of_one_owner_are_applied_in_the_order_in_which_they_came(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 3, 0)
        generation, version = await own(client), await version_of(client)
        everything = [position(0, p) for p in range(1, 1024)]
        for _ in range(10):
            # The first one is larger: it arrives later, waits for its turn, and its check takes several steps.
            both = (
                save(client, generation, position(1, 0), *everything, version=version),
                save(client, generation, position(2, 0), version=version),
            )
            await asyncio.gather(*both)
            assert (await load(client, 0))[0].seqno == 2


@pytest.mark.asyncio
async def test_who_steps_down_while_positions_are_checked_stores_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = change_stream._check_positions
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")

        async def checked(*given: Any) -> None:
            await check(*given)
            await host.step_down(fenced=True)

        generation = await own(client)
        monkeypatch.setattr(change_stream, "_check_positions", checked)
        refused = await error_of(save(client, generation, position(0)))
        assert refused.reason == "PARTITION_NOT_ACTIVE"
        assert await load(client) == {}


@pytest.mark.asyncio
async def test_a_consumer_that_is_forgotten_stays_so_although_a_stream_began_during_its_first_save(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    server = server_process(environment={"UPR_FAILPOINTS": f"positions.before_commit=hold:{hold}"})
    async with RawClient(server.target) as client:
        await fill(client, 3)
        newest = (await client.partitions(PARTITION))[0].failover_id
        follow = await client.follow(consumer=NAME)
        hold.touch()
        at = position(3, failover_id=newest, data_id=newest, failover_log=())
        saving = asyncio.create_task(save(client, follow.opened.generation, at))
        await poll(partial(is_saving, client))
        await follow.start(start_at(PARTITION, 3, newest, data_id=newest))
        hold.unlink()
        assert await saving == []
        assert [(at.partition, at.seqno) for at in (await info(client)).positions] == [
            (PARTITION, 3)
        ]
        await follow.close()
        forget = admin.ForgetConsumerRequest(bucket="default", name=NAME)
        assert (await client.admin.ForgetConsumer(forget)).forgotten
        assert await load(client) == {}
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await load(client) == {}


@pytest.mark.asyncio
async def test_a_reset_to_now_registers_a_consumer_at_the_newest_markers(
    server_process: StartServer,
) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await fill(client, 10)
        stored = await reset(client, to_now=True)
        assert stored == dict.fromkeys(range(1024), 0) | {PARTITION: 10}
        log = (await client.logs(PARTITION))[0]
        newest, _ = log[-1]
        records = [types.FailoverRecord(failover_id=i, seqno=s) for i, s in log]
        expected = position(
            10, failover_id=newest, data_id=newest, horizon=10, failover_log=records
        )
        assert (await load(client))[PARTITION] == expected
        assert not (await load(client))[8].HasField("data_id")
        follow = await client.follow(consumer=NAME)
        (answer,) = await follow.start(start_at(PARTITION, 10, newest, data_id=newest))
        assert answer.HasField("started"), answer
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert (await load(client))[PARTITION] == expected


@pytest.mark.asyncio
async def test_a_reset_to_a_time_lies_right_below_the_first_mutation_since(
    target: str,
) -> None:
    async with RawClient(target) as client:
        await fill(client, 4)
        between = time.time_ns() // 1000 + 1
        while time.time_ns() // 1000 <= between:
            pass
        await fill(client, 3)
        assert await reset(client, to_time=between, partitions=[PARTITION]) == {PARTITION: 4}
        assert await reset(client, to_time=1, partitions=[PARTITION]) == {PARTITION: 0}
        late = await reset(client, to_time=2**60, partitions=[PARTITION])
        assert late == {PARTITION: 7}
        error = await error_of(reset(client))
        assert error.reason == "INVALID_ARGUMENT"


def test_a_copy_that_is_restored_keeps_saved_positions_that_are_ahead(tmp_path: Path) -> None:
    """Their consumers must be told to roll back; without a position they would begin anew, over old data."""
    store = store_of(tmp_path / "store")
    saved = ConsumerRow(1, 5, 9, 3, position(9).SerializeToString())
    store.put_consumers({(b"acked", 1): ConsumerRow(1, 5, 9, 3), (b"saved", 1): saved})
    assert forget_future(store, {1: 4}).consumers == (("acked", 1, 9),)
    assert consumers_of(store) == {b"saved": {1: saved}}
    store.close()


def test_a_damaged_row_is_no_message_of_the_wire() -> None:
    with pytest.raises(DecodeError):
        wire.Position.FromString(DAMAGED_POSITION)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (b"", ""),
        (position(9, partition=1).SerializeToString(), ""),
        (DAMAGED_POSITION, "its saved position is damaged"),
        (position(9, partition=1, horizon=3).SerializeToString(), "horizon is 3"),
        (position(9, partition=2).SerializeToString(), "is one of partition 2"),
    ],
    ids=["none", "whole", "damaged", "contradicts itself", "of another partition"],
)
def test_a_check_reads_saved_positions(stored: bytes, words: str) -> None:
    key = keyspace.consumer_key(b"c", 1)
    value = keyspace.pack_consumer(key, ConsumerRow(1, 5, 9, 3, stored))
    tables = {b"consumers": [(key, value)]}
    found: list[Finding] = []
    StoreCheck(lambda table: iter(tables.get(table, ())), {}, {}, found.append).check_rows(None)
    assert [words in one.what for one in found] == ([True] if words else [])
