"""Fixtures of tests of the server: buckets without one around them, and one that serves HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import RunningServer
from tests.service.pages import http_of
from tests.storage.closed import Closed
from upr.config import ServerConfig
from upr.service.buckets.catalog import Catalog, create_bucket
from upr.storage.directory import DataDirectory


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a new bucket."""
    directory = DataDirectory(tmp_path / "data")
    yield create_bucket(directory, "default")
    directory.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """The buckets of a new data directory; a test closes what it opens."""
    directory = DataDirectory(tmp_path / "data")
    yield Catalog(directory, ServerConfig(tmp_path / "data"))
    directory.close()


@pytest.fixture
def closed(tmp_path: Path) -> Closed:
    return Closed(tmp_path / "data")


@pytest.fixture(scope="module")
def http_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server serves HTTP that the tests of a module neither end nor configure."""
    server = RunningServer(tmp_path_factory.mktemp("http"), "--http", "127.0.0.1:0").start()
    try:
        yield http_of(server)
        assert server.terminate() == 0
        assert "Traceback" not in server.log_text()
    finally:
        server.close()
