"""Followers of both flavours, for the tests of the testing kit."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

from upr_client import (
    AsyncClient,
    Change,
    Client,
    Marker,
    Only,
    Rollback,
)
from upr_client.testing import ScriptedServer, keys_in

P = 7
KEYS = keys_in(P, 8)
Event = Change | Marker | Rollback


class Follower(Protocol):
    """A follower of either flavour."""

    def take(self, count: int) -> list[Event]:
        """The next events, as many."""

    def rest(self) -> list[Event]:
        """All events up to the end."""


class _SyncFollower:
    def __init__(self, stack: ExitStack, target: str, options: dict[str, Any]) -> None:
        client = stack.enter_context(Client(target, connect_timeout=0.5))
        self._changes = stack.enter_context(client.bucket().changes(**options))

    def take(self, count: int) -> list[Event]:
        return [next(self._changes) for _ in range(count)]

    def rest(self) -> list[Event]:
        return list(self._changes)


class _AsyncFollower:
    def __init__(self, stack: ExitStack, target: str, options: dict[str, Any]) -> None:
        self._run = stack.enter_context(asyncio.Runner()).run

        async def open_all() -> Any:
            client = AsyncClient(target, connect_timeout=0.5)
            changes = client.bucket().changes(**options)
            await changes.__aenter__()
            return client, changes

        client, self._changes = self._run(open_all())
        stack.callback(lambda: self._run(client.close()))

    def take(self, count: int) -> list[Event]:
        async def some() -> list[Event]:
            return [await anext(self._changes) for _ in range(count)]

        return self._run(some())

    def rest(self) -> list[Event]:
        async def all_of_them() -> list[Event]:
            return [event async for event in self._changes]

        return self._run(all_of_them())


Follow = Callable[..., Follower]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(params=["threads", "asyncio"])
def follow(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Follow]:
    """Follow partition P of the server, or what the options of ``changes`` say."""
    kind = _SyncFollower if request.param == "threads" else _AsyncFollower
    with ExitStack() as stack:
        yield lambda **options: kind(
            stack, server.target, {"only": Only([P]), "on_rollback": "event", **options}
        )


def fold(events: list[Event], before: dict[bytes, tuple[int, bytes]] | None = None) -> Any:
    """What an application that keeps key -> (seqno, value) has after the events of one partition.

    It keeps no older versions, so it can go back to 0 only, or where nothing was superseded.
    """
    kept = dict(before or {})
    for event in events:
        if isinstance(event, Rollback):
            kept = {k: v for k, v in kept.items() if v[0] <= event.seqno}
        elif isinstance(event, Change):
            kept.pop(event.key, None)
            if event.value is not None:
                kept[event.key] = (event.seqno, event.value)
    return kept


def values(kept: dict[bytes, tuple[int, bytes]]) -> dict[bytes, bytes]:
    return {key: value for key, (_, value) in kept.items()}


def wait_for(server: ScriptedServer, condition: Callable[[], object]) -> None:
    server.wait_for(condition, seconds=60.0)


def write_keys(server: ScriptedServer, count: int, first: int = 0) -> None:
    for key in KEYS[first : first + count]:
        server.write(key, b"of " + key)


def changes_of(events: list[Event]) -> list[tuple[int, bytes]]:
    return [(e.seqno, e.key) for e in events if isinstance(e, Change)]


def markers_of(events: list[Event]) -> list[int]:
    return [e.seqno for e in events if isinstance(e, Marker)]
