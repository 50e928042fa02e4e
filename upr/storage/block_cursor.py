"""Looking at stored blocks one at a time, wherever they are, without copying what is not needed."""

import struct
from dataclasses import dataclass
from typing import Any

from upr.storage import keyspace
from upr.storage.heads import HEAD_BYTES, head_of
from upr_protocol.block import RUN
from upr_protocol.errors import DataDamagedError
from upr_protocol.wire.codec import column_spans

_TIME = struct.Struct("<Q")
_TIME_AT = 2 + RUN.fields["time"][1]  # type: ignore[index]
_TABLE_CRC = 10
_ABSENT = (0, 0)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What a stored block says of itself: nothing of it is checked against its checksums.

    Attributes:
        start, end: it tells of the seqnos in (start, end].
        rows: how many it has.
        time: when the newest of them was committed, microseconds since the epoch; 0 without rows.
        size: encoded bytes.
        table, table_crc: its run table, and the CRC32C that it says it has.
    """

    start: int
    end: int
    rows: int
    time: int
    size: int
    table: bytes
    table_crc: int


class BlockCursor:
    """Looks into the blocks of one read transaction: for the thread that began it, and until it ends.

    Args:
        cursor: over the blocks, of a transaction with buffers.
    """

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def newest_end(self, partition: int) -> int:
        """Return the end of a partition's newest block, 0 if it has none."""
        cursor = self._cursor
        above = cursor.set_range(keyspace.partition_key(partition + 1))
        if cursor.prev() if above else cursor.last():
            owner, end = keyspace.unpack_block_key(bytes(cursor.key()))
            return end if owner == partition else 0
        return 0

    def containing(self, partition: int, seqno: int) -> StoredBlock:
        """Return the block that tells of a seqno.

        Raises:
            DataDamagedError: there is none, or it is no block of one run of the partition.
            CorruptBlockError: its bytes are no block.
        """
        cursor = self._cursor
        owner = -1
        if cursor.set_range(keyspace.block_key(partition, seqno)):
            owner, end = keyspace.unpack_block_key(bytes(cursor.key()))
        if owner != partition:
            raise DataDamagedError(f"the block that tells of seqno {seqno} is missing")
        value = cursor.value()
        head = head_of(bytes(value[:HEAD_BYTES]), len(value), partition, end)
        if head.start >= seqno:
            raise DataDamagedError(f"the block that tells of seqno {seqno} is missing")
        first, last = column_spans(value).get(_TABLE_CRC, _ABSENT)
        return StoredBlock(
            head.start,
            end,
            head.rows,
            _TIME.unpack_from(value, _TIME_AT)[0],
            head.size,
            bytes(value[2:HEAD_BYTES]),
            int.from_bytes(value[first:last], "little"),
        )

    def data(self, partition: int, end: int) -> bytes:
        """Return a copy of the block that ends at a seqno.

        Raises:
            DataDamagedError: there is none.
        """
        if not self._cursor.set_key(keyspace.block_key(partition, end)):
            raise DataDamagedError(f"the block that ends at {end} is missing")
        return bytes(self._cursor.value())
