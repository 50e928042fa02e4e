"""Commands of ``upr-backup`` that keep a repository in order: ``merge``, ``expire``, ``prune``, ``tag``, ``repair``, ``unlock``."""

from contextlib import closing, nullcontext, suppress
from functools import partial

import click

from upr_backup.cli.shared import (
    MICROS,
    TAG_NAME,
    Far,
    is_keep_given,
    keep_options,
    keep_or_none,
    open_repository,
    progress_option,
    summary,
)
from upr_backup.errors import RepositoryDamagedError
from upr_backup.repository import Storage
from upr_backup.repository.documents import now_micros, time_text
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Tag, number_in
from upr_cli_kit import exit_codes
from upr_cli_kit.output import confirm, note, output_options, print_done, print_json
from upr_protocol.errors import AlreadyExistsError


@click.command("merge")
@click.option("--to", type=click.IntRange(min=1), metavar="ID", help="Fold everything up to this.")
@keep_options
@progress_option
@output_options
@click.pass_obj
def merge(storage: Storage, to: int | None, as_json: bool) -> None:
    """Fold all backups up to one into a base, from which it and later ones are restored faster.

    Without --to it is the newest possible one, but for the newest two; with an option --keep-... the newest
    possible one that lets 'expire' with the same options drop what is before. Nothing is removed or replaced.
    """
    from upr_backup.retention import FileFold, Merge, chosen

    if to is not None and is_keep_given():
        raise click.UsageError("--to does not go together with an option --keep-...")
    repository = open_repository(storage)
    storage.sweep()
    with Lock(storage) as lock, closing(Far()) as far:
        chain = repository.chain()
        number = chosen(chain, to, keep_or_none(repository, chain), now_micros())
        base = None
        if number is not None:
            fold = FileFold(repository.storage, lock.keep)
            work = Merge(repository, fold, lock, partial(far.show, "partitions merged"))
            base = work.merge(chain, number)
    if as_json:
        print_json({"merged": None if base is None else summary(base)})
    elif base is not None:
        click.echo(f"merged: backup {number}, {base.rows} rows, {base.file_bytes} bytes")
    else:
        click.echo("there is nothing to merge" if to is None else f"backup {to} is a base already")


@click.command("expire")
@keep_options
@output_options
@click.pass_obj
def expire(storage: Storage, as_json: bool) -> None:
    """Let old restore points go: those that no option --keep-... and no pin keeps; the newest stays always.

    The ones behind the oldest that is kept stay, because later ones rest on them. The ones between the oldest that is
    kept and the base beneath it, a full backup or a merged one, stay with it. Nothing is removed from the storage;
    'prune' does that.
    """
    from upr_backup.retention import beginning
    from upr_backup.retention import expire as decide

    if not is_keep_given():
        raise click.UsageError("say what stays: --keep-last N, --keep-within 30d or --keep-daily N")
    repository = open_repository(storage)
    now = now_micros()
    with Lock(storage):
        chain = repository.chain()
        begun = chain.first
        keep = keep_or_none(repository, chain)
        if chain.links and keep is not None:
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


@click.command("prune")
@click.option(
    "--grace",
    type=MICROS,
    default="24h",
    show_default=True,
    help="How long what expired, and what killed runs left, stays.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@progress_option
@output_options
@click.pass_obj
def prune(storage: Storage, grace: int, dry_run: bool, as_json: bool) -> None:
    """Remove from the storage what has expired, and what killed runs and merges left.

    After an expiry that left a merged base it takes one more backup before anything of that can be removed.
    """
    from upr_backup.retention import plan
    from upr_backup.retention import prune as remove

    repository = open_repository(storage)
    storage.sweep()
    with Lock(storage) as lock, closing(Far()) as far:
        chain = repository.chain()
        made = plan(repository, chain, grace, now_micros())
        if not dry_run:
            for done, _ in enumerate(remove(repository, made), 1):
                lock.keep()
                far.show("objects removed", done, len(made.doomed))
            repository.write_index(chain.links)
    if made.waiting:
        note(
            f"what is before backup {made.waiting} goes after one more backup: "
            "a run that began before the expiry may still rest on it"
        )
    totals = made.totals()
    if as_json:
        listed = [one._asdict() for one in made.doomed] if dry_run else []
        print_json({"dry_run": dry_run, "first": made.first or None, **totals, "objects": listed})
        return
    if dry_run:
        for one in made.doomed:
            click.echo(one.name)
    words = ", ".join(
        f"{total['objects']} {what.replace('_', ' ')} of {total['bytes']} bytes"
        for what, total in totals.items()
        if total["objects"]
    )
    said = "would remove" if dry_run else "removed"
    note(f"{said} {words}" if words else "there is nothing to remove")


@click.command("tag")
@click.argument("name", type=TAG_NAME)
@click.argument("number", metavar="[ID]", type=click.IntRange(min=1), required=False)
@click.option("--pin", is_flag=True, help="Have 'expire' keep the backup.")
@click.option("--remove", is_flag=True, help="Take the name, and its pin, away.")
@output_options
@click.pass_obj
def tag(
    storage: Storage, name: str, number: int | None, pin: bool, remove: bool, as_json: bool
) -> None:
    """Give a backup a name, the newest unless ID says which; --at takes tag:NAME then."""
    repository = open_repository(storage)
    if remove:
        if pin or number is not None:
            raise click.UsageError("--remove takes the name alone")
        with suppress(RepositoryDamagedError):
            repository.tag(name)
        repository.remove_tag(name)
        print_done(as_json, "removed", name)
        return
    # An expire that has read the pins, and is about to decide, would not keep it.
    with Lock(storage) if pin else nullcontext():
        chain = repository.chain(indexed=True)
        link = chain.link(number or chain.last)
        if not repository.add_tag(name, Tag(link.number, link.sha256, pin)):
            raise AlreadyExistsError(
                f"there is a tag {name!r} already, of backup {repository.tag(name).number}",
                hint=f"take it away before: tag {name} --remove",
            )
    details = f"backup {link.number}" + (", which does not expire" if pin else "")
    print_done(as_json, "tagged", name, details, id=link.number, pin=pin)


@click.command("repair")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
@click.pass_obj
def repair(storage: Storage, yes: bool, as_json: bool) -> int:
    """Have the chain end before its first damaged backup, so that it can be gone on with.

    What is behind it cannot be restored any more: its documents are set aside, in the folder aside. The next backup goes
    on from what is left. Put damaged files back from a copy instead, where there is one. Without a terminal, --yes is
    needed.
    """
    repository = open_repository(storage)
    with Lock(storage) as lock:
        damage: list[str] = []
        chain = repository.chain(damage.append)
        behind = repository.behind(chain.last)
        lost = sorted({number_in(name) for name in behind})
        for words in damage:
            note(f"damage: {words}")
        if damage and not chain and repository.expiries(damage.append):
            raise RepositoryDamagedError(
                "nothing is left that can be restored", hint="make another repository: init"
            )
        if lost:
            _tell_loss(lost, chain.last, chain.links[-1].cut_time if chain else None)
            if not yes:
                confirm("Set them aside?", to="set them aside")
                # Another run may have it by now, if nobody answered for long.
                lock.keep(now=True)
            repository.set_aside(behind)
            damage.clear()
            repository.chain(damage.append)
    if as_json:
        print_json({"set_aside": lost, "damage": damage})
    elif lost:
        click.echo(f"set aside: {_range(lost[0], lost[-1])}")
    else:
        click.echo(
            "this is not mended by setting backups aside: put it back from a copy; a merged base or an expiry may be "
            "removed by hand while what is before it is there"
            if damage
            else "the chain is whole"
        )
    return exit_codes.DAMAGED if damage else exit_codes.OK


def _tell_loss(lost: list[int], last: int, cut_time: int | None) -> None:
    note(f"lost as restore points: {_range(lost[0], lost[-1])}")
    if cut_time is None:
        note("no backup is left: the next one is full")
    else:
        note(
            f"the newest that is left is backup {last}, as of {time_text(cut_time)}; the next one has all since"
        )


@click.command("unlock")
@output_options
@click.pass_obj
def unlock(storage: Storage, as_json: bool) -> None:
    """Take the lock from a run of another machine that does not exist any more, without waiting for its end.

    A run that is alive all the same notices, and commits nothing.
    """
    open_repository(storage)
    holder = Lock(storage).force()
    if as_json:
        print_json({"unlocked": holder or None})
    else:
        click.echo(f"unlocked: {holder} had it" if holder else "nobody has the lock")
