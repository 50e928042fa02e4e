"""Members of a group over real gRPC: who may follow what, and for how long."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll
from tests.raw import RawClient, RawFollow, all_rows, error_of, start_at
from tests.service.bucket_state import connected
from tests.service.test_positions import (
    NAME,
    fill,
    info,
    load,
    position,
    reset,
    save,
    version_of,
)
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

PARTITIONS = 1024
FOREVER = 3600.0


async def member(client: RawClient, name: str, lease: float = 30.0, **options: Any) -> RawFollow:
    """Join the group; heartbeats are so rare that only the lease tells who is there."""
    options = {"heartbeat_seconds": FOREVER} | options
    return await client.follow(consumer=NAME, member=name, lease_seconds=lease, **options)


async def assigned(follow: RawFollow) -> wire.Assignment:
    return (await follow.until("assignment")).assignment


async def renew(follow: RawFollow, number: int = 1) -> None:
    """Have the lease begin anew, passing over Assignments."""
    await follow.send(renew=wire.Renew(number=number))
    while (message := await follow.read()).WhichOneof("message") != "renewed":
        pass
    assert message.renewed.number == number


async def two(
    client: RawClient, lease: float = 30.0, lease_of_b: float = 30.0
) -> tuple[RawFollow, RawFollow, list[int]]:
    """Two members that share the partitions; returns those of the second."""
    a = await member(client, "a", lease)
    assert len((await assigned(a)).owned) == PARTITIONS
    b = await member(client, "b", lease_of_b)
    assert list((await assigned(b)).owned) == []
    asked = list((await assigned(a)).to_release)
    await a.send(release=wire.Release(partitions=asked))
    told = await assigned(a)
    assert (len(told.owned), len(told.to_release)) == (512, 0)
    assert list((await assigned(b)).owned) == asked
    return a, b, asked


async def refusal(follow: RawFollow, partition: int) -> str:
    (answer,) = await follow.start(start_at(partition))
    return str(answer.refused.reason)


@pytest.mark.asyncio
async def test_members_share_the_partitions_and_hand_them_over(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 3, 1023)
        a = await member(client, "a")
        assert (a.opened.lease_seconds, a.opened.generation) == (30.0, 0)
        first = await assigned(a)
        (answer,) = await a.start(start_at(1023))
        assert answer.HasField("started")
        await a.until("frame")
        assert await save(client, first.generation, position(2, 1023), member="a") == []
        b = await member(client, "b")
        assert list((await assigned(b)).owned) == []
        assert await refusal(b, 1023) == "NOT_OWNER"
        told = await assigned(a)
        assert told.generation > first.generation
        assert 1023 in told.to_release
        # Until it releases them they are its own, but for new streams.
        assert await save(client, first.generation, position(3, 1023), member="a") == []
        assert await refusal(a, 1023) == "NOT_OWNER"
        await a.send(release=wire.Release(partitions=told.to_release))
        ended = (await a.until("ended")).ended
        assert [one.partition for one in ended.streams] == [1023]
        assert ended.problem.reason == "STOPPED"
        mine = await assigned(b)
        assert list(mine.owned) == list(told.to_release)
        assert (await load(client))[1023].seqno == 3
        assert await save(client, mine.generation, position(1, 1023), member="a") == [1023]
        assert await save(client, mine.generation, position(1, 1023), member="c") == [1023]
        split = [position(1, 1023), position(0, 0)]
        assert await save(client, mine.generation, *split, member="b") == [0]
        assert {p: one.seqno for p, one in (await load(client)).items()} == {1023: 1}
        (answer,) = await b.start(start_at(1023))
        assert answer.HasField("started")
        found = await info(client)
        assert [(one.name, one.partitions, one.releasing) for one in found.members] == [
            ("a", 512, 0),
            ("b", 512, 0),
        ]
        assert all(one.peer and 0 < one.lease_left_seconds <= 30 for one in found.members)
        owners = {at.partition: at.member for at in found.positions}
        assert (len(owners), owners[0], owners[1023]) == (PARTITIONS, "a", "b")


@pytest.mark.asyncio
async def test_after_its_lease_a_paused_member_gets_no_row_and_saves_nothing(
    target: str,
) -> None:
    async with RawClient(target) as client:
        a, b, _ = await two(client, lease=3.0, lease_of_b=FOREVER)
        (answer,) = await a.start(start_at(0))
        assert answer.HasField("started")
        generation = (await info(client)).generation
        # a says nothing from here on.
        assert len((await assigned(b)).owned) == PARTITIONS
        await fill(client, 3, 0)
        assert await save(client, generation, position(1, 0), member="a") == [0]
        (answer,) = await b.start(start_at(0))
        frame = (await b.until("frame")).frame
        assert len(all_rows(map(block_from_message, frame.blocks))) == 3
        # Nothing but this has come to a; what it says then makes it join again.
        ended = (await a.until("ended")).ended
        assert (ended.problem.reason, ended.problem.retriable) == ("LEASE_ENDED", True)
        assert [one.partition for one in ended.streams] == [0]
        assert list((await assigned(a)).owned) == []
        await a.send(pong=wire.Pong())
        asked = (await assigned(b)).to_release
        await b.send(release=wire.Release(partitions=asked))
        while not (told := await assigned(a)).owned:
            pass
        assert told.owned == asked
        assert told.generation > generation
        assert await save(client, told.generation, position(0, asked[0]), member="a") == []


@pytest.mark.asyncio
async def test_who_owned_a_consumer_before_another_server_was_active_is_fenced(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as (server, client):
        host = server._catalog.find("default")
        sole = await client.follow(consumer="sole")
        a = await member(client, "a", lease=FOREVER)
        told = await assigned(a)
        await host.step_down(fenced=False)
        # The other server had other owners, and gave generations of its own.
        between = host.disk.clock.now()
        assert between > told.generation
        await host.activate(2, {})
        refused = await error_of(save(client, sole.opened.generation, position(0), consumer="sole"))
        assert refused.reason == "FENCED"
        for generation in (told.generation, between):
            assert await save(client, generation, position(0, 5), member="a") == [5]
        # Its lease runs no more.
        b = await member(client, "b", lease=FOREVER)
        mine = await assigned(b)
        assert len(mine.owned) == PARTITIONS
        assert mine.generation > between
        assert await save(client, mine.generation, position(0, 5), member="b") == []


async def owned_by(client: RawClient, name: str) -> int:
    return sum(one.partitions for one in (await info(client)).members if one.name == name)


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancelled", "channel"])
async def test_a_lost_call_keeps_its_partitions_for_its_lease(target: str, how: str) -> None:
    async with RawClient(target) as client:
        async with RawClient(target) as other:
            a = await member(other, "a", lease=2.0)
            generation = (await assigned(a)).generation
            b = await member(client, "b", lease=FOREVER)
            await assigned(b)
            if how == "cancelled":
                a.call.cancel()
        await poll(partial(info, client), lambda told: not told.members[0].peer)
        assert (await owned_by(client, "a"), await owned_by(client, "b")) == (PARTITIONS, 0)
        assert await save(client, generation, position(0, 5), member="a") == []
        assert len((await assigned(b)).owned) == PARTITIONS
        assert [one.name for one in (await info(client)).members] == ["b"]
        assert await save(client, generation, position(0, 5), member="a") == [5]


@pytest.mark.asyncio
async def test_a_half_close_gives_everything_up_at_once(target: str) -> None:
    async with RawClient(target) as client:
        a, b, _ = await two(client, lease=FOREVER)
        await a.close()
        assert len((await assigned(b)).owned) == PARTITIONS


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_lease_holds_for_as_long_as_something_is_heard(target: str) -> None:
    async with RawClient(target) as client:
        a = await member(client, "a", lease=1.0)
        await assigned(a)
        loop = asyncio.get_running_loop()
        end = loop.time() + 2.5
        number = 0
        while loop.time() < end:
            number += 1
            await renew(a, number)
        assert await refusal(a, 5) == ""


@pytest.mark.asyncio
async def test_what_an_open_may_not_say(target: str) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "lease is 0.5 s; must be 1 to 3600": {"member": "a", "lease_seconds": 0.5},
        "lease is 3601.0 s": {"member": "a", "lease_seconds": 3601.0},
        "lease is nan s": {"member": "a", "lease_seconds": float("nan")},
        "without a member": {"lease_seconds": 5.0},
        "control characters": {"member": "a\n"},
        "member 'a' has no consumer": {"member": "a", "consumer": ""},
    }
    async with RawClient(target) as client:
        for words, options in wrong.items():
            error = await error_of(client.follow(**({"consumer": NAME} | options)))
            assert error.reason == "INVALID_ARGUMENT"
            assert words in error.message
        sole = await client.follow(consumer=NAME)
        error = await error_of(member(client, "a"))
        assert "names no member" in error.message
        assert error.hint
        messages: list[dict[str, Any]] = [
            {"renew": wire.Renew(number=1)},
            {"release": wire.Release()},
        ]
        for message in messages:
            await sole.send(**message)
            ended = (await sole.until("ended")).ended
            assert "names no member" in ended.problem.message
            await sole.close()
            sole = await client.follow(consumer=NAME)
        await sole.close()
        a = await member(client, "a")
        await assigned(a)
        assert "is a group" in (await error_of(client.follow(consumer=NAME))).message
        await a.send(release=wire.Release(partitions=range(PARTITIONS + 1)))
        assert "must be at most 1024" in (await a.until("ended")).ended.problem.message


@pytest.mark.asyncio
async def test_a_reset_ends_the_calls_of_a_group_and_fences_it(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 3, 5)
        a, b, _ = await two(client)
        generation = (await info(client)).generation
        assert await save(client, generation, position(3, 5), member="a") == []
        await reset(client, to_beginning=True)
        for follow in (a, b):
            problems = (await follow.until("ended")).ended.problem
            assert (problems.reason, problems.retriable) == ("POSITIONS_RESET", True)
            # Answering the end is not leaving.
            await follow.close()
        assert await load(client) == {}
        assert await save(client, generation, position(3, 5), member="a") == [5]
        again = await member(client, "a")
        told = await assigned(again)
        assert len(told.owned) == 512
        assert await save(client, told.generation, position(3, 5), member="a") == []


@pytest.mark.asyncio
async def test_ownership_begins_anew_with_the_server(server_process: StartServer) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        a = await member(client, "a")
        old = (await assigned(a)).generation
        assert await save(client, old, position(0, 5), member="a") == []
    server.kill()
    server.start()
    async with RawClient(server.target) as client:
        assert await save(client, old, position(0, 5), member="a") == [5]
        a = await member(client, "a")
        told = await assigned(a)
        assert told.generation > old
        assert await save(client, old, position(0, 5), member="a") == [5]
        assert await save(client, told.generation, position(0, 5), member="a") == []


@pytest.mark.asyncio
async def test_acks_of_a_member_count_for_what_it_owns(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 3, 0)
        await fill(client, 3, 1023)
        a = await member(client, "a")
        await assigned(a)
        await a.start(start_at(0), start_at(1023))
        blocks = 0
        while blocks < 2:
            blocks += len((await a.until("frame")).frame.blocks)
        b = await member(client, "b")
        await assigned(b)
        asked = (await assigned(a)).to_release
        await a.send(release=wire.Release(partitions=asked))
        both = b"".join(p.to_bytes(4, "little") + (3).to_bytes(8, "little") for p in (0, 1023))
        await a.send(ack=wire.Ack(positions=both))
        await poll(partial(info, client), lambda told: told.partitions)
        acked = [at.partition for at in (await info(client)).positions if at.time]
        assert acked == [0]


@pytest.mark.asyncio
async def test_a_group_of_another_bucket_version_is_told_so(target: str) -> None:
    async with RawClient(target) as client:
        request = wire.SavePositionsRequest(
            bucket="default", bucket_version=await version_of(client) ^ 1, consumer=NAME
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.changes.SavePositions(request, timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
