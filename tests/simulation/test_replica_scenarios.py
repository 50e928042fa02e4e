"""Changes of owner step by step, in the world ``replicas``: what a random world seldom does."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.looping import SimulatedLoop, running
from tests.simulation.people import write_rows
from tests.simulation.processes import ServerProcess
from tests.simulation.replicas import ReplicasWorld
from tests.simulation.truth import KEYS, USED
from tests.simulation.worlds import prepared
from upr.engine.bucket import Bucket
from upr.replica.ownership import Ownership
from upr_client import AsyncClient
from upr_client.types import WriteResults
from upr_protocol.ownership import Standing
from upr_protocol.partitioning import partition_of

STAR, CHAIN = (0, 0), (0, 1)
Begin = Callable[..., ReplicasWorld]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begin]:
    """Return a function that begins a world of three servers, the first of which is active."""
    living = []

    def begin(upstreams: tuple[int, int] = STAR) -> ReplicasWorld:
        world = ReplicasWorld(tmp_path / "world", 5, upstreams)
        living.append(world.living())
        living[-1].__enter__()
        world.begin()
        counted = 1 + (upstreams == STAR)
        world.until(lambda: len(standing(world.servers[0]).row.counted) == counted, 20, "counted")
        world.pass_time(2.0)
        return world

    with prepared(0):
        try:
            yield begin
        finally:
            for one in living:
                one.__exit__(None, None, None)


def standing(server: ServerProcess) -> Standing:
    assert server.ownership is not None
    return server.ownership.standing


def end(world: ReplicasWorld) -> None:
    world.settle()
    world.check()


@pytest.mark.long
def test_what_only_the_other_replica_has_is_found(begun: Begin) -> None:
    world = begun()
    active, _, lacks = world.servers
    cuts = world.cut_off(active, lacks)
    world.pass_time(3.0)
    active.kill()
    world.net.heal(*cuts)
    assert world.promoted(lacks) == ""
    end(world)


@pytest.mark.long
def test_a_server_with_an_empty_disk_is_not_the_one_that_was_counted(begun: Begin) -> None:
    world = begun()
    active, lacks, has = world.servers
    world.cut_off(active, lacks)
    world.pass_time(3.0)
    has.lose_disk((active.address, lacks.address))
    active.kill()
    world.net.heal()
    has.start()
    world.pass_time(3.0)
    assert world.promoted(lacks) == "NOT_HEARD"
    active.start()
    world.pass_time(3.0)
    # The directory is gone for good, and this server has everything.
    assert world.promoted(active, force=True) == ""
    end(world)


class NothingStays(random.Random):
    """Chance that leaves nothing of what was not synced."""

    def random(self) -> float:
        return 0.0

    def randint(self, a: int, b: int) -> int:
        return a

    def choice(self, seq: Any) -> Any:
        return seq[0]


@pytest.mark.long
def test_a_promise_outlives_a_loss_of_power(begun: Begin) -> None:
    world = begun()
    active, candidate, other = world.servers
    # Both replicas have the same, and the active server does not hear of the promise.
    world.cut_off(active, candidate)
    cuts = world.cut_off(active, other)
    world.pass_time(1.0)
    world.order(candidate)
    world.until(lambda: standing(other).promised >= 2, 20, "promised", 0.0005)
    # Its answer is on its way, and the candidate does not serve before the other is back.
    candidate.pause(8.0)
    world.pass_time(0.5)
    other.kill()
    world.medium.lose_power(other.data, NothingStays())
    world.net.heal(*cuts)
    other.start()
    world.until(lambda: other.ownership is not None, 10, "started")
    assert standing(other).promised >= 2
    world.pass_time(10.0)
    world.net.heal()
    end(world)


@pytest.mark.long
def test_an_owner_that_was_killed_goes_on_under_a_new_id(begun: Begin) -> None:
    world = begun()
    active = world.servers[0]
    assert active.bucket is not None
    bucket = active.bucket.bucket
    # Something was numbered that is not on its disk.
    world.until(lambda: bucket.tail.end > bucket.tail.durable, 20, "numbered", 0.0005)
    epoch, ids = standing(active).row.epoch, bucket.partitions.newest_id[USED].tolist()
    active.kill()
    world.pass_time(1.0)
    active.start()
    world.until(lambda: active.active, 30, "active")
    assert standing(active).row.epoch > epoch
    assert engine(active).partitions.newest_id[USED].tolist() != ids
    end(world)


@pytest.mark.long
def test_a_split_brain_heals(begun: Begin) -> None:
    world = begun()
    active, candidate, _ = world.servers
    world.cut_off(active)
    world.pass_time(1.0)
    assert world.promoted(candidate) == ""
    world.pass_time(4.0)
    assert active.active
    assert candidate.active
    end(world)
    assert world.counts["undone at disk"] > 0
    assert candidate.active


@pytest.mark.long
def test_who_met_a_higher_epoch_acknowledges_nothing_while_it_stores_that(
    begun: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begun()
    active, candidate, _ = world.servers
    cuts = world.cut_off(active)
    world.pass_time(1.0)
    assert world.promoted(candidate) == ""
    world.pass_time(2.0)
    assert active.active
    store = Ownership.store

    async def slow(ownership: Ownership, change: Any) -> Any:
        if running() is active.loop:
            await asyncio.sleep(2.0)
        return await store(ownership, change)

    monkeypatch.setattr(Ownership, "store", slow)
    world.net.heal(*cuts)
    world.until(lambda: not active.active, 20, "stepped down")
    assert world.truth.told_while_active
    end(world)


@pytest.mark.long
def test_an_emptied_server_that_has_joined_nobody_is_not_active_by_force(begun: Begin) -> None:
    world = begun()
    active, emptied, _ = world.servers
    cuts = world.cut_off(emptied)
    emptied.lose_disk((active.address,))
    emptied.start()
    world.pass_time(1.0)
    assert world.promoted(emptied, force=True) == "NOT_JOINED"
    assert not emptied.active
    world.net.heal(*cuts)
    end(world)
    assert active.active


@pytest.mark.long
def test_a_chain_loses_its_links_in_turn(begun: Begin) -> None:
    world = begun(CHAIN)
    first, second, third = world.servers
    second.kill()
    world.pass_time(2.0)
    second.start()
    world.until(lambda: world.in_step(first), 30, "in step")
    first.kill()
    assert world.promoted(third) == "NOT_COUNTED"
    assert world.promoted(second) == ""
    world.pass_time(2.0)
    first.start()
    end(world)


@pytest.mark.long
def test_one_returns_to_be_active_with_writes_that_nobody_got(begun: Begin) -> None:
    world = begun()
    first, second, _ = world.servers
    cuts = world.cut_off(first)
    world.pass_time(2.0)
    first.kill()
    assert world.promoted(second) == ""
    # Not before: what a process that was killed has handed to its system still comes.
    world.net.heal(*cuts)
    first.start()
    world.until(lambda: world.in_step(second), 30, "in step")
    world.until(lambda: len(standing(second).row.counted) >= 2, 30, "counted")
    second.kill()
    world.pass_time(0.5)
    second.start()
    world.until(lambda: world.in_step(second), 30, "in step again")
    world.order(first, takeover=True)
    world.until(lambda: first.active, 30, "active again")
    end(world)
    assert world.counts["undone at disk"] > 0


@pytest.mark.long
def test_a_replica_of_a_replica_that_is_forced_is_the_only_owner(begun: Begin) -> None:
    world = begun(CHAIN)
    first, _, third = world.servers
    assert not standing(third).row.epoch
    assert world.promoted(third, force=True) == ""
    world.until(lambda: not first.active, 30, "stepped down")
    end(world)
    assert third.active


def engine(server: ServerProcess) -> Bucket:
    assert server.bucket is not None
    return server.bucket.bucket


def flush(world: ReplicasWorld, server: ServerProcess) -> None:
    """Have a server store its tail."""
    tail = engine(server).tail
    world.until(lambda: tail.durable == tail.end, 20, "durable")
    assert server.loop is not None
    assert server.bucket is not None
    server.loop.create_task(server.bucket.flusher.flush(wanted=True))
    world.until(lambda: tail.first == tail.end, 20, "flushed")


@pytest.mark.long
@pytest.mark.parametrize(
    "places",
    [
        ("", "recovery.before_records", "recovery.after_records", "promote.after_claim"),
        (
            "promote.before_partitions",
            "promote.after_promises",
            "promote.after_partitions",
            "promote.after_row",
        ),
    ],
)
def test_a_promotion_in_the_middle_of_a_snapshot_goes_back_to_the_marker_before_it(
    tmp_path: Path, places: tuple[str, ...]
) -> None:
    """Cut off behind each part of it but the last one; each time the other server is the active one.

    It also dies at a place on its way to be active, another one each time, where it opens its bucket anew to cut the part off.
    """
    keys = [key for key in KEYS if partition_of(key) == USED[0]]
    written: list[WriteResults] = []
    asked = [1]

    async def write() -> None:
        async with AsyncClient([s.address for s in world.servers], retry_seconds=None) as client:
            bucket = client.bucket(producer="p")
            while True:
                while len(written) < asked[0]:
                    row = keys[len(written) % len(keys)], b"%d" % len(written)
                    written.append(await write_rows(bucket, [row], "disk"))
                await asyncio.sleep(0.05)

    def high(server: ServerProcess) -> int:
        return int(engine(server).partitions.high[USED[0]])

    world = ReplicasWorld(tmp_path / "world", 5, (0,))
    world._frame_bytes = 1
    for server in world.servers:
        server.settings["flush_seconds"] = 1000.0
    # A row is a block, and a frame.
    with prepared(2), world.living():
        world.start()
        SimulatedLoop(world._timeline, "client").create_task(write())
        active, replica = world.servers
        for parts, place in zip(range(1, len(keys)), places, strict=True):
            world.until(lambda: world.in_step(active), 60, "in step")  # noqa: B023
            world.until(lambda: len(written) == asked[0], 30, "written")
            world.until(lambda: high(replica) == high(active), 30, "received")  # noqa: B023
            other = standing(replica).directory
            world.until(lambda: {*standing(replica).row.counted} == {other}, 30, "counted")  # noqa: B023
            marker = high(replica)
            cuts = world.cut_off(active)
            asked[0] += len(keys)
            world.until(lambda: len(written) == asked[0], 30, "written without the replica")
            flush(world, active)
            world.net.lose(active.host, replica.host)
            world.net.reset(active.host, replica.host)
            world.net.heal(*cuts)
            assert world.stops_in_a_stretch(active, replica, parts)
            assert high(replica) == marker + parts < high(active)
            active.kill()
            if place:
                replica.dies_at = place
                assert world.promoted(replica) == "UNAVAILABLE"
                assert replica.died
                replica.kill()
                replica.start()
                world.until(lambda: replica.ownership is not None, 10, "started")  # noqa: B023
                world.pass_time(2.0)
            if not replica.active:
                assert world.promoted(replica) == ""
            table = engine(replica).partitions
            assert (high(replica), table.logs[USED[0]].newest.seqno) == (marker, marker)
            active.start()
            active, replica = replica, active
        world.until(lambda: world.in_step(active), 60, "in step at the end")
        world.check()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_repeated_write_is_known_to_a_replica_that_was_told_of_it(
    tmp_path: Path, flushed: bool
) -> None:
    """Its tail has an older write of the producer, and in one run that is flushed as well."""
    answers: list[WriteResults] = []
    asked = [1]

    async def write() -> None:
        async with AsyncClient([active.address, replica.address], retry_seconds=None) as client:
            bucket = client.bucket(producer="p")
            while True:
                while len(answers) < asked[0]:
                    value = b"%d" % len(answers)
                    answers.append(await write_rows(bucket, [(b"key1", value)], "disk"))
                await asyncio.sleep(0.05)

    world = ReplicasWorld(tmp_path / "world", 5, (0,))
    active, replica = world.servers
    for server in world.servers:
        server.settings["flush_seconds"] = 1000.0
    with prepared(0), world.living():
        world.start()
        directory = standing(replica).directory
        world.until(lambda: {*standing(replica).row.counted} == {directory}, 20, "counted")
        SimulatedLoop(world._timeline, "client").create_task(write())
        world.until(lambda: len(answers) == 1, 20, "written")
        partition = answers[0].runs[0][0]
        world.until(lambda: engine(replica).tail.end > 0, 20, "received")
        cuts = world.cut_off(active)
        asked[0] = 5
        world.until(lambda: len(answers) == 5, 20, "written without the replica")
        # The answer to the last one does not arrive.
        world.net.cuts.add((active.host, "client"))
        asked[0] = 6
        world.until(lambda: engine(active).partitions.high[partition] == 6, 20, "numbered")
        flush(world, active)
        world.net.reset(active.host, replica.host)
        world.net.heal(*cuts)
        world.until(lambda: engine(replica).partitions.complete[partition] == 6, 60, "read")
        world.until(lambda: world.in_step(active), 60, "in step")
        assert engine(replica).tail.first == 0
        if flushed:
            flush(world, replica)
        world.net.lose(active.host, "client")
        active.kill()
        assert world.promoted(replica) == ""
        world.net.heal()
        world.until(lambda: len(answers) == 6, 60, "answered")
        table = engine(replica).partitions
        newest, high = int(table.newest_id[partition]), int(table.high[partition])
        world.truth.check_once(partition, newest, high)
        assert high == 6
