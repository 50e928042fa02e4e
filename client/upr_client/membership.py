"""What a member of a group owns and until when, as far as it can know: decided without I/O.

The server counts a member's lease from the last message that it heard, and a message is heard after it was sent. So
the member, which counts from when it sent what was answered, never takes its lease for longer than it is. When its
own count has ended (its process was paused, its network gone) it hands out nothing more until it was told anew.
"""

from collections.abc import Container, Iterable
from typing import Final, NamedTuple

from upr_protocol.consumer import ProtocolError
from upr_protocol.failover import check_partition
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2

_RENEWALS: Final = 3
"""So many renewals go out in the length of a lease."""
_RELEASE_SHARE: Final = 0.5
"""For so much of a lease a partition that is to be handed over waits for what was handed out of it."""


class Share(NamedTuple):
    """What an Assignment changed.

    Args:
        gained: partitions to be followed from their stored positions.
        lost: partitions that are another's now, or nobody's.
        release: partitions to be handed over.
        kept: partitions that were to be handed over, and are not any more.
    """

    gained: list[int]
    lost: list[int]
    release: list[int]
    kept: list[int]


class Membership:
    """One member's share.

    Times are seconds on a clock that does not jump.

    Attributes:
        generation: the newest that was told; 0 before the first.
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
        self._waiting: stream_pb2.Assignment | None = None
        self._give_up: set[int] = set()

    def opened(self, server_id: int, lease_seconds: float, sent_at: float) -> list[int]:
        """A call was accepted whose Open was sent then. Return what is not this member's any more.

        Within the lease the server keeps a member's share for it. Another server, or one that was started anew,
        knows nothing of that.

        Raises:
            ProtocolError: there is no lease.
        """
        if not lease_seconds > 0:
            raise ProtocolError(f"the server gave a lease of {lease_seconds} seconds")
        lost: list[int] = []
        self.is_told = False
        if server_id != self._server_id:
            lost = self.forget()
            self.generation = 0
            self._server_id = server_id
        self._lease = lease_seconds
        self._ends = max(self._ends, sent_at + lease_seconds)
        self._sent.clear()
        self._waiting = None
        self._give_up.clear()
        return lost

    def assigned(self, message: stream_pb2.Assignment, now: float) -> Share | None:
        """Take what the server says about this member's share; None while the lease counts as ended, see ``renewed``.

        Raises:
            ProtocolError: the generation went back, or what is to be released is not owned.
            InvalidArgumentError: a partition is out of range.
        """
        if self.expired(now):
            # How old it is cannot be known; the answer to a Renew tells.
            self._waiting = message
            return None
        if message.generation < self.generation:
            raise ProtocolError(
                f"an assignment of generation {message.generation} after one of {self.generation}"
            )
        owned = {check_partition(partition) for partition in message.owned}
        release = set(message.to_release)
        if not release <= owned:
            raise ProtocolError(f"to be released and not owned: {sorted(release - owned)[:5]}")
        gained, lost = sorted(owned - self.owned), sorted(self.owned - owned)
        kept = sorted((self.releasing.keys() & owned) - release)
        self.generation = message.generation
        self.is_told = True
        self.owned = owned
        self.releasing = {p: self.releasing.get(p, now) for p in release}
        return Share(gained, lost, sorted(release), kept)

    def releasable(self, now: float, busy: Container[int]) -> list[int]:
        """The partitions to hand over now; ``busy`` ones wait a while for what was handed out of them."""
        by = now - self._lease * _RELEASE_SHARE
        return [p for p, asked_at in self.releasing.items() if p not in busy or asked_at <= by]

    def released(self, partitions: Iterable[int]) -> stream_pb2.FollowRequest:
        """Give partitions up; return what tells the server."""
        given = sorted(partitions)
        self.owned.difference_update(given)
        for partition in given:
            self.releasing.pop(partition, None)
        return stream_pb2.FollowRequest(release=stream_pb2.Release(partitions=given))

    def forget(self, partitions: Iterable[int] | None = None) -> list[int]:
        """Own these partitions no more, None for all; return those that were owned."""
        gone = sorted(self.owned if partitions is None else self.owned & set(partitions))
        self.owned.difference_update(gone)
        for partition in gone:
            self.releasing.pop(partition, None)
        return gone

    # The lease.

    def expired(self, now: float) -> bool:
        """Whether the lease has ended, by this member's own count."""
        return now >= self._ends

    def expire(self, now: float) -> list[int]:
        """Own nothing any more when the lease has ended; return what was owned.

        By the server's count the lease may go on, so it is told.
        """
        if not self.expired(now):
            return []
        gone = self.forget()
        self._give_up.update(gone)
        return gone

    def due(self, now: float) -> list[stream_pb2.FollowRequest]:
        """Return what is to be sent now."""
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
        """The server answered a Renew: the lease began anew when it was sent, or later.

        Returns:
            What an assignment changed that had to wait for this.
        """
        sent_at = self._sent.pop(number, None)
        if sent_at is None:
            return None
        self._ends = max(self._ends, sent_at + self._lease)
        self._sent = {other: at for other, at in self._sent.items() if other > number}
        waiting, self._waiting = self._waiting, None
        return None if waiting is None else self.assigned(waiting, now)

    @property
    def awaits_answer(self) -> bool:
        """Whether a Renew is not answered yet."""
        return bool(self._sent)

    def next_due(self, now: float) -> float:
        """In how many seconds there is something to do: a renewal, the lease's end, a partition to hand over."""
        times = [self._next_renewal()]
        if not self.expired(now):
            times.append(self._ends)
            times += [at + self._lease * _RELEASE_SHARE for at in self.releasing.values()]
        return max(min(times) - now, 0.0)

    def _next_renewal(self) -> float:
        newest = max(self._sent.values(), default=self._ends - self._lease)
        return newest + self._lease / _RENEWALS
