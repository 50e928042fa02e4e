"""Git repositories made for tests, commit by commit, through ``git fast-import``."""

import os
import subprocess
from pathlib import Path

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "LC_ALL": "C",
}
WHO = b"committer T <t@example.org> 1700000000 +0000\n"


def git(repo: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    return subprocess.run(
        ["git", "-C", str(repo), *arguments],
        check=True,
        input=stdin,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ).stdout


class RepoBuilder:
    """Collects commits on ``main`` and other branches, then makes the repository.

    Args:
        folder: where to; made.
        bare: without a work tree.
    """

    def __init__(self, folder: Path, bare: bool = False) -> None:
        self.folder = folder
        self._stream: list[bytes] = []
        self._mark = 0
        folder.mkdir(parents=True)
        git(folder, "init", "-q", "--initial-branch=main", *(["--bare"] if bare else []))

    def commit(
        self,
        files: dict[bytes, bytes | tuple[str, bytes] | None],
        branch: str = "main",
        parents: tuple[int, ...] = (),
    ) -> int:
        """Add a commit; returns its mark.

        Args:
            files: path to content; None deletes it; a tuple is a mode and the content (for a gitlink: the name).
            branch: which one it goes on.
            parents: marks; without any, the branch's last one is the only parent.
        """
        self._mark += 1
        mark = self._mark
        lines = [b"commit refs/heads/%s\nmark :%d\n" % (branch.encode(), mark), WHO, b"data 1\nx\n"]
        for index, parent in enumerate(parents):
            lines.append(b"%s :%d\n" % (b"merge" if index else b"from", parent))
        for path, content in files.items():
            quoted = b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'
            if content is None:
                lines.append(b"D " + quoted + b"\n")
                continue
            mode, data = content if isinstance(content, tuple) else ("100644", content)
            if mode == "160000":
                lines.append(b"M 160000 %s %s\n" % (data, quoted))
            else:
                lines.append(b"M %s inline %s\n" % (mode.encode(), quoted))
                lines.append(b"data %d\n%s\n" % (len(data), data))
        self._stream += lines
        return mark

    def make(self) -> Path:
        # core.protectNTFS and the like judge paths at checkout only; nothing is checked out here.
        git(self.folder, "fast-import", "--quiet", stdin=b"".join(self._stream))
        self._stream.clear()
        return self.folder

    def tree(self) -> dict[bytes, bytes]:
        """Path to content at HEAD, without gitlinks, asked of git by other commands than the code under test."""
        found: dict[bytes, bytes] = {}
        for line in git(self.folder, "ls-tree", "-r", "-z", "HEAD").split(b"\0")[:-1]:
            about, _, path = line.partition(b"\t")
            _, kind, name = about.split()
            if kind == b"blob":
                found[path] = git(self.folder, "cat-file", "blob", name.decode())
        return found
