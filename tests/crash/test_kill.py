"""SIGKILL of a real server: what was acknowledged is there, and the failover logs tell the truth."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.conftest import StartServer
from tests.crash.recording import Recorder
from tests.guarantees import validate
from tests.harness import RunningServer
from tests.model import partition_of
from tests.raw import RawClient, RawWriter, all_rows, seqnos_of, start_at
from upr_protocol.rows import build_block
from upr_protocol.wire.codec import block_to_message

pytestmark = pytest.mark.crash

ROUNDS = 20
Row = tuple[bytes, bytes | None]


async def state_of(target: str) -> dict[bytes, bytes | None]:
    """Follow all partitions from zero to now, and fold."""
    async with RawClient(target) as client:
        follow = await client.follow()
        answers = await follow.start(*(start_at(p, until_now=True) for p in range(1024)))
        assert all(answer.HasField("started") for answer in answers)
        blocks, _ = await follow.blocks_until_ended(1024)
        await follow.close()
    rows = sorted(all_rows(blocks))
    seen = [(partition, seqno) for partition, seqno, _, _ in rows]
    assert len(seen) == len(set(seen))
    return {key: value for _, _, key, value in rows}


@asynccontextmanager
async def writing(target: str, name: str) -> AsyncIterator[RawWriter]:
    async with RawClient(target) as client:
        yield await client.writer(name)


class Load:
    """Writes unique keys with several writes outstanding, and remembers which were acknowledged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.acknowledged: dict[bytes, bytes | None] = {}
        self.unknown: dict[bytes, bytes | None] = {}
        self.written = 0
        self.recorder = Recorder()
        self.calls = 0

    def batch(self) -> list[Row]:
        rows: list[Row] = []
        for _ in range(self.rng.randint(1, 200)):
            self.written += 1
            rows.append((b"key %d" % self.written, b"v" * self.rng.randint(0, 300)))
        return rows

    async def run(self, target: str, kill_after: int, server: RunningServer) -> None:
        """Write until the connection is lost; the server is killed after some acknowledgements."""
        self.calls += 1
        call = f"call {self.calls}"
        async with writing(target, "") as writer:
            sent: list[list[Row]] = []

            async def send() -> None:
                while True:
                    rows = self.batch()
                    self.unknown.update(rows)
                    sent.append(rows)
                    message = block_to_message(
                        build_block([k for k, _ in rows], [v for _, v in rows])
                    )
                    self.recorder.sent(call, len(sent), rows, message.ByteSize())
                    await writer.send_block(message)

            sender = asyncio.create_task(send())
            try:
                for answered in range(10**9):
                    if answered == kill_after:
                        server.kill()
                    result = await writer.result()
                    assert not result.HasField("refused"), result
                    self.recorder.answered(call, answered + 1, result)
                    self.recorder.known([key for key, _ in sent[answered]])
                    for key, value in sent[answered]:
                        self.acknowledged[key] = value
                        del self.unknown[key]
            except (grpc.aio.AioRpcError, EOFError):
                pass
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)


@pytest.mark.asyncio
async def test_twenty_kills(server_process: StartServer) -> None:
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
            await load.run(server.target, load.rng.randint(1, 40), server)
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
        kept = min(records, 25)
        assert {len(log) for log in logs} == {kept}, f"round {round_number}: {kind}"
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
    assert records >= 13
    assert len(load.acknowledged) > 1000
    assert {"survived", "tail"} <= {event["event"] for event in recorder.history}
    validate(recorder.history)


FAILPOINTS = [
    "journal.before_append=kill:3",
    "journal.half_append=kill:3",
    "journal.before_sync=kill:3",
    "journal.after_sync=kill:3",
    "flush.before_commit=kill:2",
    "flush.after_commit=kill:2",
    "flush.between_slices=kill:3",
    "journal.before_drop=kill:1",
    "journal.before_rotate=kill:2",
    "proof.before_clear=kill:1",
    "proof.after_clear=kill:1",
]


@pytest.mark.asyncio
@pytest.mark.parametrize("failpoint", FAILPOINTS)
async def test_killed_at_a_failpoint_under_writes(
    server_process: StartServer, failpoint: str
) -> None:
    server = server_process("--tail-bytes", "100000", environment={"UPR_FAILPOINTS": failpoint})
    load = Load(1)
    await load.run(server.target, -1, server)
    assert server.wait() == -9, "the failpoint was not reached"
    server.environment = {}
    server.start()
    state = await state_of(server.target)
    for key, value in load.acknowledged.items():
        assert state.get(key) == value
    assert set(state) <= set(load.acknowledged) | set(load.unknown)
    async with RawClient(server.target) as client:
        logs = await client.logs()
    numbered = 0 if failpoint.startswith("proof.before") else 1
    assert {len(log) for log in logs} == {1 + numbered}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "failpoint", ["recovery.before_records=kill", "recovery.after_records=kill"]
)
async def test_killed_in_recovery(server_process: StartServer, failpoint: str) -> None:
    server = server_process()
    load = Load(2)
    await load.run(server.target, 10, server)
    server.launch(environment={"UPR_FAILPOINTS": failpoint})
    assert server.wait() == -9
    server.start()
    state = await state_of(server.target)
    assert all(state.get(key) == value for key, value in load.acknowledged.items())
    async with RawClient(server.target) as client:
        # One crash after writes, one record, however often recovery itself was cut short.
        assert {len(log) for log in await client.logs()} == {2}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("failpoint", "records"),
    [
        ("shutdown.before_flush=kill", 2),
        ("shutdown.before_proof=kill", 2),
        ("shutdown.after_proof=kill", 1),
    ],
)
async def test_killed_in_shutdown(
    server_process: StartServer, failpoint: str, records: int
) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": failpoint})
    async with writing(server.target, "") as writer:
        rows: list[Row] = [(b"key %d" % i, b"value") for i in range(500)]
        seqnos_of(await writer.write(rows))
    assert server.terminate() == -9
    server.environment = {}
    server.start()
    assert await state_of(server.target) == dict(rows)
    async with RawClient(server.target) as client:
        assert {len(log) for log in await client.logs()} == {records}


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
