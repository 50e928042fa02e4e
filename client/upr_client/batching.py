"""What the buffered writer gathers: rows on their way, and what went wrong with them; the same in both flavours."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from upr_client.messages import DURABILITIES, choice
from upr_client.results import WriteResults
from upr_protocol.errors import InvalidArgumentError, UprError, WriteFailedError
from upr_protocol.limits import BLOCK_COLUMN_BYTES, BLOCK_ROWS_MAX
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.v1 import types_pb2

Rows = list[tuple[bytes, bytes | None]]
OnResults = Callable[[Rows, WriteResults], Any]

BATCH_ROWS: Final = 4000
LINGER_SECONDS: Final = 0.005
OUTSTANDING_BYTES: Final = 16 * 2**20
ROW_BYTES: Final = 9
"""What a row takes in a block besides key and value: an op and two offsets."""
_KEYS_TOLD: Final = 100


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How to gather; the meanings are those of ``AsyncBucket.writer``.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    durability: str
    batch_rows: int
    batch_bytes: int
    linger_seconds: float
    max_outstanding_bytes: int
    on_results: OnResults | None

    def __post_init__(self) -> None:
        choice(DURABILITIES, self.durability, "durability")
        for name, value, largest in (
            ("batch_rows", self.batch_rows, BLOCK_ROWS_MAX),
            ("batch_bytes", self.batch_bytes, BLOCK_COLUMN_BYTES),
            ("max_outstanding_bytes", self.max_outstanding_bytes, None),
        ):
            if value < 1 or (largest is not None and value > largest):
                limit = "1 or more" if largest is None else f"1 to {largest}"
                raise InvalidArgumentError(f"{name} is {value}, it must be {limit}")
        if not (self.linger_seconds >= 0 and isfinite(self.linger_seconds)):
            raise InvalidArgumentError(
                f"linger_seconds is {self.linger_seconds}, it must be 0 or more"
            )
        if self.on_results is not None and not callable(self.on_results):
            raise InvalidArgumentError("on_results must be None or a function of rows and results")


class Batch:
    """Rows that are to go out in one Write.

    Attributes:
        number: batches are numbered in the order of writing, from 1.
        due: when it goes out at the latest, full or not.
        bytes: what its columns take.
        level: the strongest durability of its rows; the values of the enumeration rise with it.
    """

    __slots__ = ("bytes", "due", "keys", "level", "number", "values")

    def __init__(self, number: int, due: float) -> None:
        self.number = number
        self.due = due
        self.bytes = 0
        self.level: types_pb2.Durability.ValueType = types_pb2.DURABILITY_MEMORY
        self.keys: list[bytes] = []
        self.values: list[bytes | None] = []

    def rows(self) -> Rows:
        """Return the rows as (key, value) pairs, in the order of writing."""
        return list(zip(self.keys, self.values, strict=True))


class Failures:
    """What failed since it was last told."""

    def __init__(self) -> None:
        self._first: UprError | None = None
        self._rows = 0
        self._keys: list[bytes] = []
        self._partitions: set[int] = set()
        self._raised: Exception | None = None

    def __bool__(self) -> bool:
        return self._first is not None or self._raised is not None

    def add(self, batch: Batch, error: UprError, applied: Iterable[int] = ()) -> None:
        """Rows of a batch were not written, or may not have been: all but those of the partitions that applied them."""
        done = frozenset(applied)
        partitions = [partition_of(key) for key in batch.keys]
        failed = [
            key
            for key, partition in zip(batch.keys, partitions, strict=True)
            if partition not in done
        ]
        self._first = self._first or error
        self._rows += len(failed)
        self._keys += failed[: _KEYS_TOLD - len(self._keys)]
        self._partitions.update(set(partitions) - done)

    def raised(self, error: Exception) -> None:
        """The application's callback failed."""
        self._raised = self._raised or error

    def take(self) -> Exception | None:
        """Return what is to be raised now, None for nothing; it is told once."""
        if self._first is None:
            raised, self._raised = self._raised, None
            return raised
        first, rows = self._first, self._rows
        error = WriteFailedError(
            f"{rows} rows were not written, or may not have been: {first.message}",
            hint=first.hint,
            retriable=first.retriable,
            rows=rows,
            keys=self._keys,
            partitions=sorted(self._partitions),
        )
        error.__cause__ = first
        self._first, self._rows, self._keys, self._partitions = None, 0, [], set()
        return error
