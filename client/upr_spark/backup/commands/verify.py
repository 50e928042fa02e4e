"""``upr-backup verify``."""

from typing import TYPE_CHECKING, Any

import click

from upr_spark.backup import exit_codes
from upr_spark.backup.commands.common import open_client
from upr_spark.backup.options import Address
from upr_spark.backup.output import Command, Progress, json_option, note, print_json, verbose_option
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage

if TYPE_CHECKING:
    from upr_spark.backup.against_server import Comparison


@click.command("verify", cls=Command)
@click.option("--full", is_flag=True, help="Read every data file, and check each row.")
@click.option("--against-server", is_flag=True, help="Compare the newest backup with the server.")
@click.option("--target", type=Address(), envvar="UPR_TARGET", help="HOST:PORT; else as with init.")
@json_option
@verbose_option
@click.pass_obj
def verify_command(
    storage: Storage, full: bool, against_server: bool, target: str | None, as_json: bool
) -> int:
    """Look for damage: in the chain, and for files that are missing or of another size.

    With --against-server, also compare each row of the newest backup with the server's, which is read whole.
    """
    from upr_spark.backup.verify import verify

    progress = Progress()
    problems = []
    repository = Repository.open(storage)
    for problem in verify(
        repository, full, lambda done, total: progress.show(f"{done} of {total} files read")
    ):
        problems.append(problem)
        note(f"damage: {problem}")
    progress.close()
    document: dict[str, Any] = {"full": full, "problems": problems}
    comparison = None
    # What is damaged cannot be compared.
    if against_server and not problems:
        comparison = _against_server(storage, target or repository.target)
        problems += comparison.differences
        document["against_server"] = _document(comparison)
    if as_json:
        print_json(document)
    elif problems:
        click.echo(f"{len(problems)} problems")
    else:
        click.echo("all is well" if comparison is None else _words(comparison))
    if problems:
        return exit_codes.DAMAGED
    return exit_codes.WARNINGS if comparison and comparison.not_comparable else exit_codes.OK


def _against_server(storage: Storage, target: str) -> "Comparison":
    from upr_spark.backup.against_server import AgainstServer, not_comparable_lines
    from upr_spark.backup.point import open_point

    point = open_point(storage)
    progress = Progress()
    with open_client(target) as client:
        bucket = client.bucket(point.repository.bucket)
        work = AgainstServer(
            point,
            bucket,
            lambda done, total: progress.show(f"{done} of {total} partitions compared"),
        )
        try:
            comparison = work.run()
        finally:
            progress.close()
    for line in comparison.differences:
        note(f"different: {line}")
    for line in not_comparable_lines(comparison.not_comparable):
        note(f"warning: {line}")
    return comparison


def _document(comparison: "Comparison") -> dict[str, Any]:
    return {
        "id": comparison.number,
        "partitions": comparison.partitions,
        "keys": comparison.keys,
        "undecided": comparison.undecided,
        "differences": comparison.differences,
        "not_comparable": [
            {"partition": p, "why": why} for p, why in comparison.not_comparable.items()
        ],
    }


def _words(comparison: "Comparison") -> str:
    words = f"backup {comparison.number}: {comparison.keys} keys in {comparison.partitions} partitions are as at the server"
    if comparison.undecided:
        words += f", or were deleted later, which is not known any more of {comparison.undecided} of them"
    return words
