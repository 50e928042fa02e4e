"""Values of writing: results, single writes that go together, batches of rows, and the failures of those batches."""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from upr_client.endpoints import is_elsewhere
from upr_protocol.block import (
    OP_SET,
    ROW_BYTES,
    RUN_FIELDS,
    Block,
    Further,
    SevenColumns,
    crc_of_columns,
    join_blocks,
    pack_rows,
    select_runs,
)
from upr_protocol.errors import (
    InvalidArgumentError,
    OutOfOrderError,
    PartlyWrittenError,
    ProtocolError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
    WriteFailedError,
)
from upr_protocol.failover import WriteToken
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    BLOCK_ROWS_MAX,
    GROUP_HALVES_ROWS,
    GROUP_ROWS_MAX,
    JOINED_SMALL_BYTES,
    PARTITIONS,
    check_seconds,
    choice,
    is_number,
)
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import block_from_message, decode_runs, fill_message
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


Run = tuple[int, int, int, int]


Applied = npt.NDArray[np.uint64]
"""Runs as columns, of shape (4, runs): an object for each would take longer than writing its rows."""


class WriteResults:
    """Partitions, seqnos and failover ids of many mutations.

    Attributes:
        rows: how many were written.
        bucket_version: the random id of the bucket.
    """

    __slots__ = ("_applied", "bucket_version", "rows")

    def __init__(self, rows: int, runs: Applied, bucket_version: int) -> None:
        self.rows = rows
        self.bucket_version = bucket_version
        self._applied = runs

    @property
    def runs(self) -> list[Run]:
        """(partition, start_seqno, end_seqno, failover_id): the rows of a partition got the seqnos above start up to end;
        one for each block and partition, in the order of writing. The list is made when it is asked for.
        """
        return list(zip(*self._applied.tolist(), strict=True))

    @property
    def token(self) -> WriteToken:
        """All these writes, for readers that want to have them.

        Raises:
            InvalidArgumentError: the server forgot a seqno.
        """
        return _token(self.bucket_version, [(run[0], run[3], run[2]) for run in self.runs])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriteResults):
            return NotImplemented
        numbers = self.rows, self.bucket_version
        same = numbers == (other.rows, other.bucket_version)
        return same and np.array_equal(self._applied, other._applied)

    def __repr__(self) -> str:
        return f"WriteResults(rows={self.rows}, runs={self.runs}, bucket_version={self.bucket_version})"


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


def none_given() -> InvalidArgumentError:
    """Return the error of a None for a value, which may well be a mistake, where a call of its own deletes."""
    return InvalidArgumentError(
        "value is None; must be bytes", hint="use `delete` to delete the key"
    )


def write_request(block: Block, durability: types_pb2.Durability.ValueType) -> kv_pb2.WriteRequest:
    """Return a Write that has no number yet."""
    runs = block.runs.tobytes()
    return _request(durability, runs, block.columns, block.columns_crc, block.further)


def _request(
    durability: types_pb2.Durability.ValueType,
    runs: bytes,
    columns: SevenColumns,
    crc: int,
    further: Further = (),
) -> kv_pb2.WriteRequest:
    request = kv_pb2.WriteRequest()
    write = request.write
    write.durability = durability
    fill_message(write.block, runs, columns, crc, further)
    return request


def result_columns(results: Iterable[kv_pb2.WriteResult]) -> Applied:
    """Return the runs that were applied."""
    found = [np.empty((4, 0), np.uint64)]
    for result in results:
        runs = decode_runs(result.runs)
        columns = np.zeros((4, len(runs)), np.uint64)
        for column, name in zip(columns, ("partition", "start_seqno", "end_seqno"), strict=False):
            column[:] = runs[name]
        ids = result.failover_ids[: len(runs)]
        columns[3, : len(ids)] = ids
        found.append(columns)
    return np.concatenate(found, axis=1)


def partly_refused(refused: Sequence[types_pb2.RefusedPartition], *, applied: bool) -> UprError:
    """Return the error of a write that partitions refused for good; ``applied``: whether others took their part, or may."""
    error = error_of(refused[0].problem)
    if len(refused) == 1 and not applied:
        return error
    names = ", ".join(str(item.partition) for item in refused[:5])
    more = ", ..." if len(refused) > 5 else ""
    rest = ", the rest was applied" if applied else ""
    error.message = f"{len(refused)} partitions ({names}{more}) refused their part of the write{rest}: {error.message}"
    return error


def partly_written(why: UprError) -> PartlyWrittenError:
    """Return the error of a write that partitions, not all, refused at each retry."""
    return PartlyWrittenError(
        f"partitions refused their part of a write at each retry; the rest was applied: {why.message}",
        hint=why.hint,
    )


def is_behind(error: UprError) -> bool:
    """Return whether a write, or a call, was refused only for the sake of a write in front."""
    return error.reason == OutOfOrderError.default_reason


def not_applied(error: UprError) -> UprError:
    """Return the error of a write that was not sent, or not taken, because of this one."""
    if not error.retriable or is_elsewhere(error):
        return error
    words = f"the write was not applied: {error.message}"
    if is_behind(error) or error.reason == UnknownOutcomeError.default_reason:
        # Of this write the outcome is known, and the numbers are the SDK's.
        return UnavailableError(words, hint=error.hint)
    told = copy.copy(error)
    told.message = words
    return told


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
    """One ``set`` or ``delete`` that waits for its outcome; ``tell`` is called once that is there, and must not block.

    Args:
        size: its bytes in the columns of a block.
    """

    key: bytes
    value: bytes | None
    size: int
    tell: Callable[[], None]
    outcome: WriteResult | UprError | None = None


@dataclass(slots=True)
class Bundle:
    """Rows of one ``write_many`` that wait for their outcome: the runs that they were given, or why there are none; ``tell`` as of ``Row``."""

    block: Block
    tell: Callable[[], None]
    outcome: Applied | UprError | None = None

    @property
    def size(self) -> int:
        """Return its bytes in the columns of a block with others, at most."""
        block = self.block
        return len(block.keys) + len(block.values) + ROW_BYTES * block.rows


class Kind(NamedTuple):
    """Kind of what goes out together.

    A bucket over its quota takes deletes and no sets: so no delete fails for the sake of a set.

    Args:
        deletes: whether all rows are deletes.
        most: bytes of a group of bundles; 0 for single rows.
    """

    durability: types_pb2.Durability.ValueType
    deletes: bool
    most: int = 0


_row_kind = cache(Kind)


@dataclass(eq=False, slots=True)
class Group:
    """Rows, or bundles, of one kind that go out in one Write; these are its ``callers``, which wait for the outcome."""

    number: int
    kind: Kind
    bytes: int = 0
    callers: list[Any] = field(default_factory=list)

    def split(self, count: int) -> tuple["Group", "Group"]:
        """Return a group of its first so many callers, and one of the others."""
        first, rest = self.callers[:count], self.callers[count:]
        size = sum(caller.size for caller in first)
        return (
            Group(self.number, self.kind, size, first),
            Group(self.number, self.kind, self.bytes - size, rest),
        )

    def request(self) -> kv_pb2.WriteRequest:
        """Return the Write of its rows, in their order within each partition."""
        durability = self.kind.durability
        if self.kind.most:
            bundles: list[Bundle] = self.callers
            return write_request(join_blocks([bundle.block for bundle in bundles]), durability)
        rows: list[Row] = self.callers
        runs, columns = pack_rows([row.key for row in rows], [row.value for row in rows])
        return _request(durability, runs, columns, crc_of_columns(columns))

    def tell(
        self,
        results: Sequence[kv_pb2.WriteResult],
        refused: Mapping[int, types_pb2.Problem],
        error: UprError | None,
        bucket_version: int = 0,
    ) -> None:
        """Tell each row, or bundle, its outcome.

        Args:
            results: of the partitions that applied their part.
            refused: why other partitions did not.
            error: the outcome in all the rest.
        """
        if self.kind.most:
            self._tell_bundles(result_columns(results), refused, error or _left_out())
            return
        rows: list[Row] = self.callers
        applied: dict[int, list[int]] = {}
        for result in results:
            ids = iter(result.failover_ids)
            for partition, _, start, end, _, _ in RUN_FIELDS.iter_unpack(result.runs):
                applied[partition] = [start, end, next(ids, 0)]
        for row in rows:
            partition = partition_of(row.key)
            run = applied.get(partition)
            if run is not None:
                given, end, failover_id = run
                run[0] = given = given + 1
                # 0 where the seqnos are no longer known.
                row.outcome = WriteResult(
                    partition, given if end else 0, failover_id, bucket_version
                )
            elif partition in refused:
                row.outcome = error_of(refused[partition])
            else:
                # Each is raised somewhere else, and gets a traceback of its own.
                row.outcome = copy.copy(error or _left_out())
            row.tell()

    def _tell_bundles(
        self, runs: Applied, refused: Mapping[int, types_pb2.Problem], error: UprError
    ) -> None:
        starts, ends, ids = np.zeros((3, PARTITIONS), np.uint64)
        applied = np.zeros(PARTITIONS, np.bool_)
        # A server may say anything: an error here would leave all callers waiting.
        runs = runs[:, runs[0] < PARTITIONS]
        at = runs[0].astype(np.int64)
        applied[at], (starts[at], ends[at], ids[at]) = True, runs[1:]
        bundles: list[Bundle] = self.callers
        for bundle in bundles:
            # Within a partition its rows are behind those of the bundles before it.
            table = bundle.block.runs
            touched, counts = table["partition"].astype(np.int64), table["count"].astype(np.uint64)
            told = applied[touched]
            first = starts[touched]
            starts[touched] = last = first + counts
            if told.all():
                columns = np.array((touched, first, last, ids[touched]), np.uint64)
                # Where the seqnos are no longer known.
                columns[1:3, ends[touched] == 0] = 0
                bundle.outcome = columns
            else:
                bundle.outcome = _failure_of(
                    touched[~told].tolist(), refused, error, applied=bool(told.any())
                )
            bundle.tell()


def _left_out() -> ProtocolError:
    return ProtocolError("the answer to a write leaves out one of its partitions")


def _failure_of(
    missing: Sequence[int],
    refused: Mapping[int, types_pb2.Problem],
    error: UprError,
    *,
    applied: bool,
) -> UprError:
    """Return the error of rows of which some partitions did not apply their part, and whether others did."""
    if not all(p in refused for p in missing):
        # Each is raised somewhere else, and gets a traceback of its own.
        return copy.copy(error)
    for_good = [
        types_pb2.RefusedPartition(partition=p, problem=refused[p])
        for p in missing
        if not refused[p].retriable
    ]
    if for_good:
        return partly_refused(for_good, applied=applied)
    for_now = error_of(refused[missing[0]])
    return partly_written(for_now) if applied else for_now


class Gathering:
    """Writes that wait for their turn, in groups that keep the order of each key."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._begun = 0
        self._newest: dict[Kind, Group] = {}
        """The newest group of single rows of each kind."""
        self._last: dict[bytes, int] = {}
        """The number of the newest group of single rows that has a key."""
        self._bundles = 0
        """The number of the newest group of bundles."""

    def add_bundle(self, bundle: Bundle, durability: types_pb2.Durability.ValueType) -> None:
        """Put a bundle of at most BLOCK_COLUMN_BYTES behind all that waits."""
        ops = bundle.block.ops
        size = bundle.size
        # A server that is late has large writes take turns: small ones must not become one of them.
        most = JOINED_SMALL_BYTES if size < JOINED_SMALL_BYTES else BLOCK_COLUMN_BYTES
        kind = Kind(durability, bool(ops) and OP_SET not in ops, most)
        group = self._groups[-1] if self._groups else None
        if group is None or group.kind != kind or group.bytes + size > most:
            self._begun += 1
            self._bundles = self._begun
            group = Group(self._begun, kind)
            self._groups.append(group)
        group.callers.append(bundle)
        group.bytes += size

    def add(self, row: Row, durability: types_pb2.Durability.ValueType) -> None:
        """Put a row into the newest group of its kind, or a new one if that is full, or in front of the key's last or of a bundle."""
        key, size = row.key, row.size
        kind = _row_kind(durability, row.value is None)
        group = self._newest.get(kind)
        if (
            group is None
            or group.number < self._bundles
            or group.number < self._last.get(key, 0)
            or group.bytes + size > BLOCK_COLUMN_BYTES
            or len(group.callers) == GROUP_ROWS_MAX
        ):
            self._begun += 1
            group = self._newest[kind] = Group(self._begun, kind)
            self._groups.append(group)
        group.callers.append(row)
        group.bytes += size
        self._last[key] = group.number

    def take(self, under_way: Sequence[Group] | None = None) -> Group | None:
        """Return the group that is to go out next; None for none, or if it may grow while others of its kind are under way.

        With None for ``under_way``, the unanswered groups, nothing waits.
        """
        if not self._groups:
            return None
        group = self._groups[0]
        kind = group.kind
        behind = self._groups[1].kind if len(self._groups) > 1 else None
        # One that nothing can join any more would wait in vain.
        grows = behind is None or not (kind.most or behind.most)
        # A single one behind nothing goes whatever its kind.
        alone = not under_way and len(group.callers) == 1
        if under_way is not None and grows and not alone:
            counts = [len(one.callers) for one in under_way if one.kind == kind]
            callers = len(group.callers) + sum(counts)
            # A message costs much the same whatever is in it: of a few rows a second one would only make both late.
            # Many take so long to build that the server would wait: one half is built while it has the other.
            at_once = 2 if kind.most or callers >= GROUP_HALVES_ROWS else 1
            if len(counts) >= at_once:
                return None
            half = (callers + 1) // 2
            if at_once > 1 and half < len(group.callers):
                return self._first_of(group, half)
        if not kind.most:
            if self._newest.get(kind) is group:
                del self._newest[kind]
            self._forget(group)
        # Last: an interrupt of the thread must not lose what others wait for.
        return self._groups.popleft()

    def _first_of(self, group: Group, count: int) -> Group:
        """Take the first so many of the group in front out of it."""
        first, rest = group.split(count)
        if not group.kind.most:
            # Also keys that the rest has: all other groups are behind it.
            self._forget(first)
        # Last, as in ``take``.
        group.callers, group.bytes = rest.callers, rest.bytes
        return first

    def _forget(self, group: Group) -> None:
        rows: list[Row] = group.callers
        for row in rows:
            if self._last.get(row.key) == group.number:
                del self._last[row.key]


Rows = list[tuple[bytes, bytes | None]]
OnResults = Callable[[Rows, WriteResults], Any]

BATCH_ROWS: Final = 4000
LINGER_SECONDS: Final = 0.005
OUTSTANDING_BYTES: Final = 16 * 2**20
_KEYS_TOLD: Final = 100


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Options of a buffered writer; see ``AsyncBucket.writer``."""

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
            # NaN too: nothing is above it, and nobody would wait for room.
            if not (is_number(value) and value >= 1) or (largest is not None and value > largest):
                limit = "1 or more" if largest is None else f"1 to {largest}"
                raise InvalidArgumentError(f"{name} is {value!r}; must be {limit}")
        check_seconds(self.linger_seconds, "linger_seconds")


class Batch:
    """Rows that are to go out in one Write.

    Attributes:
        number: batches are numbered in the order of writing, from 1.
        due: when it goes out at the latest, full or not.
        level: the strongest durability of its rows; the values of the enumeration rise with it.
        sealed: whether it takes no more rows.
        told: whether ``on_results`` was called.
        cells: the key and the value of each row, one after the other, in one list: so a row is added in one step.
    """

    __slots__ = ("bytes", "cells", "due", "level", "number", "sealed", "told")

    def __init__(self, number: int, due: float) -> None:
        self.number = number
        self.due = due
        self.bytes = 0
        self.sealed = self.told = False
        self.level: types_pb2.Durability.ValueType = types_pb2.DURABILITY_MEMORY
        self.cells: list[Any] = []

    @property
    def keys(self) -> list[bytes]:
        return self.cells[::2]

    def rows(self) -> Rows:
        """Return the rows as (key, value) pairs, in the order of writing."""
        return list(zip(self.keys, self.cells[1::2], strict=True))


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
        keys = batch.keys
        partitions = [partition_of(key) for key in keys]
        failed = [
            key for key, partition in zip(keys, partitions, strict=True) if partition not in done
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
