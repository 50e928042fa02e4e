"""The journal on a disk that fails and loses power: what was acknowledged comes back, and the journal can be read."""

import errno
import random
from pathlib import Path

import pytest

from tests.simulation.disk import CALLS, Fault, Killed, SimulatedDisk
from upr.storage import journal as journal_module
from upr.storage.journal import Commit, Journal, JournalEntry, NumberedWrite
from upr_protocol.errors import StorageFailedError

SEEDS = 200
STEPS = 40


class Life:
    """A journal that is written, dropped, killed and started again."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        folder.mkdir()
        self.folder = folder
        self.disk = SimulatedDisk(folder, self.rng)
        self.acknowledged = self.dropped = 0
        self.doubtful = False
        self.content: dict[int, Commit] = {}
        self.stopped = False

    def start(self) -> None:
        while True:
            try:
                self.journal = Journal(self.folder, 7)
                found = list(self.journal.replay())
                break
            except (Killed, OSError):
                self.disk.crash(power=self.disk.power_lost or self.rng.random() < 0.3)
        numbers = [commit.number for commit in found]
        last = max([self.dropped, *numbers])
        assert last in (self.acknowledged, self.acknowledged + self.doubtful)
        assert set(range(self.dropped + 1, last + 1)) <= set(numbers)
        assert all(commit == self.content[commit.number] for commit in found)
        self.acknowledged, self.doubtful, self.stopped = last, False, False

    def append(self) -> None:
        number = self.acknowledged + 1
        if self.stopped:
            return
        if not self.doubtful:
            data = self.rng.randbytes(self.rng.randint(1, 300))
            self.content[number] = Commit(
                number, (JournalEntry(data, (NumberedWrite(b"p", number),)),)
            )
        self.doubtful = True
        try:
            self.journal.append(self.content[number])
        except StorageFailedError:
            self.stopped = True
        except OSError:
            return
        else:
            self.acknowledged, self.doubtful = number, False

    def drop(self) -> None:
        self.dropped = self.rng.randint(self.dropped, self.acknowledged)
        self.journal.drop_through(self.dropped)

    def remove(self) -> None:
        self.journal.remove_dropped()

    def crash(self, *, power: bool) -> None:
        self.disk.crash(power=power)
        self.start()

    def arm(self) -> None:
        rng = self.rng
        if rng.random() < 0.3 and len(self.disk.faults) < 2:
            error = rng.choice((0, errno.EIO, errno.ENOSPC))
            calls = CALLS if not error else (rng.choice(CALLS[:6]),)
            self.disk.faults.append(Fault(calls, rng.randint(1, 5), error, rng.random() < 0.5))

    def step(self) -> None:
        self.arm()
        chance = self.rng.random()
        try:
            if chance < 0.05:
                self.crash(power=self.rng.random() < 0.5)
            elif chance < 0.2:
                self.drop()
            elif chance < 0.3:
                self.remove()
            else:
                self.append()
        except OSError:
            pass
        except Killed:
            self.crash(power=self.disk.power_lost)


@pytest.mark.long
def test_whatever_the_disk_does_what_was_acknowledged_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS):
        life = Life(tmp_path / str(seed), seed)
        monkeypatch.setattr(journal_module, "os", life.disk)
        monkeypatch.setattr(journal_module, "SEGMENT_BYTES", (200, 1000)[seed % 2])
        monkeypatch.setattr(journal_module, "ROOM_BYTES", 2**14)
        try:
            life.start()
            for _ in range(STEPS):
                life.step()
            life.disk.faults = []
            life.crash(power=True)
            life.crash(power=False)
            life.disk.crash(power=False)
        except BaseException:
            print(f"failing seed: {seed}")
            raise


def test_a_segment_found_by_a_start_has_a_durable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        life = Life(tmp_path / str(seed), seed)
        monkeypatch.setattr(journal_module, "os", life.disk)
        # The header is synced, and the process ends before the folder is.
        life.disk.faults = [Fault(("fsync",), 2)]
        with pytest.raises(Killed):
            list(Journal(life.folder, 7).replay())
        life.disk.crash(power=False)
        life.start()
        life.append()
        assert life.acknowledged == 1
        life.crash(power=True)
        life.disk.crash(power=False)


def test_what_was_taken_back_does_not_come_back_before_newer_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        life = Life(tmp_path / str(seed), seed)
        monkeypatch.setattr(journal_module, "os", life.disk)
        life.start()
        life.append()
        life.disk.faults = [Fault(("write",), 1, errno.ENOSPC)]
        life.append()
        assert (life.acknowledged, life.stopped) == (1, False)
        # A new segment is begun, and the old one cannot be removed.
        life.disk.faults = [Fault(("unlink",), 1, errno.EIO)]
        life.journal.drop_through(1)
        with pytest.raises(OSError, match="Errno 5"):
            life.remove()
        life.append()
        assert life.acknowledged == 2
        life.crash(power=True)
        life.disk.crash(power=False)
