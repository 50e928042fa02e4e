"""Fixtures of tests of sets: servers meet, and give up waiting for each other, sooner."""

import functools

import pytest

from tests.conftest import StartServer
from tests.replica.sets import SOON


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers in this process meet soon."""
    for name, seconds in SOON.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture
def server_process(server_process: StartServer) -> StartServer:
    """Start a server process that meets others soon."""
    return functools.partial(server_process, constants=SOON)
