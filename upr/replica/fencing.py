"""Fencing: in a cluster nobody but the owner serves, and the map says who that is. Grants, and changes of the owner's row.

A set without a cluster has none of this: there an operator's word takes the place of the map.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from upr.replica.inventory import beside
from upr.replica.peers import Answer, Peers
from upr.service.buckets.catalog import Catalog
from upr_protocol.block import U64
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.limits import PARTITIONS
from upr_protocol.ownership import GRANT_SECONDS, GRANTED_SECONDS, Claim, Grants, Row

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
"""Interval at which an owner asks for grants."""
SILENT_SECONDS = 5.0
"""Time after which a counted server that gives no grant, or does not follow, is counted no more."""
LAST_SECONDS = 10.0
"""As above, for the last one besides the owner."""
PREVIOUS_SECONDS = 1.0
"""Shortest wait for the promise of the server that served last: with it nobody else has to wait."""


class ClaimedTooError(UnavailableError):
    """Another server's claim came before: of two that claim at once one loses, and nothing is wrong."""

    def __init__(self) -> None:
        super().__init__("another server claims the ownership too", hint="try again")


def boot_seconds() -> float:
    """Return the time since the machine was started, with the time that it slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1e9


def is_released(row: Row, answers: Mapping[str, Answer]) -> bool:
    """Return whether the server that served last has promised, or is the one that claims."""
    return row.previous is not None and row.previous.directory in {row.owner, *answers}


def old_map(row: Row, known: Row) -> UprError:
    """Return the error of a map whose row is older than the one that is known here."""
    return UprError(
        f"the map of the cluster has epoch {row.epoch}, revision {row.revision}, and here {known.epoch},"
        f" {known.revision} are known: it is an old copy",
        reason="OLD_MAP",
        hint="start the server that was active last: it sets the map right; or 'upr-admin promote --force' goes on"
        " without what only others have",
    )


def check_seen(seen: Row | None, basis: Row | None) -> None:
    """Raise where the row that is to be claimed is not the one for which it was this server's turn; None for any."""
    if seen not in (None, basis):
        raise ClaimedTooError


class Rows(Protocol):
    """The map of a cluster, where the row of its set is changed by one at a time."""

    @property
    def dropped(self) -> tuple[int, ...]:
        """The versions of the buckets that were dropped last, when the newest row was set from here."""

    async def read(self) -> Row:
        """Return the newest row; raise UprError while it cannot be read."""

    async def swap(self, old: Row, new: Row) -> bool:
        """Change the row if it is the old one; return whether it is the new one. May be repeated.

        Raises:
            UprError: it is not known whether it was changed.
        """


class Fencing:
    """Grants and row of one server of a cluster.

    Attributes:
        grants: those that it gave and has.
        trouble: why an owner does not serve now, in words; empty while it does.
    """

    def __init__(self, rows: Rows, catalog: Catalog, peers: Peers) -> None:
        self.rows = rows
        self.trouble = ""
        self._catalog = catalog
        self._peers = peers
        # One that knows of no epoch was never counted.
        before = catalog.standing.standing.epoch
        self.grants = Grants(
            catalog.directory_id, boot_seconds() + GRANT_SECONDS if before else 0.0
        )
        self._began = 0.0
        self._seen: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._doubt: Row | None = None
        self._unsettled = False
        # The epochs of promises that are about to be given.
        self._wanting: list[int] = []
        catalog.may_serve = self.may_serve

    def may_serve(self) -> bool:
        """Return whether nobody else can be the owner now."""
        return self.grants.may_serve(boot_seconds())

    @property
    def serving_seconds(self) -> float:
        """Time for which this server may still serve without another grant; 0 when it may not."""
        return max(self.grants.serving(boot_seconds()), 0.0)

    def granted_seconds(self, directory: str) -> float:
        """Return how long the grant of a server still holds here; 0 when it does not."""
        return max(self.grants.holds(directory, boot_seconds()), 0.0)

    # Owning

    def begin(self, row: Row, *, resumed: bool) -> None:
        """Own a row from now on.

        Args:
            resumed: whether it was stored before the start: then the last change of it may have been made since.
        """
        self._doubt, self._unsettled, self._began = None, resumed, boot_seconds()
        self._seen.clear()
        if resumed:
            self.grants.resume(row)
        else:
            self.grants.begin(row)

    def end(self) -> None:
        """Own no more: nothing is taken or answered from this step on."""
        self.grants.end()
        self._over("it gave way")

    async def run(self) -> None:
        """Ask for grants while this server owns, until cancelled."""
        try:
            while True:
                self._asking = {d: task for d, task in self._asking.items() if not task.done()}
                # Who would be counted if it gave grants is asked too.
                for directory in self._others() | (self._peers.countable if self._owns else set()):
                    if directory not in self._asking:
                        self._asking[directory] = asyncio.create_task(self._ask(directory))
                self._tell()
                await asyncio.sleep(ASK_SECONDS)
        finally:
            for task in self._asking.values():
                task.cancel()

    def _others(self) -> frozenset[str]:
        standing = self._catalog.standing.standing
        return standing.row.counted - {standing.directory} if self._owns else frozenset()

    @property
    def _owns(self) -> bool:
        return self._catalog.standing.standing.owns and not self._catalog.replica

    def grants_lately(self, directory: str) -> bool:
        """Return whether a server gives this owner grants: one that does not would be counted in vain."""
        return boot_seconds() - self._seen.get(directory, -math.inf) <= SILENT_SECONDS

    async def _ask(self, directory: str) -> None:
        epoch = self._catalog.standing.standing.row.epoch
        asked = boot_seconds()
        if not await self._peers.ask_grant(directory, epoch):
            return
        before = self.may_serve()
        self.grants.given(directory, epoch, asked)
        hosts = self._catalog.hosts
        if all(directory in host.bucket.copies.connected for host in hosts):
            self._seen[directory] = boot_seconds()
        if not before and self.may_serve():
            for host in hosts:
                host.disk.changed()

    def _tell(self) -> None:
        """Say once that an owner does not serve, and once that it does again."""
        since = boot_seconds() - self._began
        lapsed = since > GRANTED_SECONDS and bool(self._others()) and not self.may_serve()
        if lapsed and not self.trouble:
            self.trouble = "no counted server grants it"
            log.warning("the owner takes and answers nothing", extra={"why": self.trouble})
        elif not lapsed and self.may_serve():
            self._over("it serves again")

    def _over(self, why: str) -> None:
        if self.trouble:
            self.trouble = ""
            log.info("the owner's trouble is over", extra={"why": why})

    def silent(self, row: Row) -> set[str]:
        """Return the counted servers that have been silent for so long that they are to be counted no more."""
        now, others = boot_seconds(), row.counted - {row.owner}
        longest = LAST_SECONDS if len(row.counted) == 1 else SILENT_SECONDS
        return {one for one in others if now - self._seen.setdefault(one, now) > longest}

    def shrunk(self, row: Row, floor: Mapping[int, U64]) -> Row:
        """Return the row without a counted server that has been silent for too long.

        Args:
            floor: by bucket version, what the owner had when it began to serve.
        """
        silent = self.silent(row)
        if not silent:
            return row
        none = np.zeros(PARTITIONS, np.uint64)
        needed = {}
        for host in self._catalog.hosts:
            version = host.bucket.identity.version
            needed[version] = np.maximum(floor.get(version, none), host.bucket.copies.stable(1))
        return row.shrunk(silent, *beside(needed, self._peers.met, self._catalog.hosts))

    @property
    def sure(self) -> frozenset[str]:
        """The servers that are counted whether the change that is under way was made or not."""
        sets = self.grants.counted
        return frozenset.intersection(*sets) if sets else frozenset()

    async def next_row(self, own: Row, change: Callable[[], Row]) -> Row:
        """Change this owner's row in the map, if it is to be changed; return what it is now.

        A change of which it is not known whether it was made, or that is not stored here, is finished before the next one.

        Args:
            change: returns what the row is to be, and makes nothing count that does not count then.

        Raises:
            UprError: it is not known what the row is: it may be either.
        """
        if self._unsettled:
            return await self._settled(own)
        new = change() if self._doubt is None or own.age >= self._doubt.age else self._doubt
        if new == own:
            self.grants.counted = (own.counted,)
            return own
        self.grants.counted = (own.counted, new.counted)
        await self._swap(own, new)
        return new

    async def _swap(self, own: Row, new: Row) -> None:
        """Change this owner's row in the map, and rely on those who are counted then."""
        self._doubt = new
        if not await self.rows.swap(own, new) or self._doubt is not new:
            # Who claimed may have done so after this change, so it is not known to be none.
            raise UnavailableError("another server changed the map of the cluster")
        self.grants.counted = (new.counted,)

    async def _settled(self, own: Row) -> Row:
        """Find out whether the last change before a start was made; by a change, so that it is not made later."""
        row = await self.rows.read()
        if (row.owner, row.epoch) == (own.owner, own.epoch) and row.age > own.age:
            return row
        new = replace(own, revision=own.revision + 1)
        await self._swap(own, new)
        self._unsettled = False
        return new

    # Claiming

    async def basis(self, *, force: bool) -> Row:
        """Return the row that is claimed: that of the map, which an owner that knows a newer one sets right before.

        Raises:
            UprError: it cannot be read; OLD_MAP, it is older than what is known here, so others may be counted since.
        """
        standing = self._catalog.standing.standing
        known, row = standing.row, await self.rows.read()
        if row.age < known.age and standing.owns and await self.rows.swap(row, known):
            return known
        if row.age < known.age and not force:
            raise old_map(row, known)
        return row

    async def ask_previous(self, claim: Claim, *, takeover: bool) -> dict[str, Answer]:
        """Ask who served last for its promise, no longer than a grant to it holds here; a takeover needs it in any case."""
        last = "" if claim.row.previous is None else claim.row.previous.directory
        if last in ("", claim.row.owner):
            return {}
        left = self.grants.left(boot_seconds())
        asking = asyncio.create_task(self._peers.ask_promises(claim.row, [last]))
        try:
            longest = None if takeover else max(left, PREVIOUS_SECONDS)
            await asyncio.wait({asking}, timeout=longest)
        finally:
            asking.cancel()
        if not asking.done():
            claim.asked([last])
            return {}
        return {d: one for d, one in asking.result().items() if isinstance(one, Answer)}

    # Giving

    def give(self, epoch: int, owner: str) -> bool:
        """Answer an owner that asks for a grant."""
        return self.grants.give(epoch, owner, self._catalog.standing.standing, boot_seconds())

    @contextlib.asynccontextmanager
    async def freed(self, epoch: int, released: bool) -> AsyncIterator[None]:
        """Run the body when no grant holds that was given; none is given below an epoch until its end.

        Args:
            released: whether the owner that has them needs none any more.
        """
        self._wanting.append(epoch)
        self.grants.wanted = max(self._wanting)
        try:
            while not released and (left := self.grants.left(boot_seconds())) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)
            yield
        finally:
            self._wanting.remove(epoch)
            self.grants.wanted = max(self._wanting, default=0)

    @property
    def unasked_seconds(self) -> float:
        """Time since a grant was last given to an owner, or since this server was started."""
        return GRANT_SECONDS - self.grants.left(boot_seconds())
