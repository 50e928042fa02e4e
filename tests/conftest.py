"""Fixtures that several kinds of test share."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before gRPC is imported: its handlers sometimes abort a child that is forked to start another program, as pyspark
# does with its JVM.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
from hypothesis import settings

from tests.harness import RunningServer, skip_syncs
from upr.service.access.rules import ANYONE, PERMIT, RULES, Permit

StartServer = Callable[..., RunningServer]

# For methods that are called in this process, without a gate.
PERMIT.set(Permit("", "", RULES["/upr.v1.AdminService/GetStatus"], ANYONE, True, print))
# How long an example takes says something of the machine, and pytest's own time limit ends one that hangs.
settings.register_profile("upr", deadline=None)
settings.load_profile("upr")


def pytest_configure() -> None:
    """Have programs that tests start heed SIGINT: a shell starts what runs in its background with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Until all tests are read: what is made of them stays.
    gc.disable()


def pytest_collection_finish() -> None:
    """Have the collector look at what the tests make, and not each time through the thousands of tests too."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the Spark session first: one of several processes then gets them all, with one JVM.

    Behind them come those that are long, so that the end is not one of them with the other processes idle.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        marks = {mark.name for mark in item.iter_markers()}
        session = "spark" in marks or "spark" in getattr(item, "fixturenames", ())
        return not session, not marks & {"long", "crash"}

    items.sort(key=place)


@pytest.fixture(autouse=True)
def no_syncs() -> Iterator[None]:
    """Have what runs in this process sync nothing; tests of lost power have a disk of their own."""
    # Not by the fixture ``monkeypatch``: what a test puts there must be gone before its other fixtures end.
    with pytest.MonkeyPatch.context() as own:
        skip_syncs(own.setattr)
        yield


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server process for all tests of this process that neither end nor configure it."""
    # The command itself, from its start to its end.
    server = RunningServer(tmp_path_factory.mktemp("shared")).start(prefix=["env"])
    try:
        yield server
        assert server.terminate() == 0
        assert "Traceback" not in server.log_text()
    finally:
        server.close()


@pytest.fixture
def target(shared_server: RunningServer) -> str:
    """Where the shared server listens; it has one bucket, "default", which is new and empty."""
    # Here, because most tests need no server, and this takes longer than they do.
    import grpc

    from upr_protocol.wire.v1 import admin_service_pb2 as admin
    from upr_protocol.wire.v1.admin_service_pb2_grpc import AdminServiceStub

    assert shared_server.running, shared_server.log_text()
    with grpc.insecure_channel(shared_server.target) as channel:
        stub = AdminServiceStub(channel)
        for bucket in stub.ListBuckets(admin.ListBucketsRequest()).buckets:
            stub.DropBucket(admin.DropBucketRequest(name=bucket.name))
        stub.CreateBucket(admin.CreateBucketRequest(name="default"))
    return shared_server.target


@pytest.fixture
def server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """A function that starts a real server process, for tests that end or configure it; all are gone after the test.

    It takes the options of the command and, by name, what ``RunningServer`` takes.
    """
    servers: list[RunningServer] = []

    def start(*options: str, **more: Any) -> RunningServer:
        folder: Path = tmp_path_factory.mktemp("server")
        server = RunningServer(folder, *options, **more)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.close()
