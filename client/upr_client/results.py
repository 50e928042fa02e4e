"""What became of writes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from upr_protocol.block import RUN, Block
from upr_protocol.errors import PartlyWrittenError, UprError
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX
from upr_protocol.wire.codec import block_to_message, decode_runs
from upr_protocol.wire.status import error_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2


class WriteResult(NamedTuple):
    """Where a mutation went.

    Args:
        partition: 0 to 1023.
        seqno: the seqno it was given; 0 when it was applied before a lost answer and the server forgot the seqno.
        failover_id: the failover id under which the seqno was given; 0 as above.
    """

    partition: int
    seqno: int
    failover_id: int


class WriteResults(NamedTuple):
    """Where many mutations went.

    Args:
        rows: how many were written.
        runs: (partition, start_seqno, end_seqno, failover_id): the rows of a partition got the seqnos above start
            up to end; one for each block and partition, in the order of writing.
    """

    rows: int
    runs: list[tuple[int, int, int, int]]


def write_request(block: Block, durability: types_pb2.Durability.ValueType) -> kv_pb2.WriteRequest:
    """Return a Write that has no number yet."""
    return kv_pb2.WriteRequest(
        write=kv_pb2.WriteBlock(durability=durability, block=block_to_message(block))
    )


def result_runs(result: kv_pb2.WriteResult) -> list[tuple[int, int, int, int]]:
    """Return the runs that were applied, as ``WriteResults.runs``."""
    runs = decode_runs(result.runs)
    ids = list(result.failover_ids) + [0] * (len(runs) - len(result.failover_ids))
    return list(
        zip(
            runs["partition"].tolist(),
            runs["start_seqno"].tolist(),
            runs["end_seqno"].tolist(),
            ids,
            strict=False,
        )
    )


def partly_refused(partitions: Iterable[types_pb2.RefusedPartition]) -> UprError | None:
    """Return the error of a write that some partitions refused while the others applied it; None for none."""
    refused = list(partitions)
    if not refused:
        return None
    error = error_of(refused[0].problem)
    names = ", ".join(str(item.partition) for item in refused[:5])
    more = ", ..." if len(refused) > 5 else ""
    error.message = (
        f"{len(refused)} partitions ({names}{more}) refused their part of the write, the rest was applied: "
        f"{error.message}"
    )
    return error


def partly_known(
    request: kv_pb2.WriteRequest, runs: Sequence[tuple[int, int, int, int]]
) -> UprError | None:
    """Return the error of a write whose answer tells of fewer partitions than it has, and of no refusal; else None.

    The server answers so when it is sent again a write that some partitions refused: it knows what was applied.
    """
    missing = len(request.write.block.runs) // RUN.itemsize - len(runs)
    if missing <= 0:
        return None
    return PartlyWrittenError(
        f"write {request.write.number} was applied before, but {missing} of its partitions had refused their part",
        hint="write those rows again, if nothing newer was written meanwhile",
    )


def window_of(opened: kv_pb2.WriteOpened) -> int:
    """Return how many writes may be outstanding, 1 to 64."""
    return min(opened.writes_in_flight or WRITES_IN_FLIGHT_MAX, WRITES_IN_FLIGHT_MAX)
