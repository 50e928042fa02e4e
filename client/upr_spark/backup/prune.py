"""Removing what nothing refers to any more: the only code that does so with what counted once.

Whatever is removed can never count again, however long another run was paused, and whether or not it holds the lock:

- What is before the first number of an expiry, when every restore point from there on has a base from there on, and
  always will. With a full backup as the base it always will. With a merged one a rollback must not go back into it:
  a run that knew of the expiry does not, and when the newest backup's run knew, all runs that did not know find their
  number taken. So it has to be waited for one backup after an expiry. And that base has to serve the newest restore
  point itself: a later merged one, at which nothing expired, is not what those runs spare.
- Data files of a committed number that are not in its manifest.
- Files of an attempt at a merged base, once the attempt is void.
- Journals of restores.

Documents are removed before the files that they name, and the expiries that are replaced before what they kept: the
newest one that counts says at any moment where the chain begins, and nothing before that is looked at. Manifests are
removed oldest first, so that those left are always without a gap.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from upr_spark.backup.chain import Chain
from upr_spark.backup.manifest import Expiry
from upr_spark.backup.repository import (
    CHAIN,
    DATA,
    EXPIRED,
    MERGED,
    STAGING,
    Repository,
    number_in,
)
from upr_spark.backup.storage import Storage, Stored

_OURS: Final = re.compile(
    r"(chain|expired)/[0-9]{10}\.json"
    r"|merged/[0-9]{10}-[0-9a-f]{16}(\.json|/[0-9a-f]{16}\.parquet)"
    r"|data/[0-9]{10}/[0-9a-f]{16}\.parquet"
    r"|staging/[0-9]{10}/[0-9a-f]{16}/[a-z0-9]+\.json"
    r"|journal/[0-9a-f]+/[0-9a-f]+/[a-z0-9]+\.json"
)
_WHATS: Final = ("documents", "data_files", "leftovers")


class Doomed(NamedTuple):
    """An object to remove: its name, its bytes, and which of "documents", "data_files", "leftovers" it is of."""

    name: str
    bytes: int
    what: str


@dataclass(slots=True)
class Plan:
    """What a prune is to remove.

    Attributes:
        first: the number before which everything goes; 0 when nothing has expired for long enough.
        waiting: the number before which everything will go once there is another backup; 0 without.
        voids: names and numbers of the attempts at merged bases that have to be void before.
        doomed: in the order of removing.
    """

    first: int = 0
    waiting: int = 0
    voids: list[tuple[str, int]] = field(default_factory=list)
    doomed: list[Doomed] = field(default_factory=list)

    def totals(self) -> dict[str, dict[str, int]]:
        """Return how many objects and bytes there are of each kind."""
        totals = {what: {"objects": 0, "bytes": 0} for what in _WHATS}
        for one in self.doomed:
            totals[one.what]["objects"] += 1
            totals[one.what]["bytes"] += one.bytes
        return totals


def plan(repository: Repository, chain: Chain, grace: int, now: int) -> Plan:
    """Return what there is to remove.

    Args:
        repository: where; it has no damage.
        chain: as the repository has it.
        grace: how long what expired, and what killed runs left, stays; microseconds.
        now: microseconds since the epoch.
    """
    made = Plan()
    chain = _left_chain(made, repository, chain, now - grace)
    storage = repository.storage
    for folder in (EXPIRED, MERGED, CHAIN):
        for one in _stored(storage, folder):
            if number_in(one.name) < made.first and one.name.endswith(".json"):
                made.doomed.append(Doomed(one.name, one.bytes, "documents"))
    for one in _stored(storage, STAGING):
        if number_in(one.name) <= chain.last and _is_old(one, now - grace):
            made.doomed.append(Doomed(one.name, one.bytes, "leftovers"))
    for one in _stored(storage, "journal/"):
        # Without it a restore that was interrupted cannot be gone on with; that is all.
        if _is_old(one, now - grace):
            made.doomed.append(Doomed(one.name, one.bytes, "leftovers"))
    _plan_data(made, repository, chain, now - grace)
    _plan_merged(made, repository, now - grace)
    return made


def prune(repository: Repository, made: Plan) -> Iterator[Doomed]:
    """Remove what was planned, and yield each object that is gone."""
    committed = tuple(
        _folder(name) for name, number in made.voids if not repository.void_merged(name, number)
    )
    for one in made.doomed:
        if not one.name.startswith(committed):
            repository.storage.delete(one.name)
            yield one


def _left_chain(made: Plan, repository: Repository, chain: Chain, before: int) -> Chain:
    """Note the number before which everything may go, and return the chain that is left."""
    for expiry in reversed(repository.expiries()):
        if expiry.time > before:
            continue
        left = repository.chain_from(expiry) if expiry.number < chain.first else chain
        left = left.begun_at(expiry.number)
        if _is_final(left, expiry):
            made.first = expiry.number
            return left
        if left.firm:
            made.waiting = made.waiting or expiry.number
    return chain


def _is_final(chain: Chain, expiry: Expiry) -> bool:
    """Return whether every restore point that an expiry leaves has a base that it leaves too, now and later."""
    if not chain.links or not chain.firm:
        return False
    return chain.links[0].kind == "full" or chain.links[-1].seen >= expiry.number


def _stored(storage: Storage, folder: str) -> list[Stored]:
    """Return the objects with names as backups and merges give them; what somebody put there stays."""
    return [one for one in storage.stored(folder) if _OURS.fullmatch(one.name)]


def _is_old(one: Stored, before: int) -> bool:
    return one.written * 1e6 <= before


def _folder(name: str) -> str:
    return name.removesuffix(".json") + "/"


def _plan_data(made: Plan, repository: Repository, chain: Chain, before: int) -> None:
    by_number: dict[int, list[Stored]] = {}
    for one in _stored(repository.storage, DATA):
        by_number.setdefault(number_in(one.name), []).append(one)
    for number, there in sorted(by_number.items()):
        # Those of the next number may be of a run that is under way or is gone on with.
        if number > chain.last:
            continue
        if number < made.first or (number == made.first and chain.link(number).kind != "full"):
            made.doomed += [Doomed(one.name, one.bytes, "data_files") for one in there]
        elif number >= chain.first and len(there) > chain.link(number).files:
            named = {file.path for file in chain.by_number(number).files}
            made.doomed += [
                Doomed(one.name, one.bytes, "leftovers")
                for one in there
                if one.name not in named and _is_old(one, before)
            ]


def _plan_merged(made: Plan, repository: Repository, before: int) -> None:
    names = {one.name: one for one in _stored(repository.storage, MERGED)}
    attempts: dict[str, list[Stored]] = {}
    for one in names.values():
        folder, _, last = one.name.removeprefix(MERGED).partition("/")
        if last:
            attempts.setdefault(f"{MERGED}{folder}.json", []).append(one)
    for document, files in sorted(attempts.items()):
        number = number_in(document)
        if number < made.first:
            made.doomed += [Doomed(one.name, one.bytes, "data_files") for one in files]
        elif document in names:
            if repository.is_void(document):
                made.doomed += [Doomed(one.name, one.bytes, "leftovers") for one in files]
        elif all(_is_old(one, before) for one in files):
            made.voids.append((document, number))
            made.doomed += [Doomed(one.name, one.bytes, "leftovers") for one in files]
