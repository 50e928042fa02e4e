"""Table of positions: those of many partitions as columns, checked at once, and its form in bytes.

A ``Position`` object is made only when that partition is asked for.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, U32, U64, Mask
from upr_protocol.errors import PositionDamagedError
from upr_protocol.failover import FailoverLog, check_partition
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS, SEQNO_MAX
from upr_protocol.position import DAMAGED_HINT, Position

UNKNOWN_HORIZON: Final = 2**64 - 1
"""Horizon in a column where none is known."""

ROW: Final = np.dtype(
    [
        ("partition", "<u4"),
        ("bucket", "<u4"),
        ("markers", "<u4"),
        ("records", "<u4"),
        ("bucket_version", "<u8"),
        ("failover_id", "<u8"),
        ("data_id", "<u8"),
        ("seqno", "<u8"),
        ("horizon", "<u8"),
    ]
)
"""One position, 56 bytes: ``bucket`` is an index of the names, ``markers`` and ``records`` are counts, an id of 0 is none."""
RECORD: Final = np.dtype([("failover_id", "<u8"), ("seqno", "<u8")])
"""One record of a failover log, 16 bytes."""

START: Final = np.dtype(
    [
        ("partition", "<u4"),
        ("failover_id", "<u8"),
        ("seqno", "<u8"),
        ("data_id", "<u8"),
        ("horizon", "<u8"),
    ]
)
"""One record of Start.table, 36 bytes; an id or a horizon of 0 is none."""

STARTED: Final = np.dtype(
    [
        ("partition", "<u4"),
        ("token", "<u4"),
        ("failover_id", "<u8"),
        ("high_seqno", "<u8"),
        ("purge_seqno", "<u8"),
        ("born", "<u4"),
    ]
)
"""One record of StartAnswers.started, 36 bytes; ``born`` is 1 when the failover log is that one id at 0."""

FORMAT: Final = 2
"""Of an encoded table; 1 was JSON."""
MAGIC: Final = b"UPRPOS%c\n" % FORMAT
"""The first bytes of an encoded table."""
NEWER_HINT: Final = "use the program that wrote it, or a newer one"
_HEAD: Final = struct.Struct("<8sIIIII")

NO_RECORDS: Final = np.zeros(0, RECORD)
"""Records of no log."""

Rows = npt.NDArray[np.void]


def log_records(log: FailoverLog | None) -> Rows:
    """Return a log as records of dtype RECORD, oldest first; None as no record."""
    return NO_RECORDS if log is None else np.array(log.to_pairs(), RECORD)


def log_of_records(records: Rows) -> FailoverLog | None:
    """Return the log of records, None for no record."""
    return FailoverLog.from_pairs(records.tolist()) if len(records) else None


def format_of(data: bytes) -> int:
    """Return the format that the first bytes of an encoded table name; 0 for what is none."""
    named = len(data) >= len(MAGIC) and data[:6] == MAGIC[:6] and data[7] == MAGIC[7]
    return data[6] if named else 0


class PositionTable(Mapping[int, Position]):
    """Positions of partitions, as columns; it is never changed.

    Args:
        rows: of dtype ROW, the partitions ascending.
        names: of buckets.
        markers: of all rows, one row's after the other's.
        records: of all rows' failover logs, likewise, of dtype RECORD.
    """

    __slots__ = ("_index", "markers", "names", "records", "rows")

    def __init__(self, rows: Rows, names: Sequence[str], markers: U64, records: Rows) -> None:
        self.rows = rows
        self.names = tuple(names)
        self.markers = markers
        self.records = records
        self._index: dict[int, tuple[int, int, int]] | None = None

    @classmethod
    def of(
        cls, positions: Mapping[int, Position] | Mapping[int, Position | None]
    ) -> "PositionTable":
        """Return positions as a table, without the partitions that have none.

        Raises:
            InvalidArgumentError: a partition is out of range.
        """
        if isinstance(positions, PositionTable):
            return positions
        if isinstance(positions, Found):
            return positions.table
        given = ((check_partition(p), at) for p, at in positions.items() if at is not None)
        chosen = sorted(given, key=itemgetter(0))
        names = {name: index for index, name in enumerate({at.bucket for _, at in chosen})}
        logs = [at.log.to_pairs() if at.log is not None else [] for _, at in chosen]
        rows = [
            (
                partition,
                names[at.bucket],
                len(at.markers),
                len(log),
                at.bucket_version,
                at.failover_id or 0,
                at.data_id or 0,
                at.seqno,
                UNKNOWN_HORIZON if at.horizon is None else at.horizon,
            )
            for (partition, at), log in zip(chosen, logs, strict=True)
        ]
        return cls(
            np.array(rows, ROW),
            list(names),
            np.array([m for _, at in chosen for m in at.markers], np.uint64),
            np.array([pair for log in logs for pair in log], RECORD),
        )

    @classmethod
    def among(cls, positions: Mapping[int, Position], partitions: Sequence[int]) -> "PositionTable":
        """Return the positions of those of the partitions that have one; nothing else in the mapping is looked at."""
        if isinstance(positions, PositionTable | Found):
            return cls.of(positions).only(np.array(partitions, np.int64))
        return cls.of({p: positions[p] for p in partitions if p in positions})

    # Objects, made when they are asked for.

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows["partition"].tolist())

    def __contains__(self, partition: object) -> bool:
        return partition in self._places

    def __getitem__(self, partition: int) -> Position:
        index, marker, record = self._places[partition]
        row = self.rows[index]
        _, bucket, markers, records, version, failover_id, data_id, seqno, horizon = row.tolist()
        return Position(
            version,
            failover_id or None,
            data_id or None,
            seqno,
            None if horizon == UNKNOWN_HORIZON else horizon,
            tuple(self.markers[marker : marker + markers].tolist()),
            log_of_records(self.records[record : record + records]),
            self.names[bucket],
        )

    def __repr__(self) -> str:
        return f"PositionTable({dict(self)!r})"

    @property
    def _places(self) -> dict[int, tuple[int, int, int]]:
        """By partition the row, its first marker and its first record."""
        if self._index is None:
            places = (
                range(len(self)),
                _firsts(self.rows["markers"]),
                _firsts(self.rows["records"]),
            )
            self._index = dict(zip(self, zip(*places, strict=True), strict=True))
        return self._index

    # Parts.

    def only(self, partitions: I64) -> "PositionTable":
        """Return the part of those of the partitions that are here."""
        chosen = np.isin(self.rows["partition"], partitions)
        return self if chosen.all() else self._select(np.flatnonzero(chosen))

    def without(self, partitions: I64) -> "PositionTable":
        """Return the part of all but the partitions."""
        gone = np.isin(self.rows["partition"], partitions)
        return self._select(np.flatnonzero(~gone)) if gone.any() else self

    def updated(self, newer: "PositionTable") -> "PositionTable":
        """Return the positions of both, and of a partition that is in both the newer one."""
        kept = self.without(newer.rows["partition"])
        if not len(kept) or not len(newer):
            return newer if len(newer) else kept
        names = list(dict.fromkeys((*kept.names, *newer.names)))
        parts = []
        for part in (kept, newer):
            rows = part.rows.copy()
            indexes = np.array([names.index(name) for name in part.names], np.uint32)
            rows["bucket"] = indexes[rows["bucket"]]
            parts.append(rows)
        both = PositionTable(
            np.concatenate(parts),
            names,
            np.concatenate([kept.markers, newer.markers]),
            np.concatenate([kept.records, newer.records]),
        )
        return both._select(np.argsort(both.rows["partition"], kind="stable"))

    def _select(self, order: I64) -> "PositionTable":
        rows = self.rows[order]
        used, rows["bucket"] = np.unique(rows["bucket"], return_inverse=True)
        return PositionTable(
            rows,
            [self.names[index] for index in used.tolist()],
            self.markers[_spread(self.rows["markers"], order)],
            self.records[_spread(self.rows["records"], order)],
        )

    # Bytes.

    def sizes(self) -> I64:
        """Return how many bytes each position takes, without the name of its bucket."""
        rows = self.rows
        markers, records = rows["markers"].astype(np.int64), rows["records"].astype(np.int64)
        return ROW.itemsize + 8 * markers + RECORD.itemsize * records

    def encode(self) -> bytes:
        """Return the table as bytes with a CRC32, little-endian: a head of 28 bytes (magic, CRC32 of what comes behind
        it, bytes of the names, counts of rows, markers and records), the names as a JSON list, and the columns.
        """
        names = json.dumps(self.names).encode()
        counts = (len(names), len(self.rows), len(self.markers), len(self.records))
        rest = struct.pack("<IIII", *counts) + names
        rest += self.rows.tobytes() + self.markers.tobytes() + self.records.tobytes()
        return MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest

    @classmethod
    def decode(cls, data: bytes) -> "PositionTable":
        """Return the table that ``encode`` gave.

        Raises:
            PositionDamagedError: the bytes are something else, the CRC32 is wrong, or a position is out of range or
                contradicts itself.
        """
        if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
            raise _damaged("it is no table of positions")
        _, crc, text, rows, markers, records = _HEAD.unpack_from(data)
        sizes = (text, rows * ROW.itemsize, markers * 8, records * RECORD.itemsize)
        if len(data) != _HEAD.size + sum(sizes):
            raise _damaged(f"it has {len(data)} bytes, not {_HEAD.size + sum(sizes)}")
        if zlib.crc32(memoryview(data)[len(MAGIC) + 4 :]) != crc:
            raise _damaged("its CRC32 does not fit its content")
        ends = np.cumsum((_HEAD.size, *sizes)).tolist()
        table = cls(
            np.frombuffer(data, ROW, rows, ends[1]),
            _names_of(data[ends[0] : ends[1]]),
            np.frombuffer(data, "<u8", markers, ends[2]),
            np.frombuffer(data, RECORD, records, ends[3]),
        )
        table.check()
        return table

    def check(self) -> None:
        """Check every position, with few statements for all.

        Raises:
            PositionDamagedError: one is out of range or contradicts itself.
        """
        rows, seqnos, horizons = self.rows, self.rows["seqno"], self.rows["horizon"]
        partitions = rows["partition"].astype(np.int64)
        self._require(partitions < PARTITIONS, "is a partition that does not exist")
        self._require(np.diff(partitions, prepend=-1) > 0, "is out of order")
        self._require(rows["bucket"] < len(self.names), "has a bucket without a name")
        self._require(seqnos <= SEQNO_MAX, "has a seqno out of range")
        known = horizons != UNKNOWN_HORIZON
        good = ~known | ((horizons <= SEQNO_MAX) & (horizons >= seqnos))
        self._require(good, "has a horizon out of range, or below its seqno")
        for name, column in (("markers", self.markers), ("records", self.records)):
            if int(rows[name].sum(dtype=np.uint64)) != len(column):
                raise _damaged(f"it has {len(column)} {name}, not as many as its rows say")
        owner = np.repeat(np.arange(len(rows)), rows["markers"])
        good = self.markers <= seqnos[owner]
        good[1:] &= (np.diff(owner) > 0) | (self.markers[1:] > self.markers[:-1])
        self._require(good, "has markers that are not ascending, or above its seqno", owner)
        self._check_records()

    def _check_records(self) -> None:
        owner = np.repeat(np.arange(len(self.rows)), self.rows["records"])
        ids, seqnos = self.records["failover_id"], self.records["seqno"]
        good = (ids != 0) & (seqnos <= SEQNO_MAX)
        good[1:] &= (np.diff(owner) > 0) | (seqnos[1:] >= seqnos[:-1])
        self._require(good, "has a failover log that is none", owner)
        order = np.lexsort((ids, owner))
        twice = (np.diff(owner[order]) == 0) & (ids[order][1:] == ids[order][:-1])
        if twice.any():
            self._require(~twice, "has a failover log with an id twice", owner[order][1:])

    def _require(self, good: Mask, words: str, owner: Any = None) -> None:
        if not good.all():
            at = int(np.flatnonzero(~good)[0])
            row = at if owner is None else int(owner[at])
            raise _damaged(f"partition {self.rows['partition'][row]} {words}")


class Found(Mapping[int, Position | None]):
    """What was found of partitions; None for nothing.

    Args:
        partitions: that were looked for.
        table: what was found, of them alone.
    """

    __slots__ = ("_partitions", "table")

    def __init__(self, partitions: Iterable[int], table: PositionTable) -> None:
        self._partitions = dict.fromkeys(partitions)
        self.table = table

    def __len__(self) -> int:
        return len(self._partitions)

    def __iter__(self) -> Iterator[int]:
        return iter(self._partitions)

    def __contains__(self, partition: object) -> bool:
        return partition in self._partitions

    def __getitem__(self, partition: int) -> Position | None:
        return self.table.get(partition, self._partitions[partition])


def _firsts(counts: U32) -> list[int]:
    firsts: list[int] = (np.cumsum(counts, dtype=np.int64) - counts).tolist()
    return firsts


def _spread(counts: U32, order: I64) -> I64:
    """Return where the items of the rows in ``order`` are, of rows that have so many each."""
    firsts, chosen = np.cumsum(counts, dtype=np.int64) - counts, counts[order].astype(np.int64)
    shifts = firsts[order] - (np.cumsum(chosen) - chosen)
    return np.repeat(shifts, chosen) + np.arange(int(chosen.sum()))


def _names_of(text: bytes) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its names of buckets are no JSON ({error})") from error
    if not isinstance(names, list) or not all(
        isinstance(name, str) and len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX
        for name in names
    ):
        raise _damaged(f"its names of buckets are no list of names of up to {NAME_BYTES_MAX} bytes")
    return names


def _damaged(what: str) -> PositionDamagedError:
    return PositionDamagedError(what, hint=DAMAGED_HINT)
