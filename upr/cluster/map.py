"""Map: the one key of a cluster that says who owns its set, and which buckets that has. It is changed by compare-and-set.

A bucket is created and dropped in the map first, by its owner only, under a version that was never there before. So an answer
of etcd that was lost does no harm: whoever is the owner makes what the map has, and drops what it says was dropped, before it
serves or within moments. What is in neither list, of a map that was made again or restored, is the owner's to tell: it goes
into the map. The other servers have the buckets of the owner.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from upr.cluster.registry import Bucket, Found, Map, Place, Registry
from upr.service.buckets.bucket_service import BucketService, new_id, not_active
from upr.service.buckets.catalog import Catalog
from upr_protocol.errors import (
    AlreadyExistsError,
    BucketNotFoundError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
    shown,
)
from upr_protocol.ownership import Row

log = logging.getLogger(__name__)
_T = TypeVar("_T")

CHANGES_MAX = 8
"""Attempts at a change of the map: each is after another change of it."""


class MapRows:
    """The map of a cluster.

    Args:
        replica_set: returns the id of the set that this server belongs to; "" for none yet.

    Attributes:
        swapped: the map with the newest row that was set from here; None before there is one.
    """

    def __init__(self, registry: Registry, place: Place, replica_set: Callable[[], str]) -> None:
        self.swapped: Map | None = None
        self._registry = registry
        self._replica_set = replica_set
        self._name = place.name
        self._prefix = place.prefix
        self._key = place.prefix + b"map"

    async def found(self) -> tuple[Found, Map | None]:
        """Return all that is kept of the cluster, and its map; None where there is none yet."""
        found = await self._registry.read(self._prefix)
        entry = found.entries.get(self._key)
        return found, None if entry is None else Map.decode(entry.value)

    def check_set(self, known: Map) -> None:
        """Raise where a map is of another set than this server: neither its rows nor its changes mean anything here."""
        own = self._replica_set()
        if own and own != known.replica_set:
            raise UprError(
                f"the cluster {shown(self._name)} is the set of servers {known.replica_set}; this server"
                f" belongs to {own}",
                reason="WRONG_REPLICA_SET",
                hint="give --cluster another name, or --data an empty directory",
            )

    async def _there(self) -> tuple[Found, Map]:
        """Return what ``found`` does, where there is a map of this server's set."""
        found, known = await self.found()
        if known is None:
            raise UnavailableError("there is no map of the cluster in etcd")
        self.check_set(known)
        return found, known

    @property
    def dropped(self) -> tuple[int, ...]:
        return () if self.swapped is None else self.swapped.dropped

    async def read(self) -> Row:
        _, known = await self._there()
        return known.row

    async def swap(self, old: Row, new: Row) -> bool:
        """Change the row; see ``Rows``."""

        def changed(known: Map) -> Map | None:
            # It may have been changed so by a call whose answer was lost.
            return replace(known, row=new) if known.row in (old, new) else None

        swapped = await self.change(changed)
        self.swapped = swapped or self.swapped
        return swapped is not None

    async def change(self, changed: Callable[[Map], Map | None]) -> Map | None:
        """Change the map, and return what it is then; None where ``changed`` returns that.

        Args:
            changed: returns what a map is to be; it is asked again where another change came first, or where the answer
                was lost: the map may be what it returned before.

        Raises:
            UnknownOutcomeError: it may have been changed, and why that cannot be found out.
            UprError: it was not changed.
        """
        is_unknown = False
        try:
            for _ in range(CHANGES_MAX):
                found, known = await self._there()
                new = changed(known)
                if new is None or new == known:
                    return new
                revision = found.entries[self._key].revision
                try:
                    if await self._registry.swap(self._key, new.encode(), revision):
                        return new
                except UnavailableError:
                    if is_unknown:
                        raise
                    is_unknown = True
            raise UnavailableError(
                "the map of the cluster changes again and again", hint="try again"
            )
        except UprError as error:
            if is_unknown:
                raise UnknownOutcomeError(error.message) from error
            raise

    async def begin(self, first: Map) -> bool:
        """Make the map, if there is none; return whether it was made by this."""
        return await self._registry.swap(self._key, first.encode(), 0)


class Buckets:
    """The buckets of a cluster: created and dropped here by order at the owner, and had as the map says.

    An order that fails with another reason than UNKNOWN_OUTCOME changed nothing, so that it may be given to another server.

    Attributes:
        trouble: why a bucket is not as the map says; None while all are.
    """

    def __init__(self, rows: MapRows, catalog: Catalog) -> None:
        self.trouble: UprError | None = None
        self._rows = rows
        self._catalog = catalog
        # Of what is read of the map nothing is done while a bucket is being created or dropped.
        self._changing = asyncio.Lock()
        # Those that the newest map of this owner says were dropped.
        self._dropped: tuple[int, ...] = ()
        catalog.ordered, catalog.match = self, self.match

    async def create(self, name: str, compression: str = "", *, quota: int = 0) -> BucketService:
        """Create a bucket; see ``Catalog.create``.

        Raises:
            UnknownOutcomeError: etcd did not answer, and it is created if the map has it; or it has, and it is not here yet.
        """
        async with self._changing:
            # First: a replica may not have heard of a drop.
            self._catalog.check_active()
            self._catalog.check_new(name, compression)
            new = Bucket(name, new_id(), compression, quota)

            def with_it(known: Map) -> Map:
                if new in known.buckets:
                    return known
                if any(one.name == name for one in known.buckets):
                    raise AlreadyExistsError(
                        f"bucket {shown(name)} exists in the cluster",
                        hint="drop it, or take another name",
                    )
                return known.adding(new)

            words = f"bucket {shown(name)} was created"
            await self._change(with_it, words)
            return await _here(self._make(new, active=True), words)

    async def _make(self, one: Bucket, *, active: bool) -> BucketService:
        return await self._catalog.create(
            one.name, one.compression, one.version, one.quota, active=active
        )

    async def drop(self, name: str, version: int | None = None) -> int:
        """Drop a bucket; see ``Catalog.drop``.

        Raises:
            UnknownOutcomeError: etcd did not answer, and it is dropped if the map says so; or it does, and it is still here.
        """
        async with self._changing:
            self._catalog.check_active()
            try:
                chosen = self._catalog.version_of(name, version)
            except BucketNotFoundError:
                # One that could not be made here.
                _, known = await self._rows.found()
                buckets = () if known is None else known.buckets
                found = [
                    b.version for b in buckets if b.name == name and version in (None, b.version)
                ]
                if not found:
                    raise
                chosen = found[0]
            words = f"bucket {shown(name)} was dropped"
            await self._change(lambda known: known.dropping(chosen), words)
            if chosen in self._catalog.versions:
                await _here(self._catalog.drop(name, chosen), words)
            return chosen

    def _is_owners(self, known: Map) -> bool:
        """Return whether this server is the owner that a map names; another one may have claimed, or it is another set's."""
        own = self._catalog.standing.standing.row
        names = known.replica_set, known.row.owner, known.row.epoch
        own_names = self._catalog.replica_set, own.owner, own.epoch
        return names == own_names and not self._catalog.replica

    async def _change(self, changed: Callable[[Map], Map], words: str) -> None:
        def by_owner(known: Map) -> Map:
            if not self._is_owners(known):
                raise not_active("")
            return changed(known)

        try:
            known = await self._rows.change(by_owner)
        except UnknownOutcomeError as error:
            raise UnknownOutcomeError(
                f"{error.message}; it is not known whether {words}",
                hint="see what is there with 'upr-admin bucket list', when etcd answers",
                retriable=False,
            ) from error
        except UnavailableError as error:
            error.message += "; nothing was changed"
            raise
        assert known is not None
        self._dropped = known.dropped

    def are(self, known: Map) -> bool:
        """Return whether the buckets here are those that a map has, and its row is not of an old copy.

        Damaged ones that it has not are let be.
        """
        if known.row.age < self._catalog.standing.standing.row.age:
            return False
        here, there = self._catalog.versions.keys(), {one.version for one in known.buckets}
        hosts = {host.bucket.identity.version for host in self._catalog.hosts}
        return hosts <= there <= here and here.isdisjoint(known.dropped)

    async def match(self) -> None:
        """Make the buckets that the map has, drop those that it says were dropped, and have it know of the others.

        Of a server that is not active yet nothing goes into the map, what is made is to become active, and etcd is not
        asked: it is the map in which this server began to serve.

        Raises:
            UprError: the map cannot be read, or changed.
        """
        async with self._changing:
            await self._catalog.settled()
            known = before = self._rows.swapped

            def with_ours(map_: Map) -> Map | None:
                nonlocal before
                before = map_
                return self._with_ours(map_)

            if active := not self._catalog.replica:
                known = await self._rows.change(with_ours)
                if known not in (None, before):
                    log.warning("the map of the cluster is set right by what its owner has")
            if known is None:
                return
            self._dropped = known.dropped
            failed: UprError | None = None
            here = self._catalog.versions
            for version, name in here.items():
                if version in known.dropped:
                    dropping = self._catalog.drop(name, version)
                    failed = await _matched(dropping, name, "dropped") or failed
            for one in known.buckets:
                if one.version not in here:
                    making = self._make(one, active=active)
                    failed = await _matched(making, one.name, "made") or failed
            self.tell(failed)

    def _with_ours(self, known: Map) -> Map | None:
        """Return a map with what only this server, its owner, has; None where it is not of this owner.

        In an old copy of etcd's data the row may be older than the one here, and buckets may be there that were dropped, and
        perhaps created again, since. The owner had what the map had before, so what it has is newer. Where the row has not
        changed since, only this owner itself can have dropped some.
        """
        own, here = self._catalog.standing.standing.row, self._catalog.versions
        if known.replica_set == self._catalog.replica_set and known.row.age < own.age:
            known = replace(known, row=own)
            for one in known.buckets:
                if one.version not in here:
                    known = known.dropping(one.version)
        if not self._is_owners(known):
            return None
        for version in self._dropped:
            if version not in known.dropped:
                known = known.dropping(version)
        for host in self._catalog.hosts:
            found = host.bucket.identity
            there = {bucket.name: bucket.version for bucket in known.buckets}
            if found.version not in {*there.values(), *known.dropped}:
                if found.name in there:
                    known = known.dropping(there[found.name])
                quota = host.disk.quota.limit
                known = known.adding(Bucket(found.name, found.version, found.compression, quota))
        return known

    def tell(self, trouble: UprError | None) -> None:
        """Say in the log once that a bucket is not as the map says, and once that all are."""
        if trouble is not None and str(trouble) != str(self.trouble):
            log.warning("buckets are not as in the cluster", extra={"why": str(trouble)})
        elif trouble is None and self.trouble is not None:
            log.info("buckets are as in the cluster again")
        self.trouble = trouble


async def _matched(doing: Awaitable[object], name: str, what: str) -> UprError | None:
    """Drop or make a bucket here, as the map says; return why it cannot be."""
    try:
        await doing
    except UprError as error:
        return UprError(
            f"bucket {shown(name)} cannot be {what}: {error.message}",
            reason=error.reason,
            hint=error.hint or "the other buckets are served; it is tried again every second",
            retriable=True,
        )
    if what == "made":
        log.warning("a bucket was made here, as in the cluster", extra={"bucket": name})
    else:
        log.warning("a bucket was dropped here, as in the cluster", extra={"bucket": name})
    return None


async def _here(doing: Awaitable[_T], words: str) -> _T:
    """Do here what the map has already."""
    try:
        return await doing
    except UprError as error:
        raise UnknownOutcomeError(
            f"{words} in the cluster, and not here yet: {error.message}",
            hint=error.hint or "what is missing is done by whoever is the active server",
            retriable=False,
        ) from error
