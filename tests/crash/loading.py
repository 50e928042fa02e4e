"""Writes with several outstanding until the server is gone, for tests with servers that are killed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from tests.crash.recording import Recorder
from tests.harness import RunningServer
from tests.raw import RawClient, RawWriter, all_rows, start_at
from upr_protocol.block import build_block
from upr_protocol.wire.codec import block_to_message

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
        for _ in range(self.rng.randint(1, 120)):
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
