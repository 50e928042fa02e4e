"""Writing a restore point into a bucket, and checking what is then there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from upr_client import Bucket
from upr_client.arrow import record_batch
from upr_spark.backup.chain import Manifest, Segment, needed, segments
from upr_spark.backup.errors import NotEmptyError, RepositoryDamagedError
from upr_spark.backup.storage import Storage
from upr_spark.backup.tables import newest, state

_BATCH_BYTES = 64 * 2**20
_ROW_BYTES = 64
_WRITE_ROWS = 20_000


class Restored(NamedTuple):
    """What a restore wrote: keys with a value, deletes, and the bytes of keys and values."""

    keys: int
    deletes: int
    data_bytes: int


class Restore:
    """One restore.

    Args:
        storage: the repository's.
        bucket: where to.
        into_non_empty: whether the bucket may hold data. Keys deleted at the restore point are then deleted, other
            keys stay, and nothing is compared afterwards.
        progress: called with partitions done and partitions in all.
    """

    def __init__(
        self,
        storage: Storage,
        bucket: Bucket,
        into_non_empty: bool,
        progress: Callable[[int, int], Any],
    ) -> None:
        self._storage = storage
        self._bucket = bucket
        self._into_non_empty = into_non_empty
        self._progress = progress

    def run(
        self,
        chain: Sequence[Manifest],
        number: int,
        partitions: Sequence[int] | None,
        key_prefix: bytes,
    ) -> Restored:
        """Restore backup ``number``; partitions None means all.

        Raises:
            NotEmptyError: the bucket holds data.
            RepositoryDamagedError: a file cannot be read, or the bucket does not hold what was written.
            UprError: the server failed or refused; what was written stays.
        """
        if not self._into_non_empty:
            self._check_empty()
        counted = segments(chain, number)
        if partitions is not None:
            counted = {p: parts for p, parts in counted.items() if p in set(partitions)}
        sizes = _sizes(needed(chain, number))
        total = Restored(0, 0, 0)
        done = 0
        for group in _groups(counted, sizes):
            self._progress(done, len(counted))
            total = _sum(total, self._group(group, key_prefix))
            done += len(group)
        self._progress(done, len(counted))
        return total

    def _check_empty(self) -> None:
        used = [info for info in self._bucket.partitions() if info.high_seqno]
        if used:
            raise NotEmptyError(
                f"the bucket {self._bucket.name!r} holds data in {len(used)} partitions",
                hint="restore into an empty one, or say --into-non-empty: then keys of the backup replace those there",
            )

    def _group(self, group: Mapping[int, Sequence[Segment]], key_prefix: bytes) -> Restored:
        table = state(self._storage, group, key_prefix)
        deleted = pc.equal(table.column("op"), "delete")
        live = table.filter(pc.invert(deleted))
        rows = table if self._into_non_empty else live
        for first in range(0, rows.num_rows, _WRITE_ROWS):
            part = rows.slice(first, _WRITE_ROWS)
            keys, values = part.column("key").to_pylist(), part.column("value").to_pylist()
            self._bucket.write_many(zip(keys, values, strict=True))
        written = _content(live, table.num_rows - live.num_rows)
        if not self._into_non_empty:
            self._compare(list(group), written)
        return written

    def _compare(self, partitions: list[int], written: Restored) -> None:
        found = pa.Table.from_batches([], _KEPT)
        with self._bucket.changes(partitions, until_now=True) as changes:
            kept = [_lengths(record_batch(batch)) for batch in changes.batches() if batch.rows]
        if kept:
            found = newest(pa.Table.from_batches(kept))
        live = found.filter(pc.invert(found.column("deleted")))
        data_bytes = int(pc.sum(live.column("bytes")).as_py() or 0)
        if (live.num_rows, data_bytes) != (written.keys, written.data_bytes):
            raise RepositoryDamagedError(
                f"partitions {partitions[0]} to {partitions[-1]} were restored with {written.keys} keys of "
                f"{written.data_bytes} bytes, and the bucket has {live.num_rows} keys of {data_bytes} bytes",
                hint="did somebody else write meanwhile?",
            )


_KEPT = pa.schema(
    [
        ("partition", pa.int32()),
        ("seqno", pa.int64()),
        ("deleted", pa.bool_()),
        ("key", pa.binary()),
        ("bytes", pa.int64()),
    ]
)


def _lengths(batch: Any) -> Any:
    columns = [batch.column(name) for name in ("partition", "seqno", "deleted", "key")]
    return pa.RecordBatch.from_arrays([*columns, _row_bytes(batch)], schema=_KEPT)


def _row_bytes(rows: Any) -> Any:
    lengths = pc.add(
        pc.binary_length(rows.column("key")),
        pc.fill_null(pc.binary_length(rows.column("value")), 0),
    )
    return pc.cast(lengths, pa.int64())


def _content(live: Any, deletes: int) -> Restored:
    return Restored(live.num_rows, deletes, int(pc.sum(_row_bytes(live)).as_py() or 0))


def _sum(first: Restored, second: Restored) -> Restored:
    return Restored(*(a + b for a, b in zip(first, second, strict=True)))


def _sizes(chain: Sequence[Manifest]) -> dict[int, int]:
    """Return for each partition at most how many bytes its rows take in memory."""
    sizes: dict[int, int] = {}
    for manifest in chain:
        for partition, entry in manifest.entries.items():
            size = entry.data_bytes + entry.rows * _ROW_BYTES
            sizes[partition] = sizes.get(partition, 0) + size
    return sizes


def _groups(
    counted: Mapping[int, Sequence[Segment]], sizes: Mapping[int, int]
) -> Iterator[dict[int, Sequence[Segment]]]:
    """Yield consecutive partitions that fit into memory together; one that does not fit comes alone."""
    group: dict[int, Sequence[Segment]] = {}
    taken = 0
    for partition, parts in sorted(counted.items()):
        if group and taken + sizes[partition] > _BATCH_BYTES:
            yield group
            group, taken = {}, 0
        group[partition] = parts
        taken += sizes[partition]
    if group:
        yield group
