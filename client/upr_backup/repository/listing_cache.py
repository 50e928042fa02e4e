"""Cache of what a listing of backups shows, the repository's index: in one object, so that not every manifest is read for it.

``index/0000000160.json`` has the links of the manifests up to 160. It is a cache: any process may remove it, and without
it the manifests are read. It counts for a manifest that is there in the size that it knows, and only when the newest
of those has the SHA-256 that it knows: as each manifest names the one before, an index of what was set aside and
written anew since is then not used. What restores a backup reads the manifests themselves, and compares.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from upr_backup.errors import RepositoryDamagedError, RepositoryError
from upr_backup.repository import Storage
from upr_backup.repository.chain import Link
from upr_backup.repository.documents import (
    MICROS_MAX,
    NOT_WRITTEN_HERE,
    number_from_json,
    seal,
    sha256,
    text_from_json,
    unseal,
)

INDEX: Final = "index/"
EVERY: Final = 16
"""Backups from one index to the next: a listing reads so many manifests at most."""
AT_ONCE: Final = 64
"""Most manifests that an index has more than the one before it, so that a backup is not held up for long."""

_FIELDS: Final = tuple(one.name for one in fields(Link))
_CUTS: Final = _FIELDS.index("cuts")
_NUMBERS: Final = tuple(name for name in _FIELDS if name not in ("kind", "cuts", "sha256"))
_NAME: Final = re.compile(r"index/[0-9]{10}\.json")


def manifest_name(number: int) -> str:
    return f"chain/{number:010d}.json"


def read_index(storage: Storage, repository: str, sizes: Mapping[int, int]) -> dict[int, Link]:
    """Return the links of the manifests that an index knows, by number; none where no index fits.

    It fits a repository of this id, with manifests of these sizes, by number.
    """
    for name in reversed(_names(storage)):
        try:
            content = unseal(storage.read(name), name)
            if content["repository"] != repository:
                continue
            known = [
                link
                for link, size in map(_from_json, content["links"])
                if sizes.get(link.number) == size
            ]
            newest = storage.read(manifest_name(known[-1].number)) if known else b""
        except (FileNotFoundError, RepositoryDamagedError, RepositoryError, *NOT_WRITTEN_HERE):
            continue
        if known and sha256(newest) == known[-1].sha256:
            return {link.number: link for link in known}
    return {}


def write_index(
    storage: Storage, repository: str, links: Iterable[Link], sizes: Mapping[int, int]
) -> None:
    """Write an index of one or more links, ascending, and remove the older ones."""
    rows = [_to_json(link, sizes[link.number]) for link in links]
    name = f"{INDEX}{rows[-1][0]:010d}.json"
    older = _names(storage)
    if name in older:
        # Of an attempt whose answer was lost, or one that does not fit any more.
        storage.delete(name)
    storage.put_if_absent(name, seal({"repository": repository, "links": rows}))
    for one in older:
        if one != name:
            storage.delete(one)


def remove_index(storage: Storage) -> None:
    for name in _names(storage):
        storage.delete(name)


def _names(storage: Storage) -> list[str]:
    return [name for name in storage.names(INDEX) if _NAME.fullmatch(name)]


def _to_json(link: Link, size: int) -> list[Any]:
    values = [getattr(link, name) for name in _FIELDS]
    values[_CUTS] = {str(partition): cut for partition, cut in link.cuts.items()}
    return [*values, size]


def _from_json(row: list[Any]) -> tuple[Link, int]:
    *values, size = row
    values[_CUTS] = {int(partition): cut for partition, cut in values[_CUTS].items()}
    link = Link(*values)
    if link.kind not in ("full", "incremental"):
        raise ValueError("a kind is none")
    text_from_json(link.sha256, "sha256")
    for name in _NUMBERS:
        number_from_json(getattr(link, name), name, MICROS_MAX)
    for number in (*link.cuts.values(), size):
        number_from_json(number, "a number", MICROS_MAX)
    return link, size
