"""Counted replicas: whom the active server of a set counts, and whose acknowledgements make a write stable.

The counted servers together have everything that was acknowledged, so a promotion hears all of them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from upr.replica.fencing import Fencing
from upr.replica.inventory import beside
from upr.replica.peers import Peers
from upr.service.buckets.catalog import Catalog
from upr.service.conversation import REPLICAS_NAME
from upr.service.storage_trouble import PASSING, words_of
from upr_protocol.block import U64
from upr_protocol.errors import BucketGoneError, StorageFailedError, UnavailableError, UprError
from upr_protocol.ownership import Row, Standing

log = logging.getLogger(__name__)


def check_owns(standing: Standing) -> None:
    """Raise if another server was promised, or has, a higher epoch."""
    if not standing.owns:
        raise UnavailableError(
            "another server claimed a higher epoch meanwhile",
            hint="'upr-admin topology' shows who is active",
        )


class CountedReplicas:
    """Whom one server counts while it is the active one.

    Args:
        fencing: of a server of a cluster; None without one.
        store: changes what the server has stored, durably; see ``Ownership.store``.

    Attributes:
        known: the counted replicas of which everybody knows who could be promoted.
    """

    def __init__(
        self,
        catalog: Catalog,
        peers: Peers,
        fencing: Fencing | None,
        store: Callable[[Callable[[Standing], Standing | None]], Awaitable[object]],
    ) -> None:
        self._catalog = catalog
        self._peers = peers
        self._fencing = fencing
        self._store = store
        self._changing = asyncio.Lock()
        self._floor: dict[int, U64] = {}
        self.known = catalog.standing.known

    @property
    def _standing(self) -> Standing:
        return self._catalog.standing.standing

    def note_floor(self) -> None:
        """Remember what the owner had when it began to serve."""
        self._floor = {
            host.bucket.identity.version: host.bucket.partitions.high.copy()
            for host in self._catalog.hosts
        }

    async def count(self) -> None:
        """Count the replicas that are in step, and count this server no more when another has all that it had."""
        try:
            await self._recount()
            before = self._standing.row
            await self._change_row(self._next_row)
            if before != self._standing.row:
                # At once: until they have stored it, a promotion waits for servers that are counted no more.
                await self._peers.meet_all(self._standing)
        finally:
            # Also where the row cannot be changed now.
            if not self._catalog.replica and self._standing.owns:
                await self.count_copies()

    async def _change_row(self, change: Callable[[Standing], Row]) -> None:
        """Change this owner's row: in the map, where there is one, and then here."""
        if self._fencing is None:
            await self._store(lambda standing: standing.learned(change(standing)))
            return

        def changed() -> Row:
            row = change(self._standing)
            # At once: who may be counted no more acknowledges nothing that counts.
            self.known &= row.counted
            for host in self._catalog.hosts:
                host.bucket.count(self.known, host.bucket.copies.ready)
            return row

        async with self._changing:
            row = await self._fencing.next_row(self._standing.row, changed)
            await self._store(lambda standing: standing.learned(row))

    def _next_row(self, standing: Standing) -> Row:
        """Return the row with the replicas that are in step, or without this server when another has all that it had."""
        row, met, fencing = standing.row, self._peers.met, self._fencing
        for directory in sorted(self._peers.countable - row.counted):
            if fencing is None or fencing.grants_lately(directory):
                row = row.counting(directory)
        if row == standing.row and fencing is not None:
            row = fencing.shrunk(row, self._floor)
            if row.owner in row.counted - standing.row.counted:
                self.note_floor()
        if row != standing.row:
            return row
        floor, holding = beside(self._floor, met, self._catalog.hosts)
        stored = {d for d, one in met.items() if one.row.age >= row.age}
        return row.without(row.owner, floor, holding, stored) or row

    async def _recount(self) -> None:
        """Count this server again, if a counted one has less than it acknowledged: that one could be promoted alone.

        It stays counted until one has all that is here now, as when it began to serve.
        """
        hosts = self._catalog.hosts
        fallen = set().union(*(host.bucket.copies.fallen for host in hosts))

        if lost := fallen & self._standing.row.counted:
            self.note_floor()
            await self._change_row(lambda standing: standing.row.counting(standing.row.owner))
            if self._standing.row.owner not in self._standing.row.counted:
                # Another change had to be finished first.
                return
            log.warning(
                "a counted server has less than it acknowledged: this one is counted too until another has all",
                extra={"servers": ", ".join(sorted(map(self._peers.named, lost)))},
            )
        for host in hosts:
            host.bucket.copies.fallen -= fallen

    async def forget(self, directory: str) -> Row:
        """Count a server no more that will not come back, and forget it and how far it was; return the row.

        It may be the only one that has what was acknowledged at ``replicated(k)`` besides this one, which is counted until
        another has all that is here.

        Raises:
            UprError: STILL_THERE, it answers, follows here, or is this one; PartitionNotActiveError, this one is not active.
            StorageFailedError: it could not be stored, or its positions could not be removed; it can be repeated.
        """
        name = REPLICAS_NAME + directory
        hosts = self._catalog.hosts
        here = directory == self._standing.directory or directory in self._peers.met
        if here or any(name in host.bucket.consumers for host in hosts):
            raise UprError(
                f"{self._peers.named(directory)} is there; must be one that will not come back",
                reason="STILL_THERE",
                hint="stop it first, and remove its data directory",
            )

        refused = False

        def change(standing: Standing) -> Row:
            nonlocal refused
            refused = self._catalog.replica or not standing.owns
            if refused or directory not in standing.row.counted:
                return standing.row
            # What it acknowledges counts no more before the floor: what is stable by it alone lies below that.
            self.known -= {directory}
            for host in self._catalog.hosts:
                host.bucket.count(self.known, host.bucket.copies.ready)
            self.note_floor()
            return standing.row.forgetting(directory)

        try:
            await self._change_row(change)
            if refused or directory in self._standing.row.counted:
                self._catalog.check_active()
                check_owns(self._standing)
                raise UnavailableError("the row is being changed", hint="say it again")
            # The others stop telling of it when they know the row.
            await self._peers.meet_all(self._standing)
            for host in hosts:
                host.bucket.consumer_positions.forget(name)
                with contextlib.suppress(BucketGoneError):
                    await host.acknowledged.save()
        except PASSING as error:
            raise StorageFailedError(
                f"that a server is forgotten could not be stored: {words_of(error)}",
                hint="say it again: what is done already stays done",
                retriable=True,
            ) from error
        self._peers.drop(directory)
        log.warning("a server was forgotten", extra={"directory": directory})
        return self._standing.row

    async def count_copies(self) -> None:
        """Tell the buckets whose acknowledgements count, and who is ready there.

        A replica counts when all counted ones have stored that it does: one that has not could be promoted without it.
        It is ready in a bucket when its call there was told all small tables.
        """
        row, met = self._standing.row, self._peers.met
        others = row.counted - {row.owner}
        stored = {d for d, one in met.items() if one.row.age >= row.age}
        known = others if others <= stored else self.known & others
        if self._fencing is not None:
            # Everybody who claims reads the row where it was changed.
            known = others & self._fencing.sure
        if known != self.known:
            self.known = known
            # After a restart one that is away does not keep the others from counting.
            await self._store(lambda standing: standing)
        if self._catalog.replica or not self._standing.owns:
            return
        for host in self._catalog.hosts:
            ready = {f.options.directory for f in host.bucket.followers if f.has_tables}
            host.bucket.count(self.known, ready)
            host.bucket.may_undo = bool(others)
