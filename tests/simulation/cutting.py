"""The simulated world with cuts: readers follow exactly to them while everything else goes on."""

from pathlib import Path

from tests.model import Row, State, apply
from tests.raw import all_rows, check_cells
from tests.simulation.world import USED, World
from upr.engine.follower import Follower
from upr.engine.streams import FollowOptions, Refused, Started, StartRequest
from upr.storage.keyspace import CutRow
from upr.storage.read import ReadResult, read_blocks
from upr_protocol.flow import CreditWindow
from upr_protocol.wire.codec import decode_block

LEASE = 20_000


class ExactReader:
    """Follows every partition to a cut. What it has when a stream is finished must be the state as of the pin."""

    def __init__(self, world: "CutWorld", name: str, row: CutRow) -> None:
        self.name = name
        self.row = row
        self.world = world
        self.follower: Follower | None = None
        self.read: list[ReadResult] | None = None
        self.tokens: dict[int, int] = {}
        self.seqnos = dict.fromkeys(USED, 0)
        self.states: dict[int, State] = {p: {} for p in USED}
        self.left = set(USED)

    def step(self) -> None:
        rng = self.world.rng
        if self.follower is None:
            window = CreditWindow(rng.choice([60, 400, 1 << 20]))
            options = FollowOptions(memory=rng.random() < 0.5)
            self.follower = Follower(self.world.bucket, options, window, lambda: None)
            self.world.bucket.add_follower(self.follower)
            self.start(self.follower)
        self.take_ended(self.follower)
        frame = self.follower.next_frame()
        if frame is not None:
            tokens = iter(memoryview(frame.tokens).cast("I"))
            for data in frame.blocks:
                block = decode_block(data)
                check_cells(block)
                rows: dict[int, list[Row]] = {}
                for partition, seqno, key, value in all_rows([block]):
                    rows.setdefault(partition, []).append(Row(seqno, key, value))
                for run in block.runs:
                    self.take_run(run, next(tokens), rows)
        if self.read is None and (wanted := self.follower.next_read()) is not None:
            self.read = read_blocks(self.world.store, *wanted)
        elif self.read is not None:
            self.follower.feed(self.read)
            self.read = None
        if self.follower.credit.outstanding:
            self.follower.credit.give_back(self.follower.credit.outstanding)
        self.take_ended(self.follower)

    def start(self, follower: Follower) -> None:
        for p in sorted(self.left):
            pin = self.row.pins[p]
            newest = int(self.world.bucket.partitions.newest_id[p])
            known = newest if self.seqnos[p] else None
            request = StartRequest(p, known, self.seqnos[p], known, until_exact=pin.seqno)
            (answer,) = follower.start([request])
            if isinstance(answer, Started):
                self.tokens[p] = answer.token
            elif isinstance(answer, Refused):
                raise AssertionError(answer.error)
            else:
                # Purging has overtaken it: it begins again at 0 with the next call.
                self.seqnos[p], self.states[p] = 0, {}
                self.world.count("exact begun anew")

    def take_run(self, run: object, token: int, rows: dict[int, list[Row]]) -> None:
        p, start, end, horizon = (
            int(run[name])  # type: ignore[index]
            for name in ("partition", "start_seqno", "end_seqno", "horizon")
        )
        assert (self.tokens[p], self.seqnos[p]) == (token, start)
        assert horizon <= self.row.pins[p].seqno, "it reaches beyond the pin"
        apply(self.states[p], rows.get(p, []))
        self.seqnos[p] = end

    def take_ended(self, follower: Follower) -> None:
        for ended in follower.take_ended():
            for p, token, seqno in ended.streams:
                assert (self.tokens.pop(p), self.seqnos[p]) == (token, seqno)
                self.world.count(f"exact {ended.why.reason}")
                if ended.why.reason in ("FINISHED", "SNAPSHOT_GONE"):
                    self.world.recorder.add(
                        "cut_read",
                        name=self.name,
                        partition=p,
                        outcome=ended.why.reason,
                        state=dict(self.states[p]),
                    )
                if ended.why.reason == "FINISHED":
                    pin = self.row.pins[p].seqno
                    assert self.seqnos[p] == pin
                    assert self.states[p] == self.world.model[p].state_at(pin), (self.name, p)
                    self.left.discard(p)
                elif ended.why.reason == "SNAPSHOT_GONE":
                    assert self.name not in self.world.held, (
                        f"partition {p} is gone though {self.name} holds it: {ended.why.words}"
                    )
                    self.left.discard(p)
                else:
                    assert ended.why.reason == "PURGED"

    def leave(self) -> None:
        if self.follower is not None:
            self.world.bucket.remove_follower(self.follower)
        self.follower = None
        self.read = None
        self.tokens = {}


class CutWorld(World):
    """Makes cuts, has them read, and gives them up.

    Attributes:
        held: the cuts that were answered and whose lease was not given up.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.held: dict[str, CutRow] = {}
        self.exact: list[ExactReader] = []
        self.number = 0
        super().__init__(folder, seed)

    def open(self) -> None:
        super().open()
        self.bucket.cuts.load(self.store.cuts(), self.bucket.tail)
        for reader in self.exact:
            reader.leave()
        self.check_cuts({cut.name: cut.row() for cut in self.bucket.cuts.live(0)})

    def check_cuts(self, known: dict[str, CutRow]) -> None:
        """Compare those that a start found with those that are held."""
        assert known == self.held

    @property
    def cut_clock(self) -> int:
        """The time by which leases end: it stands still, they do not end here."""
        return 0

    def step_merge(self) -> bool:
        """Also does what concerns cuts, so that nothing of the world must know of them."""
        chance = self.rng.random()
        if chance < 0.15:
            self.make_cut()
        elif chance < 0.25 and self.held:
            self.release(self.rng.choice(sorted(self.held)))
        elif chance < 0.8 and self.exact:
            reader = self.rng.choice(self.exact)
            if self.rng.random() < 0.05:
                reader.leave()
            else:
                reader.step()
            if not reader.left:
                reader.leave()
                self.exact.remove(reader)
        else:
            return super().step_merge()
        return True

    def make_cut(self) -> None:
        if len(self.held) >= 4 or self.bucket.failure is not None:
            return
        self.number += 1
        name = f"cut {self.number}"
        cut = self.bucket.create_cut(name, USED, LEASE, self.cut_clock)
        assert {p: pin.seqno for p, pin in cut.pins.items()} == {
            p: self.model[p].high for p in USED
        }
        if self.rng.random() < 0.1:
            self.crash()
            return
        while self.bucket.tail.durable < cut.end_entry and self.bucket.failure is None:
            self.step_commit(whole=True)
        if self.bucket.failure is not None or not self.store_cuts({name: cut.row()}):
            self.bucket.cuts.forget(cut)
            return
        cut.durable = True
        self.held[name] = cut.row()
        pins = {p: pin.seqno for p, pin in cut.pins.items()}
        self.recorder.add("cut_made", name=name, pins=pins)
        self.exact += [ExactReader(self, name, cut.row()) for _ in range(self.rng.randint(1, 2))]
        self.count("cuts")

    def release(self, name: str) -> None:
        cut = self.bucket.cuts.remove(name)
        assert cut is not None
        if not self.store_cuts({name: None}):
            self.bucket.cuts.put_back(cut)
            return
        self.bucket.cuts.forget(cut)
        self.give_up(name)

    def give_up(self, name: str) -> None:
        """Take note that a cut is not held any more."""
        del self.held[name]
        self.recorder.add("cut_released", name=name)

    def store_cuts(self, changes: dict[str, CutRow | None]) -> bool:
        """Store a change; False when that failed."""
        self.store.put_cuts({name.encode(): row for name, row in changes.items()})
        return True

    def drain(self) -> None:
        """Those that are held are read whole, whatever has happened since."""
        for reader in self.exact:
            for _ in range(5_000):
                if not reader.left:
                    break
                if reader.follower is not None and not reader.tokens:
                    reader.leave()
                reader.step()
                self.step_commit(whole=True)
                super().step_merge()
            assert not reader.left, f"{reader.name} stalled"
            reader.leave()
        super().drain()
