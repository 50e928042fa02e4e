"""A backup as a job on a cluster that loses an executor in the middle; the repository is encrypted."""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest

from tests.harness import RunningServer, wait_until
from tests.spark.backup_process import children_with, staged
from tests.spark.restoring import content, restored, upr_backup
from upr_backup import ship
from upr_client import Client

ROWS = 6_000
SPARK = Path(pyspark.__file__).parent
JOB = Path(ship.__file__).with_name("spark_job.py")
GUIDE = Path(__file__).parents[2] / "client" / "upr_spark" / "README.md"
SHIPPING = (
    GUIDE.read_text()
    .partition("\n## As a Spark job\n")[2]
    .split("```")[1]
    .replace("\\\n", "")
    .splitlines()[1:]
)
"""The guide's commands for a job."""
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
HEAD = b"upr-backup aes-256-gcm 1\n"
EXECUTOR = b"CoarseGrainedExecutorBackend"
MASTER = "local-cluster[1,1,600]"
"""A worker of one core, in the process of the driver; its executors are processes of their own, one after the other."""


def environment() -> dict[str, str]:
    """Return what a JVM of the test is started with: on loopback, and without a master of somebody else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1"}


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
def test_a_job_outlives_an_executor(
    server_process: Callable[..., RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    (tmp_path / "key").write_text("0f" * 32)
    monkeypatch.setenv("UPR_BACKUP_KEY_FILE", str(tmp_path / "key"))
    server = server_process()
    with Client(server.target) as client:
        client.bucket().write_many((b"key:%d" % n, b"%d" % n) for n in range(ROWS))
        client.bucket().write_many((b"key:%d" % n, None) for n in range(0, ROWS, 9))
    assert upr_backup(repository, "init", "--target", server.target).exit_code == 0
    typed = {
        "python": sys.executable,
        "upr.zip": str(tmp_path / "upr.zip"),
        "spark-submit": str(SPARK / "bin" / "spark-submit"),
        "spark://HOST:7077": MASTER,
        "spark.pyspark.python=/opt/venv/bin/python": f"spark.pyspark.python={bare_python(tmp_path)}",
        "spark_job.py": str(JOB),
        "s3://bucket/repository": str(repository),
        "HOST:PORT": server.target,
    }
    ship, submit = (
        [typed.get(word, word) for word in shlex.split(line, comments=True)] for line in SHIPPING
    )
    subprocess.run(ship, check=True, capture_output=True)
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": FAST,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": FAST,
        "spark.pyspark.driver.python": sys.executable,
        "spark.ui.enabled": "false",
        # It would compile what runs but once.
        "spark.sql.codegen.wholeStage": "false",
    }
    assert set(typed.values()) <= {*ship, *submit}
    place = submit.index(str(JOB))
    submit[place:place] = [
        word for name, value in settings.items() for word in ("--conf", f"{name}={value}")
    ]
    command = [*submit, "--group-seqnos", "500"]
    log = tmp_path / "job.log"
    with log.open("wb") as words:
        job = subprocess.Popen(
            command, stdout=words, stderr=words, env=environment(), start_new_session=True
        )
    try:
        # Two JVMs start.
        wait_until(lambda: job.poll() is not None or staged(repository), log.read_text, 180)
        os.kill(server.pid, signal.SIGSTOP)
        assert job.poll() is None, log.read_text()
        lost = children_with(job.pid, EXECUTOR)[0]
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: "Lost executor" in log.read_text(), log.read_text)
        os.kill(server.pid, signal.SIGCONT)
        assert job.wait(200) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert "backup 1: full" in log.read_text()
    assert restored(repository, server.target, 1) == content(server.target, "default")
    assert upr_backup(repository, "verify", "--full").exit_code == 0
    assert all(
        path.read_bytes().startswith(HEAD) for path in (repository / "data").rglob("*.parquet")
    )
