"""ReplicaService: what operators ask a server about its set, and what the servers of a set ask each other."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from upr.config import ServerConfig
from upr.replica.inventory import Promoted
from upr.replica.ownership import Ownership
from upr.replica.peers import held_to_messages, row_of_message, row_to_message
from upr.replica.set_status import Cluster, SetStatus
from upr.service.access.rules import PERMIT, RULES
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.keepers import finish_even_if_cancelled, lasting
from upr.service.overload.intake import Context
from upr.service.storage_trouble import PASSING, words_of
from upr_protocol.errors import StorageFailedError, TooManyError, UprError, shown
from upr_protocol.limits import SET_MEMBERS_MAX
from upr_protocol.ownership import Row, Served
from upr_protocol.wire.v1 import replica_service_pb2 as wire
from upr_protocol.wire.v1.types_pb2 import SetPart

log = logging.getLogger(__name__)
_TOPOLOGY = "/upr.v1.ReplicaService/GetTopology"
_CANCEL_SECONDS = 1.0
_CANCELS = 5
"""Times that a promotion is cancelled, as what it leaves undone may wait for a full disk; and the time for each. Then it is left."""
WORKS_MAX = 4 * SET_MEMBERS_MAX
"""Calls that are done to their end, also when the caller is gone: those of other servers come again and again while a disk hangs."""
_UNTOLD = "whoever has a role for all buckets is told why"
_T = TypeVar("_T")


class ReplicaMethods:
    """Methods of ReplicaService, and the tasks behind them."""

    def __init__(
        self,
        catalog: Catalog,
        config: ServerConfig,
        address: Callable[[], str],
        cluster: Cluster | None = None,
    ) -> None:
        self._catalog = catalog
        self._cluster = cluster
        self._ownership = Ownership(
            catalog, config, address, None if cluster is None else cluster.rows
        )
        self._set_status = SetStatus(self._ownership, catalog, cluster, config.min_copies)
        self._works: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        ownership = self._ownership
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lasting(ownership.run))
                tasks.create_task(lasting(self._set_status.run))
                if self._cluster is not None and ownership.fencing is not None:
                    tasks.create_task(lasting(ownership.fencing.run))
                    tasks.create_task(self._cluster.run(ownership))
        finally:
            await ownership.peers.close()

    async def end(self) -> None:
        """End what outlives its callers, and whom it follows: nothing may be claimed, or come, once the buckets are closed."""
        for _ in range(_CANCELS):
            for work in self._works:
                work.cancel()
            if self._works:
                await asyncio.wait(self._works, timeout=_CANCEL_SECONDS)
        await self._ownership.following.end()
        await self._ownership.peers.close()

    async def _whole(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do it to its end, also when the caller is gone: half a change of owner is none.

        Raises:
            TooManyError: there are WORKS_MAX already.
        """
        if len(self._works) >= WORKS_MAX:
            work.close()
            raise TooManyError(
                f"calls that wait for this server's part in its set are {len(self._works)}; must be below {WORKS_MAX}",
                hint="its disk does not end what was begun: mend that, or restart the server",
            )
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        try:
            return await finish_even_if_cancelled(task)
        except PASSING as error:
            raise StorageFailedError(words_of(error), retriable=True) from error

    @property
    def serves(self) -> bool:
        """Whether this server is active, or a replica that is in step."""
        ownership, own = self._ownership, self._ownership.standing.directory
        if ownership.active:
            return self._catalog.may_serve()
        return ownership.has_all and ownership.standing.row.owner != own

    @property
    def part(self) -> SetPart:
        return self._set_status.part

    @property
    def waiting(self) -> str:
        """What it waits for, in words; empty when for nothing."""
        ownership = self._ownership
        return (
            ownership.waiting or self._set_status.waiting or str(ownership.following.problem or "")
        )

    @property
    def troubles(self) -> Mapping[str, UprError | None]:
        """What is wrong with that part, by kind; None where nothing is."""
        return self._set_status.troubles

    def _check_set(self, replica_set: str) -> None:
        own = self._catalog.replica_set
        if not own or replica_set != own:
            raise UprError(
                f"the set of servers is {shown(replica_set)}; must be {own!r}",
                reason="WRONG_REPLICA_SET",
                hint="a server of another set is at this address",
                # One that has not joined yet may do so in a moment.
                retriable=not own,
            )

    async def GetTopology(
        self, request: wire.GetTopologyRequest, context: Context
    ) -> wire.GetTopologyResponse:
        return self.topology(PERMIT.get().identity.may_everywhere(RULES[_TOPOLOGY].roles))

    def topology(self, told_why: bool) -> wire.GetTopologyResponse:
        """Return it as a message; without ``told_why`` not what it waits for: the words may name any bucket."""
        ownership, peers = self._ownership, self._ownership.peers
        standing = ownership.standing
        return wire.GetTopologyResponse(
            replica_set=self._catalog.replica_set,
            directory=standing.directory,
            active=ownership.active,
            row=row_to_message(standing.row),
            promised=standing.promised,
            members=[self._status(member) for member in peers.members],
            waiting=self.waiting if told_why else self.waiting and _UNTOLD,
            candidate=standing.candidate,
            claiming=self._is_claiming(standing.candidate),
            part=self.part,
        )

    def _is_claiming(self, directory: str) -> bool:
        """Return whether a server was about to become the active one when it was last met."""
        ownership, met = self._ownership, self._ownership.peers.met.get(directory)
        if directory == ownership.standing.directory:
            return ownership.claiming
        return met is not None and met.claiming

    def _status(self, member: wire.SetMember) -> wire.MemberStatus:
        ownership, cluster, fencing = self._ownership, self._cluster, self._ownership.fencing
        told = wire.MemberStatus(member=member, claiming=self._is_claiming(member.directory))
        if cluster is not None and fencing is not None:
            told.has_key = cluster.has_key(member.directory)
            if ownership.active and member.directory in ownership.standing.row.counted:
                told.grant_seconds = fencing.granted_seconds(member.directory)
        if member.directory == ownership.standing.directory:
            lag = sum(one.lag() for one in ownership.inventory.upstream_states.values())
            told.reached, told.in_step = True, ownership.in_step
            told.lag, told.epoch = 0 if ownership.active else lag, ownership.standing.epoch
            told.drained = ownership.drained
            return told
        met = ownership.peers.met.get(member.directory)
        if met is None:
            return told
        lag = 0
        for version, mine in ownership.inventory.now().items():
            if version in met.held:
                theirs = np.minimum(met.held[version]["high"], mine["high"])
                lag += int((mine["high"] - theirs).sum())
        told.reached, told.in_step, told.epoch = True, met.in_step, met.epoch
        told.lag = lag if ownership.active else 0
        told.drained = met.drained
        return told

    async def Promote(self, request: wire.PromoteRequest, context: Context) -> wire.PromoteResponse:
        end = await self._whole(self._promoted(force=request.force, takeover=request.takeover))
        addresses = self._ownership.peers.addresses
        return wire.PromoteResponse(
            row=row_to_message(end.row),
            records=end.records,
            without=[
                wire.SetMember(directory=d, address=addresses.get(d, ""))
                for d in sorted(end.without)
            ],
            lost=[
                wire.LostRange(bucket=bucket, partition=p, seqno=here, high_seqno=there)
                for bucket, p, here, there in end.lost
            ],
            tables=end.tables,
        )

    async def _promoted(self, *, force: bool, takeover: bool) -> Promoted:
        was_drained = self._ownership.drained
        if was_drained and not force:
            raise UprError(
                "this server is drained, so it does not become active",
                reason="DRAINED",
                hint="'upr-admin drain --undo' ends that, and so does a restart",
            )
        if self._cluster is not None and not takeover:
            await self._cluster.begin(self._ownership, force=force)
        done = await self._ownership.promote(force=force, takeover=takeover)
        if was_drained:
            # By force. A drain that came meanwhile stays, and a promotion that failed leaves it as it was.
            self._ownership.drained = False
            log.warning("drain", extra={"undo": True})
        return done

    async def Drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainResponse:
        """Become active no more, or perhaps again; return who is to be instead."""
        ownership, successor = self._ownership, None
        if not request.undo:
            self._check_not_waiting()
            successor = self._successor() if ownership.active else None
        if ownership.drained is request.undo:
            ownership.drained = not request.undo
            log.warning("drain", extra={"undo": request.undo})
        return wire.DrainResponse(successor=successor)

    def _successor(self) -> wire.SetMember:
        """Return the counted server that is in step and lacks least."""
        counted = self._ownership.standing.row.counted
        found = [
            one
            for one in map(self._status, self._ownership.peers.members)
            if one.member.directory in counted and one.in_step and not one.drained
        ]
        others = [one for one in found if one.member.directory != self._catalog.directory_id]
        if not others:
            raise UprError(
                "no counted server is reached and in step, so none can be active instead",
                reason="NO_SUCCESSOR",
                hint="'upr-admin topology' shows what they lack, and which of them are drained too",
                retriable=True,
            )
        return min(others, key=lambda one: (one.lag, one.member.directory)).member

    def _check_not_waiting(self) -> None:
        """Raise while this server owns and waits for the others before it serves."""
        if not self._ownership.active and self._ownership.standing.owns:
            raise UprError(
                f"this server is not active yet: {self._ownership.waiting or 'it asks the others'}",
                reason="NOT_HEARD",
                hint="'upr-admin promote --force' here goes on without counted servers that will not come back",
                retriable=True,
            )

    async def ForgetServer(
        self, request: wire.ForgetServerRequest, context: Context
    ) -> wire.ForgetServerResponse:
        self._check_not_waiting()
        self._catalog.check_active()
        member = self._ownership.peers.find(request.server)
        row = await self._whole(self._ownership.counted_replicas.forget(member.directory))
        return wire.ForgetServerResponse(member=member, row=row_to_message(row))

    async def Meet(self, request: wire.MeetRequest, context: Context) -> wire.MeetResponse:
        self._check_set(request.replica_set)
        ownership = self._ownership
        if not request.member.directory:
            return wire.MeetResponse(member=ownership.peers.member)
        await ownership.peers.check_only(request.member)
        ownership.peers.heard(request.member)
        ownership.peers.heard_of(request.members)
        await self._whole(ownership.learned(row_of_message(request.row), request.epoch))
        standing = ownership.standing
        return wire.MeetResponse(
            member=ownership.peers.member,
            row=row_to_message(standing.row),
            epoch=standing.epoch,
            in_step=ownership.in_step,
            held=held_to_messages(ownership.inventory.to_give()),
            members=ownership.peers.members_to_tell(standing),
            claiming=ownership.claiming,
            drained=ownership.drained,
        )

    async def Promise(self, request: wire.PromiseRequest, context: Context) -> wire.PromiseResponse:
        self._check_set(request.replica_set)
        ownership = self._ownership
        await ownership.peers.check_only(request.candidate)
        ownership.peers.heard(request.candidate)
        previous = Served(request.previous_directory, request.previous_epoch)
        directory = request.candidate.directory
        claim = Row(request.epoch, 0, directory, False, frozenset(), previous)
        promising = ownership.promise(request.epoch, directory, claim, released=request.released)
        answer = await self._whole(promising)
        standing = ownership.standing
        return wire.PromiseResponse(
            member=ownership.peers.member,
            promised=answer is not None,
            row=row_to_message(standing.row if answer is None else answer.row),
            epoch=standing.epoch,
            confirmed=answer is not None and answer.confirmed,
            held=[] if answer is None else held_to_messages(answer.held, answer.changes),
        )

    async def Grant(self, request: wire.GrantRequest, context: Context) -> wire.GrantResponse:
        """Promise nothing to others for a while; a server without a cluster grants nothing."""
        self._check_set(request.replica_set)
        await self._ownership.peers.check_only(request.owner)
        fencing = self._ownership.fencing
        if fencing is None:
            raise UprError(
                "--cluster is not given at this server; must be that of the other servers, so it grants nothing",
                reason="NOT_IN_CLUSTER",
                hint="restart it with --cluster, and without --replicate-from",
            )
        granted = fencing.give(request.epoch, request.owner.directory)
        return wire.GrantResponse(member=self._ownership.peers.member, granted=granted)
