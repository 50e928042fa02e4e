"""What was delivered, and how far it is consumed. The same in both flavours."""

import numpy as np
import numpy.typing as npt

from upr_client.events import Change, ChangeBatch, Marker, Rollback, markers_of
from upr_client.recent_keys import KeysAbove
from upr_protocol.block import Block
from upr_protocol.consumer import Delivery, PendingRollback, ProtocolError
from upr_protocol.wire.joining import joined_blocks
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


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
    return ChangeBatch(delivery.blocks, lambda: markers_of(delivery.markers()), delivery=delivery)


def rollback_of(pending: PendingRollback, above: KeysAbove) -> Rollback:
    """Return what a pending rollback is for the application; ``above`` are the keys that it concerns."""
    return Rollback(
        pending.partition,
        pending.from_seqno,
        pending.seqno,
        pending.old_id,
        pending.new_id,
        pending.rule,
        pending.words,
        above.keys,
        above.complete,
    )


class Taken:
    """A batch that was handed to the application, and how much of it was consumed one by one."""

    __slots__ = ("_bounds", "_count", "_events", "batch", "delivery")

    def __init__(self, batch: ChangeBatch, delivery: Delivery | None) -> None:
        self.delivery = delivery
        self.batch = batch
        self._events: list[Change | Marker | Rollback] | None = None
        self._bounds: npt.NDArray[np.int64] | None = None
        self._count = 0

    def next_event(self) -> Change | Marker | Rollback | None:
        """Return the next event, None when there is none left; what was returned before it is consumed."""
        if self._events is None:
            self._events = self.batch.events()
            if self.delivery is not None:
                self._bounds = self.batch.bounds() + np.cumsum(self.delivery.is_marker)
        count = self._count
        if count == len(self._events):
            return None
        self._count = count + 1
        return self._events[count]

    @property
    def has_more(self) -> bool:
        """Whether events were asked for one by one, and there are more of them."""
        return self._events is not None and self._count < len(self._events)

    def consumed(self) -> tuple[int, int | None]:
        """How many runs were consumed, and up to which seqno the next one; the newest event is not."""
        done = self._count - 1
        if self._events is None or self._bounds is None or done <= 0:
            return 0, None
        runs = int(np.searchsorted(self._bounds, done, side="right"))
        first = int(self._bounds[runs - 1]) if runs else 0
        last = self._events[done - 1]
        return runs, last.seqno if done > first else None
