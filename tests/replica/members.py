"""Sets of servers in one process, whose parts tests reach."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from tests.harness import until
from upr.engine.bucket import Written
from upr.replica.ownership import Ownership
from upr.replica.replica_service import ReplicaMethods
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.server import Server
from upr_protocol.block import build_block

Start = Callable[..., Awaitable["Member"]]
PRODUCER = b"w"
A, B = 3, 4
"""Partitions that are written to."""


class Member:
    """One server of a set."""

    def __init__(self, server: Server) -> None:
        self.server = server
        methods = server._sets
        assert isinstance(methods, ReplicaMethods)
        self.ownership: Ownership = methods._ownership
        self.catalog = server._catalog
        self.target = server.address
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True
        await self.server.stop()

    @property
    def names(self) -> list[str]:
        return sorted(host.bucket.identity.name for host in self.catalog.hosts)

    @property
    def host(self) -> BucketService:
        """Its bucket as it is now: one of which a part is undone is opened anew."""
        return self.catalog.find("default")

    @property
    def upstream_state(self) -> UpstreamState:
        upstream_state = self.host.upstream_state
        assert upstream_state is not None
        return upstream_state

    def seqno(self, partition: int) -> int:
        """Return the last complete durable marker."""
        return int(self.host.bucket.markers.seqno[partition])

    async def flush(self) -> None:
        host = self.host
        while host.bucket.tail.first < host.bucket.tail.end:
            await host.flusher.flush(wanted=True)

    async def begin_join(self) -> None:
        """Be as if a join had begun, and nothing of it had come yet."""
        self.upstream_state.begin_tables()
        await self.upstream_state.set_joining(True)


async def never(*_: object) -> None:
    await asyncio.Event().wait()


async def full(*_: object) -> int:
    """Write nothing, as of a journal whose disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def start_set(start: Start, replicas: int = 1) -> list[Member]:
    """Start an active server and replicas, and wait until all know that the replicas are counted."""
    first = await start()
    members = [first, *[await start(first) for _ in range(replicas)]]
    others = {one.ownership.standing.directory for one in members[1:]}
    await until(lambda: all(one.ownership.standing.row.counted == others for one in members))
    return members


async def leave_alone(member: Member) -> None:
    """Have a server follow nobody, and meet nobody by itself."""
    member.ownership._paused = True
    await member.ownership.following.end()


async def joined(*members: Member) -> None:
    upstream_states = [member.upstream_state for member in members]
    await until(lambda: all(one.in_step and one.joining is False for one in upstream_states))


async def write(member: Member, number: int, partition: int = A) -> Written:
    """Write one row under a producer's number, in a call of its own."""
    host, key = member.host, b"k%d" % partition
    call = await host.producers.open(PRODUCER)
    try:
        block = build_block([key], [b"%d" % number], np.array([partition], np.uint32))
        return await host.write(block, PRODUCER, call, number)
    finally:
        host.bucket.close_producer(call)


def before_it_claims(
    monkeypatch: pytest.MonkeyPatch, happen: Callable[[], Awaitable[None]]
) -> None:
    """Have something happen when a server that is to be promoted looks whom it reaches."""
    check_reached = Ownership._check_reached

    async def overtaken(ownership: Ownership, **how: bool) -> None:
        await happen()
        await check_reached(ownership, **how)

    monkeypatch.setattr(Ownership, "_check_reached", overtaken)
