"""Rules for rooms: how many modules a folder has, how long they are, what they may import and inherit from."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.packaging import test_packaging as sources

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = re.compile(r"_pb2(_grpc)?\.py$|/_sync/")
HOUSES = ("upr", *sorted(f"client/{f.name}" for f in (ROOT / "client").glob("upr_*")))
MODULES_MAX = 12
LINES_MIN = 60
SHORT = {
    # Entries, which import nothing before it is needed.
    "upr/cli/__main__.py",
    "upr/cli/cat.py",
    "upr/cli/entry.py",
    "client/upr_backup/__main__.py",
    "client/upr_backup/cli/entry.py",
    "client/upr_backup/ship.py",
    "client/upr_backup/spark_job.py",
    "client/upr_client/testing/child.py",
    "client/upr_client/testing/pytest_plugin.py",
    # One idea that engine and clients share.
    "client/upr_protocol/write_places.py",
    # One idea that followers and views share.
    "client/upr_client/_async/waiters.py",
    # Lists of names.
    "client/upr_client/errors.py",
    "client/upr_client/types.py",
}
"""Modules under LINES_MIN lines, and why."""
DEMANDED = {
    # Spark asks those readers for filters that have the method: so there are two kinds.
    "FilteringReader(UprReader)",
}
EFFECTS = {"asyncio", "grpc", "lmdb", "random", "secrets", "socket", "threading", "time"}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all hand-written modules of the packages, by path."""
    found = {str(file.relative_to(ROOT)): tree for file, tree in sources.trees().items()}
    return {
        path: tree
        for path, tree in found.items()
        if not GENERATED.search(path) and path.startswith(tuple(f"{house}/" for house in HOUSES))
    }


def module_of(path: str) -> str:
    return (
        path.removeprefix("client/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yield what is imported anywhere, for types only too: modules of ours whole, of others the first name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        else:
            continue
        # Of ours whole although it is generated: that a package is imported with it makes no circle.
        firsts = [(name, name.partition(".")[0]) for name in names]
        yield from (name if first in modules else first for name, first in firsts)


@pytest.mark.parametrize("house", HOUSES)
def test_a_folder_can_be_looked_over(house: str) -> None:
    folders: dict[str, int] = {}
    for path in trees():
        if path.startswith(f"{house}/") and not path.endswith("/__init__.py"):
            folder = path.rpartition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
    assert {f: n for f, n in folders.items() if n > MODULES_MAX} == {}


@pytest.mark.parametrize("house", HOUSES)
def test_hardly_a_module_is_short(house: str) -> None:
    short = {
        path
        for path in trees()
        if path.startswith(f"{house}/")
        and not path.endswith("/__init__.py")
        and (ROOT / path).read_text().count("\n") < LINES_MIN
    }
    assert short - SHORT == set()
    assert {path for path in SHORT if path.startswith(f"{house}/")} <= short


@pytest.mark.parametrize("house", HOUSES)
def test_modules_import_each_other_in_no_circle(house: str) -> None:
    modules = {module_of(path) for path in trees()}
    left = {
        module_of(path): {name for name in imported(tree, modules) if name != module_of(path)}
        for path, tree in trees().items()
        if path.startswith(f"{house}/")
    }
    # What imports nothing of what is left is in no circle, nor is what nothing of it imports.
    while True:
        used = set().union(*left.values())
        free = [name for name, uses in left.items() if not uses & left.keys() or name not in used]
        if not free:
            break
        for name in free:
            del left[name]
    assert sorted(left) == []


def bases_of(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        yield ast.unparse(named).rpartition(".")[2]


@pytest.mark.parametrize("house", HOUSES)
def test_no_class_inherits_from_one_of_ours(house: str) -> None:
    """Errors aside: one class, or one that has the other, says more than a base with one child."""
    inside = {path: tree for path, tree in trees().items() if path.startswith(f"{house}/")}
    classes = [
        (path, node)
        for path, tree in inside.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    ours = {node.name for _, node in classes if not node.name.endswith("Error")}
    inherited = []
    for path, node in classes:
        imports = {
            alias.asname or alias.name
            for found in ast.walk(inside[path])
            if isinstance(found, ast.ImportFrom)
            and not (found.module or "").startswith(("upr.", "upr_"))
            for alias in found.names
        }
        # A base of somebody else's may have the name of a class of ours.
        foreign = {
            ast.unparse(b).rpartition(".")[2] for b in node.bases if isinstance(b, ast.Attribute)
        }
        for base in bases_of(node):
            if f"{node.name}({base})" not in DEMANDED and base in ours - imports - foreign:
                inherited.append(f"{path}: {node.name}({base})")
    assert inherited == []


@pytest.mark.parametrize(
    ("package", "but"),
    [("upr/engine/", ""), ("upr/cluster/registry.py", ""), ("client/upr_protocol/", "wire/")],
)
def test_the_core_and_the_engine_have_no_effects(package: str, but: str) -> None:
    """No clock, chance, thread or connection: a property of the package, whatever modules it has."""
    modules = {module_of(path) for path in trees()}
    wire = {name for name in modules if name.startswith("upr_protocol.wire")}
    forbidden = EFFECTS | (wire if but else set())
    for path, tree in trees().items():
        if path.startswith(package) and not (but and path.startswith(package + but)):
            assert set(imported(tree, modules)) & forbidden == set(), path


def test_the_paths_of_the_readme_lead_through_what_is_there() -> None:
    text = (ROOT / "upr" / "README.md").read_text()
    part = text.partition("\n## Four paths, file by file\n")[2].partition("\n## ")[0]
    paths = re.split(r"^A .*:$", part, flags=re.MULTILINE)[1:]
    assert len(paths) == 4
    for path in paths:
        told = set(re.findall(r"`([\w./]+)`", path)) - {"memory"}
        files = {name for name in told if name.endswith(".py")}
        code = "".join(
            (ROOT / ("client" if name.startswith("upr_") else "upr") / name).read_text()
            for name in files
        )
        names = {part for name in told - files for part in name.split(".")}
        assert names - set(re.findall(r"(?:class|def) (\w+)", code)) == set()
