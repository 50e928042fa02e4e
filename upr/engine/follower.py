"""One Follow call: its streams, and what each of them is sent next.

A stream reads from the store while its seqno is below the partition's stored high, and from the tail above.
Streams that read the tail from the same entry on form a group, so that a frame for all of them is taken with a
few vectorised statements; a group that falls behind the tail goes back to the store. Nothing is queued for a
consumer beyond its credit: the service asks for the next frame when it can send one.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.engine.exact import beyond_end
from upr.engine.opening import NO_END, OpenStreams
from upr.engine.streams import (
    FINISHED,
    Ended,
    EndReason,
    FrameOut,
    purged,
)
from upr.storage.reading import ReadResult
from upr.storage.store import ReadRequest
from upr_protocol.block import I64, U64, Runs
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.limits import FRAME_BYTES
from upr_protocol.records import POSITION

READ_PARTITIONS: Final = 64
"""Partitions asked for in one read of the store."""
STEPS_AT_ONCE: Final = 4
"""How often a frame is looked for in one step when the tail holds nothing for this follower."""


class Follower(OpenStreams):
    """The streams of one Follow call, and what it is sent."""

    # Acknowledging

    def acknowledge(self, partitions: I64, seqnos: U64, now: int) -> bool:
        """Take the consumer's durable positions; False when they are not kept, see ``Consumers``.

        What concerns no stream that this call opened under the partition's newest id is passed over. A stream that
        has ended is still acknowledged: its consumer stores the last frame when the end is on its way already.

        Args:
            partitions, seqnos: as from ``read_positions``.
            now: microseconds since the epoch.

        Raises:
            InvalidArgumentError: a seqno is above what the stream was sent; nothing is taken.
        """
        ids = self._id[partitions]
        known = (ids != 0) & (ids == self._table.newest_id[partitions])
        partitions, seqnos, ids = partitions[known], seqnos[known], ids[known]
        ahead = np.flatnonzero(seqnos > self._seqno[partitions])
        if len(ahead):
            partition, seqno = int(partitions[ahead[0]]), int(seqnos[ahead[0]])
            raise InvalidArgumentError(
                f"an Ack of partition {partition} at seqno {seqno}, it was sent up to {self._seqno[partition]}",
                hint="acknowledge only what was received in this call",
            )
        name = self.options.consumer
        if self.seat is not None:
            mine = self.seat.owns(partitions)
            partitions, seqnos, ids = partitions[mine], seqnos[mine], ids[mine]
        elif not name or self._bucket.consumers.get(name) is not self:
            return True
        generation = self._bucket.owners.generation(name)
        return self._bucket.consumer_positions.acknowledge(
            name, partitions, seqnos, ids, now, generation
        )

    # Purging

    @property
    def name(self) -> str:
        """How operators know it: its consumer name, or where it calls from."""
        return self.options.consumer or self.options.peer

    @property
    def peer(self) -> str:
        """Where it calls from."""
        return self.options.peer

    def passed(self) -> U64:
        """Return up to where each partition's tombstones are passed, shape (1024,).

        NO_END without a stream; and at seqno 0, where nothing was shown yet that could be deleted.
        """
        return np.where((self._token != 0) & (self._seqno > 0), self._seqno, NO_END)

    def purge_begins(self, partitions: I64, seqnos: U64) -> None:
        """End the streams between 0 and a purge seqno; have those at 0 read again from the store.

        What these have read already may hold a key whose tombstone is about to go. They find ``purging`` set and
        wait until the purge is stored.
        """
        if self._reading:
            # Whoever asked for what is being read may have ended, and another stream may begin at 0 meanwhile.
            self._stale.update(partitions.tolist())
        below = (self._token[partitions] != 0) & (self._seqno[partitions] < seqnos)
        partitions, seqnos = partitions[below], seqnos[below]
        at_0 = self._seqno[partitions] == 0
        closed = self._close(partitions[~at_0].tolist())
        for stream, seqno in zip(closed, seqnos[~at_0].tolist(), strict=True):
            at = int(self._seqno[stream[0]])
            self._ended.append(Ended([stream], purged(stream[0], at, seqno)))
        if at_0.any():
            again = partitions[at_0].tolist()
            gone = set(again)
            self._ready = [item for item in self._ready if item[0] not in gone]
            self._groups.leave(again)
            self._from_store[again] = True
        self.wake()

    def take_purge_seqnos(self) -> list[tuple[int, int]]:
        """Return (partition, purge seqno) of the open streams that were not told of it yet."""
        if self._seen_raises == self._bucket.purge_raises:
            return []
        self._seen_raises = self._bucket.purge_raises
        raised = (self._token != 0) & (self._table.purge > self._told_purge)
        self._told_purge[raised] = self._table.purge[raised]
        partitions = np.flatnonzero(raised)
        return list(zip(partitions.tolist(), self._table.purge[partitions].tolist(), strict=True))

    # Reading the store

    def next_read(self) -> tuple[list[ReadRequest], int] | None:
        """Return what to read from the store next and at most how many bytes; None when nothing is to be."""
        if self._reading or self._ready:
            return None
        waiting = np.flatnonzero(self._from_store & (self._bucket.purging <= self._seqno))
        if not len(waiting) or not self.credit.may_send(1):
            return None
        # Turns are fair: a read begins behind the last partition that the one before it found blocks of.
        first = int(np.searchsorted(waiting, self._turn)) % len(waiting)
        chosen = np.roll(waiting, -first)[:READ_PARTITIONS].tolist()
        self._reading = True
        left = self.credit.window - self.credit.outstanding
        requests = [ReadRequest(p, int(self._seqno[p]), int(self._token[p])) for p in chosen]
        return requests, min(FRAME_BYTES, left)

    def feed(self, results: Sequence[ReadResult]) -> None:
        """Take what was read; results of streams that ended or moved meanwhile are dropped."""
        self._reading = False
        stale, self._stale = self._stale, set()
        for result in results:
            partition, above = result.request.partition, result.request.above
            if partition in stale:
                continue
            if not self._from_store[partition] or int(self._seqno[partition]) != above:
                continue
            if result.error is not None:
                why = EndReason("STORAGE_ERROR", False, result.error.message, result.error.hint)
                self._end([partition], why)
                continue
            if result.blocks:
                self._turn = partition + 1
            token = int(self._token[partition])
            if self.options.plain_rows and token != result.request.token:
                # What these cost was counted with the token of a stream that is gone; they are read again.
                continue
            self._ready += [(partition, token, block) for block in result.blocks]

    def read_failed(self, error: UprError, requests: Sequence[ReadRequest]) -> None:
        """End the streams whose read failed as a whole."""
        self._reading = False
        self._stale.clear()
        why = EndReason("STORAGE_ERROR", error.retriable, error.message, error.hint)
        self._end([r.partition for r in requests if self._from_store[r.partition]], why)

    def _return_dropped(self) -> None:
        """Send streams whose place in the tail was flushed away back to the store."""
        for partition in self._groups.take_dropped():
            self._attach(partition)

    # Sending

    def next_frame(self) -> FrameOut | None:
        """Return the next frame within the credit, spent already; None when there is none to be sent now."""
        self._return_dropped()
        frame = self._frame_from_store()
        if frame is None and self._ready:
            # What was read waits for credit. Smaller frames from the tail must not use it up for ever.
            return None
        for _ in range(STEPS_AT_ONCE):
            if frame is None:
                moves = self._groups.moves
                frame = self._frame_from_tail()
                if frame is None and moves == self._groups.moves:
                    return None
            if frame is not None:
                self.credit.spend(frame.size)
                return frame
        # Entries were passed over and there are more: others have their turn first.
        self.wake()
        return None

    def _frame_from_store(self) -> FrameOut | None:
        blocks: list[bytes] = []
        tokens: list[int] = []
        size = 0
        touched: dict[int, None] = {}
        limit = min(FRAME_BYTES, self.credit.window - self.credit.outstanding)
        while self._ready:
            partition, token, block = self._ready[0]
            fits = size + block.size <= limit if blocks else self.credit.may_send(block.size)
            if not fits:
                break
            self._ready.pop(0)
            touched[partition] = None
            if self._is_done(partition):
                continue
            run = block.runs[0]
            if run["horizon"] > self._limit[partition]:
                self._reach_beyond(block.runs)
                continue
            blocks.append(block.data)
            tokens.append(token)
            size += block.size
            self._seqno[partition] = run["end_seqno"]
            self._horizon[partition] = max(self._horizon[partition], run["horizon"])
        for partition in touched:
            if self._token[partition] and not any(item[0] == partition for item in self._ready):
                self._attach(partition)
        self._end([p for p in touched if self._is_done(p)], FINISHED)
        return FrameOut(blocks, np.array(tokens, "<u4").tobytes(), size) if blocks else None

    def _is_done(self, partition: int) -> bool:
        """Whether a stream stands at a complete marker at or above its end."""
        seqno = self._seqno[partition]
        return bool(seqno >= self._until[partition] and self._horizon[partition] <= seqno)

    def _reach_beyond(self, runs: Runs) -> None:
        """End the streams whose next run reaches beyond their exact end."""
        for run in runs:
            partition, end, horizon = (
                int(run[name]) for name in ("partition", "end_seqno", "horizon")
            )
            exact, at = int(self._limit[partition]), int(self._seqno[partition])
            gone = beyond_end(partition, exact, at, end, horizon)
            why = EndReason(gone.reason, gone.retriable, gone.message, gone.hint)
            self._end([partition], why)

    def _frame_from_tail(self) -> FrameOut | None:
        left = self.credit.window - self.credit.outstanding
        if left <= 0:
            return None
        exact = bool((self._limit != NO_END).any())
        taken = self._groups.take(
            self._seqno,
            self._horizon,
            self._until,
            min(FRAME_BYTES, left),
            self._token,
            self._limit if exact else None,
        )
        if taken is None:
            return None
        if not self.credit.may_send(taken.size):
            # One block larger than what is left: it goes alone, once everything else was consumed.
            return None
        self._groups.commit(taken)
        runs = taken.runs
        partitions = runs["partition"]
        tokens = self._token[partitions].astype("<u4").tobytes()
        self._seqno[partitions] = runs["end_seqno"]
        # Of several runs of a partition in one frame the last one counts, and its horizon is the highest.
        self._horizon[partitions] = np.maximum(self._horizon[partitions], runs["horizon"])
        seqnos = self._seqno[partitions]
        done = (seqnos >= self._until[partitions]) & (self._horizon[partitions] <= seqnos)
        if done.any():
            self._end(partitions[done].tolist(), FINISHED)
        if taken.beyond is not None:
            self._reach_beyond(taken.beyond)
        return FrameOut(taken.blocks, tokens, taken.size) if taken.blocks else None

    # Telling the lag

    def stream_counts(self) -> tuple[int, int]:
        """Return how many streams are open, and how many of them go on from the store."""
        behind = (self._token != 0) & (self._seqno < self._table.stored)
        return int(np.count_nonzero(self._token)), int(np.count_nonzero(behind))

    def moved_high_seqnos(self) -> npt.NDArray[np.void]:
        """Return the partitions and high seqnos of the open streams whose high seqno moved since the last call.

        Returns:
            dtype POSITION, one item a stream.
        """
        moved = (self._token != 0) & (self._table.high != self._told_high)
        self._told_high[moved] = self._table.high[moved]
        partitions = np.flatnonzero(moved)
        told = np.zeros(len(partitions), POSITION)
        told["partition"], told["seqno"] = partitions, self._table.high[partitions]
        return told
