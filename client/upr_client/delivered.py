"""What was delivered and how far it is consumed; the options of following. The same in both flavours."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from upr_client.events import Change, ChangeBatch, Marker, Rollback, markers_of
from upr_client.messages import STABILITIES, check_name, choice
from upr_client.positions import PositionStore
from upr_protocol.block import Block
from upr_protocol.consumer import ConsumerSession, Delivery, PendingRollback, Pin, ProtocolError
from upr_protocol.credit import check_window
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import PARTITIONS
from upr_protocol.liveness import check_interval
from upr_protocol.position import Position
from upr_protocol.wire.compression import zstd_available
from upr_protocol.wire.joining import joined_blocks
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


@dataclass(frozen=True, slots=True)
class ChangesOptions:
    """How to follow; the meanings are those of ``AsyncBucket.changes``.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    consumer: str
    positions: PositionStore | None
    until_now: bool
    stability: str
    keys_only: bool
    on_rollback: Callable[[Rollback], Any] | Literal["event"] | None
    markers_at_record: bool
    credit_bytes: int
    heartbeat_seconds: float
    save_seconds: float
    retry_seconds: float | None
    on_status: Callable[[str], Any] | None
    until: Mapping[int, Pin] | None = None

    def __post_init__(self) -> None:
        choice(STABILITIES, self.stability, "stability")
        check_window(self.credit_bytes)
        check_interval(self.heartbeat_seconds)
        if self.consumer:
            check_name(self.consumer, "consumer")
        if not (self.on_rollback in (None, "event") or callable(self.on_rollback)):
            raise InvalidArgumentError(
                f'on_rollback is {self.on_rollback!r}, it must be None, "event" or a function'
            )
        if self.until is not None and self.until_now:
            raise InvalidArgumentError("until and until_now were given, a stream has one end")
        if not self.save_seconds >= 0:
            raise InvalidArgumentError(f"save_seconds is {self.save_seconds}, it must be 0 or more")
        if self.retry_seconds is not None and not self.retry_seconds >= 0:
            raise InvalidArgumentError(
                f"retry_seconds is {self.retry_seconds}, it must be 0 or more"
            )

    def session(
        self, partitions: Iterable[int] | None, positions: Mapping[int, Position]
    ) -> ConsumerSession:
        """Return the state machine for these partitions; None means all."""
        return ConsumerSession(
            range(PARTITIONS) if partitions is None else partitions,
            positions,
            until_now=self.until_now,
            inclusive=self.markers_at_record,
            exact=self.until,
        )

    def open_message(self, bucket: str, version: int | None) -> stream_pb2.Open:
        """Return the first message of a Follow call."""
        return stream_pb2.Open(
            bucket=bucket,
            bucket_version=version,
            consumer=self.consumer,
            credit_bytes=self.credit_bytes,
            heartbeat_seconds=self.heartbeat_seconds,
            stability=STABILITIES[self.stability],
            keys_only=self.keys_only,
            accept_zstd=zstd_available(),
        )


def decode_frame(frame: stream_pb2.Frame) -> tuple[list[Block], npt.NDArray[np.uint32]]:
    """Return a frame's blocks, checked whole and small ones joined, and the token of each run.

    Raises:
        InvalidArgumentError: a block is damaged or out of its limits.
        ProtocolError: there is no block, or the tokens cannot be read.
    """
    if not frame.blocks or len(frame.tokens) % 4:
        raise ProtocolError(
            f"a frame of {len(frame.blocks)} blocks with {len(frame.tokens)} bytes of tokens"
        )
    return joined_blocks(frame.blocks, np.frombuffer(frame.tokens, "<u4"))


def batch_of(delivery: Delivery) -> ChangeBatch:
    """Return what a delivery is for the application."""
    return ChangeBatch(delivery.blocks, lambda: markers_of(delivery.markers()))


def rollback_of(pending: PendingRollback) -> Rollback:
    """Return what a pending rollback is for the application."""
    return Rollback(
        pending.partition,
        pending.from_seqno,
        pending.seqno,
        pending.old_id,
        pending.new_id,
        pending.rule,
        pending.words,
    )


class Taken:
    """A batch that was handed to the application, and how much of it was consumed one by one."""

    __slots__ = ("_batch", "_bounds", "_count", "_events", "delivery")

    def __init__(self, batch: ChangeBatch, delivery: Delivery | None) -> None:
        self.delivery = delivery
        self._batch = batch
        self._events: list[Change | Marker | Rollback] | None = None
        self._bounds: npt.NDArray[np.int64] | None = None
        self._count = 0

    def next_event(self) -> Change | Marker | Rollback | None:
        """Return the next event, None when there is none left; what was returned before it is consumed."""
        if self._events is None:
            self._events = self._list_events()
        count = self._count
        if count == len(self._events):
            return None
        self._count = count + 1
        return self._events[count]

    def _list_events(self) -> list[Change | Marker | Rollback]:
        if self.delivery is None:
            return list(self._batch.rollbacks)
        counts = np.concatenate([block.runs["count"] for block in self._batch.blocks])
        bounds = np.cumsum(counts, dtype=np.int64)
        changes = self._batch.changes
        events: list[Change | Marker | Rollback] = []
        first = 0
        is_marker = self.delivery.is_marker
        # Only markers are put in one by one; the changes between two of them go in at once.
        for at, marker in zip(bounds[is_marker].tolist(), self._batch.markers, strict=True):
            events += changes[first:at]
            events.append(marker)
            first = at
        events += changes[first:]
        self._bounds = bounds + np.cumsum(is_marker)
        return events

    def consumed(self) -> tuple[int, int | None]:
        """How many runs were consumed, and up to which seqno the next one; the newest event is not."""
        done = self._count - 1
        if self._events is None or self._bounds is None or done <= 0:
            return 0, None
        runs = int(np.searchsorted(self._bounds, done, side="right"))
        first = int(self._bounds[runs - 1]) if runs else 0
        last = self._events[done - 1]
        return runs, last.seqno if done > first else None
