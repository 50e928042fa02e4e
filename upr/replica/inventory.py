"""Inventory: what this server has of its buckets, and what it lacks of what another server promised."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from upr.engine.partitions import DEAD
from upr.replica.peers import Answer, Met
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.upstream_state import UpstreamState
from upr_protocol.block import U64
from upr_protocol.errors import (
    DataDamagedError,
    NoRoomError,
    StorageFailedError,
    UnavailableError,
    UprError,
    shown,
)
from upr_protocol.limits import PARTITIONS
from upr_protocol.ownership import HELD, Follow, Held, Row

Lost = tuple[int, int, int, int]
"""Part that was given up: bucket version, partition, marker and newest failover id there."""

STALLED_LOOK_SECONDS = 0.1
"""Interval at which a wait for the journal looks whether that can be written."""
LOOK_SECONDS = 0.5
"""Interval at which it is looked whether the disk hangs."""
HANGS_SECONDS = 10.0
"""Time in which nothing that is written comes on the disk, and no error either, after which the disk hangs."""
HANGS_BYTES_A_SECOND = 2 * 2**20
"""Slowest disk that is not taken for a hanging one: a large commit takes longer than HANGS_SECONDS, and where all disks do, nobody
would be the owner for long."""
ROOM_SECONDS = 1.0
"""Time that a full disk is given: a promise frees the room that is kept for it, and the journal is tried again a moment later."""


@dataclass(slots=True)
class Promoted:
    """Outcome of a promotion.

    Attributes:
        row: the row of the set now.
        records: partitions that got a failover record.
        without: counted directories that were given up.
        lost: what the former owner was known to have above what is here: bucket, partition, from, to.
        tables: buckets whose newest consumers and cuts were given up.
    """

    row: Row
    records: int = 0
    without: frozenset[str] = frozenset()
    lost: list[tuple[str, int, int, int]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def _stalled(host: BucketService) -> StorageFailedError:
    return StorageFailedError(
        f"the journal of bucket {shown(host.bucket.identity.name)} cannot be written at this server now",
        hint="make room on its disk; 'upr-admin status' there says more",
        retriable=True,
    )


async def durable(host: BucketService, *, waits: bool = True) -> None:
    """Wait until everything that came, or was numbered, is on disk.

    Args:
        waits: whether also longer than ROOM_SECONDS while the journal cannot be written, as on a full disk.

    Raises:
        StorageFailedError: the storage has failed, or the journal cannot be written now.
    """
    tail, loop = host.bucket.tail, asyncio.get_running_loop()
    end, until = tail.end, loop.time() + ROOM_SECONDS
    while tail.durable < end:
        if host.bucket.stalled and not waits and loop.time() >= until:
            raise _stalled(host)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALLED_LOOK_SECONDS):
                await host.journalled(end - 1)


def held_of(host: BucketService, *, as_copy: bool = False) -> Held:
    """Return what is durable of a bucket.

    Args:
        as_copy: whether only what a promotion keeps. While it joins that is what it had before: rows above may lack the
            numbers of their producers, and a write that is repeated would be applied twice.
    """
    bucket, table, upstream_state = host.bucket, host.bucket.partitions, host.upstream_state
    held, marker = np.zeros(PARTITIONS, HELD), bucket.markers.seqno
    if as_copy and upstream_state is not None and upstream_state.joining is not False:
        marker = np.minimum(marker, upstream_state.whole)
    held["marker"], held["high"], held["id"] = marker, table.durable, table.newest_id
    held["epoch"] = table.epochs_at(marker)
    return held


def in_one_order(buckets: Mapping[int, Held], versions: Iterable[int]) -> Held:
    """Return what is held, by bucket version, as one column; of a bucket that is not there, nothing."""
    nothing = np.zeros(PARTITIONS, HELD)
    return np.concatenate([nothing[:0], *(buckets.get(version, nothing) for version in versions)])


def beside(
    needed: Mapping[int, U64], met: Mapping[str, Met], hosts: Iterable[BucketService]
) -> tuple[U64, dict[str, U64]]:
    """Return seqnos that are given by bucket version as one column, and in its order how far each server that was met has
    what this one has: nothing in a partition whose newest failover id is another one.
    """
    own = {host.bucket.identity.version: host.bucket.partitions.newest_id for host in hosts}
    none = np.zeros(PARTITIONS, np.uint64)
    ids = np.concatenate([none[:0], *(own.get(version, none) for version in needed)])
    markers = {}
    for directory, one in met.items():
        held = in_one_order(one.held, needed)
        markers[directory] = np.where(held["id"] == ids, held["marker"], np.uint64(0))
    return np.concatenate([none[:0], *needed.values()]), markers


def by_version(step: Follow, versions: Sequence[int]) -> dict[int, dict[int, int]]:
    """Return what is to be followed and how far, by bucket version and partition; see ``in_one_order``."""
    found: dict[int, dict[int, int]] = {}
    for place, seqno in zip(step.partitions.tolist(), step.seqnos.tolist(), strict=True):
        found.setdefault(versions[place // PARTITIONS], {})[place % PARTITIONS] = seqno
    return found


def given_up(answer: Answer, lacking: Mapping[int, Sequence[int]]) -> list[Lost]:
    """Have a promise hold nothing in partitions; return what it held."""
    lost = []
    for version, partitions in lacking.items():
        held = answer.held[version].copy()
        lost += [(version, p, int(held["marker"][p]), int(held["id"][p])) for p in partitions]
        held[list(partitions)] = 0
        answer.held[version] = held
    return lost


def told_once(lost: Iterable[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """Return what was given up with one row for each partition, from the lowest start to the highest end."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for name, partition, here, there in lost:
        least, most = found.get((name, partition), (here, there))
        found[name, partition] = min(least, here), max(most, there)
    return sorted((*where, *ends) for where, ends in found.items())


class Inventory:
    """What one server has of the buckets of its catalog.

    Attributes:
        serving: the epoch in which this process served last; 0 if it did not.
        cannot_serve: whether something here, as its disk, kept this server from being, or staying, active when it was to be; until it,
            or another one, is.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.serving = 0
        self.cannot_serve = False
        # How long what is being written to disk has been that, as often as it was looked at.
        self._writing: dict[tuple[int, int], float] = {}
        self._looked_at = 0.0

    def _hosts(self) -> dict[int, BucketService]:
        return {host.bucket.identity.version: host for host in self._catalog.hosts}

    def now(self, *, as_copy: bool = False) -> dict[int, Held]:
        """Return what is durable here, by bucket version; see ``held_of``."""
        return {v: held_of(host, as_copy=as_copy) for v, host in self._hosts().items()}

    def to_give(self) -> dict[int, Held]:
        """Return what the others count on, by bucket version: nothing of a partition that is dead here."""
        found = self.now(as_copy=True)
        for version, host in self._hosts().items():
            found[version]["marker"][host.bucket.partitions.state == DEAD] = 0
        return found

    def named(self, version: int) -> str:
        """Return a bucket's name; its version where it could not be made here."""
        host = self._hosts().get(version)
        return f"{version:016x}" if host is None else host.bucket.identity.name

    def lacking(
        self, answer: Answer, versions: Sequence[int], only: Mapping[int, Mapping[int, int]] | None
    ) -> dict[int, list[int]]:
        """Return what of a promise is not here, by bucket version."""
        mine, found = self.now(), {}
        for version in versions:
            theirs = answer.held.get(version)
            if theirs is None:
                continue
            here = mine.get(version, np.zeros(PARTITIONS, HELD))
            lacks = (here["id"] != theirs["id"]) | (here["marker"] < theirs["marker"])
            lacks |= (here["high"] < theirs["high"]) & (only is None)
            lacks &= theirs["id"] != 0
            chosen = np.flatnonzero(lacks)
            if only is not None:
                chosen = np.intersect1d(chosen, list(only[version]))
            if len(chosen):
                found[version] = chosen.tolist()
        return found

    @property
    def upstream_states(self) -> dict[int, UpstreamState]:
        """The states of buckets that are a replica's, by version."""
        found = {version: host.upstream_state for version, host in self._hosts().items()}
        return {version: one for version, one in found.items() if one is not None}

    def has_tables(self, answer: Answer, versions: Iterable[int]) -> bool:
        """Whether the small tables are here as they were when a server promised."""
        here = self.upstream_states
        return all(
            version in here
            and here[version].has_tables
            and here[version].told >= answer.changes.get(version, 0)
            for version in versions
            if version in answer.held
        )

    def received(self) -> int:
        """Return a number that changes when something is received."""
        return sum(int(host.bucket.partitions.high.sum()) for host in self._catalog.hosts)

    def is_refused(self, lacking: Mapping[int, Sequence[int]]) -> bool:
        """Whether nothing of what is lacking will come."""
        here, dead = self.upstream_states, self._dead_here(lacking)
        return bool(lacking) and all(
            p in dead.get(version, ())
            or (
                version in here
                and p in here[version].refused
                and not here[version].refused[p].retriable
            )
            for version, partitions in lacking.items()
            for p in partitions
        )

    def _dead_here(self, lacking: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """Return those partitions that are dead at this server, which takes nothing of them."""
        hosts = self._hosts()
        dead = {
            version: [p for p in partitions if hosts[version].bucket.partitions.state[p] == DEAD]
            for version, partitions in lacking.items()
            if version in hosts
        }
        return {version: partitions for version, partitions in dead.items() if partitions}

    def why_not(self, lacking: Mapping[int, Sequence[int]], address: str) -> str:
        """Return why what is lacking does not come; ``address`` is this server's."""
        if dead := self._dead_here(lacking):
            return f"partition {next(iter(dead.values()))[0]} is dead here, at {address}"
        for version, one in self.upstream_states.items():
            if version in lacking:
                problem = one.refused.get(lacking[version][0], one.problem)
                if problem is not None:
                    return str(problem)
        return "nothing comes from it"

    def short_of(self, lost: Iterable[Lost]) -> list[tuple[str, int, int, int]]:
        """Return what was given up of partitions: bucket, partition, from, to."""
        hosts, found = self._hosts(), []
        for version, partition, marker, failover_id in lost:
            # 0 of a bucket that could not be made here, and of another branch: where they part may be unknown.
            here = 0
            if version in hosts:
                table = hosts[version].bucket.partitions
                if failover_id in (log := table.logs[partition]):
                    # What is here above the place where the branches part is not theirs.
                    parts = log.next_after(failover_id)
                    here = int(table.high[partition])
                    here = here if parts is None else min(here, parts.seqno)
            if here < marker:
                found.append((self.named(version), partition, here, marker))
        return found

    def known_highs(self) -> dict[int, U64]:
        """Return the newest seqnos that the upstream told of, by bucket version."""
        return {version: one.highs.copy() for version, one in self.upstream_states.items()}

    def lost(
        self, known: Mapping[int, U64], found: Sequence[tuple[str, int, int, int]]
    ) -> list[tuple[str, int, int, int]]:
        """Return what the former owner was known to have above what is here, with what was found before, each partition once."""
        found = [*found]
        for host in self._catalog.hosts:
            identity, here = host.bucket.identity, host.bucket.partitions.high
            told = known.get(identity.version)
            if told is not None:
                found += [
                    (identity.name, p, int(here[p]), int(told[p]))
                    for p in np.flatnonzero(told > here).tolist()
                ]
        return told_once(found)

    @property
    def is_whole(self) -> bool:
        """Whether the small tables lack nothing of what is complete here, in each bucket."""
        return bool(self._catalog.hosts) and not self.out_of_step()

    async def is_whole_up_to(self, parts: Mapping[int, Mapping[int, int]]) -> None:
        """Store that what another server gave of partitions, by bucket version and up to a seqno, came with its tables."""
        for version, upstream_state in self.upstream_states.items():
            if version in parts:
                await upstream_state.is_whole_up_to(parts[version])

    @property
    def is_joining(self) -> bool:
        """Whether rows may come, in some bucket, without what the small tables say of them."""
        return any(one.joining is not False for one in self.upstream_states.values())

    def out_of_step(self) -> set[int]:
        """Return the versions of buckets in which rows may be here without what the small tables say of them."""
        here = self.upstream_states.items()
        return {version for version, one in here if not (one.in_step or one.is_whole)}

    @property
    def failure(self) -> StorageFailedError | None:
        """Why what is written here cannot be stored until the next start, of the first such bucket; None where it can."""
        failures = (host.bucket.failure for host in self._catalog.hosts)
        return next(filter(None, failures), None)

    def look(self, now: float) -> None:
        """See whether the disk hangs; called every LOOK_SECONDS."""
        # A process that stood still was not waiting for its disk.
        seconds, self._looked_at = min(now - self._looked_at, 2 * LOOK_SECONDS), now
        before, self._writing = self._writing, {}
        for version, host in self._hosts().items():
            tail, host.bucket.hangs = host.bucket.tail, None
            # What waits for room, or has failed, hangs not.
            ends = host.bucket.stalled or host.bucket.failure is not None
            if ends or tail.durable >= tail.taken:
                continue
            taken = before.get((version, tail.durable), 0.0) + seconds
            self._writing[version, tail.durable] = taken
            size = sum(len(one.data) for one in tail.range(tail.durable, tail.taken))
            if taken >= HANGS_SECONDS + size / HANGS_BYTES_A_SECOND:
                host.bucket.hangs = StorageFailedError(
                    f"a write to the disk of this server has not ended for {taken:.0f} s",
                    hint="mend the disk; another server can be active meanwhile",
                    retriable=True,
                )

    @property
    def hangs(self) -> StorageFailedError | None:
        """That a write neither ends nor fails, of the first such bucket; None where all end."""
        return next(filter(None, (host.bucket.hangs for host in self._catalog.hosts)), None)

    @property
    def unfit(self) -> UprError | None:
        """Why another server should be the active one if it can: a partition is dead here, writes have no room now, or do not end."""
        for host in self._catalog.hosts:
            if host.bucket.hangs is not None:
                return host.bucket.hangs.with_traceback(None)
            dead = np.flatnonzero(host.bucket.partitions.state == DEAD)
            if len(dead):
                return DataDamagedError(
                    f"partition {dead[0]} of bucket {shown(host.bucket.identity.name)} is dead at this server",
                    hint="take over to another one; 'upr-admin topology' shows who is in step",
                )
            if host.bucket.stalled:
                return _stalled(host)
            if host.disk.room.left() < 0:
                return NoRoomError(
                    "the disk of this server has no room for writes",
                    hint="make room, or take over to another one; 'upr-admin topology' shows who is in step",
                )
        return None

    def serves(self, epoch: int) -> None:
        """Note that this server is active."""
        self.serving, self.cannot_serve = epoch, False

    def serves_not(self, error: BaseException) -> None:
        """Note why this server did not become active; a higher epoch is another one's, and a cancellation says nothing."""
        is_own = isinstance(error, Exception) and not isinstance(error, UnavailableError)
        self.cannot_serve |= is_own

    def check_stores(self) -> None:
        """Raise StorageFailedError where ``failure`` says so: this server must not be the active one."""
        if (failure := self.failure) is not None:
            raise failure.with_traceback(None)

    def served(self) -> int:
        """Return the epoch in which this server served last; 0 if it cannot tell that nothing is missing."""
        if self.failure is not None:
            # Seqnos were given that may be on disk, and may not.
            return 0
        epochs = set()
        for host in self._catalog.hosts:
            table = host.bucket.partitions
            epochs |= set(table.served_epoch[table.state != DEAD].tolist())
        if not self._catalog.versions:
            # No partition says it. Before a restart there may have been a bucket here that is lost.
            return self.serving
        return int(epochs.pop()) if len(epochs) == 1 else 0

    def not_given(self, who: str, lacking: Mapping[int, Sequence[int]], why: str) -> UprError:
        """Return the error of a promotion to which a server does not give what only it has."""
        parts = [
            f"of bucket {shown(self.named(version))} "
            f"partition {partitions[0]}{f' and {len(partitions) - 1} others' if len(partitions) > 1 else ''}"
            for version, partitions in lacking.items()
        ]
        what = "; ".join(parts) or "consumers and cuts"
        return UprError(
            f"{who} has more than is here, and it does not come: {what}: {why}",
            reason="NOT_HEARD",
            hint="mend what is said to be wrong, promote another server, or use --force to go on without what only"
            " that one has",
            retriable=True,
        )
