"""Real input through kills: a git history is loaded in parts, backed up at each, and every point is git's own tree."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RunningServer, wait_until
from tests.spark.backup_process import (
    Backup,
    alive,
    children,
    restored,
    staged,
    upr_backup,
)
from tests.spark.restoring import State
from upr_client import Client

COMMITS = 120
FILES = 250
POINTS = (30, 60, 90, 120)
"""After how many commits a backup is taken: a full one, and three increments."""

GROUPS = ("--group-seqnos", "400")
GROUPS_KILLED = ("--group-seqnos", "80")
"""So that there is a middle to be killed in."""


class History:
    """A git repository of random edits, of which HEAD is moved from point to point.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._git("init", "--quiet", "--bare", str(folder))
        marks = folder / "marks"
        self._git("fast-import", "--quiet", f"--export-marks={marks}", words=_edits())
        lines = (line.split() for line in marks.read_text().splitlines())
        self._commits = {int(mark[1:]): name for mark, name in lines}

    def _git(self, *arguments: str, words: bytes = b"") -> bytes:
        command = ["git", *arguments]
        if arguments[0] != "init":
            command[1:1] = ["-C", str(self.folder)]
        return subprocess.run(command, input=words, check=True, capture_output=True).stdout

    def load(self, commit: int, target: str) -> State:
        """Load the history up to a commit, and return the commit's tree as git has it."""
        name = self._commits[commit]
        self._git("update-ref", "refs/heads/main", name)
        self._git("symbolic-ref", "HEAD", "refs/heads/main")
        command = [sys.executable, "-m", "upr.cli", "cat", "load", "git", str(self.folder)]
        subprocess.run([*command, "--target", target], check=True, capture_output=True)
        tree = {}
        for line in self._git("ls-tree", "-r", "-z", name).split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            tree[path] = self._git("cat-file", "blob", about.split()[2].decode())
        return tree


def _edits() -> bytes:
    """Return a stream for git fast-import: each commit changes, adds and removes some files."""
    draw = random.Random(7)
    there: set[bytes] = set()
    stream: list[bytes] = []
    for commit in range(1, COMMITS + 1):
        stream.append(b"commit refs/heads/all\nmark :%d\n" % commit)
        stream.append(
            b"committer A <a@example.org> %d +0000\ndata 1\nx\n" % (1_700_000_000 + commit)
        )
        for number in draw.sample(range(FILES), 12):
            path = b"src/%d/file \xc3\xa4 %d.txt" % (number % 7, number)
            if path in there and draw.random() < 0.3:
                there.remove(path)
                stream.append(b'D "%s"\n' % path)
            else:
                there.add(path)
                blob = draw.randbytes(draw.randrange(200))
                stream.append(b'M 100644 inline "%s"\ndata %d\n%s\n' % (path, len(blob), blob))
    return b"".join(stream)


ENGINES = {"local": ("--processes", "2"), "spark": ("--engine", "spark")}


def kill_in_the_middle(repository: Path, server: RunningServer, options: tuple[str, ...]) -> None:
    """Begin a backup, and SIGKILL its driver when some of its groups are recorded and others are not."""
    with Backup(repository, *options, *GROUPS_KILLED) as backup:
        backup.until_staged(1)
        os.kill(server.pid, signal.SIGSTOP)
        everything = children(backup.pid)
        backup.kill()
        wait_until(lambda: not alive(everything), "the end of what the driver had started")
    os.kill(server.pid, signal.SIGCONT)
    [plan] = (repository / "staging").rglob("plan.json")
    assert staged(repository)
    assert plan.exists()


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.spark)])
def test_every_point_is_the_tree_at_its_commit(
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    engine: str,
    request: pytest.FixtureRequest,
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    repository = tmp_path / "repository"
    history = History(tmp_path / "history")
    server, other = server_process(), server_process()

    def run() -> dict[str, Any]:
        """Take a backup from this process, which has the session of all tests."""
        command = ["backup", "--json", *ENGINES[engine], *GROUPS]
        code, stdout, stderr = upr_backup(repository, *command)
        assert code == 0, stderr
        return {**json.loads(stdout), "words": stderr}

    assert upr_backup(repository, "init", "--target", server.target)[0] == 0

    trees = [history.load(POINTS[0], server.target)]
    assert run()["kind"] == "full"

    trees.append(history.load(POINTS[1], server.target))
    kill_in_the_middle(repository, server, ENGINES[engine])
    with Client(server.target) as client:
        # After the cut of the killed run: the run that goes on with it does not have this.
        client.bucket().set(b"later", b"")
    second = run()
    assert (second["id"], second["kind"]) == (2, "incremental")
    assert "going on with an interrupted run" in second["words"]
    with Client(server.target) as client:
        client.bucket().delete(b"later")

    trees.append(history.load(POINTS[2], server.target))
    assert run()["id"] == 3
    before = failover_ids(repository)
    server.kill()
    server.start()
    trees.append(history.load(POINTS[3], server.target))
    assert run()["id"] == 4
    after = failover_ids(repository)
    assert sum(before[p] != after[p] for p in before) > 100, "the unclean restart made new records"

    for number, tree in enumerate(trees, 1):
        assert len(tree) > 50
        assert restored(repository, other.target, number) == tree, number
    assert upr_backup(repository, "verify", "--full")[:2] == (0, "all is well\n")


def failover_ids(repository: Path) -> dict[int, str | None]:
    """Return under which failover id the newest backup has each partition."""
    info = json.loads(upr_backup(repository, "info", "--json")[1])
    return {one["partition"]: one["failover_id"] for one in info["partitions"]}
