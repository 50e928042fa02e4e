"""The small tables of a bucket, as a replica gets them: producers' numbers, positions of consumers, cuts.

A producer's number comes with its block while that is in the tail. For stored blocks the tables have it. So they are
sent whole when all streams of the replica are past the store, and once more whenever one of them has read from it since:
by then a flush has stored the numbers of every block that was read.

Rows of consumers are sent again whenever they were stored, and so are cuts. A new cut goes before the next frame too: no row
above its pins goes out before it. A replica that takes over waits until it has all changes; they are counted for that.
"""

from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from upr.engine.cuts import Cut
from upr.engine.follower import Follower
from upr.service.buckets.bucket_service import BucketService
from upr.service.conversation import REPLICAS_NAME
from upr.storage.keyspace import ConsumerRow
from upr_protocol.errors import BucketGoneError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

MESSAGE_BYTES = 2**20
"""About the size of a message."""


def cut_message(cut: Cut, *, with_partitions: bool) -> wire.Cut:
    message = wire.Cut(
        name=cut.name,
        created_time=cut.created,
        expires_time=cut.expires,
        lease_seconds=cut.lease / 1e6,
    )
    if with_partitions:
        for partition, pin in cut.pins.items():
            message.partitions.add(
                partition=partition, failover_id=pin.failover_id, seqno=pin.seqno
            )
    return message


class TableFeed:
    """Teller of a bucket's small tables to one replica.

    Args:
        say: queues a message before all frames.
        drained: waits until what was said is sent.
        wake: called when ``next_work`` may have something.
    """

    def __init__(
        self,
        host: BucketService,
        follower: Follower,
        say: Callable[[wire.FollowResponse], None],
        drained: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._follower = follower
        self._say = say
        self._drained = drained
        self._wake = wake
        self._changed: dict[str, npt.NDArray[np.bool_]] = {}
        self._cuts_told = -1
        self._reads_told = -1
        self._changes_told = 0
        self._whole = self._busy = False
        host.on_consumers.add(self._consumers_changed)

    def close(self) -> None:
        self._host.on_consumers.discard(self._consumers_changed)

    def changed_cuts(self) -> wire.FollowResponse | None:
        """Return all cuts if any has changed since this was asked last, else None."""
        cuts = self._host.bucket.cuts
        if self._cuts_told == cuts.changes:
            return None
        self._cuts_told = cuts.changes
        told = [cut_message(cut, with_partitions=True) for cut in cuts.named]
        return wire.FollowResponse(tables=wire.Tables(cuts=wire.Cuts(cuts=told)))

    def _consumers_changed(self, keys: Collection[tuple[bytes, int]]) -> None:
        for name, partition in keys:
            self._mark(name.decode("utf-8", "surrogateescape"))[partition] = True
        self._wake()

    def _mark(self, name: str) -> npt.NDArray[np.bool_]:
        return self._changed.setdefault(name, np.zeros(PARTITIONS, bool))

    def next_work(self) -> Coroutine[Any, Any, None] | None:
        """Return what sends what is due now, to be run to its end; None for nothing."""
        if self._whole and self._follower.reads != self._reads_told:
            self._whole, self._changes_told = False, 0
            self._follower.has_tables = False
            self._say(wire.FollowResponse(tables=wire.Tables(begins=True)))
        if self._busy or not self._follower.is_past_store:
            return None
        if not self._whole:
            return self._work(self._tell_all)
        if self._changed:
            return self._work(self._tell_consumers)
        changes = self._host.table_changes
        if changes != self._changes_told:
            self._changes_told = changes
            told = self.changed_cuts() or wire.FollowResponse(tables=wire.Tables())
            told.tables.changes = changes
            self._say(told)
        return None

    async def _work(self, work: Callable[[], Awaitable[None]]) -> None:
        self._busy = True
        try:
            await work()
        except (OSError, lmdb.Error, BucketGoneError):
            # Sent when there is work again, or in the next call. What was to be sent whole is not complete until then.
            return
        finally:
            self._busy = False
        self._wake()

    async def _tell_all(self) -> None:
        reads = self._follower.reads
        for name, consumer in self._host.bucket.consumer_positions:
            self._mark(name)[consumer.known] = True
        # In this order: what is replaced in between is told from where it is then.
        await self._tell_producers(replaced=False)
        await self._tell_producers(replaced=True)
        await self._tell_consumers()
        if reads == self._follower.reads:
            self._reads_told, self._whole = reads, True
            await self._tell(wire.Tables(complete=True))
            self._follower.has_tables = True

    async def _tell_producers(self, *, replaced: bool) -> None:
        """Tell the newest numbers of producers, or those that a join here replaced: all that one has who takes less."""
        disk, behind = self._host.disk, b""
        while True:
            read = partial(disk.store.producers_after, behind, MESSAGE_BYTES, replaced=replaced)
            found = await disk.in_reader(read)
            if not found:
                return
            behind = found[-1][0]
            rows = [
                wire.ProducerRows(producer=name, time=numbers.time, table=numbers.table.tobytes())
                for name, numbers in found
            ]
            await self._tell(wire.Tables(producers=rows))

    async def _tell_consumers(self) -> None:
        disk = self._host.disk
        while self._changed:
            name = next(iter(self._changed))
            partitions = np.flatnonzero(self._changed.pop(name)).tolist()
            if name.startswith(REPLICAS_NAME):
                continue
            key = name.encode("utf-8", "surrogateescape")
            try:
                rows = await disk.in_reader(partial(disk.store.consumer_rows, key, partitions))
            except (OSError, lmdb.Error):
                self._mark(name)[partitions] = True
                raise
            told = [_consumer_message(name, partition, row) for partition, row in rows.items()]
            await self._tell(wire.Tables(consumers=told))

    async def _tell(self, tables: wire.Tables) -> None:
        self._say(wire.FollowResponse(tables=tables))
        await self._drained()


def _consumer_message(name: str, partition: int, row: ConsumerRow | None) -> wire.ConsumerRow:
    if row is None:
        return wire.ConsumerRow(consumer=name, partition=partition, removed=True)
    return wire.ConsumerRow(
        consumer=name,
        partition=partition,
        generation=row.generation,
        failover_id=row.failover_id,
        seqno=row.seqno,
        time=row.time,
        position=row.position or b"",
    )
