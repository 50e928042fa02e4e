"""``upr-backup`` as a process of its own for tests that kill it, and what a repository then holds."""

import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.harness import WAIT_SECONDS, wait_until


def children(pid: int) -> list[int]:
    """Return the processes that descend from one, from the process table."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # The name before may hold anything, parentheses included.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(folder.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def workers(pid: int) -> list[int]:
    return children_with(pid, b"spawn_main")


def children_with(pid: int, word: bytes) -> list[int]:
    """Return those descendants of a process that have a word in their command line."""
    found = []
    for child in children(pid):
        with suppress(OSError):
            if word in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def alive(pids: list[int]) -> list[int]:
    """Return those processes that are there, zombies not counted."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


class Backup:
    """A run in a process group of its own; used with ``with``, after which all of it is gone.

    Args:
        repository: the folder; beside it a file gets what is said on stderr.
        options: of the command ``backup``.
    """

    def __init__(self, repository: Path, *options: str) -> None:
        command = [sys.executable, "-m", "upr_backup", str(repository), "backup", *options]
        self.repository = repository
        self._words = repository.with_name(f"stderr-{secrets.token_hex(4)}")
        with self._words.open("wb") as words:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=words, text=True, start_new_session=True
            )
        self.pid = self._process.pid

    def __enter__(self) -> "Backup":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def words(self) -> str:
        """Return what it said on stderr so far."""
        return self._words.read_text()

    def until_staged(self, count: int) -> None:
        """Wait until so many groups are recorded, and it still runs."""
        wait_until(lambda: not self.running or len(staged(self.repository)) >= count, "a group")
        assert self.running, self.end()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def interrupt(self) -> None:
        """Do what a Ctrl-C at a terminal does: SIGINT to every process of the group."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; returns exit status, stdout and stderr."""
        stdout, _ = self._process.communicate(timeout=WAIT_SECONDS)
        return self._process.returncode, stdout, self.words()


def staged(repository: Path) -> list[Path]:
    names = (repository / "staging").rglob("*.json")
    return [path for path in names if path.name != "plan.json"]


def told(stderr: str) -> list[str]:
    """Return the lines of stderr, without those that tell the progress of a run that takes seconds."""
    return [line for line in stderr.splitlines() if line and " rows read, " not in line]


def stored_rows(repository: Path) -> list[tuple[Any, ...]]:
    """Return all rows of all data files, sorted."""
    rows: list[tuple[Any, ...]] = []
    for path in (repository / "data").rglob("*.parquet"):
        columns = pq.read_table(path).to_pydict()
        rows += zip(*columns.values(), strict=True)
    return sorted(rows, key=lambda row: row[:2])
