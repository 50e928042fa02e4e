"""Engine, journal and store under one seed: writes, commits, flushes, readers, crashes, in any order.

Everything runs in one thread. What the engine hands out to be done is done here, later or not at all, in an
order that the seed chooses; a crash forgets everything but the files. The reference model says what is right:
each reader compares its state with it at every marker that it may believe.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.guarantees import validate
from tests.model import ModelPartition, partition_of
from tests.raw import check_cells, with_cells
from tests.simulation.merging import SimulatedMerger
from tests.simulation.reader import KEYS, USED, Reader
from tests.simulation.recording import Recorder
from upr.engine import tail, tail_readers
from upr.engine.bucket import Bucket, FlushPlan, Written
from upr.engine.follower import Follower
from upr.engine.producers import ProducerCall
from upr.engine.recovery import recover
from upr.engine.streams import FollowOptions, Refused, RolledBack, Started
from upr.service.buckets.catalog import create_bucket
from upr.storage.compact import FlushSlice
from upr.storage.directory import DataDirectory
from upr.storage.journal import Commit, Journal
from upr.storage.read import read_blocks
from upr.storage.store import Store
from upr_protocol.block import build_block
from upr_protocol.flow import CreditWindow
from upr_protocol.wire.codec import decode_block

__all__ = ["KEYS", "USED", "Reader", "World"]

Batch = list[tuple[bytes, bytes | None]]


def choose_sizes(seed: int) -> None:
    """Choose what gathers in one entry of the tail, and what readers are given as one; a write has some hundred bytes."""
    rng = random.Random(seed + 2)
    tail.GATHER_MICROS = rng.choice((0, 2_000, 100_000))
    tail.SMALL_BYTES = rng.choice((150, 2**16, 2**16))
    tail.WINDOW_BYTES = rng.choice((3_000, 8_000, 20_000))
    tail_readers.WINDOW_MEMBERS_MIN = 1


class World:
    """One run. ``counts`` says how often what happened."""

    def __init__(self, folder: Path, seed: int) -> None:
        choose_sizes(seed)
        self.rng = random.Random(seed)
        # Apart, so that what readers store does not change what else a seed does.
        self.reader_rng = random.Random(seed)
        self.recorder = Recorder(USED)
        self.folder = folder
        self.directory = DataDirectory(folder)
        self.bucket_folder = create_bucket(self.directory, "default")
        self.model = {p: ModelPartition(0) for p in USED}
        self.counts: dict[str, int] = {}
        self.now = 1
        self.next_id = 1
        self.durable_model = dict.fromkeys(USED, 0)
        self.times: dict[int, list[int]] = {p: [] for p in USED}
        self.readers = [
            Reader("reader 0", self.recorder, memory=True),
            Reader("reader 1", self.recorder, memory=False, registered=True),
            Reader("reader 2", self.recorder, memory=True, restless=True),
            Reader("reader 3", self.recorder, memory=False, restless=True),
        ]
        self.producer_number = 0
        self.logs_before: dict[int, list[tuple[int, int]]] = {}
        """The log of each partition in the process that ended last."""
        self.unanswered: list[tuple[int, Batch, Written | None]] = []
        self.open()
        for p in USED:
            self.model[p].log = self.bucket.partitions.logs[p].to_pairs()
        self.recorder.opened(self.bucket)

    # The process

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id << 32 | 7

    def open_store(self) -> Store:
        return Store(self.bucket_folder / "store")

    def open(self) -> None:
        self.store = self.open_store()
        identity = self.store.identity()
        assert identity is not None
        self.journal = Journal(self.bucket_folder / "journal", identity.version)
        proof = self.store.proof()
        self.proven = proof is not None
        found = recover(
            self.store.partitions(),
            self.store.heads,
            self.journal.replay(needed=proof is None),
            proven=None if proof is None else proof.highs,
            new_id=self.new_id,
        )
        if found.rows:
            self.store.write_recovery(
                found.rows, found.blocks, found.cut_off, found.highs, found.producers
            )
        self.bucket = Bucket(identity, found.partitions, found.next_commit, proven=True)
        self.bucket.recovered(found.entries)
        self.bucket.consumer_positions.load(self.store.consumers())
        self.compactor = SimulatedMerger(
            self.bucket, self.store, self.model, self.times, self.rng, self.recorder
        )
        self.commit: Commit | None = None
        self.plan: FlushPlan | None = None
        self.slices: list[FlushSlice] = []
        self.producer: ProducerCall | None = None

    def close(self) -> None:
        for what, count in self.compactor.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count
        self.journal.close()
        self.store.close()

    def crash(self) -> None:
        """Forget everything but the files; the model forgets what was not durable."""
        self.logs_before = {p: self.bucket.partitions.logs[p].to_pairs() for p in self.model}
        self.recorder.ending(self.bucket)
        self.close()
        self.open()
        self.recorder.restarted(self.bucket, clean=self.proven)
        self.settle_doubt()
        for p in self.model:
            log = self.bucket.partitions.logs[p].to_pairs()
            if not self.proven:
                kept = [record for record in self.logs_before[p] if record[1] <= log[-1][1]]
                assert len(log) == min(len(kept) + 1, 25)
                self.model[p].restart_unclean(self.durable_model[p], log[-1][0])
                del self.times[p][self.model[p].high :]
            assert log == self.model[p].log, (
                f"partition {p}: log {log}, expected {self.model[p].log}"
            )
            assert int(self.bucket.partitions.high[p]) == self.model[p].high
            # A purge that was decided and not stored any more has purged nothing.
            assert int(self.bucket.partitions.purge[p]) <= self.model[p].purged
            self.model[p].purged = int(self.bucket.partitions.purge[p])
        for reader in self.readers:
            reader.drop_call()
            self.lose(reader, 0.2)

    def settle_doubt(self) -> None:
        """Take note of what turned out to be on disk: here that was known."""

    def lose(self, reader: Reader, chance: float) -> None:
        """Now and then have a reader's process end, so that it goes on with what it stored."""
        if self.reader_rng.random() < chance:
            reader.die()
            self.count("readers died")

    def restart_clean(self) -> None:
        while self.step_commit(whole=True) or self.step_flush():
            pass
        while self.compactor.step(self.now) and self.rng.random() < 0.9:
            pass
        if not self.bucket.proven:
            self.store.write_proof(self.bucket.partitions.high)
        logs = {p: self.bucket.partitions.logs[p] for p in self.model}
        self.recorder.ending(self.bucket)
        self.close()
        self.open()
        self.recorder.restarted(self.bucket, clean=True)
        assert self.bucket.tail.end == 0
        for p in self.model:
            self.model[p].purged = int(self.bucket.partitions.purge[p])
        assert logs == {p: self.bucket.partitions.logs[p] for p in self.model}
        for reader in self.readers:
            reader.drop_call()

    # Its work

    def step_write(self) -> bool:
        if not self.model:
            # Every partition is dead.
            return False
        rng = self.rng
        if self.bucket.proven:
            self.store.clear_proof()
            self.bucket.proven = False
        if self.producer is None:
            self.producer = self.bucket.open_producer(
                b"writer", self.store.producer_number(b"writer")
            )
            if self.unanswered and rng.random() < 0.7:
                self.resend()
                return True
            self.unanswered = []
        keys = [key for key in KEYS if partition_of(key) in self.model]
        batch: Batch = [
            (rng.choice(keys), None if rng.random() < 0.3 else b"%d" % rng.randrange(10**6))
            for _ in range(rng.randint(1, 6))
        ]
        self.producer_number += 1
        self.apply_batch(self.producer_number, batch)
        return True

    def apply_batch(self, number: int, batch: Batch) -> None:
        written = self.number_batch(number, batch)
        assert not written.duplicate
        for key, value in batch:
            self.model[partition_of(key)].write(key, value)
            self.times[partition_of(key)].append(self.now)
        for run in written.runs:
            assert int(run["end_seqno"]) == self.model[int(run["partition"])].high
        self.unanswered.append((number, batch, written))

    def number_batch(self, number: int, batch: Batch) -> Written:
        self.now += self.rng.randint(1, 1000)
        block = with_cells(build_block([k for k, _ in batch], [v for _, v in batch]))
        self.recorder.sent(number, batch)
        stored = self.store.producer_rows(b"writer")
        written = self.bucket.write(block, b"writer", self.producer, number, self.now, stored)
        self.recorder.written(number, written, self.bucket.tail.durable)
        return written

    def resend(self) -> None:
        """Send what was not answered again, after a crash: each of it is applied exactly once."""
        pending, self.unanswered = self.unanswered, []
        for number, batch, old in pending:
            touched = {partition_of(key) for key, _ in batch}
            assert old is not None
            survived = [
                int(r["end_seqno"]) <= self.durable_model[int(r["partition"])] for r in old.runs
            ]
            # One journal record holds the whole batch, so all of it is there or none.
            assert len(set(survived)) == 1, f"batch {number} over {touched} was torn apart"
            if survived[0]:
                again = self.number_batch(number, batch)
                assert again.duplicate
                for told, first in zip(again.runs, old.runs, strict=True):
                    assert int(told["end_seqno"]) in (int(first["end_seqno"]), 0)
                self.count("duplicates")
            else:
                self.apply_batch(number, batch)

    def step_commit(self, *, whole: bool = False) -> bool:
        """Take a commit, or have the one that is out done."""
        if self.commit is None:
            self.commit = self.bucket.take_commit()
            if self.commit is None:
                return False
            if not whole and self.rng.random() < 0.5:
                return True
        if not self.append(self.commit):
            return self.bucket.failure is None
        for entry in self.commit.entries:
            if len(entry.writes) > 1 or any(write.runs for write in entry.writes):
                self.count("writes that gathered")
            for run in decode_block(entry.block).runs:
                self.durable_model[int(run["partition"])] = int(run["end_seqno"])
        if whole or self.rng.random() < 0.95:
            self.bucket.commit_done(self.commit)
            self.commit = None
            self.recorder.committed(self.bucket.tail.durable)
        else:
            # On disk, and the process dies before it learns so.
            self.crash()
        return True

    def append(self, commit: Commit) -> bool:
        """Journal a commit; False when that failed."""
        self.journal.append(commit)
        return True

    def step_flush(self) -> bool:
        if self.plan is None:
            self.plan = self.bucket.begin_flush()
            if self.plan is None:
                return False
            self.slices = self.plan.prepare()
            return True
        if self.slices:
            part = self.slices.pop(0)
            merged = self.plan.merge(part)
            self.store.put_flush(
                merged.blocks,
                self.bucket.flush_ends(merged),
                self.plan.producer_rows(part, merged),
                merged.hashes,
                self.bucket.counts,
            )
            self.bucket.slice_stored(merged)
            return True
        through = self.bucket.end_flush(complete=True)
        self.plan = None
        self.journal.drop_through(through)
        self.journal.remove_dropped()
        self.count("flushes")
        return True

    def step_merge(self) -> bool:
        return self.compactor.step(self.now)

    # Readers

    def step_reader(self) -> bool:
        reader = self.rng.choice(self.readers)
        follower = reader.follower
        if follower is None:
            window = 1 if reader.restless else self.rng.choice([60, 400, 1 << 20])
            self.open_call(reader, window)
            return True
        action = self.rng.random()
        if action < 0.15:
            self.start_streams(reader, follower)
        elif action < 0.2 and reader.tokens:
            chosen = self.rng.choice(sorted(reader.tokens))
            follower.stop([chosen])
            self.recorder.add("stopped", reader=reader.name, partition=chosen)
        elif action < (0.35 if reader.restless else 0.24) and self.begin_anew(reader, follower):
            self.count("begun anew")
        elif reader.registered and action < 0.3:
            self.acknowledge(reader, follower)
        elif action > 0.98:
            self.bucket.remove_follower(follower)
            reader.drop_call()
            self.recorder.add("left", reader=reader.name)
            self.lose(reader, 0.5)
        else:
            self.read_some(reader, follower)
        return True

    def open_call(self, reader: Reader, window: int) -> Follower:
        options = FollowOptions(
            consumer=reader.name if reader.registered else "", memory=reader.memory
        )
        reader.follower = Follower(self.bucket, options, CreditWindow(window), lambda: None)
        self.bucket.add_follower(reader.follower)
        return reader.follower

    def acknowledge(self, reader: Reader, follower: Follower) -> None:
        """Acknowledge what some streams have brought, and now and then store what was acknowledged."""
        open_ones = [p for p in sorted(reader.tokens) if self.rng.random() < 0.5]
        seqnos = np.array([reader.seqnos[p] for p in open_ones], np.uint64)
        assert follower.acknowledge(np.array(open_ones, np.int64), seqnos, self.now)
        self.count("acknowledged")
        if self.rng.random() < 0.5:
            self.save_consumers()

    def save_consumers(self) -> None:
        changes = self.bucket.consumer_positions.take_changes(10_000)
        if changes is not None:
            self.store.put_consumers(changes.rows())

    def begin_anew(self, reader: Reader, follower: Follower) -> bool:
        """Have a consumer that lost everything it knew of some partitions."""
        if reader.restless and reader.tokens:
            follower.stop([p for p in sorted(reader.tokens) if self.rng.random() < 0.5])
            self.take_ended(reader, follower)
        idle = [p for p in USED if p not in reader.tokens and self.rng.random() < 0.5]
        for p in idle:
            reader.forget(p)
        if reader.restless and idle:
            self.start_streams(reader, follower)
        return bool(idle)

    def start_streams(self, reader: Reader, follower: Follower) -> None:
        requests = reader.requests(self.rng)
        for request, answer in zip(requests, follower.start(requests), strict=True):
            self.recorder.start(reader.name, request, answer, self.bucket)
            if isinstance(answer, Started):
                reader.tokens[answer.partition] = answer.token
                reader.ids[answer.partition] = answer.failover_id
            elif answer.partition not in self.model:
                assert isinstance(answer, Refused), answer
            else:
                assert isinstance(answer, RolledBack), answer
                p = answer.partition
                expected = self.model[p].start(
                    reader.ids.get(p), reader.seqnos[p], reader.ids.get(p)
                )
                assert ("rollback", answer.answer.rollback_seqno) == expected
                reader.undo(p, answer.answer.rollback_seqno or 0, answer.answer.newest_id)
                self.count("rollbacks")

    def read_some(self, reader: Reader, follower: Follower) -> None:
        self.take_ended(reader, follower)
        outstanding = follower.credit.outstanding
        frame = follower.next_frame()
        if frame is not None:
            self.recorder.add(
                "frame",
                reader=reader.name,
                window=follower.credit.window,
                outstanding=outstanding,
                bytes=sum(map(len, frame.blocks)),
            )
            at = 0
            for data in frame.blocks:
                block = decode_block(data)
                last = at + 4 * len(block.runs)
                tokens = [
                    int.from_bytes(frame.tokens[i : i + 4], "little") for i in range(at, last, 4)
                ]
                reader.receive(block, tokens, self.model)
                if check_cells(block):
                    self.count("cells")
                at = last
            assert at == len(frame.tokens)
            self.count("frames")
            if self.reader_rng.random() < 0.1:
                for p in self.reader_rng.sample(USED, len(USED) // 2):
                    reader.store(p)
        if reader.read is None:
            wanted = follower.next_read()
            if wanted is not None:
                reader.read = read_blocks(self.store, *wanted)
        if reader.read is not None and self.rng.random() < 0.5:
            # What was read may be old by the time it arrives.
            follower.feed(reader.read)
            reader.read = None
            self.count("store reads")
        if follower.credit.outstanding and self.rng.random() < 0.7:
            follower.credit.give_back(follower.credit.outstanding)
        self.take_ended(reader, follower)

    def take_ended(self, reader: Reader, follower: Follower) -> None:
        for ended in follower.take_ended():
            for partition, token, seqno in ended.streams:
                if reader.tokens.get(partition) == token:
                    assert seqno == reader.seqnos[partition], (
                        "it ended where the frames do not reach"
                    )
                    del reader.tokens[partition]
                    self.recorder.add(
                        "ended",
                        reader=reader.name,
                        partition=partition,
                        token=token,
                        reason=ended.why.reason,
                    )
            self.count(ended.why.reason)

    def drain(self) -> None:
        """Have every reader read to the end, and compare with the model whole."""
        while self.step_commit(whole=True):
            pass
        while self.compactor.step(self.now):
            pass
        for reader in self.readers:
            if reader.follower is None:
                self.open_call(reader, 1 << 20)
            assert reader.follower is not None
            follower = reader.follower
            for _ in range(10_000):
                if all(
                    reader.seqnos[p] == self.model[p].high and p in reader.tokens
                    for p in self.model
                ):
                    break
                self.start_streams(reader, follower)
                self.read_some(reader, follower)
            for p in self.model:
                assert reader.seqnos[p] == self.model[p].high, (
                    f"{reader.name}: partition {p} stalled"
                )
                assert reader.states[p] == self.model[p].state_at(self.model[p].high)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def elapsed(self) -> int:
        """Microseconds that have passed since the world began."""
        return self.now - 1

    def step(self, population: Sequence[Callable[[], bool]]) -> None:
        chance = self.rng.random()
        if chance < 0.01:
            self.crash()
            self.count("crashes")
        elif chance < 0.013:
            self.restart_clean()
            self.count("clean restarts")
        else:
            self.rng.choice(population)()

    def run(self, steps: int) -> None:
        choices = (
            (self.step_write, 30),
            (self.step_commit, 25),
            (self.step_flush, 20),
            (self.step_reader, 80),
            (self.step_merge, 20),
        )
        population = [step for step, weight in choices for _ in range(weight)]
        for _ in range(steps):
            self.step(population)
        self.drain()
        self.recorder.add(
            "settled",
            readers=[reader.name for reader in self.readers],
            high={p: model.high for p, model in self.model.items()},
        )
        self.close()
        self.directory.close()
        validate(self.recorder.history)
