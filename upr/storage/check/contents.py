"""Contents of a bucket as a check sees them: blocks, all other rows of the store, the journal; and findings.

*Blocks* and markers: proofs about missing rows. A row may be missing when a newer version of its key is at or below the
horizon of its run, or when it is a tombstone at or below the purge seqno. The key of a missing row is unknown, so one
proof remains: at a complete marker M (no run up to there has a horizon above M) no row at or below the horizon is newer
than M itself, so **the row at M must exist**, unless M is at or below the purge seqno. A duplicate key proves nothing:
a superseded row may stay.

An active partition numbers and stores complete stretches. A horizon above the end of its data means that rows are
missing, and their newer versions too. On a replica that is valid: the rest of a stretch may still arrive.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from upr.storage import keyspace
from upr.storage.journal import Commit, Inspected, Journal
from upr.storage.keyspace import CutRow, PartitionRow, hashes_of
from upr.storage.proof import Proof
from upr.storage.store import Identity, unpack_identity
from upr_protocol.block import Block, row_seqnos
from upr_protocol.errors import DataDamagedError, InvalidArgumentError, UprError
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS, SEQNO_MAX
from upr_protocol.wire.codec import decode_block, position_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

DAMAGE = "damage"
NOTE = "note"
"""Severity of a valid state that is worth knowing, such as an action of the next start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding: one contradiction.

    Attributes:
        what: in words.
        severity: DAMAGE or NOTE.
        partition: None for the bucket as a whole.
        above, end: the seqno range ``(above, end]`` concerned, or None.
        file: the path below the bucket's folder, or empty.
        offset: the byte in that file.
    """

    what: str
    severity: str = DAMAGE
    partition: int | None = None
    above: int | None = None
    end: int | None = None
    file: str = ""
    offset: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Report = Callable[[Finding], None]
ACTIVE, DEAD = 1, 4
_STATES = range(1, 5)
_IDENTITY, _PROOF = b"identity", b"clean_shutdown_proof"
Items = Callable[[bytes], Iterator[tuple[bytes, bytes]]]
"""Function of a table's name that yields its keys and values."""


@dataclass(slots=True)
class Readable:
    """Readable seqno ranges ``(above, end]`` of each partition, ascending and joined."""

    ranges: dict[int, list[list[int]]] = field(default_factory=dict)

    def add(self, partition: int, above: int, end: int) -> None:
        """Add a range behind the last one."""
        known = self.ranges.setdefault(partition, [])
        if known and known[-1][1] == above:
            known[-1][1] = end
        else:
            known.append([above, end])


@dataclass(slots=True)
class Ends:
    """End of a partition's data, the largest horizon up to there, and the last complete marker.

    Attributes:
        unread: whether a block could not be read, so that horizon and marker are uncertain.
    """

    high: int = 0
    horizon: int = 0
    complete: int = 0
    unread: bool = False


class StoreCheck:
    """Check of blocks and rows of some partitions, in one pass, without changing them.

    Args:
        items: see Items.
        rows: the partitions' rows that can be read.
        pins: of cuts in these partitions, by partition: (name, failover id, seqno).

    Attributes:
        ends: where each partition's data end: in the store, then in the journal too.
    """

    def __init__(
        self,
        items: Items,
        rows: Mapping[int, PartitionRow],
        pins: Mapping[int, list[tuple[str, int, int]]],
        report: Report,
    ) -> None:
        self._items = items
        self._rows = rows
        self._pins = pins
        self._report = report
        self._highs: dict[int, int] = {}
        self.ends: dict[int, Ends] = {}
        self.readable = Readable()

    def _say(self, partition: int, above: int, end: int, words: str) -> None:
        self._report(Finding(words, partition=partition, above=above, end=end))

    def check_blocks(
        self,
        partition: int,
        blocks: Iterable[tuple[int, bytes]],
        hashes: Iterable[tuple[int, bytes]],
    ) -> None:
        """Check a partition's blocks, and the packed hashes of their keys: (end_seqno of the key, bytes) in order."""
        row, ends = self._rows.get(partition), Ends()
        self.ends[partition] = ends
        index = _Index(partition, iter(hashes), self._report)
        for key_end, data in blocks:
            packed = index.of(key_end)
            try:
                block = decode_block(data)
            except UprError as error:
                words = f"the block cannot be read: {error.message}"
                self._say(partition, ends.high, key_end, words)
                ends.high, ends.unread = key_end, True
                continue
            self._check_one(partition, key_end, block, ends)
            if packed is not None and packed != _hashes_of(partition, key_end, block):
                words = "the index of its keys is damaged, and ignored until the block is compacted"
                self._say(partition, int(block.runs[0]["start_seqno"]), key_end, words)
        index.of(2**64)
        if row is not None and row.stored_high != ends.high:
            words = f"its row says that {row.stored_high} is stored, the blocks end at {ends.high}"
            low, high = sorted((row.stored_high, ends.high))
            self._say(partition, low, high, words)
        elif row is not None and not ends.unread:
            told, found = (row.complete, row.horizon), (ends.complete, ends.horizon)
            if told != found:
                words = f"its row says that the last complete marker and the horizon are {told}, of the blocks they are {found}"
                self._say(partition, min(told[0], found[0]), ends.high, words)

    def _check_one(self, partition: int, key_end: int, block: Block, ends: Ends) -> None:
        run = block.runs[0]
        start, end, horizon = (int(run[name]) for name in ("start_seqno", "end_seqno", "horizon"))
        if len(block.runs) != 1 or int(run["partition"]) != partition or end != key_end:
            words = f"the block has {len(block.runs)} runs, the first of partition {run['partition']} to {end}; its key says {partition} to {key_end}"
            self._say(partition, ends.high, key_end, words)
            ends.high, ends.unread = key_end, True
            return
        if start > ends.high:
            self._say(partition, ends.high, start, "no block tells of these seqnos")
        elif start < ends.high:
            self._say(partition, start, ends.high, "two blocks tell of these seqnos")
        else:
            self.readable.add(partition, start, end)
        ends.high = end
        ends.horizon = max(ends.horizon, horizon)
        if ends.horizon == end:
            ends.complete = end
        row = self._rows.get(partition)
        purge = row.purge_seqno if row is not None else 0
        if ends.horizon == end > purge and not last_rows(block)[0]:
            words = f"the marker at {end} is not true: the row at {end} is missing"
            self._say(partition, start, end, words)
        for name, _, pin in self._pins.get(partition, ()):
            if start < pin < end or end <= pin < horizon:
                words = f"cut {name} pins {pin}, merged across (horizon {horizon}): it is not exact any more"
                self._say(partition, start, end, words)

    def check_rows(self, proof: Proof | None) -> None:
        """Compare all rows with the ends of the data; after the journal."""
        self._highs = {p: max(self.ends[p].high, row.stored_high) for p, row in self._rows.items()}
        self._check_aside()
        self._check_ends(proof)
        self._check_pin_ids()
        self._check_consumers()
        self._check_producers()

    def _check_aside(self) -> None:
        """Check the table ``aside``, and report dead partitions."""
        held: dict[int, list[tuple[int, int]]] = {}
        counts: dict[int, int] = {}
        for key, value in self._items(b"aside"):
            if not keyspace.is_aside_key(key):
                self._report(Finding(f"a block that is kept aside has the key {key.hex()}"))
                continue
            partition = int.from_bytes(key[:2], "big")
            if partition not in self._rows:
                continue
            block, problem = problem_of(value)
            if block is None or (block.runs["partition"] != partition).any():
                words = f"a block that is kept aside is damaged: {problem or 'it is of another partition'}"
                self._report(Finding(words, partition=partition))
                continue
            runs = zip(
                block.runs["start_seqno"].tolist(), block.runs["end_seqno"].tolist(), strict=True
            )
            held.setdefault(partition, []).extend(runs)
            counts[partition] = counts.get(partition, 0) + int(block.runs["count"].sum())
        for partition, row in self._rows.items():
            above = min((start for start, _ in held.get(partition, ())), default=None)
            end = max((end for _, end in held.get(partition, ())), default=None)
            kept = f"{counts.get(partition, 0)} rows of it are kept aside"
            if row.state == DEAD:
                self._report(
                    Finding(f"it is dead: {row.reason}; {kept}", DAMAGE, partition, above, end)
                )
            elif held.get(partition):
                self._report(Finding(f"{kept}, and it is not dead", NOTE, partition, above, end))

    def _check_ends(self, proof: Proof | None) -> None:
        """Compare rows and proof with the ends of the data in store and journal."""
        for partition, row in self._rows.items():
            high, found = self._highs.get(partition, 0), self.ends[partition]
            if row.state == ACTIVE and found.horizon > found.high:
                words = f"rows are missing that newer ones up to {found.horizon} superseded, the data ends at {found.high}"
                self._say(partition, found.high, found.horizon, words)
            told = int(proof.highs[partition]) if proof is not None and row.state != DEAD else 0
            if told > high:
                words = (
                    f"the clean-shutdown proof says that it ends at {told}, its data ends at {high}"
                )
                self._say(partition, high, told, words)
            if row.purge_seqno > high:
                words = f"its purge seqno is {row.purge_seqno}, its data ends at {high}"
                self._say(partition, high, row.purge_seqno, words)
            newest = row.log.newest.seqno
            if newest > high:
                words = f"its failover log has a record at {newest}, its data ends at {high}"
                self._say(partition, high, newest, words)

    def _check_pin_ids(self) -> None:
        """Check that pins are in the partition's history."""
        for partition, several in self._pins.items():
            row: Any = self._rows.get(partition)
            for name, failover_id, seqno in several:
                end = self._highs.get(partition, 0)
                if row is not None and failover_id in row.log:
                    following = row.log.next_after(failover_id)
                    end = end if following is None else min(end, following.seqno)
                if seqno > end:
                    words = f"cut {name} pins {seqno}, its history ends at {end}: it is not exact any more"
                    self._say(partition, end, seqno, words)

    def _check_consumers(self) -> None:
        for key, value in self._items(b"consumers"):
            name, partition = key[:-3], int.from_bytes(key[-2:], "big")
            if len(key) > NAME_BYTES_MAX + 3 or not keyspace.is_consumer_key(key):
                self._report(Finding(f"a row of the consumers has the key {key.hex()}"))
                continue
            what = f"consumer {_name(name)}"
            try:
                consumer = keyspace.unpack_consumer(key, value)
                _check_saved(key, consumer.position or b"")
            except (DataDamagedError, struct.error) as error:
                self._report(Finding(f"{what}: {error}", partition=partition))
                continue
            self._check_seqno(what, partition, consumer.failover_id, consumer.seqno)

    def _check_producers(self) -> None:
        """Check the tables of producers, and that ``producers`` and ``producer_times`` have the same ones."""
        times: dict[bytes, int] = {}
        for key, _ in self._items(b"producer_times"):
            if not 9 <= len(key) <= NAME_BYTES_MAX + 8:
                self._report(Finding(f"a row of the producers' times has the key {key.hex()}"))
                continue
            time, name = keyspace.unpack_producer_time_key(key)
            if times.setdefault(name, time) != time:
                self._report(Finding(f"producer {_name(name)} is there with two times"))
        seen: set[bytes] = set()
        for key, value in self._items(b"producers"):
            name = key[: key.find(b"\0")]
            what = f"producer {_name(name)}"
            if not 0 < len(name) <= NAME_BYTES_MAX or len(key) not in (
                len(name) + 1,
                len(name) + 3,
            ):
                self._report(Finding(f"a row of the producers has the key {key.hex()}"))
                continue
            if len(key) > len(name) + 1:
                self._check_numbers(key, value, what)
                continue
            seen.add(name)
            try:
                told = keyspace.unpack_producer_seen(key, value)
                if name in times and times[name] != told.time:
                    self._report(
                        Finding(f"{what} was seen at {told.time}, the index says {times[name]}")
                    )
            except DataDamagedError as error:
                self._report(Finding(f"{what}: {error}"))
        for key, value in self._items(b"replaced"):
            name = key[: key.find(b"\0")]
            if 0 < len(name) <= NAME_BYTES_MAX and len(key) == len(name) + 3:
                what = f"what was replaced of producer {_name(name)}"
                self._check_numbers(key, value, what)
            else:
                self._report(Finding(f"a row of the replaced numbers has the key {key.hex()}"))
        for name in sorted(seen ^ times.keys()):
            self._report(Finding(f"producer {_name(name)} is in one of its two tables only"))

    def _check_numbers(self, key: bytes, value: bytes, what: str) -> None:
        """Check a producer's numbers in the partitions of a slot."""
        try:
            table = keyspace.unpack_producer(key, value)
        except DataDamagedError as error:
            self._report(Finding(f"{what}: {error}"))
            return
        for partition, _, failover_id, start, end in table.tolist():
            if end < start:
                self._report(Finding(f"{what}: its seqnos run backwards", partition=partition))
            self._check_seqno(what, partition, failover_id, end)

    def _check_seqno(self, what: str, partition: int, failover_id: int, seqno: int) -> None:
        row, high = self._rows.get(partition), self._highs.get(partition, 0)
        # Under an older id, what lay above the next record was undone, and may have been acknowledged.
        if row is None or row.log.newest.failover_id != failover_id or row.state != ACTIVE:
            return
        if seqno > high:
            self._say(partition, high, seqno, f"{what} is at {seqno}, the data ends at {high}")


class _Index:
    """Hashes of a partition's keys, one block at a time: they may be larger than the memory."""

    def __init__(self, partition: int, hashes: Iterator[tuple[int, bytes]], report: Report) -> None:
        self._partition = partition
        self._hashes = hashes
        self._report = report
        self._next = next(hashes, None)

    def of(self, end: int) -> bytes | None:
        """Return the packed hashes of the block that ends there, if there are any; report those that come before."""
        while self._next is not None and self._next[0] < end:
            words = "there is an index of keys, and no block"
            self._report(Finding(words, partition=self._partition, above=0, end=self._next[0]))
            self._next = next(self._hashes, None)
        if self._next is None or self._next[0] > end:
            return None
        packed, self._next = self._next[1], next(self._hashes, None)
        return packed


def _hashes_of(partition: int, end: int, block: Block) -> bytes:
    """Return the packed hashes that a block must have."""
    offsets = np.frombuffer(block.key_offsets, "<i4").astype(np.int64)
    start = int(block.runs[0]["start_seqno"])
    return keyspace.pack_hashes(partition, start, end, hashes_of(offsets, block.keys))


def last_rows(block: Block) -> npt.NDArray[np.bool_]:
    """Return whether each run of a block holds the row of its last seqno."""
    runs = block.runs
    bounds = np.cumsum(runs["count"], dtype=np.int64)
    if not block.rows:
        return np.zeros(len(runs), bool)
    last = row_seqnos(block)[np.maximum(bounds - 1, 0)]
    held: npt.NDArray[np.bool_] = (runs["count"] > 0) & (last == runs["end_seqno"])
    return held


def problem_of(data: bytes) -> tuple[Block | None, str]:
    """Return a block, or the error of reading it."""
    try:
        return decode_block(data), ""
    except InvalidArgumentError as error:
        return None, error.message


def check_identity(
    items: Items, version: str, report: Report
) -> tuple[Identity | None, Proof | None]:
    """Check the table ``meta``.

    Args:
        version: the name of the bucket's folder, 16 hex digits.

    Returns the identity and the clean-shutdown proof, None for each that is missing or cannot be read.

    Raises:
        DataDirectoryError: the store's format is unknown.
    """
    identity, proof = None, None
    for key, value in items(b"meta"):
        try:
            body = keyspace.unseal(value, key, f"meta {key.decode(errors='replace')!r}")
            if key == _IDENTITY:
                identity = unpack_identity(body, f"the store of bucket {version}")
            elif key == _PROOF:
                proof = Proof.unpack(body)
        except DataDamagedError as error:
            report(Finding(error.message))
    if identity is None:
        report(Finding("the bucket's identity is missing or cannot be read"))
    elif f"{identity.version:016x}" != version:
        report(Finding(f"the folder is {version}, the identity says {identity.version:016x}"))
    return identity, proof


def check_partition_rows(items: Items, report: Report) -> dict[int, PartitionRow]:
    """Check the table ``partitions``; return the rows that can be read."""
    rows: dict[int, PartitionRow] = {}
    seen: set[int] = set()
    for key, value in items(b"partitions"):
        if len(key) != 2 or int.from_bytes(key, "big") >= PARTITIONS:
            report(Finding(f"a row of the partitions has the key {key.hex()}"))
            continue
        partition = int.from_bytes(key, "big")
        seen.add(partition)
        try:
            row = rows[partition] = keyspace.unpack_partition(value, partition)
        except DataDamagedError as error:
            report(Finding(error.message, partition=partition))
            continue
        if row.state not in _STATES:
            report(Finding(f"its state is {row.state}, known are 1 to 4", partition=partition))
        if max(row.stored_high, row.purge_seqno) > SEQNO_MAX:
            report(Finding("its row has a seqno of 2^48 or more", partition=partition))
    for partition in sorted(set(range(PARTITIONS)) - seen):
        report(Finding("its row is missing", partition=partition))
    return rows


def _check_saved(key: bytes, stored: bytes) -> None:
    if not stored:
        return
    try:
        position = wire.Position.FromString(stored)
        position_from_message(position, 0)
    except (DecodeError, InvalidArgumentError) as error:
        raise DataDamagedError(f"its saved position is damaged: {error}") from error
    if position.partition != keyspace.unpack_consumer_key(key)[1]:
        raise DataDamagedError(f"its saved position is one of partition {position.partition}")


def _name(name: bytes) -> str:
    return repr(name.decode(errors="replace"))


def check_cuts(items: Items, now: int, report: Report) -> dict[int, list[tuple[str, int, int]]]:
    """Check the table ``cuts``.

    Args:
        now: microseconds since the epoch; an expired cut pins nothing.

    Returns by partition the pins of the others: (cut, failover id, seqno).
    """
    pins: dict[int, list[tuple[str, int, int]]] = {}
    for key, value in items(b"cuts"):
        try:
            row: CutRow = keyspace.unpack_cut(key, value)
        except DataDamagedError as error:
            report(Finding(error.message))
            continue
        for partition, pin in row.pins.items():
            if partition >= PARTITIONS or pin.seqno > SEQNO_MAX:
                report(Finding(f"cut {_name(key)} pins partition {partition} at {pin.seqno}"))
            elif row.expires > now:
                pins.setdefault(partition, []).append((_name(key), pin.failover_id, pin.seqno))
    return pins


class JournalCheck:
    """Check of a journal, in one pass, without changing it.

    Args:
        rows: the partition rows that can be read.
        store: the check of the store; ``run`` adds to its ends and readable ranges.
        wanted: the partitions to check.
        tick: called now and then, as a sign of progress.
    """

    def __init__(
        self,
        folder: Path,
        version: int,
        rows: Mapping[int, PartitionRow],
        store: StoreCheck,
        wanted: frozenset[int],
        report: Report,
        tick: Callable[[], None],
    ) -> None:
        self._tick = tick
        self._folder = folder
        self._version = version
        self._report = report
        self._readable = store.readable
        self._ends = store.ends
        self._high = np.zeros(PARTITIONS, np.uint64)
        self._horizon = np.zeros(PARTITIONS, np.uint64)
        self._purge = np.zeros(PARTITIONS, np.uint64)
        self._first = np.zeros(PARTITIONS, np.uint64)
        self._lost = np.ones(PARTITIONS, bool)
        for partition, row in rows.items():
            # The row decides where the journal continues, as at a start.
            self._high[partition] = row.stored_high
            self._horizon[partition] = (
                self._ends[partition].horizon if partition in self._ends else 0
            )
            self._purge[partition] = row.purge_seqno
            self._first[partition] = row.first_commit
            self._lost[partition] = row.state == DEAD or partition not in wanted
        self._newest = 0
        self.holds_more = False

    def run(self, *, needed: bool) -> None:
        """Check everything; afterwards the ends include the journal.

        Args:
            needed: whether a segment must exist, because no proof holds here and every start leaves one.
        """
        before = self._high.copy()
        journal = self._folder / "journal"
        if not journal.is_dir():
            self._report(Finding("the folder of the journal is missing", file="journal"))
            return
        if needed and not any(journal.glob("*.journal")):
            self._report(
                Finding("the journal has no segment: what was in it is lost", file="journal")
            )
        for found in Journal(journal, self._version).inspect():
            self._tick()
            if found.commit is not None:
                self._check_commit(found, found.commit)
            else:
                self._check_broken(found)
        self.holds_more = bool((self._high > before).any())
        for partition in np.flatnonzero(self._high > before).tolist():
            self._ends[partition] = Ends(int(self._high[partition]), int(self._horizon[partition]))

    def _say(
        self,
        found: Inspected,
        words: str,
        partition: int | None = None,
        above: int | None = None,
        end: int | None = None,
        severity: str = DAMAGE,
    ) -> None:
        where = str(found.path.relative_to(self._folder))
        self._report(Finding(words, severity, partition, above, end, where, found.offset))

    def _check_broken(self, found: Inspected) -> None:
        torn = f"the last {found.torn_bytes} bytes are"
        if not found.torn_bytes:
            self._say(found, found.problem)
        elif found.torn_by_kill:
            words = f"{torn} a record that was never finished; a restart cuts them off"
            self._say(found, words, severity=NOTE)
        else:
            words = f"{torn} no whole record, and not what a killed process leaves: power was lost, or they were damaged; a restart cuts them off"
            self._say(found, words)

    def _check_commit(self, found: Inspected, commit: Commit) -> None:
        if self._newest and commit.number != self._newest + 1:
            self._say(found, f"commit {commit.number} follows commit {self._newest}")
        self._newest = commit.number
        for entry in commit.entries:
            longest = max((len(write.producer) for write in entry.writes), default=0)
            if longest > NAME_BYTES_MAX:
                self._say(found, f"a producer's name has {longest} bytes")
            block, problem = problem_of(entry.block)
            if block is None:
                self._say(found, f"commit {commit.number} holds a damaged block: {problem}")
            else:
                self._check_runs(found, commit.number, block)

    def _check_runs(self, found: Inspected, commit: int, block: Block) -> None:
        runs = block.runs
        partitions = runs["partition"]
        live = (
            (runs["end_seqno"] > self._high[partitions])
            & (self._first[partitions] <= commit)
            & ~self._lost[partitions]
        )
        gap = live & (runs["start_seqno"] != self._high[partitions])
        for run in runs[gap]:
            partition, start = int(run["partition"]), int(run["start_seqno"])
            high = int(self._high[partition])
            low, end = sorted((start, high))
            words = f"commit {commit} goes on at seqno {start}, what is there ends at {high}"
            self._say(found, words, partition=partition, above=low, end=end)
            # One gap is one finding: all later commits are behind it.
            self._lost[partition] = True
        live &= ~gap
        if not live.any():
            return
        kept, held = runs[live], last_rows(block)[live]
        at = kept["partition"]
        self._high[at] = kept["end_seqno"]
        self._horizon[at] = np.maximum(self._horizon[at], kept["horizon"])
        untrue = (
            (self._horizon[at] == kept["end_seqno"]) & (self._purge[at] < kept["end_seqno"]) & ~held
        )
        for run in kept[untrue]:
            start, end = int(run["start_seqno"]), int(run["end_seqno"])
            words = f"the marker at {end} is not true: the row at {end} is missing"
            self._say(found, words, partition=int(run["partition"]), above=start, end=end)
        for partition, start, end in zip(
            at.tolist(), kept["start_seqno"].tolist(), kept["end_seqno"].tolist(), strict=True
        ):
            self._readable.add(partition, start, end)
