"""``upr-backup verify``."""

import click

from upr_spark.backup import exit_codes
from upr_spark.backup.output import Command, Progress, json_option, note, print_json, verbose_option
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("verify", cls=Command)
@click.option("--full", is_flag=True, help="Read every data file, and check each row.")
@json_option
@verbose_option
@click.pass_obj
def verify_command(storage: Storage, full: bool, as_json: bool) -> int:
    """Look for damage: in the chain, and for files that are missing or of another size."""
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
    if as_json:
        print_json({"full": full, "problems": problems})
    else:
        click.echo(f"{len(problems)} problems" if problems else "all is well")
    return exit_codes.DAMAGED if problems else exit_codes.OK
