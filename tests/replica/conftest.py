"""Fixtures of tests of sets: servers meet, and give up waiting for each other, sooner."""

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conftest import StartServer
from tests.replica.members import Member, Start
from tests.replica.sets import SOON
from upr.config import ServerConfig
from upr.replica.replica_service import ReplicaMethods
from upr.service.server import Server


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers in this process meet soon."""
    for name, seconds in SOON.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture
def server_process(server_process: StartServer) -> StartServer:
    """Start a server process that meets others soon."""
    return functools.partial(server_process, constants=SOON)


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    members: list[Member] = []

    async def begin(*upstream: Member, data: Path | None = None, anonymous: bool = False) -> Member:
        config = ServerConfig(
            data=data or tmp_path / str(len(members)),
            listen="127.0.0.1:0",
            replicate_from=tuple(one.target for one in upstream),
            anonymous=anonymous,
            open_admin=True,
        )
        server = Server(config, replicate=ReplicaMethods)
        await server.start()
        members.append(Member(server))
        return members[-1]

    yield begin
    await asyncio.gather(*(one.stop() for one in members if not one.stopped))
