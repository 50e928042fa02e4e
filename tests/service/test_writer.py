"""A bucket's threads: the journal's compiled writer writes what its reference would, and says what failed; workers run what they are given."""

import asyncio
import errno
import os
import resource
import select
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import load
from tests.harness import WAIT_SECONDS, pass_turns, until
from tests.service.bucket_state import started
from upr.config import ServerConfig
from upr.service.buckets import disk_threads
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.disk_threads import Disk, Worker
from upr.service.buckets.flusher import Flusher
from upr.service.clock import Clock
from upr.storage import journal as journal_module
from upr.storage.directory import DataDirectory
from upr.storage.journal import PIECES_MAX, ROOM_RECORD_BYTES, Commit, JournalEntry
from upr.storage.store import Store
from upr_protocol.block import build_block
from upr_protocol.errors import BucketGoneError, StorageFailedError


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = load("upr.service.buckets._writer", tmp_path_factory.mktemp("compiled"))
    return module.Writer


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@contextmanager
def new_bucket(folder: Path) -> Iterator[BucketService]:
    """A bucket where nothing runs."""
    directory = DataDirectory(folder)
    host = Catalog(directory, ServerConfig(folder)).find("default")
    yield host
    host.close_files()
    directory.close()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[BucketService]:
    """A bucket that is started, and stopped cleanly."""
    directory = DataDirectory(folder)
    host = started(Catalog(directory, ServerConfig(folder)).find("default"))
    yield host
    assert await host.close()
    directory.close()


@pytest.fixture
def compiled(writers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_threads, "WRITER", writers)


@pytest.fixture
def disk(tmp_path: Path, compiled: None) -> Iterator[Disk]:
    with new_bucket(tmp_path / "data") as host:
        yield host.disk


@contextmanager
def most_bytes(size: int) -> Iterator[None]:
    """No file may become larger meanwhile."""
    # Python has the signal ignored, pytest's other plugins may not.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def written(writer: Any) -> tuple[int, float, int]:
    assert select.select([writer.fileno()], [], [], WAIT_SECONDS)[0]
    found: tuple[int, float, int] = writer.result()
    return found


def commit(number: int, size: int) -> Commit:
    return Commit(number, (JournalEntry(bytes([number]) * size), JournalEntry(b"second")))


def found(disk: Disk) -> list[Commit]:
    return [one.commit for one in disk.journal.inspect() if one.commit is not None]


def only_the_writer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(_: Commit) -> int:
        raise AssertionError("the journal's thread writes")

    monkeypatch.setattr(disk.journal, "append", append)


def test_all_pieces_are_written_from_an_offset_on(writers: Any, fd: int, tmp_path: Path) -> None:
    writer = writers(tmp_path)
    assert writer.result() is None
    pieces = (b"", *(b"%d," % n for n in range(3 * PIECES_MAX)), b"", b"end")
    for at in (7, 2**20):
        writer.write(fd, pieces, at)
        failed, seconds, changed = written(writer)
        assert (failed, changed) == (0, os.stat(tmp_path).st_mtime_ns)
        assert 0 < seconds < WAIT_SECONDS
        assert os.pread(fd, 2**20, at).rstrip(b"\0") == b"".join(pieces)
    assert writer.result() is None
    assert select.select([writer.fileno()], [], [], 0)[0] == [], "it is told again"


def test_what_fails_is_told(writers: Any, fd: int, tmp_path: Path) -> None:
    writer = writers(tmp_path / "nowhere")
    writer.write(fd, (b"x",), 0)
    assert written(writer)[::2] == (0, -1)
    writer.write(-1, (b"x",), 0)
    assert written(writer)[0] == errno.EBADF
    with pytest.raises(TypeError, match="bytes"):
        writer.write(fd, (b"x", bytearray(1)), 0)
    writer.write(fd, (b"y",), 0)
    assert written(writer)[0] == 0
    assert os.pread(fd, 9, 0) == b"y"


def test_a_full_file_takes_a_part_and_the_rest_fails(writers: Any, fd: int, tmp_path: Path) -> None:
    writer = writers(tmp_path)
    with most_bytes(10):
        writer.write(fd, (b"a" * 8, b"b" * 8), 0)
        assert written(writer)[0] == errno.EFBIG
    assert os.pread(fd, 99, 0) == b"a" * 8 + b"b" * 2


def test_one_record_at_a_time_and_the_last_is_written_before_the_end(
    writers: Any, tmp_path: Path
) -> None:
    reader, pipe = os.pipe()
    writer = writers(tmp_path)
    # To write to a pipe at an offset fails, at once.
    writer.write(pipe, (b"x",), 0)
    with pytest.raises(RuntimeError, match="being written"):
        writer.write(pipe, (b"x",), 0)
    assert written(writer)[0] == errno.ESPIPE
    with (tmp_path / "file").open("wb") as file:
        writer.write(file.fileno(), (b"last" * 2**20,), 0)
        writer.close()
        assert file.seek(0, os.SEEK_END) == 4 * 2**20
        assert writer.result()[0] == 0
        with pytest.raises(RuntimeError, match="closed"):
            writer.write(file.fileno(), (b"x",), 0)
        # Nobody asks what became of it.
        dropped = writers(tmp_path)
        dropped.write(file.fileno(), (b"gone" * 2**20,), 0)
        del dropped
        assert Path(file.name).read_bytes() == b"gone" * 2**20
    os.close(reader)
    os.close(pipe)


@pytest.mark.asyncio
async def test_commits_are_written_by_the_writer_where_there_is_room(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first small one has room made for it, by the journal's thread.
    commits = [commit(1, 10), commit(2, 20), commit(3, ROOM_RECORD_BYTES), commit(4, 30)]
    sizes = [await disk.append(commits[0])]
    assert disk.journal.size >= ROOM_RECORD_BYTES
    only_the_writer(disk, monkeypatch)
    sizes += [await disk.append(one) for one in commits[1:3]]
    monkeypatch.undo()
    sizes.append(await disk.append(commits[3]))
    assert found(disk) == commits
    assert disk.journal.write_seconds > 0
    header = disk.journal.size - sum(sizes)
    assert 0 < header <= 2 * ROOM_RECORD_BYTES + 64


@pytest.mark.asyncio
async def test_a_full_segment_is_followed_by_another(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", ROOM_RECORD_BYTES)
    commits = [commit(number, ROOM_RECORD_BYTES) for number in (1, 2, 3)]
    for one in commits:
        await disk.append(one)
    assert found(disk) == commits
    assert len({one.path for one in disk.journal.inspect()}) == 3


@pytest.mark.asyncio
async def test_a_full_disk_leaves_nothing_of_a_record(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_writer(disk, monkeypatch)
    first, second = commit(1, ROOM_RECORD_BYTES), commit(2, 2 * ROOM_RECORD_BYTES)
    await disk.append(first)
    size = disk.journal.size
    with most_bytes(size + 100), pytest.raises(OSError, match="File too large"):
        await disk.append(second)
    assert disk.journal.size == size
    await disk.append(second)
    assert found(disk) == [first, second]


@pytest.mark.asyncio
async def test_after_another_failure_nothing_is_appended(disk: Disk) -> None:
    await disk.append(commit(1, ROOM_RECORD_BYTES))
    (segment,) = {one.path for one in disk.journal.inspect()}
    file, fd = segment.open("rb"), disk.journal._fd
    disk.journal._fd = file.fileno()
    with pytest.raises(StorageFailedError, match="Bad file descriptor"):
        await disk.append(commit(2, ROOM_RECORD_BYTES))
    disk.journal._fd = fd
    file.close()
    with pytest.raises(StorageFailedError, match="Bad file descriptor"):
        await disk.append(commit(2, ROOM_RECORD_BYTES))
    assert found(disk) == [commit(1, ROOM_RECORD_BYTES)]


@pytest.mark.asyncio
async def test_nothing_is_durable_in_a_segment_that_was_deleted(disk: Disk) -> None:
    await disk.append(commit(1, ROOM_RECORD_BYTES))
    (segment,) = {one.path for one in disk.journal.inspect()}
    segment.unlink()
    with pytest.raises(StorageFailedError, match="deleted"):
        await disk.append(commit(2, ROOM_RECORD_BYTES))


def test_the_journal_is_closed_when_its_writer_has_ended(
    writers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_threads, "WRITER", writers)
    closed = []
    with new_bucket(tmp_path / "data") as host:
        journal, writer = host.disk.journal, host.disk._writer
        assert writer is not None
        end = writer.close

        class Closed:
            def close(self) -> None:
                closed.append(journal._fd is None)
                end()

        monkeypatch.setattr(host.disk, "_writer", Closed())
    assert closed == [False]


def test_a_bucket_whose_writer_cannot_be_made_can_be_opened_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_bucket(tmp_path / "data"):
        pass

    def fails(_: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    directory = DataDirectory(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(disk_threads, "WRITER", fails)
        folder = next(iter((tmp_path / "data" / "buckets").iterdir()))
        with pytest.raises(OSError, match="Too many open files") as caught:
            Disk(folder, Clock(), None, list, list)  # type: ignore[arg-type]
    # With the error still in hand.
    Store(folder / "store").close()
    assert caught.value.errno == errno.EMFILE
    directory.close()


@pytest.mark.asyncio
@pytest.mark.usefixtures("compiled")
async def test_segments_go_also_where_no_new_one_can_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)

    def full() -> None:
        raise OSError(errno.ENOSPC, "full")

    async with running(tmp_path / "data") as host:
        for key in (b"a", b"b", b"c"):
            written = await host.write(build_block([key], [b"v"]), b"", None, 0)
            await host.journalled(written.entry)
        segments = {one.path for one in host.disk.journal.inspect()}
        assert len(segments) == 3
        monkeypatch.setattr(host.disk.journal, "_begin_segment", full)
        with pytest.raises(OSError, match="full"):
            await host.flusher.flush(wanted=True)
        # The newest stays, which is appended to.
        assert [path.exists() for path in sorted(segments)] == [False, False, True]
        monkeypatch.undo()


@pytest.mark.asyncio
@pytest.mark.usefixtures("compiled")
async def test_a_flush_removes_what_the_one_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "data") as host:

        async def write(key: bytes) -> None:
            written = await host.write(build_block([key], [b"v"]), b"", None, 0)
            await host.journalled(written.entry)

        monkeypatch.setattr(Flusher, "_is_large", True)
        await write(b"a")
        first = {one.path for one in host.disk.journal.inspect()}
        assert await host.flusher.flush(wanted=True)
        assert all(path.exists() for path in first), "the flush waited for its segments"
        await write(b"b")
        second = {one.path for one in host.disk.journal.inspect()} - first
        assert await host.flusher.flush(wanted=True)
        assert not any(path.exists() for path in first)
        assert all(path.exists() for path in second)
        # With nothing left to store it is the last one.
        assert not await host.flusher.flush(wanted=True)
        assert not any(path.exists() for path in second)


@pytest.mark.asyncio
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("pass_over", [True, False])
async def test_segments_that_cannot_be_removed_are_tried_again_and_fail_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_over: bool
) -> None:
    async with running(tmp_path / "data") as host, asyncio.timeout(WAIT_SECONDS):

        def fails() -> None:
            raise OSError(errno.EIO, "no")

        written = await host.write(build_block([b"a"], [b"v"]), b"", None, 0)
        await host.journalled(written.entry)
        segments = {one.path for one in host.disk.journal.inspect()}
        monkeypatch.setattr(host.disk.journal, "remove_dropped", fails)
        host.flusher.wanted.set()
        await until(lambda: host.problem is not None)
        assert "journal segments cannot be removed" in str(host.problem)
        assert host.serves
        # All is stored, and no flush is under way: it would be tried again for ever.
        await until(lambda: not host.flusher.busy)
        assert not host.bucket.tail.bytes
        assert host.disk.troubles.begun.total() == 1
        if pass_over:
            monkeypatch.undo()
            await until(lambda: host.problem is None)
            assert not any(path.exists() for path in segments)
    # In either case it is stopped cleanly.


@pytest.mark.asyncio
async def test_a_bucket_that_is_dropped_while_segments_are_removed_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, held, go_on = list[asyncio.Task[Any]](), list[bool](), threading.Event()

    def removal() -> None:
        held.append(go_on.wait(WAIT_SECONDS))

    def make(loop: Any, coroutine: Any, **how: Any) -> asyncio.Task[Any]:
        made.append(asyncio.Task(coroutine, loop=loop, **how))
        return made[-1]

    asyncio.get_running_loop().set_task_factory(make)
    with new_bucket(tmp_path / "data") as host:
        started(host)
        written = await host.write(build_block([b"a"], [b"v"]), b"", None, 0)
        await host.journalled(written.entry)
        monkeypatch.setattr(host.disk.journal, "remove_dropped", removal)
        monkeypatch.setattr(host.flusher, "_flush_slices", lambda plan: asyncio.sleep(0))
        host.flusher.wanted.set()
        await until(lambda: host.flusher.busy)
        await pass_turns()
        host.leave(BucketGoneError("it is dropped"))
        go_on.set()
        await host.discard()
        await pass_turns()
    assert held == [True]
    assert all(task.done() for task in made)
    assert not [task for task in made if task._log_traceback], "nobody asked for its error"


@pytest.mark.asyncio
async def test_segments_of_a_dropped_bucket_are_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_bucket(tmp_path / "data") as host:

        def fails() -> None:
            host.disk.gone = BucketGoneError("it is dropped")
            raise FileNotFoundError(errno.ENOENT, "its folder is renamed")

        monkeypatch.setattr(host.disk.journal, "remove_dropped", fails)
        await host.flusher._remove_dropped()
        assert not host.disk.troubles.begun


@pytest.mark.asyncio
async def test_the_journals_thread_waits_for_a_record_that_is_being_written(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __init__(self) -> None:
            self.event = os.eventfd(0)

        def fileno(self) -> int:
            return self.event

        def write(self, fd: int, pieces: tuple[bytes, ...], at: int) -> None:
            self.asked = fd, pieces, at

        def result(self) -> tuple[int, float, int]:
            fd, pieces, at = self.asked
            os.pwritev(fd, pieces, at)
            return 0, 1.0, 0

        def close(self) -> None:
            os.close(self.event)

    slow = Slow()
    monkeypatch.setattr(disk, "_writer", slow)
    done = []
    append = asyncio.create_task(disk.append(commit(1, ROOM_RECORD_BYTES)))
    other = asyncio.create_task(disk.in_journal_thread(lambda: done.append(disk.journal.size)))
    assert not (await asyncio.wait([append, other], timeout=0.05))[0]
    os.eventfd_write(slow.event, 1)
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(append, other)
    assert done[0] > ROOM_RECORD_BYTES
    assert found(disk) == [commit(1, ROOM_RECORD_BYTES)]


@pytest.mark.asyncio
async def test_a_worker_leaves_out_what_was_cancelled_before_its_turn() -> None:
    worker = Worker("test")
    go_on, begun = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> str:
        begun.set()
        go_on.wait(WAIT_SECONDS)
        done.append("first")
        return threading.current_thread().name

    def fails() -> None:
        done.append("fails")
        raise OSError("no disk")

    tasks = [worker.run(first) for _ in range(2)]
    waiting = worker.run(lambda: done.append("cancelled"))
    failing = worker.run(fails)
    await asyncio.to_thread(begun.wait, WAIT_SECONDS)
    # Of a function that runs only the waiting ends.
    for task in (tasks[0], waiting):
        task.cancel()
    await asyncio.gather(tasks[0], waiting, return_exceptions=True)
    go_on.set()
    assert await tasks[1] == "test"
    with pytest.raises(OSError, match="no disk"):
        await failing
    assert done == ["first", "first", "fails"]
    worker.close()
    with pytest.raises(RuntimeError, match="has ended"):
        await worker.run(fails)
    Worker("never used").close()


@pytest.mark.asyncio
async def test_of_two_threads_of_a_worker_one_goes_on_while_the_other_is_held_up() -> None:
    worker = Worker("two threads", 2)
    go_on = threading.Event()
    held = worker.run(lambda: go_on.wait(2 * WAIT_SECONDS))
    async with asyncio.timeout(WAIT_SECONDS):
        for _ in range(3):
            assert not await worker.run(go_on.is_set)
    go_on.set()
    assert await held
    worker.close()
    assert "two threads" not in [thread.name for thread in threading.enumerate()]
