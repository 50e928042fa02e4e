"""Fixtures for pytest: ``pytest_plugins = ["upr_client.testing.pytest_plugin"]`` in the conftest of your tests.

It is no entry point, because pytest would then load it, and gRPC with it, wherever the SDK is installed.
"""

from collections.abc import Iterator

import pytest

from upr_client.testing.process import ServerProcess
from upr_client.testing.scripted import ScriptedServer


@pytest.fixture
def upr_server() -> Iterator[ServerProcess]:
    """A real, empty server in a process of its own, gone after the test."""
    with ServerProcess() as server:
        yield server


@pytest.fixture
def upr_scripted() -> Iterator[ScriptedServer]:
    """An empty scripted server in this process, gone after the test."""
    with ScriptedServer() as server:
        yield server
