"""tools/mutants.py: its list fits the tree, and it believes no run that proves nothing."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import ROOT, Mutant, MutantError, Tree, choose, judge, mutated, read_list

ALL = read_list()
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


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
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
    return copy


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_tree_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.file.startswith(("upr/", "client/"))
    mutated(mutant, ROOT)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        found = ast.walk(ast.parse((ROOT / file).read_text()))
        names = {
            node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in names, f"{test} is not there"


def test_there_are_enough_and_they_are_told() -> None:
    assert len(ALL) > 80
    command = [sys.executable, "-m", "tools.mutants", "--list", "--json", "--only", ALL[0].name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [entry["name"] for entry in json.loads(done.stdout)] == [ALL[0].name]


def test_a_fault_is_caught_by_name_and_taken_back(tree: Tree) -> None:
    with tree.changed(FAULT):
        caught = tree.run(FAULT.tests)
    assert (caught.failed, caught.broken) == ("test_half::test_half", "")
    plain = tree.run(FAULT.tests)
    assert (plain.failed, plain.broken) == ("", "")
    assert (tree.folder / FAULT.file).read_text() == SOURCE


def test_a_fault_of_the_same_length_in_the_same_second_is_seen(tree: Tree) -> None:
    for new, seen in (("// 2", ""), ("// 3", "test_half::test_half"), ("// 2", "")):
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
        choose(ALL, ["nobody"])


def test_what_is_out_of_date_ends_the_run_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "read_list", lambda: [replace(ALL[0], old="no such text")])
    monkeypatch.setattr(sys, "argv", ["mutants"])
    assert mutants.main() == 2
    assert "out of date" in capsys.readouterr().err
