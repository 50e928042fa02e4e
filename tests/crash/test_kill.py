"""SIGKILL of a real server: what was acknowledged is there, and the failover logs tell the truth."""

import asyncio

import grpc
import pytest

from tests.conftest import StartServer
from tests.crash.loading import Load, Row, state_of, writing
from tests.guarantees import validate
from tests.model import partition_of
from tests.raw import RawClient, seqnos_of

pytestmark = pytest.mark.crash

ROUNDS = 7


@pytest.mark.long
@pytest.mark.asyncio
async def test_kills(server_process: StartServer) -> None:
    # A small tail makes flushes happen under the writes, so that kills meet them too.
    server = server_process("--tail-bytes", "300000")
    load = Load(20)
    recorder = load.recorder
    await recorder.opened(server.target)
    async with RawClient(server.target) as client:
        first_logs = await client.logs()
    records = 1
    for round_number in range(ROUNDS):
        kind = "idle" if round_number % 7 == 3 else "clean" if round_number % 7 == 5 else "writes"
        if kind == "writes":
            watch = asyncio.create_task(recorder.watch_tail(server.target))
            await load.run(server.target, load.rng.randint(1, 12), server)
            await watch
            records += 1
        elif kind == "idle":
            assert await state_of(server.target) is not None
            await recorder.look(server.target)
            server.kill()
        else:
            async with writing(server.target, "") as writer:
                rows = load.batch()
                producer = f"round {round_number}"
                recorder.sent(producer, 1, rows, 0)
                result = await writer.write(rows)
                seqnos_of(result)
                recorder.answered(producer, 1, result)
                recorder.known([key for key, _ in rows])
                load.acknowledged.update(rows)
            await recorder.look(server.target)
            assert server.terminate() == 0
        server.start()
        await recorder.restarted(server.target, clean=kind == "clean")
        async with RawClient(server.target) as client:
            logs = await client.logs()
            infos = await client.partitions()
        assert {len(log) for log in logs} == {records}, f"round {round_number}: {kind}"
        assert all(
            seqno <= info.high_seqno
            for log, info in zip(logs, infos, strict=True)
            for _, seqno in log
        )
        assert all(log[0] == first[0] for log, first in zip(logs, first_logs, strict=True))
        state = await recorder.read_all(server.target)
        for key, value in load.acknowledged.items():
            assert state.get(key) == value, f"round {round_number}: {key!r} was acknowledged"
        assert set(state) <= set(load.acknowledged) | set(load.unknown)
        # What survived without an acknowledgement is as durable as the rest from here on.
        for key in [key for key in load.unknown if key in state]:
            load.acknowledged[key] = load.unknown.pop(key)
        load.unknown = {}
    assert len(load.acknowledged) > 1000
    assert {"survived", "tail"} <= {event["event"] for event in recorder.history}
    validate(recorder.history)


@pytest.mark.asyncio
async def test_a_write_sent_again_after_a_kill_is_applied_once(server_process: StartServer) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.after_sync=kill:2"})
    first: list[Row] = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
    second: list[Row] = [(b"a", b"2"), (b"c", b"2")]
    async with writing(server.target, "once") as writer:
        given = seqnos_of(await writer.write(first, number=1))
        with pytest.raises((grpc.aio.AioRpcError, EOFError)):
            await writer.write(second, number=2)
    assert server.wait() == -9
    server.environment = {}
    server.start()
    async with writing(server.target, "once") as writer:
        assert writer.opened.last_number == 2
        again = await writer.write(second, number=2)
        assert again.duplicate
        assert seqnos_of(again) == {partition_of(k): (1, 2) for k, _ in second}
        other = await writer.write([(b"a", b"other")], number=3)
        assert not other.duplicate
    # The same after a flush and a clean restart: the answer comes from the store then.
    assert server.terminate() == 0
    server.start()
    async with writing(server.target, "once") as writer:
        old = await writer.write(first, number=1)
        assert old.duplicate
        told = seqnos_of(old)
        assert told[partition_of(b"b")] == given[partition_of(b"b")] == (0, 1)
        assert told[partition_of(b"a")] == (0, 0), (
            "a newer number is known there, the old seqnos are not"
        )
    assert await state_of(server.target) == {b"a": b"other", b"b": b"1", b"c": b"2"}
