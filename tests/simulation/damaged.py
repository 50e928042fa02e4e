"""The simulated world in which the disk loses the end of the journal, and older copies of the data are put back.

With a clean-shutdown proof what is missing is damage of the partitions that it is missing of, and the others go on.
Without one it may be taken for torn, and there is a failover record. What was numbered is never numbered again under
the same id, and readers are told.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.model import ModelPartition
from tests.simulation.world import USED, World
from upr.engine.partitions import DEAD
from upr_protocol.errors import DataDamagedError

COPIES = 3


@dataclass(frozen=True)
class Copy:
    """A copy of a bucket's folder that no process has open, and what is true of it."""

    folder: Path
    model: dict[int, ModelPartition]
    durable: dict[int, int]
    times: dict[int, list[int]]
    logs: dict[int, list[tuple[int, int]]]


class DamagedWorld(World):
    """Damages the journal's end between two processes, and puts back copies.

    Attributes:
        copies: older states that may be put back.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.copies: list[Copy] = []
        self._whole: dict[Path, bytes] | None = None
        self._to_do: Callable[[], None] | None = None
        self._put_back: Copy | None = None
        super().__init__(folder, seed)

    def step(self, population: Sequence[Callable[[], bool]]) -> None:
        chance = self.rng.random()
        whole = len(self.model) == len(USED)
        if whole and (chance < 0.008 or not self.copies):
            self.crash_with(self.take_copy)
        elif chance < 0.014 or (not whole and chance < 0.05):
            self.crash_with(self.put_back_a_copy)
        elif chance < 0.03:
            if self.rng.random() < 0.5:
                # A start that is not clean writes a proof beside what the journal has.
                self.crash()
            self.crash_with(self.damage)
        else:
            super().step(population)

    def crash_with(self, do: Callable[[], None]) -> None:
        """Have something done to the files while no process has them open."""
        self._to_do = do
        if do == self.take_copy and self.rng.random() < 0.5:
            self.restart_clean()
        else:
            self.crash()

    def restart_clean(self) -> None:
        super().restart_clean()
        self.recorder.leave_out(set(USED) - self.model.keys())

    def open(self) -> None:
        if self._to_do is not None:
            do, self._to_do = self._to_do, None
            do()
        try:
            super().open()
        except DataDamagedError:
            assert self._whole is not None, "nothing was damaged"
            self.store.close()
            self.journal.close()
            for path, data in self._whole.items():
                path.write_bytes(data)
            self._whole = None
            self.count("starts refused")
            super().open()

    # Damage

    def damage(self) -> None:
        """Flip, cut or remove the end of the journal, or remove all of it."""
        rng = self.rng
        segments = sorted((self.bucket_folder / "journal").glob("*.journal"))
        self._whole = {path: path.read_bytes() for path in segments}
        newest = segments[-1]
        data = bytearray(newest.read_bytes())
        how = rng.choice(("flip", "flip", "cut", "cut", "newest", "all"))
        if how == "flip":
            at = max(len(data) - rng.randint(1, 800), 0)
            data[at] ^= 1 << rng.randrange(8)
            newest.write_bytes(data)
        elif how == "cut":
            newest.write_bytes(data[: max(len(data) - rng.randint(1, 800), 0)])
        else:
            for path in segments if how == "all" else segments[-1:]:
                path.unlink()
        self.count(f"damage: {how}")

    def settle_doubt(self) -> None:
        if self._put_back is not None:
            self._become(self._put_back)
            self._put_back = None
        elif self._whole is not None:
            self._whole = None
            self._note_damage()
        self.recorder.leave_out(set(USED) - self.model.keys())

    def _note_damage(self) -> None:
        table = self.bucket.partitions
        lost = False
        for p in list(self.model):
            high = int(table.high[p])
            if table.state[p] == DEAD:
                assert self.proven, "without a proof nobody can say that something is missing"
                del self.model[p]
                self.count("partitions dead")
                lost = True
            elif self.proven:
                assert high == self.model[p].high, f"partition {p} is served without its end"
            else:
                assert high <= self.durable_model[p]
                lost = lost or high < self.durable_model[p]
                self.durable_model[p] = high
        if lost:
            self.unanswered = []
            self.recorder.history[-1]["damaged"] = True
            self.count("ends lost with proof" if self.proven else "ends lost without proof")

    # Copies

    def take_copy(self) -> None:
        """Keep the files as they are now."""
        if len(self.copies) == COPIES:
            shutil.rmtree(self.copies.pop(0).folder)
        self.count("copies")
        folder = self.folder.parent / f"{self.folder.name}-copy-{self.counts['copies']}"
        shutil.copytree(self.bucket_folder, folder)
        self.copies.append(
            Copy(
                folder,
                copy.deepcopy(self.model),
                dict(self.durable_model),
                copy.deepcopy(self.times),
                {p: list(model.log) for p, model in self.model.items()},
            )
        )

    def put_back_a_copy(self) -> None:
        """Have an older state in place of the newest; a copied proof proves nothing."""
        self._put_back = self.rng.choice(self.copies)
        shutil.rmtree(self.bucket_folder)
        shutil.copytree(self._put_back.folder, self.bucket_folder)
        self.count("copies put back")

    def _become(self, older: Copy) -> None:
        """The truth is the copy's now, which was made when all partitions were alive."""
        assert not self.proven
        # In its order, which the compactor relies on.
        self.model.clear()
        self.model.update(copy.deepcopy(older.model))
        self.durable_model.update(older.durable)
        self.times.update(copy.deepcopy(older.times))
        self.logs_before = dict(older.logs)
        self.unanswered = []
        self.recorder.history[-1]["put_back"] = {p: list(log) for p, log in older.logs.items()}
