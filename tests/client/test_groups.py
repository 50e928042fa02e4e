"""A group of three members in processes of their own that are killed, paused and resumed under writes, as the server is.

``UPR_GROUP_SECONDS`` says for how long, 5 by default; ``UPR_GROUP_SEED`` decides what happens when.
"""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.client.group_member import GROUP, LEASE_SECONDS
from tests.harness import WAIT_SECONDS, RunningServer, poll, until, wait_until
from upr_client import AsyncClient, Change, Client, Group, Rollback, ServerPositions, Tuning
from upr_client.types import AsyncBucket, AsyncChanges
from upr_protocol.partitioning import partition_of

StartServer = Callable[..., RunningServer]
SECONDS = float(os.environ.get("UPR_GROUP_SECONDS", "5"))
SEED = int(os.environ.get("UPR_GROUP_SEED", "1"))


class Handed(NamedTuple):
    """One change that a member was handed."""

    time: float
    generation: int
    partition: int
    seqno: int
    member: str


class Member:
    """A member's processes, one after the other, under one name."""

    def __init__(self, target: str, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.errors = folder / f"{name}.errors"
        self._target = target
        self._starts = 0
        self.paused = False
        self.start()

    def start(self) -> None:
        self._starts += 1
        command = [sys.executable, "-m", "tests.client.group_member"]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, self._target, self.name, str(self.log)], stderr=errors
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.paused = False

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.paused = False

    def end(self) -> None:
        """End it with SIGTERM, once it takes that."""
        wait_until(lambda: self._begun() == self._starts, f"{self.name} to begin")
        self.process.terminate()
        assert self.process.wait(WAIT_SECONDS) == 0, self.errors.read_text()

    def _begun(self) -> int:
        return self.log.read_text().splitlines().count("begin") if self.log.exists() else 0

    def handed(self) -> Iterator[Handed]:
        if not self.log.exists():
            return
        for line in self.log.read_text().splitlines():
            fields = line.split()
            if len(fields) == 4:
                at, generation, partition, seqno = fields
                yield Handed(float(at), int(generation), int(partition), int(seqno), self.name)


class Watched:
    """The positions stored in the server, which must never go back."""

    def __init__(self, client: Client) -> None:
        self._admin = client.admin
        self.seqnos: dict[int, int] = {}

    def look(self) -> int:
        """Compare with what was there before; return how much is stored."""
        found = [
            c for c in self._admin.consumers("default", with_positions=True) if c.name == GROUP
        ]
        for partition, position in (found[0].positions if found else {}).items():
            before = self.seqnos.get(partition, 0)
            assert position.seqno >= before, f"partition {partition}: {before} to {position.seqno}"
            self.seqnos[partition] = position.seqno
        return sum(self.seqnos.values())


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    found: list[Member] = []
    yield found
    for member in found:
        member.kill()


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.timeout(SECONDS + 100)
def test_members_and_a_server_that_are_killed_paused_and_resumed(
    server_process: StartServer, members: list[Member], tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    server = server_process()
    for name in ("a", "b", "c"):
        members.append(Member(server.target, name, tmp_path))
    with Client(server.target) as client:
        bucket = client.bucket()
        watched = Watched(client)
        written = itertools.count(1)
        resumes = 0
        until = time.monotonic() + SECONDS
        next_act = time.monotonic() + 2 * LEASE_SECONDS
        while time.monotonic() < until:
            bucket.write_many((b"key %d" % next(written), b"v") for _ in range(200))
            watched.look()
            if time.monotonic() < next_act:
                continue
            next_act = time.monotonic() + rng.choice([0.2, 0.5, 1.0, 2.5])
            member = rng.choice(members)
            if rng.random() < 0.1:
                server.kill()
                server.start()
            elif member.paused:
                member.resume()
                resumes += 1
            elif rng.random() < 0.4:
                member.kill()
                member.start()
            else:
                member.pause()
        for member in members:
            if member.paused:
                member.resume()
                resumes += 1
        high = {info.partition: info.high_seqno for info in client.admin.partitions(bucket)}
        wait_until(
            lambda: watched.look() >= sum(high.values()), "the positions of all that was written"
        )
        # A partition that nothing was written to is listed at 0 while it is owned.
        stored = {p: seqno for p, seqno in watched.seqnos.items() if seqno}
        assert stored == {p: seqno for p, seqno in high.items() if seqno}
        (group,) = client.admin.consumers(bucket)
        assert sum(member.partitions for member in group.members) == 1024
    for member in members:
        member.end()
    check_handed([one for member in members for one in member.handed()], high, resumes)


CHANGES = 400
BOOTTIME = getattr(time, "CLOCK_BOOTTIME", -1)
Say = Callable[[str], None]
"""Takes status lines."""
LOST = " lost: "
"""What a member says of partitions whose lease has ended, by its own count or by the server's."""


def slow_member(bucket: AsyncBucket, say: Say, lease_seconds: float) -> AsyncChanges:
    return bucket.changes(
        resume=Group(GROUP, lease_seconds=lease_seconds),
        # So that the server hears of a member that is busy.
        tuning=Tuning(heartbeat_seconds=lease_seconds / 5),
        on_status=say,
    )


async def keeps_its_lease(
    target: str, attempt: Callable[[AsyncBucket, float, Say], Awaitable[None]], ended_by: str = LOST
) -> None:
    """Make an attempt in which a member's lease does not end; it is given a bucket, a lease's length and what takes status lines.

    A machine that stood still for as long as a lease ends it rightly: so again with a longer one then.

    Args:
        ended_by: what is said when it has ended.
    """
    said: list[str] = []
    ended = asyncio.Event()

    def say(words: str) -> None:
        said.append(words)
        if ended_by in words:
            ended.set()

    async with AsyncClient(target) as client:
        for lease_seconds in (LEASE_SECONDS, 2 * LEASE_SECONDS, 4 * LEASE_SECONDS):
            ended.clear()
            name = f"lease-{lease_seconds:g}"
            await client.admin.create_bucket(name)
            async with asyncio.timeout(WAIT_SECONDS):
                trying = asyncio.ensure_future(attempt(client.bucket(name), lease_seconds, say))
                watching = asyncio.create_task(ended.wait())
                try:
                    await asyncio.wait({trying, watching}, return_when=asyncio.FIRST_COMPLETED)
                    if not ended.is_set():
                        await trying
                        return
                finally:
                    trying.cancel()
                    watching.cancel()
                    await asyncio.gather(trying, watching, return_exceptions=True)
    raise AssertionError(f"its lease ended each time: {said}")


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_slow_member_that_iterates_keeps_its_lease(target: str) -> None:
    async def iterate(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        handed: list[tuple[int, int]] = []
        await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
        async with slow_member(bucket, say, lease_seconds) as changes:
            async for event in changes:
                if isinstance(event, Change):
                    handed.append((event.partition, event.seqno))
                    # It holds up everything, as work does that is no waiting.
                    time.sleep(2.5 * lease_seconds / CHANGES)  # noqa: ASYNC251
                if len(handed) == CHANGES:
                    break
        assert len(set(handed)) == CHANGES, "nothing was handed out twice"

    await keeps_its_lease(target, iterate)


@pytest.mark.asyncio
async def test_a_member_that_is_closed_while_it_is_assigned_revokes_all(target: str) -> None:
    held: set[int] = set()
    assigned, goes_on = asyncio.Event(), asyncio.Event()

    async def take(partitions: list[int]) -> None:
        held.update(partitions)
        assigned.set()
        await goes_on.wait()

    group = Group("closed", on_assigned=take, on_revoked=held.difference_update)
    async with AsyncClient(target) as client:
        member = client.bucket().changes(resume=group)
        async with member:
            iterating = asyncio.create_task(anext(member, None))
            await assigned.wait()
            closing = asyncio.create_task(member.close())
            await asyncio.wait([closing], timeout=0.5)
            goes_on.set()
            await asyncio.wait([iterating, closing])
    assert len(held) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("as_member", [True, False], ids=["member", "sole owner"])
async def test_a_bucket_that_was_created_anew_before_positions_are_stored_is_a_rollback(
    target: str, as_member: bool
) -> None:
    """The rollback takes longer than a lease, which is renewed meanwhile. The position before it is above the new high seqno."""

    async def follow(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        undone: list[tuple[int, str]] = []

        async def undo(rollback: Rollback) -> None:
            undone.append((rollback.seqno, rollback.rule))
            await asyncio.sleep(1.5 * lease_seconds)

        for _ in range(3):
            await bucket.set(b"key", b"old")
        changes = bucket.changes(
            resume=Group(GROUP, lease_seconds=lease_seconds)
            if as_member
            else ServerPositions("indexer"),
            on_rollback=undo,
            on_status=say,
            tuning=Tuning(save_seconds=0),
        )
        async with changes, AsyncClient(target) as client:
            while not isinstance(event := await anext(changes), Change) or event.seqno < 3:
                pass
            await client.admin.drop_bucket(bucket.name)
            await client.admin.create_bucket(bucket.name)
            await client.bucket(bucket.name).set(b"key", b"new")
            while not isinstance(event := await anext(changes), Change):
                pass
        assert event.value == b"new"
        assert undone == [(0, "bucket_gone")]

    await keeps_its_lease(target, follow)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "resume", [Group(GROUP), ServerPositions("indexer")], ids=["member", "sole owner"]
)
async def test_a_bucket_that_was_created_anew_before_positions_are_loaded_is_a_rollback(
    target: str, resume: Group | ServerPositions, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[str] = []
    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        await client.bucket().set(b"key", b"old")
        changes = client.bucket().changes(
            resume=resume, on_rollback=lambda rollback: undone.append(rollback.rule)
        )

        async def load() -> object:
            monkeypatch.undo()
            await client.admin.drop_bucket("default")
            await client.admin.create_bucket("default")
            await client.bucket().set(b"key", b"new")
            return await changes._storage.load()

        monkeypatch.setattr(changes._storage, "load", load)
        async with changes:
            while not isinstance(event := await anext(changes), Change):
                pass
    assert event.value == b"new"
    assert undone == [], "nothing had been received"


@pytest.mark.asyncio
async def test_what_another_member_had_of_a_bucket_that_was_created_anew_is_rolled_back(
    target: str,
) -> None:
    """In the new one all is dealt anew: who begins a partition may not be the one that had it."""
    told: list[tuple[int, str]] = []
    owners: dict[str, set[int]] = {"a": set(), "b": set()}

    async def follow(bucket: AsyncBucket, member: str) -> None:
        def note(rollback: Rollback) -> None:
            told.append((rollback.partition, rollback.rule))

        group = Group(
            GROUP,
            member=member,
            on_assigned=lambda given: owners[member].update(given),
            on_revoked=lambda gone: owners[member].difference_update(gone),
        )
        async with bucket.changes(resume=group, on_rollback=note) as changes:
            async for event in changes:
                if isinstance(event, Change):
                    seen[event.value or b""].add(event.partition)
                if isinstance(event, Change) and event.value == b"wait":
                    # While there is no bucket nobody asks for it.
                    await created.wait()

    keys = [b"key %d" % number for number in range(5000)]
    partitions = {partition_of(key) for key in keys}
    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        seen: defaultdict[bytes, set[int]] = defaultdict(set)
        created = asyncio.Event()
        await bucket.write_many((key, b"old") for key in keys)
        members = [asyncio.create_task(follow(client.bucket(), name)) for name in owners]
        await until(lambda: len(owners["a"]) == len(owners["b"]) == 512)
        await until(lambda: seen[b"old"] >= partitions)
        await bucket.write_many((key, b"wait") for key in keys)
        await until(lambda: all(seen[b"wait"] & owned for owned in owners.values()))
        await client.admin.drop_bucket("default")
        await client.admin.create_bucket("default")
        await client.bucket().write_many((key, b"new") for key in keys)
        created.set()
        await until(lambda: seen[b"new"] >= partitions)
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)
    assert {partition for partition, _ in told} >= partitions
    assert {rule for _, rule in told} == {"bucket_gone"}
    assert len(told) == len(set(told)), "each is told once"


@pytest.mark.asyncio
async def test_what_another_member_had_while_on_assigned_ran_is_assigned_anew(target: str) -> None:
    told: list[tuple[str, int]] = []
    goes_on = asyncio.Event()

    async def take(partitions: list[int]) -> None:
        told.append(("assigned", len(partitions)))
        await goes_on.wait()

    def lose(partitions: list[int]) -> None:
        told.append(("revoked", len(partitions)))

    slow = Group(GROUP, lease_seconds=LEASE_SECONDS, on_assigned=take, on_revoked=lose)
    other = Group(GROUP, lease_seconds=LEASE_SECONDS)
    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
        handed: list[set[bytes]] = [set(), set()]
        async with bucket.changes(resume=slow) as member:

            async def iterate() -> None:
                async for event in member:
                    if isinstance(event, Change):
                        handed[1].add(event.key)

            iterating = asyncio.create_task(iterate())
            await until(lambda: told)
            async with bucket.changes(resume=other, acknowledge="manual") as another:
                # Of those that were not handed over in time.
                async for batch in another.batches():
                    another.ack_batch(batch)
                    handed[0].update(change.key for change in batch.changes)
                    if len(handed[0]) > CHANGES // 4:
                        break
            # What was said is older than a lease when it is taken.
            await asyncio.sleep(1.5 * LEASE_SECONDS)
            goes_on.set()
            await until(lambda: len(handed[0] | handed[1]) == CHANGES)
            member.stop()
            await iterating
    owned = list(
        itertools.accumulate(count if what == "assigned" else -count for what, count in told)
    )
    # All of it: what was taken from it meanwhile ended its lease.
    assert owned[:2] == [1024, 0]
    # On a busy machine the lease of the others may end first.
    assert 1024 in owned[2:]
    assert not handed[0] & handed[1]


@pytest.mark.asyncio
async def test_a_lease_does_not_end_while_on_assigned_runs(target: str) -> None:
    async def follow(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        assigned: list[int] = []

        async def take(partitions: list[int]) -> None:
            assigned.append(len(partitions))
            await asyncio.sleep(1.5 * lease_seconds)

        group = Group(GROUP, lease_seconds=lease_seconds, on_assigned=take)
        await bucket.set(b"key", b"value")
        async with bucket.changes(resume=group, on_status=say) as member:
            await anext(member)
        assert assigned == [1024]

    await keeps_its_lease(target, follow)


@pytest.mark.asyncio
async def test_what_waits_for_its_handler_while_on_assigned_runs_is_handled(target: str) -> None:
    assigned: list[int] = []
    handled: set[bytes] = set()
    handling, goes_on = asyncio.Event(), asyncio.Event()

    async def take(partitions: list[int]) -> None:
        assigned.append(len(partitions))
        if len(assigned) > 1:
            await asyncio.sleep(1.5 * LEASE_SECONDS)
            goes_on.set()
            # Time for what is not to be handled to be passed over.
            await asyncio.sleep(0.2)

    async def handle(change: Change) -> None:
        handling.set()
        await goes_on.wait()
        handled.add(change.key)

    async def leave_when_handling(other: AsyncChanges) -> None:
        async with other:
            following = asyncio.create_task(anext(other))
            await until(lambda: assigned)
            await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
            await handling.wait()
            await following

    group = Group(GROUP, lease_seconds=LEASE_SECONDS, on_assigned=take)
    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        other = bucket.changes(resume=Group(GROUP, lease_seconds=LEASE_SECONDS))
        leaving = asyncio.create_task(leave_when_handling(other))
        await until(lambda: other.status().owned == 1024)
        async with bucket.changes(resume=group, acknowledge="manual") as member:
            running = asyncio.create_task(member.run(handle, concurrency=1))
            await leaving
            await until(lambda: len(handled) == CHANGES)
            member.stop()
            await running


@pytest.mark.asyncio
async def test_what_comes_again_is_handled_again_behind_what_is_older(target: str) -> None:
    """What was handed out before waits for its handler no more: newer ones would come before those that come again."""
    keys = [key for i in range(9000) if partition_of(key := b"key %d" % i) == 7][:4]
    handled: list[bytes] = []
    handling, goes_on = asyncio.Event(), asyncio.Event()

    async def handle(change: Change) -> None:
        if len(handled) == 2:
            handling.set()
            await goes_on.wait()
        handled.append(change.key)

    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        await bucket.write_many((key, b"v") for key in keys)
        async with bucket.changes(
            resume=Group(GROUP), acknowledge="manual", tuning=Tuning(save_seconds=0)
        ) as member:
            running = asyncio.create_task(member.run(handle))
            await handling.wait()
            assert member.status().unacknowledged == 2
            await poll(lambda: client.admin.consumers(bucket))
            await client.admin.reset_consumer(bucket, GROUP, "beginning")
            await until(lambda: member.status().unacknowledged == 4)
            goes_on.set()
            await until(lambda: member.status().unacknowledged == 0)
            member.stop()
            await running
    assert handled == keys[:3] + keys


@pytest.mark.asyncio
async def test_a_lease_ends_while_the_machine_sleeps(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, which was awake, has given all to others by then."""
    slept, said = [0.0], list[str]()
    clock = time.clock_gettime_ns
    monkeypatch.setattr(
        time,
        "clock_gettime_ns",
        lambda which: clock(which) + int(slept[0] * 1e9) * (which == BOOTTIME),
    )
    async with AsyncClient(target) as client, asyncio.timeout(WAIT_SECONDS):
        bucket = client.bucket()
        await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
        async with bucket.changes(resume=Group(GROUP), on_status=said.append) as member:
            await anext(member)
            slept[0] = 3600
            await anext(member)
    assert any("the lease has ended" in words for words in said), said


@pytest.mark.asyncio
async def test_a_slow_on_revoked_keeps_the_lease_of_what_stays(target: str) -> None:
    async def share(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        revoked: list[int] = []

        async def lose(partitions: list[int]) -> None:
            await asyncio.sleep(1.5 * lease_seconds)
            revoked.append(len(partitions))

        group = Group(GROUP, lease_seconds=lease_seconds, on_revoked=lose)
        async with (
            bucket.changes(resume=group, on_status=say) as member,
            bucket.changes(resume=Group(GROUP)) as other,
            asyncio.TaskGroup() as tasks,
        ):
            following = [tasks.create_task(anext(member))]
            await until(lambda: member.status().owned == 1024)
            following.append(tasks.create_task(anext(other)))
            await until(lambda: revoked and other.status().owned == 512)
            await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
            await asyncio.wait(following)
            assert revoked == [512]

    await keeps_its_lease(target, share)


@pytest.mark.asyncio
async def test_a_lease_does_not_end_while_handlers_end_before_a_rollback(target: str) -> None:
    async def follow(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        handled: list[bytes] = []

        async def handle(change: Change) -> None:
            handled.append(change.value or b"")
            if change.value == b"old":
                # The event loop waits meanwhile, so that nobody looks for the bucket before it is there again.
                with Client(target) as other:
                    other.admin.drop_bucket(bucket.name)
                    other.admin.create_bucket(bucket.name)
                    other.bucket(bucket.name).set(b"key", b"new")
                await asyncio.sleep(2.5 * lease_seconds)

        await bucket.set(b"key", b"old")
        changes = bucket.changes(
            resume=Group(GROUP, lease_seconds=lease_seconds),
            acknowledge="manual",
            on_rollback=lambda _: None,
            on_status=say,
        )
        async with changes, asyncio.TaskGroup() as tasks:
            tasks.create_task(changes.run(handle))
            await until(lambda: b"new" in handled)
            changes.stop()
        assert handled == [b"old", b"new"]

    await keeps_its_lease(target, follow)


@pytest.mark.asyncio
async def test_a_slow_member_that_takes_batches_does_none_twice(target: str) -> None:
    async def take(bucket: AsyncBucket, lease_seconds: float, say: Say) -> None:
        said: list[str] = []
        keys: list[bytes] = []

        def told(words: str) -> None:
            said.append(words)
            say(words)

        await bucket.write_many((b"key %d" % i, b"v") for i in range(CHANGES))
        async with slow_member(bucket, told, lease_seconds) as changes:
            async for batch in changes.batches():
                keys += [change.key for change in batch.changes]
                if b"more" in keys:
                    break
                if len(keys) == CHANGES:
                    # Time itself: its lease is to end by its own count.
                    await asyncio.sleep(1.5 * lease_seconds)
                    await bucket.set(b"more", b"v")
        assert any("lease has ended" in words for words in said)
        assert len(keys) == CHANGES + 1

    # By the count of the server, which hears of it all the time, it does not.
    await keeps_its_lease(target, take, "another member's")


def check_handed(handed: list[Handed], high: dict[int, int], resumes: int) -> None:
    """Nothing was lost; and who lost a partition was handed nothing of it once the next one was."""
    seen: dict[int, set[int]] = {}
    for one in handed:
        seen.setdefault(one.partition, set()).add(one.seqno)
    for partition, seqno in high.items():
        missing = set(range(1, seqno + 1)) - seen.get(partition, set())
        assert not missing, f"partition {partition}: {sorted(missing)[:10]} reached nobody"
    newest: dict[int, Handed] = {}
    late = []
    for one in sorted(handed):
        before = newest.get(one.partition)
        if before is None or one.generation >= before.generation:
            newest[one.partition] = one
        elif one.member != before.member:
            late.append((before, one))
    # What was handed out in the moment of the pause may be written down after it.
    assert len(late) <= resumes, late[:5]
