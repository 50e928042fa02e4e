"""tools/demo.py as a process, and its comparison."""

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.git_repos import RepoBuilder
from tools.demo import Tree, compare, slices
from upr.cli.cat_commands.git_history import FileChange, GitHistory
from upr_client import ChangeBatch, Rollback
from upr_protocol.block import build_block

ROOT = Path(__file__).resolve().parent.parent.parent


def start_demo(repo: Path, temporary: Path) -> subprocess.Popen[str]:
    """Start the demo with a temporary folder of its own, which shows what it leaves behind."""
    return start(["tools/demo.py", "--repo", str(repo)], temporary)


def start(arguments: list[str], temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.crash
def test_the_demo_ends_with_every_blob_equal(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "a repo", bare=True)
    repo.commit({b"f%d" % number: b"%d" % number for number in range(30)})
    for number in range(39):
        repo.commit({b"f%d" % (number % 30): None, b"new/%d" % number: os.urandom(100)})
    repo.make()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    demo = start_demo(repo.folder, temporary)
    out, errors = demo.communicate(timeout=120)
    assert demo.returncode == 0, out + errors
    assert f"RESULT    all {len(repo.tree())} blobs of HEAD are equal" in out
    assert "SIGKILL" in out
    assert "goes on with its next write" in out
    assert "1024 partitions were told where the old history ends, by the rule next_record" in out
    assert list(temporary.iterdir()) == []


@pytest.mark.long
@pytest.mark.crash
def test_the_demo_of_writes_undone_shows_the_numbers(tmp_path: Path) -> None:
    demo = start(["-m", "tools.demo_undone"], tmp_path)
    out, errors = demo.communicate(timeout=120)
    assert demo.returncode == 0, out + errors
    assert "goes back to its snapshot marker 418, and undoes 16 mutations" in out
    drawn = [line.split() for line in out.splitlines() if " 418" in line and "===" in line]
    bars = [[word for word in words if word.isdigit()][:3] for words in drawn]
    assert bars[:3] == [["418", "426"], ["418", "426", "434"], ["418", "426", "434"]]
    assert bars[-2:] == [["418", "426", "436"]] * 2
    assert "16 mutations were undone, and the follower has the same 436 mutations" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.crash
def test_the_failover_demo_undoes_what_the_replica_lacked(tmp_path: Path) -> None:
    demo = start(["-m", "tools.demo_failover"], tmp_path)
    out, errors = demo.communicate(timeout=200)
    assert demo.returncode == 0, out + errors
    assert "goes back to its snapshot marker 418, and undoes 16 mutations" in out
    # The former active server undid the 8 that only it had, and what kept the replica from having them.
    assert any(line.split()[-2:] == ["9", "2"] for line in out.splitlines() if "undone/" in line)
    assert "RESULT    A, B and the follower have the same 436 mutations" in out
    assert list(tmp_path.iterdir()) == []


SHORT_LEASE = """
from upr.cluster import keeper
keeper.LEASE_SECONDS = 2
from upr_client.testing import child
child.main()
"""
QUICK = """
import sys
from pathlib import Path
from tools import demo_cluster
from upr_client.testing import process
process._CHILD = Path({child!r})
demo_cluster.HELD_SECONDS = 1.0
sys.exit(demo_cluster.main())
"""


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.etcd
def test_the_cluster_demo_has_one_owner_after_the_other_and_loses_nothing(tmp_path: Path) -> None:
    child, temporary = tmp_path / "child.py", tmp_path / "tmp"
    child.write_text(SHORT_LEASE)
    temporary.mkdir()
    demo = start(["-c", QUICK.format(child=str(child))], temporary)
    out, errors = demo.communicate(timeout=200)
    assert demo.returncode == 0, out + errors
    (told,) = re.findall("RESULT    each epoch had one owner: (.*)", out)
    owners = re.findall("([ABC]) in [0-9]+", told)
    assert owners[0] == "A"
    assert len(owners) == 3
    assert owners[0] != owners[1] != owners[2]
    assert f"{owners[2]}         still is the owner, because the others hear it" in out
    assert re.search(r"RESULT    A, B, C and the follower have all \d+ keys", out)
    assert "nothing was undone" in out
    assert list(temporary.iterdir()) == []


@pytest.mark.crash
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "repo")
    repo.commit({b"a": b"1"})
    repo.make()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    demo = start_demo(repo.folder, temporary)
    assert demo.stdout is not None
    lines: list[str] = []
    while not any("SIGKILL" in line for line in lines):
        lines.append(demo.stdout.readline())
        assert lines[-1], lines
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    # On a slow machine how far it was stands before.
    assert errors.endswith("interrupted; everything is put away\n")
    assert "Traceback" not in errors
    assert list(temporary.iterdir()) == []


def test_a_demo_of_nothing_says_so(tmp_path: Path) -> None:
    empty = RepoBuilder(tmp_path / "repo")
    demo = start_demo(empty.folder, tmp_path)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert "has no commits" in errors


def batch(start: int, *rows: tuple[bytes, bytes | None]) -> ChangeBatch:
    """A batch of rows of one partition, numbered above ``start``."""
    block = build_block([key for key, _ in rows], [value for _, value in rows])
    runs = block.runs.copy()
    assert len(runs) == 1
    runs["start_seqno"], runs["end_seqno"] = start, start + len(rows)
    runs["horizon"] = start + len(rows)
    return ChangeBatch([replace(block, runs=runs)])


def test_the_follower_s_tree_can_go_back() -> None:
    tree = Tree("sha1")
    tree.apply(batch(0, (b"a", b"1"), (b"a", b"2")))
    before = dict(tree.files)
    (partition,) = tree.seqnos
    tree.apply(batch(2, (b"a", None), (b"a", b"3")))
    tree.undo(Rollback(partition, 4, 2, 1, 2, "next_record", ""))
    assert tree.files == before
    assert (tree.seqnos[partition], tree.undone) == (2, 2)
    tree.undo(Rollback(partition, 2, 0, 1, 2, "unknown_id", ""))
    assert tree.files == {}


def test_a_difference_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = RepoBuilder(tmp_path / "repo")
    repo.commit({b"a": b"1", b"b": b"2", b"sub": ("160000", b"1" * 40)})
    repo.make()
    tree = Tree("sha1")
    tree.apply(batch(0, (b"a", b"1")))
    with closing(GitHistory(repo.folder)) as history:
        list(history.changes())
        assert not compare(history, tree)
        assert "1 of 2 blobs DIFFER" in capsys.readouterr().out
        tree.apply(batch(0, (b"b", b"2")))
        assert compare(history, tree)
        tree.apply(batch(0, (b"b", b"other")))
        assert not compare(history, tree)
        tree.apply(batch(1, (b"b", b"2")))
        tree.apply(batch(0, (b"c", b"")))
        assert not compare(history, tree)


def test_a_write_ends_where_the_first_half_of_the_commits_does() -> None:
    changes = [FileChange(commit, b"%d" % commit, b"") for commit in range(100)]
    parts = list(slices(iter(changes), 100))
    assert [(len(part.rows), part.commits_done) for part in parts] == [(50, 50), (50, 100)]
    files = [FileChange(0, b"%d" % number, b"") for number in range(20)]
    assert [len(part.rows) for part in slices(iter(files), 1)] == [8, 8, 4]
