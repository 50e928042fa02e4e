"""A backup as a job on a standalone cluster that loses a worker in the middle."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest

from tests.harness import RunningServer, wait_until
from tests.spark.backup_process import (
    children,
    restored,
    staged,
    upr_backup,
)
from tests.spark.restoring import content
from upr_backup import ship
from upr_client import Client

ROWS = 6_000
SPARK = Path(pyspark.__file__).parent
JOB = Path(ship.__file__).with_name("spark_job.py")
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
REGISTERED = "Successfully registered with master"


class Daemon:
    """A master or worker in a process group of its own.

    Args:
        log: where its words go.
        arguments: of spark-class.
    """

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as words:
            self._process = subprocess.Popen(
                [str(SPARK / "bin" / "spark-class"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=environment(SPARK_MASTER_OPTS="-Dspark.master.rest.enabled=false"),
                start_new_session=True,
            )

    def said(self, words: str | re.Pattern[str]) -> str:
        """Wait until it says something, and return the first group of the match, or nothing."""
        pattern = re.compile(words)
        wait_until(lambda: self._ended() or pattern.search(self.log.read_text()), f"{words!r}")
        found = pattern.search(self.log.read_text())
        assert found, self.log.read_text()
        return found[1] if pattern.groups else ""

    def _ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL it and its executors, which have process groups of their own."""
        for pid in [*children(self._process.pid), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def environment(**more: str) -> dict[str, str]:
    """Return what a JVM of the test is started with: on loopback, small and without a master of somebody else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return {
        **kept,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": FAST,
        **more,
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[Daemon]]]:
    """A master and two workers of one core each; all of them are gone after the test."""
    started = []
    listen = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    try:
        name = "org.apache.spark.deploy.master.Master"
        started.append(Daemon(tmp_path / "master.log", name, *listen))
        url = started[0].said(MASTER)
        for number in range(2):
            size = ("-c", "1", "-m", "600m", "-d", str(tmp_path / f"worker{number}"))
            name = "org.apache.spark.deploy.worker.Worker"
            log = tmp_path / f"worker{number}.log"
            started.append(Daemon(log, name, *listen, *size, url))
        for worker in started[1:]:
            worker.said(REGISTERED)
        yield url, started[1:]
    finally:
        for daemon in reversed(started):
            daemon.kill()


def bare_python(folder: Path) -> Path:
    """Return a Python that has the packages of this one, but nothing that is installed from a work tree."""
    program = folder / "python"
    site = sysconfig.get_path("purelib")
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec "{sys.executable}" -S "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_outlives_a_worker(
    cluster: tuple[str, list[Daemon]],
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
) -> None:
    master, workers = cluster
    repository = tmp_path / "repository"
    server = server_process()
    with Client(server.target) as client:
        client.bucket().write_many((b"key:%d" % n, b"%d" % n) for n in range(ROWS))
        client.bucket().write_many((b"key:%d" % n, None) for n in range(0, ROWS, 9))
    assert upr_backup(repository, "init", "--target", server.target)[0] == 0
    shipped = tmp_path / "upr.zip"
    command = [sys.executable, "-m", "upr_backup.ship", str(shipped)]
    subprocess.run(command, check=True, capture_output=True)
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": FAST,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": FAST,
        "spark.pyspark.python": str(bare_python(tmp_path)),
        "spark.pyspark.driver.python": sys.executable,
        "spark.ui.enabled": "false",
    }
    command = [str(SPARK / "bin" / "spark-submit"), "--master", master, "--py-files", str(shipped)]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += [str(JOB), str(repository), "--group-seqnos", "500"]
    log = tmp_path / "job.log"
    with log.open("wb") as words:
        job = subprocess.Popen(
            command, stdout=words, stderr=words, env=environment(), start_new_session=True
        )
    try:
        wait_until(lambda: job.poll() is not None or staged(repository), "the first group")
        os.kill(server.pid, signal.SIGSTOP)
        assert job.poll() is None, log.read_text()
        workers[0].kill()
        os.kill(server.pid, signal.SIGCONT)
        assert job.wait(200) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert "backup 1: full" in log.read_text()
    assert re.search(r"Lost executor|[Ww]orker \S+ (lost|removed)", log.read_text())
    assert restored(repository, server.target, 1) == content(server.target, "default")
    assert upr_backup(repository, "verify", "--full")[0] == 0
