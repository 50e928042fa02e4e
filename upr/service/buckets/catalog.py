"""The catalog: the buckets of one server, by name."""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np

from upr import failpoints
from upr.config import ServerConfig
from upr.engine.partitions import ACTIVE, DEAD, PENDING, REPLICA
from upr.engine.recovery import Undo
from upr.service.buckets.bucket_service import (
    LOST_HINT,
    BucketService,
    new_id,
    not_active,
    not_granted,
)
from upr.service.buckets.keepers import finish_even_if_cancelled, lasting
from upr.service.buckets.room import BUCKET_BYTES, DiskRoom, WaitingRoom
from upr.service.clock import Clock
from upr.service.overload.process import buckets_max
from upr.service.storage_trouble import Failing, is_full, words_of
from upr.storage.blocks import COMPRESSIONS
from upr.storage.directory import (
    OWNER_FILE,
    DataDirectory,
    Stored,
    keep_spare,
    not_buckets,
    read_standing,
    write_standing,
)
from upr.storage.journal import Journal
from upr.storage.keyspace import PartitionRow
from upr.storage.lmdb_pages import free_bytes
from upr.storage.store import Identity, Store
from upr.storage.undone import forget_undone, keep_bucket
from upr_protocol.errors import (
    AlreadyExistsError,
    BehindError,
    BucketGoneError,
    BucketNotFoundError,
    DataDamagedError,
    DataDirectoryError,
    InvalidArgumentError,
    ListenError,
    NoRoomError,
    ShuttingDownError,
    StorageFailedError,
    TooManyError,
    UprError,
    shown,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import BUCKETS_MAX, DROPPED_MAX, NAME_BYTES_MAX, PARTITIONS, check_name
from upr_protocol.wire.v1.replica_service_pb2 import SetMember

log = logging.getLogger(__name__)

DEFAULT_BUCKET = "default"
NEW_BUCKET_BYTES = 2**20 + BUCKET_BYTES
"""Its files, and what is reserved for it from then on: else no other bucket would find room for a write."""
FULL_BYTES = 2**20
"""Less than this is free on a full disk."""
BECOMING_SECONDS = 2.0
"""Longest wait of a Write call, or of a replica, for a change of owner to this server."""
WATCH_SECONDS = 1.0
"""Interval between checks that the data directory and its files still exist."""
DAMAGED_HINT = "put a copy of its folder in its place and restart the server, or drop the bucket"
FORBIDDEN_HINT = "let the server's user read and write all in its folder, and restart the server"
GONE_HINT = "what was known of the old one is void; begin from 0"


class DuplicateBucketError(DataDirectoryError):
    """Two folders of the data directory have a bucket of the same name."""


def create_bucket(
    directory: DataDirectory,
    name: str,
    compression: str = "",
    version: int = 0,
    epoch: int = 1,
    quota: int = 0,
    *,
    active: bool = True,
) -> Path:
    """Create a bucket, each partition with one failover record at 0. Return its folder.

    Args:
        version: 0 draws one.
        epoch: in which this server serves.
        quota: in bytes, 0 for none.
        active: whether the partitions are; otherwise they are pending.
    """
    state = ACTIVE if active else PENDING
    version = version or new_id()
    identity = Identity(check_name(name, "bucket"), version, compression)
    folder = directory.new_bucket(identity.version)
    try:
        store = Store(folder / "store")
        rows = {
            partition: PartitionRow(
                state,
                epoch,
                0,
                0,
                0,
                FailoverLog.born(new_id(), epoch=epoch),
                served_epoch=epoch if state == ACTIVE else 0,
            )
            for partition in range(PARTITIONS)
        }
        store.create(identity, rows)
        if quota:
            store.put_quota(quota)
        store.close()
        journal = Journal(folder / "journal", identity.version)
        list(journal.replay())
        journal.close()
        failpoints.hit("bucket.before_create")
        return directory.bucket_created(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class Ordered(Protocol):
    """Where buckets are created and dropped by order; see ``Catalog.create`` and ``Catalog.drop``."""

    async def create(
        self, name: str, compression: str = "", *, quota: int = 0
    ) -> BucketService: ...

    async def drop(self, name: str, version: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class DamagedBucket:
    """Bucket that could not be opened; nothing of it is served.

    Attributes:
        name: its name, or its version as 16 hex digits where the name could not be read, so that it is not ``named``.
        problem: the error of every request for it.
    """

    folder: Path
    name: str
    version: int
    named: bool
    problem: UprError


def _is_for_want_of_room(folder: Path, error: Exception) -> bool:
    """Return whether something failed as the disk is full, which LMDB tells of as of an I/O error, or damage."""
    if is_full(error):
        return True
    if not isinstance(error, OSError | lmdb.Error | DataDamagedError):
        return False
    with contextlib.suppress(OSError):
        return free_bytes(folder) < FULL_BYTES
    return False


def _is_forbidden(error: Exception) -> bool:
    """Return whether the server may not use a file, as where another user has made it."""
    cause = error.__cause__ if isinstance(error.__cause__, lmdb.Error) else error
    return words_of(cause) in (os.strerror(errno.EACCES), os.strerror(errno.EPERM))


def _no_room(words: str) -> NoRoomError:
    return NoRoomError(f"{words}: the disk is full", hint="free some space, and start again")


def _damaged(folder: Path, error: Exception) -> DamagedBucket:
    identity = None
    with contextlib.suppress(Exception), contextlib.closing(Store(folder / "store")) as store:
        identity = store.identity()
    name = identity.name if identity is not None else folder.name
    problem: UprError
    if _is_for_want_of_room(folder, error):
        problem = _no_room(f"{folder} cannot be opened")
    elif _is_forbidden(error):
        words = f"{folder} cannot be opened: {os.strerror(errno.EACCES)}"
        problem = DataDirectoryError(words, hint=FORBIDDEN_HINT)
    elif isinstance(error, UprError):
        problem = error
    else:
        problem = DataDamagedError(f"{folder} cannot be opened: {words_of(error)}")
    # Without the path: clients see this error, and must not learn paths of the server.
    problem.message = problem.message.replace(f"{folder.parent}{os.sep}", "")
    version = int(folder.name, 16) if identity is None else identity.version
    return DamagedBucket(folder, name, version, identity is not None, problem)


def _rows_of(folder: Path) -> list[PartitionRow]:
    """Return the partitions' rows that can be read; what cannot is reported when the bucket is opened."""
    with contextlib.suppress(Exception), contextlib.closing(Store(folder / "store")) as store:
        return [row for row in store.partitions().values() if isinstance(row, PartitionRow)]
    return []


class Catalog:
    """The buckets of a data directory, all of them opened at start.

    The bucket ``default`` exists from the start: it is created if it is missing, also after a drop; but a replica has
    the buckets of its upstream. A bucket that fails to open does not stop the others; it is listed as damaged and its
    requests fail. If no bucket can be opened, the start fails.

    A server that is no replica and belongs to no set of servers yet draws the id of one.

    Attributes:
        dropped: set when a dropped bucket was closed; for whoever clears it.

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
        self._closing: set[asyncio.Task[Any]] = set()
        self.dropped = asyncio.Event()
        self._stopping = False
        self._watching: asyncio.Task[None] | None = None
        self._lost = ""
        self._room = DiskRoom(directory.path)
        self._on_failure: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._waiting = WaitingRoom()
        self._reopening: dict[str, DamagedBucket] = {}
        # In a cluster the map says which server begins.
        is_of_set = (directory.path / OWNER_FILE).exists()
        begins = config.cluster and not is_of_set
        if is_of_set:
            keep_spare(directory.path)
        told = bool(config.replicate_from or begins)
        self.standing = read_standing(
            directory.path, directory.id, replica=told, meets=config.meets
        )
        if config.is_unreachable and not (self.standing.alone or config.anonymous):
            raise ListenError(
                f"listen address is {config.listen}; must be one that the other servers of the set reach, or be advertised",
                hint="give --advertise HOST:PORT with an address of this host",
            )
        # The first owner, started as a replica, asks whether another one was promoted since: alone it would not.
        asks = told and self.standing.standing.row.epoch == 1
        self.replica = asks or not (self.standing.alone and self._serves())
        self.listed: frozenset[int] | None = None
        """Versions of the buckets that the upstream listed last; None before it did, and at the active server."""
        self.gone: deque[int] = deque(maxlen=DROPPED_MAX)
        """Versions of buckets that an owner is known to have dropped; one that missed it may still have them."""
        self.owner = ""
        """HOST:PORT of the active server while this one is not, as far as it is known."""
        self.becoming: asyncio.Event | None = None
        """Set when the change of owner to this server that is under way has ended; None without one."""
        self.servers: Callable[[], list[str]] = list
        """Returns HOST:PORT of the servers of the set, as far as they are known; none where this one is alone."""
        self.is_newest: Callable[[], bool] = lambda: not self.replica
        """Returns whether no other server can be the active one, as far as the others are met."""
        self.incarnation = secrets.token_hex(8)
        """By it the others know this server from one that runs from a copy of its directory."""
        self.check_only: Callable[[SetMember], Awaitable[None]] = _as_told
        """Raises where another server has the directory of a replica, and answers."""
        self.may_serve: Callable[[], bool] = lambda: True
        """Returns whether nobody else can be the active one at this moment; false means: not known."""
        self.ordered: Ordered = self
        """Creates and drops buckets by order: this server alone, or what has the whole cluster know of it."""
        self.match: Callable[[], Awaitable[None]] = _as_it_is
        """Has the buckets here that there are in the cluster, before they become active."""
        if not self.replica and not directory.cluster:
            directory.join(secrets.token_hex(8))
        try:
            self._open_all()
        except BaseException:
            for host in self.hosts:
                host.close_files()
            raise
        # An owner that was once started as a replica has replicas on disk. What decides which server is active makes them active.
        states = [host.bucket.partitions.state for host in self.hosts]
        self.replica |= bool(np.isin(states, (REPLICA, PENDING)).any())

    def _open_all(self) -> None:
        self._remove_leftovers()
        for name in not_buckets(self._directory.path):
            # Somebody who renamed a bucket's folder would else only see that it is empty, or not there.
            log.warning("what is no bucket's folder is not served", extra={"folder": name})
        for folder in self._directory.buckets():
            try:
                self._add(self._opened(folder))
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
                "a bucket cannot be opened, and is not served",
                extra={"bucket": damaged.name, "problem": str(damaged.problem)},
            )
        # In a cluster the map says which buckets there are.
        decides = not (self.replica or self._config.cluster)
        is_missing = DEFAULT_BUCKET not in self._hosts and decides
        if is_missing and self._may_create(DEFAULT_BUCKET):
            try:
                folder = create_bucket(self._directory, DEFAULT_BUCKET)
            except Exception as error:
                if _is_for_want_of_room(self._directory.path, error):
                    words = f"bucket {DEFAULT_BUCKET} cannot be created in {self._directory.path}"
                    raise _no_room(words) from error
                raise
            self._add(self._opened(folder))

    def _serves(self) -> bool:
        """Return whether all partitions became active in the stored epoch: a promotion may have ended in between."""
        epoch = self.standing.standing.row.epoch
        rows = (
            row
            for folder in (self._directory.buckets() if epoch > 1 else ())
            for row in _rows_of(folder)
        )
        return all(row.served_epoch == epoch for row in rows if row.state != DEAD)

    def _remove_leftovers(self) -> None:
        try:
            for name in self._directory.remove_leftovers():
                log.info("a folder that a crash left was deleted", extra={"folder": name})
        except OSError as error:
            # Leftovers are never served; the next start retries to delete them.
            log.error("a dropped bucket could not be deleted", extra={"error": str(error)})

    def _opened(self, folder: Path, undo: Mapping[int, Undo] | None = None) -> BucketService:
        return BucketService(
            folder, self._config, self._waiting, self._clock, self._room, undo, self.replica
        )

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
        host.may_serve = lambda: self.may_serve()
        host.in_set = lambda: bool(self.servers())
        host.promised = lambda: self.standing.standing.epoch
        host.bucket.partitions.owner = self.owner
        host.raise_epoch()

    def _may_create(self, name: str) -> bool:
        """Return whether a name is surely free: a damaged bucket without a readable name may have it."""
        return name not in self._damaged and all(one.named for one in self._damaged.values())

    # Asking

    @property
    def directory_id(self) -> str:
        """The id of the data directory, 16 hex digits."""
        return self._directory.id

    @property
    def replica_set(self) -> str:
        """The id of the set of servers that this one belongs to; empty for a replica that has not joined one."""
        return self._directory.cluster

    async def keep_standing(self, stored: Stored) -> None:
        """Store the part that this server has in its set, durably, before anything follows from it.

        Raises:
            OSError: it could not be stored; nothing is changed.
        """
        await asyncio.to_thread(write_standing, self._directory.path, stored)
        self.standing = stored
        for host in self.hosts:
            host.raise_epoch()

    def check_active(self) -> None:
        """Raise PartitionNotActiveError, which names the active server, where this one is not: clients go there."""
        if not (self.replica or self.may_serve()):
            raise not_granted()
        if self.replica:
            upstream = self._config.replicate_from
            # A replica that nobody meets knows this one server, which names the active one if it is another.
            alone = len(upstream) == 1 and not (self.owner or self.servers())
            raise not_active(upstream[0] if alone else self.owner)

    async def check_active_soon(self) -> None:
        """As ``check_active``, when a change of owner to this server has ended, or has taken BECOMING_SECONDS.

        Writers that the former owner sent here go on at once then, and not after a pause.
        """
        await self.until_became()
        self.check_active()

    async def until_became(self) -> None:
        """Wait until a change of owner to this server has ended, or has taken BECOMING_SECONDS."""
        if self.replica and self.becoming is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BECOMING_SECONDS):
                    await self.becoming.wait()

    def check_reachable(self) -> None:
        """Raise UprError, NOT_ADVERTISED, where replicas could not be told how to reach this server."""
        if self._config.is_unreachable:
            raise UprError(
                f"the upstream listens on {self._config.listen}, where its replicas cannot reach it",
                hint="start the upstream with --advertise HOST:PORT",
                reason="NOT_ADVERTISED",
                retriable=True,
            )

    def to_read(self, request: Any) -> BucketService:
        """Return the bucket that a consumer's Open, or a Get, names.

        Raises:
            PartitionNotActiveError: this server is not the active one, and only that one will do.
            BehindError, BucketNotFoundError, BucketGoneError: it is not here; see ``not_here``.
        """
        if not request.any_server:
            self.check_active()
        try:
            return self.of(request)
        except (BucketNotFoundError, BucketGoneError) as error:
            if isinstance(error, BucketGoneError) and getattr(request, "at_least", False):
                # The version is the token's: it says nothing of what the client has.
                error.message += ", or the token is of another bucket"
                error.hint = "ask with a token of a write into this bucket"
            raise self.not_here(error) from None

    def not_here(self, error: UprError) -> UprError:
        """Return what a consumer, or a Get, is told where its bucket is not here, has another version, or is opened anew.

        Of a replica that is BehindError: it may not have heard of the bucket, and only the active server knows.
        """
        if not self.replica:
            return error
        hint = "ask another server, or later"
        return BehindError(f"{error.message}; this is a replica", hint=hint, owner=self.owner)

    def join(self, replica_set: str) -> None:
        """Belong to a set of servers from now on, durably; of a server that belongs to none."""
        self._directory.join(replica_set)

    @property
    def hosts(self) -> list[BucketService]:
        return list(self._hosts.values())

    @property
    def damaged(self) -> list[DamagedBucket]:
        """The buckets that could not be opened, and those that are being opened anew: a replica must drop neither."""
        return [*self._damaged.values(), *self._reopening.values()]

    @property
    def failed(self) -> bool:
        """Return whether the storage of every bucket has failed, so that all writes fail."""
        failures = [host.bucket.failure is not None for host in self.hosts]
        return bool(failures) and all(failures)

    @property
    def fine(self) -> dict[str, bool]:
        """By bucket, whether it serves."""
        return {host.bucket.identity.name: host.serves for host in self.hosts} | {
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
        if name in self._reopening:
            return self._reopening[name].problem.with_traceback(None)
        if len(name) > NAME_BYTES_MAX:
            check_name(name, "bucket")
        damaged = self._damaged.get(name)
        if damaged is not None:
            # Without its traceback: raised again and again, it would keep the frames of all callers, with their
            # requests.
            return damaged.problem.with_traceback(None)
        nameless = next((one for one in self._damaged.values() if not one.named), None)
        if nameless is not None:
            # Not BucketNotFoundError: on that, its consumers would drop their data.
            return DataDamagedError(
                f"there is no bucket {shown(name)}, but one whose name cannot be read",
                hint="the server's log and 'upr-admin status' say more",
            )
        # None of the others by name: the caller may not be allowed to know of them.
        return BucketNotFoundError(
            f"there is no bucket {shown(name)}",
            hint="'upr-admin bucket list' shows all, and 'create' makes one",
        )

    def of(self, request: Any) -> BucketService:
        """Return the bucket that a request names by ``bucket`` and, if it knows it, ``bucket_version``; see ``find``."""
        known = request.HasField("bucket_version")
        return self.find(request.bucket, request.bucket_version if known else None)

    # Creating

    def check_new(self, name: str, compression: str) -> None:
        """Raise what ``create`` does where a bucket cannot be made, as far as that is known before."""
        check_name(name, "bucket")
        if compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"compression {shown(compression)} is unknown",
                hint="must be empty for none, or zstd",
            )
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")
        known = (self._hosts, self._creating, self._damaged, self._reopening)
        if any(name in names for names in known):
            raise AlreadyExistsError(
                f"bucket {shown(name)} exists", hint="drop it, or take another name"
            )
        if not self._may_create(name):
            raise self._missing(name)
        if self._count >= (most := buckets_max()):
            short = most < BUCKETS_MAX
            raise TooManyError(
                f"buckets of the server are {self._count}; must be below {most}",
                hint="raise the limit of open files with 'ulimit -n'"
                if short
                else "drop one, or start another server",
                retriable=False,
            )

    async def create(
        self,
        name: str,
        compression: str = "",
        version: int = 0,
        quota: int = 0,
        *,
        active: bool = True,
    ) -> BucketService:
        """Create an empty bucket and serve it; runs to completion even if the caller is cancelled.

        Args:
            name: 1 to 200 bytes of UTF-8 without control characters.
            compression: of stored blocks, "" for none or "zstd".
            version, quota, active: see ``create_bucket``.

        Raises:
            InvalidArgumentError: a value is out of its range.
            AlreadyExistsError: the name is taken.
            PartitionNotActiveError: this server is a replica, and the bucket is to be active.
            TooManyError: BUCKETS_MAX, or the number that the limit of open files allows, is reached.
            NoRoomError, StorageFailedError, DataDirectoryError: it cannot be stored or opened.
            ShuttingDownError: the server is stopping.
        """
        while True:
            self.check_new(name, compression)
            if active:
                # Whenever it waited: this server may have stepped down meanwhile.
                self.check_active()
            if renaming := self._renaming.get(name):
                # Wait until the old folder has lost its name durably: after a crash both would exist.
                await asyncio.wait({renaming})
            elif self._closing and self._count + len(self._closing) >= buckets_max():
                await asyncio.wait(self._closing, return_when=asyncio.FIRST_COMPLETED)
            else:
                break
        make = functools.partial(self._create_now, name, compression, version, quota, active)
        task = asyncio.create_task(self._create(name, make))
        self._creating[name] = task
        return await finish_even_if_cancelled(task)

    @property
    def _count(self) -> int:
        return len(self._hosts) + len(self._damaged) + len(self._creating)

    async def _create(self, name: str, make: Callable[[], BucketService]) -> BucketService:
        try:
            host = await asyncio.to_thread(make)
        finally:
            del self._creating[name]
        await self._serve(host)
        log.info("bucket created", extra={"bucket": name})
        return host

    async def _serve(self, host: BucketService) -> None:
        self._add(host)
        self._start(host)
        await self._tell_health()

    def _create_now(
        self, name: str, compression: str, version: int, quota: int, active: bool
    ) -> BucketService:
        if lost := self._directory.lost():
            raise StorageFailedError(lost, hint=LOST_HINT)
        if self._room.above_reserve() < NEW_BUCKET_BYTES:
            raise NoRoomError(
                f"a new bucket takes {NEW_BUCKET_BYTES} bytes above the disk's reserve",
                hint="free some space, or drop a bucket",
            )
        try:
            epoch = self.standing.standing.row.epoch or 1
            folder = create_bucket(
                self._directory, name, compression, version, epoch, quota, active=active
            )
            failpoints.hit("bucket.after_create")
            try:
                return self._opened(folder)
            except BaseException:
                shutil.rmtree(self._directory.drop_bucket(folder), ignore_errors=True)
                raise
        except (OSError, lmdb.Error) as error:
            raise StorageFailedError(
                f"bucket {shown(name)} could not be created: {words_of(error)}"
            ) from error

    # Reopening

    async def reopen(self, name: str, undo: Mapping[int, Undo]) -> BucketService:
        """Close a bucket, open it without what is undone, and return it; runs to completion even if cancelled.

        Streams end with HISTORY_CHANGED, and until it is open again every request is refused with that reason. If nothing
        could be undone, on a full disk for example, it is opened as it was. If it cannot be opened it is listed as damaged.

        Args:
            undo: see ``recover``.

        Raises:
            BucketNotFoundError: there is none of that name.
            StorageFailedError: nothing was undone; ask again.
            UprError: it could not be opened.
        """
        host = self.find(name)
        # What was acknowledged by the upstream is reported as undone only when it is in the journal.
        await host.journalled(host.bucket.tail.end - 1)
        error = BucketGoneError(
            f"bucket {shown(name)} is opened anew with the history of its upstream",
            hint="ask again",
            reason="HISTORY_CHANGED",
            retriable=True,
        )
        del self._hosts[name]
        version = host.bucket.identity.version
        self._reopening[name] = DamagedBucket(host.folder, name, version, True, error)
        host.leave(error)
        task = asyncio.create_task(self._reopen(name, host, undo))
        self._creating[name] = task
        return await finish_even_if_cancelled(task)

    async def _reopen(
        self, name: str, host: BucketService, undo: Mapping[int, Undo]
    ) -> BucketService:
        folder, undone = host.folder, host.upstream_state.undone if host.upstream_state else 0
        failure: Exception | None = None
        began = self._clock.now()
        try:
            await host.discard()
            try:
                host = await asyncio.to_thread(self._opened, folder, undo)
            except (OSError, lmdb.Error) as error:
                failure = error
                if is_full(error):
                    # It is tried again, and the file of each try would take the room that comes free meanwhile.
                    version = host.bucket.identity.version
                    await asyncio.to_thread(forget_undone, self._directory.path, version, began)
                host = await asyncio.to_thread(self._opened, folder)
        except Exception as error:
            self._damaged[name] = damaged = _damaged(folder, error)
            raise damaged.problem from error
        finally:
            del self._reopening[name], self._creating[name]
        if host.upstream_state is not None:
            host.upstream_state.undone += undone
        await self._serve(host)
        if failure is not None:
            words = f"nothing of bucket {shown(name)} could be undone: {words_of(failure)}"
            raise StorageFailedError(words, retriable=True) from failure
        return host

    async def settled(self) -> None:
        """Wait until no bucket is being created, opened anew or dropped, also for those who were cancelled since."""
        while changing := {*self._creating.values(), *self._renaming.values()}:
            await asyncio.wait(changing)

    # Dropping

    @property
    def versions(self) -> dict[int, str]:
        """The names of all buckets, damaged ones included, by version."""
        named = [(h.bucket.identity.version, h.bucket.identity.name) for h in self.hosts]
        return dict([*named, *((one.version, one.name) for one in self.damaged)])

    def version_of(self, name: str, version: int | None = None) -> int:
        """Return the version of a bucket, which may be damaged; raises what ``find`` does."""
        damaged = self._damaged.get(name)
        if damaged is None:
            return self.find(name, version).bucket.identity.version
        _check_version(name, damaged.version, version)
        return damaged.version

    async def drop(self, name: str, version: int | None = None, *, keep: bool = False) -> int:
        """Remove a bucket with its data, and return its version; runs to completion even if the caller is cancelled.

        From the first step on no request finds it, and its calls end with BUCKET_GONE. The answer comes when the drop
        is durable; the data is deleted after that. If the server dies before the answer, the bucket may be back,
        complete, with its version.

        Args:
            keep: whether the folder of a bucket that is not empty goes to ``undone`` instead.

        Raises:
            BucketNotFoundError: there is none of that name.
            BucketGoneError: it has another version; nothing is dropped.
            StorageFailedError: its folder could not be renamed: it is not served until a restart brings it back.
            ShuttingDownError: the server is stopping.
        """
        if self._stopping:
            raise ShuttingDownError("the server is stopping", hint="connect again")
        known = self.version_of(name, version)
        host = None if name in self._damaged else self._hosts.pop(name)
        folder = self._damaged.pop(name).folder if host is None else host.folder
        if host is not None:
            host.leave(BucketGoneError(f"bucket {shown(name)} was dropped", hint=GONE_HINT))
        kept = host if keep and host is not None and host.bucket.partitions.high.any() else None
        renaming = asyncio.create_task(self._rename(name, known, folder, kept))
        self._renaming[name] = renaming
        closing = asyncio.create_task(self._close_dropped(host, renaming, kept=kept is not None))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await finish_even_if_cancelled(renaming)
        log.info("bucket dropped", extra={"bucket": name, "version": f"{known:016x}"})
        return known

    async def _rename(
        self, name: str, version: int, folder: Path, kept: BucketService | None
    ) -> Path:
        def rename() -> Path:
            failpoints.hit("bucket.before_drop")
            if kept is not None:
                bucket, now = kept.bucket, self._clock.now()
                return keep_bucket(folder, bucket.identity, bucket.partitions.high, now)
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
            # Keep the name taken: the next start would find two folders of one name.
            self._damaged[name] = DamagedBucket(folder, name, version, True, problem)
            raise problem from error
        finally:
            del self._renaming[name]

    async def _close_dropped(
        self, host: BucketService | None, renaming: asyncio.Task[Path], *, kept: bool
    ) -> None:
        try:
            if host is not None:
                await host.discard()
            folder = await renaming
            if not kept:
                await asyncio.to_thread(shutil.rmtree, folder)
        except Exception as error:
            log.error("a dropped bucket could not be deleted", exc_info=error)
        self.dropped.set()
        await self._tell_health()

    async def _tell_health(self) -> None:
        if self._on_failure is not None:
            await self._on_failure()

    # Starting and stopping

    def start(self, on_failure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to commit and flush; ``on_failure`` is awaited whenever ``failed`` or ``fine`` may have changed."""
        self._on_failure = on_failure
        for host in self.hosts:
            self._start(host)
        self._watching = asyncio.create_task(lasting(self._watch))

    async def _watch(self) -> None:
        """Fail buckets whose files are gone, even without writes: deleted files that are open keep working."""
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
                host.disk.troubles.ends(Failing.FILES)
            except BucketGoneError:
                continue
            except OSError as error:
                host.disk.troubles.begins(Failing.FILES, error)

    def _start(self, host: BucketService) -> None:
        assert self._on_failure is not None
        host.start(self._on_failure)

    async def close(self) -> bool:
        """Finish begun changes, and close all buckets in parallel; False if one could not store everything."""
        self._stopping = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            # Check the files once more: a loss since the last check must not count as a clean stop.
            await self._look_at_files()
        while unfinished := {*self._creating.values(), *self._renaming.values(), *self._closing}:
            await asyncio.wait(unfinished)
        outcomes = await asyncio.gather(*(h.close() for h in self.hosts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                log.error("a bucket could not be closed", exc_info=outcome)
        return not self._lost and all(outcome is True for outcome in outcomes)


async def _as_it_is() -> None:
    """Have the buckets that are here."""


async def _as_told(_: SetMember) -> None:
    """Take a server for what it says."""


def _check_version(name: str, known: int, asked: int | None) -> None:
    if asked is not None and asked != known:
        raise BucketGoneError(
            f"bucket {shown(name)} has version {known:016x}, not {asked:016x}: it was created again",
            hint=GONE_HINT,
        )
