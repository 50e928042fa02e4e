"""Finding the place in a partition's stored blocks where a time was passed.

Commit times rise with the seqnos, as long as the clock was not set back. So a few looks at heads of blocks, halving
the seqnos in between, find the block, and its column of times finds the row. Where the clock was set back, times
cross the one that is looked for several times, and one of the crossings is found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np

from upr.storage.block_cursor import BlockCursor, StoredBlock
from upr.storage.store import Store
from upr_protocol.errors import CorruptBlockError, DataDamagedError
from upr_protocol.wire.codec import check_encoded, open_columns

SEARCH_BYTES = 4 * 2**20
SEARCH_PARTITIONS = 64
"""One bite of a search ends with the partition that reaches the one or the other."""
_SEQNOS, _TIMES = 2, 8
_ABSENT = (0, 0)
_TIME_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StoredBeginning:
    """What a search of a partition's stored blocks came to.

    Attributes:
        seqno: the rows at or below it were committed before the time.
        found: whether a row right above it was committed at or after the time; else it is the end of what is stored.
    """

    seqno: int
    found: bool


def search(
    store: Store, wanted: Sequence[tuple[int, int]]
) -> list[StoredBeginning | DataDamagedError]:
    """Search for (partition, time) pairs, the first of them, and return what was found, in order.

    One bite, in one short transaction: call it again with those that are left. Times are microseconds since the
    epoch. A partition whose blocks are damaged gets the error.
    """
    found: list[StoredBeginning | DataDamagedError] = []
    size = 0
    with store.look() as cursor:
        for partition, time in wanted[:SEARCH_PARTITIONS]:
            try:
                result, used = _search(cursor, partition, time)
                size += used
            except (CorruptBlockError, DataDamagedError) as error:
                result = DataDamagedError(
                    f"partition {partition}: a stored block is damaged: {error.message}",
                    hint="restore the partition from a replica or a backup",
                )
            found.append(result)
            if size >= SEARCH_BYTES:
                break
    return found


def _search(
    cursor: BlockCursor, partition: int, time: int
) -> tuple[StoredBeginning | DataDamagedError, int]:
    """Return what was found, and how many bytes were read for it."""
    newest = high = cursor.newest_end(partition)
    low = 0
    passed: StoredBlock | None = None
    # Blocks with rows that end at or below low are older than the time, those above high are not.
    while low < high:
        middle = cursor.containing(partition, (low + high) // 2 + 1)
        block: StoredBlock | None = middle
        while block is not None and not _checked(block).rows:
            # A block that lost all its rows tells no time.
            block = cursor.containing(partition, block.end + 1) if block.end < high else None
        if block is not None and block.time < time:
            low = block.end
        else:
            passed = passed if block is None else block
            high = middle.start
    if passed is None:
        return StoredBeginning(newest, False), 0
    data = cursor.data(partition, passed.end)
    return StoredBeginning(_row_below(data, passed, time), True), len(data)


def _checked(block: StoredBlock) -> StoredBlock:
    """Return a block whose table is what was stored: a wrong time would lead the search astray in silence."""
    if google_crc32c.value(block.table) != block.table_crc:
        raise DataDamagedError(f"the table of the block that ends at {block.end} has changed")
    return block


def _row_below(data: bytes, block: StoredBlock, time: int) -> int:
    """Return the seqno right below a block's first row that was committed at or after the time."""
    check_encoded(data)
    opened, spans = open_columns(data)
    times = np.frombuffer(opened[slice(*spans.get(_TIMES, _ABSENT))], "<i8")
    late = np.flatnonzero(times >= min(time, _TIME_MAX))
    row = int(late[0]) if len(late) else 0
    seqnos = np.frombuffer(opened[slice(*spans.get(_SEQNOS, _ABSENT))], "<u4")
    return block.start + (int(seqnos[row]) - 1 if len(seqnos) else row)
