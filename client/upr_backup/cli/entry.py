"""Entry of the console script; imports nothing beyond the standard library before the extra is known to be there."""

import importlib
import importlib.util
import os
import sys

MODULES = ("click", "pyarrow")
"""What the extra ``backup`` brings."""


def main() -> None:
    """Run upr-backup."""
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"error: upr-backup needs {', '.join(missing)}, not installed "
            "(pip install 'upr-stream[backup]')",
            file=sys.stderr,
        )
        sys.exit(2)
    # gRPC's C core writes lines of its own to stderr, beside the error that says the same.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Its handlers abort about every fiftieth process that pyspark forks to start a JVM, and nothing here forks and goes on.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        command = importlib.import_module("upr_backup.cli.commands").main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command.main(prog_name="upr-backup")
