"""The follower: the streams of one Follow call, how each is opened, and its next frame.

A stream reads from the store while its seqno is below the partition's stored high, and from the tail above.
Streams that read the tail from the same entry on form a group, so that a frame for all of them is taken with a
few vectorised statements; a group that falls behind the tail goes back to the store. Nothing is queued for a
consumer beyond its credit: the service asks for the next frame when it can send one.

A start from now begins at the newest complete durable marker. A start from a time begins where that time was passed. A
reader thread searches the stored blocks first (``upr.storage.search``); a flush since then makes the stream begin a
little earlier, never later.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from upr.engine.bucket import Bucket
from upr.engine.groups import Seat
from upr.engine.partitions import ACTIVE
from upr.engine.streams import (
    FINISHED,
    STOPPED,
    Answer,
    Ended,
    EndReason,
    FollowOptions,
    FrameOut,
    PlainStarts,
    Refused,
    RolledBack,
    Started,
    StartRequest,
    beyond_end,
    no_such_end,
    not_owner,
    not_stable,
    purged,
)
from upr.engine.tail import Tail
from upr.engine.tail_readers import Selection, TailReaders, Waiting
from upr.storage.blocks import Encoded
from upr.storage.read import ReadResult
from upr.storage.search import StoredBeginning
from upr.storage.store import ReadRequest
from upr_protocol.block import I64, POSITION, U64, Runs
from upr_protocol.errors import (
    BehindError,
    InvalidArgumentError,
    UprError,
)
from upr_protocol.failover import FailoverLog, check_failover_id, check_partition, check_seqno
from upr_protocol.flow import CreditWindow
from upr_protocol.handshake import answer_start
from upr_protocol.limits import FRAME_BYTES, PARTITIONS, READ_BYTES
from upr_protocol.position_table import STARTED


class Beginnings:
    """Start seqno for ``from_now`` and ``from_time``, valid within one engine step.

    Args:
        markers: the partitions' newest complete durable markers, shape (1024,).
    """

    def __init__(self, markers: U64, tail: Tail) -> None:
        self._markers = markers
        self._tail = tail
        self._highs: dict[int, U64] = {}

    def of(self, request: StartRequest) -> int:
        """Return the seqno at which a request without a position begins."""
        if request.from_time is None:
            # Nothing written after this step is at or below it.
            return int(self._markers[request.partition])
        assert isinstance(request.stored, StoredBeginning), "the store must have been searched"
        return self.at_time(request.partition, request.from_time, request.stored)

    def at_time(self, partition: int, time: int, stored: StoredBeginning) -> int:
        """Return the seqno above which a stream from a time begins.

        If commit times rise with seqnos, no row committed at or after the time is at or below it. If the clock was set
        back, it is one of the seqnos at which the time was passed. It is at most the newest complete durable marker,
        and equals that if no commit is as late.

        Args:
            time: microseconds since the epoch.
            stored: the result of searching the store before this step.
        """
        seqno = stored.seqno
        if not stored.found:
            highs = self._highs.get(time)
            if highs is None:
                highs = self._highs[time] = self._tail.high_at(self._tail.find_time(time))
            seqno = max(seqno, int(highs[partition]))
        return min(seqno, int(self._markers[partition]))


NO_END: Final = np.iinfo(np.uint64).max
READ_PARTITIONS: Final = 64
"""Most partitions in one read of the store."""
FRAMES_UNTIL_JOINED: Final = 16
"""Frames from the store after which the streams that came to its end go on in the tail, and those that came to their own
are told so, if others still read it."""
STEPS_AT_ONCE: Final = 4
"""Most attempts to build a frame in one step while the tail holds nothing for this follower."""


class Follower:
    """Streams of one Follow call, and the next frame; ``wake`` is called when one may be ready again."""

    def __init__(
        self, bucket: Bucket, options: FollowOptions, credit: CreditWindow, wake: Callable[[], None]
    ) -> None:
        self.options = options
        self.credit = credit
        self.wake = wake
        self.on_end: Callable[[EndReason], None] | None = None
        """Called when the engine ends the call as a whole."""
        self.generation = 0
        """Generation of the ownership, for a call that names a consumer and no member."""
        self.seat: Seat | None = None
        """Seat in the group, for a call that names a member."""
        self._bucket = bucket
        self._table = bucket.partitions
        self._token = np.zeros(PARTITIONS, "<u4")
        self._last_token = 0
        self._seqno: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        self._id: U64 = np.zeros(PARTITIONS, np.uint64)
        self._until: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._limit: U64 = np.full(PARTITIONS, NO_END, np.uint64)
        self._has_ends = self._finished = False
        self._from_store: npt.NDArray[np.bool_] = np.zeros(PARTITIONS, bool)
        # Whether there may be any of those, and of those that come from there: a live stream is not looked for.
        self._may_read = self._may_join = False
        self._groups = TailReaders(bucket.tail, options.memory, bucket.followers, options.showing)
        self._waiting = self._groups.waiting = Waiting() if options.copies else None
        self._term = np.zeros(PARTITIONS, np.int64) if options.is_replica else None
        self._ready: list[tuple[int, int, Encoded]] = []
        # Partition, token and size of a block that is read again when it can be sent.
        self._unfit: tuple[int, int, int] | None = None
        self._reading = False
        # Frames from the store since streams joined the tail.
        self._frames_since = 0
        self.reads = 0
        """Number of reads of the store."""
        self.has_tables = False
        """Whether a replica got all small tables, so that it is in step as soon as it has what they name."""
        self._turn = 0
        self._told_high: U64 = np.zeros(PARTITIONS, np.uint64)
        self._told_purge: U64 = np.zeros(PARTITIONS, np.uint64)
        self._to_tell_purge: npt.NDArray[np.bool_] = np.zeros(PARTITIONS, bool)
        self._tells_purge = False
        self._seen_raises = 0
        self._settled_raises = bucket.purge_raises
        self._stale: set[int] = set()
        self._ended: list[Ended] = []
        self._live = False

    # Starting and ending

    def start(self, requests: Sequence[StartRequest]) -> list[Answer]:
        """Answer each request, and open the streams that may be opened, in this step ("Handshake", step 3)."""
        self._settle_purges()
        self._live = False
        stable = self._stable()
        markers = self._bucket.markers.seqno if stable is None else stable
        beginnings = Beginnings(markers, self._bucket.tail)
        refused = [self._refused(request) for request in requests]
        # All at once: one by one this would take half of the time for a thousand streams.
        again = [
            request.partition
            for request, why in zip(requests, refused, strict=True)
            if why is None and self._token[request.partition]
        ]
        self._end(again, STOPPED)
        return [
            why if why is not None else self._start(request, beginnings)
            for request, why in zip(requests, refused, strict=True)
        ]

    def _refused(self, request: StartRequest) -> Refused | None:
        """Return the refusal of a request, without regard to the open streams."""
        table = self._table
        partition = request.partition
        try:
            check_partition(partition)
            check_seqno(request.seqno)
            for name in ("horizon", "until_seqno", "until_exact"):
                if (seqno := getattr(request, name)) is not None:
                    check_seqno(seqno, name)
            for failover_id in (request.failover_id, request.data_id):
                if failover_id is not None:
                    check_failover_id(failover_id)
            request.check_beginning()
        except UprError as error:
            return Refused(partition, error)
        if not table.serves(partition):
            return Refused(partition, table.refusal(partition))
        copies = self.options.copies
        if copies and request.chooses_beginning and self._bucket.copies.unknown(copies, partition):
            return Refused(partition, not_stable(partition, copies))
        if request.epoch > table.epoch[partition]:
            return Refused(
                partition, _replaced(partition, request.epoch, int(table.epoch[partition]))
            )
        if self.seat is not None and not self.seat.may_start(partition):
            return Refused(partition, not_owner(partition, self.options.member))
        return None

    def _start(self, request: StartRequest, beginnings: Beginnings) -> Answer:
        table = self._table
        partition = request.partition
        if self._token[partition]:
            # The request before names it too.
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
            horizon=request.horizon,
        )
        if answer.kind == "rollback":
            return RolledBack(partition, answer, log, self._epoch(partition))
        if answer.kind == "behind":
            return Refused(partition, BehindError(answer.words, hint="retry later"))
        if request.chooses_beginning:
            # No stream may begin between 0 and the purge seqno: after a reconnect it would roll back to 0.
            seqno = beginnings.of(request)
            request = replace(request, seqno=0 if seqno < int(table.purge[partition]) else seqno)
        now = int(self._now()[partition])
        until = now if request.until_now else request.until_seqno
        if request.until_exact is not None:
            gone = no_such_end(partition, request.until_exact, request.seqno, high)
            if gone is not None:
                return Refused(partition, gone)
            until = request.until_exact
        has_all = request.seqno >= now and (until is None or until > request.seqno)
        if self._bucket.failure is not None and has_all and self._left[partition]:
            words = f"partition {partition} gets nothing above seqno {now} here: storage failed"
            return Refused(partition, BehindError(words, hint="read another server of the set"))
        return self._open(request, log, high, until)

    def start_plain(self, asked: PlainStarts) -> tuple[npt.NDArray[np.void], list[StartRequest]]:
        """Open, in this step, all streams whose answer fits a record.

        Returns:
            Their answers, dtype STARTED; and the other requests, for ``start``.
        """
        self._settle_purges()
        self._live = False
        table, tail = self._table, self._bucket.tail
        plain = asked.plain(table)
        if self.seat is not None or self._term is not None or self._left.any():
            plain[:] = False
        self._end(asked.partitions[plain & (self._token[asked.partitions] != 0)].tolist(), STOPPED)
        p, seqnos = asked.partitions[plain], asked.seqnos[plain]
        tokens = self._last_token + 1 + np.arange(len(p))
        self._last_token += len(p)
        highs = table.high[p]
        self._token[p], self._seqno[p], self._id[p] = tokens, seqnos, table.newest_id[p]
        self._horizon[p], self._told_purge[p] = seqnos, table.purge[p]
        ends = self._now()[p]
        self._until[p] = ends if asked.until_now else NO_END
        self._has_ends |= asked.until_now
        self._limit[p] = NO_END
        if name := self.options.consumer:
            self._bucket.consumer_positions.started(name, p, table.newest_id[p], seqnos)
        in_store, caught_up = seqnos < table.stored[p], seqnos >= highs
        self._from_store[p] = in_store
        self._may_read = True
        self._groups.join(p[caught_up & ~in_store], tail.end)
        self._attach(p[~caught_up & ~in_store].tolist())
        if asked.until_now:
            self._end(p[ends <= seqnos].tolist(), FINISHED)
        told = np.zeros(len(p), STARTED)
        told["partition"], told["token"], told["failover_id"] = p, tokens, table.newest_id[p]
        told["high_seqno"], told["purge_seqno"] = highs, table.purge[p]
        told["born"] = asked.needs_log[plain]
        return told, asked.requests(~plain)

    def _now(self) -> U64:
        """Return the newest seqno of each partition that its stream can reach now."""
        bucket = self._bucket
        failed = (bucket.failure is not None or bucket.stalled) and not self.options.memory
        return self._table.durable if failed else self._table.high

    @property
    def _left(self) -> npt.NDArray[np.bool_]:
        """By partition, whether a consumer of any server is to go elsewhere when it has all: no more is stored here."""
        leaves = self.options.any_server and not self.options.is_replica
        if not leaves or self._bucket.failure is None:
            return np.zeros(PARTITIONS, bool)
        left: npt.NDArray[np.bool_] = self._table.state != ACTIVE
        return left

    def _open(
        self, request: StartRequest, log: FailoverLog, high: int, until: int | None
    ) -> Started:
        partition, exact = request.partition, request.until_exact
        self._last_token += 1
        self._token[partition] = self._last_token
        self._seqno[partition] = request.seqno
        self._id[partition] = log.newest.failover_id
        if name := self.options.consumer:
            at, here = np.array([request.seqno], np.uint64), np.array([partition])
            self._bucket.consumer_positions.started(name, here, self._id[here], at)
        self._horizon[partition] = request.seqno
        self._told_purge[partition] = self._table.purge[partition]
        self._until[partition] = NO_END if until is None else until
        self._has_ends |= until is not None
        self._limit[partition] = NO_END if exact is None else exact
        if self._term is not None:
            self._term[partition] = self._bucket.copies.term
            if self._is_sole:
                self._bucket.copies.started(self.options.directory, partition, request.seqno)
        self._attach([partition])
        if until is not None and until <= request.seqno:
            self._end([partition], FINISHED)
        return Started(
            partition,
            self._last_token,
            log.newest.failover_id,
            high,
            int(self._table.purge[partition]),
            until,
            log
            if request.seqno == 0 or request.failover_id is None or self.options.is_replica
            else None,
            request.seqno if request.chooses_beginning else None,
            self._epoch(partition),
        )

    @property
    def _is_sole(self) -> bool:
        """Whether this is the call of its consumer: it names one, and no newer call has taken over."""
        return self._bucket.consumers.get(self.options.consumer) is self

    def _epoch(self, partition: int) -> int:
        """Return a partition's epoch for a replica; a consumer gets none."""
        return int(self._table.epoch[partition]) if self.options.is_replica else 0

    def _attach(self, partitions: Sequence[int], *, soon: bool = False) -> None:
        """Attach each stream to the store or the tail, whichever holds its next seqno.

        Args:
            soon: to the tail with others that come from the store. The few of one read would go through all its entries for
                themselves, and the next few again.
        """
        if not partitions:
            return
        p = np.array(partitions, np.int64)
        in_store = self._seqno[p] < self._table.stored[p]
        self._from_store[p] = in_store
        self._may_read, self._live = True, False
        p = p[~in_store]
        if soon:
            self._groups.coming[p] = self._may_join = True
            return
        for entry, those in self._bucket.tail.find(p, self._seqno[p]):
            self._groups.join(those, entry)

    def _join_tail(self) -> None:
        """Attach the streams that come from the store."""
        self._frames_since = 0
        if self._may_join:
            self._may_join = False
            coming = np.flatnonzero(self._groups.coming).tolist()
            self._groups.coming[:] = False
            self._attach(coming)

    def stop(self, partitions: Iterable[int]) -> None:
        """End streams on request of the consumer; partitions without one are skipped."""
        self._end([p for p in partitions if 0 <= p < PARTITIONS], STOPPED)

    def end_streams(self, partitions: Sequence[int], why: EndReason) -> None:
        self._end(partitions, why)
        self.wake()

    def end_call(self, why: EndReason) -> None:
        self.end_all(why)
        if self.on_end is not None:
            self.on_end(why)

    def end_all(self, why: EndReason) -> None:
        self.end_streams(np.flatnonzero(self._token).tolist(), why)

    def _end(self, partitions: Iterable[int], why: EndReason) -> None:
        streams = self._close(partitions)
        if streams:
            self._finished = self._finished or why is FINISHED
            last = self._ended[-1] if self._ended else None
            if last is not None and last.why is why and len(last.streams) < PARTITIONS:
                # Each Ended is a message: of streams that begin at their end there may be one for each partition.
                last.streams.extend(streams)
            else:
                self._ended.append(Ended(streams, why))

    def _close(self, partitions: Iterable[int]) -> list[tuple[int, int, int]]:
        """Close the open streams among these, and return them as ``Ended.streams``."""
        named = list(dict.fromkeys(partitions))
        if not named:
            return []
        chosen = np.array(named, int)
        chosen = chosen[self._token[chosen] != 0]
        gone = chosen.tolist()
        if not gone:
            return []
        streams = list(
            zip(gone, self._token[chosen].tolist(), self._seqno[chosen].tolist(), strict=True)
        )
        self._token[gone] = 0
        self._until[gone] = self._limit[gone] = NO_END
        self._has_ends = self._has_ends and bool((self._until != NO_END).any())
        self._from_store[gone] = False
        self._groups.leave(gone)
        self._ready = [item for item in self._ready if self._token[item[0]] == item[1]]
        return streams

    @property
    def has_ended(self) -> bool:
        """Return whether Ended messages are due, or a purge may have ended streams."""
        if self._settled_raises != self._bucket.purge_raises:
            return True
        # Each is a message, and each frame from the store may finish streams: they wait for those of the next few.
        if self._frames_since and len(self._ended) == 1 and self._ended[0].why is FINISHED:
            return not self._is_reading()
        return bool(self._ended)

    @property
    def may_wait(self) -> bool:
        """Return whether there is a frame that may wait for more.

        It may when the frame before held all that there was, only the tail has grown since, and no stream has an end.
        """
        return self._live and not self._groups.at_end

    @property
    def has_sent_all(self) -> bool:
        """Return whether the frame before held all that there was, so that whatever is next is preceded by a ``wake``."""
        # The frame may have ended streams itself. After a failure the next look ends those that wait for more.
        return self._live and not self.has_ended and self._bucket.failure is None

    def take_ended(self) -> list[Ended]:
        """Return the waiting ends, once, oldest first."""
        self._settle_purges()
        ended, self._ended = self._ended, []
        return ended

    # Acknowledging

    def acknowledge(self, partitions: I64, seqnos: U64, now: int, *, is_copy: bool = True) -> bool:
        """Record the consumer's durable positions; False when they are not kept, see ``Consumers``.

        Positions of streams that this call did not open under the partition's newest id are ignored. An ended stream
        can still be acknowledged: its consumer may store the last frame after the end was sent.

        Args:
            partitions, seqnos: as from ``read_positions``.
            now: microseconds since the epoch.
            is_copy: whether writes at ``replicated(k)`` may rely on what a replica has.

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
        if is_copy and self._term is not None and self._is_sole:
            ours = self._term[partitions] == self._bucket.copies.term
            self._bucket.acknowledged(self.options.directory, partitions[ours], seqnos[ours])
        if self.seat is not None:
            mine = self.seat.owns(partitions)
            partitions, seqnos, ids = partitions[mine], seqnos[mine], ids[mine]
        elif not self._is_sole:
            return True
        generation = self._bucket.owners.generation(name)
        return self._bucket.consumer_positions.acknowledge(
            name, partitions, seqnos, ids, now, generation
        )

    # Purging

    def passed(self) -> U64:
        """See ``OpenFollower``.

        NO_END without a stream, for a stream that a purge has ended, and at seqno 0, where the reader has nothing to
        delete.
        """
        # Below a processed purge there are only streams that began at 0 after it.
        ended = (self._bucket.raised_last > self._settled_raises) & (
            self._seqno < self._table.purge
        )
        holds = (self._token != 0) & (self._seqno > 0) & ~ended
        return np.where(holds, self._seqno, NO_END)

    def _settle_purges(self) -> None:
        """Apply the purges begun since the last call to the streams, before anything else.

        Not in the step in which they begin: with a thousand followers that step would take most of a second.

        Streams between 0 and a purge seqno end; those at 0 read again from the store: what they have read already may
        hold a key whose tombstone is about to go. They find ``purging`` set and wait until the purge is stored.
        """
        bucket = self._bucket
        if self._settled_raises == bucket.purge_raises:
            return
        partitions = np.flatnonzero(bucket.raised_last > self._settled_raises)
        self._settled_raises = bucket.purge_raises
        seqnos = self._table.purge[partitions]
        if self._reading:
            # The stream that asked for the pending read may have ended, and another may begin at 0 meanwhile.
            self._stale.update(partitions.tolist())
        below = (self._token[partitions] != 0) & (self._seqno[partitions] < seqnos)
        partitions, seqnos = partitions[below], seqnos[below]
        at_0 = self._seqno[partitions] == 0
        closed = self._close(partitions[~at_0].tolist())
        for stream, seqno in zip(closed, seqnos[~at_0].tolist(), strict=True):
            self._ended.append(Ended([stream], purged(stream[0], stream[2], seqno)))
        if at_0.any():
            again = partitions[at_0].tolist()
            gone = set(again)
            self._ready = [item for item in self._ready if item[0] not in gone]
            self._groups.leave(again)
            self._from_store[again] = self._may_read = True
            self._live = False

    def _note_raises(self) -> None:
        """Note the purge seqnos for the next frame, before it is built: streams may end with it."""
        self._seen_raises = self._bucket.purge_raises
        self._to_tell_purge |= (self._token != 0) & (self._table.purge > self._told_purge)
        self._tells_purge = bool(self._to_tell_purge.any())

    def take_purge_seqnos(self) -> list[tuple[int, int]]:
        """Return (partition, purge seqno) of the streams whose purge seqno is new with the frame just built."""
        if self._seen_raises != self._bucket.purge_raises:
            self._note_raises()
        if not self._tells_purge:
            return []
        raised = self._to_tell_purge & (self._table.purge > self._told_purge)
        self._to_tell_purge[:] = self._tells_purge = False
        self._told_purge[raised] = self._table.purge[raised]
        partitions = np.flatnonzero(raised)
        return list(zip(partitions.tolist(), self._table.purge[partitions].tolist(), strict=True))

    # Reading the store

    def next_read(self) -> tuple[list[ReadRequest], int] | None:
        """Return the next read of the store and its byte limit; None when no stream needs one."""
        self._settle_purges()
        if self._live or self._reading or self._ready:
            return None
        waiting = np.flatnonzero(self._from_store & (self._bucket.purging <= self._seqno))
        size = self._unfit[2] if self._unfit is not None and self._is_held_up() else 1
        if not len(waiting) or not self.credit.may_send(size):
            if self._groups.coming.any() or self._ended:
                self._join_tail()
                self.wake()
            return None
        # Turns are fair: a read begins behind the last partition that the one before it found blocks of.
        first = int(np.searchsorted(waiting, self._turn)) % len(waiting)
        chosen = np.roll(waiting, -first)[:READ_PARTITIONS].tolist()
        self._reading = True
        self.reads += 1
        left = self.credit.window - self.credit.outstanding
        requests = list(map(ReadRequest, chosen, self._seqno[chosen].tolist()))
        return requests, min(READ_BYTES, left)

    def feed(self, results: Sequence[ReadResult]) -> None:
        """Add the result of a read; blocks of streams that ended or moved since are dropped."""
        self._settle_purges()
        self._reading = False
        self._unfit = None
        stale, self._stale = self._stale, set()
        for result in results:
            partition, above = result.request.partition, result.request.above
            if partition in stale:
                continue
            if not self._from_store[partition] or self._seqno.item(partition) != above:
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
        self._settle_purges()
        self._reading = False
        self._stale.clear()
        why = EndReason("STORAGE_ERROR", error.retriable, error.message, error.hint)
        self._end([r.partition for r in requests if self._from_store[r.partition]], why)

    def _stable(self) -> U64 | None:
        """Return the largest seqnos that may be shown; None where all that is durable may be."""
        copies = self.options.copies
        return self._bucket.copies.stable(copies) if copies else None

    # Sending

    def next_frame(self) -> FrameOut | None:
        """Return the next frame, and spend its credit; None when there is nothing to send or no credit."""
        if self._seen_raises != self._bucket.purge_raises:
            self._settle_purges()
            self._note_raises()
        if dropped := self._groups.take_dropped():
            # Their place in the tail was flushed away: they go back to the store.
            self._attach(dropped)
        stable = None if self._waiting is None else self._stable()
        if stable is not None:
            # Streams whose next run has become stable go on.
            self._attach(self._groups.take_stable(stable))
        frame = None
        if not self._live:
            frame = self._frame_from_store(stable)
            self._frames_since += frame is not None
            if self._frames_since >= FRAMES_UNTIL_JOINED or not self._is_reading():
                self._join_tail()
            if frame is None and (self._ready or self._is_held_up()):
                # Blocks from the store wait for credit. Smaller frames from the tail must not use it up for ever.
                # A consumer may take as long as it likes to give credit: what it waits for is not kept.
                self.put_back()
                return None
        for _ in range(STEPS_AT_ONCE):
            if frame is None:
                moves = self._groups.moves
                frame = self._frame_from_tail(stable)
                if frame is None and moves == self._groups.moves:
                    if self._bucket.failure is not None:
                        self._end_waiting(self._bucket.failure)
                    return None
            if frame is not None:
                frame.cost = self.credit.spend(frame.size)
                is_live = self._live or not (self._has_ends or self._is_reading())
                self._live = is_live and self._groups.at_end
                return frame
        # Entries were passed over and there are more: others have their turn first.
        self.wake()
        return None

    def put_back(self) -> None:
        """Forget the blocks that were read, because the first of them cannot be sent now; they are read again."""
        if self._ready:
            partition, token, block = self._ready[0]
            self._unfit = partition, token, block.size
            self._turn = partition
            self._ready.clear()

    @property
    def unfit_bytes(self) -> int:
        """Size of the block that is to be read again, 0 if there is none."""
        return self._unfit[2] if self._unfit is not None else 0

    def _is_held_up(self) -> bool:
        """Return whether a block of an open stream was put back."""
        if self._unfit is None:
            return False
        partition, token, _ = self._unfit
        return bool(self._token[partition] == token and self._from_store[partition])

    @property
    def ready_bytes(self) -> int:
        """Return the bytes of blocks that were read, and not sent."""
        return sum([block.size for _, _, block in self._ready]) if self._ready else 0

    @property
    def is_past_store(self) -> bool:
        """Whether there are streams, or were, and each of them has read what it wants of the store."""
        return (self._finished or bool(self._token.any())) and not self._is_reading()

    def _is_reading(self) -> bool:
        if self._may_read:
            self._may_read = bool(self._from_store.any())
        return self._reading or bool(self._ready) or self._may_read

    def _end_waiting(self, failure: UprError) -> None:
        """End the streams that have everything durable: after a failed journal, nothing more becomes durable."""
        last = self._table.high if self.options.memory else self._table.durable
        unmet = (self._until != NO_END) & (self._until > self._seqno) | self._left
        waiting = (self._token != 0) & (self._seqno >= last) & ((self._table.high > last) | unmet)
        if waiting.any():
            words = f"changes that the stream waits for cannot become durable: {failure.message}"
            why = EndReason("STORAGE_ERROR", failure.retriable, words, failure.hint)
            self._end(np.flatnonzero(waiting).tolist(), why)
            self.wake()

    def _frame_from_store(self, stable: U64 | None) -> FrameOut | None:
        if not self._ready:
            return None
        blocks: list[bytes] = []
        tokens: list[int] = []
        size = rows = 0
        touched: dict[int, None] = {}
        # A read ends with the block that reaches READ_BYTES: a frame of its own for that would cost as much as the others.
        limit = min(2 * FRAME_BYTES, self.credit.window - self.credit.outstanding)
        while self._ready:
            partition, token, block = self._ready[0]
            fits = size + block.size <= limit if blocks else self.credit.may_send(block.size)
            if not fits:
                break
            self._ready.pop(0)
            touched[partition] = None
            if self._is_done(partition):
                continue
            _, count, _, end, horizon, _ = block.runs.item()
            if horizon > self._limit.item(partition):
                self._reach_beyond(block.runs)
                continue
            if self._must_wait(block.runs, stable):
                continue
            blocks.append(block.data)
            tokens.append(token)
            size += block.size
            rows += count
            self._seqno[partition] = end
            self._horizon[partition] = max(self._horizon.item(partition), horizon)
        waits = {item[0] for item in self._ready}
        if self._waiting is not None:
            waits.update(filter(self._waiting.has, touched))
        self._attach([p for p in touched if self._token[p] and p not in waits], soon=True)
        self._end([p for p in touched if self._is_done(p)], FINISHED)
        if not blocks:
            return None
        return FrameOut(blocks, np.array(tokens, "<u4").tobytes(), size, rows)

    def _must_wait(self, runs: Runs, stable: U64 | None) -> bool:
        """Return whether a stored block must wait to be stable; if so, its stream reads on when it is."""
        if self._waiting is None or stable is None:
            return False
        partitions = runs["partition"].astype(np.int64)
        if not (runs["horizon"] > stable[partitions]).any():
            return False
        self._waiting.add(partitions, runs["horizon"], -1)
        self._from_store[partitions] = False
        gone = int(partitions[0])
        self._ready = [item for item in self._ready if item[0] != gone]
        return True

    def _is_done(self, partition: int) -> bool:
        """Return whether a stream is at a complete marker at or above its end."""
        seqno = self._seqno.item(partition)
        return bool(seqno >= self._until.item(partition) and self._horizon.item(partition) <= seqno)

    def _reach_beyond(self, runs: Runs) -> None:
        """End the streams whose next run reaches beyond their exact end."""
        for run in runs:
            partition, end, horizon = (
                int(run[name]) for name in ("partition", "end_seqno", "horizon")
            )
            exact, at = int(self._limit[partition]), int(self._seqno[partition])
            gone = beyond_end(partition, exact, at, end, horizon)
            self._end([partition], EndReason.of(gone))

    def _frame_from_tail(self, stable: U64 | None) -> FrameOut | None:
        left = self.credit.window - self.credit.outstanding
        if left <= 0:
            return None
        exact = self._has_ends and bool((self._limit != NO_END).any())
        taken = self._groups.take(
            self._seqno,
            self._horizon,
            self._until if self._has_ends else None,
            left if left < FRAME_BYTES else FRAME_BYTES,
            self._limit if exact else None,
            stable,
        )
        if taken is None:
            return None
        selection = taken.selection
        if selection.size > left and not self.credit.may_send(selection.size):
            # A block larger than the free credit is sent once nearly everything else was consumed.
            return None
        self._groups.commit(taken)
        tokens, rows = self._move_on(selection)
        if self._has_ends:
            partitions = selection.runs["partition"].astype(np.int64)
            seqnos = self._seqno[partitions]
            done = (seqnos >= self._until[partitions]) & (self._horizon[partitions] <= seqnos)
            self._end(partitions[done].tolist(), FINISHED)
        if taken.beyond is not None:
            self._reach_beyond(taken.beyond)
        if not selection.blocks:
            return None
        return FrameOut(
            selection.blocks, tokens, selection.size, rows, selection.messages, selection.writes
        )

    def _move_on(self, selection: Selection) -> tuple[bytes, int]:
        """Move the streams behind what was selected of the tail; return each run's token, and the rows of all."""
        rows, tokens = 0, b""
        for partition, count, _, end, horizon, _ in selection.few:
            # One by one: a vectorised statement costs more than a few runs do.
            rows += count
            tokens += self._token.item(partition).to_bytes(4, "little")
            self._seqno[partition] = end
            if horizon > self._horizon[partition]:
                self._horizon[partition] = horizon
        if tokens:
            return tokens, rows
        runs = selection.runs
        # Once: numpy would make such numbers of it for each use.
        partitions = runs["partition"].astype(np.int64)
        self._seqno[partitions] = runs["end_seqno"]
        # Of several runs of a partition in one frame the last one counts, and its horizon is the highest.
        self._horizon[partitions] = np.maximum(self._horizon[partitions], runs["horizon"])
        return self._token[partitions].tobytes(), int(runs["count"].sum())

    # Lag

    def stream_counts(self) -> tuple[int, int]:
        behind = (self._token != 0) & (self._seqno < self._table.stored)
        return int(np.count_nonzero(self._token)), int(np.count_nonzero(behind))

    def moved_high_seqnos(self) -> npt.NDArray[np.void]:
        """Return the open streams whose high seqno moved since the last call, with that: dtype POSITION."""
        moved = (self._token != 0) & (self._table.high != self._told_high)
        self._told_high[moved] = self._table.high[moved]
        partitions = np.flatnonzero(moved)
        told = np.zeros(len(partitions), POSITION)
        told["partition"], told["seqno"] = partitions, self._table.high[partitions]
        return told


def _replaced(partition: int, told: int, own: int) -> UprError:
    return UprError(
        f"epoch of partition {partition} is {own} here; must be at least {told}, which the replica knows",
        hint="this server was replaced: start it as a replica of the one that is active now",
        reason="OLD_EPOCH",
        retriable=True,
    )
