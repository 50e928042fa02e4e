"""What a bucket holds, as tables: read with the SDK, folded as it comes, and compared.

Memory is bounded by what is kept, and about 64 MiB.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from upr_client import Bucket, RollbackError
from upr_client.arrow import record_batch
from upr_client.cut_info import Pinned
from upr_spark.backup.tables import newest

SCHEMA: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("seqno", pa.int64()),
        ("deleted", pa.bool_()),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
"""Of what is read back. value is null for a delete."""

_FOLD_BYTES: Final = 32 * 2**20
_SLICE_ROWS: Final = 65_536
_OFFSETS_BYTES: Final = 2**31 - 1
_RETRY_SECONDS: Final = 60.0
_ATTEMPTS: Final = 5
_SHOWN: Final = 3
_SHOWN_BYTES: Final = 32

Keep = Callable[[Any], Any]


def read_newest(
    bucket: Bucket,
    partitions: Iterable[int],
    until: Pinned | None = None,
    keep: Keep = lambda table: table,
    on_rows: Callable[[int], Any] = lambda rows: None,
) -> Any:
    """Return the newest row of each key of some partitions, deletes included, as a table of ``SCHEMA``.

    Args:
        bucket: where from.
        partitions: which.
        until: where to end; None means at what is there now.
        keep: takes a table of ``SCHEMA`` and returns what is to be kept of it. It must keep or drop a key's
            rows together, or from the older ones on.
        on_rows: called with the rows read since the last call.

    Raises:
        UprError: the server failed, or its history changed again and again.
    """
    chosen = sorted(partitions)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _read(bucket, chosen, until, keep, on_rows)
        except RollbackError:
            # A server that restarted may have undone what was read; the state is then read anew.
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _read(
    bucket: Bucket,
    partitions: list[int],
    until: Pinned | None,
    keep: Keep,
    on_rows: Callable[[int], Any],
) -> Any:
    folded = pa.Table.from_batches([], SCHEMA)
    gathered: list[Any] = []
    gathered_bytes = 0
    following = bucket.changes(
        partitions, until_now=until is None, until=until, retry_seconds=_RETRY_SECONDS
    )
    with following as changes:
        for batch in changes.batches():
            if not batch.rows:
                continue
            rows = record_batch(batch)
            gathered.append(
                pa.RecordBatch.from_arrays([rows.column(n) for n in SCHEMA.names], schema=SCHEMA)
            )
            gathered_bytes += rows.nbytes
            on_rows(batch.rows)
            if gathered_bytes > max(_FOLD_BYTES, folded.nbytes):
                folded = _fold(folded, gathered, keep)
                gathered, gathered_bytes = [], 0
    return _fold(folded, gathered, keep)


def _fold(folded: Any, gathered: list[Any], keep: Keep) -> Any:
    if not gathered:
        return folded
    return newest(pa.concat_tables([folded, keep(pa.Table.from_batches(gathered))]))


class Differences(NamedTuple):
    """How what is there differs from what should be.

    Args:
        missing: how many keys are not there.
        different: how many have another value.
        unexpected: how many are there that should not be.
        examples: some of the keys.
    """

    missing: int
    different: int
    unexpected: int
    examples: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.different or self.unexpected)

    def words(self) -> str:
        """Return it as words."""
        kinds = (
            (self.missing, "missing"),
            (self.different, "with another value"),
            (self.unexpected, "that should not be there"),
        )
        counts = ", ".join(f"{count} {what}" for count, what in kinds if count)
        return f"keys {counts}; for example {', '.join(map(shown, self.examples))}"


def shown(key: bytes) -> str:
    """Return a key for people: as text where it is printable ASCII, else in hex, and not all of it when it is long."""
    head = key[:_SHOWN_BYTES]
    more = "..." if len(key) > _SHOWN_BYTES else ""
    if head.isascii() and head.decode("ascii", "replace").isprintable():
        return repr(head.decode()) + more
    return "0x" + head.hex() + more


def differences(expected: Any, found: Any) -> Differences:
    """Compare two tables with columns key and value, in any order of rows; a key is in each at most once.

    Returns:
        No difference exactly when both have the same keys with the same values.
    """
    wide = max(_largest(expected), _largest(found)) > _OFFSETS_BYTES
    keys, values = (_one(expected.column(name), wide) for name in ("key", "value"))
    found_keys, found_values = (_one(found.column(name), wide) for name in ("key", "value"))
    at = pc.index_in(keys, value_set=found_keys)
    missing = pc.is_null(at)
    different = []
    for first in range(0, len(keys), _SLICE_ROWS):
        theirs = found_values.take(at.slice(first, _SLICE_ROWS))
        same = pc.equal(values.slice(first, _SLICE_ROWS), theirs)
        different.append(
            pc.and_(pc.invert(pc.fill_null(same, False)), pc.is_valid(at.slice(first, _SLICE_ROWS)))
        )
    differs = pa.chunked_array(different, pa.bool_())
    matched = len(keys) - (missing.true_count if len(keys) else 0)
    unexpected = len(found_keys) - matched
    examples = [*_some(keys, missing), *_some(keys, differs)]
    if unexpected:
        examples += _some(found_keys, pc.is_null(pc.index_in(found_keys, value_set=keys)))
    return Differences(len(keys) - matched, _count(differs), unexpected, tuple(examples[:_SHOWN]))


def _largest(table: Any) -> int:
    return max(int(table.column(name).nbytes) for name in ("key", "value"))


def _one(column: Any, wide: bool) -> Any:
    """Return a column as one array; with offsets of 64 bits where 32 do not reach."""
    return (pc.cast(column, pa.large_binary()) if wide else column).combine_chunks()


def _count(flags: Any) -> int:
    return int(pc.sum(flags).as_py() or 0)


def _some(keys: Any, chosen: Any) -> list[bytes]:
    found: list[bytes] = keys.filter(chosen).slice(0, _SHOWN).to_pylist()
    return found


def live(table: Any) -> Any:
    """Return the rows of a table with a column value that are no deletes."""
    return table.filter(pc.is_valid(table.column("value")))


def only_keys(keys: Any) -> Keep:
    """Return what keeps the rows of these keys, for ``read_newest``."""
    wanted = keys.combine_chunks()
    return lambda table: table.filter(pc.is_in(table.column("key"), value_set=wanted))


def data_bytes(table: Any) -> int:
    """Return the bytes of a table's keys and values."""
    total = 0
    for name in ("key", "value"):
        total += int(pc.sum(pc.cast(pc.binary_length(table.column(name)), pa.int64())).as_py() or 0)
    return total
