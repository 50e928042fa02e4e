# ruff: noqa: SIM117
"""Several endpoints, TLS and tokens, against servers in memory."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.client._async.adapter import running, serve
from tests.client.certificates import Certificate
from tests.client.key_values import Faults, KeyValueServer
from tests.client.scripted import (
    ID_A,
    VERSION,
    Expect,
    HalfClosed,
    Hold,
    Step,
    answers,
    ended,
    frame,
    opened,
    refused,
    run_block,
    started,
)
from upr_client import AsyncClient, Change, Only, WriteToken
from upr_client.errors import (
    BehindError,
    NoRoomError,
    PartitionNotActiveError,
    ShuttingDownError,
    StorageFailedError,
    TooFewReplicasError,
    UnavailableError,
    UprError,
)
from upr_protocol.limits import SERVERS_MAX
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1.types_pb2 import PARTITION_STATE_ACTIVE

FOLLOW = [Expect("open"), opened(), Expect("start")]


@pytest.mark.asyncio
async def test_a_unary_call_that_was_never_sent_is_made_elsewhere() -> None:
    async with serve() as gone:
        pass
    first, second = KeyValueServer(), KeyValueServer()
    first.values[b"k"] = second.values[b"k"] = b"v"
    async with running(first), running(second):
        targets = [gone.target, first.target, second.target]
        async with AsyncClient(targets) as client:
            assert client.target == gone.target
            assert await client.bucket().get(b"k") == b"v"
            assert client.target == first.target
            await client.bucket().get(b"k")
    assert (len(first.gets), len(second.gets)) == (2, 0)


@pytest.mark.asyncio
async def test_when_nobody_is_there_each_is_tried_once() -> None:
    async with serve() as one, serve() as two:
        pass
    async with AsyncClient(f"{one.target},{two.target}") as client:
        bucket = client.bucket()
        with pytest.raises(UnavailableError, match="nothing listens there"):
            await bucket.get(b"k")
        assert client.target == one.target


@pytest.mark.asyncio
async def test_a_call_that_may_have_arrived_is_not_made_again() -> None:
    stopping, other = KeyValueServer(), KeyValueServer()
    stopping.faults.stopping = ShuttingDownError("the server is stopping")
    async with running(stopping), running(other):
        async with AsyncClient([stopping.target, other.target]) as client:
            bucket = client.bucket()
            with pytest.raises(ShuttingDownError):
                await bucket.get(b"k")
            # But the next one goes elsewhere.
            assert client.target == other.target
            assert await bucket.get(b"k") is None
    assert (len(stopping.gets), len(other.gets)) == (1, 1)


@pytest.mark.asyncio
async def test_an_error_that_is_not_of_the_server_moves_nothing() -> None:
    full, other = KeyValueServer(), KeyValueServer()
    full.faults.stopping = NoRoomError("full")
    async with running(full), running(other):
        async with AsyncClient([full.target, other.target]) as client:
            bucket = client.bucket()
            with pytest.raises(NoRoomError):
                await bucket.get(b"k")
            assert client.target == full.target


@pytest.mark.asyncio
async def test_a_write_goes_on_at_the_next_endpoint_and_comes_round() -> None:
    first, second = KeyValueServer(Faults(lost=[1, 1, 1])), KeyValueServer(Faults(lost=[1, 1, 1]))
    async with running(first), running(second):
        async with AsyncClient([first.target, second.target], retry_seconds=30) as client:
            bucket = client.bucket()
            for number in range(5):
                await bucket.set(b"%d" % number, b"v")
    assert first.calls >= 2
    assert second.calls >= 2
    assert {**first.values, **second.values} == {b"%d" % number: b"v" for number in range(5)}


def not_active(owner: str) -> PartitionNotActiveError:
    return PartitionNotActiveError("a replica", retriable=True, owner=owner)


@pytest.mark.asyncio
async def test_a_refusal_names_the_active_server_which_is_used_from_then_on() -> None:
    replica, active, other = KeyValueServer(), KeyValueServer(), KeyValueServer()
    async with running(replica), running(active), running(other):
        refusal = not_active(active.target)
        replica.faults.refused_partitions = dict.fromkeys(range(1024), refusal)
        for endpoints in ([replica.target], [replica.target, other.target, active.target]):
            async with AsyncClient(endpoints) as client:
                await client.bucket().set(b"k", b"v")
                assert client.target == active.target
        replica.faults.stopping = refusal
        async with AsyncClient(replica.target) as client:
            # It was refused, so it is asked for again at once.
            assert await client.bucket().get(b"k") == b"v"
    assert (replica.values, active.values, other.calls) == ({}, {b"k": b"v"}, 0)


@pytest.mark.asyncio
async def test_where_no_active_server_is_named_the_next_endpoint_is_tried() -> None:
    replica, active = KeyValueServer(), KeyValueServer()
    replica.faults.stopping = not_active("")
    async with running(replica), running(active):
        async with AsyncClient([replica.target, active.target]) as client:
            await client.bucket().set(b"k", b"v")
            assert client.target == active.target


FEW = TooFewReplicasError("0 replicas")
FAILED = StorageFailedError("fsync failed", retriable=True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("faults", "becomes", "pauses"),
    [
        # The new owner's replicas are there in a moment.
        (
            Faults(stopping=not_active("")),
            [not_active(""), not_active(""), FEW, FEW, None],
            [(0, True), (1, True), (2, True), (0, False), (1, False)],
        ),
        # What the owner before said of a write is over once it is not active any more.
        (
            Faults(refused={1: FAILED}),
            [not_active(""), not_active(""), None],
            [(0, False), (0, True), (1, True)],
        ),
    ],
)
async def test_how_long_nobody_was_active_says_nothing_of_the_next_refusal(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    becomes: list[UprError | None],
    pauses: list[tuple[int, bool]],
) -> None:
    server, following = KeyValueServer(deepcopy(faults)), iter(becomes)
    told = []

    def delay(attempt: int, *_: object, away: bool, longest: float | None) -> float:
        told.append((attempt, away))
        server.faults.stopping = next(following)
        return 0.0

    monkeypatch.setattr("upr_client.backoff.delay", delay)
    async with running(server):
        async with AsyncClient(server.target) as client:
            await client.bucket().set(b"k", b"v")
    assert told == pauses


@pytest.mark.asyncio
async def test_a_writer_leaves_a_server_that_stands_still_when_another_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upr_client._async.block_writer.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("upr_client._async.call._THERE_SECONDS", 1.0)
    # It is there at first, only slow; and for a while nobody else is active.
    still = KeyValueServer(Faults(unanswered=2, there=3))
    replica, active = KeyValueServer(Faults(replica=2**62)), KeyValueServer(Faults(replica=2))
    servers = still, replica, active
    async with running(still), running(replica), running(active):
        async with AsyncClient([one.target for one in servers]) as client:
            bucket = client.bucket()
            await bucket.set(b"1", b"v")
            await bucket.set(b"2", b"v")
            assert client.target == active.target
    # Twice a round; on a busy machine a look may end before it was seen.
    assert all(3 <= one.looks <= 6 for one in servers)
    assert [one.calls for one in servers] == [1, 0, 1]
    assert (still.values, active.values) == ({b"1": b"v"}, {b"2": b"v"})


@pytest.mark.asyncio
async def test_a_writer_stays_at_a_slow_server_while_that_says_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upr_client._async.block_writer.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("upr_client._async.call._THERE_SECONDS", 2.0)
    looked: list[KeyValueServer] = []
    slow = KeyValueServer(Faults(unanswered=2, there=3), looked)
    active = KeyValueServer(looked=looked)
    async with running(slow), running(active):
        async with AsyncClient([slow.target, active.target]) as client:
            bucket = client.bucket()
            await bucket.set(b"1", b"v")
            await bucket.set(b"2", b"v")
            assert client.target == active.target
    assert looked[:3] == [slow] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("begins", [[], [opened(heartbeat_seconds=0.4), Expect("start")]])
async def test_a_follower_leaves_a_server_that_stands_still_when_another_is_active(
    begins: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr_client._async.changes.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("upr_client._async.call._THERE_SECONDS", 0.2)
    there = [*FOLLOW, answers(started(1, 7)), ended("FINISHED", (1, 7)), HalfClosed()]
    said: list[str] = []
    async with serve([[Expect("open"), *begins, Hold()]]) as still, serve([there]) as active:
        still.state, active.state = None, PARTITION_STATE_ACTIVE
        async with AsyncClient([still.target, active.target]) as client:
            changes = client.bucket().changes(only=Only([1]), on_status=said.append)
            async with changes:
                assert [event async for event in changes] == []
            assert client.target == active.target
    assert f"{still.target} says nothing, and {active.target} is active" in said[0]


@pytest.mark.asyncio
async def test_a_token_goes_to_no_server_that_was_only_named() -> None:
    replica, active = KeyValueServer(), KeyValueServer()
    async with running(replica), running(active):
        replica.faults.stopping = not_active(active.target)
        async with AsyncClient(replica.target, token="secret") as client:
            with pytest.raises(PartitionNotActiveError):
                await client.bucket().get(b"k", seconds=0.5)
            assert client.endpoints == (replica.target,)
    assert active.tokens == []


@pytest.mark.asyncio
async def test_reading_from_any_server_goes_its_own_way() -> None:
    async with serve() as gone:
        pass
    replica, active = KeyValueServer(), KeyValueServer()
    active.values[b"k"] = replica.values[b"k"] = b"v"
    async with running(replica), running(active):
        async with AsyncClient([gone.target, replica.target]) as client:
            bucket = client.bucket()
            assert await bucket.get(b"k", read_from="any") == b"v"
            assert client.target == gone.target
            replica.faults.gets = [not_active(active.target)]
            assert await bucket.get(b"k") == b"v"
            assert client.target == active.target
            assert await bucket.get(b"k", read_from="any") == b"v"
            assert (len(replica.gets), len(active.gets)) == (3, 1)
            # One that is behind is so for this write only.
            replica.faults.gets = [BehindError("later", owner=active.target)]
            written = WriteToken.of(VERSION, [(partition_of(b"k"), ID_A, 1)])
            assert await bucket.get(b"k", at_least=written, read_from="any") == b"v"
            assert await bucket.get(b"k", read_from="any") == b"v"
    assert (len(replica.gets), len(active.gets)) == (5, 2)


@pytest.mark.asyncio
async def test_who_is_behind_is_asked_again_while_another_server_is_away() -> None:
    async with serve() as gone:
        pass
    behind = KeyValueServer()
    behind.values[b"k"] = b"v"
    written = WriteToken.of(VERSION, [(partition_of(b"k"), ID_A, 1)])
    async with running(behind):
        for targets in ([behind.target, gone.target], [gone.target, behind.target]):
            behind.faults.gets = [BehindError("later", owner=gone.target)] * 2
            async with AsyncClient(targets) as client:
                bucket = client.bucket()
                assert await bucket.get(b"k", at_least=written, read_from="any") == b"v"
            assert behind.faults.gets == []
            # It is away too for a moment.
            lost = UnavailableError("failed to connect to all addresses")
            behind.faults.gets = [BehindError("later"), lost]
            async with AsyncClient(targets) as client:
                bucket = client.bucket()
                assert await bucket.get(b"k", at_least=written, read_from="any") == b"v"
        assert behind.faults.gets == []
        behind.faults.gets = [not_active(gone.target)] * 2
        async with AsyncClient([behind.target, gone.target]) as client:
            # So long as nobody is active.
            assert await client.bucket().get(b"k") == b"v"


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_server_that_says_nothing_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upr_client._async.bucket._ANSWER_SECONDS", 0.4)
    silent, there = KeyValueServer(Faults(silent=True)), KeyValueServer()
    there.values[b"k"] = b"v"
    written = WriteToken.of(VERSION, [(partition_of(b"k"), ID_A, 1)])
    async with running(silent), running(there):
        async with AsyncClient([silent.target, there.target]) as client:
            bucket = client.bucket()
            got = await bucket.get(b"k", at_least=written, read_from="any", seconds=4)
            assert got == b"v"
            # Where only the active one has it, that one gets all the time.
            assert await bucket.get(b"k", at_least=written, seconds=2) == b"v"
    assert [one.wait_seconds for one in silent.gets] == pytest.approx([1.6, 1.6], abs=0.3)


@pytest.mark.long
@pytest.mark.asyncio
async def test_who_is_behind_is_told_though_all_others_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Such that the time is over while the last one is silent.
    monkeypatch.setattr("upr_client._async.bucket._ANSWER_SECONDS", 1.2)
    behind = KeyValueServer(Faults(gets=[BehindError("later")] * 50))
    one, two = (KeyValueServer(Faults(silent=True)) for _ in range(2))
    written = WriteToken.of(VERSION, [(partition_of(b"k"), ID_A, 1)])
    async with running(behind), running(one), running(two):
        async with AsyncClient([s.target for s in (behind, one, two)]) as client:
            bucket = client.bucket()
            with pytest.raises(BehindError, match="later"):
                await bucket.get(b"k", at_least=written, read_from="any", seconds=1.6)
    assert len(two.gets) == 1


@pytest.mark.asyncio
async def test_a_partition_that_is_behind_everywhere_waits_alone() -> None:
    script = [
        *FOLLOW,
        answers(refused(2, BehindError("later")), started(1, 7)),
        frame((7, run_block(1, 0, 1))),
        Expect("start"),
        answers(started(2, 8)),
        frame((8, run_block(2, 0, 1))),
        ended("FINISHED", (1, 7), (2, 8)),
        HalfClosed(),
    ]
    async with serve([script]) as server:
        async with AsyncClient(server.target) as client:
            async with client.bucket().changes(only=Only([1, 2]), read_from="any") as changes:
                got = [e.partition async for e in changes if isinstance(e, Change)]
    assert got == [1, 2]
    assert len(server.calls["follow"]) == 1


@pytest.mark.asyncio
async def test_a_server_that_is_forgotten_leaves_nothing_behind() -> None:
    async with AsyncClient("a:1") as client:
        connection = client._connection
        for number in range(1, 3 * SERVERS_MAX + 1):
            connection.learn([f"s:{number}"])
            connection.raw(f"s:{number}")
        stubs = connection.stubs()
        assert len(connection._raw) == len(connection._channels) <= SERVERS_MAX + 1
        # One that is dead though nothing says so is closed, and given up once.
        channel: Any = connection._channels[stubs.endpoint]
        await connection.give_up(stubs)
        with pytest.raises((ValueError, grpc.aio.UsageError), match="closed"):
            await channel.unary_unary("/a/B")(b"")
        newer = connection.stubs()
        assert newer.held is not stubs.held
        await connection.give_up(stubs)
        assert connection.stubs().held is newer.held


@pytest.mark.asyncio
async def test_a_follower_of_any_server_leaves_one_that_is_behind() -> None:
    behind = [*FOLLOW, answers(refused(2, BehindError("later")), started(1, 7)), HalfClosed()]
    there = [
        *FOLLOW,
        answers(started(1, 7), started(2, 8)),
        frame((7, run_block(1, 0, 1)), (8, run_block(2, 0, 1))),
        ended("FINISHED", (1, 7), (2, 8)),
        HalfClosed(),
    ]
    async with serve([behind]) as first, serve([there]) as second:
        async with AsyncClient([first.target, second.target]) as client:
            async with client.bucket().changes(only=Only([1, 2]), read_from="any") as changes:
                got = [e.partition async for e in changes if isinstance(e, Change)]
            assert client.target == first.target
    assert got == [1, 2]
    for server in (first, second):
        assert server.calls["follow"][0].of("open")[0].any_server


@pytest.mark.asyncio
async def test_a_token_goes_with_every_call() -> None:
    server = KeyValueServer()
    tokens = iter(["first", "second", "third"])
    async with running(server):
        async with AsyncClient(server.target, token=lambda: next(tokens)) as client:
            bucket = client.bucket()
            await bucket.get(b"k")
            await bucket.set(b"k", b"v")
            await bucket.get(b"k")
        async with AsyncClient(server.target, token="fixed") as client:
            await client.bucket().get(b"k")
        async with AsyncClient(server.target) as client:
            await client.bucket().get(b"k")
    expected = ["Bearer first", "Bearer second", "Bearer third", "Bearer fixed", None]
    assert server.tokens == expected


@pytest.mark.asyncio
async def test_while_the_file_of_a_token_is_replaced_the_one_before_is_sent(tmp_path: Path) -> None:
    server, file = KeyValueServer(), tmp_path / "token"
    async with running(server):
        file.write_text("first")
        async with AsyncClient(server.target, token=file) as client:
            await client.bucket().get(b"k")
            file.write_text("")
            await client.bucket().set(b"k", b"v")
            file.unlink()
            await client.bucket().get(b"k")
            file.write_text("second")
            await client.bucket().get(b"k")
    assert server.tokens == ["Bearer first"] * 3 + ["Bearer second"]


@pytest.mark.asyncio
async def test_tls(certificate: Certificate) -> None:
    server = KeyValueServer(tls=(certificate.key, certificate.chain))
    async with running(server):
        trusting = certificate.credentials()
        async with AsyncClient(server.target, tls=trusting, token="secret") as client:
            bucket = client.bucket()
            await bucket.set(b"k", b"v")
            assert await bucket.get(b"k") == b"v"
        assert server.tokens == ["Bearer secret", "Bearer secret"]
        for tls in (None, True):
            # Not encrypted at all, or by a server that nothing vouches for.
            async with AsyncClient(server.target, tls=tls, request_timeout=5) as client:
                bucket = client.bucket()
                with pytest.raises(UnavailableError):
                    await bucket.get(b"k")
    assert len(server.tokens) == 2
