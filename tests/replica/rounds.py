"""Rounds of failovers: three servers under load, of which the active one dies and a drawn replica is promoted.

Each key is written once, so that the outcome is a set of keys: what was acknowledged at ``replicated(1)`` is in it, and
what was acknowledged at ``disk`` is in it, or in ``undone/`` of a server.
"""

import base64
import contextlib
import itertools
import json
import random
import threading
import time
from collections import Counter

from tests.conftest import StartServer
from tests.harness import RunningServer, wait_until
from tests.proxy import DIRECTIONS, Proxy
from tests.replica.sets import run, state_of, wait_for, wait_until_counted, wait_until_equal
from upr_client import Client, Only, Rollback, UprError
from upr_client.errors import ClosedError
from upr_protocol.partitioning import partition_of

STABILITIES = ("memory", "disk", "replicated(1)")
SAFE = "replicated(1)"
PAUSE_SECONDS = 0.01
"""About as long as a write takes: it is under way as often as not, and the processor is not all a writer's own."""
GATHERED = "promoted with less than the other had"


class Reading:
    """A follower on a thread.

    Attributes:
        rows: by partition, what it has: seqno, key and value of each mutation that was not undone.
        seen: all keys that it was ever shown.
        rollbacks: those that it was told of.
    """

    def __init__(self, endpoints: list[str], stability: str) -> None:
        self.stability = stability
        self.rows: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.seen: set[bytes] = set()
        self.rollbacks = 0
        self.error: UprError | None = None
        self._client = Client(endpoints, retry_seconds=None)
        self._changes = self._client.bucket().changes(
            only=Only(stability=stability), on_rollback="event"
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Reading":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.close()
        self._thread.join()
        self._client.close()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with contextlib.suppress(ClosedError), self._changes as changes:
                for batch in changes.batches():
                    if isinstance(batch, Rollback):
                        self._undo(batch)
                        continue
                    for partition, seqno, _, key, value in batch.changes:
                        self.rows.setdefault(partition, []).append((seqno, key, value))
                        self.seen.add(key)
        except UprError as error:
            self.error = error

    def _undo(self, rollback: Rollback) -> None:
        self.rollbacks += 1
        rows = self.rows.get(rollback.partition, [])
        self.rows[rollback.partition] = [row for row in rows if row[0] <= rollback.seqno]

    def state(self) -> dict[bytes, bytes | None]:
        rows = itertools.chain.from_iterable(list(self.rows.values()))
        return {key: value for _, key, value in rows}

    def until(self, key: bytes) -> None:
        before = len(self.seen)
        wait_until(
            lambda: key in self.seen or self.error is not None,
            lambda: (
                f"{key!r} was not seen at {self.stability}; {before} keys were, now {len(self.seen)}"
            ),
        )


class Writing:
    """A writer on a thread: one key after the other, each once, at one durability.

    Attributes:
        acknowledged: its keys that were acknowledged.
        newest: the last one of them.
        longest: most seconds between two acknowledgements; may be set to 0.0.
        pause: seconds between a write and the next one; may be set.
        errors: how often a write failed for the caller, by reason.
    """

    def __init__(self, endpoints: list[str], name: str, durability: str) -> None:
        self.durability = durability
        self.acknowledged: set[bytes] = set()
        self.newest = b""
        self.longest = 0.0
        self.pause = PAUSE_SECONDS
        self.errors: Counter[str] = Counter()
        self._endpoints, self._name = endpoints, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Writing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with Client(self._endpoints, retry_seconds=60) as client:
            bucket, before = client.bucket(), time.monotonic()
            for number in itertools.count():
                if self._stop.is_set():
                    return
                keys = [f"{self._name} {number} {n}".encode() for n in range(10)]
                try:
                    bucket.write_many([(key, key * 5) for key in keys], self.durability)
                except UprError as error:
                    self.errors[error.reason] += 1
                    continue
                now = time.monotonic()
                self.longest, before = max(self.longest, now - before), now
                self.acknowledged.update(keys)
                self.newest = keys[-1]
                self._stop.wait(self.pause)

    def go_on(self) -> None:
        """Wait until more is acknowledged than was."""
        before = len(self.acknowledged)
        wait_for(lambda: len(self.acknowledged) > before, f"{self._name} to write")


class Rounds:
    """Three servers, four writers and eight followers; used with ``with``.

    Attributes:
        counts: what happened.
    """

    def __init__(self, start: StartServer, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._start = start

    def __enter__(self) -> "Rounds":
        with self._stack:
            self._proxies = [self._stack.enter_context(Proxy()) for _ in range(3)]
            self.servers: list[RunningServer] = []
            small = ("--tail-bytes", "300000", "--flush-seconds", "0.5")
            for proxy in self._proxies:
                # What a server asks of the others goes through a proxy of its own.
                upstream = ["--replicate-from", self.servers[0].target] if self.servers else []
                through = {"grpc_proxy": f"http://{proxy.target}", "no_grpc_proxy": ""}
                self.servers.append(self._start(*upstream, *small, environment=through))
            self.owner = self.servers[0]
            wait_until_counted(self.servers, self.owner)
            targets = [server.target for server in self.servers]
            self._writers = [
                Writing(targets, f"{durability} {n}", durability)
                for durability in ("disk", SAFE)
                for n in range(2)
            ]
            self._followers = [
                Reading(targets[n % 3 :] + targets[: n % 3], STABILITIES[n % 3]) for n in range(8)
            ]
            for follower in self._followers:
                self._stack.enter_context(follower)
            for writer in self._writers:
                self._stack.enter_context(writer)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Hold each replica's link back in turn, kill the active server, promote a replica; the old one comes back."""
        replicas = [server for server in self.servers if server is not self.owner]
        self._rng.shuffle(replicas)
        for held in replicas:
            proxy = self._proxies[self.servers.index(held)]
            proxy.black_hole(*DIRECTIONS)
            for writer in self._writers:
                writer.go_on()
            if held is not replicas[-1] or self._rng.random() < 0.2:
                proxy.heal()
        if self._rng.random() < 0.8 or not self.counts["rounds"]:
            # What nobody else has.
            for proxy in self._proxies:
                proxy.black_hole(*DIRECTIONS)
            for writer in self._writers * 2:
                # The first may have been on its way before.
                if writer.durability == "disk":
                    writer.go_on()
                    for follower in self._followers:
                        if follower.stability == "disk":
                            follower.until(writer.newest)
        self.owner.kill()
        for proxy in self._proxies:
            # What is still on its way is lost.
            proxy.reset()
            proxy.heal()
        durable = {one.target: [row[2] for row in state_of(one.target)] for one in replicas}
        # Drawn again: the one that lacks what the other has is promoted as well.
        old, self.owner = self.owner, self._promoted(self._rng.sample(replicas, 2))
        here = durable.pop(self.owner.target)
        (there,) = durable.values()
        self.counts[GATHERED] += any(a < b for a, b in zip(here, there, strict=True))
        old.start()
        wait_until_counted(self.servers, self.owner)
        for writer in self._writers:
            writer.go_on()
        self.counts["rounds"] += 1

    def _promoted(self, replicas: list[RunningServer]) -> RunningServer:
        """Promote one of the replicas: the first, or the other if that one was just about to be in step."""
        told: list[str] = []
        for replica in itertools.islice(itertools.cycle(replicas), 20):
            result = run("promote", "--target", replica.target)
            if result.exit_code == 0:
                return replica
            told.append(result.output)
        raise AssertionError(told)

    def check(self) -> None:
        """Stop the writers and compare."""
        compare(self.servers, self._writers, self._followers, self.counts)


def compare(
    servers: list[RunningServer],
    writers: list[Writing],
    followers: list[Reading],
    counts: Counter[str],
) -> None:
    """Stop writers and compare: one state everywhere, nothing lost that was promised, the rest is kept aside.

    Args:
        counts: what happened; where servers were "emptied", what is lost may have been kept aside there.
    """
    for writer in writers:
        writer.__exit__()
    wait_until_equal(servers)
    states = [shown(server) for server in servers]
    assert states[0] == states[1] == states[2]
    assert all(value == key * 5 for key, value in states[0].items())
    for follower in followers:
        wait_for(
            lambda follower=follower: follower.state() == states[0],  # type: ignore[misc]
            f"a follower at {follower.stability} to have what is there",
        )
        counts[f"rollbacks at {follower.stability}"] += follower.rollbacks
    gone = undone(servers)
    for writer in writers:
        lost = writer.acknowledged - states[0].keys()
        counts[f"written at {writer.durability}"] += len(writer.acknowledged)
        counts[f"undone at {writer.durability}"] += len(lost)
        assert not lost or writer.durability == "disk"
        if not counts["emptied"]:
            assert {key: gone.get(key) for key in lost} == {key: key * 5 for key in lost}
    assert counts[f"rollbacks at {SAFE}"] == 0


def undone(servers: list[RunningServer]) -> dict[bytes, bytes]:
    """Return keys and values that any of the servers has undone; all are sets.

    Raises:
        AssertionError: a row is not in the partition of its key.
    """
    found = {}
    for server in servers:
        for file in (server.data / "undone").glob("*.jsonl"):
            for row in map(json.loads, file.read_text().splitlines()[1:]):
                key = base64.b64decode(row["key"])
                assert row["partition"] == partition_of(key)
                found[key] = base64.b64decode(row["value"])
    return found


def shown(server: RunningServer) -> dict[bytes, bytes | None]:
    """Return what a server itself shows, by key."""
    rows: dict[bytes, bytes | None] = {}
    with Client(server.target) as client:
        bucket, only = client.bucket(), Only(stability="disk")
        # Of this very server.
        with bucket.changes(until="now", only=only, read_from="any") as changes:
            for batch in changes.batches():
                assert not isinstance(batch, Rollback)
                rows |= batch.items()
    return rows
