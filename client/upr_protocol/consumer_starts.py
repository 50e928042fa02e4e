"""What a consumer asks for when it starts partitions; see ``consumer``."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from upr_protocol.block import U64
from upr_protocol.consumer_types import Beginning, Indexes, Pin, ProtocolError, StartRequest
from upr_protocol.limits import PARTITIONS
from upr_protocol.records import START


def start_requests(
    columns: tuple[Indexes, U64, U64, U64, U64],
    until_now: bool,
    exact: Mapping[int, Pin],
    beginning: Beginning,
) -> list[StartRequest]:
    """Return the requests for some partitions.

    Args:
        columns: one item a partition: the partition, its failover id, seqno, data id and the seqno where it ends;
            0 stands for none.
        until_now: whether those end at what is there that have no end yet.
        exact: where partitions end exactly.
        beginning: where those begin of which nothing is held.
    """
    partitions, failover, seqnos, data, targets = columns
    if beginning is not None:
        # A beginning is chosen by a client that has nothing, so that it names no id either.
        has_some = (seqnos > 0).astype(np.uint64)
        failover, data = failover * has_some, data * has_some
    rows = zip(*(c.tolist() for c in (partitions, failover, seqnos, data, targets)), strict=True)
    return [
        StartRequest(
            partition,
            failover_id or None,
            seqno,
            data_id or None,
            target or None,
            until_now and not target,
            exact[partition].seqno if partition in exact else None,
            None if seqno else beginning,
        )
        for partition, failover_id, seqno, data_id, target in rows
    ]


def start_records(
    partitions: Indexes, failover_ids: U64, seqnos: U64, data_ids: U64
) -> npt.NDArray[np.void]:
    """Return plain requests as records of dtype START; an id of 0 is none."""
    records = np.zeros(len(partitions), START)
    records["partition"], records["failover_id"] = partitions, failover_ids
    records["seqno"], records["data_id"] = seqnos, data_ids
    return records


def check_started(
    records: npt.NDArray[np.void], state: npt.NDArray[np.uint8], starting: int
) -> Indexes:
    """Return the partitions of records of dtype STARTED, when each answers a Start.

    Raises:
        ProtocolError: one does not.
    """
    partitions = records["partition"].astype(np.int64)
    sent = (partitions < PARTITIONS) & (records["failover_id"] != 0)
    sent &= state[np.minimum(partitions, PARTITIONS - 1)] == starting
    if not sent.all():
        wrong = records[~sent][0]
        raise ProtocolError(
            f"the server started partition {wrong['partition']} under id {int(wrong['failover_id']):016x}: "
            "no Start was sent, or it is no id"
        )
    if len(np.unique(partitions)) < len(partitions):
        raise ProtocolError("the server started a partition twice")
    return partitions
