"""Load a git repository's history, SIGKILL the server in the middle, and compare what a follower has.

Run by ``tools/dev.py demo``. A loader writes every commit's files; a follower builds the tree from the change stream
alone. Between two acknowledged writes the server process is killed and then started again on the same data; both go
on. At the end the follower's tree is compared, blob by blob, with what git says HEAD holds.
"""

import argparse
import asyncio
import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from upr.cli.cat_commands.git_history import FileChange, GitError, GitHistory, Skipped, run_git
from upr_cli_kit.output import Progress
from upr_client import AsyncClient, ChangeBatch, Rollback, Tuning
from upr_client.testing import ServerProcess
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.partitioning import partition_of

SLICE_BYTES = 2 * 2**20
SLICE_ROWS = 500
SLICE_ROWS_SMALL = 8
"""Rows of one write when there are few commits: with more to come after the kill, it must be cut finer."""
FEW_COMMITS = 10
WAIT_SECONDS = 60.0
DIFFERENCES_SHOWN = 20

STARTED = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    Progress.end_line()
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


def soak_parser(kind: str, words: str | None) -> argparse.ArgumentParser:
    """Return what reads the options that most kinds of ``tools/dev.py soak`` have."""
    parser = argparse.ArgumentParser(prog=f"tools/dev.py soak --{kind}", description=words)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the first one")
    return parser


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which nothing announces; UprError when it did not in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        if condition():
            return
        if time.monotonic() > deadline:
            raise UprError(f"nothing happened for {WAIT_SECONDS:.0f} s")
        await asyncio.sleep(0.02)


def put_away(*servers: ServerProcess) -> None:
    """Leave nothing of servers behind but their data."""
    for server in servers:
        server.kill()
        server.close()


async def failover_log(client: AsyncClient, partition: int) -> FailoverLog:
    """Return a partition's log, once the server can be reached."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return (await client.admin.failover_logs("default", [partition]))[partition]
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            # Questions are not tried again by the SDK, and gRPC waits a little before it connects anew.
            await asyncio.sleep(0.05)


@dataclass
class Tree:
    """What the follower built: path -> git's name of the blob, and what undoing takes.

    Args:
        hash_name: the hash that the repository names its objects with.
    """

    hash_name: str
    files: dict[bytes, str] = field(default_factory=dict)
    seqnos: dict[int, int] = field(default_factory=dict)
    changes: int = 0
    undone: int = 0
    # For each partition, oldest first: seqno, path, and what was there before.
    _before: dict[int, list[tuple[int, bytes, str | None]]] = field(default_factory=dict)

    def apply(self, batch: ChangeBatch) -> None:
        """Take a batch of changes."""
        for partition, seqno, _, path, blob in batch.changes:
            self._before.setdefault(partition, []).append((seqno, path, self.files.get(path)))
            if blob is None:
                self.files.pop(path, None)
            else:
                # Hashed on arrival: the tree of a long history stays small, and equal names are equal bytes.
                digest = hashlib.new(self.hash_name, b"blob %d\0" % len(blob))
                digest.update(blob)
                self.files[path] = digest.hexdigest()
            self.seqnos[partition] = seqno
            self.changes += 1
        for marker in batch.markers:
            self.seqnos[marker.partition] = marker.seqno

    def undo(self, rollback: Rollback) -> None:
        """Go back to the state at the rollback's seqno, newest change first."""
        before = self._before.get(rollback.partition, [])
        while before and before[-1][0] > rollback.seqno:
            _, path, old = before.pop()
            if old is None:
                self.files.pop(path, None)
            else:
                self.files[path] = old
            self.undone += 1
        self.seqnos[rollback.partition] = rollback.seqno


@dataclass(frozen=True)
class Slice:
    """Rows of one write, and how many commits are complete after it."""

    rows: list[tuple[bytes, bytes | None]]
    commits_done: int


def slices(changes: Iterator[FileChange], commits: int) -> Iterator[Slice]:
    """Cut a history into writes; one ends where the first half of the commits does."""
    rows_max = SLICE_ROWS_SMALL if commits < FEW_COMMITS else SLICE_ROWS
    rows: list[tuple[bytes, bytes | None]] = []
    size = 0
    middle = commits // 2
    last = 0
    for change in changes:
        if rows and (
            len(rows) >= rows_max or size >= SLICE_BYTES or last < middle <= change.commit
        ):
            yield Slice(rows, change.commit)
            rows, size = [], 0
        rows.append((change.path, change.blob))
        size += len(change.blob or b"")
        last = change.commit
    if rows:
        yield Slice(rows, commits)


class Demo:
    """One run.

    Args:
        history: what to load.
        server: not started yet.
    """

    def __init__(self, history: GitHistory, server: ServerProcess) -> None:
        self._history = history
        self._server = server
        self._moved = asyncio.Event()
        self._progress = Progress("commits", len(history.commits))
        name = "sha256" if len(history.commits[0]) == 64 else "sha1"
        self.tree = Tree(name)
        self.written = 0
        self._partition = -1
        self._lost = False
        self._restarted: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Load and follow, with the kill between; afterwards the follower has everything."""
        await asyncio.to_thread(self._server.start)
        say(f"server    started on {self._server.target}, with an empty data directory")
        async with AsyncClient(self._server.target, retry_seconds=WAIT_SECONDS) as client:
            bucket = client.bucket("default")
            changes = bucket.changes(
                tuning=Tuning(retry_seconds=WAIT_SECONDS),
                on_rollback=self.tree.undo,
                on_status=self._on_status,
            )

            async def follow() -> None:
                async with changes:
                    async for batch in changes.batches():
                        self.tree.apply(batch)
                        self._moved.set()

            follower = asyncio.create_task(follow())
            try:
                await self._load(client, follower)
                say("loader    everything is acknowledged; waiting for the follower")
                self._progress = Progress("rows at the follower")
                high = {
                    info.partition: info.high_seqno
                    for info in await client.admin.partitions(bucket)
                }
                await self._follower_reaches(high, follower)
                # With nothing left to come it may have had everything before it noticed the kill.
                await until(lambda: bool(changes.handshakes) or follower.done())
                answers = Counter(rule for _, rule, _ in changes.handshakes)
                self._show_handshakes(list(changes.handshakes), answers)
            finally:
                tasks = [task for task in (follower, self._restarted) if task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, client: AsyncClient, follower: asyncio.Task[None]) -> None:
        bucket = client.bucket("default")
        commits = len(self._history.commits)
        parts = slices(self._history.changes(), commits)
        part = await asyncio.to_thread(next, parts, None)
        while part is not None:
            # The next part is read from git while this one is written.
            results, upcoming = await asyncio.gather(
                bucket.write_many(part.rows), asyncio.to_thread(next, parts, None)
            )
            self.written += results.rows
            has = f"{self.written} rows acknowledged, the follower has {self.tree.changes}"
            self._progress.update(part.commits_done, has)
            # At the half; or later, when nothing else would be left to come after it.
            if self._restarted is None and (part.commits_done >= commits // 2 or upcoming is None):
                partition = partition_of(part.rows[-1][0])
                await self._follower_reaches({partition: 1}, follower)
                before = await failover_log(client, partition)
                say(
                    f"loader    {self.written} rows of {part.commits_done}/{commits} commits acknowledged"
                )
                self._server.kill()
                say(
                    f"server    SIGKILL to process {self._server.pid}, between two acknowledged writes"
                )
                # The loader goes on at once, against a server that is not there.
                restart = self._restart(client, partition, before)
                self._restarted = asyncio.create_task(restart)
                more = "with its next write" if upcoming else "though nothing is left to write"
                say(f"loader    goes on {more}")
            part = upcoming
        if self._restarted is None:
            raise GitError(f"no commit of {self._history.repo} has a file", hint="nothing to load")
        await self._restarted

    async def _restart(self, client: AsyncClient, partition: int, before: FailoverLog) -> None:
        await asyncio.sleep(0.5)
        await asyncio.to_thread(self._server.start)
        say(f"server    started again on {self._server.target}, on the same data")
        after = await failover_log(client, partition)
        self._partition = partition
        say(f"failover  log of partition {partition} before: {_records(before)}")
        say(f"          and now, with a record of the unclean restart: {_records(after)}")

    async def _follower_reaches(self, seqnos: dict[int, int], follower: asyncio.Task[None]) -> None:
        reached = self.tree.seqnos
        while any(reached.get(partition, 0) < seqno for partition, seqno in seqnos.items()):
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            done, _ = await asyncio.wait(
                {moved, follower}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            moved.cancel()
            self._progress.update(self.tree.changes)
            if follower in done:
                await follower
                raise UprError("the follower ended early")
            if not done:
                raise UprError(f"the follower received nothing for {WAIT_SECONDS:.0f} s")

    def _show_handshakes(
        self, handshakes: list[tuple[int, str, str]], answers: Counter[str]
    ) -> None:
        for rule, count in answers.items():
            say(
                f"handshake {count} partitions were told where the old history ends, by the rule {rule}"
            )
        of_one = [words for partition, _, words in handshakes if partition == self._partition]
        for words in of_one[-1:]:
            say(f"          partition {self._partition}: {words}")
        nothing = "" if self.tree.undone else ": the server lost nothing that it had shown"
        say(f"follower  received {self.tree.changes} changes, undid {self.tree.undone}{nothing}")

    def _on_status(self, text: str) -> None:
        if not self._lost:
            say(f"follower  {text}")
            self._lost = True


def _records(log: FailoverLog) -> str:
    return ", ".join(map(str, log))


def compare(history: GitHistory, tree: Tree) -> bool:
    """Compare the follower's tree with git's, print the result, and return whether they are equal."""
    listed = run_git(history.repo, "ls-tree", "-r", "-z", "--full-tree", history.commits[-1])
    expected: dict[bytes, str] = {}
    for line in listed.split(b"\0")[:-1]:
        about, _, path = line.partition(b"\t")
        _, kind, name = about.split()
        if kind == b"blob" and path not in history.left_out:
            expected[path] = name.decode()
    differing = sorted(
        path
        for path in expected.keys() | tree.files.keys()
        if expected.get(path) != tree.files.get(path)
    )
    for path in differing[:DIFFERENCES_SHOWN]:
        say(f"differs   {path!r}: git {expected.get(path)}, follower {tree.files.get(path)}")
    if history.left_out:
        say(
            f"compare   {len(history.left_out)} paths of HEAD are above the limits and were not loaded"
        )
    if differing:
        say(f"RESULT    {len(differing)} of {len(expected)} blobs DIFFER")
    else:
        say(f"RESULT    all {len(expected)} blobs of HEAD are equal")
    return not differing


async def demonstrate(repo: Path, folder: Path) -> bool:
    """Run the demo in a folder; return whether the follower's tree is equal."""

    def on_skip(skipped: Skipped) -> None:
        if skipped.limit:
            say(f"skipped   {skipped}")

    with closing(GitHistory(repo, on_skip)) as history:
        say(
            f"history   {repo}: {len(history.commits)} commits from the root to {history.commits[-1][:12]}"
        )
        server = ServerProcess(folder / "data")
        demo = Demo(history, server)
        try:
            await demo.run()
            equal = compare(history, demo.tree)
            server.stop()
            say("server    stopped in good order; the temporary folder is removed")
        finally:
            put_away(server)
        return equal


def tell(story: Callable[[Path], Awaitable[bool]]) -> int:
    """Run a story in a temporary folder; returns the exit status, 0 when it says that it ended well."""

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with tempfile.TemporaryDirectory(prefix="upr-demo-") as folder:
            return await story(Path(folder))

    try:
        return 0 if asyncio.run(run()) else 1
    except GitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (UprError, TimeoutError, subprocess.CalledProcessError) as error:
        print(f"error: {error or 'nothing happened in time'}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; everything is put away", file=sys.stderr)
        return 130


def main() -> int:
    """Run the demo on the repository named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    return tell(partial(demonstrate, options.repo))


if __name__ == "__main__":
    sys.exit(main())
