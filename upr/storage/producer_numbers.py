"""Numbers of producers in the rows of a store: which of two stays, and what a join would lose by it.

The store keeps the newest number of a producer in each partition. While a replica joins, numbers come whose seqnos are above
those up to which it may be relied on. If it is then used up to there only, what they replaced is the newest again: it
is kept until the join ends.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from upr.storage import keyspace
from upr.storage.keyspace import PRODUCER_SLOT
from upr_protocol.block import U64
from upr_protocol.errors import DataDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS

log = logging.getLogger(__name__)

Counts = Callable[[int, int, int], bool]
"""Function of partition, failover id and end seqno: whether a producer's stored number counts, since they are on the log."""
Numbers = npt.NDArray[np.void]
"""Table of dtype PRODUCER, ascending by partition."""
_T = TypeVar("_T")
NO_NUMBERS = np.zeros(0, keyspace.PRODUCER)


def none_counts(partition: int, failover_id: int, end: int) -> bool:
    return False


def counts_on(logs: Mapping[int, FailoverLog], ends: U64 | None = None) -> Counts:
    """Return what counts on some logs: seqnos of other partitions do not, nor those above ``ends``, shape (1024,)."""

    def counts(partition: int, failover_id: int, end: int) -> bool:
        here = partition in logs and (ends is None or end <= int(ends[partition]))
        return here and bool(logs[partition].gave(failover_id, end))

    return counts


def keys_of(cursor: Any, name: bytes) -> Iterator[bytes]:
    """Move a cursor over a producer's rows, and yield their keys."""
    prefix = keyspace.producer_key(name, 0)
    more = cursor.set_range(prefix)
    while more and len(key := bytes(cursor.key())) == len(prefix) and key[:-2] == prefix[:-2]:
        yield key
        more = cursor.next()


def cursor_table(cursor: Any) -> Numbers | None:
    """Return the producer's table at a cursor; None, with a line in the log, where it is damaged."""
    return readable(keyspace.unpack_producer, bytes(cursor.key()), cursor.value())


def numbers_of(cursor: Any, name: bytes) -> Numbers:
    """Return a producer's numbers in all partitions; damaged rows are left out."""
    tables = [cursor_table(cursor) for _ in keys_of(cursor, name)]
    return np.concatenate([NO_NUMBERS, *(one for one in tables if one is not None)])


def readable(unpack: Callable[[bytes, bytes], _T], key: bytes, value: bytes | None) -> _T | None:
    """Return what is under a key; None where there is nothing, or, with a line in the log, where it is damaged."""
    if value is None:
        return None
    try:
        return unpack(key, bytes(value))
    except DataDamagedError as error:
        log.error("what is known of a producer is lost", extra={"error": error.message})
        return None


def standing(table: Numbers, counts: Counts) -> npt.NDArray[np.bool_]:
    """Return which rows of a table count."""
    return np.array([counts(p, i, end) for p, _, i, _, end in table.tolist()], bool)


def staying(table: Numbers, partitions: Collection[int], counts: Counts) -> npt.NDArray[np.bool_]:
    """Return which rows of a table stay when those of some partitions go that do not count."""
    return ~np.isin(table["partition"], list(partitions)) | standing(table, counts)


def joined(*tables: Numbers) -> Numbers:
    """Return tables of different partitions as one."""
    whole = np.concatenate(tables)
    return whole[np.argsort(whole["partition"])]


def merged(old: Numbers, part: Numbers, counts: Counts) -> Numbers:
    """Return the newer table of a slot, with what only the stored one has: partitions, and larger numbers that count."""
    if (
        np.array_equal(old["partition"], part["partition"])
        and (old["number"] <= part["number"]).all()
    ):
        # So it is at nearly each flush of a producer that goes on, and the rest takes half a millisecond a slot.
        return part
    _, new, had = np.intersect1d(
        part["partition"], old["partition"], assume_unique=True, return_indices=True
    )
    larger = old["number"][had] > part["number"][new]
    # A replica has numbers from its upstream, while its tail has older ones of the same partitions.
    ahead = [
        at
        for at, (partition, _, failover_id, _, end) in zip(
            new[larger].tolist(), old[had[larger]].tolist(), strict=True
        )
        if counts(partition, failover_id, end)
    ]
    part = np.delete(part, ahead)
    return joined(old[~np.isin(old["partition"], part["partition"])], part)


def beaten(old: Numbers, part: Numbers, newest: Numbers, whole: U64, counts: Counts) -> Numbers:
    """Return what a join would lose of two tables of a slot: rows up to ``whole`` that count, and gave way to one above.

    Args:
        newest: what they were merged to.
    """
    both = np.concatenate((old, part))
    below = both[_up_to(whole, both)]
    stay = newest[_up_to(whole, newest)]
    below = below[~np.isin(below["partition"], stay["partition"])]
    return joined(below[standing(below, counts)])


def given_back(
    here: Numbers | None, kept: Numbers, partitions: Collection[int], counts: Counts
) -> tuple[Numbers, Numbers]:
    """Return a slot's table with what a join replaced in ``partitions``, where no number is left that counts; and what is
    kept on.
    """
    here = NO_NUMBERS if here is None else here[staying(here, partitions, counts)]
    kept = kept[staying(kept, partitions, counts)]
    back = np.isin(kept["partition"], list(partitions))
    back &= ~np.isin(kept["partition"], here["partition"])
    return joined(here, kept[back]), kept[~back]


def _up_to(whole: U64, table: Numbers) -> npt.NDArray[np.bool_]:
    """Return which rows end at or below a limit; a place has no seqnos, and does not."""
    partitions = table["partition"]
    limit = whole[np.minimum(partitions, PARTITIONS - 1)]
    return np.asarray((partitions < PARTITIONS) & (table["end_seqno"] <= limit))


def put_back(
    txn: Any, producers: Any, replaced: Any, partitions: Collection[int], counts: Counts
) -> None:
    """Put the numbers that a join replaced back, in partitions where none is left that counts; damaged rows stay."""
    with txn.cursor(db=replaced) as cursor:
        more = bool(partitions) and cursor.first()
        while more:
            key, kept = bytes(cursor.key()), cursor_table(cursor)
            if kept is not None:
                here = readable(keyspace.unpack_producer, key, txn.get(key, db=producers))
                here, kept = given_back(here, kept, partitions, counts)
                if len(here):
                    txn.put(key, keyspace.pack_producer(key, here), db=producers)
                if not len(kept):
                    more = cursor.delete() and bool(cursor.key())
                    continue
                cursor.put(key, keyspace.pack_producer(key, kept))
            more = cursor.next()


def drop_undone(txn: Any, producers: Any, partitions: Collection[int], counts: Counts) -> None:
    """Remove the numbers of all producers in partitions that do not count; damaged rows stay."""
    slots = {partition // PRODUCER_SLOT for partition in partitions}
    with txn.cursor(db=producers) as cursor:
        more = bool(slots) and cursor.first()
        while more:
            slot = keyspace.producer_slot(key := bytes(cursor.key()))
            table = cursor_table(cursor) if slot in slots else None
            if table is not None:
                keep = staying(table, partitions, counts)
                if not keep.any():
                    more = cursor.delete() and bool(cursor.key())
                    continue
                if not keep.all():
                    cursor.put(key, keyspace.pack_producer(key, table[keep]))
            more = cursor.next()
