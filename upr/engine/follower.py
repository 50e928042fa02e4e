"""One Follow call: its streams, and what each of them is sent next.

A stream reads from the store while its seqno is below the partition's stored high, and from the tail above.
Streams that read the tail from the same entry on form a group, so that a frame for all of them is taken with a
few vectorised statements; a group that falls behind the tail goes back to the store. Nothing is queued for a
consumer beyond its credit: the service asks for the next frame when it can send one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.engine.bucket import Bucket
from upr.engine.exact import beyond_end, no_such_end
from upr.engine.groups import TailGroups
from upr.engine.partitions import ACTIVE
from upr.engine.streams import (
    FINISHED,
    STOPPED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    FrameOut,
    Refused,
    RolledBack,
    Started,
    StartRequest,
    purged,
)
from upr.storage.merge import Encoded
from upr.storage.reading import ReadResult
from upr.storage.store import ReadRequest
from upr_protocol.block import I64, U64, Runs
from upr_protocol.credit import CreditWindow
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, check_failover_id, check_partition, check_seqno
from upr_protocol.handshake import answer_start
from upr_protocol.limits import FRAME_BYTES, PARTITIONS

NO_END: Final = np.iinfo(np.uint64).max
READ_PARTITIONS: Final = 64
"""Partitions asked for in one read of the store."""
STEPS_AT_ONCE: Final = 4
"""How often a frame is looked for in one step when the tail holds nothing for this follower."""


class Follower:
    """The streams of one Follow call.

    Args:
        wake: called when there may be something to send again.
    """

    def __init__(
        self, bucket: Bucket, options: FollowOptions, credit: CreditWindow, wake: Callable[[], None]
    ) -> None:
        self.options = options
        self.credit = credit
        self.wake = wake
        self.on_superseded: Callable[[], None] | None = None
        self._bucket = bucket
        self._table = bucket.partitions
        self._token = np.zeros(PARTITIONS, np.uint32)
        self._last_token = 0
        self._seqno: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        self._id: U64 = np.zeros(PARTITIONS, np.uint64)
        self._until: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._limit: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._from_store: npt.NDArray[np.bool_] = np.zeros(PARTITIONS, bool)
        self._groups = TailGroups(bucket.tail, options.memory)
        self._ready: list[tuple[int, int, Encoded]] = []
        self._reading = False
        self._turn = 0
        self._told_high: U64 = np.zeros(PARTITIONS, np.uint64)
        self._told_purge: U64 = np.zeros(PARTITIONS, np.uint64)
        self._seen_raises = 0
        self._stale: set[int] = set()
        self._ended: list[Ended] = []

    # Starting and ending

    def start(self, requests: Sequence[StartRequest]) -> list[Answer]:
        """Decide on each request, and open what may be opened, in this one step ("Handshake", step 3)."""
        return [self._start(request) for request in requests]

    def _start(self, request: StartRequest) -> Answer:
        table = self._table
        partition = request.partition
        try:
            check_partition(partition)
            check_seqno(request.seqno)
            if request.until_seqno is not None:
                check_seqno(request.until_seqno, "until_seqno")
            if request.until_exact is not None:
                check_seqno(request.until_exact, "until_exact")
            for failover_id in (request.failover_id, request.data_id):
                if failover_id is not None:
                    check_failover_id(failover_id)
        except UprError as error:
            return Refused(partition, error)
        if not table.serves(partition):
            return Refused(partition, table.refusal(partition))
        if self._token[partition]:
            self._end([partition], STOPPED)
        self._id[partition] = 0
        log, high = table.logs[partition], int(table.high[partition])
        answer = answer_start(
            log,
            failover_id=request.failover_id,
            seqno=request.seqno,
            data_id=request.data_id,
            high_seqno=high,
            purge_seqno=int(table.purge[partition]),
            active=bool(table.state[partition] == ACTIVE),
        )
        if answer.kind == "rollback":
            return RolledBack(partition, answer, log)
        if answer.kind == "behind":
            behind = UprError(answer.words, reason="BEHIND", retriable=True, hint="try again later")
            return Refused(partition, behind)
        if request.until_exact is not None:
            gone = no_such_end(partition, request.until_exact, request.seqno, high)
            if gone is not None:
                return Refused(partition, gone)
        return self._open(request, log, high)

    def _open(self, request: StartRequest, log: FailoverLog, high: int) -> Started:
        partition = request.partition
        until = high if request.until_now else request.until_seqno
        if (exact := request.until_exact) is not None:
            until = exact
        self._last_token += 1
        self._token[partition] = self._last_token
        self._seqno[partition] = request.seqno
        self._id[partition] = log.newest.failover_id
        if self.options.consumer:
            positions = self._bucket.consumer_positions
            name, newest_id = self.options.consumer, log.newest.failover_id
            positions.started(name, partition, newest_id, request.seqno)
        self._horizon[partition] = request.seqno
        self._told_purge[partition] = self._table.purge[partition]
        self._until[partition] = NO_END if until is None else until
        self._limit[partition] = NO_END if exact is None else exact
        self._attach(partition)
        if until is not None and until <= request.seqno:
            self._end([partition], FINISHED)
        return Started(
            partition,
            self._last_token,
            log.newest.failover_id,
            high,
            int(self._table.purge[partition]),
            until,
            log if request.seqno == 0 or request.failover_id is None else None,
        )

    def _attach(self, partition: int) -> None:
        """Have a stream read on where its seqno lies: in the store, or in the tail."""
        seqno = int(self._seqno[partition])
        if seqno < int(self._table.stored[partition]):
            self._from_store[partition] = True
            return
        self._from_store[partition] = False
        self._groups.join(partition, self._bucket.tail.find(partition, seqno))

    def stop(self, partitions: Iterable[int]) -> None:
        """End streams at the consumer's wish; what is not open is passed over."""
        self._end([p for p in partitions if 0 <= p < PARTITIONS], STOPPED)

    def end_all(self, why: EndReason) -> None:
        """End every open stream."""
        self._end(np.flatnonzero(self._token).tolist(), why)
        self.wake()

    def _end(self, partitions: Iterable[int], why: EndReason) -> None:
        streams = self._close(partitions)
        if streams:
            self._ended.append(Ended(streams, why))

    def _close(self, partitions: Iterable[int]) -> list[tuple[int, int]]:
        """Close the open ones among streams, and return them as (partition, token): their ends are to be told."""
        streams = [(p, int(self._token[p])) for p in dict.fromkeys(partitions) if self._token[p]]
        if not streams:
            return []
        gone = [p for p, _ in streams]
        self._token[gone] = 0
        self._limit[gone] = NO_END
        self._from_store[gone] = False
        self._groups.leave(gone)
        self._ready = [item for item in self._ready if self._token[item[0]] == item[1]]
        return streams

    @property
    def has_ended(self) -> bool:
        """Whether ends wait to be told."""
        return bool(self._ended)

    def take_ended(self) -> list[Ended]:
        """Return, once, the ends that are to be told, oldest first."""
        ended, self._ended = self._ended, []
        return ended

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
        if not name or self._bucket.consumers.get(name) is not self:
            return True
        return self._bucket.consumer_positions.acknowledge(name, partitions, seqnos, ids, now)

    # Purging

    @property
    def name(self) -> str:
        """How operators know it: its consumer name, or where it calls from."""
        return self.options.consumer or self.options.peer

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
        requests = [ReadRequest(p, int(self._seqno[p])) for p in chosen]
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
            fits = (
                size + len(block.data) <= limit if blocks else self.credit.may_send(len(block.data))
            )
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
            size += len(block.data)
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
            self.options.keys_only,
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

    def moved_high_seqnos(self) -> list[tuple[int, int]]:
        """Return (partition, high seqno) of the open streams whose high seqno moved since the last call."""
        moved = (self._token != 0) & (self._table.high != self._told_high)
        self._told_high[moved] = self._table.high[moved]
        partitions = np.flatnonzero(moved)
        return list(zip(partitions.tolist(), self._table.high[partitions].tolist(), strict=True))
