"""Entries of the console scripts of the server."""

from upr_cli_kit.entry import run

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "server": (
        "server",
        (
            "click",
            "lmdb",
            "pyarrow",
            "grpc_health",
            "grpc_reflection",
            "prometheus_client",
            "uvloop",
            "zstandard",
        ),
    ),
    "admin": ("cli", ("click",)),
    "cat": ("cli", ("click",)),
}
"""Command -> the extra it needs, and the modules which that extra brings."""


def server() -> None:
    run("upr-server", *EXTRAS["server"], "upr.cli.server")


def admin() -> None:
    run("upr-admin", *EXTRAS["admin"], "upr.cli.admin")


def cat() -> None:
    run("upr-cat", *EXTRAS["cat"], "upr.cli.cat")
