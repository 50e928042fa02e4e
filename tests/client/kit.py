"""Followers of a scripted server, for the tests of the testing kit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from upr_client import (
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


class Follower:
    """Follow partition P of a server, or what the options of ``changes`` say."""

    def __init__(self, stack: ExitStack, target: str, options: dict[str, Any]) -> None:
        client = stack.enter_context(Client(target, connect_timeout=0.5))
        self._changes = stack.enter_context(client.bucket().changes(**options))

    def take(self, count: int) -> list[Event]:
        return [next(self._changes) for _ in range(count)]

    def rest(self) -> list[Event]:
        return list(self._changes)


Follow = Callable[..., Follower]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def follow(server: ScriptedServer) -> Iterator[Follow]:
    with ExitStack() as stack:
        yield lambda **options: Follower(
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
