"""Every public name of the SDK is documented."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import upr_client
from upr_client import admin, errors, lowlevel, testing, types
from upr_protocol import errors as definitions

FLAVOURS = ("_async", "_sync")
RETURNED = [
    f"upr_client.{flavour}.{module}"
    for flavour in FLAVOURS
    for module in ("admin", "bucket", "changes", "view")
]
"""Modules with classes that nobody makes by name: they are returned, or brought along by their parts."""


def without_words(module: ModuleType, names: list[str]) -> Iterator[str]:
    """Those of a module's names, and of the public members of its classes, that have no docstring of their own."""
    for name in names:
        value = getattr(module, name)
        if not (value.__doc__ or "").strip():
            yield name
        if not inspect.isclass(value):
            continue
        for base in value.__mro__:
            if not base.__module__.startswith(("upr_client", "upr_protocol")):
                continue
            for member, its in vars(base).items():
                documented = callable(its) or isinstance(its, property | classmethod | staticmethod)
                if not member.startswith("_") and documented and not (its.__doc__ or "").strip():
                    yield f"{base.__name__}.{member}"


@pytest.mark.parametrize("module", [upr_client, admin, errors, lowlevel, testing, types])
def test_every_public_name_is_documented(module: ModuleType) -> None:
    classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
    names = getattr(module, "__all__", classes)
    assert names
    assert sorted(set(without_words(module, names))) == []


def test_one_import_is_enough_for_all_that_is_named() -> None:
    names = "errors.UprError, types.Bucket, admin.ServerStatus, lowlevel.hello"
    code = f"import upr_client; print({', '.join(f'upr_client.{n}' for n in names.split(', '))})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_error_is_in_the_one_place_for_errors() -> None:
    defined = {name for name in vars(definitions) if name.endswith("Error")}
    assert defined - vars(errors).keys() == set()


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_is_documented(name: str) -> None:
    module = __import__(name, fromlist=["*"])
    classes = [
        key
        for key, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == name and not key.startswith("_")
    ]
    assert classes
    assert sorted(set(without_words(module, classes))) == []


def test_an_undocumented_method_is_found() -> None:
    module = ModuleType("some")

    class Bare:
        """A class."""

        def method(self) -> None: ...

    Bare.__module__ = "upr_client.some"
    module.Bare = Bare  # type: ignore[attr-defined]
    assert list(without_words(module, ["Bare"])) == ["Bare.method"]
