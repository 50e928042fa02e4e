"""The small tables of the upstream, taken over by a replica: see ``upr.service.replica_tables`` for when what is told.

Each is stored before it counts. What the upstream has no more goes when it has told all: rows of consumers that it did not
tell, and cuts that it did not list. Of one that may have less than is here only what is newer is taken, and nothing goes. The replica is in step when all were told and it durably has every seqno that they name:
a producer's number that runs ahead of its data would let a resent write be taken for a repetition.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from upr.engine.bucket import Bucket
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.conversation import REPLICAS_NAME
from upr.storage.keyspace import (
    PRODUCER,
    ConsumerRow,
    CutRow,
    Pin,
    ProducerNumbers,
)
from upr_protocol.block import U64
from upr_protocol.errors import ProtocolError
from upr_protocol.failover import check_partition
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS, check_name
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


async def take_tables(
    host: BucketService, tables: wire.Tables, only: Mapping[int, int] | None = None
) -> None:
    """Store what a message tells of the small tables, and let it count.

    Args:
        only: the partitions that are followed and how far, where the upstream may have less than is here: what is newer
            here stays, and what only is here; what names seqnos that do not come is left out. None for all that it has.

    Raises:
        ProtocolError, InvalidArgumentError: a value is out of range.
        OSError, lmdb.Error: it cannot be stored.
    """
    upstream_state = host.upstream_state
    assert upstream_state is not None
    merge = only is not None
    limit = np.full(PARTITIONS, np.iinfo(np.uint64).max, np.uint64)
    if only is not None:
        limit[:] = host.bucket.partitions.high
        limit[list(only)] = np.maximum(limit[list(only)], list(only.values()))
    if tables.begins:
        upstream_state.begin_tables()
        # The stored blocks behind this come without the numbers of their producers.
        await upstream_state.set_joining(True)
    if tables.producers:
        numbers = [_numbers(one) for one in tables.producers]
        await _take_producers(host, upstream_state, numbers, limit)
    if tables.consumers:
        await _take_consumers(host, upstream_state, tables, limit, merge)
    if tables.HasField("cuts"):
        await _take_cuts(host, tables.cuts, merge)
    if tables.complete:
        if not merge:
            await _drop_untold(host, upstream_state)
        upstream_state.tables, upstream_state.rows = True, {}
        host.disk.changed()
    upstream_state.told = max(upstream_state.told, tables.changes)


def _numbers(told: wire.ProducerRows) -> tuple[bytes, ProducerNumbers]:
    name = told.producer
    if not 0 < len(name) <= NAME_BYTES_MAX or b"\0" in name or len(told.table) % PRODUCER.itemsize:
        raise ProtocolError(
            f"rows of a producer have a name of {len(name)} and a table of {len(told.table)} bytes"
        )
    table = np.frombuffer(told.table, PRODUCER)
    if (table["partition"][1:] <= table["partition"][:-1]).any():
        raise ProtocolError("rows of a producer are not ascending by partition")
    return name, ProducerNumbers(table, told.time)


async def _take_producers(
    host: BucketService,
    upstream_state: UpstreamState,
    told: list[tuple[bytes, ProducerNumbers]],
    limit: U64,
) -> None:
    bucket = host.bucket
    rows = [(name, ProducerNumbers(_standing(bucket, n.table, limit), n.time)) for name, n in told]
    store = host.disk.store
    await host.disk.in_store_thread(lambda: store.put_producers(rows, bucket.counts))
    for _, numbers in rows:
        table = numbers.table[numbers.table["partition"] < PARTITIONS]
        np.maximum.at(upstream_state.needed, table["partition"], table["end_seqno"])
    bucket.loaded_numbers(
        {name: int(numbers.table["number"].max()) for name, numbers in rows if len(numbers.table)}
    )


def _standing(
    bucket: Bucket, table: "np.typing.NDArray[np.void]", limit: U64
) -> "np.typing.NDArray[np.void]":
    """Return the rows whose seqnos are on the failover log and at or below a limit, and those of places."""
    keep = [
        partition >= PARTITIONS
        or (end <= limit[partition] and bucket.counts(partition, failover_id, end))
        for partition, _, failover_id, _, end in table.tolist()
    ]
    return table[keep]


async def _drop_untold(host: BucketService, upstream_state: UpstreamState) -> None:
    """Remove the rows of consumers that the upstream has no more; those of replicas that follow here stay."""
    nowhere = np.zeros(PARTITIONS, bool)
    rows: dict[str, dict[int, ConsumerRow | None]] = {}
    for name, consumer in host.bucket.consumer_positions:
        gone = np.flatnonzero(consumer.known & ~upstream_state.rows.get(name, nowhere)).tolist()
        if gone and not name.startswith(REPLICAS_NAME):
            rows[name] = dict.fromkeys(gone)
    await _store_consumers(host, rows)


async def _take_consumers(
    host: BucketService, upstream_state: UpstreamState, tables: wire.Tables, limit: U64, merge: bool
) -> None:
    by_name: dict[str, dict[int, ConsumerRow | None]] = {}
    for one in tables.consumers:
        row = None
        if not one.removed:
            row = ConsumerRow(one.generation, one.failover_id, one.seqno, one.time, one.position)
        rows = by_name.setdefault(check_name(one.consumer, "consumer"), {})
        if one.seqno <= limit[check_partition(one.partition)]:
            rows[one.partition] = row
    if merge:
        by_name = {name: await _newer(host, name, rows) for name, rows in by_name.items()}
    await _store_consumers(host, by_name)
    newest_id = host.bucket.partitions.newest_id
    for name, rows in by_name.items():
        if not upstream_state.tables:
            upstream_state.rows.setdefault(name, np.zeros(PARTITIONS, bool))[list(rows)] = True
        for partition, row in rows.items():
            if row is not None and row.failover_id == newest_id[partition]:
                needed = max(int(upstream_state.needed[partition]), row.seqno)
                upstream_state.needed[partition] = needed


async def _newer(
    host: BucketService, name: str, rows: dict[int, ConsumerRow | None]
) -> dict[int, ConsumerRow | None]:
    """Return the rows of a consumer that are newer than what is here."""
    read = partial(host.disk.store.consumer_rows, name.encode(), list(rows))
    found: dict[int, ConsumerRow | None] = {}
    for partition, here in (await host.disk.in_reader(read)).items():
        row = rows[partition]
        if row is not None and (
            here is None or (row.generation, row.time) > (here.generation, here.time)
        ):
            found[partition] = row
    return found


async def _store_consumers(
    host: BucketService, by_name: dict[str, dict[int, ConsumerRow | None]]
) -> None:
    stored = {(name.encode(), p): row for name, rows in by_name.items() for p, row in rows.items()}
    if not stored:
        return
    store, bucket = host.disk.store, host.bucket
    await host.disk.in_store_thread(lambda: store.put_consumers(stored))
    for name, rows in by_name.items():
        bucket.consumer_positions.replicated(name, rows)
    bucket.owners.begin_above(bucket.consumer_positions.newest_generation)
    host.tables_changed(stored.keys())


async def _take_cuts(host: BucketService, told: wire.Cuts, merge: bool) -> None:
    """Have the cuts that are told, and no others; with ``merge`` those that are here stay too."""
    rows: dict[str, CutRow] = {}
    for one in told.cuts:
        pins = {check_partition(p.partition): Pin(p.failover_id, p.seqno) for p in one.partitions}
        lease = round(one.lease_seconds * 1e6)
        rows[check_name(one.name, "cut")] = CutRow(one.created_time, one.expires_time, lease, pins)
    cuts, tail = host.bucket.cuts, host.bucket.tail
    here = {cut.name: (cut.created, cut.expires) for cut in cuts.named}
    if merge:
        rows = {n: r for n, r in rows.items() if (r.created, r.expires) > here.get(n, (-1, 0))}
    # In force before they are stored, and given up after: no crash leaves one without its pins.
    for name, row in rows.items():
        cuts.replicated(row, name, tail)
    gone = set() if merge else here.keys() - rows.keys()
    changes: dict[bytes, CutRow | None] = {name.encode(): row for name, row in rows.items()}
    changes |= {name.encode(): None for name in gone}
    await host.disk.in_store_thread(lambda: host.disk.store.put_cuts(changes))
    for name in gone:
        cut = cuts.remove(name)
        if cut is not None:
            cuts.forget(cut)
    host.tables_changed(())
