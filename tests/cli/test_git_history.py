"""upr.cli.cat_commands.git_history, on repositories made for it."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.git_repos import RepoBuilder, git
from upr.cli.cat_commands.git_history import GitError, GitHistory, Skipped
from upr_protocol.limits import KEY_BYTES_MAX

SUBMODULE = b"1234567890123456789012345678901234567890"


def replay(
    repo: Path, value_bytes_max: int = 2**20
) -> tuple[dict[bytes, bytes], list[tuple[int, bytes, bytes | None]], list[Skipped]]:
    """Return the tree that the mutations lead to, the mutations, and what was skipped."""
    tree: dict[bytes, bytes] = {}
    rows = []
    skipped: list[Skipped] = []
    with closing(GitHistory(repo, skipped.append, value_bytes_max)) as history:
        for change in history.changes():
            rows.append((change.commit, change.path, change.blob))
            if change.blob is None:
                del tree[change.path]  # A delete of what is not there would be a KeyError.
            else:
                tree[change.path] = change.blob
    return tree, rows, skipped


@pytest.mark.parametrize("bare", [False, True])
def test_each_commit_becomes_its_sets_and_deletes(tmp_path: Path, bare: bool) -> None:
    repo = RepoBuilder(tmp_path / "with a space", bare)
    repo.commit({b"a": b"1", b"dir/b": b"2"})
    repo.commit({b"a": b"1x"})
    repo.commit({})
    repo.commit({b"dir/b": None, b"dir/c": b"2"})
    repo.make()
    tree, rows, skipped = replay(repo.folder)
    assert rows == [
        (0, b"a", b"1"),
        (0, b"dir/b", b"2"),
        (1, b"a", b"1x"),
        (3, b"dir/b", None),
        (3, b"dir/c", b"2"),
    ]
    assert tree == repo.tree()
    assert not skipped


def test_a_merge_is_compared_with_its_first_parent_only(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    root = repo.commit({b"a": b"1", b"gone": b"x"})
    side = repo.commit({b"side": b"s", b"gone": None}, "side", (root,))
    main = repo.commit({b"a": b"2"}, "main", (root,))
    repo.commit({b"side": b"s merged", b"gone": None}, "main", (main, side))
    repo.make()
    tree, rows, _ = replay(repo.folder)
    assert rows[2:] == [(1, b"a", b"2"), (2, b"gone", None), (2, b"side", b"s merged")]
    assert tree == repo.tree()


def test_a_setting_for_merges_and_renames_changes_nothing(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"old name": b"same content\n" * 20})
    repo.commit({b"old name": None, b"new name": b"same content\n" * 20})
    repo.make()
    for setting, value in (
        ("diff.renames", "copies"),
        ("core.abbrev", "7"),
        ("core.quotePath", "true"),
    ):
        git(repo.folder, "config", setting, value)
    _, rows, _ = replay(repo.folder)
    assert [(path, blob is None) for _, path, blob in rows[1:]] == [
        (b"new name", False),
        (b"old name", True),
    ]


def test_symlinks_modes_and_types(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"link": ("120000", b"target"), b"run": b"#!", b"was file": b"f"})
    repo.commit({b"run": ("100755", b"#!"), b"was file": None, b"was file/now folder": b"g"})
    repo.commit({b"link": b"a file now"})
    repo.make()
    tree, rows, _ = replay(repo.folder)
    assert rows[0] == (0, b"link", b"target")
    assert (1, b"run", b"#!") in rows
    assert (
        tree == repo.tree() == {b"link": b"a file now", b"run": b"#!", b"was file/now folder": b"g"}
    )


def test_gitlinks_are_skipped_and_what_they_replace_is_deleted(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1", b"sub": ("160000", SUBMODULE)})
    repo.commit({b"a": ("160000", SUBMODULE)})
    repo.commit({b"sub": b"a file now"})
    repo.commit({b"a": None})
    repo.make()
    tree, rows, skipped = replay(repo.folder)
    assert rows == [(0, b"a", b"1"), (1, b"a", None), (2, b"sub", b"a file now")]
    assert tree == repo.tree()
    assert [(what.path, what.limit) for what in skipped] == [(b"sub", False), (b"a", False)]


def test_blobs_above_the_limit_are_reported_and_their_path_is_deleted(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1" * 100, b"big": b"b" * 101, b"z": b"z"})
    repo.commit({b"a": b"1" * 3_000_000})
    repo.commit({b"a": b"2" * 3_000_000})
    repo.commit({b"big": b"small"})
    repo.commit({b"a": None})
    repo.make()
    skipped: list[Skipped] = []
    with closing(GitHistory(repo.folder, skipped.append, 100)) as history:
        rows = [(c.commit, c.path, c.blob) for c in history.changes()]
        assert history.left_out == frozenset()
    assert rows == [
        (0, b"a", b"1" * 100),
        (0, b"z", b"z"),
        (1, b"a", None),
        (3, b"big", b"small"),
    ]
    assert [what.path for what in skipped] == [b"big", b"a", b"a"]
    assert "3000000 bytes; must be at most 100" in str(skipped[1])


def test_paths_above_the_limit_are_reported(tmp_path: Path) -> None:
    most = b"/".join([b"d" * 199] * 20) + b"/" + b"f" * 96
    assert len(most) == KEY_BYTES_MAX
    repo = RepoBuilder(tmp_path / "r", bare=True)
    repo.commit({most: b"1", most + b"g": b"2"})
    repo.commit({most + b"g": None, b"other": b"3"})
    repo.make()
    tree, rows, skipped = replay(repo.folder)
    assert rows == [(0, most, b"1"), (1, b"other", b"3")]
    assert tree == repo.tree()
    assert [what.path for what in skipped] == [most + b"g"]
    assert "4097 bytes; must be at most 4096" in str(skipped[0])


def test_left_out_paths_of_the_last_commit_are_known(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1", b"big": b"b" * 101, b"long/" + b"l" * KEY_BYTES_MAX: b"x"})
    repo.make()
    with closing(GitHistory(repo.folder, None, 100)) as history:
        assert [change.path for change in history.changes()] == [b"a"]
        assert history.left_out == {b"big", b"long/" + b"l" * KEY_BYTES_MAX}


def test_paths_and_blobs_are_bytes(tmp_path: Path) -> None:
    paths = [b"\xff\xfe", b'quo"te', b"tab\tand\nline", b":100644 000000", "größe".encode()]
    repo = RepoBuilder(tmp_path / "r", bare=True)
    repo.commit({path: b"\0" + path + b"\n" for path in paths})
    repo.commit({b"empty": b"", paths[0]: None})
    repo.make()
    tree, _, _ = replay(repo.folder)
    assert tree == repo.tree()
    assert set(tree) == {b"empty", *paths[1:]}


def test_a_long_history_goes_through(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r", bare=True)
    repo.commit({b"file %d" % number: b"%d" % number for number in range(500)})
    for number in range(1000):
        repo.commit({b"file %d" % (number % 300): b"%d" % number * 50})
    repo.make()
    tree, rows, _ = replay(repo.folder)
    assert len(rows) == 1500
    assert [commit for commit, _, _ in rows[500:]] == list(range(1, 1001))
    assert tree[b"file 299"] == b"899" * 50


def test_it_can_be_left_in_the_middle(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"file %d" % number: b"x" * 50_000 for number in range(300)})
    repo.make()
    with closing(GitHistory(repo.folder)) as history:
        assert next(history.changes()).commit == 0


def test_a_hook_s_variables_do_not_lead_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1"})
    repo.make()
    monkeypatch.setenv("GIT_DIR", os.devnull)
    tree, _, _ = replay(repo.folder)
    assert tree == {b"a": b"1"}


def test_what_is_no_repository_or_has_no_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GitError, match="is not a directory"):
        GitHistory(tmp_path / "nowhere")
    with pytest.raises(GitError, match="not a git repository"):
        GitHistory(tmp_path)
    empty = RepoBuilder(tmp_path / "r")
    with pytest.raises(GitError, match="no commits"):
        GitHistory(empty.folder)


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1"})
    repo.make()
    name = git(repo.folder, "rev-parse", "HEAD:a").decode().strip()
    # fast-import writes few objects loose; a pack would have to be unpacked first.
    loose = repo.folder / ".git" / "objects" / name[:2] / name[2:]
    loose.unlink()
    with closing(GitHistory(repo.folder)) as history, pytest.raises(GitError, match=name):
        list(history.changes())


def test_without_git_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="git cannot be run"):
        GitHistory(tmp_path)


def test_what_a_dead_git_did_not_take_is_not_told_in_place_of_its_end(tmp_path: Path) -> None:
    repo = RepoBuilder(tmp_path / "r")
    repo.commit({b"a": b"1"})
    repo.make()
    history = GitHistory(repo.folder, lambda _: None)
    process = history._start("cat-file", "--batch", stdin=subprocess.PIPE)
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.write(b"unsent\n")
    history.close()
    assert history._complaints.closed
