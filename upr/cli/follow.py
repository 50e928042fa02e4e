"""``upr-cat follow``: changes as JSON lines, and the position file of ``--position``."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from upr_cli_kit.options import PARTITION_SET, open_client, server_options
from upr_cli_kit.output import note, verbose_option
from upr_cli_kit.times import duration

if TYPE_CHECKING:
    from upr_client import FilePositions, Position

Stability = Literal["disk", "memory", "replicated(1)", "replicated(2)", "replicated(3)"]


class StartAnew:
    """A position file whose content is passed over and replaced by the first save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: FilePositions | None = None

    def load(self, partitions: Iterable[int]) -> "dict[int, Position]":
        """Return no positions, whatever the file holds."""
        return {}

    def save(self, positions: "Mapping[int, Position]") -> None:
        """Replace the file at the first call, and write to it like any other from then on."""
        from upr_client import FilePositions

        if self._store is None:
            self._path.unlink(missing_ok=True)
            self._store = FilePositions(self._path)
        self._store.save(positions)


def position_store(path: Path | None, from_start: bool) -> "FilePositions | StartAnew | None":
    """Return where positions are kept; None for nowhere."""
    from upr_client import FilePositions

    if path is None:
        return None
    return StartAnew(path) if from_start else FilePositions(path)


@click.command("follow")
@click.option("--until-now", is_flag=True, help="End at what is there when the streams are opened.")
@click.option("--from-start", is_flag=True, help="Begin at 0 whatever the position file says.")
@click.option(
    "--position",
    "position_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Go on from the positions in this file, and keep them there.",
)
@click.option(
    "--partitions", type=PARTITION_SET, help="Only these, as 0-63,512. [default: all 1024]"
)
@click.option(
    "--stability",
    type=click.Choice(get_args(Stability)),
    default="disk",
    show_default=True,
    help="Show rows when they are durable here, before, or when so many replicas have them too.",
)
@click.option("--keys-only", is_flag=True, help="Leave the values out.")
@click.option(
    "--consumer", default="", help="A name; a second follower of this name ends the first."
)
@click.option(
    "--retry-seconds",
    type=duration(bare=True),
    help="Give up when the server is away for this long. [default: never]",
)
@server_options
@verbose_option
def follow(
    until_now: bool,
    from_start: bool,
    position_file: Path | None,
    partitions: list[int] | None,
    stability: Stability,
    keys_only: bool,
    consumer: str,
    retry_seconds: float | None,
    target: str,
    bucket: str,
) -> None:
    """Print changes, markers and rollbacks as JSON lines.

    With --position the file moves past a line only after it was written to stdout.
    """
    from upr.cli.jsonl import batch_lines, rollback_line
    from upr_client import Only, Rollback, Tuning

    with open_client(target) as client:
        followed = client.bucket(bucket)
        # A server that was never there is a wrong address; one that goes away later is waited for.
        client.admin.partitions(followed, [0])
        changes = followed.changes(
            resume=position_store(position_file, from_start),
            until="now" if until_now else None,
            only=Only(partitions, stability=stability, keys_only=keys_only),
            tuning=Tuning(retry_seconds=retry_seconds),
            consumer=consumer,
            on_rollback="event",
            on_status=lambda text: note(f"upr-cat: {text}"),
        )
        with changes:
            try:
                for batch in changes.batches():
                    if isinstance(batch, Rollback):
                        _print_lines([rollback_line(batch)])
                    else:
                        _print_lines(batch_lines(batch.changes, batch.markers))
            except KeyboardInterrupt:
                changes.save()
                raise


def _print_lines(lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if text:
        # Flushed before the next batch is asked for: asking is what makes the position move past this one.
        print(text, flush=True, file=sys.stdout)
