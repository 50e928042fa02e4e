"""Programs of the kind that a newcomer writes: an index beside a rollback, a cache that begins now, a worker that is stopped."""

import asyncio
import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.harness import RunningServer
from upr_client import AsyncClient, Change, Client, Group, MemoryPositions, Only, Rollback, Tuning
from upr_client.errors import ClosedError, HandlerError, InvalidArgumentError
from upr_client.testing import ScriptedServer, keys_in
from upr_client.types import Changes
from upr_protocol.limits import ADMIN_SOCKET

StartServer = Callable[..., RunningServer]
P = 7
KEYS = keys_in(P, 6)
ROWS = 4000


class Index:
    """Documents by key."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}

    def put(self, change: Change) -> None:
        if change.value is None:
            self.documents.pop(change.key, None)
        else:
            self.documents[change.key] = change.value


def history_is_lost(server: ScriptedServer) -> None:
    """The last four keys never happened; the fourth comes again with another value."""
    server.roll_back(P, 2)
    server.write(KEYS[3], b"new")


def indexing(index: Index, server: ScriptedServer, changes: Changes) -> Callable[[Change], None]:
    """A handler: with the last key the history is lost, with the new value it has seen all."""

    def handle(change: Change) -> None:
        index.put(change)
        if change.key == KEYS[-1]:
            history_is_lost(server)
        elif change.value == b"new":
            changes.stop()

    return handle


# Rollbacks.


def test_batches_give_a_rollback_that_is_no_batch(server: ScriptedServer) -> None:
    index = Index()
    for key in KEYS:
        server.write(key, b"old")
    with (
        Client(server.target) as client,
        client.bucket().changes(only=Only([P]), on_rollback="restart") as changes,
    ):
        batches = changes.batches()
        while index.documents.keys() != set(KEYS):
            for change in next(batches).changes:
                index.put(change)
        history_is_lost(server)
        item = next(batches)
        while not isinstance(item, Rollback):
            item = next(batches)
        # A loop that knows nothing of rollbacks ends here, and its position stays.
        with pytest.raises(AttributeError):
            item.changes  # type: ignore[attr-defined]  # noqa: B018
        assert (item.partition, item.seqno) == (P, 0)
        assert changes.position(P).seqno == len(KEYS)
        index.documents.clear()
        while index.documents != server.state():
            for change in next(batches).changes:
                index.put(change)


def test_an_index_beside_an_older_copy_of_the_data_keeps_nothing_that_never_happened(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    index, undone = Index(), list[int]()
    with Client(server.target) as client:
        client.bucket().write_many((key, b"old") for key in KEYS[:2])
    assert server.terminate() == 0
    copy = shutil.copytree(
        server.data, tmp_path / "copy", ignore=shutil.ignore_patterns(ADMIN_SOCKET)
    )
    server.start()
    with (
        Client(server.target) as client,
        client.bucket().changes(only=Only([P]), on_rollback="restart") as changes,
    ):
        client.bucket().write_many((key, b"lost") for key in KEYS[2:])
        batches = changes.batches()

        def follow_until(wanted: dict[bytes, bytes]) -> None:
            while index.documents != wanted:
                item = next(batches)
                if isinstance(item, Rollback):
                    undone.append(item.partition)
                    index.documents.clear()
                else:
                    for change in item.changes:
                        index.put(change)

        follow_until({key: b"lost" if key in KEYS[2:] else b"old" for key in KEYS})
        server.kill()
        shutil.rmtree(server.data)
        shutil.copytree(copy, server.data)
        server.start()
        with Client(server.target) as other:
            other.bucket().set(KEYS[3], b"new")
        follow_until({KEYS[0]: b"old", KEYS[1]: b"old", KEYS[3]: b"new"})
    assert undone == [P]


@pytest.mark.parametrize("policy", ["restart", "event"])
def test_run_needs_somebody_who_takes_rollbacks(
    server: ScriptedServer, policy: Literal["restart", "event"]
) -> None:
    index, told = Index(), list[int]()
    for key in KEYS:
        server.write(key, b"old")
    options: dict[str, Any] = {"acknowledge": "manual", "on_rollback": policy}
    with (
        Client(server.target) as client,
        client.bucket().changes(only=Only([P]), **options) as changes,
    ):
        with pytest.raises(InvalidArgumentError, match="on_rollback_event is None"):
            changes.run(index.put)

        def undo(rollback: Rollback) -> None:
            told.append(rollback.seqno)
            assert index.documents.keys() == set(KEYS), "undone before all was handled"
            if policy == "restart":
                index.documents.clear()
            else:
                for key in rollback.keys:
                    index.documents.pop(key, None)

        changes.run(indexing(index, server, changes), on_rollback_event=undo)
    assert len(told) == 1
    assert index.documents == {k: v for k, v in server.state().items() if k in index.documents}
    assert index.documents[KEYS[3]] == b"new"
    assert not {KEYS[4], KEYS[5]} & index.documents.keys()


def test_a_rollback_that_could_not_be_undone_is_told_again(server: ScriptedServer) -> None:
    told = list[int]()
    for key in KEYS:
        server.write(key, b"old")

    def undo(rollback: Rollback) -> None:
        told.append(rollback.seqno)
        if len(told) == 1:
            raise OSError("the index cannot be written")

    options: dict[str, Any] = {"acknowledge": "manual", "on_rollback": "event"}
    with (
        Client(server.target) as client,
        client.bucket().changes(only=Only([P]), **options) as changes,
    ):
        handle = indexing(Index(), server, changes)
        with pytest.raises(OSError, match="cannot be written"):
            changes.run(handle, on_rollback_event=undo)
        changes.run(handle, on_rollback_event=undo)
    assert len(told) == 2
    assert told[0] == told[1]


# ``ready``.


def test_what_is_written_once_it_is_ready_is_never_missed(target: str) -> None:
    with Client(target) as writer:
        bucket = writer.bucket()
        for number in range(6):
            key = b"key %d" % number
            bucket.set(key, b"old")
            found = threading.Event()
            with Client(target) as client:
                changes = client.bucket().changes(only=Only(keys_only=True), start="now")

                def follow(changes: Changes, key: bytes, found: threading.Event) -> None:
                    for event in changes:
                        if isinstance(event, Change) and event.key == key:
                            found.set()

                with changes:
                    thread = threading.Thread(target=follow, args=(changes, key, found))
                    if number % 2:
                        thread.start()
                    assert changes.ready(30)
                    bucket.set(key, b"new", durability="memory")
                    if not number % 2:
                        thread.start()
                    assert found.wait(30), f"{key!r} is stale for ever"
                    changes.stop()
                    thread.join()


@pytest.mark.asyncio
async def test_ready_holds_what_comes_until_it_is_asked_for(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((b"key %d" % n, b"v" * 100) for n in range(ROWS))
        async with bucket.changes(until="now") as changes:
            assert await changes.ready()
            assert await changes.ready()
            keys = [c.key async for batch in changes.batches() for c in batch.changes]
    assert len(keys) == len(set(keys)) == ROWS


def test_ready_gives_up_in_time_and_for_a_rollback(server: ScriptedServer) -> None:
    for key in KEYS:
        server.write(key, b"old")
    store = MemoryPositions()
    with Client(server.target) as client:
        bucket = client.bucket()
        with bucket.changes(resume=store, until="now", only=Only([P])) as changes:
            list(changes)
        history_is_lost(server)
        with bucket.changes(resume=store, only=Only([P]), on_rollback="event") as changes:
            assert not changes.ready()
            assert isinstance(next(changes), Rollback)
        server.refuse(P)
        with bucket.changes(only=Only([P])) as changes:
            assert not changes.ready(0.05)
            changes.stop()
            assert not changes.ready()


# ``stop``.


def test_nothing_is_ready_once_it_was_stopped(server: ScriptedServer) -> None:
    with Client(server.target) as client, client.bucket().changes(only=Only([P])) as changes:
        assert changes.ready(20)
        changes.stop()
        assert list(changes) == []
        assert not changes.ready(20)


def test_two_wait_for_ready_at_once(target: str) -> None:
    found: list[bool] = []
    with Client(target) as client, client.bucket().changes(start="now") as changes:
        both = [threading.Thread(target=lambda: found.append(changes.ready(60))) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
    assert found == [True, True]


def stop_from_thread(changes: Changes) -> None:
    threading.Thread(target=changes.stop).start()


def stop_from_signal(changes: Changes) -> None:
    os.kill(os.getpid(), signal.SIGALRM)


@pytest.mark.parametrize("order", ["partition", "key"])
@pytest.mark.parametrize("stop", [stop_from_thread, stop_from_signal])
def test_what_was_handled_is_stored_when_run_is_stopped(
    target: str,
    stop: Callable[[Changes], None],
    order: Literal["partition", "key"],
) -> None:
    handled = list[Change]()
    with Client(target) as client:
        bucket = client.bucket()
        bucket.write_many((b"key %d" % n, b"v") for n in range(ROWS))
        with bucket.changes(
            resume=Group("workers"), tuning=Tuning(save_seconds=3600), acknowledge="manual"
        ) as changes:
            before = signal.signal(signal.SIGALRM, lambda *_: changes.stop())

            def handle(change: Change) -> None:
                # Others go on meanwhile, so that keys of a partition overtake each other.
                time.sleep(0.001 * (change.seqno % 3))
                handled.append(change)
                if len(handled) == 300:
                    stop(changes)

            try:
                changes.run(handle, concurrency=4, order=order)
            finally:
                signal.signal(signal.SIGALRM, before)
            assert list(changes) == []
        (consumer,) = client.admin.consumers(bucket, with_positions=True)
        stored = sum(position.seqno for position in consumer.positions.values())
    assert 300 <= len(handled) < ROWS
    assert stored == len(handled)


@pytest.mark.parametrize("took", [1, 3, len(KEYS)])
def test_stopped_one_by_one_only_what_was_not_given_comes_again(target: str, took: int) -> None:
    store, given = MemoryPositions(), list[int]()
    with Client(target) as client:
        # One frame: the iteration is in the middle of it when it is stopped.
        client.bucket().write_many([(key, b"value") for key in KEYS])
        with client.bucket().changes(resume=store, only=Only([P])) as changes:
            for event in changes:
                if isinstance(event, Change):
                    given.append(event.seqno)
                    if len(given) == took:
                        # What was called is done by another thread.
                        changes.stop()
                        changes._ending.wait()
        assert store.load([P])[P].seqno == took
        with client.bucket().changes(resume=store, until="now", only=Only([P])) as changes:
            given += [event.seqno for event in changes if isinstance(event, Change)]
    assert given == [1, 2, 3, 4, 5, 6]


@pytest.mark.asyncio
async def test_what_waits_for_a_server_that_is_away_is_stopped_too() -> None:
    said = asyncio.Event()
    with ScriptedServer() as server:
        target = server.target
    async with AsyncClient(target, connect_timeout=0.2) as client:
        changes = client.bucket().changes(on_status=lambda words: said.set())
        async with changes:
            following = asyncio.create_task(anext(changes, None))
            await said.wait()
            await asyncio.to_thread(changes.stop)
            assert await following is None


# Reconnecting.


def test_a_server_that_is_back_is_found_within_two_seconds(server_process: StartServer) -> None:
    server = server_process()
    tries = threading.Semaphore(0)
    with Client(server.target) as client:
        changes = client.bucket().changes(start="now", on_status=lambda words: tries.release())
        with changes:
            assert changes.ready()
            server.kill()

            def follow() -> None:
                with suppress(StopIteration):
                    next(changes)

            thread = threading.Thread(target=follow)
            thread.start()
            # As many as make the pause its longest.
            for _ in range(5):
                tries.acquire()
            server.start()
            began = time.monotonic()
            assert changes.ready(30)
            took = time.monotonic() - began
            changes.stop()
            thread.join()
    assert took < 2.0


# Positions in the application's own database.


def start_member(target: str, database: Path, dies: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.client.exactly_once_member", target, str(database)]
    return subprocess.Popen([*command, dies])


def goes_on(member: subprocess.Popen[bytes]) -> bool:
    """Whether it does not end within a moment, in which it has the processor."""
    try:
        member.wait(0.05)
    except subprocess.TimeoutExpired:
        return True
    return False


@pytest.mark.long
def test_a_group_applies_each_change_once_although_members_are_killed(
    target: str, tmp_path: Path
) -> None:
    path = tmp_path / "totals.db"
    members = list[subprocess.Popen[bytes]]()
    try:
        with Client(target) as client:
            bucket = client.bucket()
            number = itertools.count()

            def write() -> None:
                bucket.write_many((b"key %d" % next(number), b"v" * 20) for _ in range(ROWS // 20))

            for dies in ("before", "after"):
                members.append(start_member(target, path, dies))
            for member in members:
                while goes_on(member):
                    write()
                assert member.returncode == -signal.SIGKILL
            members += [start_member(target, path, "never") for _ in range(2)]
            write()
            written = next(number)
        with closing(sqlite3.connect(path, timeout=30.0)) as database:
            applied = "SELECT count(*), count(DISTINCT partition || ' ' || seqno) FROM applied"
            while (counts := database.execute(applied).fetchone())[1] < written:
                assert all(goes_on(member) for member in members[-2:])
            for member in members[-2:]:
                member.terminate()
                assert member.wait(60) == 0
            assert counts == database.execute(applied).fetchone() == (written, written)
            shares = database.execute(
                "SELECT owner, sum(CASE what WHEN 'assigned' THEN partitions ELSE -partitions END) "
                "FROM shares GROUP BY owner"
            ).fetchall()
            assert len(shares) == len(members)
            # Who was not killed was told of each partition that came and went.
            assert sum(1 for _, left in shares if left == 0) >= 2
    finally:
        for member in members:
            member.kill()
            member.wait()


@pytest.mark.parametrize(
    "use",
    [
        lambda bucket, late: bucket.changes(on_rollback=late),
        lambda bucket, late: bucket.changes(resume=Group("g", on_assigned=late)),
        lambda bucket, late: bucket.changes(resume=Group("g", on_revoked=late)),
        lambda bucket, late: bucket.changes(on_status=late),
        lambda bucket, late: bucket.materialize(on_status=late),
        lambda bucket, late: bucket.writer(on_results=late),
    ],
)
def test_without_asyncio_an_async_callback_is_refused(
    use: Callable[[Any, Any], object], server: ScriptedServer
) -> None:
    async def late(*_: object) -> None:
        raise AssertionError("it is never run")

    with Client(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(InvalidArgumentError, match="must not be async"):
            use(bucket, late)


def test_without_asyncio_what_nobody_would_wait_for_handles_nothing(server: ScriptedServer) -> None:
    async def late(*_: object) -> None:
        raise AssertionError("it is never run")

    for key in KEYS:
        server.write(key, b"v")
    positions = MemoryPositions()
    with Client(server.target) as client:
        changes = client.bucket().changes(
            resume=positions, only=Only([P]), until={P: 6}, acknowledge="manual"
        )
        with changes:
            several: tuple[dict[str, Any], ...] = (
                {"dead_letter": late},
                {"on_rollback_event": late},
            )
            for asked in several:
                with pytest.raises(InvalidArgumentError, match="must not be async"):
                    changes.run(lambda _: None, **asked)
            with pytest.raises(InvalidArgumentError, match=r"handler is .*must not be async"):
                changes.run(late)
            # What it returns is seen only then.
            with pytest.raises(HandlerError, match="must be done when it returns"):
                changes.run(lambda change: late(change), retries=0)
    assert positions.load([P])[P].seqno == 0


def test_run_is_called_once_at_a_time(server: ScriptedServer) -> None:
    refused = list[str]()
    server.write(KEYS[0], b"v")
    with (
        Client(server.target) as client,
        client.bucket().changes(only=Only([P]), until={P: 1}, acknowledge="manual") as changes,
    ):

        def again(_: Change) -> None:
            try:
                changes.run(lambda _: None)
            except InvalidArgumentError as error:
                refused.append(error.message)

        changes.run(again)
    assert refused == ["run is under way already; must be called once at a time"]


def test_a_view_that_is_not_open_shows_nothing(server: ScriptedServer) -> None:
    with Client(server.target) as client:
        view = client.bucket().materialize()
        asks: list[Callable[[], object]] = [
            lambda: view.get(KEYS[0]),
            lambda: KEYS[0] in view,
            lambda: len(view),
            lambda: view.ready(0),
        ]
        for ask in asks:
            with pytest.raises(ClosedError, match="the view is not open") as caught:
                ask()
            assert "with statement" in caught.value.hint
        with view:
            assert view.ready(10)
            assert view.get(KEYS[0]) is None
        with pytest.raises(ClosedError, match="the view was closed"):
            view.get(KEYS[0])


@pytest.mark.asyncio
async def test_a_run_that_is_cancelled_goes_on_with_the_next(target: str) -> None:
    """Each waits some time and does something else, with what was handed out and not handled."""
    handled: list[bytes] = []
    under_way, goes_on = asyncio.Event(), asyncio.Event()

    async def handle(change: Change) -> None:
        if len(handled) == 2:
            under_way.set()
            await goes_on.wait()
        handled.append(change.key)

    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"v") for key in KEYS)
        async with bucket.changes(until="now", acknowledge="manual") as changes:
            running = asyncio.create_task(changes.run(handle))
            await under_way.wait()
            running.cancel()
            goes_on.set()
            with suppress(asyncio.CancelledError):
                await running
            assert handled == KEYS[:3]
            await changes.run(handle)
            assert changes.status().unacknowledged == 0
    assert handled == KEYS
