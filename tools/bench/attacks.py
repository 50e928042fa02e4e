"""Hostile clients, each a load that goes on until it is killed: ``python -m tools.bench.attacks NAME HOST:PORT``.

Every one of them speaks the wire by hand, ignores refusals, and comes back at once when its calls are ended. Loopback
only: the target is a server that the measuring process has started itself.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import grpc

from tests.raw import RawClient, start_at
from upr_protocol.block import build_block
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import block_to_message
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import key_value_service_pb2 as kv
from upr_protocol.wire.v1 import types_pb2 as types

LARGE: Final = 20 * 2**20
_ALL: Final = range(PARTITIONS)
Attack = Callable[[str], Coroutine[Any, Any, None]]


async def _again(action: Callable[[], Awaitable[Any]]) -> None:
    """Do it over and over, whatever the server says."""
    while True:
        try:
            await action()
        except (grpc.RpcError, EOFError, TimeoutError, asyncio.InvalidStateError, OSError):
            await asyncio.sleep(0.05)


async def _many(count: int, action: Callable[[], Awaitable[Any]]) -> None:
    await asyncio.gather(*(_again(action) for _ in range(count)))


async def _ask_on(target: str, count: int, ask: Callable[[RawClient], Awaitable[Any]]) -> None:
    """Have clients ask over and over, each over a connection that outlasts refusals."""

    async def one() -> None:
        async with RawClient(target) as client:
            while True:
                with contextlib.suppress(grpc.RpcError):
                    await ask(client)

    await _many(count, one)


def _large_block() -> Any:
    return block_to_message(build_block([b"attack"], [os.urandom(LARGE)]))


async def _large_writers(target: str, count: int, *, idle: bool = False) -> None:
    block = _large_block()

    async def write() -> None:
        async with RawClient(target) as client:
            writer = await client.writer()
            while True:
                await writer.send_block(block)
                async with asyncio.timeout(60):
                    await writer.call.read()
                if idle:
                    await asyncio.Event().wait()

    await _many(count, write)


async def large_writes(target: str) -> None:
    """60 Write calls of 20 MiB values."""
    await _large_writers(target, 60)


async def large_writers(target: str) -> None:
    """4 writers of 20 MiB values without a pause."""
    await _large_writers(target, 4)


async def tail_writers(target: str) -> None:
    """16 calls of one connection with two values of 20 MiB each under way, which wait for room in the tail."""
    block = _large_block()
    async with RawClient(target) as client:

        async def write() -> None:
            writer = await client.writer()
            await writer.send_block(block)
            while True:
                await writer.send_block(block)
                async with asyncio.timeout(60):
                    await writer.read()

        await _many(16, write)


async def idle_writers(target: str) -> None:
    """24 calls that wrote 20 MiB once and stay open."""
    await _large_writers(target, 24, idle=True)


async def compressed_hellos(target: str) -> None:
    """120 Hellos of nearly 24 MiB that travel as some KiB."""
    request = changes.HelloRequest(bucket="x" * (23 * 2**20))
    packed = grpc.Compression.Gzip
    await _ask_on(target, 120, lambda c: c.changes.Hello(request, timeout=30, compression=packed))


async def long_names(target: str) -> None:
    """8 calls at a time with names of 20 MiB."""
    request = admin.CreateBucketRequest(name="n" * LARGE)
    await _ask_on(target, 8, lambda client: client.admin.CreateBucket(request, timeout=30))


async def silent_followers(target: str) -> None:
    """60 followers of everything from 0 that never read, with a heartbeat interval of an hour."""

    async def follow() -> None:
        async with RawClient(target) as client:
            call = client.changes.Follow()
            opening = changes.Open(bucket="default", heartbeat_seconds=3600)
            await call.write(changes.FollowRequest(open=opening))
            starts = [start_at(partition) for partition in _ALL]
            await call.write(changes.FollowRequest(start=changes.Start(partitions=starts)))
            await call.wait_for_connection()
            await asyncio.sleep(3600)

    await _many(60, follow)


async def wide_producers(target: str) -> None:
    """40 calls of ever new producers, each of which writes to all partitions."""
    keys = [b"wide-%d" % number for number in range(4096)]
    block = block_to_message(build_block(keys, [b""] * len(keys)))
    names = itertools.count()

    async def write() -> None:
        async with RawClient(target) as client:
            writer = await client.writer(f"attack-{os.getpid()}-{next(names)}")
            for _ in range(20):
                await writer.send_block(block)
                await writer.read()
            await writer.close()

    await _many(40, write)


async def silent_sockets(target: str) -> None:
    """300 connections that send nothing; a closed one is opened again."""
    host, _, port = target.rpartition(":")

    async def connect() -> None:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            while await reader.read(4096):
                pass
        finally:
            writer.close()
        await asyncio.sleep(0.2)

    await _many(300, connect)


async def follow_calls(target: str) -> None:
    """1,400 Follow calls that send Open all at once, and again."""
    clients = [RawClient(target) for _ in range(14)]
    numbers = itertools.count()

    async def follow() -> None:
        client = clients[next(numbers) % len(clients)]
        call = client.changes.Follow()
        await asyncio.sleep(1)
        opening = changes.Open(bucket="default", heartbeat_seconds=60)
        await call.write(changes.FollowRequest(open=opening))
        await call.read()
        await asyncio.sleep(2)
        call.cancel()

    await _many(1400, follow)


async def hellos(target: str) -> None:
    """50 clients that ask Hello for 1,024 partitions with their logs without a pause."""

    async def hello() -> None:
        async with RawClient(target) as client:
            while True:
                await client.hello(dict.fromkeys(_ALL), with_log=True)

    await _many(50, hello)


async def starts(target: str) -> None:
    """50 clients that start and stop 1,024 partitions from 0 without a pause."""

    async def start() -> None:
        async with RawClient(target) as client:
            follow = await client.follow(heartbeat_seconds=30)
            while True:
                await follow.send(
                    start=changes.Start(partitions=[start_at(partition) for partition in _ALL])
                )
                await follow.send(stop=changes.Stop(partitions=_ALL))
                await follow.read()

    await _many(50, start)


async def gets(target: str) -> None:
    """20 clients that Get 1,000 keys without a pause."""
    keys = [b"absent-%d" % number for number in range(1000)]

    async def get() -> None:
        async with RawClient(target) as client:
            while True:
                await client.kv.Get(kv.GetRequest(bucket="default", keys=keys), timeout=60)

    await _many(20, get)


async def cuts(target: str) -> None:
    """10 clients that create cuts under ever new names without a pause."""
    names = itertools.count()

    async def create(client: RawClient) -> None:
        name = f"attack-{os.getpid()}-{next(names)}"
        request = changes.CreateCutRequest(bucket="default", name=name, lease_seconds=5)
        await client.changes.CreateCut(request, timeout=30)

    await _ask_on(target, 10, create)


async def wrong_tokens(target: str) -> None:
    """8 clients that ask for the status with a token that nobody has, without a pause."""
    shown = (("authorization", "Bearer upr_made-up"),)
    request = admin.GetStatusRequest()
    await _ask_on(target, 8, lambda c: c.admin.GetStatus(request, metadata=shown, timeout=60))


async def consumers(target: str) -> None:
    """20 clients that register ever new consumers, each with long positions in all partitions."""
    names = itertools.count()
    log = [types.FailoverRecord(failover_id=2**47 + i, seqno=2**40 + i) for i in range(25)]
    positions = [
        changes.Position(
            partition=partition,
            failover_id=2**47 + 24,
            data_id=2**47 + 24,
            horizon=2**48 - 1,
            failover_log=log,
        )
        for partition in _ALL
    ]

    async def follow() -> None:
        async with RawClient(target) as client:
            while True:
                name = f"attack-{os.getpid()}-{next(names)}"
                follow = await client.follow(consumer=name, heartbeat_seconds=30)
                request = changes.SavePositionsRequest(
                    bucket="default",
                    bucket_version=follow.opened.bucket_version,
                    consumer=name,
                    generation=follow.opened.generation,
                    positions=positions,
                )
                await client.changes.SavePositions(request, timeout=60)
                follow.call.cancel()

    await _many(20, follow)


ATTACKS: Final[dict[str, Attack]] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        *(large_writes, large_writers, tail_writers, idle_writers),
        *(compressed_hellos, long_names, silent_followers, wide_producers),
        *(silent_sockets, follow_calls, hellos, starts),
        *(gets, cuts, consumers, wrong_tokens),
    )
}
GUARDED: Final = frozenset({"wrong-tokens"})
"""Attacks on a server with identities."""


def main() -> None:
    """Run one attack until the process is killed."""
    name, target = sys.argv[1:]
    address = target.rpartition(":")[0].strip("[]")
    if not socket.inet_aton(address).startswith(b"\x7f"):
        sys.exit(f"error: target is {target}; must be an address of 127.0.0.0/8")
    os.nice(19)
    asyncio.run(ATTACKS[name](target))


if __name__ == "__main__":
    main()
