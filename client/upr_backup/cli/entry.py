"""Entry of the console script ``upr-backup``."""

import os

from upr_cli_kit.entry import run

MODULES = ("click", "pyarrow")
"""Modules that the extra ``backup`` brings."""


def main() -> None:
    # Its handlers abort about every fiftieth process that pyspark forks to start a JVM, and nothing here forks and goes on.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    run("upr-backup", "backup", MODULES, "upr_backup.cli.commands")
