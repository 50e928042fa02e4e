"""Peers: the other servers of a set, the calls to them, and what it learned of each.

A server is called where it said that it can be reached: in its Follow call, or in a call of this kind.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np

from upr.replica.links import Channels, Links
from upr.service.buckets.catalog import Catalog
from upr.storage.directory import HEX_ID
from upr_protocol.errors import (
    InvalidArgumentError,
    ProtocolError,
    UnavailableError,
    UprError,
    shown,
)
from upr_protocol.limits import MEMBER_SECONDS, NAME_BYTES_MAX, PARTITIONS, SET_MEMBERS_MAX
from upr_protocol.ownership import HELD, Held, Outdated, Row, Standing
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import replica_service_pb2 as wire
from upr_protocol.wire.v1.replica_service_pb2_grpc import ReplicaServiceStub

log = logging.getLogger(__name__)

MEET_SECONDS = 0.5
"""Interval of meetings."""
ANSWER_SECONDS = 2.0
"""Longest wait for an answer of a server; one that does not answer counts as not reached."""
LOOK_SECONDS = 1.0
"""Longest wait for who is at an address: who asks for a server's word meanwhile waits for that too."""
PROMISE_SECONDS = 10.0
"""Longest wait for a promise, which needs what was written there on disk."""
UNMET_SECONDS = 10.0
"""Time after which it is told that a server follows and cannot be met: it is never counted."""
REFUSED_MAX = 16
"""Refused servers of one directory that are remembered; the oldest are forgotten."""


def row_to_message(row: Row) -> wire.OwnerRow:
    """Return a row as a message; servers tell each other only of rows that are served."""
    return wire.OwnerRow(
        epoch=row.epoch, revision=row.revision, owner=row.owner, counted=sorted(row.counted)
    )


def row_of_message(message: wire.OwnerRow) -> Row:
    """Return the row of a message; raise ProtocolError where it counts more servers than a set has."""
    counted = frozenset(message.counted)
    if len(counted) > SET_MEMBERS_MAX:
        raise ProtocolError(
            f"counted servers are {len(counted)}; must be at most {SET_MEMBERS_MAX}"
        )
    return Row(message.epoch, message.revision, message.owner, message.epoch > 0, counted)


def held_to_messages(
    held: dict[int, Held], changes: Mapping[int, int] = MappingProxyType({})
) -> list[wire.HeldBucket]:
    """Return what is held as messages, with ``changes`` as in ``Answer``."""
    return [
        wire.HeldBucket(
            version=version,
            partitions=columns.tobytes(),
            table_changes=changes.get(version, 0),
        )
        for version, columns in held.items()
    ]


def held_of_messages(messages: Iterable[wire.HeldBucket]) -> dict[int, Held]:
    """Return what is held, by bucket version; raise ProtocolError for another number of partitions."""
    found = {}
    for message in messages:
        if len(message.partitions) != PARTITIONS * HELD.itemsize:
            raise ProtocolError(f"what is held of a bucket is {len(message.partitions)} bytes")
        found[message.version] = np.frombuffer(message.partitions, HELD)
    return found


def _same_directory(directory: str, address: str) -> UprError:
    return UprError(
        f"servers with directory {directory} are two, of which one answers at {address}; must be one",
        reason="SAME_DIRECTORY",
        hint="one runs from a copy: stop it, and 'upr-admin restore-copy DIR' makes it a server of its own; the other one is"
        " taken when it is started again",
        retriable=True,
    )


def _is_named(member: wire.SetMember) -> bool:
    """Return whether a member has an id and an address as servers have them."""
    short = len(member.address) <= NAME_BYTES_MAX
    return bool(short and HEX_ID.fullmatch(member.directory) and member.address)


@dataclass(frozen=True, slots=True)
class Met:
    """What another server said of itself.

    Attributes:
        row: the newest that it knows; it has stored it.
        epoch: the highest that it knows.
        claiming: whether it is about to become the active one.
        drained: whether it is not to become that.
    """

    row: Row
    epoch: int
    in_step: bool
    held: dict[int, Held]
    claiming: bool = False
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A promise as it came, before it is known which buckets there are.

    Attributes:
        held: by bucket version.
        changes: by bucket version, how often its small tables had changed then; see Tables.changes.
    """

    row: Row
    held: dict[int, Held]
    confirmed: bool
    changes: dict[int, int]


class Peers:
    """The other servers of a set.

    Args:
        meets: whether it meets servers. One that would refuse them asks none.
        upstreams: HOST:PORT of servers that this one was told to follow.

    Attributes:
        addresses: HOST:PORT by directory, of all servers that are known.
        met: those that answered at the last meeting, by directory.
    """

    def __init__(
        self,
        catalog: Catalog,
        address: Callable[[], str],
        links: Links,
        *,
        meets: bool,
        upstreams: Sequence[str] = (),
    ) -> None:
        self._catalog = catalog
        self._address = address
        self._channels = Channels(links, PROMISE_SECONDS)
        self._meets = meets
        self._upstreams = dict.fromkeys(upstreams, "")
        self._told_alone = self._told_full = False
        self._links = links
        # By directory: the one that is taken for its server, and the incarnations of others.
        self._taken: dict[str, wire.SetMember] = {}
        self._refused: dict[str, list[str]] = {}
        # That this one was refused: by the server that did so, "" for its key in etcd.
        self._same: dict[str, UprError] = {}
        # By directory and call: what the log has, and what is refused.
        self._failed: dict[str, dict[str, str]] = {}
        self._refusals: dict[str, dict[str, str]] = {}
        # Why servers were not reached last; since when followers are not, and those of which that is told.
        self._away: dict[str, str] = {}
        self._unmet: dict[str, float] = {}
        self._told_unmet: set[str] = set()
        self.addresses: dict[str, str] = dict(catalog.standing.addresses)
        self._seen: dict[str, float] = dict.fromkeys(self.addresses, time.monotonic())
        self.met: dict[str, Met] = {}

    @property
    def member(self) -> wire.SetMember:
        """This server."""
        return wire.SetMember(
            directory=self._catalog.directory_id,
            address=self._address(),
            incarnation=self._catalog.incarnation,
        )

    def check_taken(self, *, force: bool) -> None:
        """Raise if another server is taken for the one of this directory; with ``force`` only if that is said again."""
        if force:
            self._same.clear()
        elif self.same_directory is not None:
            raise self.same_directory

    @property
    def same_directory(self) -> UprError | None:
        """Why this server is not taken for the one of its directory: another one is, and answers; None if it is."""
        return next(iter(self._same.values()), None)

    @property
    def members(self) -> list[wire.SetMember]:
        """All servers that are known, this one included, by directory."""
        known = {**self.addresses, self._catalog.directory_id: self._address()}
        return [wire.SetMember(directory=d, address=a) for d, a in sorted(known.items())]

    def find(self, server: str) -> wire.SetMember:
        """Return the server with a directory or an address; it may be one of which only the row tells.

        Raises:
            InvalidArgumentError: there is none, or several had the address and not just one of them is away.
        """
        known = {one.directory: one for one in self.members}
        for directory in self._needed() - known.keys() - {""}:
            known[directory] = wire.SetMember(directory=directory)
        found = [one for one in known.values() if server and server in (one.directory, one.address)]
        if len(found) > 1:
            # A new server may be where one was whose disk died.
            there = {*self.met, self._catalog.directory_id}
            found = [one for one in found if one.directory not in there]
            if len(found) != 1:
                raise InvalidArgumentError(
                    f"several servers were at {shown(server)}; must be the directory of one of them",
                    hint="'upr-admin topology' shows them",
                )
        if found:
            return found[0]
        raise InvalidArgumentError(
            f"server {shown(server)} is unknown; must be the directory, or HOST:PORT, of a server of the set",
            hint="'upr-admin topology' shows them",
        )

    def named(self, directory: str) -> str:
        """Return how operators are told of a server: its address, or its directory where none is known, or both where
        another one is at its address.
        """
        if directory == self._catalog.directory_id:
            return self._address()
        address = self.addresses.get(directory)
        if address is None:
            return f"directory {directory}"
        shared = [*self.addresses.values()].count(address) > 1
        return f"{address} (directory {directory})" if shared else address

    def not_heard(self, missing: Iterable[str]) -> UprError:
        """Return the error of a promotion that must hear servers, and cannot."""
        refusals = {d: max(calls.items())[1] for d, calls in self._refusals.items() if calls}
        known = sorted((self.named(one), refusals.get(one, "")) for one in missing)
        names = ", ".join(f"{who} ({words})" if words else who for who, words in known)
        refuse = ", or refuse" if any(words for _, words in known) else ""
        return UprError(
            f"counted servers that cannot be reached{refuse}: {names}; they may have what is missing here",
            reason="NOT_HEARD",
            hint="start them with the data that they had; or 'upr-admin promote --force' goes on without what only they have",
            retriable=True,
        )

    def members_to_tell(self, standing: Standing) -> list[wire.SetMember]:
        """Return the members of which others are told: one that is gone for good is forgotten by all then."""
        told = self.met.keys() | standing.row.counted | {standing.row.owner, standing.directory}
        return [one for one in self.members if one.directory in told]

    def heard_of(self, members: Iterable[wire.SetMember]) -> None:
        """Remember where servers can be reached, as another one tells; where one answers is known better."""
        for one in members:
            if one.directory not in self.met:
                self._remember(one, one.directory in self._needed())

    def heard(self, member: wire.SetMember) -> None:
        """Remember where a server can be reached, as it tells of itself."""
        self._remember(member, True)
        self._saw(member.directory)

    def _remember(self, one: wire.SetMember, makes_room: bool) -> None:
        """Remember an address, of SET_MEMBERS_MAX at most.

        Args:
            makes_room: whether one that does not answer, and that nobody needs, is forgotten for it.
        """
        if one.directory == self._catalog.directory_id or not _is_named(one):
            return
        if one.directory not in self.addresses and len(self.addresses) >= SET_MEMBERS_MAX - 1:
            idle = self.addresses.keys() - self.met.keys() - self._needed()
            if makes_room and idle:
                self.drop(min(idle, key=lambda directory: self._seen[directory]))
            else:
                if makes_room and not self._told_full:
                    self._told_full = True
                    log.warning(
                        "a server of the set is not remembered: there are as many as can be",
                        extra={"directory": one.directory, "most": SET_MEMBERS_MAX},
                    )
                return
        self.addresses[one.directory] = one.address
        self._seen.setdefault(one.directory, time.monotonic())

    def _needed(self) -> frozenset[str]:
        """Return the servers that are not forgotten, seen or not."""
        standing = self._catalog.standing.standing
        return standing.row.counted | {standing.row.owner, standing.candidate}

    def drop(self, directory: str) -> None:
        """Forget where a server can be reached, and what it answered."""
        self._failed.pop(directory, None)
        self._refusals.pop(directory, None)
        self._same.pop(directory, None)
        self._away.pop(directory, None)
        if directory not in self.addresses:
            return
        log.info(
            "a server of the set is forgotten",
            extra={"directory": directory, "address": self.addresses[directory]},
        )
        del self.addresses[directory], self._seen[directory]
        self._told_full = False

    def _saw(self, directory: str) -> None:
        if directory in self.addresses:
            self._seen[directory] = time.monotonic()

    def forget(self) -> None:
        """Forget servers that are not counted and were not seen for MEMBER_SECONDS, and close channels to nobody."""
        before = time.monotonic() - MEMBER_SECONDS
        for directory in self.addresses.keys() - self._needed():
            if self._seen[directory] < before:
                self.drop(directory)
        known = self.addresses.keys() | {self._catalog.directory_id}
        for directory in (self._taken.keys() | self._refused.keys()) - known:
            self._taken.pop(directory, None)
            self._refused.pop(directory, None)
        self._channels.keep(self.addresses.values())

    def met_lately(self, directories: Iterable[str]) -> bool:
        """Return whether each of these servers answered a moment ago: a process that was stopped meanwhile met nobody."""
        since = time.monotonic() - 2 * MEET_SECONDS - ANSWER_SECONDS
        return all(d in self.met and self._seen.get(d, since) > since for d in directories)

    def has_failed(self, former: str) -> bool:
        """Return whether an owner can store nothing more: what it has is to be taken, and it confirms nothing."""
        met = self.met.get(former)
        return met is not None and met.row.owner == former and not met.in_step

    @property
    def countable(self) -> set[str]:
        """The servers that are met, in step and registered."""
        return {d for d, one in self.met.items() if one.in_step and self.registered(d)}

    def registered(self, directory: str) -> bool:
        """Return whether a replica follows here, registered, in every bucket."""
        return all(
            any(
                follower.options.directory == directory and follower.options.consumer
                for follower in host.bucket.followers
            )
            for host in self._catalog.hosts
        )

    def _stub(self, address: str) -> Any:
        """Return the calls of the server at an address, with the certificates of now."""
        return ReplicaServiceStub(self._channels.to(address))

    # One server of a directory

    async def check_only(self, member: wire.SetMember) -> None:
        """Raise if another server answers that has the directory of a caller: one of the two runs from a copy.

        One that was restarted is another one as well: it is taken where the one before does not answer any more. One that
        was refused stays that until it is restarted: it may lack what the first acknowledged, and the first may come back.

        Raises:
            UprError: SAME_DIRECTORY.
            ProtocolError: the incarnation is none.
        """
        directory, incarnation = member.directory, member.incarnation
        is_own = directory == self._catalog.directory_id
        known = self.member if is_own else self._taken.get(directory, wire.SetMember())
        # Servers of before name no incarnation.
        if incarnation in ("", known.incarnation):
            return
        if not HEX_ID.fullmatch(incarnation):
            raise ProtocolError(f"an incarnation is {shown(incarnation)}; must be 16 hex digits")
        address = known.address or self.addresses.get(directory, "")
        if incarnation not in self._refused.get(directory, ()):
            there = known.incarnation if is_own else await self._at(address, directory)
            if there in (None, incarnation):
                self._taken[directory] = member
                return
            refused = self._refused.setdefault(directory, [])
            if len(refused) < REFUSED_MAX:
                log.warning(
                    "two servers run with one data directory: the second is refused",
                    extra={"directory": directory, "first": address, "second": member.address},
                )
            refused[:] = [*refused, incarnation][-REFUSED_MAX:]
        raise _same_directory(directory, address)

    async def check_alone(self, address: str) -> None:
        """Raise if another server with this one's directory answers at an address; "" for none.

        Once one did, also when it does not any more, until this server is restarted: it may lack what that one acknowledged,
        which may come back.

        Raises:
            UprError: SAME_DIRECTORY.
        """
        own = self._catalog.directory_id
        there = None if address == self._address() else await self._at(address, own)
        if there not in (None, self._catalog.incarnation):
            self._same[""] = _same_directory(own, address)
        if (error := self._same.get("")) is not None:
            raise error

    async def _at(self, address: str, directory: str) -> str | None:
        """Return the incarnation of a server at an address; None if none with the directory answers there.

        Who meets nobody asks nobody: any caller could name the address, and would be shown this server's token.
        """
        if not (address and self._meets):
            return None
        request = wire.MeetRequest(replica_set=self._catalog.replica_set)
        try:
            # Anew: a channel on which it was away does not try again at once.
            async with self._links.open(address) as channel:
                answer = await ReplicaServiceStub(channel).Meet(request, timeout=LOOK_SECONDS)
        except (grpc.aio.AioRpcError, UprError):
            return None
        member = answer.member
        return member.incarnation if member.directory == directory else None

    async def meet_all(self, standing: Standing) -> None:
        following = set[str]()
        if standing.owns:
            # The replica of a replica is none of the owner's: it goes on following where it was told to.
            for host in self._catalog.hosts:
                for options in (follower.options for follower in host.bucket.followers):
                    if options.is_replica and options.consumer:
                        following.add(options.directory)
                        self.heard(
                            wire.SetMember(directory=options.directory, address=options.address)
                        )
        # At once: who is cut off answers late.
        meeting = self.reach(set(self.addresses)), self._meet_upstreams(standing)
        self.met, _ = await asyncio.gather(*meeting)
        for directory in self.met:
            self._saw(directory)
        self._tell_unmet(following)
        self.forget()

    def _tell_unmet(self, following: set[str]) -> None:
        """Log once that a server follows and cannot be met, as its address is wrong or its files of TLS, and once that it can."""
        now = time.monotonic()
        known = following if self._meets and self._catalog.replica_set else set[str]()
        self._unmet = {d: self._unmet.get(d, now) for d in known - self.met.keys()}
        for directory, since in self._unmet.items():
            is_told = directory in self._told_unmet or any(self._failed.get(directory, {}).values())
            if now - since > UNMET_SECONDS and not is_told:
                self._told_unmet.add(directory)
                log.warning(
                    "a server follows and cannot be reached where it says that it is",
                    extra={"who": self.named(directory), "error": self._away.get(directory, "")},
                )
        for directory in self._told_unmet - self._unmet.keys():
            self._told_unmet.discard(directory)
            log.info("a server is reached, or follows no more", extra={"directory": directory})

    async def _meet_upstreams(self, standing: Standing) -> None:
        """Ask servers that this one was told to follow who they are, where that is not known.

        An owner does, because no owner tells the replica of a replica of the set: once it is promoted by force, it and
        another owner would never hear of each other. And so does who does not reach the owner that it knows: that may
        have another address by now.
        """
        known = self.addresses.keys() | {self._catalog.directory_id}
        there = self.addresses.values()
        unknown = [a for a, d in self._upstreams.items() if d not in known and a not in there]

        async def meet(address: str) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, UprError):
                answer = await self._said(address)
                self._upstreams[address] = answer.member.directory
                self.heard(answer.member)

        is_lost = standing.row.epoch > 0 and standing.row.owner not in self.met
        if self._meets and (standing.owns or is_lost):
            await asyncio.gather(*map(meet, unknown))

    async def reach(self, directories: Iterable[str]) -> dict[str, Met]:
        """Meet servers at once, and return those that answered."""
        chosen = [d for d in directories if d in self.addresses]
        if not self._catalog.replica_set:
            # It joins when it follows: until then all would refuse it.
            return {}
        if not self._meets:
            if chosen and not self._told_alone:
                self._told_alone = True
                log.warning(
                    "no server of the set is met, and this one cannot be promoted: it has neither identities nor --open-admin"
                )
            return {}
        found = await asyncio.gather(*map(self._meet, chosen))
        return {d: one for d, one in zip(chosen, found, strict=True) if one is not None}

    async def _said(self, address: str) -> Any:
        """Meet the server at an address, and return its answer."""
        standing = self._catalog.standing.standing
        request = wire.MeetRequest(
            replica_set=self._catalog.replica_set,
            member=self.member,
            row=row_to_message(standing.row),
            epoch=standing.epoch,
            members=self.members_to_tell(standing),
        )
        stub = self._stub(address)
        return await stub.Meet(request, timeout=ANSWER_SECONDS)

    async def _meet(self, directory: str) -> Met | None:
        try:
            answer = await self._said(self.addresses[directory])
            if answer.member.directory != directory:
                raise UprError(
                    f"directory {shown(answer.member.directory)} answers there, and not {directory}: another server took"
                    " its place, or two advertise that address"
                )
            self.heard_of(answer.members)
            row, held = row_of_message(answer.row), held_of_messages(answer.held)
        except (grpc.aio.AioRpcError, UprError) as error:
            self._tell(directory, "Meet", error)
            return None
        self._tell(directory, "Meet")
        claiming, drained = answer.claiming, answer.drained
        return Met(row, answer.epoch, answer.in_step, held, claiming, drained)

    def _tell(
        self, directory: str, call: str, error: grpc.aio.AioRpcError | UprError | None = None
    ) -> None:
        """Remember what is refused, and log what an operator has to mend, when it begins and when it ends.

        Servers come and go by themselves. Each call by itself: a server that is met may refuse to promise.
        """
        if isinstance(error, grpc.aio.AioRpcError):
            error = error_from_call(error)
        if error is not None and error.reason == "SAME_DIRECTORY":
            self._same[directory] = error
        elif error is None and call == "Meet":
            self._same.pop(directory, None)
        words = "" if error is None else error.message
        refusals = self._refusals.setdefault(directory, {})
        if isinstance(error, UnavailableError):
            # It is not reached, which gRPC tells in ever other words.
            refusals.clear()
            self._away[directory] = words
        elif error is not None:
            refusals[call] = words
        else:
            refusals.pop(call, None)
        # Nonsense is retriable too, as a peer may be replaced, but does not pass by itself.
        passes = error is not None and error.retriable and not isinstance(error, ProtocolError)
        failed = self._failed.setdefault(directory, {})
        if passes or words == failed.get(call, ""):
            return
        failed[call] = words
        told = {"who": self.named(directory), "call": call}
        if words:
            log.warning("a server of the set cannot be asked", extra={**told, "error": words})
        else:
            log.info("a server of the set can be asked again", extra=told)

    async def ask_grant(self, directory: str, epoch: int) -> bool:
        """Ask a server for a grant; False if it does not give one, or cannot be reached."""
        request = wire.GrantRequest(
            replica_set=self._catalog.replica_set, owner=self.member, epoch=epoch
        )
        try:
            stub = self._stub(self.addresses.get(directory, ""))
            answer = await stub.Grant(request, timeout=ANSWER_SECONDS)
        except (grpc.aio.AioRpcError, UprError) as error:
            self._tell(directory, "Grant", error)
            return False
        self._tell(directory, "Grant")
        return bool(answer.granted) and answer.member.directory == directory

    async def ask_promises(
        self, claim: Row, directories: Iterable[str], *, released: bool = False
    ) -> dict[str, Outdated | Answer]:
        """Ask servers for their promise at once; those that cannot be reached are left out.

        Args:
            released: whether the server that served last has promised already.

        Returns: by directory its promise, or what outdates the claim.
        """
        previous = claim.previous
        request = wire.PromiseRequest(
            replica_set=self._catalog.replica_set,
            epoch=claim.epoch,
            candidate=self.member,
            previous_directory="" if previous is None else previous.directory,
            previous_epoch=0 if previous is None else previous.epoch,
            released=released,
        )
        chosen = [d for d in directories if d in self.addresses]
        answers = await asyncio.gather(*(self._ask(d, request) for d in chosen))
        return {d: one for d, one in zip(chosen, answers, strict=True) if one is not None}

    async def _ask(self, directory: str, request: wire.PromiseRequest) -> Outdated | Answer | None:
        try:
            stub = self._stub(self.addresses[directory])
            answer = await stub.Promise(request, timeout=PROMISE_SECONDS)
            row, held = row_of_message(answer.row), held_of_messages(answer.held)
        except (grpc.aio.AioRpcError, UprError) as error:
            self._tell(directory, "Promise", error)
            return None
        self._tell(directory, "Promise")
        if answer.member.directory != directory:
            return None
        if not answer.promised:
            return Outdated(row, answer.epoch)
        changes = {one.version: one.table_changes for one in answer.held}
        return Answer(row, held, answer.confirmed, changes)

    async def close(self) -> None:
        await self._channels.close()
