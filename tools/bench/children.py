"""The processes beside the measuring one: ``children.py bare`` and ``children.py produce TARGET SECONDS DURABILITY [RATE]``."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np

from upr_client import AsyncClient
from upr_protocol.wire.grpc import CLIENT_OPTIONS, SERVER_OPTIONS

CHILDREN: Final = Path(__file__)
BARE_METHOD: Final = "/bench.Bare/Stream"
BARE_UNARY: Final = "/bench.Bare/Unary"
PER_SECOND: Final = 1000
KEYS: Final = 4096
STAMP: Final = np.dtype([("time", "<i8"), ("number", "<i8"), ("", "V112")])
"""Value of each row: when it was handed to the SDK, in nanoseconds of the monotonic clock, and its number from 0."""


class _Bare(grpc.GenericRpcHandler):
    """Streams what was asked for: "COUNT SIZE" in, messages of bytes out. The unary call returns its request."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == BARE_UNARY:
            return grpc.unary_unary_rpc_method_handler(self._unary)
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _unary(self, request: bytes, context: object) -> bytes:
        return request

    async def _stream(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        count, size = map(int, request.split())
        message = bytes(size)
        for _ in range(count):
            yield message


async def serve_bare() -> None:
    """Serve until stdin ends; the port goes to stdout."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Bare(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@contextmanager
def bare_server() -> Iterator[str]:
    """Run the bare server; its target."""
    process = subprocess.Popen(
        [sys.executable, str(CHILDREN), "bare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


async def bare_calls(channel: grpc.aio.Channel, count: int) -> list[float]:
    """Call the bare server so often, one call after the other; return how long each took, in milliseconds."""
    call: Any = channel.unary_unary(BARE_UNARY)
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await call(b"")
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


async def bare_stream(target: str, count: int, size: int) -> tuple[float, float]:
    """Receive messages over bare gRPC; return the seconds of time and of CPU here that those after the first one took."""
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
        method: Any = channel.unary_stream(BARE_METHOD)
        call = method(b"%d %d" % (count, size))
        await call.read()
        began, used = time.perf_counter(), time.process_time()
        while await call.read() is not grpc.aio.EOF:
            pass
        return time.perf_counter() - began, time.process_time() - used


async def produce(target: str, seconds: float, durability: str, rate: int = PER_SECOND) -> None:
    """Write ``rate`` keys a second, each with a STAMP."""
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.set(b"warm", b"", durability)
        tasks = set[asyncio.Task[Any]]()
        began = time.monotonic()
        for number in range(int(seconds * rate)):
            late = began + number / rate - time.monotonic()
            if late > 0:
                await asyncio.sleep(late)
            stamp = np.array((time.monotonic_ns(), number, b""), STAMP)
            value = stamp.tobytes()
            key = b"key-%012d" % (number * 7919 % KEYS)
            task = asyncio.create_task(bucket.set(key, value, durability))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        asyncio.run(serve_bare())
    else:
        asyncio.run(produce(sys.argv[2], float(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:])))
