"""Undone mutations of a replica, kept for the operator; and rows of a future that is lost.

Mutations are in DIR/undone/<bucket>-<time>.jsonl.

A file has a line for each mutation: {"partition", "seqno", "key", "op", "value"}, key and value in base64, op "set" or
"delete", a delete without a value. One with cells of further columns has "further", by id and in base64. Its first line names the bucket. A file is durable before what it tells of is undone;
after a crash in between the same mutations are in another file once more.

A bucket that its upstream never had is kept whole: DIR/undone/<version>-<time> is its folder, and a file of one line names it.
"""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from upr.storage.journal import replace_durably, sync_folder
from upr.storage.keyspace import ConsumerRow
from upr.storage.store import Identity, Store
from upr_protocol.block import (
    OP_DELETE,
    U64,
    Block,
    block_keys,
    block_ops,
    block_partitions,
    block_seqnos,
    block_values,
)
from upr_protocol.errors import DataDamagedError
from upr_protocol.limits import FURTHER_COLUMNS_MAX, PARTITIONS
from upr_protocol.wire.cells import block_cells

_PLAIN = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class UndoneFile:
    """One file, and what its first line says.

    Attributes:
        bucket, version: whose mutations they were.
        markers: by partition, the seqno above which the upstream has none of it.
        time: when they were undone, microseconds since the epoch.
        folder: of a bucket that is kept whole, beside the file; empty for the mutations in the file.
        mutations, partitions: how many of a bucket that is kept whole.
    """

    path: Path
    bucket: str
    version: int
    time: int
    markers: dict[int, int]
    folder: str = ""
    mutations: int = 0
    partitions: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the mutations in order, see the module; DataDamagedError if a line cannot be read, or is none."""
        with self.path.open("rb") as lines:
            next(lines, None)
            for number, line in enumerate(lines, 2):
                row = _parsed(self.path, number, line)
                # People edit these files, to put back a part of them.
                if not _is_mutation(row):
                    raise DataDamagedError(f"{self.path}: line {number} is no mutation")
                yield row


def write_undone(
    folder: Path,
    identity: Identity,
    blocks: Iterable[Block],
    markers: Mapping[int, int],
    now: int,
) -> int:
    """Write rows of blocks to a new file under a data directory, durably, and return how many there are.

    Args:
        folder: the data directory.
        markers: by partition, the seqno above which rows are written: what the upstream has too is only received anew.
        now: microseconds since the epoch.
    """
    name = identity.name if _PLAIN.fullmatch(identity.name) else f"{identity.version:016x}"
    path = folder / "undone" / f"{name}-{now}.jsonl"
    rows = _rows(blocks, markers)
    first = next(rows, None)
    if first is None:
        return 0
    count = 0

    def lines() -> Iterator[str]:
        nonlocal count
        yield _head(identity, now, markers=markers)
        for row in chain((first,), rows):
            count += 1
            yield json.dumps(row) + "\n"

    path.parent.mkdir(exist_ok=True)
    # Under its name only when it is whole: a torn one could not be listed.
    replace_durably(path, lines())
    sync_folder(folder)
    return count


def forget_undone(folder: Path, version: int, since: int) -> None:
    """Remove the files of a bucket's mutations that were written from a time on, because they were not undone after all.

    Args:
        folder: the data directory.
        since: microseconds since the epoch.
    """
    for path in (folder / "undone").glob("*.jsonl"):
        # It is not this one's part to say that another file is damaged.
        with suppress(OSError, DataDamagedError):
            file = read_undone(path)
            if file.version == version and file.time >= since and not file.folder:
                path.unlink()


def keep_bucket(folder: Path, identity: Identity, highs: U64, now: int) -> Path:
    """Move the folder of a bucket to the data directory's ``undone``, durably, and return where it is.

    Args:
        highs: the high seqno of each partition.
        now: microseconds since the epoch.
    """
    kept = folder.parent.parent / "undone" / f"{identity.version:016x}-{now}"
    counts = {"mutations": int(highs.sum()), "partitions": int((highs > 0).sum())}
    kept.parent.mkdir(exist_ok=True)
    line = _head(identity, now, markers={}, folder=kept.name, **counts)
    replace_durably(kept.with_name(f"{kept.name}.jsonl"), line)
    os.rename(folder, kept)
    for parent in (kept.parent, folder.parent, folder.parent.parent):
        sync_folder(parent)
    return kept


def _head(identity: Identity, now: int, **more: Any) -> str:
    """Return the first line of a file."""
    head = {"bucket": identity.name, "version": f"{identity.version:016x}", "time": now}
    return json.dumps(head | more) + "\n"


def undone_files(folder: Path) -> list[UndoneFile]:
    """Return the files under a data directory, oldest first; or raise as ``read_undone``."""
    found = [read_undone(path) for path in (folder / "undone").glob("*.jsonl")]
    return sorted(found, key=lambda one: (one.time, one.path.name))


def read_undone(path: Path) -> UndoneFile:
    """Return one file; DataDamagedError if its first line cannot be read."""
    with path.open("rb") as lines:
        head = _parsed(path, 1, next(lines, b""))
    try:
        markers = {int(partition): int(seqno) for partition, seqno in head["markers"].items()}
        return UndoneFile(
            path,
            head["bucket"],
            int(head["version"], 16),
            int(head["time"]),
            markers,
            head.get("folder", ""),
            head.get("mutations", 0),
            head.get("partitions", 0),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataDamagedError(f"{path}: line 1 does not name a bucket") from error


def _rows(blocks: Iterable[Block], markers: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        columns = (
            block_partitions(block),
            block_seqnos(block),
            block_keys(block),
            block_ops(block),
            block_values(block),
            block_cells(block) if block.further else repeat({}, block.rows),
        )
        for partition, seqno, key, op, value, cells in zip(*columns, strict=True):
            if seqno <= markers[partition]:
                continue
            row = {"partition": partition, "seqno": seqno, "key": base64.b64encode(key).decode()}
            if cells:
                row["further"] = {id_: base64.b64encode(c).decode() for id_, c in cells.items()}
            if op == OP_DELETE:
                yield {**row, "op": "delete"}
            else:
                yield {**row, "op": "set", "value": base64.b64encode(value or b"").decode()}


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataDamagedError(f"{path}: line {number} cannot be read")
    return found


def _is_mutation(row: Mapping[str, Any]) -> bool:
    partition, seqno, further = row.get("partition"), row.get("seqno"), row.get("further", {})
    if type(partition) is not int or not 0 <= partition < PARTITIONS or type(seqno) is not int:
        return False
    if row.get("op") not in ("set", "delete") or (row["op"] == "set") != ("value" in row):
        return False
    try:
        if not all(1 <= int(id_) <= FURTHER_COLUMNS_MAX for id_ in further):
            return False
        for text in (row["key"], row.get("value", ""), *further.values()):
            base64.b64decode(text, validate=True)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class FutureForgotten:
    """Rows that ``forget_future`` removed.

    Attributes:
        cuts: the names of all cuts, which belong to the history of the original.
        consumers: (name, partition, acknowledged seqno) above what the partition keeps.
    """

    cuts: tuple[str, ...]
    consumers: tuple[tuple[str, int, int], ...]


def forget_future(store: Store, ends: Mapping[int, int]) -> FutureForgotten:
    """Remove all cuts, and acknowledged positions above the data that stays; durable when it returns.

    Args:
        ends: by partition, the last complete marker that stays; other partitions are not changed.
    """
    cuts = store.cuts()
    gone: dict[tuple[bytes, int], ConsumerRow | None] = {}
    told: list[tuple[str, int, int]] = []
    for name, partition, row in store.consumers():
        # A saved position must stay, however high: its consumer has the data, and must roll back.
        if partition in ends and row.seqno > ends[partition] and not row.position:
            gone[name, partition] = None
            told.append((name.decode(errors="replace"), partition, row.seqno))
    if cuts:
        store.put_cuts(dict.fromkeys(cuts))
    if gone:
        store.put_consumers(gone)
    return FutureForgotten(
        tuple(sorted(n.decode(errors="replace") for n in cuts)), tuple(sorted(told))
    )
