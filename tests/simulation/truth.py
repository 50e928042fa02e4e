"""What is true in a set of servers: everything that was ever numbered, by the id under which it was, and every history.

It is taken down where the engine numbers a write and where it takes over a log, whichever server that is, and is never
asked of a server again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.model import Row, State, apply, partition_of
from tests.raw import all_rows
from tests.simulation.looping import SimulatedLoop, running
from upr.engine import compaction
from upr.engine.bucket import Bucket
from upr.engine.partitions import Partitions
from upr.engine.recovery import Undo
from upr.engine.tail import Tail
from upr.replica.ownership import Ownership
from upr.replica.upstream_stream import UpstreamStream
from upr.service import key_value
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS
from upr_protocol.ownership import Claim
from upr_protocol.ownership import Row as OwnerRow

USED = sorted({partition_of(b"key%d" % i) for i in range(4)})
KEYS = [key for i in range(2500) if partition_of(key := b"key%d" % i) in USED]
"""Some in each partition, so that a snapshot has parts."""
Log = tuple[tuple[int, int], ...]


class Violation(Exception):
    """Something that was promised does not hold."""


class Numbered(NamedTuple):
    """A mutation as it was numbered.

    Args:
        write: producer, number, and which of its rows.
        epoch: of the server's partition then.
        place: the disk of the server that numbered it.
    """

    row: Row
    write: tuple[bytes, int, int]
    epoch: int
    place: str


class Change(NamedTuple):
    """A change of owner.

    Args:
        place: the disk of the new owner.
        in_step: whether the new owner was in step, or had been since it last received anything, when that was ordered.
        heard: what each server that promised held: by partition its newest id and last complete marker.
    """

    epoch: int
    place: str
    forced: bool
    in_step: bool
    heard: list[dict[int, tuple[int, int]]]


class Truth:
    """Everything that was numbered in partitions USED, and every change of owner."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], Numbered] = {}
        self.logs: dict[tuple[int, int], Log] = {}
        self.changes: list[Change] = []
        self.purged: dict[int, int] = {}
        """By partition, the largest purge seqno of any server."""
        self.received_anew: dict[tuple[int, str], int] = {}
        """By partition and server, up to where it dropped what its upstream had too, from some marker on."""
        self._forcing: set[str] = set()
        self._out_of_step: set[str] = set()
        self._states: dict[tuple[int, int], tuple[int, State]] = {}
        self._owners: dict[int, str] = {}
        self._replaced: dict[SimulatedLoop, int] = {}
        self.told_while_active = 0
        self._numbering: Bucket | None = None

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Take down what engines do from now on."""
        self._watch_owners(patch)
        patch.setattr(Bucket, "_numbered", self._before(Bucket._numbered))
        patch.setattr(UpstreamStream, "_undo", self._dropping(UpstreamStream._undo))
        write, set_log, from_rows = Tail.write, Partitions.set_log, Partitions.from_rows
        tell_raised = compaction._tell_raised

        def written(tail: Tail, block: Any, producer: bytes, number: int, *rest: int) -> int:
            self._numbered(block, producer, number)
            return write(tail, block, producer, number, *rest)

        def log_set(table: Partitions, partition: int, log: FailoverLog) -> None:
            set_log(table, partition, log)
            self._logged(partition, log)

        def raised(bucket: Bucket, partitions: Sequence[int]) -> None:
            for p in partitions:
                self.purged[p] = max(self.purged.get(p, 0), int(bucket.partitions.purge[p]))
            tell_raised(bucket, partitions)

        def opened(rows: Any) -> Partitions:
            table = from_rows(rows)
            for partition in USED:
                self._logged(partition, table.logs[partition])
            return table

        patch.setattr(compaction, "_tell_raised", raised)
        patch.setattr(Tail, "write", written)
        patch.setattr(Partitions, "set_log", log_set)
        patch.setattr(Partitions, "from_rows", staticmethod(opened))

    def _watch_owners(self, patch: pytest.MonkeyPatch) -> None:
        promote, drive, serve = Ownership.promote, Ownership._drive, Ownership._serve

        async def promoted(ownership: Ownership, **how: Any) -> Any:
            known = ownership.in_step or ownership.inventory.is_whole
            (self._out_of_step.discard if known else self._out_of_step.add)(running().place)
            return await promote(ownership, **how)

        async def driven(
            ownership: Ownership, claim: Claim, answers: Any, force: bool, takeover: bool
        ) -> Any:
            place = running().place
            (self._forcing.add if force else self._forcing.discard)(place)
            return await drive(ownership, claim, answers, force, takeover)

        async def served(ownership: Ownership, claim: Claim, step: Any, versions: list[int]) -> Any:
            place, places = running().place, range(len(versions))
            heard = [
                {
                    p: (int(held["id"]), int(held["marker"]))
                    for i in places
                    for p in USED
                    if (held := promise.held[i * PARTITIONS + p])["id"]
                }
                for promise in claim._heard.values()
            ]
            forced, in_step = place in self._forcing, place not in self._out_of_step
            self.changes.append(Change(claim.row.epoch, place, forced, in_step, heard))
            self._replaced.pop(running(), None)
            return await serve(ownership, claim, step, versions)

        patch.setattr(Ownership, "promote", promoted)
        patch.setattr(Ownership, "_drive", driven)
        patch.setattr(Ownership, "_serve", served)
        self._watch_answers(patch)

    def _watch_answers(self, patch: pytest.MonkeyPatch) -> None:
        """Have no process acknowledge what it numbered once it was told, as the owner, of a higher epoch."""
        learned, result = Ownership.learned, key_value._result

        async def told(ownership: Ownership, row: OwnerRow, epoch: int) -> None:
            after = ownership.standing.learned(row).met(epoch)
            if ownership.active and not after.owns:
                self._replaced[running()] = after.epoch
                self.told_while_active += 1
            await learned(ownership, row, epoch)

        def answered(pending: Any) -> Any:
            written, replaced = pending.written, self._replaced.get(running(), 0)
            if pending.error is None and pending.copies != key_value._MEMORY and replaced:
                for run, given in zip(written.runs, written.failover_ids.tolist(), strict=True):
                    row = self.rows.get((int(run["partition"]), given, int(run["end_seqno"])))
                    if row is not None and row.epoch < replaced:
                        words = f"{row} was acknowledged by one that knew of epoch {replaced}"
                        running().broken = Violation(words)
            return result(pending)

        patch.setattr(Ownership, "learned", told)
        patch.setattr(key_value, "_result", answered)

    def may_be_lost(self, partition: int, given: int, seqno: int) -> bool:
        """Return whether a mutation was at no server that was heard when a promotion was forced.

        It may also be of an owner that went on in its epoch, which another one was forced to have too.
        """
        numbered = self.rows.get((partition, given, seqno))
        if numbered is None:
            return False
        forced = {change.epoch for change in self.changes if change.forced}
        return any(
            change.epoch in forced
            and (
                change.epoch > numbered.epoch
                or (change.epoch == numbered.epoch and change.place != numbered.place)
            )
            and not any(
                partition in held and self.has(partition, *held[partition], given, seqno)
                for held in change.heard
            )
            for change in self.changes
        )

    def has(self, partition: int, newest: int, marker: int, given: int, seqno: int) -> bool:
        """Return whether who has an id's history up to a marker has a mutation."""
        log = self.logs[partition, newest]
        ids = [one for one, _ in log]
        if given not in ids or seqno > marker:
            return False
        at = ids.index(given)
        ends = marker if at + 1 == len(log) else log[at + 1][1]
        return log[at][1] < seqno <= ends

    def _before(self, number: Callable[..., Any]) -> Callable[..., Any]:
        def numbered(bucket: Bucket, runs: Any, now: int) -> Any:
            self._numbering = bucket
            return number(bucket, runs, now)

        return numbered

    def _dropping(self, find: Callable[..., Undo | None]) -> Callable[..., Undo | None]:
        def found(stream: UpstreamStream, partition: int, *told: Any) -> Undo | None:
            undo = find(stream, partition, *told)
            if undo is not None:
                place = partition, running().place
                there = undo.seqno if undo.lost else int(stream._table.high[partition])
                self.received_anew[place] = max(there, self.received_anew.get(place, 0))
            return undo

        return found

    def _numbered(self, block: Any, producer: bytes, number: int) -> None:
        bucket, self._numbering = self._numbering, None
        assert bucket is not None
        table = bucket.partitions
        for at, (p, seqno, key, value) in enumerate(all_rows([block])):
            given, epoch = int(table.newest_id[p]), int(table.epoch[p])
            if (p, given, seqno) in self.rows:
                raise Violation(f"seqno {seqno} of partition {p} was given twice under id {given}")
            place = running().place
            owner = self._owners.setdefault(epoch, place)
            forced = any(change.forced and change.epoch == epoch for change in self.changes)
            if owner != place and not forced:
                raise Violation(f"{owner} and {place} are active in epoch {epoch}")
            write = producer, number, at
            self.rows[p, given, seqno] = Numbered(Row(seqno, key, value), write, epoch, place)

    def _logged(self, partition: int, log: FailoverLog) -> None:
        if partition in USED:
            pairs = tuple(log.to_pairs())
            known = self.logs.setdefault((partition, pairs[-1][0]), pairs)
            if known != pairs:
                raise Violation(f"partition {partition}: one id, two histories: {known}, {pairs}")

    def history(self, partition: int, newest: int, seqno: int, above: int = 0) -> list[Numbered]:
        """Return what a partition is made of above one seqno up to another, in the history of an id."""
        log = self.logs[partition, newest]
        found, at = [], len(log) - 1
        for one in range(seqno, above, -1):
            while at and log[at][1] >= one:
                at -= 1
            numbered = self.rows.get((partition, log[at][0], one))
            if numbered is None:
                raise Violation(f"nobody wrote seqno {one} of partition {partition}, {log}")
            found.append(numbered)
        return found[::-1]

    def state(self, partition: int, newest: int, seqno: int) -> State:
        """Return what a partition is at a seqno, in the history of an id."""
        # Most ask for the newest: from the state that was asked for last it is not far.
        at, known = self._states.get((partition, newest), (0, {}))
        if at > seqno:
            at, known = 0, {}
        rows = [one.row for one in self.history(partition, newest, seqno, at)]
        state = apply(dict(known), rows)
        self._states[partition, newest] = seqno, state
        return dict(state)

    def check_once(self, partition: int, newest: int, seqno: int) -> None:
        """Raise if a mutation of a write is there twice.

        A promotion that was forced at a server out of step gives up the numbers of producers: what was written before it
        and is sent again is applied again.
        """
        given_up = [change.epoch for change in self.changes if change.forced and not change.in_step]
        epochs: dict[tuple[bytes, int, int], int] = {}
        for one in self.history(partition, newest, seqno):
            before = epochs.get(one.write)
            if before is not None and not any(before < epoch <= one.epoch for epoch in given_up):
                raise Violation(f"partition {partition}: {one.write} was applied twice")
            epochs[one.write] = one.epoch
