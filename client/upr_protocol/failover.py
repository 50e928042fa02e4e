"""Failover ids, failover records and the failover log of one partition; tokens of writes, which a log has or has not.

Source: specification, "Partition Failover Record" and "Partition Failover Log". Everything here is a value: a log is
never changed, each method gives a new one.
"""

import operator
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from upr_protocol.errors import InvalidArgumentError, WriteUndoneError
from upr_protocol.limits import (
    AT_LEAST_MAX,
    EPOCH_MAX,
    FAILOVER_ID_MAX,
    FAILOVER_LOG_RECORDS,
    PARTITIONS,
    SEQNO_MAX,
)

_HEX_ID = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,16})")

_NOT_A_ROLLBACK = "this is an error and never a rollback: keep the data and correct the request"


def _check_range(value: int, name: str, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:
        return value
    try:
        # Accepts the integers of numpy too, and turns them into plain ones; a float is refused.
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(
            f"{name} is {value!r}; must be an integer, {low} to {high}",
            hint=_NOT_A_ROLLBACK,
        ) from None
    if not low <= number <= high:
        raise InvalidArgumentError(
            f"{name} is {number}; must be {low} to {high}", hint=_NOT_A_ROLLBACK
        )
    return number


def check_failover_id(failover_id: int) -> int:
    """Return the failover id when it is one, 1 to 2^64 - 1.

    Raises:
        InvalidArgumentError: it is 0, negative, too large or not an integer.
    """
    return _check_range(failover_id, "failover id", 1, FAILOVER_ID_MAX)


def check_seqno(seqno: int, name: str = "seqno") -> int:
    """Return the seqno when it is one, 0 to 2^48 - 1; ``name`` is how the error calls it.

    Source: specification, "Sequence Number". A larger number is refused rather than cut to 48 bits, because 2^48
    would become 0, which is a valid start.

    Raises:
        InvalidArgumentError: it is negative, too large or not an integer.
    """
    return _check_range(seqno, name, 0, SEQNO_MAX)


def check_partition(partition: int) -> int:
    """Return the partition when it is one, 0 to 1023.

    Source: specification, "Partition".

    Raises:
        InvalidArgumentError: it is negative, too large or not an integer.
    """
    return _check_range(partition, "partition", 0, PARTITIONS - 1)


def check_partitions(partitions: Iterable[int] | None) -> tuple[int, ...]:
    """Return the partitions that an application named, none for None: all. A request without any means all as well.

    Raises:
        InvalidArgumentError: there are none, or one of them is none.
    """
    if partitions is None:
        return ()
    if not isinstance(partitions, Iterable):
        raise InvalidArgumentError(
            f"partitions is {partitions!r}; must be several, or None for all", hint="one is [7]"
        )
    chosen = tuple(check_partition(partition) for partition in partitions)
    if not chosen:
        raise InvalidArgumentError("partitions is empty; must name one or more, or be None for all")
    return chosen


def format_failover_id(failover_id: int) -> str:
    """Return the failover id as people see it, 16 lower-case hex digits.

    Raises:
        InvalidArgumentError: it is not a failover id.
    """
    return f"{check_failover_id(failover_id):016x}"


def parse_failover_id(text: str) -> int:
    """Return the failover id that is written as 1 to 16 hex digits, with or without ``0x``.

    Raises:
        InvalidArgumentError: it is anything else, or it is 0.
    """
    match = _HEX_ID.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"failover id is {text!r}; must be 1 to 16 hex digits", hint=_NOT_A_ROLLBACK
        )
    return check_failover_id(int(match[1], 16))


@dataclass(frozen=True, slots=True)
class FailoverRecord:
    """One change of the history of a partition.

    Source: specification, "Partition Failover Record".

    Args:
        failover_id: random, 1 to 2^64 - 1.
        seqno: the last complete marker of the node that took over, 0 to 2^48 - 1; what lies above it belongs to
            this id, up to the next record.
        epoch: the partition's epoch when the record was made; 0 if unknown.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    failover_id: int
    seqno: int
    epoch: int = 0

    def __post_init__(self) -> None:
        check_failover_id(self.failover_id)
        check_seqno(self.seqno, "seqno of a failover record")
        _check_range(self.epoch, "epoch of a failover record", 0, EPOCH_MAX)

    def __str__(self) -> str:
        return f"{format_failover_id(self.failover_id)} at {self.seqno}"


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The failover records of a partition, oldest first; never empty.

    Source: specification, "Partition Failover Log". Several records may carry one seqno: nothing was completed
    between those failovers. A log that lost its oldest records begins above 0.

    Raises:
        InvalidArgumentError: it is empty, its seqnos fall, or an id is there twice.
    """

    records: tuple[FailoverRecord, ...]

    def __post_init__(self) -> None:
        if not self.records:
            raise InvalidArgumentError(
                "records of a failover log are 0; must be at least 1",
                hint="a lost log is replaced by a new id at 0",
            )
        seen: set[int] = set()
        seqno = 0
        for record in self.records:
            if record.seqno < seqno:
                raise InvalidArgumentError(
                    f"failover record {record} follows one at {seqno}; must not be below it"
                )
            if record.failover_id in seen:
                raise InvalidArgumentError(f"failover record {record} repeats the id of another")
            seqno = record.seqno
            seen.add(record.failover_id)

    @classmethod
    def born(cls, failover_id: int, epoch: int = 0) -> Self:
        """The log of a new partition: one record at seqno 0.

        Source: specification, "Example Handshakes": a brand new client is given an id.

        Raises:
            InvalidArgumentError: the id is out of range.
        """
        return cls((FailoverRecord(failover_id, 0, epoch),))

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[int, int]]) -> Self:
        """The log with these (failover id, seqno), oldest first.

        Raises:
            InvalidArgumentError: they are not a log.
        """
        return cls(tuple(FailoverRecord(failover_id, seqno) for failover_id, seqno in pairs))

    def to_pairs(self) -> list[tuple[int, int]]:
        """The (failover id, seqno) of all records, oldest first."""
        return [(record.failover_id, record.seqno) for record in self.records]

    @property
    def newest(self) -> FailoverRecord:
        """The record under whose id the partition is written now."""
        return self.records[-1]

    def __contains__(self, failover_id: object) -> bool:
        return any(record.failover_id == failover_id for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[FailoverRecord]:
        return iter(self.records)

    def index(self, failover_id: int) -> int:
        """The place of the id's record, 0 for the oldest.

        Raises:
            KeyError: the log does not have the id.
        """
        for index, record in enumerate(self.records):
            if record.failover_id == failover_id:
                return index
        raise KeyError(failover_id)

    def next_after(self, failover_id: int) -> FailoverRecord | None:
        """The record right after the id's own, None when the id is the newest.

        Its seqno is where the histories part: what was received under the id above it may be of another branch.
        Source: specification, "Handshakes", step 2.

        Raises:
            KeyError: the log does not have the id.
        """
        index = self.index(failover_id) + 1
        return self.records[index] if index < len(self.records) else None

    def id_at(self, seqno: int) -> int:
        """Return the failover id under which a seqno of at least 1 was given.

        A record at n begins a history above n, so it is the newest record below the seqno. A seqno from before
        the oldest record kept gets that record's id: older ones are forgotten.
        """
        for record in reversed(self.records):
            if record.seqno < seqno:
                return record.failover_id
        return self.records[0].failover_id

    def gave(self, failover_id: int, seqno: int) -> bool | None:
        """Return whether a seqno of at least 1 that was given under an id is part of this history.

        None if the log does not have the id: it may be of a newer history. One at or below the oldest record kept
        counts as part: the ids of what is older are forgotten, and that is practically never undone.
        """
        if failover_id in self:
            return self.id_at(seqno) == failover_id
        return True if seqno <= self.records[0].seqno else None

    def with_record(
        self, failover_id: int, seqno: int, limit: int = FAILOVER_LOG_RECORDS, *, epoch: int = 0
    ) -> "FailoverLog":
        """The log after a failover onto a node whose last complete marker is ``seqno``.

        Records above ``seqno`` go first: they describe a branch that this node does not have. Records at exactly
        ``seqno`` stay, their histories are whole in it. Then the new one is added, and only the newest ``limit``
        (1 or more) are kept.

        Raises:
            InvalidArgumentError: a number is out of range, or the id is in the log already.
        """
        record = FailoverRecord(failover_id, seqno, epoch)
        kept = tuple(old for old in self.records if old.seqno <= seqno)
        return FailoverLog((*kept, record)[-limit:])


_VERSION = re.compile("[0-9a-f]{16}")
_WRITTEN = re.compile("([0-9]{1,4})-([0-9a-f]{16})-([0-9]{1,15})")


class WrittenSeqno(NamedTuple):
    """A write, or the last of several in one partition.

    Args:
        partition: 0 to 1023.
        failover_id: under which the seqno was given.
        seqno: from 1.
    """

    partition: int
    failover_id: int
    seqno: int

    def check(self) -> Self:
        """Return it when each number is in its range.

        Raises:
            InvalidArgumentError: one is not.
        """
        check_partition(self.partition)
        check_failover_id(self.failover_id)
        if check_seqno(self.seqno) == 0:
            raise InvalidArgumentError("seqno of a write is 0; must be 1 or more")
        return self

    def is_in(self, log: FailoverLog, complete: int, *, newest: bool = False) -> bool:
        """Return whether a history has the write; False while it may come to have it.

        Args:
            log: the history's failover log.
            complete: its last complete marker: the newest state that is there as it was.
            newest: whether no other history can be a later one, as at an active server.

        Raises:
            WriteUndoneError: it is of another branch.
        """
        given = log.gave(self.failover_id, self.seqno)
        if given is None and not newest:
            # A failover that this reader has not heard of may have made the id, also at a place that is taken here.
            return False
        if not given:
            raise WriteUndoneError(
                f"seqno {self.seqno} of partition {self.partition}, given under {format_failover_id(self.failover_id)}, "
                "is not part of its history: a failover undid it",
                hint="read the key, and write again what is still wanted",
            )
        return self.seqno <= complete


@dataclass(frozen=True, slots=True)
class WriteToken:
    """The writes that a reader wants to have.

    ``str`` gives it as ASCII text without spaces, and ``parse`` takes that text; ``a | b`` has the writes of both.

    Args:
        bucket_version: the random id of the bucket.
        writes: the last of each partition and failover id, ascending.
    """

    bucket_version: int
    writes: tuple[WrittenSeqno, ...]

    @classmethod
    def of(cls, bucket_version: int, writes: Iterable[tuple[int, int, int]]) -> Self:
        """Return the token of writes, each (partition, failover id, seqno).

        Raises:
            InvalidArgumentError: a number is out of its range, or there are too many.
        """
        last: dict[tuple[int, int], int] = {}
        for partition, failover_id, seqno in writes:
            known = last.get((partition, failover_id), 0)
            last[partition, failover_id] = max(known, seqno)
        if len(last) > AT_LEAST_MAX:
            raise InvalidArgumentError(
                f"writes of a token are {len(last)}; must be at most {AT_LEAST_MAX}"
            )
        found = (WrittenSeqno(p, i, seqno).check() for (p, i), seqno in sorted(last.items()))
        return cls(bucket_version, tuple(found))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token of a text that ``str`` made.

        Raises:
            InvalidArgumentError: it is none.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"write token is of type {type(text).__name__}; must be str")
        version, _, rest = text.partition(":")
        parts = [_WRITTEN.fullmatch(part) for part in rest.split(",")] if rest else []
        if not _VERSION.fullmatch(version) or len(parts) > AT_LEAST_MAX or None in parts:
            raise InvalidArgumentError(
                f"write token is {text[:60]!r}; must be as str(token) gave it"
            )
        writes = [(int(m[1]), int(m[2], 16), int(m[3])) for m in parts if m is not None]
        return cls.of(int(version, 16), writes)

    def __str__(self) -> str:
        writes = ",".join(
            f"{one.partition}-{one.failover_id:016x}-{one.seqno}" for one in self.writes
        )
        return f"{self.bucket_version:016x}:{writes}"

    def __or__(self, other: "WriteToken") -> "WriteToken":
        if other.bucket_version != self.bucket_version:
            raise InvalidArgumentError(
                f"bucket versions of two tokens are {self.bucket_version:016x} and {other.bucket_version:016x}; must be equal"
            )
        return WriteToken.of(self.bucket_version, (*self.writes, *other.writes))

    def within(self, partitions: Collection[int]) -> tuple[WrittenSeqno, ...]:
        """Return the writes in some partitions."""
        return tuple(one for one in self.writes if one.partition in partitions)
