"""Both SDK flavours against a real server: the reference model's state at every marker, through a kill.

One writer, so that the order of the writes is the order of the seqnos in each partition, in the model as in the
server. Everything is acknowledged at ``disk``, so the model never loses anything.
"""

import asyncio
import random
import threading
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.model import ModelBucket, State
from tests.service.test_cuts import Rows, batch
from upr_client import (
    AsyncClient,
    Change,
    ChangeBatch,
    Client,
    FilePositions,
    Marker,
    Only,
    Rollback,
)


class Truth:
    """The model, and the follower's view that is compared with it at each marker."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = ModelBucket()
        self.lock = threading.Lock()
        self.states: dict[int, State] = {p: {} for p in range(1024)}
        self.markers = self.changes = self.deletes = 0

    def batch(self) -> Rows:
        """Draw rows, and write them into the model."""
        with self.lock:
            return batch(self.rng, self.model, self.rng.randint(1, 400))

    def take(self, event: Change | Marker | Rollback) -> None:
        """Apply a change; compare at a marker."""
        assert not isinstance(event, Rollback)
        state = self.states[event.partition]
        if isinstance(event, Marker):
            self.markers += 1
            with self.lock:
                truth = self.model.partitions[event.partition].state_at(event.seqno)
            assert state == truth, f"partition {event.partition} at marker {event.seqno}"
            return
        self.changes += 1
        if event.op == "delete":
            self.deletes += 1
            assert event.value is None
            state.pop(event.key, None)
        else:
            assert event.value is not None
            state[event.key] = event.value

    def check_end(self) -> None:
        merged = {k: v for state in self.states.values() for k, v in state.items()}
        assert merged == self.model.state()
        assert self.markers > 1024
        assert self.deletes > 100


@pytest.mark.asyncio
async def test_single_writes_of_many_connections_drain_like_bulk(target: str) -> None:
    connections, each = 24, 50

    async def write(writer: int) -> None:
        async with AsyncClient(target) as client:
            bucket = client.bucket()
            for number in range(each):
                await bucket.set(b"%d of %d" % (number, writer), b"%d" % number)

    await asyncio.gather(*map(write, range(connections)))
    async with AsyncClient(target) as client, client.bucket().changes(until="now") as seen:
        blocks = 0
        state: dict[bytes, bytes | None] = {}
        async for batch in seen.batches():
            assert isinstance(batch, ChangeBatch)
            blocks += len(batch.blocks)
            state |= {change.key: change.value for change in batch.changes}
    assert state == {
        b"%d of %d" % (n, writer): b"%d" % n for writer in range(connections) for n in range(each)
    }
    # However few of them a commit holds.
    assert blocks <= connections * each / 4


def undone(rollback: Rollback) -> None:
    """After the kill there is a new id, and nothing to undo: no callback is due."""
    raise AssertionError(f"nothing was lost, but {rollback}")


@pytest.mark.asyncio
async def test_asyncio_flavour(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    truth = Truth(1)
    store = FilePositions(tmp_path / "positions")
    async with AsyncClient(server.target) as client:
        bucket = client.bucket("default")

        async def write(batches: int) -> None:
            for _ in range(batches):
                await bucket.write_many(truth.batch())

        async def follow() -> None:
            changes = bucket.changes(resume=store, until="now", on_rollback=undone)
            async with changes:
                async for event in changes:
                    truth.take(event)

        await write(10)
        # Followed while more is written, up to what was there at the start of the call.
        await asyncio.gather(write(30), follow())
        assert truth.changes > 0
        killing = asyncio.create_task(asyncio.to_thread(kill_and_restart, server))
        await asyncio.gather(write(20), follow(), killing)
        await follow()
    truth.check_end()


def kill_and_restart(server: RunningServer) -> None:
    server.kill()
    server.start()


def test_sync_flavour(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    truth = Truth(2)
    store = FilePositions(tmp_path / "positions")
    with Client(server.target) as client:
        bucket = client.bucket("default")

        def write(batches: int) -> None:
            for _ in range(batches):
                bucket.write_many(truth.batch())

        def follow() -> None:
            with bucket.changes(resume=store, until="now", on_rollback=undone) as changes:
                for event in changes:
                    truth.take(event)

        write(10)
        writer = threading.Thread(target=write, args=(30,))
        writer.start()
        follow()
        writer.join()
        writer = threading.Thread(target=write, args=(20,))
        writer.start()
        kill_and_restart(server)
        follow()
        writer.join()
        follow()
    truth.check_end()


@pytest.mark.asyncio
async def test_a_memory_follower_undoes_what_a_kill_took(
    server_process: StartServer, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    rollbacks: list[Rollback] = []
    view: dict[int, dict[bytes, bytes | None]] = {}
    at_marker: dict[tuple[int, int], dict[bytes, bytes | None]] = {}

    def undo(rollback: Rollback) -> None:
        rollbacks.append(rollback)
        partition = rollback.partition
        view[partition] = dict(at_marker.get((partition, rollback.seqno), {}))

    async with AsyncClient(server.target) as client:
        bucket = client.bucket("default")
        for number in range(3):
            await bucket.write_many([(b"key %d" % i, b"%d" % number) for i in range(50)])
        changes = bucket.changes(only=Only(stability="memory"), on_rollback=undo)
        seen: asyncio.Queue[Change] = asyncio.Queue()

        async def follow() -> None:
            async with changes:
                async for event in changes:
                    if isinstance(event, Marker):
                        at_marker[event] = dict(view.setdefault(event.partition, {}))
                    elif isinstance(event, Change):
                        view.setdefault(event.partition, {})[event.key] = event.value
                        seen.put_nowait(event)

        task = asyncio.create_task(follow())
        for _ in range(150):
            await asyncio.wait_for(seen.get(), 30)
        hold.touch()
        await bucket.write_many([(b"key %d" % i, b"lost") for i in range(50)], durability="memory")
        for _ in range(50):
            assert (await asyncio.wait_for(seen.get(), 30)).value == b"lost"
        server.kill()
        hold.unlink()
        server.start()
        await bucket.write_many([(b"key %d" % i, b"new") for i in range(0, 50, 2)])
        news = 0
        while news < 25:
            news += (await asyncio.wait_for(seen.get(), 30)).value == b"new"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    merged = {k: v for state in view.values() for k, v in state.items()}
    assert merged == {b"key %d" % i: b"2" if i % 2 else b"new" for i in range(50)}
    assert rollbacks
    assert {r.from_seqno > r.seqno for r in rollbacks} == {True}
