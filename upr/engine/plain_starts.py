"""Many starts of which nothing is to be said but from where: as columns, decided on together."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from upr.engine.partitions import ACTIVE, REPLICA, Partitions
from upr.engine.streams import StartRequest
from upr_protocol.block import I64, U64
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import PARTITIONS
from upr_protocol.records import START

_Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class PlainStarts:
    """Starts, one item a start in each column.

    Attributes:
        partitions: 0 to 1023, each once.
        failover_ids, seqnos, data_ids: as in ``StartRequest``, 0 for an id that is not named.
        until_now: whether they end at what is there.
        needs_log: whether the client is to be told the failover log: it names no id, or has nothing.
    """

    partitions: I64
    failover_ids: U64
    seqnos: U64
    data_ids: U64
    until_now: bool
    needs_log: _Mask = field(init=False)

    def __post_init__(self) -> None:
        self.needs_log = (self.seqnos == 0) | (self.failover_ids == 0)

    @classmethod
    def read(cls, data: bytes, until_now: bool) -> "PlainStarts":
        """Return the table of a Start.

        Raises:
            InvalidArgumentError: its size is none that records add up to, or a partition is out of range or there
                twice.
        """
        if len(data) % START.itemsize or len(data) > PARTITIONS * START.itemsize:
            raise InvalidArgumentError(
                f"a Start table of {len(data)} bytes, a record takes {START.itemsize} and there are at most {PARTITIONS}"
            )
        table = np.frombuffer(data, START)
        partitions = table["partition"].astype(np.int64)
        if len(partitions) and int(partitions.max()) >= PARTITIONS:
            raise InvalidArgumentError(
                f"a Start of partition {int(partitions.max())}, partitions are 0 to {PARTITIONS - 1}"
            )
        if len(np.unique(partitions)) < len(partitions):
            raise InvalidArgumentError("a Start table names a partition twice")
        ids, seqnos, data_ids = (
            table[name].astype(np.uint64) for name in ("failover_id", "seqno", "data_id")
        )
        return cls(partitions, ids, seqnos, data_ids, until_now)

    def plain(self, table: Partitions) -> _Mask:
        """Where the rules of ``answer_start`` say "started", with nothing else to be told than a record can.

        Whatever is not sure here is decided there.
        """
        p = self.partitions
        newest = table.newest_id[p]
        serves = (table.state[p] == ACTIVE) | (table.state[p] == REPLICA)
        is_new = (self.failover_ids == 0) & (self.seqnos == 0) & (self.data_ids == 0)
        held = (self.data_ids == newest) & (self.seqnos > 0)
        held &= (self.seqnos <= table.high[p]) & (self.seqnos >= table.purge[p])
        nothing_held = (self.seqnos == 0) & ((self.data_ids == 0) | (self.data_ids == newest))
        goes_on = (self.failover_ids == newest) & (held | nothing_held)
        born = np.array([len(table.logs[i]) == 1 for i in p.tolist()], bool)
        plain: _Mask = serves & (is_new | goes_on) & (born | ~self.needs_log)
        return plain

    def requests(self, chosen: _Mask) -> list[StartRequest]:
        """Return some of them one by one."""
        columns = (self.partitions, self.failover_ids, self.seqnos, self.data_ids)
        return [
            StartRequest(
                partition,
                failover_id or None,
                seqno,
                data_id or None,
                until_now=self.until_now,
            )
            for partition, failover_id, seqno, data_id in zip(
                *(column[chosen].tolist() for column in columns), strict=True
            )
        ]
