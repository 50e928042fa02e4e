"""Measure upr-backup's local engine beside what the SDK drains without writing a file, in one run; and its list.

The table, or with ``--json`` one document, goes to stdout; progress goes to stderr. CPU is that of the client's
processes alone, all of them together.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from tests.spark.handmade import write_many
from tests.spark.s3 import s3_server
from tests.spark.s3_backups import LOCATION, put_folder
from tools.bench.common import VALUE_BYTES, Figure, print_figures, say, server
from upr_client import Client
from upr_client.arrow import record_batch

WRITE_ROWS: Final = 50_000
PROCESSES: Final = (1, 2, 4)
POINTS: Final = 10_000
LOCAL_SECONDS: Final = 1.0
S3_SECONDS: Final = 3.0
S3_PAGE: Final = 1000
"""Names in one page of a listing, as S3 has them."""


def fill(target: str, rows: int) -> None:
    """Write rows of 16-byte keys, each once, and of values that do not compress to nothing."""
    noise = os.urandom(rows + VALUE_BYTES)
    with Client(target) as client:
        for begin in range(0, rows, WRITE_ROWS):
            client.bucket().write_many(
                (b"key-%012d" % n, noise[n : n + VALUE_BYTES])
                for n in range(begin, min(begin + WRITE_ROWS, rows))
            )


def drain(target: str, as_arrow: bool) -> tuple[float, float, int]:
    """Follow everything up to now. Return seconds, seconds of CPU, and rows."""
    rows = 0
    began, cpu = time.perf_counter(), time.process_time()
    with Client(target) as client, client.bucket().changes(until="now") as changes:
        for batch in changes.batches():
            rows += record_batch(batch).num_rows if as_arrow else batch.rows
    return time.perf_counter() - began, time.process_time() - cpu, rows


def backup(target: str, folder: Path, processes: int) -> tuple[float, float, int]:
    """Take a full backup into a new repository. Return seconds, seconds of CPU, and rows; the start is included."""
    command = [sys.executable, "-m", "upr_backup", str(folder)]
    subprocess.run([*command, "init", "--target", target], check=True, stderr=subprocess.DEVNULL)
    options = ["backup", "--json", "--processes", str(processes)]
    before = _children_cpu()
    began = time.perf_counter()
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE)
    taken = time.perf_counter() - began
    shutil.rmtree(folder)
    return taken, _children_cpu() - before, int(json.loads(done.stdout)["rows"])


def listing(location: str, environment: dict[str, str]) -> float:
    """List all backups of a repository of POINTS, and return the seconds of the whole command, its start included."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "upr_backup", location, "list"],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    taken = time.perf_counter() - began
    assert len(done.stdout.splitlines()) == POINTS + 1
    return taken


def listings() -> Iterator[Figure]:
    """Yield how long a list takes on a local disk and on an object store: the median of five."""
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as name, s3_server() as s3:
        say(f"a repository of {POINTS} points")
        folder = Path(name, "repository")
        write_many(folder, POINTS)
        put_folder(s3, folder)
        s3.page = S3_PAGE
        for place, location, target in (
            ("local disk", str(folder), LOCAL_SECONDS),
            ("S3", LOCATION, S3_SECONDS),
        ):
            times = sorted(listing(location, s3.environment) for _ in range(5))
            note = f"at most {times[-1]:.2f}"
            yield Figure(f"list of {POINTS} points, {place}", times[2], "s", target, note=note)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rows: int) -> Iterator[Figure]:
    """Yield rows a second of each, and its CPU."""
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as folder, server() as running:
        say(f"writing {rows} rows")
        fill(running.target, rows)
        # So that everything is read from where it stays: the store.
        running.terminate()
        running.start()
        ways: dict[str, Callable[[], tuple[float, float, int]]] = {
            "SDK, frames": lambda: drain(running.target, False),
            "SDK, record batches": lambda: drain(running.target, True),
        }
        for count in PROCESSES:
            ways[f"upr-backup, processes {count}"] = lambda count=count: backup(  # type: ignore[misc]
                running.target, Path(folder, "repository"), count
            )
        for name, way in ways.items():
            say(name)
            taken, cpu, found = way()
            assert found == rows, (found, rows)
            yield Figure(name, rows / taken, "rows/s", note=f"{cpu / rows * 1e6:.2f} us CPU/row")


def main() -> int:
    """Measure, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="0: only the lists")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print_figures(chain(listings(), measure(options.rows) if options.rows else ()), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
