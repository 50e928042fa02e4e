"""The check of a closed data directory: buckets one after the other, each in a process of its own.

The process (``worker``) may die or hang on damaged pages. That is a finding, and the next process continues behind the
place.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upr.storage.check.contents import DAMAGE, Finding
from upr.storage.check.worker import Task
from upr.storage.directory import bucket_folders, lock_directory, read_mark
from upr_protocol.errors import DataDirectoryError
from upr_protocol.limits import PARTITIONS

HANG_SECONDS = 120.0
_DEATHS_MAX = 8
_READ_BYTES = 65536
Progress = Callable[[int, str], None]
"""Function of the number of partitions done, and words."""


@dataclass(slots=True)
class BucketReport:
    """Report on one bucket.

    Attributes:
        version: the name of its folder.
        name: empty if it cannot be read.
        readable: by partition the readable seqno ranges ``[above, end]``.
        unusable: why this program cannot check it; empty if it can.
    """

    version: str
    name: str = ""
    findings: list[Finding] = field(default_factory=list)
    readable: dict[int, list[list[int]]] = field(default_factory=dict)
    unusable: str = ""

    @property
    def damaged(self) -> bool:
        return any(finding.severity == DAMAGE for finding in self.findings)

    def take(self, line: Mapping[str, Any]) -> None:
        """Record a line of the worker."""
        if "finding" in line:
            self.add(Finding(**line["finding"]))
        elif "readable" in line:
            self.readable.update({int(p): ranges for p, ranges in line["readable"].items()})
        elif "name" in line:
            self.name = line["name"]
        elif "unusable" in line:
            self.unusable = line["unusable"]

    def add(self, finding: Finding) -> None:
        """Add a finding, unless it is there."""
        if finding not in self.findings:
            self.findings.append(finding)


@contextlib.contextmanager
def closed_directory(path: Path) -> Iterator[list[Path]]:
    """Hold the lock of a data directory, and yield the folders of its buckets. Changes nothing.

    Raises:
        DataDirectoryError: it is no data directory, of another format, or used by a server.
    """
    read_mark(path)
    try:
        held = lock_directory(path, make=False)
    except BlockingIOError as error:
        raise DataDirectoryError(
            f"the data directory {path} is in use by a server", hint="stop that server first"
        ) from error
    try:
        yield bucket_folders(path)
    finally:
        for fd in held:
            os.close(fd)


def check_directory(
    path: Path,
    partitions: Sequence[int] | None = None,
    progress: Progress = lambda done, words: None,
    hang_seconds: float = HANG_SECONDS,
) -> list[BucketReport]:
    """Check every bucket of a closed data directory.

    Args:
        partitions: only these, ascending; all for None.
        progress: called with the number of partitions done over all buckets.
        hang_seconds: how long reading may make no progress before it counts as damage.

    Raises:
        DataDirectoryError: it is no data directory, of a newer format, or used by a server.
    """
    wanted = list(range(PARTITIONS)) if partitions is None else list(partitions)
    reports: list[BucketReport] = []
    with closed_directory(path) as folders:
        for folder in folders:
            done = len(reports) * len(wanted)
            bucket = _BucketCheck(folder, wanted, hang_seconds, _ahead(progress, done))
            reports.append(bucket.run())
    names: dict[str, str] = {}
    for report in reports:
        other = names.setdefault(report.name, report.version) if report.name else report.version
        if other != report.version:
            report.findings.append(Finding(f"bucket {other} has the same name {report.name!r}"))
    return reports


def _ahead(progress: Progress, done: int) -> Progress:
    return lambda more, words: progress(done + more, words)


class _BucketCheck:
    """Run of workers on one bucket until one completes."""

    def __init__(
        self, folder: Path, partitions: list[int], hang_seconds: float, progress: Progress
    ) -> None:
        self._folder = folder
        self._left = partitions
        self._count = len(partitions)
        self._hang_seconds = hang_seconds
        self._progress = progress
        self._report = BucketReport(folder.name)
        self._at: tuple[int | None, str] = (None, "start")
        self._ended = False

    def run(self) -> BucketReport:
        for deaths in range(_DEATHS_MAX + 1):
            words = self._run_worker(Task(str(self._folder), self._left, again=deaths > 0))
            if self._ended:
                break
            partition, step = self._at
            self._report.add(Finding(f"{words} while reading {step}", partition=partition))
            if partition is None:
                break
            self._left = [p for p in self._left if p > partition]
        else:
            self._report.add(Finding("reading was given up: too much of the store cannot be read"))
        return self._report

    def _run_worker(self, task: Task) -> str:
        """Run one worker; return how it died if it did not complete."""
        text = json.dumps(dataclasses.asdict(task))
        command = [sys.executable, "-m", "upr.storage.check.worker", text]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                hung = not self._read(process)
            finally:
                process.kill()
            status = process.wait()
        if hung:
            return f"nothing was read for {self._hang_seconds:g} s"
        if status < 0:
            return f"the reading process was killed by {signal.Signals(-status).name}"
        return f"the reading process ended with status {status}"

    def _read(self, process: "subprocess.Popen[bytes]") -> bool:
        """Record the worker's lines until it ends; False if it is silent for too long."""
        assert process.stdout is not None
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(self._hang_seconds):
                data = os.read(process.stdout.fileno(), _READ_BYTES)
                if not data:
                    process.wait(self._hang_seconds)
                    return True
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        return False

    def _take(self, line: dict[str, Any]) -> None:
        if "at" in line:
            partition, words = line["at"]
            self._at = (partition, words or self._at[1])
            if partition is not None:
                done = self._count - sum(p >= partition for p in self._left)
                self._progress(done, f"bucket {self._report.name}, partition {partition}")
        elif "end" in line or "unusable" in line:
            self._ended = True
        self._report.take(line)
