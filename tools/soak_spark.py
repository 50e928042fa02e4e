"""Load a bucket into Spark again and again, beside a backup every minute. Run by ``tools/dev.py soak --spark``.

Two hundred loads in a row, whatever the minutes say; rounds of so many until these are over. Each load must have every
key. In the end the backup still runs, has made its points without a trouble, and both its files and the newest point's
rows, compared with the server's, are sound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.harness import RunningServer
from tools.bench.spark_source import session
from tools.demo import say
from upr_client import Client
from upr_spark import register

KEYS = 20_000
LOADS = 200
WRITE_EVERY = 20
"""Loads, between which some of the keys are written again."""
BACKUP_SECONDS = 60


class Backups:
    """``upr-backup backup --every`` as a process of its own.

    Args:
        folder: for the repository and the log.
        target: of the server.
    """

    def __init__(self, folder: Path, target: str) -> None:
        self._command = [sys.executable, "-m", "upr_backup", str(folder / "repository")]
        self._target = ["--target", target]
        self._log = folder / "backup.log"
        subprocess.run([*self._command, "init", *self._target], check=True, capture_output=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self._command, "backup", "--every", f"{BACKUP_SECONDS}s", *self._target],
                stdout=log,
                stderr=log,
            )
        self._began = time.monotonic()

    def check(self) -> int:
        """End it, and return how many points there are.

        Raises:
            AssertionError: it ended before, said an error, lacks points, or a point is not sound.
        """
        turns = int((time.monotonic() - self._began) / BACKUP_SECONDS)
        assert self.process.poll() is None, self._log.read_text()
        # Not SIGINT: a script in the background ignores that, and so do its children.
        self.process.terminate()
        self.process.wait()
        told = self._log.read_text()
        assert "error" not in told, told
        assert "warning" not in told, told
        points = len(self._run("list"))
        # On a busy machine each turn begins a little late.
        assert points >= 0.9 * turns - 1, f"{points} points in {turns} turns"
        found = self._run("verify", "--full", "--against-server", *self._target)
        assert not found["problems"], found
        return points

    def _run(self, *arguments: str) -> Any:
        command = [*self._command, *arguments, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    def close(self) -> None:
        """Kill it if it runs."""
        self.process.kill()
        self.process.wait()


def load(spark: Any, target: str, number: int) -> float:
    """Load the bucket once, and return how long that took; AssertionError when a key is missing."""
    if number % WRITE_EVERY == 0:
        with Client(target) as client:
            rows = ((b"key-%05d" % n, b"%d" % number) for n in range(0, KEYS, 50))
            client.bucket().write_many(rows)
    began = time.monotonic()
    frame = spark.read.format("upr").option("endpoint", target).load()
    keys = frame.select("key").distinct().count()
    assert keys == KEYS, f"load {number} has {keys} keys of {KEYS}"
    return time.monotonic() - began


def soak(folder: Path, server: RunningServer, minutes: float) -> None:
    """Load and back up, in rounds, until the time is over; raises what a load or the backup raises."""
    with Client(server.target) as client:
        client.bucket().write_many((b"key-%05d" % n, b"v" * 100) for n in range(KEYS))
    backups = Backups(folder, server.target)
    spark = session(folder)
    register(spark)
    longest, loads, began = 0.0, 0, time.monotonic()
    try:
        while loads % LOADS or not loads or time.monotonic() - began < minutes * 60:
            longest = max(longest, load(spark, server.target, loads))
            loads += 1
            if loads % WRITE_EVERY == 0:
                say(f"{loads} loads in {time.monotonic() - began:.0f} s, longest {longest:.1f} s")
        points = backups.check()
    finally:
        spark.stop()
        backups.close()
    say(f"{loads} loads and {points} backups: no violation")


def main() -> int:
    """Return 0 when every load had all keys and every backup was made."""
    parser = argparse.ArgumentParser(prog="tools/dev.py soak --spark", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upr-soak-") as name:
        (place := Path(name, "server")).mkdir()
        server = RunningServer(place).start()
        try:
            soak(Path(name), server, options.minutes)
        except Exception as error:
            print(f"VIOLATION: {error!r}", file=sys.stderr)
            return 1
        finally:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
