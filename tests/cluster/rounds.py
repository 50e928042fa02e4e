"""Rounds of what a cluster must survive by itself: the owner is killed or stopped, etcd is away; under writers and followers.

Each server notes when it hands answers to writes over to gRPC, by the clock that all processes of a machine share: an
owner that was stopped must not answer after the next one has begun to.
"""

import contextlib
import random
import shutil
import struct
import time
from collections import Counter
from pathlib import Path

from tests.cluster.clusters import RunningEtcd, go_on, owner_of, start_cluster, stop
from tests.conftest import StartServer
from tests.harness import STAMPS, RunningServer
from tests.replica.rounds import SAFE, Reading, Writing, shown, undone
from tests.replica.sets import topology, wait_for, wait_until_counted, wait_until_equal

PAIRS = (("disk", 2), (SAFE, 2))


def boot_seconds() -> float:
    """Return the time of the clock that the stamps are of."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClusterRounds:
    """A cluster of three servers, writers and followers; used with ``with``.

    Attributes:
        counts: what happened.
        takes: seconds from each loss of an owner to the next one's first answer.
    """

    def __init__(self, start: StartServer, etcd: RunningEtcd, folder: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.takes: list[float] = []
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._etcd = etcd
        self._folder = folder
        folder.mkdir()

        def stamping(*options: str, environment: dict[str, str] | None = None) -> RunningServer:
            path = folder / str(len(list(folder.iterdir())))
            path.touch()
            return start(*options, environment={**(environment or {}), STAMPS: str(path)})

        self.servers = start_cluster(stamping, etcd)
        self.owner = self.servers[0]

    def __enter__(self) -> "ClusterRounds":
        targets = [server.target for server in self.servers]
        self._writers = [
            Writing(targets, f"{durability} {n}", durability)
            for durability, count in PAIRS
            for n in range(count)
        ]
        self._followers = [Reading(targets, stability) for stability in ("disk", SAFE)]
        with self._stack:
            for follower in self._followers:
                self._stack.enter_context(follower)
            for writer in self._writers:
                self._stack.enter_context(writer)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stamps(self, server: RunningServer) -> list[float]:
        data = Path(server.environment[STAMPS]).read_bytes()
        return [at for (at,) in struct.iter_unpack("<d", data[: len(data) // 8 * 8])]

    def _write(self) -> None:
        for writer in self._writers:
            writer.go_on()

    def _first_answer(self, lost: float) -> float:
        """Wait until the new owner has answered, return when it did first, and note how long that took."""

        def answers() -> list[float]:
            return [at for at in self._stamps(self.owner) if at > lost]

        wait_for(lambda: bool(answers()), "the new owner to answer")
        self.takes.append(min(answers()) - lost)
        return min(answers())

    def kill(self, *, emptied: bool = False) -> None:
        """SIGKILL the owner; another one follows, and the old one comes back, perhaps with an empty disk."""
        self._write()
        self.owner.kill()
        lost, old = boot_seconds(), self.owner
        self.owner = owner_of([server for server in self.servers if server is not old])
        self._first_answer(lost)
        if emptied:
            # What only this one had is in no file of what was undone either.
            shutil.rmtree(old.data)
            self.counts["emptied"] += 1
        old.start()
        wait_until_counted(self.servers, self.owner)
        self._write()
        self.counts["killed"] += 1

    def pause(self, seconds: float) -> None:
        """SIGSTOP the owner for a time; if another follows, none of its answers comes after that one's first."""
        self._write()
        old = self.owner
        stop(old)
        lost = boot_seconds()
        # It is time itself that is to pass, and nothing can be waited for.
        while boot_seconds() < lost + seconds:
            time.sleep(0.01)
        go_on(old)
        wait_for(lambda: self._settled(old), "one owner")
        self.owner = owner_of(self.servers)
        if self.owner is not old:
            wait_until_counted(self.servers, self.owner)
            first = self._first_answer(lost)
            late = [at for at in self._stamps(old) if at > first]
            assert late == [], f"the old owner answered {late[0] - first:.3f} s after the new one"
            self.counts["replaced after a pause"] += 1
        self._write()
        self.counts["paused"] += 1

    def _settled(self, old: RunningServer) -> bool:
        """Whether all name the same active server, and it is one."""
        known = [topology(server.target) for server in self.servers]
        owners = {one.owner.address for one in known if one is not None and one.owner is not None}
        active = [one for one in known if one is not None and one.active]
        return len(owners) == 1 and len(active) == 1 and None not in known

    def without_etcd(self, seconds: float) -> None:
        """SIGKILL all of etcd for a time, and one replica meanwhile: nothing changes, and all goes on."""
        before = [topology(server.target) for server in self.servers]
        self._etcd.kill()
        replica = self._rng.choice([s for s in self.servers if s is not self.owner])
        until = boot_seconds() + seconds
        while boot_seconds() < until:
            self._write()
        replica.kill()
        self._write()
        replica.start()
        self._etcd.start()
        wait_until_counted(self.servers, self.owner)
        after = [topology(server.target) for server in self.servers]
        assert [one and one.epoch for one in before] == [one and one.epoch for one in after]
        self._write()
        self.counts["without etcd"] += 1

    def restart_etcd(self) -> None:
        """SIGKILL etcd, and start it again: nothing changes."""
        before = topology(self.owner.target)
        self._etcd.kill()
        self._write()
        self._etcd.start()
        self._write()
        after = topology(self.owner.target)
        assert before is not None
        assert after is not None
        assert (before.epoch, True) == (after.epoch, after.active)
        self.counts["etcd restarted"] += 1

    def check(self) -> None:
        """Stop the writers and compare: one state everywhere, and nothing lost that was promised."""
        for writer in self._writers:
            writer.__exit__()
        wait_until_equal(self.servers)
        states = [shown(server) for server in self.servers]
        assert states[0] == states[1] == states[2]
        for follower in self._followers:
            wait_for(
                lambda follower=follower: follower.state() == states[0],  # type: ignore[misc]
                f"a follower at {follower.stability} to have what is there",
            )
        gone = undone(self.servers)
        for writer in self._writers:
            lost = writer.acknowledged - states[0].keys()
            self.counts[f"written at {writer.durability}"] += len(writer.acknowledged)
            assert not lost or writer.durability == "disk"
            assert lost <= gone or self.counts["emptied"]
        assert self._followers[-1].rollbacks == 0
