"""tools/mutants.py: its list fits the tree, and it believes no run that proves nothing."""

import functools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import ROOT, Mutant, MutantError, Tree, choose, judge, mutated, read_list

SOURCE = "def half(number: int) -> int:\n    return number // 2\n"
TESTS = """
import pytest
from upr.half import half

def test_half():
    assert half(4) == 2

@pytest.fixture
def torn():
    yield
    assert half(4) == 2

def test_passes(torn):
    pass
"""
FAULT = Mutant("doubled", "Doubles.", "upr/half.py", "// 2", "* 2", ("tests/test_half.py",))


@functools.cache
def listed() -> list[Mutant]:
    """Return all mutants: each process of a run reads this file, and one has these tests."""
    return read_list()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """A small tree of the same packages, and the copy of it."""
    root = tmp_path / "root"
    for folder in ("upr", "client/upr_client", "client/upr_protocol", "tests"):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    (root / "upr" / "half.py").write_text(SOURCE)
    (root / "tests" / "test_half.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    copy = Tree(tmp_path / "copy" / "tree")
    copy.folder.mkdir(parents=True)
    copy.copy(root)
    yield copy
    copy.close()


def test_every_mutant_fits_the_tree_and_its_tests_exist() -> None:
    assert {mutant.file.split("/")[0] for mutant in listed()} == {"upr", "client"}
    mutants.check_all(listed())
    named: dict[str, set[str]] = {}
    for test in (test for mutant in listed() for test in mutant.tests):
        file, _, name = test.partition("::")
        named.setdefault(file, set()).add(name)
    for file, names in named.items():
        there = re.findall(r"^ *(?:async )?def (\w+)\(", (ROOT / file).read_text(), re.MULTILINE)
        assert names <= set(there), file


def test_there_are_enough_and_they_are_told() -> None:
    assert len(listed()) > 80
    command = [
        sys.executable,
        "-m",
        "tools.mutants",
        "--list",
        "--json",
        "--only",
        listed()[0].name,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [entry["name"] for entry in json.loads(done.stdout)] == [listed()[0].name]


def test_a_fault_is_caught_by_name_and_taken_back(tree: Tree) -> None:
    with tree.changed(FAULT):
        caught = tree.run(FAULT.tests)
    assert (caught.failed, caught.broken) == ("test_half::test_half", "")
    assert (tree.folder / FAULT.file).read_text() == SOURCE


def test_a_fault_of_the_same_length_in_the_same_second_is_seen(tree: Tree) -> None:
    for new, seen in (("// 2", ""), ("// 3", "test_half::test_half")):
        (tree.folder / FAULT.file).write_text(SOURCE.replace("// 2", new))
        assert tree.run(FAULT.tests).failed == seen


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ("// two", "NameError"),
        ("// 2\n\nraise ImportError('no')", "test_half"),
    ],
)
def test_what_cannot_be_run_has_caught_nothing(tree: Tree, new: str, why: str) -> None:
    with tree.changed(replace(FAULT, new=new)):
        outcome = tree.run(FAULT.tests)
    assert outcome.failed == ""
    assert why in outcome.broken


def test_an_error_beside_the_test_is_no_failure_of_it(tree: Tree) -> None:
    with tree.changed(FAULT):
        outcome = tree.run(["tests/test_half.py::test_passes"])
    assert outcome.failed == ""
    assert "test_passes" in outcome.broken


def test_a_test_that_is_not_there_proves_nothing(tree: Tree) -> None:
    assert tree.run(["tests/test_half.py::test_nothing"]).broken


def test_a_text_is_looked_for_in_the_function_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "upr").mkdir()
    (tmp_path / FAULT.file).write_text(
        "class Cake:\n    @property\n    def rest(self) -> int:\n        return self.size // 2\n\n\n"
        + SOURCE
    )
    with pytest.raises(MutantError, match="is 2 times in upr/half"):
        mutated(FAULT, tmp_path)
    changed = mutated(replace(FAULT, where="half"), tmp_path)
    assert changed.count("// 2") == 1
    assert changed.endswith("number * 2\n")
    assert "self.size * 2" in mutated(replace(FAULT, where="Cake.rest"), tmp_path)
    with pytest.raises(MutantError, match=r"is 0 times in Cake\.half of"):
        mutated(replace(FAULT, where="Cake.half"), tmp_path)


def test_a_sample_is_a_tenth_that_its_seed_chooses() -> None:
    chosen = mutants.sample(listed(), 7)
    assert chosen == mutants.sample(listed(), 7)
    assert chosen != mutants.sample(listed(), 8)
    assert len(listed()) / 12 < len({mutant.name for mutant in chosen}) < len(listed()) / 9


def test_jobs_try_the_mutants_in_trees_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = replace(FAULT, name="harmless", new="// 2  # The same.")
    other = Tree(tree.folder.with_name("other"))
    shutil.copytree(tree.folder, other.folder)
    monkeypatch.setattr(mutants, "ROOT", tree.folder)
    monkeypatch.setattr(mutants, "copies", lambda folder, jobs: [tree, other])
    assert mutants.try_all([FAULT, harmless], 2) == 1
    words = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert words == [["caught", "doubled"], ["SURVIVED", "harmless"]]


def _reported(folder: Path, *cases: str) -> Path:
    report = folder / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return report


def test_what_a_report_has_is_not_run_first_and_none_begins_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _reported(
        tmp_path, "<testcase classname='tests.test_half' name='test_half' time='1'/>"
    )
    monkeypatch.setattr(mutants, "ROOT", tree.folder)
    monkeypatch.setattr(mutants, "copies", lambda folder, jobs: [tree])
    monkeypatch.setattr(Tree, "run_plain", lambda *_: pytest.fail("it was green before"))
    assert mutants.try_all([FAULT], 1, report) == 0
    assert tree.seconds == {"test_half::test_half": 1.0}
    assert mutants.try_all([FAULT], 1, report, seconds=0) == 0
    words = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in words[:-1]] == [["caught", "doubled"], ["1", "of"]]
    assert words[-1].startswith("0 of 0 ")
    assert words[-1].endswith(", for 1 more there was no time")


def test_only_what_was_green_in_a_report_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        replace(FAULT, name=name, tests=(f"tests/test_half.py::test_{name}",))
        for name in ("half", "a", "b")
    ]
    cases = [
        "<testcase classname='tests.test_half' name='test_half[1]'/>",
        "<testcase classname='tests.test_half' name='test_a'><skipped/></testcase>",
    ]
    monkeypatch.setattr(mutants, "read_list", lambda: faults)
    argv = ["mutants", "--list", "--json", "--report", str(_reported(tmp_path, *cases))]
    monkeypatch.setattr(sys, "argv", argv)
    assert mutants.main() == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["half"]


def test_a_fault_that_is_seen_at_the_second_try_is_caught(
    monkeypatch: pytest.MonkeyPatch, tree: Tree
) -> None:
    outcomes = [mutants.Outcome(failed, "", 1.0) for failed in ("", "test_half::test_half")]
    monkeypatch.setattr(mutants, "ROOT", tree.folder)
    monkeypatch.setattr(mutants, "copies", lambda folder, jobs: [tree])
    monkeypatch.setattr(Tree, "run_plain", lambda *_: mutants.Outcome("", "", 1.0))
    monkeypatch.setattr(Tree, "run", lambda *_: outcomes.pop(0))
    assert mutants.try_all([FAULT], 1) == 0


def test_nothing_of_a_run_is_left_when_whoever_asked_ends(tree: Tree) -> None:
    server = 'import subprocess; subprocess.run(["sleep", "600"], start_new_session=True)'
    hangs = replace(FAULT, old="return number // 2", new=server)
    with tree.changed(hangs), ThreadPoolExecutor() as pool:
        run = pool.submit(tree.run, hangs.tests)
        started: list[int] = []
        while not started:
            time.sleep(0.01)
            if tree._server is not None:
                runs = mutants.children_of(tree._server.pid)
                started = [one for pid in runs for one in mutants.children_of(pid)]
        tree.close()
        assert not Path(f"/proc/{started[0]}").exists()
        assert run.exception() is not None or run.result().broken


def test_a_fault_that_hangs_when_the_time_is_up_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tree: Tree
) -> None:
    hangs = replace(FAULT, old="return number // 2", new="while True:\n        pass")
    monkeypatch.setattr(mutants, "LAST_SECONDS", 0)
    with tree.changed(hangs):
        assert mutants.attempted(hangs, tree, time.monotonic() + 1) is None


@pytest.mark.parametrize(("old", "count"), [("// 4", 0), ("number", 2)])
def test_a_mutant_out_of_date_is_an_error(tree: Tree, old: str, count: int) -> None:
    with pytest.raises(MutantError, match=f"doubled is out of date: its old text is {count} times"):
        mutated(replace(FAULT, old=old), tree.folder)


def test_a_mutant_that_is_no_python_is_an_error(tree: Tree) -> None:
    with pytest.raises(MutantError, match="broken"):
        mutated(replace(FAULT, new="//"), tree.folder)


def test_a_copy_that_is_not_imported_is_an_error(tree: Tree) -> None:
    tree._environment["PYTHONPATH"] = str(ROOT / "client")
    with pytest.raises(MutantError, match="would import"):
        tree.check_imports()


def test_a_status_without_a_failure_is_broken() -> None:
    report = "<testsuites><testsuite><testcase classname='a.b' name='c'/></testsuite></testsuites>"
    assert judge(report, 0, 1.0).broken == ""
    assert "status 3" in judge(report, 3, 1.0).broken


def test_lists_are_checked(tmp_path: Path) -> None:
    entry = "[[mutant]]\nname='a'\nmeans='b'\nfile='c'\nold='d'\nnew='e'\ntests=['f']\n"
    list_file = tmp_path / "list.toml"
    for wrong in (entry + "more=1\n", entry.replace("'e'", "'d'"), entry * 2):
        list_file.write_text(wrong)
        with pytest.raises(MutantError, match=r"list\.toml: a"):
            read_list(tmp_path)
    with pytest.raises(MutantError, match="there is no mutant nobody"):
        choose(listed(), ["nobody"])


def test_what_is_out_of_date_ends_the_run_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "read_list", lambda: [replace(listed()[0], old="no such text")])
    monkeypatch.setattr(sys, "argv", ["mutants"])
    assert mutants.main() == 2
    assert "out of date" in capsys.readouterr().err
