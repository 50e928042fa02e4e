"""``upr-backup expire``."""

import time

import click

from upr_spark.backup.commands.common import keep_options, keep_or_none
from upr_spark.backup.output import Command, json_option, note, print_json, verbose_option
from upr_spark.backup.repository import Repository
from upr_spark.backup.storage import Storage


@click.command("expire", cls=Command)
@keep_options
@json_option
@verbose_option
@click.pass_obj
def expire(storage: Storage, keep_last: int | None, keep_within: int | None, as_json: bool) -> None:
    """Let old restore points go: those that neither --keep-last nor --keep-within keeps; the newest stays always.

    The ones between the oldest that is kept and the base beneath it, a full backup or a merged one, stay with it.
    Nothing is removed from the storage; 'prune' does that.
    """
    from upr_spark.backup.expire import beginning
    from upr_spark.backup.expire import expire as decide
    from upr_spark.backup.lock import Lock

    keep = keep_or_none(keep_last, keep_within)
    if keep is None:
        raise click.UsageError("say what stays: --keep-last N or --keep-within 30d, or both")
    repository = Repository.open(storage)
    now = round(time.time() * 1e6)
    with Lock(storage):
        chain = repository.chain()
        begun = chain.first
        if chain.links:
            oldest = keep.oldest(chain, now)
            first = beginning(chain, oldest) or begun
            if first > begun:
                decide(repository, chain, first, now)
        else:
            oldest = first = begun
    if first < oldest:
        note(
            f"backup {oldest} is the oldest to be kept, and rests on {first}: more can go after "
            f"'merge --to {oldest}', or with the next full backup"
        )
    if as_json:
        print_json({"first": first, "expired": first - begun})
    elif first > begun:
        click.echo(f"expired: {_range(begun, first - 1)}; there are {first} to {chain.last}")
    else:
        click.echo("nothing expires")


def _range(low: int, high: int) -> str:
    return f"backup {low}" if low == high else f"backups {low} to {high}"
