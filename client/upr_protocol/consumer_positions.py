"""The positions of all partitions as columns; see ``consumer``."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from upr_protocol.block import U64
from upr_protocol.consumer_types import Indexes
from upr_protocol.failover import FailoverLog
from upr_protocol.histories import MarkerHistories
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position

UNKNOWN_HORIZON: Final = 2**64 - 1


class PositionTable:
    """What a consumer has of each partition, and which of that changed since it was stored."""

    def __init__(self) -> None:
        self._version: U64 = np.zeros(PARTITIONS, np.uint64)
        self._seqno: U64 = np.zeros(PARTITIONS, np.uint64)
        self._horizon: U64 = np.zeros(PARTITIONS, np.uint64)
        self._failover: U64 = np.zeros(PARTITIONS, np.uint64)
        self._data: U64 = np.zeros(PARTITIONS, np.uint64)
        self._changed = np.zeros(PARTITIONS, np.bool_)
        self._markers = MarkerHistories()
        self._logs: dict[int, FailoverLog | None] = {}
        self._born: U64 = np.zeros(PARTITIONS, np.uint64)

    def _set_position(self, partition: int, position: Position) -> None:
        self._version[partition] = position.bucket_version
        self._seqno[partition] = position.seqno
        self._horizon[partition] = UNKNOWN_HORIZON if position.horizon is None else position.horizon
        self._failover[partition] = position.failover_id or 0
        self._data[partition] = position.data_id or 0
        self._markers.replace(partition, position.markers)
        self._set_log(partition, position.log)

    def _set_log(self, partition: int, log: FailoverLog | None) -> None:
        self._logs[partition] = log
        self._born[partition] = 0

    def _take_born(self, partitions: Indexes, ids: U64) -> None:
        """The logs of partitions are these ids at 0; made only when somebody asks."""
        self._born[partitions] = ids

    def _log(self, partition: int) -> FailoverLog | None:
        born = int(self._born[partition])
        if born:
            self._set_log(partition, FailoverLog.born(born))
        return self._logs.get(partition)

    def seqno(self, partition: int) -> int:
        """The acknowledged seqno of a partition."""
        return int(self._seqno[partition])

    def position(self, partition: int) -> Position:
        """The acknowledged position of a partition that is followed."""
        horizon = int(self._horizon[partition])
        return Position(
            int(self._version[partition]),
            int(self._failover[partition]) or None,
            int(self._data[partition]) or None,
            int(self._seqno[partition]),
            None if horizon == UNKNOWN_HORIZON else horizon,
            self._markers.of(partition),
            self._log(partition),
        )

    def take_changed(self) -> list[int]:
        """The partitions whose position changed since this was asked last."""
        changed: list[int] = np.flatnonzero(self._changed).tolist()
        self._changed[:] = False
        return changed

    def mark_changed(self, partitions: Iterable[int]) -> None:
        """Undo ``take_changed`` for partitions whose position could not be stored."""
        self._changed[list(partitions)] = True

    @property
    def has_changed(self) -> bool:
        """Whether a position changed since ``take_changed``."""
        return bool(self._changed.any())
