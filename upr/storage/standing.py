"""The part that a server has in a set of servers, as it is stored: DIR/owner.json.

It is not there while a server is alone. It is written whole, to a file beside it that then takes its name, so that after
a crash it is the old one or the new one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from upr.storage.directory import unknown_format
from upr.storage.journal import replace_durably
from upr_protocol.errors import DataDirectoryError
from upr_protocol.ownership import Row, Standing, first_row

NAME = "owner.json"
FORMAT = 1
NO_ROW = Row(0, 0, "", False, frozenset())
"""The row of a server that has not heard of any."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored.

    Attributes:
        standing: rows, promises.
        addresses: HOST:PORT of the servers of the set, by directory, where they were last reached.
        known: of the owner: the counted servers of which all counted ones have stored that they count.
    """

    standing: Standing
    addresses: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()

    @property
    def alone(self) -> bool:
        """Whether this server owns, and nobody else was counted: it need not ask anybody before it serves."""
        standing = self.standing
        return standing.owns and standing.row.counted <= {standing.directory}


def read_standing(folder: Path, directory: str, *, replica: bool, meets: bool = True) -> Stored:
    """Return what is stored in a data directory; without the file a server is alone, or a replica that knows nobody.

    Args:
        replica: whether the server was started as a replica. One that is the owner stays it.
        meets: whether it can ask which server was promoted since. Where it cannot, the first owner follows the server
            that it was started with.

    Raises:
        DataDirectoryError: the file is malformed, or of another format.
    """
    path = folder / NAME
    try:
        text = json.loads(path.read_text())
    except FileNotFoundError:
        return Stored(Standing(directory, NO_ROW if replica else first_row(directory)))
    except ValueError as error:
        raise DataDirectoryError(f"{NAME} is malformed: {error}") from error
    try:
        if text["format"] != FORMAT:
            raise unknown_format(NAME, text["format"], FORMAT)
        row: Any = text["row"]
        known = Row(
            row["epoch"], row["revision"], row["owner"], row["epoch"] > 0, frozenset(row["counted"])
        )
        standing = Standing(directory, known, text["promised"], text["candidate"])
        if replica and not meets and standing.owns and known.epoch == 1:
            standing = replace(standing, row=NO_ROW)
        # A file of before this was stored has none.
        sure = known.counted.intersection(text.get("known", ()))
        return Stored(standing, dict(text["addresses"]), sure)
    except (KeyError, TypeError) as error:
        raise DataDirectoryError(f"{NAME} is malformed: {error!r}") from error


def write_standing(folder: Path, stored: Stored) -> None:
    """Store it, durably.

    Raises:
        OSError: it could not be written; the old one is still there.
    """
    standing, row = stored.standing, stored.standing.row
    text = {
        "format": FORMAT,
        "row": {
            "epoch": row.epoch,
            "revision": row.revision,
            "owner": row.owner,
            "counted": sorted(row.counted),
        },
        "promised": standing.promised,
        "candidate": standing.candidate,
        "addresses": dict(sorted(stored.addresses.items())),
        "known": sorted(stored.known),
    }
    replace_durably(folder / NAME, json.dumps(text, indent=1) + "\n")
