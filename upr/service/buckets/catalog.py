"""The catalog: the buckets of one server, by name."""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE
from upr.service import trouble
from upr.service.buckets.bucket_service import LOST_HINT, BucketService, new_failover_id
from upr.service.buckets.room import DiskRoom, WaitingRoom
from upr.service.clock import Clock
from upr.service.overload.process import buckets_max
from upr.service.trouble import words_of
from upr.storage.blocks import COMPRESSIONS
from upr.storage.directory import DataDirectory
from upr.storage.journal import Journal
from upr.storage.keyspace import PartitionRow
from upr.storage.store import Identity, Store
from upr_protocol.errors import (
    AlreadyExistsError,
    BucketGoneError,
    BucketNotFoundError,
    DataDamagedError,
    DataDirectoryError,
    InvalidArgumentError,
    NoRoomError,
    ShuttingDownError,
    StorageFailedError,
    TooManyError,
    UprError,
    shown,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import BUCKETS_MAX, NAME_BYTES_MAX, PARTITIONS, check_name

log = logging.getLogger(__name__)

DEFAULT_BUCKET = "default"
NEW_BUCKET_BYTES = 2**20
WATCH_SECONDS = 1.0
"""How often it is looked whether the data directory and its files are still there."""
DAMAGED_HINT = "put a copy of its folder in its place and restart the server, or drop the bucket"
GONE_HINT = "what was known of the old one is void; begin from 0"
_T = TypeVar("_T")


class DuplicateBucketError(DataDirectoryError):
    """Two folders of the data directory are the same bucket by name."""


def create_bucket(directory: DataDirectory, name: str, compression: str = "") -> Path:
    """Make a bucket: every partition active, born with one failover record at 0. Returns its folder."""
    identity = Identity(check_name(name, "bucket"), 1 + secrets.randbelow(2**64 - 1), compression)
    folder = directory.new_bucket(identity.version)
    try:
        store = Store(folder / "store")
        rows = {
            partition: PartitionRow(
                ACTIVE, 1, 0, 0, 0, FailoverLog.born(new_failover_id(), epoch=1)
            )
            for partition in range(PARTITIONS)
        }
        store.create(identity, rows)
        store.close()
        journal = Journal(folder / "journal", identity.version)
        list(journal.replay())
        journal.close()
        failpoints.hit("bucket.before_create")
        return directory.bucket_created(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(frozen=True, slots=True)
class DamagedBucket:
    """A bucket that could not be opened; nothing of it is served.

    Attributes:
        folder: where it lies.
        name: its name, or its version as 16 hex digits where the name cannot be read.
        version: as its folder says.
        named: whether the name could be read.
        problem: what is said to everybody who asks for it.
    """

    folder: Path
    name: str
    version: int
    named: bool
    problem: UprError


def _damaged(folder: Path, error: Exception) -> DamagedBucket:
    identity = None
    with contextlib.suppress(Exception), contextlib.closing(Store(folder / "store")) as store:
        identity = store.identity()
    name = identity.name if identity is not None else folder.name
    if isinstance(error, UprError):
        problem = error
    else:
        problem = DataDamagedError(f"{folder} cannot be opened: {words_of(error)}")
    # Clients are told of it: where the data directory lies is not theirs to know.
    problem.message = problem.message.replace(f"{folder.parent}{os.sep}", "")
    version = int(folder.name, 16) if identity is None else identity.version
    return DamagedBucket(folder, name, version, identity is not None, problem)


class Catalog:
    """The buckets of a data directory, all of them opened at start.

    The bucket ``default`` exists from the start: it is made when it is not there, also after it was dropped. A
    bucket that cannot be opened takes the others not down: it is listed, and requests get its problem. When no bucket
    can be opened, the start fails.

    Raises:
        DataDirectoryError, DataDamagedError: no bucket can be opened, or two have the same name.
    """

    def __init__(
        self, directory: DataDirectory, config: ServerConfig, clock: Clock | None = None
    ) -> None:
        self._directory = directory
        self._config = config
        self._clock = clock or Clock()
        self._hosts: dict[str, BucketService] = {}
        self._damaged: dict[str, DamagedBucket] = {}
        self._creating: dict[str, asyncio.Task[BucketService]] = {}
        self._renaming: dict[str, asyncio.Task[Path]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._watching: asyncio.Task[None] | None = None
        self._lost = ""
        self._room = DiskRoom(directory.path)
        self._on_failure: Callable[[], Awaitable[None]] | None = None
        self._waiting = WaitingRoom()
        try:
            self._open_all()
        except BaseException:
            for host in self.hosts:
                host.close_files()
            raise

    def _open_all(self) -> None:
        self._remove_leftovers()
        for folder in self._directory.buckets():
            try:
                self._add(
                    BucketService(folder, self._config, self._waiting, self._clock, self._room)
                )
            except DuplicateBucketError:
                raise
            except Exception as error:
                damaged = _damaged(folder, error)
                self._damaged[damaged.name] = damaged
        if self._damaged and not self._hosts:
            raise next(iter(self._damaged.values())).problem
        for damaged in self._damaged.values():
            damaged.problem.hint = damaged.problem.hint or DAMAGED_HINT
            log.critical(
                "a bucket is damaged and is not served",
                extra={"bucket": damaged.name, "problem": str(damaged.problem)},
            )
        if DEFAULT_BUCKET not in self._hosts and self._may_create(DEFAULT_BUCKET):
            folder = create_bucket(self._directory, DEFAULT_BUCKET)
            self._add(BucketService(folder, self._config, self._waiting, self._clock, self._room))

    def _remove_leftovers(self) -> None:
        try:
            for name in self._directory.remove_leftovers():
                log.info("a folder that a crash left was deleted", extra={"folder": name})
        except OSError as error:
            # They are never served; what remains is tried again at the next start.
            log.error("a dropped bucket could not be deleted", extra={"error": str(error)})

    def _add(self, host: BucketService) -> None:
        name = host.bucket.identity.name
        other = self._hosts.get(name)
        if other is not None:
            host.close_files()
            raise DuplicateBucketError(
                f"{other.folder} and {host.folder} are both the bucket {shown(name)}",
                hint="move one of them out of the data directory",
            )
        self._hosts[name] = host

    def _may_create(self, name: str) -> bool:
        """Whether a name is free, as far as can be known: a bucket whose name cannot be read may have it."""
        return name not in self._damaged and all(one.named for one in self._damaged.values())

    # Asking

    @property
    def hosts(self) -> list[BucketService]:
        """All open buckets."""
        return list(self._hosts.values())

    @property
    def damaged(self) -> list[DamagedBucket]:
        """The buckets that could not be opened."""
        return list(self._damaged.values())

    @property
    def failed(self) -> bool:
        """Whether the storage of every bucket has failed, so that no write can be taken at all."""
        failures = [host.bucket.failure is not None for host in self.hosts]
        return bool(failures) and all(failures)

    @property
    def fine(self) -> dict[str, bool]:
        """By bucket, whether nothing is wrong with its storage."""
        return {host.bucket.identity.name: host.problem is None for host in self.hosts} | {
            damaged.name: False for damaged in self.damaged
        }

    def find(self, name: str, version: int | None = None) -> BucketService:
        """Return a bucket.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version.
            UprError: it could not be opened; DATA_DAMAGED mostly.
        """
        host = self._hosts.get(name)
        if host is None:
            raise self._missing(name)
        _check_version(name, host.bucket.identity.version, version)
        return host

    def _missing(self, name: str) -> UprError:
        if len(name) > NAME_BYTES_MAX:
            check_name(name, "bucket")
        damaged = self._damaged.get(name)
        if damaged is not None:
            # Raised again and again it would gather the frames, with their requests, of everybody who asked.
            return damaged.problem.with_traceback(None)
        nameless = next((one for one in self._damaged.values() if not one.named), None)
        if nameless is not None:
            # "There is none" would have its consumers give up what they have.
            return DataDamagedError(
                f"there is no bucket {shown(name)}, but one whose name cannot be read: {nameless.problem.message}",
                hint=nameless.problem.hint,
            )
        known = ", ".join(sorted(self._hosts))
        return BucketNotFoundError(
            f"there is no bucket {shown(name)}",
            hint=f"known: {known}" if known else "'upr-admin bucket create' makes one",
        )

    def of(self, request: Any) -> BucketService:
        """Return the bucket that a request names by ``bucket`` and, if it knows it, ``bucket_version``.

        Raises:
            BucketNotFoundError, BucketGoneError, UprError: see ``find``.
        """
        known = request.HasField("bucket_version")
        return self.find(request.bucket, request.bucket_version if known else None)

    # Creating

    async def create(self, name: str, compression: str = "") -> BucketService:
        """Make an empty bucket and serve it; goes on when the caller gives up waiting.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            compression: of stored blocks, "" for none or "zstd".

        Raises:
            InvalidArgumentError: a value is out of its range.
            AlreadyExistsError: the name is taken.
            TooManyError: there are BUCKETS_MAX buckets, or as many as the limit of open files allows.
            NoRoomError, StorageFailedError, DataDirectoryError: it cannot be stored or opened.
            ShuttingDownError: the server is stopping.
        """
        check_name(name, "bucket")
        if compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"compression {shown(compression)} is unknown", hint="it is empty for none, or zstd"
            )
        while True:
            self._check_new(name)
            if renaming := self._renaming.get(name):
                # Not before the old one has lost its name for good: after a crash both would be there.
                await asyncio.wait({renaming})
            elif self._closing and self._count + len(self._closing) >= buckets_max():
                await asyncio.wait(self._closing, return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        task = asyncio.create_task(self._create(name, compression))
        self._creating[name] = task
        return await finish_even_if_cancelled(task)

    @property
    def _count(self) -> int:
        return len(self._hosts) + len(self._damaged) + len(self._creating)

    def _check_new(self, name: str) -> None:
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")
        if name in self._hosts or name in self._creating or name in self._damaged:
            raise AlreadyExistsError(
                f"there is a bucket {shown(name)}", hint="drop it, or take another name"
            )
        if not self._may_create(name):
            raise self._missing(name)
        if self._count >= (most := buckets_max()):
            short = most < BUCKETS_MAX
            raise TooManyError(
                f"there are {self._count} buckets, the limit is {most}",
                hint="the process may open few files, raise 'ulimit -n'"
                if short
                else "drop one, or start another server",
                retriable=False,
            )

    async def _create(self, name: str, compression: str) -> BucketService:
        try:
            host = await asyncio.to_thread(self._create_now, name, compression)
        finally:
            del self._creating[name]
        self._add(host)
        self._start(host)
        log.info("bucket created", extra={"bucket": name})
        await self._tell_health()
        return host

    def _create_now(self, name: str, compression: str) -> BucketService:
        if lost := self._directory.lost():
            raise StorageFailedError(lost, hint=LOST_HINT)
        if self._room.above_reserve() < NEW_BUCKET_BYTES:
            raise NoRoomError(
                f"a new bucket takes {NEW_BUCKET_BYTES} bytes above the disk's reserve",
                hint="free some space, or drop a bucket",
            )
        try:
            folder = create_bucket(self._directory, name, compression)
            failpoints.hit("bucket.after_create")
            try:
                return BucketService(folder, self._config, self._waiting, self._clock, self._room)
            except BaseException:
                shutil.rmtree(self._directory.drop_bucket(folder), ignore_errors=True)
                raise
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"bucket {shown(name)} could not be created: {words_of(error)}"
            ) from error

    # Dropping

    async def drop(self, name: str, version: int | None = None) -> int:
        """Remove a bucket with its data, and return its version; goes on when the caller gives up waiting.

        From the first step on it is gone for everybody, and its calls end with BUCKET_GONE. The answer comes when it
        is gone on the disk too; its data is deleted after that. If the server dies before, the bucket is there again,
        whole, with its version.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version; nothing is dropped.
            StorageFailedError: its folder could not be renamed: it is not served, and there again after a restart.
            ShuttingDownError: the server is stopping.
        """
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")
        damaged = self._damaged.get(name)
        host = self.find(name, version) if damaged is None else None
        if host is not None:
            known, folder = host.bucket.identity.version, host.folder
            del self._hosts[name]
            host.leave(BucketGoneError(f"bucket {shown(name)} was dropped", hint=GONE_HINT))
        else:
            assert damaged is not None
            known, folder = damaged.version, damaged.folder
            _check_version(name, known, version)
            del self._damaged[name]
        renaming = asyncio.create_task(self._rename(name, known, folder))
        self._renaming[name] = renaming
        closing = asyncio.create_task(self._close_dropped(host, renaming))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await finish_even_if_cancelled(renaming)
        log.info("bucket dropped", extra={"bucket": name, "version": f"{known:016x}"})
        return known

    async def _rename(self, name: str, version: int, folder: Path) -> Path:
        def rename() -> Path:
            failpoints.hit("bucket.before_drop")
            dropped = self._directory.drop_bucket(folder)
            failpoints.hit("bucket.after_drop")
            return dropped

        try:
            return await asyncio.to_thread(rename)
        except OSError as error:
            problem = StorageFailedError(
                f"bucket {shown(name)} was dropped, but its folder {folder.name} could not be renamed: {words_of(error)}",
                hint="drop it again; until then a restart brings it back",
            )
            # The name stays taken: two folders of one name would be there at the next start.
            self._damaged[name] = DamagedBucket(folder, name, version, True, problem)
            raise problem from error
        finally:
            del self._renaming[name]

    async def _close_dropped(
        self, host: BucketService | None, renaming: asyncio.Task[Path]
    ) -> None:
        try:
            if host is not None:
                await host.discard()
            await asyncio.to_thread(shutil.rmtree, await renaming)
        except Exception as error:
            log.error("a dropped bucket could not be deleted", exc_info=error)
        await self._tell_health()

    async def _tell_health(self) -> None:
        if self._on_failure is not None:
            await self._on_failure()

    # Starting and stopping

    def start(self, on_failure: Callable[[], Awaitable[None]]) -> None:
        """Begin to commit and flush; ``on_failure`` is awaited whenever ``failed`` or ``fine`` may have changed."""
        self._on_failure = on_failure
        for host in self.hosts:
            self._start(host)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Fail what is not there any more, also when nobody writes: open files go on working when they are deleted."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._look_at_files()

    async def _look_at_files(self) -> None:
        lost = ""
        with contextlib.suppress(OSError):
            lost = await asyncio.to_thread(self._directory.lost)
        if lost and not self._lost:
            log.critical(
                "the data directory is lost",
                extra={"path": self._directory.path, "error": lost},
            )
        self._lost = self._lost or lost
        for host in self.hosts:
            if self._lost:
                host.fail(StorageFailedError(self._lost, hint=LOST_HINT))
                continue
            host.look_at_room()
            try:
                await host.check_files()
                host.disk.troubles.ends(trouble.FILES)
            except BucketGoneError:
                continue
            except OSError as error:
                host.disk.troubles.begins(trouble.FILES, error)

    def _start(self, host: BucketService) -> None:
        assert self._on_failure is not None
        host.start(self._on_failure)

    async def close(self) -> bool:
        """Let what was begun be done, and close all buckets at once; False when one could not store everything."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            # What happened since the last look must not be called clean.
            await self._look_at_files()
        while unfinished := {*self._creating.values(), *self._renaming.values(), *self._closing}:
            await asyncio.wait(unfinished)
        outcomes = await asyncio.gather(*(h.close() for h in self.hosts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.error("a bucket could not be closed", exc_info=outcome)
        return not self._lost and all(outcome is True for outcome in outcomes)


async def finish_even_if_cancelled(task: "asyncio.Task[_T]") -> _T:
    """Wait for a task that is not to stop half-way when the one who waits does."""
    # Nobody may be left to see its error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


def _check_version(name: str, known: int, asked: int | None) -> None:
    if asked is not None and asked != known:
        raise BucketGoneError(
            f"bucket {shown(name)} has version {known:016x}, not {asked:016x}: it was created anew",
            hint=GONE_HINT,
        )
