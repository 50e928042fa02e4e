"""Values of writing: results, single writes that go together, batches of rows, and the failures of those batches."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, NamedTuple

import numpy as np

from upr_protocol.block import ROW_BYTES, Block, build_block, select_runs
from upr_protocol.errors import InvalidArgumentError, ProtocolError, UprError, WriteFailedError
from upr_protocol.failover import WriteToken
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    GROUP_ROWS_MAX,
    choice,
)
from upr_protocol.partitioning import partition_of, partitions_of
from upr_protocol.wire.codec import block_from_message, decode_runs, encode_runs, fill_message
from upr_protocol.wire.grpc import error_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2


class WriteResult(NamedTuple):
    """Partition, seqno and failover id of a mutation.

    Args:
        partition: 0 to 1023.
        seqno: the seqno it was given; 0 when it was applied before a lost answer and the server forgot the seqno.
        failover_id: the failover id under which the seqno was given; 0 as above.
        bucket_version: the random id of the bucket.
    """

    partition: int
    seqno: int
    failover_id: int
    bucket_version: int = 0

    @property
    def token(self) -> WriteToken:
        """The write, for readers that want to have it.

        Raises:
            InvalidArgumentError: the server forgot the seqno.
        """
        return _token(self.bucket_version, [(self.partition, self.failover_id, self.seqno)])


class WriteResults(NamedTuple):
    """Partitions, seqnos and failover ids of many mutations.

    Args:
        rows: how many were written.
        runs: (partition, start_seqno, end_seqno, failover_id): the rows of a partition got the seqnos above start
            up to end; one for each block and partition, in the order of writing.
        bucket_version: the random id of the bucket.
    """

    rows: int
    runs: list[tuple[int, int, int, int]]
    bucket_version: int = 0

    @property
    def token(self) -> WriteToken:
        """All these writes, for readers that want to have them.

        Raises:
            InvalidArgumentError: the server forgot a seqno.
        """
        return _token(self.bucket_version, [(run[0], run[3], run[2]) for run in self.runs])


AtLeast = WriteToken | WriteResult | WriteResults | None
"""Writes that a reader wants to have: a token, or the result of writing, or none."""


def _token(bucket_version: int, writes: list[tuple[int, int, int]]) -> WriteToken:
    if not all(seqno for _, _, seqno in writes):
        raise InvalidArgumentError(
            "seqno of a write is 0, which the server forgot; must be known",
            hint="the write was applied before its answer was lost: read it from the active server",
        )
    return WriteToken.of(bucket_version, writes)


def token_of(wanted: WriteToken | WriteResult | WriteResults) -> WriteToken:
    """Return the token of what a reader wants to have.

    Raises:
        InvalidArgumentError: it is none of these, or the server forgot a seqno.
    """
    if isinstance(wanted, WriteToken):
        return wanted
    if not isinstance(wanted, WriteResult | WriteResults):
        raise InvalidArgumentError(
            f"token is {wanted!r}; must be a WriteToken or the result of a write",
            hint="WriteToken.parse makes one of its text",
        )
    return wanted.token


def write_request(block: Block, durability: types_pb2.Durability.ValueType) -> kv_pb2.WriteRequest:
    """Return a Write that has no number yet."""
    request = kv_pb2.WriteRequest()
    request.write.durability = durability
    fill_message(request.write.block, encode_runs(block.runs), block.columns, block.columns_crc)
    return request


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


def partly_refused(refused: Sequence[types_pb2.RefusedPartition], *, applied: bool) -> UprError:
    """Return the error of a write that partitions, at least one, refused for good.

    Args:
        applied: whether other partitions applied their part, or still may.
    """
    error = error_of(refused[0].problem)
    if len(refused) == 1 and not applied:
        return error
    names = ", ".join(str(item.partition) for item in refused[:5])
    more = ", ..." if len(refused) > 5 else ""
    rest = ", the rest was applied" if applied else ""
    error.message = f"{len(refused)} partitions ({names}{more}) refused their part of the write{rest}: {error.message}"
    return error


def part_of(request: kv_pb2.WriteRequest, partitions: Collection[int]) -> kv_pb2.WriteRequest:
    """Return a Write of only some of another's partitions, with its number."""
    write = request.write
    block = block_from_message(write.block, numbered=False)
    keep = np.isin(block.runs["partition"], list(partitions))
    part = write_request(select_runs(block, keep), write.durability)
    part.write.number = write.number
    return part


@dataclass(slots=True)
class Row:
    """One ``set`` or ``delete`` that waits for its outcome.

    Attributes:
        tell: called once ``outcome`` is there; must not block.
    """

    key: bytes
    value: bytes | None
    tell: Callable[[], None]
    outcome: WriteResult | UprError | None = None


Kind = tuple[types_pb2.Durability.ValueType, bool]
"""Durability of a write, and whether it deletes."""


@dataclass(slots=True)
class Group:
    """Rows that go out in one Write, with one durability, all of them sets or all of them deletes.

    A bucket over its quota takes deletes and no sets: so no delete fails for the sake of a set.
    """

    number: int
    kind: Kind
    bytes: int = 0
    rows: list[Row] = field(default_factory=list)

    def request(self) -> kv_pb2.WriteRequest:
        """Return the Write of its rows, in their order within each partition."""
        block = build_block([row.key for row in self.rows], [row.value for row in self.rows])
        return write_request(block, self.kind[0])

    def tell(
        self,
        runs: Iterable[tuple[int, int, int, int]],
        refused: Mapping[int, types_pb2.Problem],
        error: UprError | None,
        bucket_version: int = 0,
    ) -> None:
        """Tell each row its outcome.

        Args:
            runs: of the partitions that applied their part, as ``WriteResults.runs``.
            refused: why other partitions did not.
            error: the outcome in all the rest.
        """
        if error is None:
            error = ProtocolError("the answer to a write leaves out one of its partitions")
        applied = {run[0]: run for run in runs}
        given = dict.fromkeys(applied, 0)
        partitions = partitions_of([row.key for row in self.rows]).tolist()
        for row, partition in zip(self.rows, partitions, strict=True):
            run = applied.get(partition)
            if run is not None:
                given[partition] += 1
                # 0 where the seqnos are no longer known.
                seqno = run[1] + given[partition] if run[2] else 0
                row.outcome = WriteResult(partition, seqno, run[3], bucket_version)
            elif partition in refused:
                row.outcome = error_of(refused[partition])
            else:
                # Each is raised somewhere else, and gets a traceback of its own.
                row.outcome = copy.copy(error)
            row.tell()


class Gathering:
    """Single writes that wait for their turn, in groups that keep the order of each key."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._begun = 0
        self._newest: dict[Kind, Group] = {}
        self._last: dict[bytes, int] = {}
        """The number of the newest group that has a key."""

    def add(self, row: Row, durability: types_pb2.Durability.ValueType) -> None:
        """Put a row into the newest group of its kind, or a new one if that is full or in front of the key's last."""
        kind = (durability, row.value is None)
        size = len(row.key) + len(row.value or b"") + ROW_BYTES
        group = self._newest.get(kind)
        if (
            group is None
            or group.number < self._last.get(row.key, 0)
            or group.bytes + size > BLOCK_COLUMN_BYTES
            or len(group.rows) == GROUP_ROWS_MAX
        ):
            self._begun += 1
            group = self._newest[kind] = Group(self._begun, kind)
            self._groups.append(group)
        group.rows.append(row)
        group.bytes += size
        self._last[row.key] = group.number

    def take(self, waiting: Collection[Kind] = ()) -> Group | None:
        """Return the group that is to go out next; None for none, or if it has one of the kinds that wait."""
        if not self._groups or self._groups[0].kind in waiting:
            return None
        group = self._groups.popleft()
        if self._newest[group.kind] is group:
            del self._newest[group.kind]
        for row in group.rows:
            if self._last.get(row.key) == group.number:
                del self._last[row.key]
        return group


Rows = list[tuple[bytes, bytes | None]]
OnResults = Callable[[Rows, WriteResults], Any]

BATCH_ROWS: Final = 4000
LINGER_SECONDS: Final = 0.005
OUTSTANDING_BYTES: Final = 16 * 2**20
_KEYS_TOLD: Final = 100


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Options of a buffered writer; see ``AsyncBucket.writer``.

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
                raise InvalidArgumentError(f"{name} is {value}; must be {limit}")
        if not (self.linger_seconds >= 0 and isfinite(self.linger_seconds)):
            raise InvalidArgumentError(
                f"linger_seconds is {self.linger_seconds}; must be 0 or more"
            )
        if self.on_results is not None and not callable(self.on_results):
            raise InvalidArgumentError(
                "on_results is not callable; must be None or a function of rows and results"
            )


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
    """Failures since the last report."""

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
        """Return the error to raise now, once; None without one."""
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


DURABILITIES: Final = {
    "disk": types_pb2.DURABILITY_DISK,
    "memory": types_pb2.DURABILITY_MEMORY,
    "replicated(1)": types_pb2.DURABILITY_REPLICATED_1,
    "replicated(2)": types_pb2.DURABILITY_REPLICATED_2,
    "replicated(3)": types_pb2.DURABILITY_REPLICATED_3,
}
