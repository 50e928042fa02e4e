"""Fixtures that several kinds of test share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# Before gRPC is imported: its handlers sometimes abort a child that is forked to start another program, as pyspark
# does with its JVM.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
from hypothesis import settings

from tests.harness import RunningServer

StartServer = Callable[..., RunningServer]

# How long an example takes says something of the machine, and pytest's own time limit ends one that hangs.
settings.register_profile("upr", deadline=None)
settings.load_profile("upr")


def pytest_configure() -> None:
    """Have programs that tests start heed SIGINT: a shell starts what runs in its background with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the Spark session first: one of several processes then gets them all, with one JVM."""
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


@pytest.fixture
def server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """A function that starts a real server process; all of them are gone after the test.

    It takes the options of the command and, as ``environment``, further variables.
    """
    servers: list[RunningServer] = []

    def start(*options: str, environment: dict[str, str] | None = None) -> RunningServer:
        folder: Path = tmp_path_factory.mktemp("server")
        server = RunningServer(folder, *options, environment=environment)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.close()
