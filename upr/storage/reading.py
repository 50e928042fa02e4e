"""Reading stored blocks for streams: checked, and cut to what is above the reader's seqno.

Runs in a reader thread. A partition whose bytes fail their checks gets an error of its own; the others go on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from upr.storage.heads import own_head
from upr.storage.merge import Encoded
from upr.storage.showing import Showing
from upr.storage.store import ReadRequest, Store
from upr_protocol.block import slice_above
from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.limits import FRAME_PLAIN_BYTES
from upr_protocol.wire.codec import (
    check_encoded,
    decode_block,
    decompress_block,
    encode_block,
    plain_bytes,
)


@dataclass(slots=True)
class ReadResult:
    """What was found for one request: blocks that continue exactly above it, or why there are none.

    Neither blocks nor an error: the byte limit was reached before this request.
    """

    request: ReadRequest
    blocks: list[Encoded] = field(default_factory=list)
    error: DataDamagedError | None = None


@dataclass(slots=True)
class _Reading:
    """What one read may still take: bytes to be sent, and bytes that come out of compressed blocks."""

    showing: Showing
    accept_zstd: bool
    send_bytes: int
    plain_bytes: int

    @property
    def is_full(self) -> bool:
        return self.send_bytes <= 0 or self.plain_bytes <= 0

    def takes_compressed(self, size: int) -> bool:
        """Count a block of so many bytes when decompressed; False where it must wait for the next read."""
        if self.plain_bytes < min(size, FRAME_PLAIN_BYTES):
            self.plain_bytes = 0
            return False
        self.plain_bytes -= size
        return True


def read_blocks(
    store: Store,
    requests: Sequence[ReadRequest],
    max_bytes: int,
    *,
    keys_only: bool = False,
    key_prefix: bytes = b"",
    plain_rows: bool = False,
    accept_zstd: bool = False,
) -> list[ReadResult]:
    """Read, check and cut blocks for several partitions in one short transaction.

    A read ends with the block that reaches ``max_bytes`` of encoded blocks as they are to be sent, and before one
    with which the compressed ones would have more than FRAME_PLAIN_BYTES when decompressed, unless it is alone.

    Args:
        keys_only: leave the values out.
        key_prefix: leave out the rows whose keys do not begin with it.
        plain_rows: blocks cost as much credit as the plain rows that they are to become.
        accept_zstd: return a compressed block as it is stored if all of it is wanted; else none is compressed.
    """
    showing = Showing(keys_only, key_prefix, plain_rows)
    reading = _Reading(showing, accept_zstd, max_bytes, FRAME_PLAIN_BYTES)
    results = []
    for request, found in zip(requests, store.read(requests, max_bytes), strict=True):
        result = ReadResult(request)
        results.append(result)
        if found is None or reading.is_full:
            continue
        try:
            if not found:
                raise DataDamagedError("it is missing")
            result.blocks = list(_continue_from(request, found, reading))
        except (InvalidArgumentError, DataDamagedError) as error:
            result.error = DataDamagedError(
                f"partition {request.partition}: a stored block above seqno {request.above} is damaged: {error.message}",
                hint="restore the partition from a replica or a backup",
            )
    return results


def _continue_from(
    request: ReadRequest, found: Iterable[bytes], reading: _Reading
) -> Iterable[Encoded]:
    at = request.above
    for data in found:
        # It was checked whole before it was stored: its CRCs tell whether it still is what it was.
        compressed = check_encoded(data)
        head, runs = own_head(data, request.partition)
        if head.start > at or head.end <= at:
            raise DataDamagedError(
                f"the block tells of seqnos {head.start} to {head.end}, after {at}"
            )
        if compressed and not reading.takes_compressed(plain_bytes(data, len(data))):
            return
        if head.start == at and reading.showing.as_they_are:
            if compressed and not reading.accept_zstd:
                data = decompress_block(data)
            block = Encoded(runs, data)
        else:
            cut = reading.showing.of(slice_above(decode_block(data), at))
            data = encode_block(cut)
            tokens = np.array([request.token], np.uint32)
            cost = reading.showing.cost(cut, len(data), tokens)
            block = Encoded(cut.runs, data, cost=cost)
        reading.send_bytes -= block.size
        yield block
        if reading.is_full:
            return
        at = head.end
