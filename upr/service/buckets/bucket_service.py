"""The service of one bucket: numbers, commits and reads.

The engine decides on the event loop, a thread of the ``Disk`` does the I/O, and the loop gets the result.
"""

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.bucket import Bucket, Written
from upr.engine.follower import Follower
from upr.engine.partitions import ACTIVE, DEAD, REPLICA
from upr.engine.producers import ProducerCall
from upr.engine.recovery import Recovered, Undo, recover
from upr.engine.streams import moved
from upr.service.buckets.compactor import Compactor
from upr.service.buckets.disk_threads import Disk
from upr.service.buckets.flusher import Flusher
from upr.service.buckets.keepers import (
    ConsumerSaver,
    CutKeeper,
    ProducerKeeper,
    end_leases,
    expire_consumers,
    lasting,
)
from upr.service.buckets.room import ROOM_AGAIN_BYTES, DiskRoom, WaitingRoom, check_map
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.clock import Clock
from upr.service.storage_trouble import PASSING, Failing, is_full, unreadable, words_of
from upr.storage.journal import Commit, NumberedWrite
from upr.storage.read import read_blocks
from upr.storage.search import TailKeys
from upr.storage.store import Identity, ReadRequest
from upr.storage.undone import write_undone
from upr_protocol.block import OP_DELETE, Block, check_values
from upr_protocol.errors import (
    BucketGoneError,
    NoRoomError,
    PartitionNotActiveError,
    StorageFailedError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FAILOVER_ID_MAX, SMALL_WRITE_BYTES
from upr_protocol.wire.codec import decode_block

log = logging.getLogger(__name__)

LOST_HINT = "put it back in its place and restart the server"
MAY_SECONDS = 2.0
"""Longest wait of a write that is not numbered while it is not known whether another server is the active one."""
_RETRY_SECONDS = 0.25
_QUOTA_SECONDS = 1.0


def new_id() -> int:
    """Draw the id of a failover, a version or a server: 64 random bits, never 0."""
    return 1 + secrets.randbelow(FAILOVER_ID_MAX)


def not_active(owner: str) -> PartitionNotActiveError:
    """Return the refusal of what only the active server does; ``owner`` is its HOST:PORT, empty if it is not known."""
    return PartitionNotActiveError(
        "this server is not the active one of its set",
        hint="ask the active one, which 'upr-admin topology' shows, or read with read_from=\"any\"",
        retriable=True,
        owner=owner,
    )


def not_granted() -> PartitionNotActiveError:
    """Return the refusal of an owner of a cluster whose grants have run out: another one may be the owner by now."""
    return PartitionNotActiveError(
        "this server is the active one of its set, and takes and answers nothing: no counted server grants it",
        hint="start the counted servers, or mend the links to them and to etcd; 'upr-admin topology' shows them",
        retriable=True,
    )


def _unknown(why: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        why,
        hint="send it again, to the server that is active, with its number to learn the outcome",
    )


class BucketService:
    """One open bucket.

    Args:
        waiting, clock, room: those of the server; each is a new one by default.
        undo: what a replica undoes, by partition; it is written to ``undone`` before it goes.
        replica: whether the server is not the active one of its set now: what was active waits, as a replica.

    Attributes:
        upstream_state: of a replica: how it follows its upstream; None otherwise.

    Raises:
        DataDirectoryError, DataDamagedError: see ``Disk``.
    """

    def __init__(
        self,
        folder: Path,
        config: ServerConfig,
        waiting: WaitingRoom | None = None,
        clock: Clock | None = None,
        room: DiskRoom | None = None,
        undo: Mapping[int, Undo] | None = None,
        replica: bool = False,
    ) -> None:
        self._undo = undo or {}
        self._fenced = self._without_copies = False
        self._replica = replica
        self.waiting_room = waiting or WaitingRoom()
        self.folder = folder
        self._config = config
        self._wanted_room = 0
        self.failover_log_records = config.failover_log_records
        self.max_value_bytes = config.max_value_bytes
        self.on_consumers: set[Callable[[Collection[tuple[bytes, int]]], None]] = set()
        """Functions that are called with the name and partition of each consumer's row that was stored or removed; with
        none when cuts were."""
        self.table_changes = 0
        """Number of times that rows of consumers or cuts were stored since the start."""
        self.may_serve: Callable[[], bool] = lambda: True
        """Returns whether nobody else can be the active one at this moment. It is looked at after the last wait: before a
        write is numbered, and before it is answered."""
        self.in_set: Callable[[], bool] = lambda: False
        """Returns whether other servers of a set are known."""
        self.promised: Callable[[], int] = lambda: 0
        """Returns the epoch that the server promised."""
        self.users: set[Callable[[BucketGoneError], None]] = set()
        """Open calls, each called once when the bucket is dropped."""
        self._on_failure: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self.disk = Disk(folder, clock or Clock(), room or DiskRoom(folder), self._tell, self.fail)
        try:
            self._open(config)
        except BaseException:
            self.disk.close()
            raise

    def _open(self, config: ServerConfig) -> None:
        disk = self.disk
        self._quota_at = 0.0
        self.undone = 0
        self.bucket = bucket = self._recover(disk.identity)
        self.upstream_state = self._new_upstream_state() if self._replica else None
        positions = bucket.consumer_positions
        positions.load(disk.store.consumers())
        self._begin_generations()
        cuts = disk.store.cuts()
        leases = {name: disk.clock.until(cut.expires, cut.lease) for name, cut in cuts.items()}
        cuts = {name: replace(cut, expires=leases[name]) for name, cut in cuts.items()}
        bucket.cuts.load(cuts, bucket.tail)
        self.acknowledged = ConsumerSaver(positions, self._put_consumers, disk.troubles)
        self._closing = asyncio.Event()
        tables_changed = partial(self.tables_changed, ())
        self.cuts = CutKeeper(disk, bucket, self.durable, tables_changed, self._closing)
        self.compactor = Compactor(disk, bucket, config)
        self.tail_keys = TailKeys()
        self.flusher = Flusher(
            disk, bucket, config, self.compactor.flushed, self.tail_keys.drop_before
        )
        self.compactor.flushing = lambda: self.flusher.busy
        self.producers = ProducerKeeper(disk, bucket, self.flusher.wanted.set, self._closing)
        disk.room.add(bucket.tail, self.flusher.wanted.set)
        self._work = asyncio.Event()
        self._clearing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _begin_generations(self) -> None:
        """Give no generation again that was given before, here or by another active server."""
        bucket = self.bucket
        # Above the clock as well, because not every used generation was stored.
        stored = bucket.consumer_positions.newest_generation
        bucket.owners.begin_above(max(self.disk.clock.now(), stored))

    def _new_upstream_state(self) -> UpstreamState:
        return UpstreamState(self.bucket, self.disk, self.undone)

    def _recover(self, identity: Identity) -> Bucket:
        proof = self.disk.store.proof(may_be_moved=self._config.data_moved)
        moved = proof is not None and proof.moved
        result = recover(
            self.disk.store.partitions(),
            self.disk.store.heads,
            self.disk.journal.replay(needed=proof is None),
            proven=None if proof is None else proof.highs,
            new_id=new_id,
            now=self.disk.clock.now(),
            log_records=self._config.failover_log_records,
            replica=self._replica,
            undo=self._undo,
            whole=self.disk.store.joining() if self._replica else None,
        )
        released = self._keep_undone(identity, result) if self._undo else []
        if result.aside:
            # Store this first: after the rest is stored, a flush may drop the journal.
            failpoints.hit("recovery.before_aside")
            self.disk.store.put_aside(result.aside)
        # Bind a proof that the operator vouched for to its new place.
        if result.rows or moved:
            failpoints.hit("recovery.before_records")
            self.disk.store.write_recovery(
                result.rows,
                result.blocks,
                result.cut_off,
                result.highs,
                result.producers,
                released=released,
                undone=self._undo or (),
            )
            failpoints.hit("recovery.after_records")
        if self._config.data_moved:
            told = "a copied proof was accepted" if moved else "it was not needed"
            result.notes.append(f"--data-moved was given, and {told}: take it away again")
        if torn := self.disk.journal.torn_bytes:
            result.notes.append(f"{torn} bytes at the journal's end are no whole record: cut off")
        for note in result.notes:
            log.warning("recovery", extra={"bucket": identity.name, "note": note})
        bucket = Bucket(identity, result.partitions, result.next_commit, proven=True)
        bucket.recovered(result.entries)
        bucket.on_stable = self.disk.changed
        bucket.on_failure = self.fail
        # Until the upstream has answered, nobody knows what this one must undo.
        bucket.may_undo = self._replica
        return bucket

    def _keep_undone(self, identity: Identity, result: Recovered) -> list[bytes]:
        """Write what is about to be undone to a file, durably; return the names of cuts that pin some of it."""
        store, (entries, stored) = self.disk.store, result.undone
        blocks = (
            decode_block(data)
            for partition, ends in stored.items()
            for end in ends
            for data in store.blocks(partition, [end])
        )
        tail = (entry.block() for entry in entries)
        directory = self.folder.parent.parent
        markers = {p: max(int(result.complete[p]), one.seqno) for p, one in self._undo.items()}
        now = self.disk.clock.now()
        self.undone = write_undone(directory, identity, chain(blocks, tail), markers, now)
        if self.undone:
            result.notes.append(f"{self.undone} mutations were undone; upr-admin undone lists them")
        return [
            name
            for name, cut in store.cuts().items()
            if any(
                p in self._undo and pin.seqno > result.complete[p] for p, pin in cut.pins.items()
            )
        ]

    def start(self, on_failure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin committing and flushing; ``on_failure`` is awaited when ``problem`` may have changed."""
        self._on_failure = on_failure
        works = {
            "committer": self._commit_loop(),
            "flusher": self.flusher.run(),
            "compactor": self.compactor.run(),
            "purger": self.compactor.sweep(),
            "expiry of consumers": lasting(
                lambda: expire_consumers(
                    self.disk, self.bucket, self._config.consumer_seconds, self.compactor.rest
                )
            ),
            "saver of consumers": self.acknowledged.run(self._closing),
            "keeper of cuts": lasting(self.cuts.run),
            # Not begun anew: of a group that was changed in part two members could have the same partition.
            "keeper of leases": end_leases(self.bucket.owners, self._closing),
            "keeper of producers": self.producers.run(),
        }
        for name, work in works.items():
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the bucket: without its committer or flusher it must not take writes."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self.disk.gone is None:
            log.critical("a task of the bucket failed", exc_info=error)
            self.fail(StorageFailedError(f"the {task.get_name()} failed: {words_of(error)}"))

    @property
    def problem(self) -> UprError | None:
        return self.bucket.failure or self.disk.troubles.problem()

    @property
    def serves(self) -> bool:
        """Whether the bucket does what calls ask for: there is no ``problem``, or one of the background only."""
        return self.bucket.failure is None and self.disk.troubles.only_unseen

    def _tell(self) -> None:
        if self._on_failure is not None:
            task = asyncio.create_task(self._on_failure())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    # Writing

    async def write(
        self,
        block: Block,
        name: bytes,
        call: ProducerCall | None,
        number: int,
        copies: int = 0,
    ) -> Written:
        """Number a block as soon as there is room for it, if so many replicas are there.

        Raises:
            InvalidArgumentError: a value is above --max-value-bytes.
            NoRoomError: the disk is down to its reserve.
            QuotaExceededError: the bucket would exceed its quota.
            TooManyError: too many bytes wait for room.
            ShuttingDownError: the server is stopping.
            BucketGoneError: the bucket was dropped; nothing is numbered.
            PartitionNotActiveError: this server is not the active one, perhaps since a moment ago.
            ContentDiffersError, TooFewReplicasError, StorageFailedError, DataDamagedError: see Bucket.write, and
                ProducerKeeper.stored.
        """
        bucket, now = self.bucket, self.disk.clock.now
        self.disk.check_not_gone()
        check_values(block, self.max_value_bytes)
        needed = block.column_bytes + block.runs.nbytes
        waited, stored = True, None
        while waited:
            if call is not None and number <= call.producer.last_number:
                stored = await self.producers.stored(name)
                self.check_active()
                if bucket.known(call, number, block.runs, stored).seen.all():
                    # A repeated write numbers nothing, so it needs neither room nor the removal of the proof.
                    return bucket.write(block, name, call, number, now(), stored, copies)
            waited = bucket.proven or self._is_short_of(needed) or self._is_lapsed
            if waited and not self.disk.stopping and bucket.failure is None:
                with self.waiting_room.waiting(needed):
                    await self._until_room(needed)
            else:
                waited = False
        self.disk.check_open()
        # At once: an answer of one that stepped down while the write waited would wait for grants.
        self.check_active()
        before = bucket.tail.bytes
        if bucket.failure is None:
            check_map(self.disk.store, before + needed, is_full=self.flusher.map_full)
            self._check_quota(block, before + needed)
        copies = max(copies, self._config.min_copies)
        written = bucket.write(block, name, call, number, now(), stored, copies)
        self.disk.room.take(bucket.tail.bytes - before)
        self._wake_committer(block)
        return written

    # Receiving

    async def receive(self, block: Block, data: bytes, writes: Sequence[NumberedWrite]) -> None:
        """Take a block that the upstream numbered, as soon as there is room; see ``Bucket.receive``.

        Raises:
            NoRoomError: the disk is down to its reserve.
            ShuttingDownError, BucketGoneError: the bucket is being closed.
            ProtocolError, StorageFailedError: see ``Bucket.receive``.
        """
        bucket, needed = self.bucket, len(data) + block.runs.nbytes
        await self._until_room(needed)
        self.disk.check_open()
        before = bucket.tail.bytes
        if bucket.failure is None:
            check_map(self.disk.store, before + needed, is_full=self.flusher.map_full)
        bucket.receive(block, data, writes)
        self.disk.room.take(bucket.tail.bytes - before)
        self._wake_committer(block)

    def _wake_committer(self, block: Block) -> None:
        """Count a block that was added to the tail, and have it journalled."""
        self.disk.counters.ingested_bytes += block.column_bytes
        self.disk.traffic.written_rows += block.rows
        self._work.set()

    async def adopt(self, logs: Mapping[int, FailoverLog], epochs: Mapping[int, int]) -> None:
        """Take over the upstream's failover logs and epochs, durably, and store the purge seqnos; see
        ``Bucket.begin_adopting``.

        Raises:
            UprError: a partition is active here, or dead.
            OSError, lmdb.Error: they cannot be stored; the partitions stay pending.
        """
        states = self.bucket.partitions.state[list(logs)]
        if np.isin(states, (ACTIVE, DEAD)).any():
            raise UnavailableError("a partition is active or dead here; must be a replica's")
        self.bucket.begin_adopting(logs, epochs)
        purge = self.bucket.partitions.purge
        rows = {p: (REPLICA, epochs[p], int(purge[p]), log) for p, log in logs.items()}
        await self.disk.in_store_thread(lambda: self.disk.store.put_logs(rows, served=0))
        self.bucket.partitions.served_epoch[list(logs)] = 0
        self.bucket.adopted(logs)
        self.disk.changed()

    async def activate(self, epoch: int, records: Mapping[int, int]) -> None:
        """Make the partitions active in an epoch: failover records, states and epochs become durable in one transaction.

        Args:
            records: by partition, the seqno of its record: its last complete durable marker, and where it ends.

        Raises:
            OSError, lmdb.Error: it cannot be stored; nothing is active.
        """
        bucket, table = self.bucket, self.bucket.partitions
        logs = {p: table.logs[p] for p in np.flatnonzero(table.state != DEAD).tolist()}
        for partition, seqno in records.items():
            logs[partition] = logs[partition].with_record(
                new_id(), seqno, self.failover_log_records, epoch=epoch
            )
        bucket.begin_adopting(logs, dict.fromkeys(logs, epoch))
        rows = {p: (ACTIVE, epoch, int(table.purge[p]), log) for p, log in logs.items()}
        failpoints.hit("promote.before_partitions")
        await self.disk.in_store_thread(lambda: self.disk.store.put_logs(rows, served=epoch))
        failpoints.hit("promote.after_partitions")
        self._begin_generations()
        table.served_epoch[list(logs)] = epoch
        table.state[list(logs)] = ACTIVE
        bucket.begin_term()
        if self.upstream_state is not None:
            self.upstream_state.release()
        self._replica, self._fenced, self.upstream_state = False, False, None
        # Gets that wait for a write hear that it was undone.
        self.disk.changed()

    def fence(self, *, on: bool) -> None:
        """Acknowledge and number nothing from this step on, while another server may be active; or do so again."""
        self._fenced = on
        self.disk.changed()

    def raise_epoch(self) -> None:
        """Follow nobody, and tell nobody, of an epoch below the one that the server promised.

        What is active stays in the epoch in which it numbers, until it steps down.
        """
        table, promised = self.bucket.partitions, np.uint64(self.promised())
        np.maximum(table.epoch, promised, out=table.epoch, where=table.state != ACTIVE)

    async def step_down(self, *, fenced: bool) -> None:
        """Take no more writes, in this step, and have everything that was numbered on disk before this returns.

        Of a bucket whose storage has failed nothing more comes on disk.

        Args:
            fenced: whether another server may be active: what is not acknowledged now is not acknowledged any more.

        Raises:
            OSError, lmdb.Error: the states cannot be stored.
        """
        table = self.bucket.partitions
        table.state[table.state == ACTIVE] = REPLICA
        self.raise_epoch()
        self.bucket.begin_term()
        self._fenced |= fenced
        self._replica = True
        self.upstream_state = self.upstream_state or self._new_upstream_state()
        self.disk.changed()
        for follower in list(self.bucket.followers):
            if not follower.options.any_server:
                follower.end_call(moved(table.owner))
        self.bucket.owners.forget()
        # Also those whose states a call before could not store.
        rows = {
            p: (REPLICA, int(table.epoch[p]), int(table.purge[p]), table.logs[p])
            for p in np.flatnonzero(table.state == REPLICA).tolist()
        }
        try:
            await self.journalled(self.bucket.tail.end - 1)
            # Behind a quota that is being stored: that is acknowledged, and the next owner asks for it afterwards.
            await self.disk.in_store_thread(lambda: self.disk.store.put_logs(rows))
        except (StorageFailedError, OSError, lmdb.Error):
            # What failed for good keeps nobody from being active instead: the next start is not clean, and asks first.
            if self.bucket.failure is None:
                raise

    async def settle_tables(self) -> None:
        """Wait until every change of consumers and cuts that was begun is stored, or has failed; after ``step_down``.

        Raises:
            OSError, lmdb.Error: the end of a join cannot be stored.
        """
        if self.upstream_state is not None:
            await self.upstream_state.end_join()
        await self.acknowledged.finish()
        # On a full disk acknowledgements are lost, which only makes purging more careful.
        with contextlib.suppress(*PASSING):
            await self.acknowledged.save()
        await self.cuts.finish()

    @property
    def _is_lapsed(self) -> bool:
        """Whether it is active here, and may be active elsewhere."""
        return not (self._replica or self.may_serve())

    def check_active(self) -> None:
        """Raise PartitionNotActiveError on a replica: what it stored by itself would be nowhere else."""
        if self._replica or self._fenced:
            raise not_active(self.bucket.partitions.owner)

    def _is_short_of(self, needed: int) -> bool:
        small = needed <= SMALL_WRITE_BYTES
        limit = self._config.tail_bytes if small else self.flusher.large_limit
        return self.bucket.tail.bytes >= limit or needed > self.disk.room.left()

    async def _until_room(self, needed: int) -> None:
        """Wait until a write has room, or raise if it never will."""
        while not self.disk.stopping and self.bucket.failure is None:
            if self._is_short_of(needed):
                self._check_wait(needed)
                if not self.flusher.busy:
                    self.flusher.wanted.set()
                with self.disk.traffic.waiting:
                    await self.disk.next_change()
            elif self.bucket.proven:
                await self._clear_proof()
            elif self._is_lapsed:
                await self._until_may_serve()
            else:
                break

    async def _until_may_serve(self) -> None:
        """Wait while another server may be the active one; PartitionNotActiveError if that lasts for MAY_SECONDS."""
        term = self.bucket.copies.term
        try:
            async with asyncio.timeout(MAY_SECONDS):
                while not self.may_serve() and not self.disk.stopping:
                    await self.disk.next_change()
                    if term != self.bucket.copies.term:
                        return
        except TimeoutError:
            raise not_granted() from None

    def _check_quota(self, block: Block, pending: int) -> None:
        if not self.disk.quota.exceeded(pending):
            return
        only_deletes = 0 < len(block.ops) == block.ops.count(OP_DELETE)
        if only_deletes:
            return
        # Compaction may have made room since.
        now = asyncio.get_running_loop().time()
        if now >= self._quota_at:
            self._quota_at = now + _QUOTA_SECONDS
            self.disk.refresh_quota()
            # The tail counts rows that are superseded in it, and deletions; stored it is measured again.
            self.flusher.wanted.set()
            self.compactor.reclaim()
        raise self.disk.quota.error(pending)

    async def set_quota(self, limit: int) -> None:
        """Set the quota in bytes, durably; 0 for none."""
        try:
            await self.disk.in_store_thread(lambda: self.disk.store.put_quota(limit))
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"the quota could not be stored: {words_of(error)}", retriable=True
            ) from error
        self.disk.quota.limit = limit

    def _check_wait(self, needed: int) -> None:
        """Raise NoRoomError or StorageFailedError unless a flush may free the room that a write needs."""
        for what in (Failing.FLUSH, Failing.JOURNAL):
            if what in self.disk.troubles:
                raise self.disk.troubles.problem_of(what)
        check_map(self.disk.store, self.bucket.tail.bytes + needed, is_full=self.flusher.map_full)
        if self.flusher.busy or self.bucket.tail.first != self.bucket.tail.end:
            return
        if self.disk.room.error is not None:
            words = f"the disk does not tell its room: {words_of(self.disk.room.error)}"
            raise StorageFailedError(words, retriable=True)
        left = max(self.disk.room.left(), 0)
        error = NoRoomError(
            f"room on the disk is {left} bytes above the reserve; must be {needed} for this write",
            hint="free some space; writing resumes by itself",
        )
        self._wanted_room = max(needed, ROOM_AGAIN_BYTES)
        self.disk.troubles.begins(Failing.ROOM, error)
        # The reserve may be that of another bucket's tail: flush them all.
        self.disk.room.wanted()
        raise error

    def look_at_room(self) -> None:
        """Record the end of a lack of room, also without writes."""
        if Failing.ROOM in self.disk.troubles and self.disk.room.left() >= self._wanted_room:
            self.disk.troubles.ends(Failing.ROOM)

    async def _put_consumers(self, rows: Callable[[], Mapping[Any, Any]]) -> None:
        if not self.disk.stopping and self.disk.room.left() < 0:
            raise OSError(errno.ENOSPC, "there is no room above the reserve")
        stored: set[tuple[bytes, int]] = set()

        def put() -> None:
            told = rows()
            self.disk.store.put_consumers(told)
            stored.update(told)

        await self.disk.in_store_thread(put)
        self.tables_changed(stored)

    def tables_changed(self, keys: Collection[tuple[bytes, int]]) -> None:
        """Tell replicas that rows of consumers, by name and partition, or cuts were stored."""
        self.table_changes += 1
        for tell in list(self.on_consumers):
            tell(keys)

    async def _clear_proof(self) -> None:
        """Remove the proof once for all waiting writes; runs to completion even if a caller is cancelled."""
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_proof_for_all())
        await asyncio.shield(self._clearing)

    async def _clear_proof_for_all(self) -> None:
        try:
            await self.disk.in_store_thread(self._clear_proof_now)
            self.bucket.proven = False
            self.disk.troubles.ends(Failing.PROOF)
        except (OSError, lmdb.Error) as error:
            self.disk.troubles.begins(Failing.PROOF, error)
            kind = NoRoomError if is_full(error) else StorageFailedError
            raise kind(
                f"nothing can be numbered: the store could not be written: {words_of(error)}",
                hint="writing resumes by itself when the store can be written",
                retriable=True,
            ) from error
        finally:
            self._clearing = None

    def _clear_proof_now(self) -> None:
        failpoints.hit("proof.before_clear")
        self.disk.store.clear_proof()
        failpoints.hit("proof.after_clear")

    async def durable(self, entry: int) -> None:
        """Wait until a tail entry is on disk.

        Raises:
            StorageFailedError: the journal failed, so this process cannot make it durable.
            BucketGoneError: the bucket was dropped meanwhile.
            UnknownOutcomeError: another server became active meanwhile.
        """
        if self.bucket.tail.durable > entry:
            return
        await self.journalled(entry)
        self.check_answer()

    @property
    def may_answer(self) -> bool:
        """Whether writes may be acknowledged: as far as this server knows nobody else can be the active one."""
        return not self._fenced and self.may_serve()

    def check_answer(self) -> None:
        """Raise UnknownOutcomeError where another server is active, or may be."""
        if self._fenced:
            raise UnknownOutcomeError(
                "another server became active before the write was acknowledged",
                hint="send it again there with its number to learn the outcome",
            )

    async def replicated(self, written: Written, copies: int) -> None:
        """Wait until a write is stable(copies), see ``Bucket.is_stable``.

        Raises:
            StorageFailedError, BucketGoneError: as ``durable``.
            UnknownOutcomeError: this server was not active all the time, or ``give_up_copies`` was called.
        """
        self.bucket.waiting_for_copies += 1
        try:
            while not self.bucket.is_stable(written, copies):
                self._check_works()
                self._check_term(written, "replicas acknowledged the write")
                if self._without_copies:
                    raise _unknown(
                        "the server is stopping: replicas acknowledge nothing more to it"
                    )
                await self.disk.next_change()
        finally:
            self.bucket.waiting_for_copies -= 1

    async def until_answered(self, written: Written) -> None:
        """Wait until a write may be answered: nobody else can be the active one when this returns.

        Raises:
            StorageFailedError, BucketGoneError: as ``durable``.
            UnknownOutcomeError: this server stepped down.
        """
        while not self.may_serve():
            self._check_works()
            self._check_term(written, "the write was acknowledged")
            await self.disk.next_change()
        self.check_answer()

    def _check_works(self) -> None:
        self.disk.check_not_gone()
        if self.bucket.failure is not None:
            raise self.bucket.failure.with_traceback(None)

    def _check_term(self, written: Written, what: str) -> None:
        if written.term != self.bucket.copies.term:
            raise _unknown(f"this server stepped down before {what}")

    def give_up_copies(self) -> None:
        """Have writes wait for replicas no more, because the calls of these end."""
        self._without_copies = True
        self.disk.changed()

    async def journalled(self, entry: int) -> None:
        """Wait until a tail entry is on disk, whether or not this server is active; see ``durable``."""
        while self.bucket.tail.durable <= entry:
            self._check_works()
            await self.disk.next_change()

    # Committing

    async def _commit_loop(self) -> None:
        """Journal commits; without disk or memory for one retry, because numbered rows are never withdrawn."""
        commit: Commit | None = None
        while self.bucket.failure is None:
            try:
                commit = commit or self.bucket.take_commit()
                if commit is not None:
                    await self._append(commit)
            except StorageFailedError as error:
                self.fail(error)
                return
            except PASSING as error:
                self.disk.troubles.begins(Failing.JOURNAL, error)
                self.bucket.stalled = True
                if self.disk.stopping:
                    words = f"the journal could not be written: {words_of(error)}"
                    self.fail(StorageFailedError(words))
                    return
                self.flusher.wanted.set()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if commit is None:
                self._work.clear()
                if self.disk.stopping:
                    return
                await self._work.wait()
                continue
            self.bucket.commit_done(commit)
            commit = None
            if self.bucket.tail.bytes >= self.flusher.begin_bytes:
                self.flusher.wanted.set()
            self.disk.changed()

    async def _append(self, commit: Commit) -> None:
        began = time.perf_counter()
        written = await self.disk.append(commit)
        self.disk.traffic.commits.add(time.perf_counter() - began)
        self.disk.traffic.syncs.add(self.disk.journal.write_seconds)
        self.disk.counters.journalled_bytes += written
        self.disk.troubles.ends(Failing.JOURNAL)
        self.bucket.stalled = False

    def fail(self, error: StorageFailedError) -> None:
        """Refuse writes until the next start: the state of the disk is unknown."""
        if self.bucket.failure is not None:
            return
        # In a set another server is active, or may become it, and whatever fails here can be had there.
        error.retriable |= self._replica or self.in_set()
        log.critical(
            "storage failed: no more writes are taken",
            extra={"bucket": self.bucket.identity.name, "error": str(error)},
        )
        self.bucket.fail(error)
        self.disk.changed()
        self._tell()

    async def check_files(self) -> None:
        """Fail the bucket if its files were deleted, moved or replaced."""
        lost = await self.disk.in_reader(self.disk.store.lost) or await self.disk.in_journal_thread(
            self.disk.journal.lost
        )
        if lost and self.disk.gone is None:
            self.fail(StorageFailedError(lost, hint=LOST_HINT))

    # Reading

    async def read_for(
        self, follower: Follower, requests: Sequence[ReadRequest], max_bytes: int
    ) -> bool:
        """Read stored blocks in a reader thread, and feed a follower with them; False if the bucket was dropped.

        Damaged partitions are recorded for the status. A read that fails as a whole ends the streams that it is for.
        """
        options = follower.options
        try:
            results = await self.disk.in_reader(
                lambda: read_blocks(
                    self.disk.store,
                    requests,
                    max_bytes,
                    showing=options.showing,
                    accept_zstd=options.accept_zstd,
                ),
            )
            self.compactor.damaged(
                {r.request.partition: r.error for r in results if r.error is not None}
            )
            follower.feed(results)
        except BucketGoneError:
            return False
        except Exception as error:
            log.exception("a read of the store failed")
            follower.read_failed(unreadable(error), requests)
        return True

    # Stopping

    def leave(self, error: BucketGoneError) -> None:
        """Detach the dropped bucket: nothing of it is numbered, stored or read from this step on.

        Its users and waiters get the error. Call ``discard`` next.
        """
        self.disk.gone = error
        self.disk.stopping = True
        self.compactor.stop()
        for task in self._tasks:
            task.cancel()
        for tell in list(self.users):
            tell(error)
        self.disk.changed()

    async def discard(self) -> None:
        """Close without storing anything, after ``leave``: the data will be deleted."""
        clearing = [self._clearing] if self._clearing is not None else []
        await asyncio.gather(*self._tasks, *clearing, return_exceptions=True)
        await self.compactor.finish()
        # In a thread: a compaction may need seconds to end, and other buckets use the loop.
        await asyncio.to_thread(self.close_files)

    def close_files(self) -> None:
        """Wait for the threads and close journal and store; rows only in memory are lost."""
        self.disk.close()
        self.disk.room.remove(self.bucket.tail)

    async def close(self) -> bool:
        """Commit and flush everything, write the proof, and close; False if that failed."""
        self.disk.stopping = True
        if self._clearing is not None:
            await asyncio.gather(self._clearing, return_exceptions=True)
        self._work.set()
        self.flusher.wanted.set()
        self._closing.set()
        self.compactor.stop()
        self.disk.changed()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.compactor.finish()
        await self.cuts.finish()
        await self.acknowledged.finish()
        try:
            return await self._finish()
        except (OSError, lmdb.Error, UprError) as error:
            log.error(
                "shutdown is not clean",
                extra={"bucket": self.bucket.identity.name, "error": str(error)},
            )
            return False
        finally:
            # In a thread, as above: where the flush failed a part of it may still be merged.
            await asyncio.to_thread(self.close_files)

    async def _finish(self) -> bool:
        tail = self.bucket.tail
        if self.bucket.failure is not None:
            return False
        failpoints.hit("shutdown.before_flush")
        while await self.flusher.flush(wanted=True):
            pass
        if tail.first != tail.end:
            # Numbered rows could not be stored: write no proof of a clean shutdown.
            return False
        await self.acknowledged.save()
        failpoints.hit("shutdown.before_proof")
        highs = self.bucket.partitions.high.copy()
        await self.disk.in_store_thread(lambda: self.disk.store.write_proof(highs))
        failpoints.hit("shutdown.after_proof")
        return True
