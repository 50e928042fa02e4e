"""Shares of a group: a member's partitions and lease, and positions that only their owner may store in the server."""

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from upr_protocol.errors import FencedError, ProtocolError
from upr_protocol.failover import check_partition
from upr_protocol.limits import PARTITIONS, SEQNO_MAX
from upr_protocol.position import Position
from upr_protocol.position_table import Found, PositionTable
from upr_protocol.wire.codec import positions_from_messages, positions_to_messages
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

_RENEWALS: Final = 3
"""So many renewals go out in the length of a lease."""
_RELEASE_SHARE: Final = 0.5
"""Part of a lease for which a partition to release waits for its changes in hand."""


class Share(NamedTuple):
    """Effect of an Assignment.

    Args:
        gained: partitions to be followed from their stored positions.
        lost: partitions that this member no longer owns.
        release: partitions to be handed over.
        kept: partitions that were to be handed over, and are not any more.
    """

    gained: list[int]
    lost: list[int]
    release: list[int]
    kept: list[int]


class Membership:
    """One member's share.

    Times are seconds on a clock that does not jump, and goes on while the machine sleeps.

    Attributes:
        generation: the newest received; 0 before the first.
        owned: the partitions that are this member's.
        releasing: those of them that it was asked to hand over, and when it was.
        is_told: whether this call said what is this member's. What it keeps over a lost call is granted anew, under
            another generation.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.owned: set[int] = set()
        self.releasing: dict[int, float] = {}
        self.is_told = False
        self._server_id = 0
        self._lease = 0.0
        self._ends = 0.0
        self._number = 0
        self._sent: dict[int, float] = {}
        self._heard = 0
        # When the lease ended by what was known when the server asked for what is not handed over yet: within a lease of that
        # it gives it to others. Of each Assignment that arrived and was not taken, infinity where it takes nothing, and of
        # each partition of ``releasing`` that was begun.
        self._arrived: deque[float] = deque()
        self._until: dict[int, float] = {}
        self._waiting: tuple[stream_pb2.Assignment, float] | None = None
        self._give_up: set[int] = set()
        # Released ones, with the number of the Renew before that: until a later one is answered the server may not have read
        # the Release of what it names.
        self._released: dict[int, int] = {}
        # Those of ``owned`` that are not begun: to be released, or released a moment ago.
        self._passing: set[int] = set()
        # Those of ``owned`` that one did not name which had to wait: they may have been another member's meanwhile.
        self._missed: set[int] = set()

    def opening(self) -> None:
        """A call is opened: what came over the one before and was not taken is of no use."""
        self._arrived.clear()

    def opened(self, server_id: int, lease_seconds: float, sent_at: float) -> list[int]:
        """A call was accepted whose Open was sent then. Return what is not this member's any more.

        Within the lease the server keeps a member's share for it. Another server, or one that was started anew,
        knows nothing of that; and behind a lease that had ended what comes may have been another member's meanwhile.

        Raises:
            ProtocolError: there is no lease.
        """
        if not lease_seconds > 0:
            raise ProtocolError(f"the server granted a lease of {lease_seconds} s")
        lost: list[int] = []
        self.is_told = False
        if server_id != self._server_id or self.expired(sent_at):
            lost = self.forget()
        if server_id != self._server_id:
            self.generation = 0
            self._server_id = server_id
        self._lease = lease_seconds
        self._ends = max(self._ends, sent_at + lease_seconds)
        self._sent.clear()
        self._released.clear()
        self._waiting = None
        self._give_up.clear()
        return lost

    def arrived(self, message: stream_pb2.Assignment) -> None:
        """An Assignment arrived, which is taken later, with ``assigned``. On the reader."""
        takes = bool(message.to_release) or not self.owned.issubset(message.owned)
        self._arrived.append(self._end if takes else math.inf)

    def assigned(self, message: stream_pb2.Assignment, now: float) -> Share | None:
        """Take what the server says about this member's share; None while the lease counts as ended, see ``renewed``.

        Raises:
            ProtocolError: the generation fell, or a partition to release is not owned.
            InvalidArgumentError: a partition is out of range.
        """
        is_over = self.expired(now)
        until = min(self._arrived.popleft() if self._arrived else math.inf, self._end)
        if is_over:
            if now < self._end:
                self.end()
            # The age of this Assignment is unknown; the answer to a Renew shows the lease.
            self._waiting = message, until
            self._missed |= self.owned - set(message.owned)
            return None
        return self._assigned(message, until, now)

    def _assigned(self, message: stream_pb2.Assignment, until: float, now: float) -> Share:
        self._waiting = None
        if message.generation < self.generation:
            raise ProtocolError(
                f"an assignment of generation {message.generation} after one of {self.generation}"
            )
        owned = {check_partition(partition) for partition in message.owned}
        release = set(message.to_release)
        if not release <= owned:
            raise ProtocolError(
                f"the server asks to release partitions that are not owned: {sorted(release - owned)[:5]}"
            )
        begun = self.owned - self._passing - self._missed
        coming = owned - begun
        # They may be another member's by now.
        self._passing = coming & (release | self._released.keys())
        gained = sorted(coming - self._passing)
        lost, self._missed = sorted((self.owned - owned) | self._missed), set()
        kept = sorted((self.releasing.keys() & owned) - release - coming)
        self.generation = message.generation
        self.is_told = True
        self.owned = owned
        self.releasing = {p: self.releasing.get(p, now) for p in release}
        self._until = {p: self._until.get(p, until) for p in release & begun}
        return Share(gained, lost, sorted(release), kept)

    def releasable(self, now: float, busy: Container[int]) -> list[int]:
        """The partitions to hand over now; ``busy`` ones wait a while for what was handed out of them."""
        by = now - self._lease * _RELEASE_SHARE
        return [p for p, asked_at in self.releasing.items() if p not in busy or asked_at <= by]

    def released(self, partitions: Iterable[int]) -> stream_pb2.FollowRequest:
        """Give partitions up; return what tells the server."""
        given = sorted(partitions)
        self.forget(given)
        self._released.update(dict.fromkeys(given, self._number))
        return stream_pb2.FollowRequest(release=stream_pb2.Release(partitions=given))

    def forget(self, partitions: Iterable[int] | None = None) -> list[int]:
        """Own these partitions no more, None for all; return those that were owned."""
        gone = sorted(self.owned if partitions is None else self.owned & set(partitions))
        self.owned.difference_update(gone)
        self._passing.difference_update(gone)
        self._missed.difference_update(gone)
        for partition in gone:
            self.releasing.pop(partition, None)
            self._until.pop(partition, None)
        return gone

    # The lease.

    def expired(self, now: float) -> bool:
        """Whether the lease has ended, by this member's own count.

        What was asked for and is not handed over ends it too, however it is renewed: within a lease the server gives that to
        others, and it cannot be handed out further without the rest.
        """
        return now >= min([self._end, *self._arrived, *self._until.values()])

    @property
    def _end(self) -> float:
        return max(self._ends, self._sent.get(self._heard, -math.inf) + self._lease)

    def heard(self, number: int, now: float) -> None:
        """The answer to a Renew arrived: the lease goes on, also while nobody takes that with ``renewed``. On the reader.

        Not once it has ended: so it may have at the server, before that read the Renew, and the Assignment that tells what
        others got comes behind the answer.
        """
        if not self.expired(now):
            self._heard = number

    def end(self) -> None:
        """Have the lease count as ended until all is begun anew, whatever answers come."""
        self._ends = -math.inf
        self._sent.clear()

    def expire(self, now: float) -> list[int]:
        """Own nothing any more when the lease has ended; return what was owned.

        By the server's clock the lease may still run, so release explicitly.
        """
        if not self.expired(now):
            return []
        if now < self._end:
            # What is renewed is begun anew behind what was asked for.
            self.end()
        gone = self.forget()
        self._give_up.update(gone)
        return gone

    def due(self, now: float) -> list[stream_pb2.FollowRequest]:
        messages = []
        if self._give_up:
            messages.append(self.released(self._give_up))
            self._give_up = set()
        if now >= self._next_renewal():
            self._number += 1
            self._sent[self._number] = now
            renew = stream_pb2.Renew(number=self._number)
            messages.append(stream_pb2.FollowRequest(renew=renew))
        return messages

    def renewed(self, number: int, now: float) -> Share | None:
        """Record the answer to a Renew: the lease was renewed when it was sent, or later. Return what an assignment
        changed that had to wait for this.

        One behind the lease's end renews nothing that is still owned, as with ``heard``: ``expire`` comes first.
        """
        is_late = bool(self.owned) and self.expired(now)
        sent_at = self._sent.pop(number, None)
        if sent_at is None or is_late:
            return None
        self._ends = max(self._ends, sent_at + self._lease)
        self._sent = {other: at for other, at in self._sent.items() if other > number}
        waiting, self._waiting = self._waiting, None
        named = () if waiting is None else set(waiting[0].owned)
        # What waited may have been sent before the Release was read, although this answer came behind that: a further
        # Renew, which is due at once, tells.
        self._released = {
            p: self._number if p in named else before
            for p, before in self._released.items()
            if before >= number or p in named
        }
        if waiting is not None:
            return self._assigned(*waiting, now)
        gained = self._passing - self.releasing.keys() - self._released.keys()
        self._passing -= gained
        return Share(sorted(gained), [], [], []) if gained else None

    @property
    def awaits_answer(self) -> bool:
        """Whether a Renew is not answered yet."""
        return bool(self._sent)

    def next_due(self, now: float) -> float:
        """In how many seconds there is something to do: a renewal, the lease's end, a partition to hand over."""
        times = [self._next_renewal()]
        if not self.expired(now):
            times += [self._ends, *self._until.values()]
            times += [at + self._lease * _RELEASE_SHARE for at in self.releasing.values()]
        return max(min(times) - now, 0.0)

    def _next_renewal(self) -> float:
        if self._number in self._released.values():
            # At once: its answer says that the Release was read.
            return 0.0
        newest = max(self._sent.values(), default=self._ends - self._lease)
        return newest + self._lease / _RENEWALS


class Ownership:
    """Ownership of a consumer, or a member's share: its view of the stored positions.

    Args:
        consumer: the consumer's name; of a member the group's.
        member: its name; empty for a sole owner.

    Attributes:
        membership: of a member; None for a sole owner.
        to_load: partitions whose stored positions must be loaded before they resume.
    """

    def __init__(self, consumer: str, member: str) -> None:
        self.consumer = consumer
        self.member = member
        self.membership = Membership() if member else None
        self.to_load: set[int] = set()
        self._generation = self._saving = self._server_id = self._saves = 0
        self._under: dict[int, tuple[int, int]] = {}
        self._stored = self._sent = PositionTable.of({})
        # Of a member: the bucket's version that it follows, the one that it followed before, and the partitions that it has
        # not begun since.
        self._version = self._gone_version = 0
        self._not_begun: set[int] = set()

    @property
    def generation(self) -> int:
        """Return the newest generation received; positions are stored under it."""
        return self._generation if self.membership is None else self.membership.generation

    @property
    def may_save(self) -> bool:
        """Return whether the generation for saves is known; without it the server refuses them."""
        return self.membership is None or self.membership.is_told

    def opened(
        self, opened: stream_pb2.Opened, partitions: Iterable[int], sent_at: float
    ) -> list[int]:
        """A call was accepted, whose Open was sent then. Return the partitions that are not owned any more."""
        self._generation, self._server_id = opened.generation, opened.server_id
        self.to_load.update(partitions)
        if self.membership is None:
            return []
        lost = self.membership.opened(opened.server_id, opened.lease_seconds, sent_at)
        self.lost(lost)
        return lost

    def lost(self, partitions: Iterable[int]) -> None:
        """Partitions are not owned any more: whatever is stored of them later is another's."""
        gone = list(partitions)
        self.to_load.difference_update(gone)
        self._sent = self._sent.without(np.array(gone, np.int64))
        for partition in gone:
            self._under.pop(partition, None)

    def found(self, response: stream_pb2.LoadPositionsResponse) -> Found:
        """Take what is stored of the partitions that are to be loaded. Return what this owner does not know of.

        What is older than what it stored itself comes from an old copy of the server's data: to take it would hide
        from the server what this one has received since. So does nothing at all from a server that was started
        anew, while the same one has it from an operator. Nothing of a bucket that was made anew is no reason to
        forget what has to be undone of the one before; a member that followed that one tells of it for any partition that it
        begins in the new one as the first.

        Raises:
            InvalidArgumentError: a position is out of range or contradicts itself.
        """
        version = response.bucket_version
        table = positions_from_messages(response.positions, version)
        generations = {m.partition: m.generation for m in response.positions}
        unknown = []
        for partition in sorted(self.to_load):
            generation = generations.get(partition, 0)
            if partition not in self._under or not self._knows(
                partition, table.get(partition), generation, version
            ):
                unknown.append(partition)
                self._under[partition] = generation, self._server_id
        self.to_load.clear()
        columns = np.array(unknown, np.int64)
        new = table.only(columns)
        self._stored = self._stored.without(columns).updated(new)
        return Found(unknown, new.updated(self._of_before(unknown, new, version)))

    def _of_before(
        self, partitions: Iterable[int], stored: Container[int], version: int
    ) -> PositionTable:
        """Return positions of the bucket before for those of a member's partitions of which nothing is stored in a new one.

        In that all are dealt anew: their owner of before, which had data of them, may not be the one that begins them.
        """
        if self.membership is None:
            return PositionTable.of({})
        if version != self._version:
            self._gone_version, self._version = self._version, version
            self._not_begun = set(range(PARTITIONS)) if self._gone_version else set()
        begun = self._not_begun.intersection(partitions)
        self._not_begun -= begun
        # Up to where its owner had received it is not known.
        received = Position(self._gone_version, None, None, SEQNO_MAX, None, (), None)
        return PositionTable.of({p: received for p in begun if p not in stored})

    def _knows(
        self, partition: int, position: Position | None, generation: int, version: int
    ) -> bool:
        known = self._stored.get(partition)
        known_generation, server_id = self._under[partition]
        if position is None and known is not None:
            return server_id != self._server_id or known.bucket_version != version
        # The last save may be stored although no answer came.
        sent = self._sent.get(partition)
        return (
            generation < known_generation
            or _same(known, position)
            or (sent is not None and _same(sent, position))
        )

    def stored(self, positions: Mapping[int, Position]) -> None:
        self._stored = self._stored.updated(PositionTable.of(positions))
        self._under.update(dict.fromkeys(positions, (self._saving, self._server_id)))

    @property
    def was_told_meanwhile(self) -> bool:
        """Return whether the generation changed since the save: a refused one may succeed now."""
        return self._saving != self.generation

    # Messages.

    def load_request(self, bucket: str, version: int) -> stream_pb2.LoadPositionsRequest:
        return stream_pb2.LoadPositionsRequest(
            bucket=bucket,
            bucket_version=version,
            consumer=self.consumer,
            partitions=sorted(self.to_load),
        )

    def save_request(
        self, bucket: str, version: int, positions: Mapping[int, Position]
    ) -> stream_pb2.SavePositionsRequest:
        self._saving = self.generation
        self._saves += 1
        table = PositionTable.of(positions)
        self._sent = self._sent.updated(table)
        return stream_pb2.SavePositionsRequest(
            bucket=bucket,
            bucket_version=version,
            consumer=self.consumer,
            member=self.member,
            generation=self.generation,
            positions=positions_to_messages(table),
            number=self._saves,
        )


def _same(one: Position | None, other: Position | None) -> bool:
    if one is None or other is None:
        return one is other
    fields = ("failover_id", "data_id", "seqno", "horizon", "markers")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def fenced(consumer: str, partitions: Iterable[int]) -> FencedError:
    """Return the error of a sole owner that is none any more."""
    some = sorted(partitions)[:5]
    return FencedError(
        f"consumer {consumer!r} has a newer owner: the positions of {some} were not stored",
        hint="give each consumer its own name, or share the work: changes(resume=Group(name))",
    )


def is_of_group(message: stream_pb2.FollowResponse) -> bool:
    """Whether a message is about a member's share and lease, and not about any stream."""
    return message.WhichOneof("message") in ("assignment", "renewed")
