"""Following: whom one server of a set follows, and what it takes from one that has promised.

``ownership`` says whom. Until a promotion has what it lacks, that is who has it, and nobody in between.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping

from upr.engine.partitions import DEAD
from upr.engine.recovery import Undo
from upr.replica.inventory import Inventory, Lost, durable, given_up
from upr.replica.links import Links
from upr.replica.peers import Answer, Peers
from upr.replica.replication import Replication
from upr.service.buckets.catalog import Catalog
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.ownership import Claim, Standing

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0
"""Longest time in which nothing comes while data is gathered."""
GATHER_LOOK_SECONDS = 0.002


def check_mine(standing: Standing, claim: Claim) -> None:
    """Raise where a claim of this server's is outdated: another one was promised a higher epoch."""
    if (standing.promised, standing.candidate) != (claim.row.epoch, standing.directory):
        raise UnavailableError(
            f"epoch {standing.promised} was claimed by another server meanwhile",
            hint="'upr-admin topology' shows who is active",
        )


class Following:
    """Whom one server follows: one upstream, or nobody.

    Attributes:
        replication: what follows; None for nobody.
        task: that runs it.
    """

    def __init__(
        self,
        catalog: Catalog,
        address: Callable[[], str],
        links: Links,
        peers: Peers,
        inventory: Inventory,
    ) -> None:
        self._catalog = catalog
        self._address = address
        self._links = links
        self._peers = peers
        self._inventory = inventory
        self.task: asyncio.Task[None] | None = None
        self.replication: Replication | None = None
        # Whom it follows, and whether anonymously.
        self._followed: tuple[tuple[str, ...], bool] = ((), False)

    @property
    def problem(self) -> UprError | None:
        """Why no upstream is followed, where there is no bucket yet that would tell."""
        replication = None if self._catalog.hosts else self.replication
        return None if replication is None else replication.problem

    async def end(self) -> None:
        """Follow nobody."""
        task, self.task, self._followed = self.task, None, ((), False)
        self.replication = None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def goes_on(self, targets: tuple[str, ...], anonymous: bool, directory: str) -> bool:
        """Return whether a server is followed already, and see to it that it goes on being this one."""
        if self.task is not None and self.task.done():
            if not self.task.cancelled() and (error := self.task.exception()):
                log.error("following the owner failed", exc_info=error)
            self.task = None
        is_same = self.task is not None and (targets, anonymous) == self._followed
        return is_same and self._follows(directory)

    def _follows(self, directory: str) -> bool:
        """Return whether the server that is followed is this one; where any would do, it must be this one from now on."""
        replication = self.replication
        if replication is None or replication.directory not in ("", directory):
            return False
        replication.directory = directory
        return True

    def begin(
        self,
        targets: tuple[str, ...],
        anonymous: bool,
        directory: str,
        only: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Replication:
        """Follow from now on; who follows somebody stops that first."""
        replication = Replication(
            self._catalog, targets, anonymous, self._address, self._links, directory, only
        )
        self.replication, self._followed = replication, (targets, anonymous)
        self.task = asyncio.create_task(replication.run())
        return replication

    async def gather(
        self,
        claim: Claim,
        directory: str,
        answers: dict[str, Answer],
        force: bool,
        only: Mapping[int, Mapping[int, int]] | None,
        tables_lost: set[int],
    ) -> list[Lost]:
        """Follow a server that promised until what is lacking is here, durably, with the small tables.

        Args:
            only: the partitions that are lacking and how far, by bucket version; None for all that it has, its very buckets and all
                that changed in their tables.
            tables_lost: takes the versions of buckets whose tables it does not give, with ``force``.

        Returns: what it has and cannot give, with ``force``.

        Raises:
            UprError: NOT_HEARD, it does not give everything.
        """
        address = self._peers.addresses.get(directory, "")
        replication = self.replication
        goes_on = only is None and self._followed[0] == (address,) and self._follows(directory)
        if replication is None or not goes_on:
            await self.end()
            await self._cut_off_above(only or {}, force=force)
            replication = self.begin((address,), True, directory, only)
        matching = asyncio.create_task(replication.matched())
        answer, before, loop = answers[directory], None, asyncio.get_running_loop()
        versions = sorted({*answer.held, *self._inventory.now()} if only is None else only)
        try:
            while True:
                check_mine(self._catalog.standing.standing, claim)
                lacking = self._inventory.lacking(answer, versions, only)
                tables = only is not None or matching.done()
                tables = tables and self._inventory.has_tables(answer, versions)
                if tables and not lacking:
                    await self._inventory.is_whole_up_to(only or {})
                    return []
                now = lacking, tables, self._inventory.received()
                if now != before:
                    before, until = now, loop.time() + GATHER_SECONDS
                if loop.time() > until or (tables and self._inventory.is_refused(lacking)):
                    break
                await asyncio.sleep(GATHER_LOOK_SECONDS)
            why = replication.failure(lacking)
            why = why or self._inventory.why_not(lacking, self._address())
        finally:
            matching.cancel()
            if only is not None:
                await self.stop_taking()
        error = self._inventory.not_given(self._peers.named(directory), lacking, why)
        if not force:
            raise error
        log.warning("given up", extra={"what": str(error)})
        if not tables:
            tables_lost |= {v for v in versions if not self._inventory.has_tables(answer, [v])}
        return given_up(answer, lacking)

    async def _cut_off_above(self, parts: Mapping[int, Mapping[int, int]], *, force: bool) -> None:
        """Cut off what a promotion does not keep in partitions that another server continues: it may have less than that.

        Numbers of producers that ran ahead of their rows go too, or those of the other server would give way to them.
        """
        kept = self._inventory.now(as_copy=not force)
        for host in self._catalog.hosts:
            table, identity = host.bucket.partitions, host.bucket.identity
            ends = kept[identity.version]["marker"]
            followed = {p: table.logs[p] for p in parts.get(identity.version, ())}
            undo = {
                p: Undo(int(ends[p]), log, int(table.epoch[p]))
                for p, log in followed.items()
                if table.high[p] > ends[p] and table.state[p] != DEAD
            }
            if undo:
                host = await self._catalog.reopen(identity.name, undo)
            if followed:
                drop = functools.partial(host.disk.store.drop_ahead, followed, ends)
                await host.disk.in_store_thread(drop)

    async def stop_taking(self) -> None:
        """Follow nobody; what came is durable then, and counts where the tables came too."""
        for upstream_state in self._inventory.upstream_states.values():
            await upstream_state.end_join()
        await self.end()
        await self._catalog.settled()
        # Others claim only when this claim is over: it waits for no room.
        await asyncio.gather(*(durable(host, waits=False) for host in self._catalog.hosts))
