"""Feed of the page: what a server and its buckets are at the moment, as JSON, and the page's own files.

Nothing is counted here, and nothing is read from a store in the event loop. A bucket is looked at by columns, once in
PAGE_SECONDS for all who watch it, and at once when a failover has changed it; rates are made by the page, of two looks. A
partition, a consumer and the status are looked at for each who asks. How much each partition stores is read in a reader
thread, slowly. All feeds and metrics together take at most SHARE of the event loop's time, and the readers of all buckets
another SHARE of the interpreter's.

A viewer sees the buckets that it has a role for, and hears the same of any other, whether or not it is there.
"""

import asyncio
import heapq
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from upr import __version__
from upr.engine.consumers import Consumer
from upr.engine.partitions import ACTIVE, STATE_NAMES
from upr.service.access.identities import Identity
from upr.service.access.rules import VIEWERS
from upr.service.admin import (
    PARTITIONS_AT_ONCE,
    Contents,
    Process,
    look_through,
    members_of,
    replicas_of,
)
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.keepers import is_connected
from upr.service.overload.callers import Turns
from upr.service.overload.process import memory_bytes
from upr.service.sight.explanation import ServerSide, explain, position_of, to_json
from upr.service.sight.metrics import (
    AT_ONCE,
    BUCKET_COUNTERS,
    BUCKET_GAUGES,
    SHARE,
    Shared,
    charge,
    counted_streams,
)
from upr.service.sight.web import Answer, Page, Request
from upr.storage.lmdb_pages import free_bytes
from upr_protocol.errors import (
    BucketGoneError,
    BucketNotFoundError,
    ConsumerNotFoundError,
    InvalidArgumentError,
    PermissionDeniedError,
    UprError,
    shown,
)
from upr_protocol.failover import check_partition, format_failover_id, parse_failover_id
from upr_protocol.limits import (
    MARKERS_MAX,
    PAGE_CONSUMERS,
    PAGE_PROBLEMS,
    PAGE_SECONDS,
    PARTITIONS,
    SEQNO_MAX,
)

Document = dict[str, Any]
LOOK_AGAIN_SECONDS: Final = 10.0
"""Shortest time from the end of one look at all stored blocks to the beginning of the next."""
_FOLDER: Final = Path(__file__).parent / "page"
_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_STATUSES: Final[dict[type[UprError], int]] = {
    PermissionDeniedError: 403,
    BucketNotFoundError: 404,
    BucketGoneError: 404,
    ConsumerNotFoundError: 404,
    InvalidArgumentError: 400,
}
"""Status of an answer for each error that a request can be refused with; 503 for any other."""


def _json(document: object, status: int = 200) -> Answer:
    body = json.dumps(document, separators=(",", ":")).encode()
    return Answer(status, body, "application/json")


def _problem(error: UprError | None) -> Document | None:
    if error is None:
        return None
    return {"reason": error.reason, "message": error.message, "hint": error.hint}


def _message(message: Message) -> Document:
    """Return a message as a document; numbers of 64 bits are decimal strings in it."""
    document: Document = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


class _Sizes:
    """Contents of a bucket's store by partition, looked at again and again while somebody watches.

    Args:
        one: held during each step and the pause after it, so that the steps of all buckets share their SHARE.

    Attributes:
        contents: as of the last look at each partition; None before the first look at all.
        files: sizes that the file system tells, as of the beginning of the last look; empty where it does not.
    """

    def __init__(self, host: BucketService, one: asyncio.Lock) -> None:
        self._host = host
        self._one = one
        self._looked = Contents()
        self._looking: asyncio.Task[None] | None = None
        self._again = 0.0
        self.contents: Contents | None = None
        self.files: Document = {}

    def watch(self) -> None:
        if self._looking is None and time.monotonic() >= self._again:
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            self.files = await self._host.disk.in_reader(lambda: _files(self._host))
            for first in range(0, PARTITIONS, PARTITIONS_AT_ONCE):
                async with self._one:
                    began = time.monotonic()
                    await self._host.disk.in_reader(
                        lambda first=first: look_through(self._host, first, self._looked)  # type: ignore[misc]
                    )
                    # The interpreter is shared with the event loop.
                    await asyncio.sleep((time.monotonic() - began) * (1 / SHARE - 1))
            self.contents = self._looked
        except (UprError, lmdb.Error, RuntimeError):
            # The bucket is dropped or closed, or cannot be read, which its status says.
            pass
        finally:
            self._again = time.monotonic() + LOOK_AGAIN_SECONDS
            self._looking = None


class _View:
    """View of one bucket, made anew once in PAGE_SECONDS at most, and when states or failover ids have changed."""

    def __init__(self, host: BucketService, turns: Turns, one: asyncio.Lock) -> None:
        self._host = host
        self._shared = Shared(self._pieces, turns)
        self._sizes = _Sizes(host, one)
        self._mark = self._made = b""
        self._asked = self._again = 0.0

    async def page(self) -> bytes:
        now = time.monotonic()
        if self._shared.is_making:
            return await self._shared.page()
        if now >= self._again or self._marked() != self._mark:
            self._asked = now
            self._sizes.watch()
            return await self._shared.page()
        return self._made

    def _marked(self) -> bytes:
        table = self._host.bucket.partitions
        return table.state.tobytes() + table.newest_id.tobytes()

    def _pieces(self) -> Iterator[bytes]:
        host, bucket = self._host, self._host.bucket
        streams, from_store = yield from counted_streams(bucket)
        replicas = [_message(one) for one in replicas_of(bucket)]
        yield b""
        lags: list[tuple[int, str, Consumer | None]] = []
        largest = np.zeros(PARTITIONS, np.uint64)
        registered = dict(bucket.consumer_positions)
        for number, (name, consumer) in enumerate(registered.items()):
            if number % AT_ONCE == AT_ONCE - 1:
                yield b""
            behind = consumer.behind(bucket.partitions.high)
            np.maximum(largest, behind, out=largest)
            lags.append((int(behind.sum()), name, consumer))
        lags += [(0, name, None) for name in bucket.owners if name not in registered]
        shown_ones = heapq.nsmallest(PAGE_CONSUMERS, lags, key=lambda one: (-one[0], one[1]))
        consumers = [_consumer(host, *one) for one in shown_ones]
        yield b""
        document = {
            **_numbers(host),
            **self._sizes.files,
            **_columns(host),
            "lag": largest.tolist(),
            "streams": streams,
            "streams_from_store": from_store,
            "replicas": replicas,
            "consumers": consumers,
            "consumers_in_all": len(lags),
            "contents": _contents(self._sizes.contents),
        }
        # What is kept is a whole page and what it shows, whoever still waits for it.
        self._made = json.dumps(document, separators=(",", ":")).encode()
        self._mark, self._again = self._marked(), self._asked + PAGE_SECONDS
        yield self._made


def _numbers(host: BucketService) -> Document:
    bucket, traffic, clock = host.bucket, host.disk.traffic, host.disk.clock
    problems = sorted(bucket.partitions.problems.items())
    upstream_state = host.upstream_state
    return {
        "at": time.monotonic(),
        "name": bucket.identity.name,
        "version": f"{bucket.identity.version:016x}",
        "problem": _problem(host.problem),
        "problems": [
            {"partition": partition, "message": error.message, "hint": error.hint}
            for partition, error in problems[:PAGE_PROBLEMS]
        ],
        # The names and values are those of /metrics.
        "numbers": {
            name: float(value(host))
            for name, (_, value) in (*BUCKET_GAUGES.items(), *BUCKET_COUNTERS.items())
        },
        "commits": {"count": sum(traffic.commits.counts), "seconds": traffic.commits.seconds},
        "room_bytes": host.disk.room.above_reserve(),
        "cuts": [
            {"name": cut.name, "expires_seconds": max(cut.expires - clock.now(), 0) / 1e6}
            for cut in bucket.cuts.live(clock.now())
        ],
        "upstream": upstream_state
        and {
            "address": upstream_state.address,
            "connected": upstream_state.connected,
            "in_step": upstream_state.connected and upstream_state.in_step,
            "lag_seconds": upstream_state.lag_seconds(),
            "undone": upstream_state.undone,
            "problem": _problem(upstream_state.problem),
        },
    }


def _files(host: BucketService) -> Document:
    with suppress(OSError):
        return {"file_bytes": host.disk.store.file_bytes(), "free_bytes": free_bytes(host.folder)}
    return {}


def _columns(host: BucketService) -> Document:
    """Return what is said of each partition, in lists of 1024."""
    table, upstream_state = host.bucket.partitions, host.upstream_state
    behind = None
    if upstream_state is not None:
        behind = (np.maximum(upstream_state.highs, table.durable) - table.durable).tolist()
    return {
        "state": table.state.tolist(),
        "damaged": sorted(table.problems),
        "high": table.high.tolist(),
        "durable": table.durable.tolist(),
        "behind": behind,
        "changed": int(np.bitwise_xor.reduce(table.newest_id)) % 2**53,
    }


def _contents(contents: Contents | None) -> Document | None:
    if contents is None:
        return None
    return {
        "bytes": contents.block_bytes.tolist(),
        "rows": contents.rows.tolist(),
        "blocks": int(contents.blocks.sum()),
        "unmerged_bytes": int(contents.unmerged_bytes.sum()),
    }


def _consumer(host: BucketService, lag: int, name: str, consumer: Consumer | None) -> Document:
    bucket = host.bucket
    group = bucket.owners.group(name)
    idle = None if consumer is None else max(host.disk.clock.now() - consumer.last_ack_time, 0)
    return {
        "name": name,
        "lag": lag,
        "partitions": 0 if consumer is None else int(consumer.known.sum()),
        "connected": is_connected(bucket, name),
        "members": None if group is None else len(group),
        "idle_seconds": None if idle is None else idle / 1e6,
    }


class Feed:
    """Pages of the feed, and the files of the page.

    Args:
        topology: returns what the server knows of its set, with why it waits if that may be told; None for a server that is
            always alone.
    """

    def __init__(
        self,
        catalog: Catalog,
        process: Process,
        ready: Callable[[], bool],
        topology: Callable[[bool], Message] | None,
        turns: Turns,
    ) -> None:
        self._catalog = catalog
        self._process = process
        self._ready = ready
        self._topology = topology
        self._turns = turns
        self._one_look = asyncio.Lock()
        self._views: dict[BucketService, _View] = {}
        self._files = {
            path: Answer(200, (_FOLDER / name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }

    def pages(self) -> dict[str, Page]:
        """Return them by path. The files are open to everyone: they are the same at every server."""
        feeds = {
            "/api/status": self._small(self._status),
            "/api/bucket": self._bucket,
            "/api/consumer": self._small(self._consumer),
            "/api/partition": self._small(self._partition),
            "/api/explain": self._small(self._explain),
        }
        return {path: Page(self._file, is_open=True) for path in self._files} | {
            path: Page(_refusing(make), about_all=False) for path, make in feeds.items()
        }

    async def _file(self, request: Request, viewer: Identity) -> Answer:
        return self._files[request.path]

    def _small(
        self, make: Callable[[Request, Identity], Document]
    ) -> Callable[[Request, Identity], Awaitable[Answer]]:
        """Return what makes a small answer in one step, when it is its turn."""

        async def made(request: Request, viewer: Identity) -> Answer:
            await self._turns.turn()
            began = time.thread_time()
            try:
                return _json(make(request, viewer))
            finally:
                charge(self._turns, time.thread_time() - began)

        return made

    def _host(self, request: Request, viewer: Identity) -> BucketService:
        name = request.query.get("bucket", "")
        if not viewer.may(VIEWERS, name):
            # The same words whether or not there is such a bucket: the catalog was not looked at.
            raise PermissionDeniedError(
                f"{request.path} takes the role {' or '.join(VIEWERS)} for this bucket"
            )
        return self._catalog.find(name)

    async def _bucket(self, request: Request, viewer: Identity) -> Answer:
        host, hosts = self._host(request, viewer), self._catalog.hosts
        self._views = {one: view for one, view in self._views.items() if one in hosts}
        if host not in self._views:
            self._views[host] = _View(host, self._turns, self._one_look)
        return Answer(200, await self._views[host].page(), "application/json")

    def _status(self, request: Request, viewer: Identity) -> Document:
        process, catalog = self._process, self._catalog
        anonymous, _ = memory_bytes()
        sees_all = viewer.may_everywhere(VIEWERS)
        # They have paths of keys and names of identities.
        problems = process.problems() if viewer.may_everywhere(("admin",)) else ()
        found = [(h.bucket.identity.name, h.problem) for h in catalog.hosts]
        found += [(damaged.name, damaged.problem) for damaged in catalog.damaged]
        return {
            "at": time.monotonic(),
            "viewer": viewer.name,
            "version": __version__,
            "server_id": f"{process.server_id:016x}",
            "uptime_seconds": time.monotonic() - process.began,
            "ready": self._ready(),
            "active": not catalog.replica,
            "epoch": catalog.standing.standing.epoch,
            "memory_bytes": anonymous,
            "problems": [_problem(one) for one in problems],
            "set": None if self._topology is None else _message(self._topology(sees_all)),
            "buckets": [
                {"name": name, "problem": _problem(problem)}
                for name, problem in sorted(found, key=lambda one: one[0])
                if viewer.may(VIEWERS, name)
            ],
        }

    def _consumer(self, request: Request, viewer: Identity) -> Document:
        bucket = self._host(request, viewer).bucket
        name = request.query.get("name", "")
        consumer, group = bucket.consumer_positions.get(name), bucket.owners.group(name)
        if consumer is None and group is None:
            raise ConsumerNotFoundError(f"there is no consumer {shown(name)}")
        behind = (
            np.zeros(PARTITIONS) if consumer is None else consumer.behind(bucket.partitions.high)
        )
        return {
            "name": name,
            "lag": behind.tolist(),
            "members": [] if group is None else [_message(one) for one in members_of(group)],
        }

    def _partition(self, request: Request, viewer: Identity) -> Document:
        host = self._host(request, viewer)
        bucket, table = host.bucket, host.bucket.partitions
        partition = _partition_of(request)
        high = int(table.high[partition])
        readers = [
            (high - min(int(consumer.seqno[partition]), high), name, consumer)
            for name, consumer in bucket.consumer_positions
            if consumer.known[partition]
        ]
        return {
            "partition": partition,
            "state": STATE_NAMES[int(table.state[partition])],
            "reason": table.reasons.get(partition, ""),
            "problem": _problem(table.problems.get(partition)),
            "high": high,
            "durable": int(table.durable[partition]),
            "marker": int(bucket.markers.seqno[partition]),
            "stored": int(table.stored[partition]),
            "purge": int(table.purge[partition]),
            "epoch": int(table.epoch[partition]),
            "log": [
                {
                    "failover_id": format_failover_id(record.failover_id),
                    "seqno": int(record.seqno),
                    "epoch": record.epoch,
                }
                for record in table.logs[partition]
            ],
            "consumers": [
                {
                    "name": name,
                    "lag": lag,
                    "seqno": int(consumer.seqno[partition]),
                    "failover_id": format_failover_id(int(consumer.failover_id[partition])),
                }
                for lag, name, consumer in heapq.nlargest(
                    PAGE_CONSUMERS, readers, key=lambda one: one[:2]
                )
            ],
        }

    def _explain(self, request: Request, viewer: Identity) -> Document:
        """Return what the server would answer to a client with an id, a seqno and markers."""
        table, query = self._host(request, viewer).bucket.partitions, request.query
        partition = _partition_of(request)
        if not table.serves(partition):
            raise table.refusal(partition)
        failover_id = parse_failover_id(query["id"]) if query.get("id") else None
        markers = [part for part in query.get("markers", "").split(",") if part.strip()]
        if len(markers) > MARKERS_MAX:
            raise InvalidArgumentError(f"markers are {len(markers)}; must be at most {MARKERS_MAX}")
        position = position_of(
            failover_id,
            None,
            _number(query.get("seqno") or "0", "seqno", SEQNO_MAX),
            None,
            tuple(sorted({_number(part, "markers", SEQNO_MAX) for part in markers})),
        )
        server = ServerSide(
            table.logs[partition],
            int(table.high[partition]),
            int(table.purge[partition]),
            bool(table.state[partition] == ACTIVE),
        )
        return to_json(explain(partition, position, server))


def _refusing(
    make: Callable[[Request, Identity], Awaitable[Answer]],
) -> Callable[[Request, Identity], Awaitable[Answer]]:
    async def made(request: Request, viewer: Identity) -> Answer:
        try:
            return await make(request, viewer)
        except UprError as error:
            return _json(_problem(error), _STATUSES.get(type(error), 503))

    return made


def _partition_of(request: Request) -> int:
    return check_partition(_number(request.query.get("partition", ""), "partition", PARTITIONS - 1))


def _number(text: str, name: str, largest: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= largest):
        raise InvalidArgumentError(f"{name} is {shown(text)}; must be 0 to {largest}")
    return int(text)
