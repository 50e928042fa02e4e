"""Offsets: where a query stands in each partition, as the JSON that Spark keeps in its checkpoint.

``{"v":1,"b":"<bucket version>","c":"<cut>","h":"<earlier cut>","a":1,"ps":"0-127,512","ids":[...],"p":[...]}``. In
``p`` each partition of ``ps`` has ``[index of its id in ids or null, seqno, d1, d2, ...]``: d1 and so on are earlier
ends of batches, as distances below the seqno. Behind them may come ``["r", seqno]``, the batch that ends here begins
with a rollback to there; ``["b", seqno]``, nothing at or below that was ever asked for; and ``["x"]``, what was read
may not be complete as of the seqno. ``c`` is the cut that the newest ends lie at, ``h`` an older one that some
partitions have not left yet, ``a`` says that nothing is read up to this offset. Spark compares the text: keys and
items have a fixed order, and equal offsets are equal texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import (
    check_seqno,
    format_failover_id,
    parse_failover_id,
)
from upr_protocol.limits import PARTITIONS, parse_partitions
from upr_spark.errors import UprSparkError

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one partition stands.

    Args:
        failover_id: the branch; None when nothing is known of it, which needs seqno 0.
        seqno: everything up to it was read.
        points: earlier ends of batches, falling, all above ``base`` and below ``seqno``: what a rollback may go to.
        rollback: the batch that ends here begins with a rollback to this seqno; None for none.
        base: nothing at or below it was asked for, so that nothing is held there.
        inexact: rows may be missing that were superseded above ``seqno``.
    """

    failover_id: int | None
    seqno: int
    points: tuple[int, ...] = ()
    rollback: int | None = None
    base: int = 0
    inexact: bool = False

    @property
    def holds(self) -> bool:
        """Whether anything was read that may have to be undone."""
        return self.seqno > self.base

    def settled(self) -> "Entry":
        """The same without the rollback of its batch, which the next batch does not repeat."""
        return self if self.rollback is None else replace(self, rollback=None)


@dataclass(frozen=True, slots=True)
class Offset:
    """Where all partitions that are followed stand.

    Args:
        bucket_version: which bucket this is of.
        entries: by partition, ascending.
        cut: the name of the cut that the newest ends lie at; None where there is none.
        earlier_cut: the one before, while a partition has not reached ``cut`` yet.
        anchor: whether the query begins here, so that nothing is read up to it.
    """

    bucket_version: int
    entries: Mapping[int, Entry]
    cut: str | None = None
    earlier_cut: str | None = None
    anchor: bool = False

    @property
    def ids(self) -> dict[int, int | None]:
        """The failover id of each partition, as Hello takes it."""
        return {partition: entry.failover_id for partition, entry in self.entries.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the document; equal offsets give equal ones, with their keys in the same order."""
        table: dict[int, int] = {}
        rows = [_row(entry, table) for entry in self.entries.values()]
        document: dict[str, Any] = {"v": FORMAT, "b": f"{self.bucket_version:016x}"}
        if self.cut is not None:
            document["c"] = self.cut
        if self.earlier_cut is not None:
            document["h"] = self.earlier_cut
        if self.anchor:
            document["a"] = 1
        document["ps"] = format_partitions(list(self.entries))
        document["ids"] = [format_failover_id(failover_id) for failover_id in table]
        document["p"] = rows
        return document


def _row(entry: Entry, table: dict[int, int]) -> list[Any]:
    index = None
    if entry.failover_id is not None:
        index = table.setdefault(entry.failover_id, len(table))
    row: list[Any] = [index, entry.seqno, *(entry.seqno - point for point in entry.points)]
    if entry.rollback is not None:
        row.append(["r", entry.rollback])
    if entry.base:
        row.append(["b", entry.base])
    if entry.inexact:
        row.append(["x"])
    return row


def parse_offset(document: Mapping[str, Any]) -> Offset:
    """Return the offset that ``to_json`` gave.

    Raises:
        UprSparkError: UPR_BAD_OFFSET, it is damaged, or of a newer format.
    """
    version = document.get("v")
    if version != FORMAT:
        raise _bad(
            f"format {version!r}, this program reads {FORMAT}",
            "use the version of upr-stream that wrote it, or a newer one",
        )
    try:
        partitions = parse_partitions(_typed(document["ps"], str))
        ids = [parse_failover_id(text) for text in _typed(document["ids"], list)]
        rows = _typed(document["p"], list)
        if len(rows) != len(partitions):
            raise ValueError(f"{len(partitions)} partitions with {len(rows)} entries")
        return Offset(
            int(_typed(document["b"], str), 16),
            {p: _entry(row, ids) for p, row in zip(partitions, rows, strict=True)},
            _name(document, "c"),
            _name(document, "h"),
            document.get("a") == 1,
        )
    except (KeyError, TypeError, ValueError, IndexError, InvalidArgumentError) as error:
        words = f"{type(error).__name__}: {error}"
        raise _bad(words, "restore the checkpoint from a copy, or begin with a new one") from None


def _entry(row: Any, ids: Sequence[int]) -> Entry:
    numbers = [item for item in _typed(row, list) if not isinstance(item, list)]
    marks = {item[0]: item[1:] for item in row if isinstance(item, list)}
    index, seqno = numbers[0], check_seqno(numbers[1])
    if index is not None and not 0 <= index < len(ids):
        raise ValueError(f"there is no id {index}")
    points = tuple(check_seqno(seqno - distance) for distance in numbers[2:])
    return Entry(
        None if index is None else ids[index],
        seqno,
        points,
        check_seqno(marks["r"][0]) if "r" in marks else None,
        check_seqno(marks["b"][0]) if "b" in marks else 0,
        "x" in marks,
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:60]!r} is not of type {kind.__name__}")
    return value


def _name(document: Mapping[str, Any], key: str) -> str | None:
    return None if key not in document else str(_typed(document[key], str))


def _bad(what: str, hint: str) -> UprSparkError:
    return UprSparkError("BAD_OFFSET", f"the offset cannot be read: {what}", hint=hint)


def format_partitions(partitions: Sequence[int]) -> str:
    """Return ascending partitions as ``parse_partitions`` takes them, as short as can be."""
    parts: list[str] = []
    first = previous = -PARTITIONS
    for partition in [*partitions, -1]:
        if partition == previous + 1 and partition >= 0:
            previous = partition
            continue
        if first >= 0:
            parts.append(str(first) if first == previous else f"{first}-{previous}")
        first = previous = partition
    return ",".join(parts)
