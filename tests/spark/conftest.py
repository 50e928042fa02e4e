"""Fixtures of the tests of Spark and backups: one session for all tests of a process, because a JVM takes seconds; S3."""

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RunningServer
from tests.spark.restoring import Source, source
from tests.spark.s3 import S3Server, s3_server
from tests.spark.sink_rows import Place, new_place
from upr_backup.repository import object_store
from upr_client import Client
from upr_client.types import Bucket


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the session; its JVM makes it one of the long ones."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")
            item.add_marker("long")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local session with two cores; its files are below a temporary folder, and it listens on loopback only."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.fail("these tests need Java 17 or newer: tools/dev.py test installs it as root")
    from pyspark.sql import SparkSession

    folder: Path = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    paths = [str(Path(__file__).with_name("processes")), str(Path(__file__).parents[2])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # pyspark itself leaves sockets and processes for the collector.
        warnings.simplefilter("ignore")
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        session = (
            SparkSession.builder.master("local[2,4]")
            .appName("upr-stream tests")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "768m")
            .config("spark.sql.shuffle.partitions", "2")
            # Tests are short: what a compiler does for long runs costs more than it saves.
            .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
            .config("spark.sql.codegen.wholeStage", "false")
            .config("spark.python.daemon.module", "tests.spark.workers")
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .config("spark.local.dir", str(folder / "local"))
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
    yield session
    session.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that this process's environment leads to, and that is given up soon when it fails."""
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "_FIRST_SECONDS", 0.2)
        monkeypatch.setattr(object_store, "_RETRY_SECONDS", 0.2)
        yield server


@pytest.fixture(scope="session")
def shared_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """A repository of two backups and its server; tests change neither, but for a journal that they remove."""
    with source(tmp_path_factory.mktemp("source")) as known:
        yield known


@pytest.fixture
def made(shared_source: Source) -> Source:
    return shared_source


@pytest.fixture
def client(shared_server: RunningServer) -> Iterator[Client]:
    with Client(shared_server.target) as client:
        yield client


@pytest.fixture
def bucket(client: Client, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of its own for each test."""
    client.admin.create_bucket(request.node.name)
    yield client.bucket(request.node.name)
    client.admin.drop_bucket(request.node.name)


@pytest.fixture
def place(shared_server: RunningServer) -> Iterator[Place]:
    with new_place(shared_server.target) as place:
        yield place
