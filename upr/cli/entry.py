"""Entries of the console scripts.

Imports nothing outside the standard library before it knows that the extra is installed, so that a plain
``pip install upr-stream`` answers with the extra's name and not with a traceback.
"""

import importlib
import importlib.util
import os
import sys

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "server": (
        "server",
        ("click", "lmdb", "pyarrow", "grpc_health", "grpc_reflection", "zstandard"),
    ),
    "admin": ("cli", ("click",)),
    "cat": ("cli", ("click",)),
}
"""Command -> the extra it needs, and the modules which that extra brings."""


def _run(name: str) -> None:
    extra, modules = EXTRAS[name]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"error: upr-{name} needs {', '.join(missing)}, not installed "
            f"(pip install 'upr-stream[{extra}]')",
            file=sys.stderr,
        )
        sys.exit(2)
    # gRPC's C core writes lines of its own to stderr, beside the error that says the same.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    importlib.import_module(f"upr.cli.{name}").main.main(prog_name=f"upr-{name}")


def server() -> None:
    """Run upr-server."""
    _run("server")


def admin() -> None:
    """Run upr-admin."""
    _run("admin")


def cat() -> None:
    """Run upr-cat."""
    _run("cat")
