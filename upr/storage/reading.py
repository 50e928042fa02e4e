"""Reading stored blocks for streams: checked, and cut to what is above the reader's seqno.

Runs in a reader thread. A partition whose bytes fail their checks gets an error of its own; the others go on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from upr.storage.merge import Encoded
from upr.storage.store import ReadRequest, Store
from upr_protocol.block import slice_above, without_values
from upr_protocol.errors import DataDamagedError, InvalidArgumentError
from upr_protocol.wire.codec import (
    check_encoded,
    column_spans,
    decode_block,
    decode_runs,
    encode_block,
)


@dataclass(slots=True)
class ReadResult:
    """What was found for one request: blocks that continue exactly above it, or why there are none.

    Neither blocks nor an error: the byte limit was reached before this request.
    """

    request: ReadRequest
    blocks: list[Encoded] = field(default_factory=list)
    error: DataDamagedError | None = None


def read_blocks(
    store: Store, requests: Sequence[ReadRequest], max_bytes: int, *, keys_only: bool
) -> list[ReadResult]:
    """Read, check and cut blocks for several partitions in one short transaction."""
    results = []
    for request, found in zip(requests, store.read(requests, max_bytes), strict=True):
        result = ReadResult(request)
        results.append(result)
        if found is None:
            continue
        try:
            if not found:
                raise DataDamagedError("it is missing")
            result.blocks = list(_continue_from(request, found, keys_only))
        except (InvalidArgumentError, DataDamagedError) as error:
            result.error = DataDamagedError(
                f"partition {request.partition}: a stored block above seqno {request.above} is damaged: {error.message}",
                hint="restore the partition from a replica or a backup",
            )
    return results


def _continue_from(
    request: ReadRequest, found: Iterable[bytes], keys_only: bool
) -> Iterable[Encoded]:
    at = request.above
    for data in found:
        # It was checked whole before it was stored: its CRCs tell whether it still is what it was.
        check_encoded(data)
        runs = decode_runs(data[slice(*column_spans(data).get(1, (0, 0)))])
        if len(runs) != 1:
            raise DataDamagedError(f"the block has {len(runs)} runs, a stored block has one")
        run = runs[0]
        start, end = int(run["start_seqno"]), int(run["end_seqno"])
        if run["partition"] != request.partition or start > at or end <= at:
            raise DataDamagedError(
                f"the block tells of partition {run['partition']}, seqnos {start} to {end}, after {at}"
            )
        if start == at and not keys_only:
            yield Encoded(runs, data)
        else:
            cut = slice_above(decode_block(data), at)
            if keys_only:
                cut = without_values(cut)
            yield Encoded(cut.runs, encode_block(cut))
        at = end
