"""Positions that are kept in the server: which are to be loaded, what is known to be stored, who may store.

A consumer with a name has one owner, or shares the partitions among the members of a group. What is stored is looked
at again after every connecting: when another owner stored something meanwhile, or an operator set it back, that
holds; when it is what this one stored last, this one goes on where it stands.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from upr_client.membership import Membership
from upr_protocol.errors import FencedError
from upr_protocol.position import Position
from upr_protocol.wire.positions import position_from_message, position_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


class _Stored(NamedTuple):
    """What is stored of a partition, None for nothing, under which generation, and in which server process."""

    position: Position | None
    generation: int
    server_id: int


_UNKNOWN: Final = _Stored(None, 0, 0)


class Ownership:
    """What a consumer's owner, or a member of a group, knows of the stored positions.

    Args:
        consumer: the consumer's name, or the group's.
        member: the member's; empty for a sole owner.

    Attributes:
        membership: of a member; None for a sole owner.
        to_load: partitions whose stored positions are to be looked at before they go on.
    """

    def __init__(self, consumer: str, member: str) -> None:
        self.consumer = consumer
        self.member = member
        self.membership = Membership() if member else None
        self.to_load: set[int] = set()
        self._generation = self._saving = self._server_id = 0
        self._stored: dict[int, _Stored] = {}
        self._sent: dict[int, Position] = {}

    @property
    def generation(self) -> int:
        """The newest that was told; what is stored is stored under it."""
        return self._generation if self.membership is None else self.membership.generation

    @property
    def may_save(self) -> bool:
        """Whether it is known under which generation to store; else what is asked for would be refused."""
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
        for partition in partitions:
            self._stored.pop(partition, None)
            self._sent.pop(partition, None)
            self.to_load.discard(partition)

    def found(self, response: stream_pb2.LoadPositionsResponse) -> dict[int, Position | None]:
        """Take what is stored of the partitions that are to be loaded. Return what this owner does not know of.

        What is older than what it stored itself comes from an old copy of the server's data: to take it would hide
        from the server what this one has received since. So does nothing at all from a server that was started
        anew, while the same one has it from an operator. Nothing of a bucket that was made anew is no reason to
        forget what has to be undone of the one before.

        Raises:
            InvalidArgumentError: a position is out of range or contradicts itself.
        """
        version = response.bucket_version
        stored = {
            m.partition: (position_from_message(m, version), m.generation)
            for m in response.positions
        }
        unknown: dict[int, Position | None] = {}
        for partition in sorted(self.to_load):
            position, generation = stored.get(partition, (None, 0))
            if not self._knows(partition, position, generation, version):
                unknown[partition] = position
                self._stored[partition] = _Stored(position, generation, self._server_id)
        self.to_load.clear()
        return unknown

    def _knows(
        self, partition: int, position: Position | None, generation: int, version: int
    ) -> bool:
        known = self._stored.get(partition, _UNKNOWN)
        if known is _UNKNOWN:
            return False
        if position is None and known.position is not None:
            return known.server_id != self._server_id or known.position.bucket_version != version
        # What was sent last may be stored although no answer said so.
        sent = self._sent.get(partition)
        return (
            generation < known.generation
            or _same(known.position, position)
            or (sent is not None and _same(sent, position))
        )

    def stored(self, positions: Mapping[int, Position]) -> None:
        """Positions were stored."""
        for partition, position in positions.items():
            self._stored[partition] = _Stored(position, self._saving, self._server_id)

    @property
    def was_told_meanwhile(self) -> bool:
        """Whether the generation changed since positions were sent to be stored: what was refused may be right by now."""
        return self._saving != self.generation

    # Messages.

    def load_request(self, bucket: str, version: int) -> stream_pb2.LoadPositionsRequest:
        """Return what asks for the positions that are to be loaded."""
        return stream_pb2.LoadPositionsRequest(
            bucket=bucket,
            bucket_version=version,
            consumer=self.consumer,
            partitions=sorted(self.to_load),
        )

    def save_request(
        self, bucket: str, version: int, positions: Mapping[int, Position]
    ) -> stream_pb2.SavePositionsRequest:
        """Return what stores positions."""
        self._saving = self.generation
        self._sent.update(positions)
        return stream_pb2.SavePositionsRequest(
            bucket=bucket,
            bucket_version=version,
            consumer=self.consumer,
            member=self.member,
            generation=self.generation,
            positions=[position_to_message(p, position) for p, position in positions.items()],
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
        f"consumer {consumer!r} has another owner by now: the positions of {some} were not stored",
        hint="give each consumer its own name, or share the work: changes(group=...)",
    )
