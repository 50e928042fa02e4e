"""What the tests of restore, export and verify share: a repository whose content is known, and the command."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.harness import RunningServer
from upr_backup import rows as point
from upr_backup.cli.commands import main
from upr_client import Change, Client, MemoryPositions

State = dict[bytes, bytes]
Rows = list[tuple[bytes, bytes | None]]


def upr_backup(repository: Path | str, *arguments: str) -> Result:
    """Run the command in this process; whatever it says of an error is one line, and nothing is on stdout then."""
    done = CliRunner().invoke(main, [str(repository), *arguments], prog_name="upr-backup")
    if done.exit_code not in (0, 10, 11):
        assert "internal error" not in done.stderr
        *before, last = done.stderr.splitlines()
        assert last.startswith("error: "), done.stderr
        assert not any("error" in line for line in before)
        assert done.stdout == ""
    return done


def document(done: Result) -> dict[str, Any]:
    """Return the JSON document of a command that was run with --json."""
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def content(target: str, name: str = "default") -> State:
    state: State = {}
    with (
        Client(target) as client,
        client.bucket(name).changes(resume=MemoryPositions(), until="now") as changes,
    ):
        for event in changes:
            if isinstance(event, Change):
                if event.value is None:
                    state.pop(event.key, None)
                else:
                    state[event.key] = event.value
    return state


def taken(repository: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Take a backup, and return what the command said of it."""
    done = upr_backup(repository, "backup", "--json", *options)
    assert done.exit_code == code, done.stderr
    return document(done)


def restored(repository: Path, target: str, number: int, *options: str) -> State:
    """Restore a backup into a new bucket, and return what that holds."""
    name = f"restored-{number}-{len(options)}"
    with Client(target) as client:
        client.admin.create_bucket(name)
    chosen = ["--target", target, "--bucket", name, "--at", str(number), *options]
    done = upr_backup(repository, "restore", *chosen)
    assert done.exit_code == 0, done.stderr
    return content(target, name)


def write(server: RunningServer, state: State, rows: Rows) -> None:
    """Write rows, and keep what the bucket then holds; a None deletes its key."""
    # A client of its own: one that lost its server waits before it connects again.
    with Client(server.target) as client:
        client.bucket().write_many(rows)
    for key, value in rows:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


def small_groups(monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
    """Have a restore or an export take many groups."""
    real = point.grouped
    monkeypatch.setattr(point, "grouped", lambda sizes, _: real(sizes, group_bytes))


@dataclass
class Source:
    """A server, a repository of its bucket, and what the bucket holds.

    Attributes:
        points: the state at each backup, oldest first.
    """

    server: RunningServer
    repository: Path
    state: State = field(default_factory=dict)
    points: list[State] = field(default_factory=list)

    def write(self, rows: Rows) -> None:
        """Write rows; a None deletes its key."""
        write(self.server, self.state, rows)

    def backup(self) -> None:
        done = upr_backup(self.repository, "backup", "--processes", "1")
        assert done.exit_code == 0, done.stderr
        self.points.append(dict(self.state))


@contextmanager
def source(folder: Path, *options: str) -> Iterator[Source]:
    """A source with two backups: 3,000 keys; then some are overwritten, some deleted, and some new."""
    server = RunningServer(folder, *options).start()
    try:
        made = Source(server, folder / "repository")
        assert upr_backup(made.repository, "init", "--target", server.target).exit_code == 0
        made.write([(b"key:%d" % n, b"first %d" % n) for n in range(3000)])
        made.backup()
        made.write([(b"key:%d" % n, b"second %d" % n) for n in range(0, 3000, 7)])
        made.write([(b"key:%d" % n, None) for n in range(1, 3000, 7)])
        made.write([(b"new:%d" % n, b"") for n in range(100)])
        made.backup()
        yield made
    finally:
        server.close()
