"""Positions of consumers on their way to the store, in the order in which they were decided."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from upr.storage.keyspace import ConsumerRow
from upr_protocol.block import I64, U64
from upr_protocol.limits import PARTITIONS

_Mask = npt.NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class Save:
    """Positions of one consumer that are to be stored together, or removed.

    Attributes:
        partitions: each once, shape (n,).
        failover_ids, seqnos: what they acknowledge, shape (n,).
        positions: as ``ConsumerRow.position``, n of them; None to remove what there is.
        time: when they were handed in, microseconds since the epoch.
        newest: where the consumer has said nothing since that counts more, shape (n,).
        under_way: whether it was handed to the store.
        void: whether the consumer was forgotten meanwhile: none of it counts.
        ended: whether it is stored, or given up.
        failure: why it could not be stored.
    """

    name: str
    generation: int
    partitions: I64
    failover_ids: U64
    seqnos: U64
    positions: Sequence[bytes] | None
    time: int
    newest: _Mask = field(init=False)
    under_way: bool = False
    void: bool = False
    ended: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.newest = np.ones(len(self.partitions), bool)

    def rows(self) -> dict[tuple[bytes, int], ConsumerRow | None]:
        """Return what is to be written; None for rows to be removed."""
        key, partitions = self.name.encode(), self.partitions.tolist()
        if self.positions is None:
            return dict.fromkeys(((key, p) for p in partitions), None)
        columns = (partitions, self.failover_ids.tolist(), self.seqnos.tolist(), self.positions)
        return {
            (key, partition): ConsumerRow(self.generation, failover_id, seqno, self.time, position)
            for partition, failover_id, seqno, position in zip(*columns, strict=True)
        }


class _Taker(Protocol):
    def check_room(self, names: Set[str]) -> None: ...
    def take_saved(self, save: Save) -> None: ...


class Saves:
    """The saves of a bucket that are not stored yet.

    Args:
        consumers: takes them in when they are.
    """

    def __init__(self, consumers: _Taker) -> None:
        self._consumers = consumers
        self._waiting: list[Save] = []

    def add(self, save: Save) -> None:
        """Put a save behind those that there are.

        Raises:
            TooManyError: its consumer is not registered, and CONSUMERS_MAX others are.
        """
        if save.positions is not None:
            self._consumers.check_room({save.name, *(other.name for other in self._waiting)})
        self._waiting.append(save)

    def of(self, name: str) -> list[Save]:
        """Return the saves of a consumer."""
        return [save for save in self._waiting if save.name == name]

    def overtaken(self, name: str, partitions: I64) -> None:
        """A consumer has said of partitions what counts more than what it is saving of them."""
        for save in self._waiting:
            if save.name == name:
                save.newest &= ~np.isin(save.partitions, partitions)

    def void(self, name: str) -> _Mask:
        """Have none of a consumer's saves count; returns the partitions that they may leave rows of."""
        left = np.zeros(PARTITIONS, bool)
        voided = self.of(name)
        for save in voided:
            save.void = True
            left[save.partitions] = True
        self._end([save for save in voided if not save.under_way])
        return left

    def take(self, max_rows: int) -> list[Save]:
        """Return the oldest ones, at most about ``max_rows`` rows of them; ``stored`` or ``failed`` must follow."""
        taken: list[Save] = []
        rows = 0
        for save in self._waiting:
            if rows >= max_rows:
                break
            save.under_way = True
            taken.append(save)
            rows += len(save.partitions)
        return taken

    def stored(self, saves: Sequence[Save]) -> None:
        """Take note that saves are in the store."""
        self._end(saves)
        for save in saves:
            if not save.void:
                self._consumers.take_saved(save)

    def failed(self, saves: Sequence[Save], why: BaseException) -> None:
        """Give saves up: nothing of them was stored."""
        self._end(saves)
        for save in saves:
            save.failure = why

    def _end(self, saves: Sequence[Save]) -> None:
        for save in saves:
            save.ended = True
        self._waiting = [save for save in self._waiting if not save.ended]


def rows_of(saves: Sequence[Save]) -> dict[tuple[bytes, int], ConsumerRow | None]:
    """Return the rows of several saves; of two of the same the later one counts."""
    rows: dict[tuple[bytes, int], ConsumerRow | None] = {}
    for save in saves:
        rows.update(save.rows())
    return rows
