"""The simulated world on a disk that fails and a clock that jumps.

What the service decides when storage fails is done here in the same way: a journal record that could not be written is
tried again; after a failed fsync no write is taken until the next start, and no shutdown is clean; a flush or a merge
that failed is planned anew; a proof that could not be removed keeps everything from being numbered.
"""

import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb

from tests.simulation.cutting import CutWorld
from tests.simulation.disk import CALLS, Fault, Killed, SimulatedDisk, SimulatedStore
from tests.simulation.recording import PRODUCER
from upr.storage import journal
from upr.storage.journal import Commit
from upr.storage.keyspace import CutRow
from upr.storage.store import Store
from upr_protocol.errors import StorageFailedError
from upr_protocol.limits import PRODUCER_SECONDS, PRODUCERS_MAX
from upr_protocol.wire.codec import decode_block

SECOND = 1_000_000
HOUR = 3600 * SECOND
BEGINNING = 1_700_000_000 * SECOND
SEGMENTS = (400, 2_000, journal.SEGMENT_BYTES)
"""Bytes of a journal's segments, one for each world; a record has a few hundred."""
TROUBLE = (0.008, 0.025, 0.06)
"""How likely something is about to go wrong at a step, one for each world."""
FAILED = (OSError, lmdb.Error)


class FaultyWorld(CutWorld):
    """Loses power, meets errors of the disk, and has its clock set."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.fault_rng = random.Random(seed)
        self.disk: SimulatedDisk | None = None
        self.jumped = 0
        self.doubtful: dict[int, int] = {}
        """By partition, where a record ends of which nobody knows whether it is on disk."""
        self.strays: set[str] = set()
        """Cuts that nobody holds, and that may be stored."""
        self.trouble = random.Random(seed).choice(TROUBLE)
        journal.SEGMENT_BYTES = random.Random(seed + 1).choice(SEGMENTS)
        super().__init__(folder, seed)
        self.now = BEGINNING

    @property
    def elapsed(self) -> int:
        return self.now - BEGINNING - self.jumped

    # The process

    def open_store(self) -> Store:
        assert self.disk is not None
        return SimulatedStore(self.bucket_folder / "store", self.disk)

    def open(self) -> None:
        """Start, as often as it takes; ``proven`` says what the first start found."""
        if self.disk is None:
            self.disk = SimulatedDisk(self.bucket_folder / "journal", self.fault_rng)
            journal.os = self.disk  # type: ignore[assignment, attr-defined]
        found: list[bool] = []
        while True:
            try:
                super().open()
                break
            except (Killed, *FAILED):
                found.append(self.proven)
                self.store.close()
                self.disk.crash(power=self.disk.power_lost or self.fault_rng.random() < 0.3)
                self.count("starts that failed")
        self.proven = [*found, self.proven][0]

    def close(self) -> None:
        assert self.disk is not None
        for what, count in self.disk.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        self.disk.counts = {}
        super().close()

    def crash(self, *, power: bool | None = None) -> None:
        assert self.disk is not None
        self.disk.crash(power=self.fault_rng.random() < 0.5 if power is None else power)
        super().crash()

    def settle_doubt(self) -> None:
        """A record of unknown fate is there whole or not at all; from now on it is the one or the other."""
        high = {p: int(self.bucket.partitions.high[p]) for p in self.doubtful}
        if self.doubtful and high == self.doubtful:
            self.durable_model.update(self.doubtful)
            self.count("records that were there after all")
        self.doubtful = {}

    def restart_clean(self) -> None:
        nothing_numbered = self.bucket.proven
        clean = self.stop()
        self.crash()
        assert self.proven == (clean or nothing_numbered), "the proof is not what was said"
        if clean:
            assert self.bucket.tail.end == 0
            self.count("clean stops")

    def stop(self) -> bool:
        """Commit and flush everything, and prove that it was done; False when that was not possible."""
        try:
            while self.step_commit(whole=True):
                if self.commit is not None:
                    self.bucket.fail(StorageFailedError("the journal could not be written"))
                    return False
            if self.bucket.failure is not None:
                return False
            while super().step_flush():
                pass
            if self.bucket.tail.first != self.bucket.tail.end:
                return False
            super().save_consumers()
            self.store.write_proof(self.bucket.partitions.high)
        except FAILED:
            return False
        return True

    # Its work

    def step(self, population: Sequence[Callable[[], bool]]) -> None:
        assert self.disk is not None
        self.set_clock()
        self.arm(self.disk)
        try:
            if self.bucket.failure is not None and self.fault_rng.random() < 0.05:
                self.restart_clean()
            elif self.fault_rng.random() < 0.01:
                self.forget_producers()
            else:
                super().step(population)
        except Killed:
            self.count("crashes")
            self.crash(power=self.disk.power_lost)

    def arm(self, disk: SimulatedDisk) -> None:
        rng = self.fault_rng
        if len(disk.faults) > 1 or rng.random() > self.trouble:
            return
        kind = rng.random()
        left = rng.randint(1, 4)
        if kind < 0.4:
            disk.faults.append(Fault(CALLS, rng.randint(1, 12), power=rng.random() < 0.7))
        elif kind < 0.7:
            call = rng.choice(("open", "create", "write", "ftruncate", "unlink", "commit"))
            error = rng.choice((errno.ENOSPC, errno.EIO))
            disk.faults.append(Fault((call,), left, error, times=rng.choice((1, 1, 3))))
        elif kind < 0.85:
            disk.faults.append(Fault(("fsync",), left, errno.EIO, times=rng.choice((1, 2))))
        else:
            full = ("create", "write", "commit")
            disk.faults.append(Fault(full, left, errno.ENOSPC, times=rng.randint(3, 30)))

    def set_clock(self) -> None:
        """Now and then let hours pass, or set the clock by seconds to days."""
        rng = self.fault_rng
        chance = rng.random()
        if chance < 0.01:
            self.now += rng.randint(SECOND, 4 * HOUR)
        elif chance < 0.03:
            far = rng.choice((SECOND, HOUR, 24 * HOUR))
            jump = rng.randint(0, 3 * far) if rng.random() < 0.5 else -rng.randint(0, 2 * far)
            self.now += jump
            self.jumped += jump
            self.count("clock jumps")

    def step_write(self) -> bool:
        if self.bucket.failure is not None:
            self.count("writes refused")
            return False
        proven = self.bucket.proven
        try:
            return super().step_write()
        except Killed:
            if proven:
                # It was there, else the proof would not have been removed.
                self.recorder.add(
                    "sent", producer=PRODUCER, number=self.producer_number + 1, rows=[]
                )
            raise
        except FAILED:
            assert self.bucket.proven, "something was numbered"
            self.count("writes refused")
            return True

    def append(self, commit: Commit) -> bool:
        doubtful = {
            int(run["partition"]): int(run["end_seqno"])
            for entry in commit.entries
            for run in decode_block(entry.block).runs
        }
        self.doubtful = doubtful
        try:
            self.journal.append(commit)
        except StorageFailedError as error:
            self.bucket.fail(error)
            self.commit = None
            self.count("failed storages")
            return False
        except OSError:
            # Nothing of it remains; it is tried again.
            self.doubtful = {}
            self.count("appends repeated")
            return False
        self.doubtful = {}
        return True

    def step_flush(self) -> bool:
        try:
            return super().step_flush()
        except FAILED:
            if self.plan is not None:
                self.bucket.end_flush(complete=False)
                self.plan = None
            self.count("flushes repeated")
            return True

    def step_merge(self) -> bool:
        try:
            self.expire_cuts()
            return super().step_merge()
        except FAILED:
            self.compactor.give_up()
            self.count("merges repeated")
            return True

    def save_consumers(self) -> None:
        changes = self.bucket.consumer_positions.take_changes(10_000)
        if changes is not None:
            try:
                self.store.put_consumers(changes.rows())
            except FAILED:
                self.bucket.consumer_positions.put_back(changes)

    def forget_producers(self) -> None:
        """Nobody relies on a producer's number that is as old by the clock."""
        before = self.now - PRODUCER_SECONDS * SECOND
        self.unanswered = [
            one
            for one in self.unanswered
            if one[2] is not None and int(one[2].runs["time"].max()) >= before
        ]
        try:
            if self.store.forget_producers(before, PRODUCERS_MAX).names:
                self.count("producers forgotten")
        except FAILED:
            self.count("producers not forgotten")

    # Cuts

    @property
    def cut_clock(self) -> int:
        return self.now

    def check_cuts(self, known: dict[str, CutRow]) -> None:
        assert self.held.items() <= known.items(), "a cut that is held is gone"
        assert known.keys() - self.held.keys() <= self.strays

    def store_cuts(self, changes: dict[str, CutRow | None]) -> bool:
        self.strays |= changes.keys()
        try:
            return super().store_cuts(changes)
        except FAILED:
            return False

    def release(self, name: str) -> None:
        """Whoever gives a cut up does not rely on it, whatever the answer."""
        self.give_up(name)
        cut = self.bucket.cuts.remove(name)
        assert cut is not None
        if self.store_cuts({name: None}):
            self.bucket.cuts.forget(cut)
        else:
            self.bucket.cuts.put_back(cut)

    def expire_cuts(self) -> None:
        ended = self.bucket.cuts.ended(self.now)
        for cut in ended:
            self.bucket.cuts.forget(cut)
            if cut.name in self.held:
                self.give_up(cut.name)
                self.count("leases ended")
        if ended:
            self.store_cuts({cut.name: None for cut in ended})

    # The end

    def drain(self) -> None:
        """Nothing fails any more; what was acknowledged must have survived one more loss of power."""
        assert self.disk is not None
        self.disk.faults = []
        self.crash(power=True)
        super().drain()
