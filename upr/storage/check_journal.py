"""Checks of a bucket's journal: its records, and that they go on where the store ends."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from upr.storage.check_blocks import Ends, last_rows, problem_of
from upr.storage.check_findings import DAMAGE, NOTE, Finding, Readable, Report
from upr.storage.journal import Commit, Inspected, Journal
from upr.storage.keyspace import PartitionRow
from upr_protocol.block import Block
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS

_DEAD = 4


class JournalCheck:
    """Goes through a journal once, without changing it.

    Args:
        folder: the bucket's folder.
        version: the bucket's version.
        rows: the partition rows that can be read.
        ends: where each partition's stored part ends; carried on.
        wanted: the partitions that are checked.
        tick: called now and then, to say that it goes on.
    """

    def __init__(
        self,
        folder: Path,
        version: int,
        rows: Mapping[int, PartitionRow],
        ends: dict[int, Ends],
        wanted: frozenset[int],
        report: Report,
        readable: Readable,
        tick: Callable[[], None],
    ) -> None:
        self._tick = tick
        self._folder = folder
        self._version = version
        self._report = report
        self._readable = readable
        self._ends = ends
        self._high = np.zeros(PARTITIONS, np.uint64)
        self._horizon = np.zeros(PARTITIONS, np.uint64)
        self._purge = np.zeros(PARTITIONS, np.uint64)
        self._first = np.zeros(PARTITIONS, np.uint64)
        self._lost = np.ones(PARTITIONS, bool)
        for partition, row in rows.items():
            # The row decides where the journal goes on, as it does at a start.
            self._high[partition] = row.stored_high
            self._horizon[partition] = ends[partition].horizon if partition in ends else 0
            self._purge[partition] = row.purge_seqno
            self._first[partition] = row.first_commit
            self._lost[partition] = row.state == _DEAD or partition not in wanted
        self._newest = 0
        self.holds_more = False

    def run(self) -> None:
        """Check everything; afterwards ``ends`` counts the journal in."""
        before = self._high.copy()
        journal = self._folder / "journal"
        if not journal.is_dir():
            self._report(Finding("the folder of the journal is missing", file="journal"))
            return
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
    ) -> None:
        where = str(found.path.relative_to(self._folder))
        self._report(Finding(words, DAMAGE, partition, above, end, where, found.offset))

    def _check_broken(self, found: Inspected) -> None:
        if not found.torn_bytes:
            self._say(found, found.problem)
            return
        where = str(found.path.relative_to(self._folder))
        words = f"the last {found.torn_bytes} bytes are "
        if found.torn_by_kill:
            words += "a record that was never finished; a restart cuts them off"
            self._report(Finding(words, NOTE, file=where, offset=found.offset))
            return
        words += "no whole record, and not what a killed process leaves: power was lost, or they were damaged; a restart cuts them off"
        self._report(Finding(words, file=where, offset=found.offset))

    def _check_commit(self, found: Inspected, commit: Commit) -> None:
        if self._newest and commit.number != self._newest + 1:
            self._say(found, f"commit {commit.number} follows commit {self._newest}")
        self._newest = commit.number
        for entry in commit.entries:
            if len(entry.producer) > NAME_BYTES_MAX:
                self._say(found, f"a producer's name has {len(entry.producer)} bytes")
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
            # One gap is one finding: behind it everything lies behind the gap.
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
