"""Modules in C, compiled from their source as it is now."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tools.build_compiled import SOURCES, compiled

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, folder: Path) -> Any:
    """Compile a module of a full name into a folder, and load it; the test is skipped where there is no compiler."""
    (source,) = [source for source in SOURCES if Path(source).stem == name.rpartition(".")[2]]
    nothing = folder / "nothing.c"
    nothing.write_text("#include <Python.h>\n")
    if compiled(nothing, folder) is None:
        pytest.skip("there is no C compiler, or it has not Python's headers")
    file = compiled(ROOT / source, folder)
    assert file is not None, "the module does not compile"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
