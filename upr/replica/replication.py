"""Replication: a server keeps the buckets of an upstream, and receives what is written there.

A bucket's call (``upstream_stream``) is opened again, after a pause, whenever it ends. An upstream that cannot be reached is
left for the next address.

A directory joins the set of servers of its first upstream, for good. The upstream of another set is refused: what it does
not have would be undone here.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from upr.engine.recovery import Undo
from upr.engine.streams import SUPERSEDED
from upr.replica.links import Links
from upr.replica.upstream_stream import UndoNeededError, UpstreamStream
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.storage_trouble import PASSING, words_of
from upr.storage.store import Identity
from upr_client.backoff import delay
from upr_client.endpoints import endpoints_of
from upr_protocol.errors import (
    AlreadyExistsError,
    BucketGoneError,
    BucketNotFoundError,
    NoRoomError,
    StorageFailedError,
    UprError,
    shown,
)
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import admin_service_pb2_grpc, change_stream_service_pb2_grpc
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

log = logging.getLogger(__name__)

LIST_SECONDS = 1.0
"""Interval at which the upstream's buckets are looked at."""
ANSWER_SECONDS = 5.0
"""Longest wait for the list; then the upstream is gone."""
_STORAGE = StorageFailedError.default_reason


@dataclass(slots=True)
class _Trouble:
    """Trouble of one bucket: how often in a row its call ended in vain, and the reason that the log has; empty for none."""

    tries: int = 0
    told: str = ""


class Replication:
    """The replica's side of one server.

    Args:
        upstreams: HOST:PORT of each, tried in turn.
        anonymous: whether it is not registered there.
        only: the partitions that are followed and how far, by bucket version, and no bucket is dropped; None for all.

    Attributes:
        directory: the id of the upstream's data directory, empty if any server of the set will do; a change counts from the
            next look at the upstream's buckets on.
        problem: why no upstream is followed now; None while one is. A server without a bucket has no other place for it.

    Raises:
        InvalidArgumentError: an address is malformed.
    """

    def __init__(
        self,
        catalog: Catalog,
        upstreams: Sequence[str],
        anonymous: bool,
        address: Callable[[], str],
        links: Links,
        directory: str = "",
        only: Mapping[int, Mapping[int, int]] | None = None,
    ) -> None:
        self._catalog = catalog
        self._only = only
        self._upstreams = endpoints_of(upstreams)
        self._anonymous = anonymous
        self._address = address
        self._links = links
        self.directory = directory
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.problem: UprError | None = None
        self._told: set[tuple[str, str]] = set()
        self._seen: set[int] = set()
        self._failures: dict[int, str] = {}
        self._troubles: dict[int, _Trouble] = {}
        self._look = asyncio.Event()
        self._tries = 0
        self._matched: list[asyncio.Future[None]] = []

    async def matched(self) -> None:
        """Wait until the buckets are those that the upstream has now; for ever while it cannot be reached."""
        done = asyncio.get_running_loop().create_future()
        self._matched.append(done)
        self._look.set()
        await done

    def failure(self, versions: Iterable[int]) -> str:
        """Return why one of these buckets cannot be made here; empty if all can."""
        return next((self._failures[v] for v in versions if v in self._failures), "")

    async def run(self) -> None:
        """Follow one upstream after the other until cancelled."""
        while True:
            for upstream in self._upstreams:
                self._tries += 1
                try:
                    await self._follow(upstream)
                except UprError as error:
                    self._failed(upstream, error)
                except PASSING as error:
                    self._failed(upstream, StorageFailedError(words_of(error)))
                await asyncio.sleep(delay(self._tries, random.random(), away=True))

    def _failed(self, upstream: str, error: UprError) -> None:
        """Say why an upstream cannot be followed: in the status, and in the log once for each reason, as words vary."""
        self.problem = error
        for host in self._catalog.hosts:
            if host.upstream_state is not None:
                host.upstream_state.address, host.upstream_state.problem = upstream, error
        if (upstream, error.reason) not in self._told:
            self._told.add((upstream, error.reason))
            log.warning(
                "the upstream cannot be followed", extra={"upstream": upstream, "error": str(error)}
            )

    async def _follow(self, upstream: str) -> None:
        """Follow an upstream until it cannot be reached.

        Raises:
            UprError: it cannot be reached, or is none for this server.
        """
        self._seen.clear()
        async with self._links.open(upstream) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            streams = change_stream_service_pb2_grpc.ChangeStreamServiceStub(channel)
            try:
                while True:
                    self._look.clear()
                    waiting = len(self._matched)
                    answer = await self._list(upstream, stub)
                    self._check(answer)
                    await self._match(answer)
                    self._tries, self.problem = 0, None
                    if self._told:
                        log.info("the upstream is followed", extra={"upstream": upstream})
                        self._told.clear()
                    for host in self._catalog.hosts:
                        if self._only is None or host.bucket.identity.version in self._only:
                            self._keep(host, upstream, streams)
                    for done in self._matched[:waiting]:
                        if not done.done():
                            done.set_result(None)
                    del self._matched[:waiting]
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LIST_SECONDS):
                            await self._look.wait()
            finally:
                calls = list(self._calls.values())
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                self._calls.clear()

    async def _list(self, upstream: str, stub: Any) -> admin.ListBucketsResponse:
        """Return the upstream's buckets.

        Half of the time it is asked over a connection of its own: behind much data on a slow link nothing else gets
        through. Where only the first connection is dead, TCP ends it within ten seconds, as what is asked over it is not
        acknowledged.

        Raises:
            UprError: it cannot be reached.
        """
        request, half = admin.ListBucketsRequest(), ANSWER_SECONDS / 2
        try:
            try:
                answer = await stub.ListBuckets(request, timeout=half)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                async with self._links.open(upstream) as channel:
                    stub = admin_service_pb2_grpc.AdminServiceStub(channel)
                    answer = await stub.ListBuckets(request, timeout=half)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        assert isinstance(answer, admin.ListBucketsResponse)
        return answer

    def _check(self, answer: admin.ListBucketsResponse) -> None:
        """Raise unless an upstream belongs to this server's set, or this one to none and has nothing of its own."""
        own, theirs = self._catalog.replica_set, answer.replica_set
        hint = "give --replicate-from a server of the same set, or --data an empty directory"
        if answer.directory == self._catalog.directory_id:
            words = "the upstream is this very server"
        elif self.directory and answer.directory != self.directory:
            words = f"the server there has directory {shown(answer.directory)}; must be {self.directory}"
            hint = "'upr-admin topology' shows where the servers of the set are"
        elif not theirs:
            words = "the upstream names no set of servers"
            hint = "it has joined none yet, or the token that it is shown (--peer-token-file) lacks the role replicate for all buckets"
        elif own and own != theirs:
            words = f"the upstream belongs to the set of servers {shown(theirs)}; this server to {own!r}"
        elif not own and any(host.bucket.partitions.high.any() for host in self._catalog.hosts):
            words = "the data directory has data that is of no set of servers"
        else:
            return
        raise UprError(
            words,
            hint=hint,
            reason="WRONG_REPLICA_SET",
            retriable=True,
        )

    async def _match(self, answer: admin.ListBucketsResponse) -> None:
        """Drop the buckets that the upstream has no more, and make those that are missing here.

        What fails for one bucket is tried again at the next list; the others are followed.
        """
        versions = {info.version for info in answer.buckets}
        if self._only is None:
            whole = {info.version for info in answer.buckets if not info.HasField("problem")}
            self._catalog.listed = frozenset(whole)
            for version in versions.intersection(self._catalog.gone):
                # It died before that was durable.
                self._catalog.gone.remove(version)
            for host in self._catalog.hosts:
                if host.bucket.identity.version not in versions:
                    await self._drop(host.bucket.identity)
        self._seen |= versions
        known = {host.bucket.identity.version: host for host in self._catalog.hosts}
        self._forget(versions | known.keys())
        for info in answer.buckets:
            try:
                await self._make(info, known.get(info.version))
                self._failures.pop(info.version, None)
            except UprError as error:
                self._bucket_failed(info.name, info.version, error)
        if not self._catalog.replica_set:
            # Behind the buckets: its own replicas drop what it does not list.
            self._catalog.join(answer.replica_set)

    def _forget(self, kept: set[int]) -> None:
        """Keep nothing of buckets of other versions; of one whose call has not ended yet it goes at the next list."""
        calling = {version for version, call in self._calls.items() if not call.done()}
        told = self._calls.keys() | self._failures.keys() | self._troubles.keys()
        for version in told - calling - kept:
            self._calls.pop(version, None)
            self._failures.pop(version, None)
            self._troubles.pop(version, None)

    async def _drop(self, identity: Identity) -> None:
        """Drop a bucket; one that this upstream never listed is kept aside, because it may be nowhere else."""
        log.warning("a bucket is gone at the upstream", extra={"bucket": identity.name})
        keep = identity.version not in self._seen
        try:
            with contextlib.suppress(BucketNotFoundError, BucketGoneError):
                await self._catalog.drop(identity.name, identity.version, keep=keep)
                if not keep:
                    self._catalog.gone.append(identity.version)
        except UprError as error:
            self._bucket_failed(identity.name, identity.version, error)

    async def _make(self, info: admin.BucketInfo, found: BucketService | None) -> None:
        # Who is followed for parts may have another quota than the owner had.
        keeps = found is not None and self._only is not None
        if found is None and not info.HasField("problem"):
            try:
                found = await self._catalog.create(
                    info.name, info.compression, info.version, info.quota_bytes, active=False
                )
            except AlreadyExistsError as error:
                if self._only is not None:
                    # Here nothing is dropped, so that this does not pass.
                    error.message = (
                        f"another bucket {shown(info.name)} is here: one of the two was dropped"
                    )
                    error.hint = "promote the other server if that has the newer one"
                    raise
        if found is not None and not keeps and found.disk.quota.limit != info.quota_bytes:
            await found.set_quota(info.quota_bytes)

    def _bucket_failed(self, name: str, version: int, error: UprError) -> None:
        """Say once in the log why a bucket is not as it is at the upstream."""
        if self._failures.get(version) != str(error):
            self._failures[version] = str(error)
            log.warning(
                "a bucket of the upstream cannot be followed",
                extra={"bucket": name, "error": str(error)},
            )

    def _keep(self, host: BucketService, upstream: str, streams: object) -> None:
        """Keep a bucket's call open, from its next end on too."""
        version = host.bucket.identity.version
        call = self._calls.get(version)
        if call is None or call.done():
            if call is not None and not call.cancelled() and (error := call.exception()):
                log.error("the replica of a bucket failed", exc_info=error)
            self._calls[version] = asyncio.create_task(self._receive(host, upstream, streams))

    async def _receive(self, host: BucketService, upstream: str, streams: object) -> None:
        identity = host.bucket.identity
        trouble = self._troubles.setdefault(identity.version, _Trouble())
        only = None if self._only is None else self._only[identity.version]

        def followed() -> None:
            if trouble.told:
                log.info("the upstream is followed again", extra={"bucket": identity.name})
            trouble.tries, trouble.told = 0, ""

        superseded = 0
        while True:
            upstream_state = host.upstream_state
            assert upstream_state is not None
            upstream_state.address = upstream
            introduction = wire.Open(
                kind=wire.FOLLOW_KIND_ANONYMOUS_REPLICA
                if self._anonymous
                else wire.FOLLOW_KIND_REPLICA,
                directory=self._catalog.directory_id,
                replica_set=self._catalog.replica_set,
                address=self._address(),
                incarnation=self._catalog.incarnation,
            )
            try:
                stream = UpstreamStream(host, streams, introduction, only, followed)
                try:
                    await stream.run()
                except UndoNeededError as needed:
                    host = await self._undo(host, needed.undo, is_news=trouble.told != _STORAGE)
                    continue
            except BucketGoneError:
                # Dropped here or there: the next list says what to do.
                return
            except UprError as error:
                problem = error
            except PASSING as error:
                problem = StorageFailedError(words_of(error), retriable=True)
            upstream_state.problem = problem
            if trouble.told != problem.reason:
                trouble.told = problem.reason
                log.info(
                    "a call to the upstream ended",
                    extra={"bucket": identity.name, "error": str(problem)},
                )
            # What cannot be stored here costs the upstream a whole call each time.
            soon = host.serves and not isinstance(problem, StorageFailedError | NoRoomError)
            # While the disk hangs nothing is sent, and who is back late is counted late.
            soon = soon or host.bucket.hangs is not None
            # Two that run from copies of one directory would end each other's calls as fast as they open them.
            superseded = superseded + 1 if problem.reason == SUPERSEDED.reason else 0
            tries = max(trouble.tries, superseded)
            await asyncio.sleep(delay(tries, random.random(), away=soon))
            trouble.tries += 1

    async def _undo(
        self, host: BucketService, undo: Mapping[int, Undo], *, is_news: bool
    ) -> BucketService:
        name = host.bucket.identity.name
        if is_news:
            # Without loss the upstream has purged deletions that may be missing here.
            lost = sum(one.lost for one in undo.values())
            log.warning(
                "a part of the bucket is received anew",
                extra={"bucket": name, "partitions": len(undo), "undone": lost},
            )
        return await self._catalog.reopen(name, undo)
