"""Checks of one partition's stored blocks, and what follows for markers.

What can be proved about rows that are missing. A row may be missing when a newer version of its key lies at or
below the horizon of its run, or when it is a tombstone at or below the purge seqno. The key of a row that is not there is
not known, so one thing remains: at a complete marker M (no run up to there has a horizon above M) nothing at or
below the horizon is newer than M itself, so **the row at M is there**, unless M is at or below the purge seqno.
A key that is there twice proves nothing: keeping a superseded row is lawful, dropping it is only allowed.

An active partition numbers and stores whole stretches: a horizon above the end of its data says that rows are missing
whose newer versions are nowhere. On a replica that is lawful, the rest of a stretch has still to come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from upr.storage.check_findings import Finding, Readable, Report
from upr.storage.keyspace import PartitionRow
from upr_protocol.block import Block, row_seqnos
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.wire.codec import decode_block


@dataclass(slots=True)
class Ends:
    """Where a partition's data ends, and the largest horizon up to there."""

    high: int = 0
    horizon: int = 0


def check_blocks(
    partition: int,
    row: PartitionRow | None,
    blocks: Iterable[tuple[int, bytes]],
    pins: Sequence[tuple[str, int, int]],
    report: Report,
    readable: Readable,
) -> Ends:
    """Check a partition's blocks, given as (end_seqno of the key, bytes) in order.

    Args:
        row: the partition's row, None when it cannot be read.
        pins: cuts that pin the partition: (name, failover id, seqno).
    """
    ends = Ends()
    for key_end, data in blocks:
        try:
            block = decode_block(data)
        except UprError as error:
            _say(
                report, partition, ends.high, key_end, f"the block cannot be read: {error.message}"
            )
            ends.high = key_end
            continue
        _check_one(partition, row, key_end, block, pins, report, ends, readable)
    if row is not None and row.stored_high != ends.high:
        words = f"its row says that {row.stored_high} is stored, the blocks end at {ends.high}"
        low, high = sorted((row.stored_high, ends.high))
        _say(report, partition, low, high, words)
    return ends


def _say(report: Report, partition: int, above: int, end: int, words: str) -> None:
    report(Finding(words, partition=partition, above=above, end=end))


def _check_one(
    partition: int,
    row: PartitionRow | None,
    key_end: int,
    block: Block,
    pins: Sequence[tuple[str, int, int]],
    report: Report,
    ends: Ends,
    readable: Readable,
) -> None:
    run = block.runs[0]
    start, end, horizon = (int(run[name]) for name in ("start_seqno", "end_seqno", "horizon"))
    if len(block.runs) != 1 or int(run["partition"]) != partition or end != key_end:
        words = f"the block has {len(block.runs)} runs, the first of partition {run['partition']} to {end}; its key says {partition} to {key_end}"
        _say(report, partition, ends.high, key_end, words)
        ends.high = key_end
        return
    if start > ends.high:
        _say(report, partition, ends.high, start, "no block tells of these seqnos")
    elif start < ends.high:
        _say(report, partition, start, ends.high, "two blocks tell of these seqnos")
    else:
        readable.add(partition, start, end)
    ends.high = end
    ends.horizon = max(ends.horizon, horizon)
    purge = row.purge_seqno if row is not None else 0
    if ends.horizon == end > purge and not _has_last_row(block):
        _say(
            report,
            partition,
            start,
            end,
            f"the marker at {end} is not true: the row at {end} is missing",
        )
    for name, _, pin in pins:
        if start < pin < end or end <= pin < horizon:
            words = f"cut {name} pins {pin}, merged across (horizon {horizon}): it is not exact any more"
            _say(report, partition, start, end, words)


def _has_last_row(block: Block) -> bool:
    return block.rows > 0 and int(row_seqnos(block)[-1]) == int(block.runs["end_seqno"][-1])


def check_horizon(partition: int, row: PartitionRow | None, ends: Ends, report: Report) -> None:
    """Check that an active partition holds what its horizons promise."""
    if row is not None and row.state == 1 and ends.horizon > ends.high:
        words = f"rows are missing that newer ones up to {ends.horizon} superseded, the data ends at {ends.high}"
        _say(report, partition, ends.high, ends.horizon, words)


def last_rows(block: Block) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Whether each run of a block holds the row of its last seqno: bool, one a run."""
    runs = block.runs
    bounds = np.cumsum(runs["count"], dtype=np.int64)
    if not block.rows:
        return np.zeros(len(runs), bool)
    last = row_seqnos(block)[np.maximum(bounds - 1, 0)]
    held: np.ndarray[tuple[int], np.dtype[np.bool_]] = (runs["count"] > 0) & (
        last == runs["end_seqno"]
    )
    return held


def problem_of(data: bytes) -> tuple[Block | None, str]:
    """Return a block, or why it cannot be read."""
    try:
        return decode_block(data), ""
    except InvalidArgumentError as error:
        return None, error.message
