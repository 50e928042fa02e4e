"""The first-parent history of a git repository as mutations: key the path, value the blob.

Each commit is compared with its first parent, without rename detection: a rename is a delete and a set. One
``git diff-tree`` and one ``git cat-file`` serve all commits, because starting a process for each one would cost more
than everything else together. Nothing is checked out, so bare repositories work too.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, ClassVar

from upr_protocol.errors import UprError
from upr_protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

_GITLINK = b"160000"
_ABSENT = b"000000"
_READ_BYTES = 2**20
_ASKED_AHEAD = 64
"""Blobs asked for before the first is read. Their names fit into a pipe, so neither side can block the other."""


class GitError(UprError):
    """git could not be run, or the repository cannot be read."""

    default_reason: ClassVar[str] = "GIT"


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a commit did to one path.

    Args:
        commit: which commit of ``GitHistory.commits``, from 0.
        blob: its new content, None when it is gone.
    """

    commit: int
    path: bytes
    blob: bytes | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something of the history that cannot be a mutation.

    Args:
        commit: the commit's name.
        why: in words, with the value and the limit.
        limit: whether a limit was the reason; else it is a gitlink, which has no content.
    """

    commit: str
    path: bytes
    why: str
    limit: bool

    def __str__(self) -> str:
        return f"{self.commit[:12]} {os.fsdecode(self.path)!r}: {self.why}"


@dataclass(frozen=True, slots=True)
class _Entry:
    commit: int
    old_mode: bytes
    new_mode: bytes
    new_name: bytes
    path: bytes


def git_environment() -> dict[str, str]:
    """The environment for git: without variables that point it at another repository, as hooks have them."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")
    }
    return {**environment, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}


def run_git(repo: Path, *arguments: str) -> bytes:
    """Run git in the repository and return what it prints.

    Raises:
        GitError: it cannot be run, or it fails; with what it said.
    """
    command = ["git", "-C", str(repo), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=git_environment(), check=False)
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}", hint="is it installed?") from error
    if done.returncode:
        raise GitError(f"git {arguments[0]} failed in {repo}: {_first_line(done.stderr)}")
    return done.stdout


def _first_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else "it said nothing"


class GitHistory:
    """The history of the repository's HEAD, from the root commit.

    Args:
        repo: the work tree, a folder in it, or a bare repository.
        on_skip: called for everything that is left out.
        value_bytes_max: a larger blob is left out, and its path deleted.

    Attributes:
        commits: their names, the first one first.
        left_out: paths that are, at the commit read last, in the repository's tree but not among the mutations.

    Raises:
        GitError: it is not a repository, or has no commits, or git cannot be run.
    """

    def __init__(
        self,
        repo: Path,
        on_skip: Callable[[Skipped], None] | None = None,
        value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        self.repo = repo
        if not repo.is_dir():
            raise GitError(f"{repo} is not a directory")
        run_git(repo, "rev-parse", "--git-dir")
        try:
            run_git(repo, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except GitError as error:
            raise GitError(
                f"the repository {repo} has no commits at HEAD", hint="nothing to load"
            ) from error
        listed = run_git(repo, "rev-list", "--first-parent", "--reverse", "HEAD")
        self.commits = listed.decode().split()
        self._on_skip = on_skip
        self._value_bytes_max = value_bytes_max
        self._processes: list[subprocess.Popen[bytes]] = []
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.left_out: set[bytes] = set()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            # It closes the pipes, and waits. What a process that died did not take is not to be told in place of its end.
            with contextlib.suppress(BrokenPipeError), process:
                pass
        self._processes.clear()
        self._complaints.close()

    def changes(self) -> Iterator[FileChange]:
        """Yield what the commits did, in their order, each path at most once a commit; blobs are read as asked."""
        blobs = self._start("cat-file", "--batch", stdin=subprocess.PIPE)
        assert blobs.stdin is not None
        assert blobs.stdout is not None
        entries = self._entries()
        # Asked for in portions, so that git looks up the next blob while this one is written to the server.
        while portion := list(islice(entries, _ASKED_AHEAD)):
            wanted = [entry.new_name for entry in portion if _has_blob(entry)]
            try:
                blobs.stdin.write(b"".join(name + b"\n" for name in wanted))
                blobs.stdin.flush()
            except BrokenPipeError:
                raise self._failed("cat-file") from None
            for entry in portion:
                change = self._change_of(entry, blobs.stdout)
                if change is not None:
                    yield change

    def _change_of(self, entry: _Entry, blobs: IO[bytes]) -> FileChange | None:
        blob: bytes | None = None
        above = ""
        was_there = (
            entry.old_mode not in (_ABSENT, _GITLINK)
            and entry.path not in self.left_out
            and len(entry.path) <= KEY_BYTES_MAX
        )
        self.left_out.discard(entry.path)
        if entry.new_mode == _GITLINK:
            self._skip(entry, "gitlink without content here", limit=False)
        elif _has_blob(entry):
            size = self._blob_size(entry, blobs)
            if size > self._value_bytes_max:
                _discard(blobs, size + 1)
                above = f"blob is {size} bytes; must be at most {self._value_bytes_max}"
            elif len(entry.path) > KEY_BYTES_MAX:
                _discard(blobs, size + 1)
                above = f"path is {len(entry.path)} bytes; must be at most {KEY_BYTES_MAX}"
            else:
                blob = self._read_blob(size, blobs)
        if above:
            self._skip(entry, above, limit=True)
            self.left_out.add(entry.path)
        # What is left out is deleted if it was there: with its old content the tree would be one that never was.
        return FileChange(entry.commit, entry.path, blob) if blob is not None or was_there else None

    def _blob_size(self, entry: _Entry, blobs: IO[bytes]) -> int:
        header = blobs.readline().split()
        if len(header) != 3 or header[1] != b"blob":
            if not header:
                raise self._failed("cat-file")
            raise GitError(
                f"git has no blob {entry.new_name.decode()} in {self.repo}",
                hint="a partial clone? fetch the blobs first",
            )
        return int(header[2])

    def _read_blob(self, size: int, blobs: IO[bytes]) -> bytes:
        # One more: a line feed ends each answer.
        data = blobs.read(size + 1)
        if len(data) != size + 1:
            raise self._failed("cat-file")
        return data[:-1]

    def _entries(self) -> Iterator[_Entry]:
        # Named with the parent it is compared with: so merges have one side only, whatever git's settings are.
        lines = [" ".join(pair) for pair in zip(self.commits[1:], self.commits, strict=False)]
        with tempfile.TemporaryFile() as asked:
            asked.write("\n".join([self.commits[0], *lines, ""]).encode())
            asked.seek(0)
            process = self._start(
                "diff-tree", "--stdin", "--always", "--root", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", stdin=asked,
            )  # fmt: skip
        assert process.stdout is not None
        commit = -1
        fields = _fields(process.stdout)
        for field in fields:
            if not field.startswith(b":"):
                commit += 1
                continue
            old_mode, new_mode, _, new_name, _ = field[1:].split(b" ")
            yield _Entry(commit, old_mode, new_mode, new_name, next(fields))
        if process.wait() or commit + 1 != len(self.commits):
            raise self._failed("diff-tree")

    def _start(self, *arguments: str, stdin: int | IO[bytes]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["git", "-C", str(self.repo), *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=git_environment(),
            bufsize=_READ_BYTES,
        )
        self._processes.append(process)
        return process

    def _skip(self, entry: _Entry, why: str, *, limit: bool) -> None:
        if self._on_skip is not None:
            self._on_skip(Skipped(self.commits[entry.commit], entry.path, why, limit))

    def _failed(self, command: str) -> GitError:
        self._complaints.seek(0)
        said = _first_line(self._complaints.read())
        return GitError(f"git {command} ended early in {self.repo}: {said}")


def _has_blob(entry: _Entry) -> bool:
    return entry.new_mode not in (_ABSENT, _GITLINK)


def _discard(stream: IO[bytes], size: int) -> None:
    while size > 0:
        read = len(stream.read(min(size, _READ_BYTES)))
        if not read:
            return
        size -= read


def _fields(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield what NULs end."""
    rest = b""
    while data := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
        *whole, rest = (rest + data).split(b"\0")
        yield from whole
    if rest:
        yield rest
