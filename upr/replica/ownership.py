"""Ownership: what one server does so that its set has one active server; it drives ``upr_protocol.ownership``.

The servers of a set meet every MEET_SECONDS: each tells the newest row that it knows, and learns the newer one. Who is
active counts its replicas that way, and steps down when it meets a higher epoch. Who is not active follows the owner.
A server that was the owner when it was stopped asks the others before it serves again.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import numpy as np

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE, DEAD
from upr.engine.recovery import Undo
from upr.replica.counted_replicas import CountedReplicas, check_owns
from upr.replica.fencing import ClaimedTooError, Fencing, Rows, check_seen, is_released
from upr.replica.following import Following, check_mine
from upr.replica.inventory import (
    Inventory,
    Lost,
    Promoted,
    by_version,
    durable,
    in_one_order,
)
from upr.replica.links import Links
from upr.replica.peers import MEET_SECONDS, Answer, Peers
from upr.service.buckets.catalog import Catalog
from upr.service.storage_trouble import PASSING, words_of
from upr.storage.directory import Stored
from upr_protocol.errors import (
    BucketGoneError,
    BucketNotFoundError,
    DataDamagedError,
    StorageFailedError,
    UprError,
    shown,
)
from upr_protocol.limits import PARTITIONS, SERVERS_MAX
from upr_protocol.ownership import (
    Ask,
    Claim,
    Follow,
    Outdated,
    Promise,
    Row,
    Serve,
    Standing,
)

log = logging.getLogger(__name__)

RESUME_SECONDS = 3.0
"""Shortest time between two attempts to take the ownership back."""
CLAIMS_MAX = 5
"""Claims of one promotion: each is above the epoch that ended the one before it."""


class Ownership:
    """Part of one server in the ownership of its set.

    Args:
        address: returns HOST:PORT where this server can be reached.
        rows: where the row of a cluster is changed by one at a time; None without one, as ``fencing`` is then.

    Attributes:
        drained: whether it is not to become active, until it is restarted.
        joins: directory and address of the server that one of no set is to follow, as the map of its cluster says.
    """

    def __init__(
        self,
        catalog: Catalog,
        config: ServerConfig,
        address: Callable[[], str],
        rows: Rows | None = None,
    ) -> None:
        self._catalog = catalog
        self._config = config
        self._address = address
        links = Links(config.peer_ca, config.tls_cert, config.tls_key, config.peer_token)
        self.peers = Peers(
            catalog, address, links, meets=config.meets, upstreams=config.replicate_from
        )
        self.inventory = Inventory(catalog)
        self.following = Following(catalog, address, links, self.peers, self.inventory)
        self.fencing = None if rows is None else Fencing(rows, catalog, self.peers)
        catalog.servers = self._servers
        catalog.is_newest = self._is_newest
        catalog.check_only = self.peers.check_only
        self._fences = 0
        self._is_stepping_down = False
        self.active = not catalog.replica
        self.waiting = self._waits_for = ""
        self.drained = False
        self.joins = ("", "")
        self._claiming = asyncio.Lock()
        # Held while buckets change their role: a promise waits for an activation, and sees it.
        self._changing = asyncio.Lock()
        self._storing = asyncio.Lock()
        self._took_back_at = -RESUME_SECONDS
        self._paused = False
        self.counted_replicas = CountedReplicas(catalog, self.peers, self.fencing, self.store)
        if self.active:
            self.inventory.serving = self.standing.row.epoch
            self.counted_replicas.note_floor()
            if self.fencing is not None:
                self.fencing.begin(self.standing.row, resumed=True)
        self._tell_owner()

    @property
    def standing(self) -> Standing:
        return self._catalog.standing.standing

    @property
    def in_step(self) -> bool:
        """Whether it has all, and could take what is written; the owner can, for as long as it is that."""
        return self.has_all and (self._is_owner or self.inventory.unfit is None)

    @property
    def _is_owner(self) -> bool:
        return self.active or self.standing.row.owner == self.standing.directory

    @property
    def has_all(self) -> bool:
        """Whether it has every bucket that was listed last, which may be none, and its small tables are whole in each;
        those of the owner are its own, also after a restart. One that can store nothing more has not.
        """
        if self.inventory.failure is not None:
            return False
        if self._is_owner:
            return True
        hosts, listed = self._catalog.hosts, self._catalog.listed
        has_all = listed is not None and listed <= {h.bucket.identity.version for h in hosts}
        return has_all and all(
            h.upstream_state is not None and h.upstream_state.in_step for h in hosts
        )

    @property
    def claiming(self) -> bool:
        """Whether it is about to become the active one."""
        return self._claiming.locked()

    def _servers(self) -> list[str]:
        """Return HOST:PORT of the servers of the set, for clients, as many as they keep; none of one that is alone."""
        known, first = self.peers.addresses, filter(None, [self._catalog.owner, self._address()])
        return list(dict.fromkeys((*first, *known.values())))[:SERVERS_MAX] if known else []

    def _is_newest(self) -> bool:
        """Return whether each other counted server was met lately: who became active since did so a moment ago, or by force."""
        others = self.standing.row.counted - {self.standing.directory}
        return self.active and self.peers.met_lately(others)

    # Knowing

    async def store(self, change: Callable[[Standing], Standing | None]) -> Standing | None:
        """Change what is stored, durably; None when the change is refused."""
        async with self._storing:
            after = change(self.standing)
            if after is not None:
                self.counted_replicas.known &= after.row.counted
                addresses = dict(self.peers.addresses)
                stored = Stored(after, addresses, self.counted_replicas.known)
                if stored != self._catalog.standing:
                    await self._catalog.keep_standing(stored)
        if after is not None:
            self._tell_owner()
        return after

    def _tell_owner(self) -> None:
        if self.active:
            owner = ""
        elif self._paused and self._owner == self.standing.directory:
            # It claims: clients stay.
            owner = self._address()
        else:
            owner = self.owner_address()
        self._catalog.owner = owner
        for host in self._catalog.hosts:
            host.bucket.partitions.owner = owner

    def owner_address(self) -> str:
        """Return HOST:PORT of the active server, or of the one that is about to be; empty if none is known, or it is this."""
        return self.peers.addresses.get(self._owner, "")

    @property
    def _owner(self) -> str:
        standing = self.standing
        changing = standing.promised > standing.row.epoch
        return standing.candidate if changing else standing.row.owner

    async def learned(self, row: Row, epoch: int) -> None:
        """Learn what another server knows, and step down if another one may be active.

        It may have the same directory: a row of this one, in an epoch that it did not claim, is of a server that runs from
        a copy.
        """

        def change(standing: Standing) -> Standing:
            after = standing.learned(row)
            # An owner owns no more; a replica goes on until it is asked itself.
            return after.met(epoch) if after.owns else after

        def gives_way(standing: Standing) -> bool:
            another = standing.row.epoch > self.inventory.serving
            return self.active and (another or not standing.owns)

        after = change(self.standing)
        fences = gives_way(after)
        try:
            if fences:
                # Before it is stored, which takes a while.
                self._fence(+1)
            if after != self.standing:
                await self.store(change)
        finally:
            # It may have become the owner of that very epoch meanwhile.
            steps_down = gives_way(change(self.standing))
            if fences:
                self._fence(-1, keeps=steps_down)
            if steps_down:
                log.warning(
                    "a higher epoch was met: this server steps down", extra={"epoch": epoch}
                )
                await self.step_down(fenced=True)

    def _fence(self, change: int, *, keeps: bool = False) -> None:
        """Count who fences the buckets, and lift that with the last one."""
        self._fences += change
        if self.active and not keeps:
            for host in self._catalog.hosts:
                host.fence(on=self._fences > 0)

    async def step_down(self, *, fenced: bool) -> None:
        """Take no more writes; what is numbered is on disk when this returns. See ``BucketService.step_down``."""
        # Whoever owns next may count others.
        self.counted_replicas.known = frozenset()
        if fenced and self.fencing is not None:
            self.fencing.end()
        hosts = self._catalog.hosts
        # Of buckets that were to become active together, some may be.
        actives = self.active or any((h.bucket.partitions.state == ACTIVE).any() for h in hosts)
        if not (actives or self._is_stepping_down):
            return
        # Until all of it is stored: if that fails, the next call, or round, does it again.
        self._is_stepping_down = True
        self.active, self._catalog.replica = False, True
        self._tell_owner()
        await asyncio.gather(*(host.step_down(fenced=fenced) for host in hosts))
        await self._catalog.settled()
        late = [host for host in self._catalog.hosts if host not in hosts]
        await asyncio.gather(*(host.step_down(fenced=fenced) for host in late))
        self._is_stepping_down = False
        if self.fencing is not None:
            self.fencing.end()

    # Following

    async def _follow_owner(self) -> None:
        """Follow the owner, unless this server owns or promised; before one is known, what the command line says."""
        standing = self.standing
        if self.active or self._paused or standing.owns:
            return
        if standing.promised > standing.row.epoch:
            return
        owner, address = standing.row.owner, self.owner_address()
        if self.fencing is not None and not (self._catalog.replica_set and standing.row.epoch):
            owner, address = self.joins
        targets: tuple[str, ...] = (address,) if address else ()
        if not standing.row.epoch and self.fencing is None:
            targets = self._config.replicate_from
        anonymous = self._config.anonymous
        if self.following.goes_on(targets, anonymous, owner):
            return
        await self.following.end()
        # What is awaited may have let in a promise or a promotion.
        if targets and self.standing == standing and not (self.active or self._paused):
            self.following.begin(targets, anonymous, owner)

    # Promising

    async def promise(
        self,
        epoch: int,
        candidate: str,
        claim: Row,
        *,
        force: bool = False,
        released: bool = False,
    ) -> Answer | None:
        """Promise an epoch to a candidate; None when it cannot be promised.

        Everything is durable before this returns: the promise, the states, and what was numbered here. In a cluster it
        waits until no grant holds that was given, unless the server that served last has promised.

        Args:
            force: whether an operator goes on without the buckets that are damaged here.
            released: whether that server has promised.

        Raises:
            UprError: a bucket is damaged; nobody can tell what only this server has of it.
        """
        if self.standing.promise(epoch, candidate) is None:
            return None
        async with (
            contextlib.nullcontext()
            if self.fencing is None
            else self.fencing.freed(epoch, released),
            self._changing,
        ):
            await self._catalog.settled()
            self._check_whole(force=force)
            known = self.standing.row
            after = await self.store(lambda standing: standing.promise(epoch, candidate))
            if after is None:
                return None
            if candidate != after.directory:
                # The candidate goes on taking what the former owner has until it gathers, or serves.
                await self.following.end()
            await self.step_down(fenced=False)
            await self._settle(force=force, gives=candidate != after.directory)
            changes = {h.bucket.identity.version: h.table_changes for h in self._catalog.hosts}
            return Answer(
                known,
                self.inventory.now(as_copy=True),
                after.confirms(claim, self.inventory.served()),
                changes,
            )

    async def _settle(self, *, force: bool, gives: bool) -> None:
        """Wait until everything that was numbered or begun here is durable, in all buckets.

        What a replica's full disk keeps from that was acknowledged nowhere for it: nobody waits for its room.

        Args:
            gives: whether another server is to be active.
        """
        # Who served last may confirm that nothing is missing.
        waits = self.inventory.served() > 0
        while True:
            # A bucket that was being made or opened anew is promised too.
            await self._catalog.settled()
            self._check_whole(force=force)
            hosts = self._catalog.hosts
            found = [
                *await asyncio.gather(
                    *(durable(host, waits=waits) for host in hosts), return_exceptions=True
                ),
                *await asyncio.gather(
                    *(host.settle_tables() for host in hosts), return_exceptions=True
                ),
            ]
            if hosts == self._catalog.hosts:
                break
            # A candidate goes on following meanwhile, and may drop a bucket or open it anew.
        for host, error in zip(hosts * 2, found, strict=True):
            # What cannot be stored any more is not confirmed either.
            goes_on = gives and not waits and host.bucket.stalled
            if error is not None and host.bucket.failure is None and not goes_on:
                raise error

    def _check_whole(self, *, force: bool) -> None:
        if self._catalog.damaged and not force:
            raise DataDamagedError(
                f"bucket {shown(self._catalog.damaged[0].name)} is damaged here",
                hint="restore it, promote another server, or use --force to go on without it",
            )

    # Promoting

    async def promote(
        self, *, force: bool = False, takeover: bool = False, seen: Row | None = None
    ) -> Promoted:
        """Make this server the active one.

        Args:
            seen: in a cluster, the row for which it is this server's turn: none that came since is claimed, as its owner is
                not gone. None for whatever is there, as an operator orders.

        Raises:
            UprError: it cannot be; NOT_JOINED, NOT_IN_STEP, NOT_COUNTED, NOT_HEARD, NOT_CONFIRMED with the way out.
        """
        async with self._claiming:
            if self.active and not force:
                return Promoted(self.standing.row)
            self.peers.check_taken(force=force)
            if not (self.active or self._catalog.replica_set):
                way = "; without --replicate-from it is the first of a new set"
                first = way if self.fencing is None else ""
                # Also by force: consumers of the set would take its lack of buckets for their end.
                raise UprError(
                    "this server has joined no set of servers yet, so there is nothing that it could serve",
                    reason="NOT_JOINED",
                    hint=f"promote another one, or wait until this one has joined{first}",
                )
            self.inventory.check_stores()
            basis = None if self.fencing is None else await self.fencing.basis(force=force)
            check_seen(seen, basis)
            # Nobody else may become active then, and only what is whole is kept.
            claimed = self._has_claimed(self.standing.row if basis is None else basis)
            if not (self.has_all or self.inventory.is_whole or claimed or force):
                raise _not_in_step()
            unfit = self.inventory.unfit
            if takeover and not (force or self._is_owner) and unfit is not None:
                # The owner can go on.
                raise unfit
            self.standing.claim(force=force, basis=basis)
            self._paused = True
            becoming = self._catalog.becoming = asyncio.Event()
            try:
                if not force:
                    await self._check_reached(takeover=takeover, claimed=claimed)
                return await self._claim(force=force, takeover=takeover, seen=seen)
            except PASSING as error:
                raise self._given_up(StorageFailedError(words_of(error))) from error
            except UprError as error:
                raise self._given_up(error) from None
            finally:
                self._paused = False
                self._tell_owner()
                self._catalog.becoming = None
                becoming.set()

    def _has_claimed(self, row: Row) -> bool:
        """Return whether a claim of this server's, by which it did not become active, keeps others from claiming.

        Args:
            row: the newest that is known.
        """
        standing = self.standing
        own = standing.promised > row.epoch and standing.candidate == standing.directory
        return own or (row.owner == standing.directory and not row.serving)

    def _given_up(self, error: UprError) -> UprError:
        """Return an error that ended a promotion, with words on what that left behind."""
        standing, row = self.standing, self.standing.row
        # Another candidate is about to be active.
        if standing.promised > row.epoch and standing.candidate in ("", standing.directory):
            former = "" if row.owner in ("", standing.directory) else self.peers.named(row.owner)
            back = f"{former}, if it runs, becomes active again by itself; else " if former else ""
            words = f"nobody may be active now: {back}'upr-admin promote' ends that"
            error.hint = "; ".join(filter(None, (error.hint, words)))
        return error

    async def _check_reached(self, *, takeover: bool, claimed: bool) -> None:
        """Raise before anything is changed, if somebody who must be heard cannot be."""
        row = self.standing.row
        joins = self.inventory.is_joining and not (self.has_all or claimed)
        # In a cluster a server that was stopped is one that answers late.
        asked = {row.owner} if takeover or joins or self.fencing is None else set()
        reached = await self.peers.reach(row.counted | asked)
        await asyncio.gather(*(self.learned(one.row, one.epoch) for one in reached.values()))
        row = self.standing.row
        missing = row.counted - set(reached) - {self.standing.directory}
        if missing:
            raise self.peers.not_heard(missing)
        if joins and row.owner in reached:
            # It is to give everything, and writers would wait for the whole join.
            raise _not_in_step()
        if takeover and row.owner not in reached and row.owner != self.standing.directory:
            raise UprError(
                f"the active server {self.peers.named(row.owner)} cannot be reached",
                reason="NOT_CONFIRMED",
                hint="'upr-admin promote' goes on without it",
            )

    async def _claim(self, *, force: bool, takeover: bool, seen: Row | None) -> Promoted:
        # A server that never heard of a row knows the epochs of what it has.
        epochs = [int(host.bucket.partitions.epoch.max()) for host in self._catalog.hosts]
        above = max(epochs, default=0)
        for _ in range(CLAIMS_MAX):
            basis = self.standing.row
            if self.fencing is not None:
                basis = await self.fencing.basis(force=force)
                check_seen(seen, basis)
            row = self.standing.claim(above=above, force=force, basis=basis)
            known = self.inventory.known_highs()
            me, claim = self.standing.directory, Claim(basis, row)
            if self.fencing is not None and not await self.fencing.rows.swap(basis, row):
                continue
            seen = seen and row
            answers = dict[str, Answer]()
            if self.fencing is not None:
                answers = await self.fencing.ask_previous(claim, takeover=takeover)
            released = is_released(row, answers)
            own = await self.promise(row.epoch, me, row, force=force, released=released)
            failpoints.hit("promote.after_claim")
            if own is not None:
                end = await self._drive(claim, {**answers, me: own}, force, takeover)
                if isinstance(end, Promoted):
                    end.lost = self.inventory.lost(known, end.lost)
                    return end
                await self.store(lambda standing, newer=end.row: standing.learned(newer))  # type: ignore[misc]
                above = end.epoch
        raise ClaimedTooError

    async def _drive(
        self, claim: Claim, answers: dict[str, Answer], force: bool, takeover: bool
    ) -> "Promoted | Outdated":
        """Do what a claim says, until it serves or is outdated."""
        me, asked, handed_over = self.standing.directory, False, False
        previous = claim.row.previous
        last = "" if previous is None else previous.directory
        lost, tables = list[Lost](), set[int]()
        gone = await self._drop_gone()
        while True:
            check_mine(self.standing, claim)
            for answer in answers.values():
                for version in gone & answer.held.keys():
                    del answer.held[version]
            # Of buckets that the former owner has not, if it confirms, nothing is taken: they were dropped.
            sure = claim.confirmer in answers and answers[last].confirmed
            told = [answers[last]] if sure else answers.values()
            versions = sorted(
                {v for answer in told for v in answer.held} | set(self.inventory.now())
            )
            for directory, answer in answers.items():
                held = in_one_order(answer.held, versions)
                claim.promised(Promise(directory, answer.row, held, answer.confirmed))
            mine = self.inventory.now(as_copy=not force)
            step = claim.next(in_one_order(mine, versions))
            if isinstance(step, Outdated):
                return step
            if isinstance(step, Ask):
                if asked and force:
                    claim.give_up(claim.missing)
                elif asked:
                    raise self.peers.not_heard(claim.missing)
                asked = bool(claim.missing)
                claim.asked(step.directories)
                others, released = step.directories - {me}, is_released(claim.row, answers)
                outcomes = await self.peers.ask_promises(claim.row, others, released=released)
                for directory, outcome in outcomes.items():
                    if isinstance(outcome, Outdated):
                        return outcome
                    answers[directory] = outcome
                failpoints.hit("promote.after_promises")
            elif (
                takeover
                and previous is not None
                and not (claim.confirmed or (last in answers and self.peers.has_failed(last)))
            ):
                raise UprError(
                    f"{self.peers.named(last)} does not confirm that nothing is missing",
                    reason="NOT_CONFIRMED",
                    hint="'upr-admin promote' goes on without it",
                )
            elif sure and last != me and not handed_over:
                handed_over = True
                lost += await self.following.gather(claim, last, answers, force, None, tables)
            elif self.following.task is not None:
                await self.following.stop_taking()
            elif isinstance(step, Follow):
                only = by_version(step, versions)
                lost += await self.following.gather(
                    claim, step.directory, answers, force, only, tables
                )
            else:
                if force:
                    tables |= self.inventory.out_of_step()
                end = await self._serve(claim, step, versions)
                end.lost = self.inventory.short_of(lost)
                end.tables = sorted(map(self.inventory.named, tables))
                return end

    async def _drop_gone(self) -> set[int]:
        """Drop the buckets that are known to be dropped, and return the versions of all such: nobody could take one from who missed
        that, where another one has its name by now.
        """
        gone = set(self._catalog.gone)
        if self.fencing is not None:
            gone.update(self.fencing.rows.dropped)
        for version, name in self._catalog.versions.items():
            if version in gone:
                with contextlib.suppress(BucketNotFoundError, BucketGoneError):
                    await self._catalog.drop(name, version)
        return gone

    async def _serve(self, claim: Claim, step: Serve, versions: list[int]) -> Promoted:
        """Store that this server serves, then the records, then be active."""
        given_up = claim.row.counted - step.row.counted
        if self.fencing is not None and not await self.fencing.rows.swap(claim.row, step.row):
            raise ClaimedTooError
        async with self._becoming_active():
            await self.store(lambda standing: standing.learned(step.row))
            failpoints.hit("promote.after_row")
            self.inventory.check_stores()
            check_owns(self.standing)
            await self._catalog.match()
            held = in_one_order(self.inventory.now(), versions)
            cut_off = step.cut_off(held)
            for host in self._catalog.hosts:
                version = host.bucket.identity.version
                if version not in versions:
                    # It was made just now.
                    await host.activate(step.row.epoch, {})
                    continue
                at = versions.index(version) * PARTITIONS
                part = slice(at, at + PARTITIONS)
                markers = step.marker[part].tolist()
                alive = host.bucket.partitions.state != DEAD
                above = np.flatnonzero(cut_off[part] & alive).tolist()
                if above:
                    logs = host.bucket.partitions.logs
                    undo = {p: Undo(markers[p], logs[p], step.row.epoch) for p in above}
                    host = await self._catalog.reopen(host.bucket.identity.name, undo)
                    markers = np.minimum(step.marker[part], host.bucket.partitions.high).tolist()
                records = np.flatnonzero(step.record[part] & alive).tolist()
                await host.activate(step.row.epoch, {p: markers[p] for p in records})
            await self._begin_to_serve()
        return Promoted(step.row, int(step.record.sum()), given_up)

    @contextlib.asynccontextmanager
    async def _becoming_active(self) -> AsyncIterator[None]:
        """Let the body make the buckets active: all of them, or none when it raises."""
        async with self._changing:
            try:
                yield
            except BaseException as error:
                self.inventory.serves_not(error)
                await self.step_down(fenced=True)
                raise

    async def _begin_to_serve(self, *, resumed: bool = False) -> None:
        """Be active: the buckets are. A higher epoch that was met while they became so ends it at once."""
        self.active, self._catalog.replica = True, False
        self.inventory.serves(self.standing.row.epoch)
        self._wait_for(None)
        self._catalog.listed = None
        if self.fencing is not None:
            self.fencing.begin(self.standing.row, resumed=resumed)
        self._tell_owner()
        self.counted_replicas.note_floor()
        if not self.standing.owns:
            await self.step_down(fenced=True)
        self.inventory.check_stores()
        check_owns(self.standing)
        log.warning("this server is active", extra={"epoch": self.standing.row.epoch})

    # Meeting

    async def run(self) -> None:
        """Meet the others, follow or serve, until cancelled."""
        try:
            while True:
                try:
                    await self._round()
                except (UprError, *PASSING) as error:
                    self._wait_for(error)
                else:
                    # What ended an attempt to take the ownership back goes on until the next one.
                    if self.active or not self._has_just_tried:
                        self._wait_for(None)
                await asyncio.sleep(MEET_SECONDS)
        finally:
            await self.following.end()

    def _wait_for(self, error: Exception | None) -> None:
        """Remember what it waits for; the log has it once for each reason, as the words vary."""
        reason = error.reason if isinstance(error, UprError) else type(error).__name__
        before, self._waits_for = self._waits_for, "" if error is None else reason
        self.waiting = "" if error is None else str(error) or words_of(error)
        if self._waits_for not in ("", before):
            told = {"active": self.active, "waiting": self.waiting}
            log.warning("this server waits", extra=told)
        elif before and error is None:
            log.info("this server waits no more", extra={"active": self.active})

    @property
    def _has_just_tried(self) -> bool:
        return asyncio.get_running_loop().time() - self._took_back_at < RESUME_SECONDS

    async def _round(self) -> None:
        if self._paused:
            return
        await self._follow_owner()
        promised = self.standing.promised
        if self.active:
            # One that stands still holds a meeting up: who follows by now counts before.
            await self.counted_replicas.count_copies()
        await self.peers.meet_all(self.standing)
        for one in list(self.peers.met.values()):
            await self.learned(one.row, one.epoch)
        if self.peers.same_directory is not None:
            # Either may be the copy; who is refused lacks what the others acknowledge to the one that they take.
            await self.step_down(fenced=True)
            raise self.peers.same_directory
        # One that was the owner should undo soon: until then its rows are merged with those that it must undo.
        await self._follow_owner()
        # Only then: while nothing can be stored, the rest of the round has to go on.
        if self.peers.addresses != dict(self._catalog.standing.addresses):
            await self.store(lambda standing: standing)
        if self._is_stepping_down:
            if self._changing.locked():
                # What it waited for would become active half stepped down, and step down with the next round.
                return
            async with self._changing:
                await self.step_down(fenced=True)
        if self.active and not self.standing.owns:
            await self.step_down(fenced=True)
        elif self.active:
            await self.counted_replicas.count()
        elif self.standing.owns and not self._paused:
            await self._resume()
        elif self._is_left_alone(promised) and not self._paused:
            if not self.waiting:
                log.warning("the change of owner was given up: this server takes it back")
            await self._take_back()

    async def _resume(self) -> None:
        """Serve again after a restart, when those that are counted let it."""
        standing, upstreams = self.standing, self._config.replicate_from
        if upstreams and standing.row.epoch == 1:
            raise UprError(
                f"this server is the first active one of its set, and is told to follow {', '.join(upstreams)}; nobody is"
                " known to be promoted since",
                hint="start it without --replicate-from, or promote another one, which it follows by itself",
            )
        others = standing.row.counted - {standing.directory}
        met = others & self.peers.met.keys()
        if self.inventory.served() == standing.row.epoch and (met or not others):
            # One that promised nothing higher is enough: nobody was promoted without it.
            async with self._becoming_active():
                if self.standing != standing or self.active or self._paused:
                    return
                for host in self._catalog.hosts:
                    await host.activate(standing.row.epoch, {})
                await self._begin_to_serve(resumed=True)
            return
        if missing := others - met:
            raise self.peers.not_heard(missing)
        if standing.row.epoch == 1 and not others and self.fencing is None:
            # A first owner that was a replica since, and knows no other server.
            raise UprError(
                "the partitions here are a replica's, and nobody knows whether something is missing",
                hint="start it with --replicate-from, as before; or 'upr-admin promote --force' makes it active as it is",
            )
        if not (self.inventory.cannot_serve and self._has_just_tried):
            await self._take_back()

    async def _take_back(self) -> None:
        """Be active again, but in a cluster not in the place of another server that became active meanwhile."""
        self._took_back_at = asyncio.get_running_loop().time()
        seen = None if self.fencing is None else await self.fencing.basis(force=False)
        if seen is not None and seen.serving and seen.owner != self.standing.directory:
            raise ClaimedTooError
        await self.promote(seen=seen)

    def _is_left_alone(self, promised: int) -> bool:
        """Whether this server served last, gave way to one that is not about to serve any more, and may take it back.

        Args:
            promised: before the others were met.
        """
        standing, met = self.standing, self.peers.met
        row, candidate = standing.row, standing.candidate
        gave_way = row.owner == standing.directory and row.serving and promised > row.epoch
        claiming = self.claiming or any(one.claiming for one in met.values())
        if claiming or self.inventory.failure or not gave_way or standing.promised != promised:
            return False
        # One that is not heard may serve by force, and what it acknowledged would be undone.
        doubtful = {candidate} if candidate else {one.directory for one in self.peers.members}
        heard = doubtful <= met.keys() | {standing.directory}
        return heard and not self._has_just_tried


def _not_in_step() -> UprError:
    return UprError(
        "this server is not in step, so producers' numbers and positions may be missing",
        reason="NOT_IN_STEP",
        hint="promote another one that 'upr-admin topology' shows in step; or 'upr-admin promote --force' goes on"
        " without them",
    )
