"""Rounds of what a cluster must survive by itself, under writers and followers.

Its owner is killed or stopped, etcd is away, links are cut, and disks are emptied. Each server notes when it hands answers to
writes over to gRPC, by the clock that all processes of a machine share, and in which epoch: in each one server answers,
and none after the next one has begun to.
"""

import contextlib
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.clusters import drained, go_on, owner_of, start_cluster, stop
from tests.cluster.stamps import boot_seconds, check_one_owner, stamps_of
from tests.conftest import StartServer
from tests.etcd import RunningEtcd
from tests.harness import STAMPS, RunningServer
from tests.proxy import Proxy
from tests.replica.rounds import PAUSE_SECONDS, SAFE, Reading, Writing, compare
from tests.replica.sets import run, state_of, topology, wait_for
from upr_client import Client

PAIRS = (("disk", 2), (SAFE, 2))
ETCD = 3
"""Place of etcd among those that links are between: 0 is the owner, 1 and 2 are the others."""
COMMAND = "upr-admin promote --force"
BACK_SECONDS = 3.0
"""Time in which an owner that is back goes on: its key in etcd was renewed a while before it was lost."""
SPARING = 0.03, 0.1
"""Pauses of a writer of a few rounds: where the owner may change, and where it need only go on."""
FAILS = ".fails"
"""End of the name of a file beside a server's stamps: while it is there, no fsync of the server's journal succeeds."""


JOURNAL_BYTES = 2**18
"""Length of a journal beside which a server's other files are small."""
LIMIT_BYTES = 2**20


class ClusterRounds:
    """A cluster of three servers, writers and followers; used with ``with``.

    Args:
        folder: is made, for the stamps.
        constants: see ``RunningServer``.
        linked: whether all between servers, and to etcd, goes through proxies, so that links can be cut.
        sparing: whether writers write less often, and least while the servers settle and while etcd is away.

    Attributes:
        counts: what happened.
        takes: seconds from each loss of an owner to the next one's first answer.
        pauses: longest time of each of these without an acknowledgement, of one writer.
        back: seconds from each SIGCONT of an owner that was replaced until it was a replica in step.
        stalls: longest time of each without an acknowledgement, of one writer, where the owner stayed.
    """

    def __init__(
        self,
        start: StartServer,
        etcd: RunningEtcd,
        folder: Path,
        seed: int,
        *,
        constants: Mapping[str, float] | None = None,
        linked: bool = False,
        sparing: bool = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.takes: list[float] = []
        self.pauses: list[float] = []
        self.back: list[float] = []
        self.stalls: list[float] = []
        self.servers: list[RunningServer] = []
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._start = start
        self._etcd = etcd
        self._folder = folder
        self._more: dict[str, Any] = {"constants": constants} if constants else {}
        self._linked = linked
        self._pause, self._waiting_pause = SPARING if sparing else (PAUSE_SECONDS, PAUSE_SECONDS)
        self._proxies: list[Proxy] = []

    def _start_one(self, *options: str) -> RunningServer:
        """Start a server that stamps its answers, perhaps with a proxy for what it asks of the others and of etcd."""
        path = self._folder / str(len(list(self._folder.iterdir())))
        path.touch()
        fails = f"journal.before_sync=error-while:EIO:{path}{FAILS}"
        environment = {STAMPS: str(path), "UPR_FAILPOINTS": fails}
        if self._linked:
            self._proxies.append(self._stack.enter_context(Proxy()))
            through = f"http://{self._proxies[-1].target}"
            environment |= {"grpc_proxy": through, "no_grpc_proxy": ""}
        return self._start(*options, environment=environment, **self._more)

    def __enter__(self) -> "ClusterRounds":
        self._folder.mkdir()
        with self._stack:
            self.servers = start_cluster(self._start_one, self._etcd)
            self.owner = self.servers[0]
            targets = [server.target for server in self.servers]
            self._writers = [
                Writing(targets, f"{durability} {n}", durability)
                for durability, count in PAIRS
                for n in range(count)
            ]
            self._followers = [Reading(targets, stability) for stability in ("disk", SAFE)]
            for follower in self._followers:
                self._stack.enter_context(follower)
            for writer in self._writers:
                writer.pause = self._pause
                self._stack.enter_context(writer)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _check_answers(self) -> None:
        check_one_owner([stamps_of(Path(one.environment[STAMPS])) for one in self.servers])

    def _go_on(self) -> None:
        """Wait until each writer writes, and each follower is shown that."""
        for writer in self._writers:
            writer.go_on()
        for follower in self._followers:
            for writer in self._writers:
                follower.until(writer.newest)

    def _go_on_for(self, seconds: float) -> None:
        until = boot_seconds() + seconds
        with self._sparing():
            while boot_seconds() < until:
                self._go_on()

    @contextlib.contextmanager
    def _sparing(self) -> Iterator[None]:
        for writer in self._writers:
            writer.pause = self._waiting_pause
        try:
            yield
        finally:
            for writer in self._writers:
                writer.pause = self._pause

    def _others(self) -> list[RunningServer]:
        return [server for server in self.servers if server is not self.owner]

    def settle(self) -> None:
        """Wait until there is one owner, and it counts the two others, which are in step."""
        with self._sparing():
            wait_for(self._is_settled, "one owner that counts the others")
        self.owner = owner_of(self.servers)

    def _is_settled(self) -> bool:
        known = [topology(server.target) for server in self.servers]
        if None in known:
            return False
        epochs = {(one.epoch, max(one.promised, one.epoch)) for one in known if one is not None}
        active = [one for one in known if one is not None and one.active]
        if len(active) != 1 or len(epochs) != 1 or len(set(epochs.pop())) != 1:
            return False
        there = {one.directory for one in known if one is not None}
        counted = {one.directory for one in active[0].members if one.counted}
        in_step = {one.directory for one in active[0].members if one.reached and one.in_step}
        everywhere = [
            {m.directory for m in one.members if m.counted} for one in known if one is not None
        ]
        wanted = there - {active[0].directory}
        return counted == wanted <= in_step and all(one == wanted for one in everywhere)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Have the body change neither owner, epoch nor records, and fail no write."""
        before, errors = self._history(), self._errors()
        self._forget_longest()
        yield
        assert self._history() == before
        assert self._errors() == errors
        self.stalls.append(self._longest())

    def _history(self) -> tuple[int, list[int]]:
        known = topology(self.owner.target)
        assert known is not None
        assert known.active
        return known.epoch, [failover_id for failover_id, _, _ in state_of(self.owner.target)]

    def _forget_longest(self) -> None:
        for writer in self._writers:
            writer.longest = 0.0

    def _longest(self) -> float:
        return max(writer.longest for writer in self._writers)

    def _errors(self) -> Counter[str]:
        errors: Counter[str] = Counter()
        for writer in self._writers:
            errors += writer.errors
        return errors

    # The owner is gone

    @contextlib.contextmanager
    def _replaced(self) -> Iterator[None]:
        """Have the body kill the owner; wait for another one and its first answer, and note how long that took."""
        self._go_on()
        self._forget_longest()
        old, lost = self.owner, boot_seconds()
        yield
        first: dict[float, RunningServer] = {}

        def is_answered() -> bool:
            """Not only by the first that is active: on a busy machine that one may be replaced before it answers."""
            for one in self._others():
                at = stamps_of(Path(one.environment[STAMPS]))["at"]
                first.update({float(since): one for since in at[at > lost][:1]})
            return bool(first)

        wait_for(is_answered, "a new owner to answer")
        self.owner = first[min(first)]
        self.takes.append(min(first) - lost)
        self._go_on()
        self.pauses.append(self._longest())
        assert self.owner is not old

    def kill(self, *, emptied: bool = False) -> None:
        """SIGKILL the owner; another one follows, and the old one comes back, perhaps with an empty disk."""
        old = self.owner
        with self._replaced():
            old.kill()
        self._come_back(old, emptied=emptied)
        self.counts["killed"] += 1

    def _come_back(self, server: RunningServer, *, emptied: bool) -> None:
        if emptied:
            # What only this one had is in no file of what was undone either.
            shutil.rmtree(server.data)
            self.counts["emptied"] += 1
        server.start()
        self.settle()
        self._go_on()

    def fail_disk(self) -> None:
        """Have no fsync of the owner succeed: another one follows while it runs, and it follows that one when it is restarted."""
        old = self.owner
        fails = Path(old.environment[STAMPS] + FAILS)
        with self._replaced():
            fails.touch()
        fails.unlink()
        # What was numbered there is not stored.
        assert old.terminate() == 1
        self._come_back(old, emptied=False)
        self.counts["disks failed"] += 1

    def fill_disk(self, seconds: float) -> None:
        """Have the owner's journal not grow for a time: writers wait, nobody else follows, and then all goes on."""
        owner = self.owner

        def size() -> int:
            return max(file.stat().st_size for file in owner.data.rglob("*.journal"))

        def allow(size: int) -> None:
            resource.prlimit(owner.pid, resource.RLIMIT_FSIZE, (size, hard))

        wait_for(lambda: size() > JOURNAL_BYTES, "a journal")
        hard = resource.prlimit(owner.pid, resource.RLIMIT_FSIZE)[1]
        with self._unchanged(), Client(owner.target) as client:
            # Above the size of the store, which goes on.
            allow(max(size(), LIMIT_BYTES))
            wait_for(lambda: self._problems(client) == {"NO_ROOM"}, "it to say that it is full")
            known, since = [-1], boot_seconds()

            def still() -> bool:
                """What was answered before may still be on its way."""
                nonlocal known, since
                if (now := [len(writer.acknowledged) for writer in self._writers]) != known:
                    known, since = now, boot_seconds()
                return boot_seconds() - since >= seconds

            wait_for(still, "no write to be answered")
            allow(hard)
            self._go_on()
            wait_for(lambda: not self._problems(client), "it to say nothing more")
        self.counts["disks filled"] += 1

    @staticmethod
    def _problems(client: Client) -> set[str]:
        problems = (bucket.problem for bucket in client.admin.status().buckets)
        return {one.reason for one in problems if one is not None}

    def restart(self, *, cleanly: bool = True) -> None:
        """Stop the owner, or SIGKILL it, and start it at once: it goes on, without a record if it was stopped cleanly.

        On a machine that is so busy that it is not back in time, another one may follow.
        """
        self._go_on()
        old, before, errors = self.owner, self._history(), self._errors()
        lost = boot_seconds()
        if cleanly:
            assert old.terminate() == 0
        else:
            old.kill()
        old.start()
        in_time = boot_seconds() - lost < BACK_SECONDS
        self.settle()
        self._go_on()
        assert self._errors() == errors
        if in_time:
            assert self.owner is old
            assert not cleanly or self._history() == before
        what = "restarted" if cleanly else "killed and back at once"
        self.counts[what if in_time else f"{what}, too late"] += 1

    def roll(self) -> None:
        """Stop each server in turn and start it again, the owner drained before: no record, and no failed write."""
        errors, (_, ids) = self._errors(), self._history()
        self._forget_longest()
        for server in [*self._others(), self.owner]:
            if server is self.owner:
                drained(server)
                self.settle()
                assert self.owner is not server
            self._go_on()
            assert server.terminate() == 0
            server.start()
            self.settle()
        self._go_on()
        self.stalls.append(self._longest())
        assert self._history()[1] == ids
        assert self._errors() == errors
        self.counts["rolled"] += 1

    def empty_a_replica(self) -> None:
        """SIGKILL a replica, which comes back with an empty disk: nothing changes."""
        replica = self._rng.choice(self._others())
        with self._unchanged():
            self._go_on()
            replica.kill()
            self._go_on()
            self._come_back(replica, emptied=True)

    def need_a_command(self) -> None:
        """SIGKILL the owner and a replica, which comes back with an empty disk.

        Nobody may become active, neither the one that is left nor the owner when it is back, and both name the command
        that ends it. Said at that owner it loses nothing that was acknowledged at ``replicated(1)``.
        """
        self._go_on()
        old, (replica, left) = self.owner, self._rng.sample(self._others(), 2)
        old.kill()
        replica.kill()
        shutil.rmtree(replica.data)
        self.counts["emptied"] += 1
        replica.start()
        wait_for(lambda: COMMAND in self._waiting(left), "the one that is left to name the command")
        old.start()
        wait_for(lambda: COMMAND in self._waiting(old), "the owner to name the command")
        result = run(*COMMAND.split()[1:], "--yes", "--target", old.target)
        assert result.exit_code == 0, result.output
        self.settle()
        self._go_on()
        self.counts["forced"] += 1

    @staticmethod
    def _waiting(server: RunningServer) -> str:
        known = topology(server.target)
        assert known is None or not known.active
        return "" if known is None else known.waiting

    def pause(self, seconds: float) -> None:
        """SIGSTOP the owner for a time; if another follows, none of its answers comes after that one's first."""
        self._go_on()
        old, lost = self.owner, boot_seconds()
        stop(old)
        # It is time itself that is to pass, and nothing can be waited for.
        while boot_seconds() < lost + seconds:
            time.sleep(0.01)
        resumed = boot_seconds()
        go_on(old)
        wait_for(lambda: self._is_replica_or_sole(old), "the one that was stopped to know its part")
        back = boot_seconds() - resumed
        self.settle()
        if self.owner is not old:
            self.back.append(back)
            self.counts["replaced after a pause"] += 1
        self._go_on()
        self._check_answers()
        self.counts["paused"] += 1

    def _is_replica_or_sole(self, old: RunningServer) -> bool:
        """Whether a server is a replica in step of one that is active, or nobody else is active."""
        own, others = topology(old.target), [topology(one.target) for one in self.servers]
        active = [one.directory for one in others if one is not None and one.active]
        if own is None or len(active) != 1:
            return False
        in_step = any(one.in_step for one in own.members if one.directory == own.directory)
        owner = None if own.owner is None else own.owner.directory
        return owner == active[0] and in_step

    # etcd

    def without_etcd(self, seconds: float, replica_seconds: float) -> None:
        """SIGKILL all of etcd for a time, and then one replica as well: nothing changes, and all goes on.

        Args:
            replica_seconds: how long the replica is away: for longer than the owner counts a silent one, if it could.
        """
        with self._unchanged():
            self._etcd.kill()
            self._go_on_for(seconds)
            replica = self._rng.choice(self._others())
            replica.kill()
            self._go_on_for(replica_seconds)
            replica.start()
            self._etcd.start()
            self.settle()
            self._go_on()
        self.counts["without etcd"] += 1

    def restart_etcd(self, *, leader: bool = False) -> None:
        """SIGKILL etcd, or the member of it that leads, and start it again: nothing changes."""
        with self._unchanged():
            self._etcd.kill(leader=leader)
            self._go_on()
            self._etcd.start()
            self._go_on()
        self.counts["leader of etcd restarted" if leader else "etcd restarted"] += 1

    # Links

    def cut(self, ways: Sequence[tuple[int, int]], seconds: float) -> None:
        """Have nothing pass on some ways for a time: writers at ``disk`` go on all the same. Then all is well again.

        Args:
            ways: from whom to whom, by place, see ``ETCD``.
        """
        self.settle()
        began = boot_seconds()
        places = [self.owner, *self._others()]
        for here, there in ways:
            if here != ETCD:
                for address in self._addresses(places, there):
                    self._proxy(places[here]).black_hole("to server", server=address)
            if there != ETCD:
                for address in self._addresses(places, here):
                    self._proxy(places[there]).black_hole("to client", server=address)
        # Time itself: grants and leases run out, or do not.
        while boot_seconds() < began + seconds:
            time.sleep(0.01)
        for way in ways:
            wait_for(lambda way=way: self._is_noticed(places, *way), f"{way} to be noticed")  # type: ignore[misc]
        for writer in self._writers:
            if writer.durability == "disk":
                writer.go_on()
        for proxy in self._proxies:
            proxy.heal()
        before = self.owner
        self.settle()
        self._go_on()
        self._check_answers()
        self.counts["cut"] += 1
        self.counts["replaced behind a cut"] += self.owner is not before

    def _is_noticed(self, places: list[RunningServer], here: int, there: int) -> bool:
        """Whether a server says that it does not hear another one, or has trouble with etcd."""
        first, second = sorted((here, there))
        known = topology(places[first].target)
        if known is None or second == ETCD:
            return known is not None and bool(known.waiting)
        other = places[second].target
        return any(one.address == other and not one.reached for one in known.members)

    def _addresses(self, places: list[RunningServer], place: int) -> list[str]:
        return self._etcd.endpoints if place == ETCD else [places[place].target]

    def _proxy(self, server: RunningServer) -> Proxy:
        return self._proxies[self.servers.index(server)]

    # The end

    def check(self) -> None:
        """Stop the writers and compare, and look at what was answered when."""
        compare(self.servers, self._writers, self._followers, self.counts)
        self._check_answers()
        for reason, count in self._errors().items():
            self.counts[f"writes failed: {reason}"] += count
