"""Positions: what a consumer remembers of one partition, its stored form, and the thinned history of its markers.

Source: specification, "Handshakes" and "Snapshot Markers and Deduplication" (clients keep some history of received
markers).
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from upr_protocol.block import I64, U64, Mask
from upr_protocol.errors import InvalidArgumentError, PositionDamagedError
from upr_protocol.failover import (
    FailoverLog,
    check_failover_id,
    check_seqno,
    format_failover_id,
    parse_failover_id,
)
from upr_protocol.limits import MARKERS_MAX, MARKERS_NEWEST, NAME_BYTES_MAX, PARTITIONS

_FORMAT: Final = 1
_VERSION_MAX: Final = 2**64 - 1
DAMAGED_HINT: Final = "restore the stored position, together with the data, from a copy; or delete both to start from zero"


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a consumer in one partition: it has everything up to ``seqno``.

    Args:
        bucket_version: the random id of the bucket, 0 to 2^64 - 1; 0 when it is not known.
        failover_id: the newest id that the server named, None for a new client or one that lost it.
        data_id: the id under which the newest row was received, None when there is none or it is not known.
        seqno: 0 to 2^48 - 1; 0 means nothing was received.
        horizon: every row that the consumer was not sent was superseded at or below it. At or above ``seqno``;
            None when it is not known, which counts as above every seqno of a rollback.
        markers: received snapshot markers that it could go back to, ascending, none above ``seqno``.
        log: the failover log that the server gave last, None when it gave none.
        bucket: the name of the bucket; empty when it is not known, as in what was stored by older versions.

    Raises:
        InvalidArgumentError: a field is out of range or contradicts another.
    """

    bucket_version: int
    failover_id: int | None
    data_id: int | None
    seqno: int
    horizon: int | None
    markers: tuple[int, ...]
    log: FailoverLog | None
    bucket: str = ""

    def __post_init__(self) -> None:
        # A seqno without ids is legal: the consumer lost them, and the handshake then sends it back to 0.
        if not 0 <= self.bucket_version <= _VERSION_MAX:
            raise InvalidArgumentError(
                f"bucket_version is {self.bucket_version}; must be 0 to {_VERSION_MAX}"
            )
        if len(self.bucket.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
            raise InvalidArgumentError(
                f"bucket is {self.bucket[:60]!r}; must be a name of up to {NAME_BYTES_MAX} bytes"
            )
        if self.failover_id is not None:
            check_failover_id(self.failover_id)
        if self.data_id is not None:
            check_failover_id(self.data_id)
        check_seqno(self.seqno)
        if self.horizon is not None and check_seqno(self.horizon, "horizon") < self.seqno:
            raise InvalidArgumentError(
                f"horizon is {self.horizon}; must be at or above seqno {self.seqno}"
            )
        check_markers(self.markers)
        if self.markers and self.markers[-1] > self.seqno:
            raise InvalidArgumentError(
                f"newest of markers is {self.markers[-1]}; must be at most seqno {self.seqno}"
            )

    @classmethod
    def fresh(cls, bucket_version: int = 0, bucket: str = "") -> Self:
        """The position of a consumer that has nothing yet.

        Raises:
            InvalidArgumentError: the version or the name is out of range.
        """
        return cls(bucket_version, None, None, 0, 0, (), None, bucket)

    def rolled_back(self, resume_seqno: int, newest_id: int, log: FailoverLog | None) -> "Position":
        """The position to store, in one write, when the data above ``resume_seqno`` is undone.

        Args:
            resume_seqno: what the rules of the handshake chose: 0, one of ``markers``, or ``seqno`` itself when
                nothing had to be undone. It is at or below the seqno that the server named.
            newest_id: the id that the server named as its newest.
            log: the failover log that it gave with that, None when it gave none.

        Raises:
            InvalidArgumentError: ``resume_seqno`` is another seqno, ``newest_id`` is out of range, or it is not
                the newest of ``log``.
        """
        check_seqno(resume_seqno, "seqno to resume from")
        check_failover_id(newest_id)
        at_marker = resume_seqno in self.markers
        if resume_seqno not in (0, self.seqno) and not at_marker:
            # Between markers an older version of a key may be missing that a dropped branch superseded.
            raise InvalidArgumentError(
                f"a position at {self.seqno} cannot resume from {resume_seqno}: it is no marker of it",
                hint="resume from a marker of the position or from 0",
            )
        if log is not None and log.newest.failover_id != newest_id:
            raise InvalidArgumentError(
                f"the newest record of the log is {log.newest}, the newest id should be "
                f"{format_failover_id(newest_id)}"
            )
        return replace(
            self,
            failover_id=newest_id,
            # Whatever stays lies, with its horizon, at or below the seqno where the histories part, so the rows
            # are the same ones in the history of the newest id, and that id is truthful for them. The old id
            # would be as truthful for the moment, but not lasting: it may leave the server's log (as a dropped
            # branch, or as the oldest of too many) while this partition is idle, and data that is right would be
            # thrown away. The check on the data id keeps its use: it catches a client that stores the newest id
            # by another way than this, without undoing anything.
            data_id=newest_id if resume_seqno else None,
            seqno=resume_seqno,
            horizon=resume_seqno if at_marker or resume_seqno == 0 else self.horizon,
            markers=self.markers[: bisect_right(self.markers, resume_seqno)],
            log=log if log is not None else _log_up_to(self.log, newest_id),
        )

    def to_json(self) -> str:
        """The position as one line of JSON, ASCII only; all of it, so that it may be kept anywhere."""
        return json.dumps(self.to_document(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The position that ``to_json`` gave.

        Raises:
            PositionDamagedError: it is no such text; the message names the field.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _damaged("position", f"is not JSON ({error})") from error
        return cls.from_document(document)

    def to_document(self) -> dict[str, Any]:
        """The position as a JSON object: ids as 16 hex digits, because 64 bits do not survive in the numbers of
        every JSON reader; seqnos, 48 bits, as numbers.
        """
        return {
            "format": _FORMAT,
            "bucket": self.bucket,
            "bucket_version": f"{self.bucket_version:016x}",
            "failover_id": _id_to_json(self.failover_id),
            "data_id": _id_to_json(self.data_id),
            "seqno": int(self.seqno),
            "horizon": None if self.horizon is None else int(self.horizon),
            "markers": [int(marker) for marker in self.markers],
            "log": None
            if self.log is None
            else [
                [format_failover_id(record.failover_id), int(record.seqno)] for record in self.log
            ],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The position that ``to_document`` gave. Fields that are not known are ignored.

        Raises:
            PositionDamagedError: a field is missing, has another type, is out of range or contradicts another;
                the message names the field.
        """
        if not isinstance(document, Mapping):
            raise _damaged("position", "is not a JSON object")
        stored_format = _field(document, "format", int)
        if stored_format != _FORMAT:
            raise PositionDamagedError(
                f"format of the stored position is {stored_format}; must be {_FORMAT}",
                hint="use the program that wrote it, or a newer one",
            )
        version = _field(document, "bucket_version", str)
        if len(version) != 16 or not set(version) <= set("0123456789abcdef"):
            raise _damaged("bucket_version", f"is {version!r}, not 16 hex digits")
        horizon = _field(document, "horizon", int, type(None))
        markers = _field(document, "markers", list)
        if not all(type(marker) is int for marker in markers):
            raise _damaged("markers", "has a value that is not an integer")
        seqno = _field(document, "seqno", int)
        try:
            return cls(
                int(version, 16),
                _id_from_json(document, "failover_id"),
                _id_from_json(document, "data_id"),
                seqno,
                horizon,
                tuple(markers),
                _log_from_json(_field(document, "log", list, type(None))),
                # Positions that were stored without a name are completed when they are stored next.
                _field(document, "bucket", str) if "bucket" in document else "",
            )
        except InvalidArgumentError as error:
            # The message begins with, or holds, the name of the field.
            raise PositionDamagedError(
                f"the stored position is damaged: {error.message}", hint=DAMAGED_HINT
            ) from error


def _log_up_to(log: FailoverLog | None, newest_id: int) -> FailoverLog | None:
    """The part of an older log that is still true when the newest id is ``newest_id``; None when none is."""
    if log is None or newest_id not in log:
        # Which of the records are left below an unknown new one cannot be told, and a wrong one would give a
        # wrong place to go back to.
        return None
    return FailoverLog(log.records[: log.index(newest_id) + 1])


def _damaged(field: str, what: str) -> PositionDamagedError:
    return PositionDamagedError(
        f"the stored position is damaged: {field} {what}", hint=DAMAGED_HINT
    )


def _field(document: Mapping[str, Any], field: str, *types: type) -> Any:
    if field not in document:
        raise _damaged(field, "is missing")
    value = document[field]
    # By type and not isinstance: true and false are not seqnos.
    if type(value) not in types:
        raise _damaged(field, f"is of type {type(value).__name__}")
    return value


def _id_to_json(failover_id: int | None) -> str | None:
    return None if failover_id is None else format_failover_id(failover_id)


def _id_from_json(document: Mapping[str, Any], field: str) -> int | None:
    text = _field(document, field, str, type(None))
    if text is None:
        return None
    try:
        return parse_failover_id(text)
    except InvalidArgumentError as error:
        raise _damaged(field, f"is not an id: {error.message}") from error


def _log_from_json(value: list[Any] | None) -> FailoverLog | None:
    if value is None:
        return None
    for entry in value:
        if type(entry) is not list or list(map(type, entry)) != [str, int]:
            raise _damaged("log", "has an entry that is not an id and a seqno")
    try:
        return FailoverLog.from_pairs((parse_failover_id(text), seqno) for text, seqno in value)
    except InvalidArgumentError as error:
        raise _damaged("log", f"is no failover log: {error.message}") from error


# A history is thinned when it reaches twice its bound, so that thinning costs a constant a marker.
_THIN_AT = 2 * MARKERS_MAX


def _thin(markers: Sequence[int]) -> tuple[int, ...]:
    split = len(markers) - MARKERS_NEWEST
    if split <= 0:
        return tuple(markers)
    last = markers[-1]
    kept: list[int] = []
    scale = -1
    for marker in markers[:split]:
        # Ascending markers have falling distances, so the first one of a scale is its oldest. The oldest must
        # stay: were it the newest, one that has just grown into a scale would always push out the one about to
        # grow out of it, and the far scales would run dry.
        its_scale = (last - marker).bit_length()
        if its_scale != scale:
            kept.append(marker)
            scale = its_scale
    kept.extend(markers[split:])
    return tuple(kept)


def thin_markers(markers: Sequence[int]) -> tuple[int, ...]:
    """Return the markers worth keeping, ascending.

    The 16 newest all stay, and of the older ones the oldest in each power of two of distance from the newest marker.
    So at most 64 are left, and the oldest is always among them. Thinning the result again changes nothing.

    Args:
        markers: seqnos, 0 to 2^48 - 1, strictly ascending.

    Raises:
        InvalidArgumentError: a seqno is out of range or not above the one before it.
    """
    return _thin(check_markers(markers))


def check_markers(markers: Iterable[int]) -> tuple[int, ...]:
    """Return the markers when they are strictly ascending seqnos, 0 to 2^48 - 1.

    Raises:
        InvalidArgumentError: one is out of range or not above the one before it.
    """
    checked: list[int] = []
    for marker in markers:
        seqno = check_seqno(marker, "one of markers")
        if checked and seqno <= checked[-1]:
            raise InvalidArgumentError(
                f"marker {seqno} follows {checked[-1]}; markers must be ascending"
            )
        checked.append(seqno)
    return tuple(checked)


class MarkerHistory:
    """The markers of one partition as a consumer receives them: twice ``MARKERS_MAX`` inside at most.

    Args:
        markers: those of a stored position, ascending.
    """

    __slots__ = ("_seqnos",)

    def __init__(self, markers: Iterable[int] = ()) -> None:
        self._seqnos: list[int] = []
        for seqno in markers:
            self.add(seqno)

    def add(self, seqno: int) -> None:
        """Remember a marker, not below the newest.

        One that equals the newest is ignored, because an idle partition may repeat its marker; so is one at 0,
        because starting from 0 needs none.
        """
        seqnos = self._seqnos
        if seqno == (seqnos[-1] if seqnos else 0):
            return
        seqnos.append(seqno)
        if len(seqnos) >= _THIN_AT:
            seqnos[:] = _thin(seqnos)

    def as_tuple(self) -> tuple[int, ...]:
        """The markers to store, ascending and thinned.

        A marker left out is dropped for good: a consumer that keeps data for each stored marker has none for another.
        """
        self._seqnos[:] = thinned = _thin(self._seqnos)
        return thinned


GATHERED_MAX: Final = 2**16
"""Markers gathered before they are folded into the histories."""


class MarkerHistories:
    """Marker histories of all partitions, thinned as ``thin_markers`` does; see ``MarkerHistory``."""

    def __init__(self) -> None:
        self._seqnos: U64 = np.zeros((PARTITIONS, MARKERS_MAX), np.uint64)
        self._counts = np.zeros(PARTITIONS, np.int64)
        self._gathered: list[tuple[I64, U64]] = []
        self._waiting = np.zeros(PARTITIONS, np.bool_)
        self._number = 0

    def add(self, partitions: I64, seqnos: U64) -> None:
        """Add markers, for each partition in rising order and not below those it has; equal ones are one."""
        if len(partitions):
            self._gathered.append((partitions, seqnos))
            self._waiting[partitions] = True
            self._number += len(partitions)
            if self._number >= GATHERED_MAX:
                self._fold()

    def replace(self, partitions: I64, counts: I64, seqnos: U64) -> None:
        """Forget the markers of partitions, each there once, and take these: so many for each, ascending."""
        if self._waiting[partitions].any():
            self._fold()
        self._counts[partitions] = 0
        self.add(np.repeat(partitions, counts), seqnos)

    def put(self, partition: int, seqnos: Sequence[int]) -> None:
        """As ``replace`` for one partition, at once: nothing is left to be folded."""
        if self._waiting[partition]:
            self._fold()
        kept = _thin([seqno for seqno in seqnos if seqno])
        self._counts[partition] = len(kept)
        self._seqnos[partition, : len(kept)] = kept

    def of(self, partition: int) -> tuple[int, ...]:
        """Return a partition's markers, oldest first."""
        self._fold()
        return tuple(self._seqnos[partition, : self._counts[partition]].tolist())

    def columns(self, partitions: I64) -> tuple[I64, U64]:
        """Return how many markers each of the partitions has, and the markers, one partition's after the other's."""
        self._fold()
        counts = self._counts[partitions]
        return counts, self._seqnos[partitions][_filled(counts)]

    def _fold(self) -> None:
        if not self._gathered:
            return
        touched = np.flatnonzero(self._waiting)
        counts = self._counts[touched]
        old = np.repeat(touched, counts), self._seqnos[touched][_filled(counts)]
        partitions, seqnos = map(np.concatenate, zip(old, *self._gathered, strict=True))
        self._gathered, self._number = [], 0
        self._waiting[:] = False
        # Sorting 16 bits is a radix sort.
        order = np.argsort(partitions.astype(np.uint16), kind="stable")
        partitions, seqnos = partitions[order], seqnos[order]
        # An idle partition may repeat its marker, and to start from 0 none is needed.
        new = seqnos > 0
        new[1:] &= (np.diff(partitions) != 0) | (seqnos[1:] != seqnos[:-1])
        partitions, seqnos = _worth_keeping(partitions[new], seqnos[new])
        counts = np.bincount(partitions, minlength=PARTITIONS)[touched]
        self._counts[touched] = counts
        within = np.arange(len(partitions)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._seqnos[partitions, within] = seqnos


def _filled(counts: I64) -> Mask:
    filled: Mask = np.arange(MARKERS_MAX) < counts[:, None]
    return filled


def _worth_keeping(partitions: I64, seqnos: U64) -> tuple[I64, U64]:
    """Thin the markers of many partitions, sorted by both, as ``thin_markers`` does each partition's."""
    lasts = np.flatnonzero(np.diff(partitions, append=-1))
    counts = np.diff(lasts, prepend=-1)
    from_end = np.repeat(lasts, counts) - np.arange(len(partitions))
    distance = np.repeat(seqnos[lasts], counts) - seqnos
    # The exponent is the bit length; seqnos of 48 bits are exact as floats.
    scale = np.frexp(distance.astype(np.float64))[1]
    oldest = (np.diff(scale, prepend=-1) != 0) | (np.diff(partitions, prepend=-1) != 0)
    kept = oldest | (from_end < MARKERS_NEWEST)
    return partitions[kept], seqnos[kept]
