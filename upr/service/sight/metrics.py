"""Metrics of a server in Prometheus' text format, made anew for each scrape out of the numbers that status has.

Nothing is counted here, and nothing is read from a store. A page is made piece by piece, with turns for others in between,
and all pages together take at most SHARE of the event loop's time.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from upr import __version__
from upr.engine.bucket import Bucket
from upr.engine.consumers import Consumer
from upr.engine.partitions import DEAD
from upr.service.admin import Process, replicas_of
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.catalog import Catalog
from upr.service.overload.callers import Turns
from upr.service.overload.process import BOUNDS_MS, memory_bytes
from upr.service.sight.counts import BOUNDS_SECONDS, refusals
from upr.service.storage_trouble import Failing
from upr.storage.lmdb_pages import free_bytes
from upr_protocol.limits import METRICS_CONSUMERS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SHARE: Final = 0.1
"""Part of the event loop's time for all pages together; more scrapes share a page, and wait."""
AT_ONCE: Final = 50
"""Followers or consumers that are looked at in one step, which takes less than a millisecond."""
STATES: Final = ("owner", "replica", "claiming", "waiting")
"""Values of the label of upr_set_state; see ``SetPart`` of the protocol."""
_Value = Callable[[BucketService], float]
BUCKET_GAUGES: Final[dict[str, tuple[str, _Value]]] = {
    "upr_bucket_up": ("Whether the bucket has no problem.", lambda h: h.problem is None),
    "upr_bucket_mutations": (
        "Sum of the high seqnos of all partitions.",
        lambda h: int(h.bucket.partitions.high.sum()),
    ),
    "upr_tail_bytes": ("Recent changes in memory.", lambda h: h.bucket.tail.bytes),
    "upr_tail_limit_bytes": (
        "Size of upr_tail_bytes at which all writes wait.",
        lambda h: h.flusher.tail_limit,
    ),
    "upr_tail_volatile_bytes": (
        "Part of upr_tail_bytes that is not in the journal yet.",
        lambda h: h.bucket.tail.volatile_bytes,
    ),
    "upr_store_used_bytes": (
        "Pages of the store in use, as of the last flush.",
        lambda h: h.disk.quota.used,
    ),
    "upr_quota_bytes": ("Quota of the bucket, 0 for none.", lambda h: h.disk.quota.limit),
    "upr_merge_waiting_partitions": (
        "Partitions that compaction is to look at.",
        lambda h: h.compactor.waiting,
    ),
    "upr_dead_partitions": (
        "Partitions that take no writes and no readers until an operator decides.",
        lambda h: int((h.bucket.partitions.state == DEAD).sum()),
    ),
    "upr_damaged_partitions": (
        "Partitions with a problem, dead ones included.",
        lambda h: len(h.bucket.partitions.problems),
    ),
    "upr_cuts": ("Cuts that are held.", lambda h: len(h.bucket.cuts.live(h.disk.clock.now()))),
    "upr_followers": ("Open Follow calls.", lambda h: len(h.bucket.followers)),
    "upr_groups": ("Groups with members.", lambda h: len(list(h.bucket.owners))),
}
"""Gauges of each bucket: name -> its help, and the value."""
BUCKET_COUNTERS: Final[dict[str, tuple[str, _Value]]] = {
    "upr_written_rows": (
        "Rows of the writes that were taken; of a replica those that it received.",
        lambda h: h.disk.traffic.written_rows,
    ),
    "upr_write_wait_seconds": (
        "Time during which writes, or what a replica receives, waited for room in the tail or on the disk.",
        lambda h: h.disk.traffic.waiting.seconds,
    ),
    "upr_written_bytes": ("Bytes of these rows.", lambda h: h.disk.counters.ingested_bytes),
    "upr_sent_frames": ("Frames to followers.", lambda h: h.disk.traffic.sent_frames),
    "upr_sent_rows": ("Rows in these frames.", lambda h: h.disk.traffic.sent_rows),
    "upr_sent_bytes": ("Bytes in these frames.", lambda h: h.disk.traffic.sent_bytes),
    "upr_journal_bytes": (
        "Bytes appended to the journal.",
        lambda h: h.disk.counters.journalled_bytes,
    ),
    "upr_flushed_bytes": (
        "Bytes of blocks that flushes stored.",
        lambda h: h.disk.counters.flushed_bytes,
    ),
    "upr_merge_input_bytes": (
        "Bytes of blocks that compaction read.",
        lambda h: h.disk.counters.merge_input_bytes,
    ),
    "upr_merge_output_bytes": (
        "Bytes of blocks that compaction stored.",
        lambda h: h.disk.counters.merge_output_bytes,
    ),
    "upr_merge_seconds": ("Working time of compaction.", lambda h: h.disk.counters.merge_seconds),
    "upr_purged_tombstones": ("Tombstones purged.", lambda h: h.disk.counters.purged_tombstones),
}
"""Counters of each bucket; ``_total`` is added to their names."""


class _Page:
    """Text of a page: the lines of each family, by its name.

    The library's writer takes ten times as long, a hundredth of a CPU with a scrape a second.
    """

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def text(self) -> bytes:
        return "".join(itertools.chain.from_iterable(self._families.values())).encode()

    def _lines(self, name: str, kind: str, words: str) -> list[str]:
        lines = self._families.get(name)
        if lines is None:
            head = f"# HELP {name} {words}\n# TYPE {name} {kind}\n"
            lines = self._families[name] = [head]
        return lines

    def gauge(self, name: str, words: str, value: float, **labels: str) -> None:
        lines = self._lines(name, "gauge", words)
        lines.append(f"{name}{_braced(labels)} {+value}\n")

    def counter(self, name: str, words: str, value: float, **labels: str) -> None:
        """Add a counter, under its name without ``_total``."""
        name += "_total"
        lines = self._lines(name, "counter", words)
        lines.append(f"{name}{_braced(labels)} {+value}\n")

    def histogram(
        self,
        name: str,
        words: str,
        bounds: Sequence[float],
        counts: Sequence[int],
        seconds: float,
        **labels: str,
    ) -> None:
        """Add a histogram, of which ``counts`` has a part behind the last bound."""
        lines, below = self._lines(name, "histogram", words), 0
        # Without its brace: the bound is one label more.
        begin = f"{name}_bucket{_braced(labels)[:-1] or '{'}{',' if labels else ''}"
        for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
            below += count
            lines.append(f'{begin}le="{bound}"}} {below}\n')
        braced = _braced(labels)
        lines.append(f"{name}_count{braced} {below}\n{name}_sum{braced} {seconds}\n")


_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def _braced(labels: dict[str, str]) -> str:
    """Return labels as they stand behind a name."""
    if not labels:
        return ""
    values = [
        # Most are plain words, and looking them through for escapes takes half of the time.
        f'{name}="{value if value.isidentifier() else value.translate(_ESCAPES)}"'
        for name, value in labels.items()
    ]
    return f"{{{','.join(values)}}}"


class Shared:
    """Page that is made piece by piece, with turns for others in between, and once for all who ask meanwhile.

    Args:
        pieces: returns the pieces, each of which takes a millisecond or so.

    Attributes:
        spent: CPU seconds that making it took so far.
    """

    def __init__(self, pieces: Callable[[], Iterator[bytes]], turns: Turns) -> None:
        self._pieces = pieces
        self._turns = turns
        self._making: asyncio.Task[bytes] | None = None
        self.spent = 0.0

    @property
    def is_making(self) -> bool:
        return self._making is not None

    async def page(self) -> bytes:
        """Return the page; callers that come while one is made get the same."""
        if self._making is None:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def _made(self, _: "asyncio.Task[bytes]") -> None:
        self._making = None

    async def _make(self) -> bytes:
        await self._turns.turn()
        pieces, made, spent = self._pieces(), list[bytes](), 0.0
        while True:
            began = time.thread_time()
            piece = next(pieces, None)
            spent += time.thread_time() - began
            if piece is None:
                break
            made.append(piece)
            await asyncio.sleep(0)
        self.spent += spent
        charge(self._turns, spent)
        return b"".join(made)


def charge(turns: Turns, spent: float) -> None:
    """Have the next page wait until SHARE of the time covers what this one took."""
    turns.charge(spent * (1 / SHARE - 1))


class Metrics:
    """Metrics of one server; ``turns`` are of everything that has its share together."""

    def __init__(
        self, catalog: Catalog, process: Process, ready: Callable[[], bool], turns: Turns
    ) -> None:
        self._catalog = catalog
        self._process = process
        self._ready = ready
        self._of_process = ProcessCollector(registry=CollectorRegistry())
        self._shared = Shared(self._pieces, turns)
        self.page = self._shared.page

    def _pieces(self) -> Iterator[bytes]:
        """Yield the page in pieces, empty ones where only numbers were gathered; each takes a millisecond or so."""
        page = _Page()
        self._add_server(page)
        yield b""
        for host in self._catalog.hosts:
            self._add_bucket(page, host)
            yield b""
            yield from _add_followers(page, host)
            yield from _add_consumers(page, host)
        for damaged in self._catalog.damaged:
            page.gauge("upr_bucket_up", BUCKET_GAUGES["upr_bucket_up"][0], 0, bucket=damaged.name)
        yield page.text()
        yield generate_latest(self._of_process)

    def _add_server(self, page: _Page) -> None:
        process, catalog = self._process, self._catalog
        page.gauge("upr_build_info", "Version of the server.", 1, version=__version__)
        page.gauge("upr_ready", "Whether /readyz says so.", self._ready())
        serves = not catalog.replica and catalog.may_serve()
        page.gauge("upr_active", "Whether the server takes writes.", serves)
        page.gauge("upr_epoch", "Epoch of the set of servers.", catalog.standing.standing.epoch)
        page.gauge("upr_damaged_buckets", "Buckets that could not be opened.", len(catalog.damaged))
        self._add_part(page)
        for file, error in process.files().items():
            words = "Whether a file of TLS or identities cannot be used, or has a certificate that ends soon."
            page.gauge("upr_file_trouble", words, error is not None, file=file)
        for file, end in process.ends().items():
            words = "When the first certificate in a file expires, in seconds since the epoch."
            page.gauge("upr_certificate_expires_timestamp_seconds", words, end, file=file)
        for kind, count in (
            ("follow", process.follow_calls()),
            ("write", process.write_calls()),
        ):
            page.gauge("upr_open_calls", "Open streaming calls.", count, kind=kind)
        connections = process.connections
        words = "Connections to the gRPC port, counted every few seconds."
        page.gauge("upr_connections", words, connections.open)
        words = "Connections above which gRPC closes new ones."
        page.gauge("upr_connections_max", words, connections.limit)
        if (port := process.text_port()) is not None:
            page.gauge("upr_text_connections", "Open text connections.", port.connections)
            words = "Text connections that were ended because they took nothing."
            page.counter("upr_text_too_slow", words, port.too_slow)
        for kind, size in zip(("anonymous", "mapped"), memory_bytes(), strict=True):
            page.gauge("upr_memory_bytes", "Memory; the mapped part can be freed.", size, kind=kind)
        page.gauge(
            "upr_clock_off_seconds",
            "How far the day's clock is ahead, 0 when it is near.",
            process.clock.off_seconds,
        )
        delays = process.delays
        page.histogram(
            "upr_loop_delay_seconds",
            "How late the event loop was, sampled ten times a second.",
            [bound / 1e3 for bound in BOUNDS_MS],
            delays.counts,
            delays.seconds,
        )
        for reason, count in list(refusals.items()):
            words = "Calls and writes that were refused."
            page.counter("upr_refusals", words, count, reason=reason)
        page.counter(
            "upr_metrics_cpu_seconds", "CPU that pages like this one took.", self._shared.spent
        )

    def _add_part(self, page: _Page) -> None:
        part = self._process.part()
        if part is None:
            return
        for state in STATES:
            page.gauge("upr_set_state", "What the server is.", state == part.state, state=state)
        page.gauge("upr_counted_servers", "Servers that are counted.", part.counted)
        words = "Time since this server heard first of the owner that it knows."
        page.gauge("upr_owner_seconds", words, part.owner_seconds)
        words = "How often this server heard of another owner."
        page.counter("upr_owner_changes", words, part.owner_changes)
        for kind, error in self._process.troubles().items():
            words = "Whether something is wrong with its part in its set."
            page.gauge("upr_set_trouble", words, error is not None, trouble=kind)
        if part.cluster:
            words = "Time since etcd answered."
            page.gauge("upr_etcd_silent_seconds", words, part.etcd_seconds)
            words = (
                "Time for which an owner may serve without another grant; 0 where there is none."
            )
            page.gauge("upr_grant_seconds", words, part.grant_seconds)

    @staticmethod
    def _add_bucket(page: _Page, host: BucketService) -> None:
        bucket, traffic, troubles = host.bucket, host.disk.traffic, host.disk.troubles
        name = bucket.identity.name
        for title, (words, value) in BUCKET_GAUGES.items():
            page.gauge(title, words, value(host), bucket=name)
        for title, (words, value) in BUCKET_COUNTERS.items():
            page.counter(title, words, value(host), bucket=name)
        for outcome, count in traffic.writes.items():
            page.counter("upr_writes", "Answered writes.", count, bucket=name, outcome=outcome)
        for reason, count in traffic.ended.items():
            words = "Follow calls that ended."
            page.counter("upr_follow_ends", words, count, bucket=name, reason=reason)
        for what in Failing:
            for title, counts in (("begun", troubles.begun), ("ended", troubles.ended)):
                words = f"Storage troubles that have {title}."
                title = f"upr_problems_{title}"
                page.counter(title, words, counts[what], bucket=name, problem=what.name.lower())
        for title, words, durations in (
            ("upr_commit_seconds", "Time until a commit is durable.", traffic.commits),
            (
                "upr_fsync_seconds",
                "The part of it that the disk takes, for writing and syncing.",
                traffic.syncs,
            ),
            ("upr_flush_seconds", "Time to store a part of the tail.", traffic.flushes),
        ):
            parts, seconds = durations.counts, durations.seconds
            page.histogram(title, words, BOUNDS_SECONDS, parts, seconds, bucket=name)
        with suppress(OSError):
            size = host.disk.store.file_bytes()
            page.gauge("upr_store_file_bytes", "Size of the store's file.", size, bucket=name)
            words = "Free space on the disk of the bucket."
            page.gauge("upr_disk_free_bytes", words, free_bytes(host.folder), bucket=name)
        words = "Part of it above the reserve; without any, writes are refused."
        page.gauge("upr_disk_room_bytes", words, host.disk.room.above_reserve(), bucket=name)
        upstream_state = host.upstream_state
        if upstream_state is not None:
            for title, words, number in (
                (
                    "upr_replica_connected",
                    "Whether the upstream is followed.",
                    upstream_state.connected,
                ),
                (
                    "upr_replica_in_step",
                    "Whether it is followed, and everything that it named is durable here.",
                    upstream_state.connected and upstream_state.in_step,
                ),
                ("upr_replica_lag_rows", "Mutations that are missing here.", upstream_state.lag()),
                (
                    "upr_replica_lag_seconds",
                    "Time since none was missing.",
                    upstream_state.lag_seconds(),
                ),
            ):
                page.gauge(title, words, number, bucket=name)
            words = "Mutations that were undone."
            page.counter("upr_replica_undone_rows", words, upstream_state.undone, bucket=name)


def counted_streams(bucket: Bucket) -> Generator[bytes, None, tuple[int, int]]:
    """Return how many streams are open, and how many of them read the store; yield now and then."""
    streams = from_store = 0
    for number, follower in enumerate(list(bucket.followers)):
        if number % AT_ONCE == AT_ONCE - 1:
            yield b""
        counts = follower.stream_counts()
        streams, from_store = streams + counts[0], from_store + counts[1]
    return streams, from_store


def _add_followers(page: _Page, host: BucketService) -> Iterator[bytes]:
    """Add streams and replicas; yield now and then."""
    name = host.bucket.identity.name
    streams, from_store = yield from counted_streams(host.bucket)
    page.gauge("upr_streams", "Open streams.", streams, bucket=name)
    words = "Open streams that read the store, because they are behind the tail."
    page.gauge("upr_streams_from_store", words, from_store, bucket=name)
    yield b""
    # One that is not registered acknowledges nothing; several may have one address.
    for replica in (one for one in replicas_of(host.bucket) if not one.anonymous):
        words = "Mutations that a registered replica has not acknowledged."
        page.gauge("upr_peer_lag_rows", words, replica.lag, bucket=name, peer=replica.address)


def _add_consumers(page: _Page, host: BucketService) -> Iterator[bytes]:
    """Add the consumers that are furthest behind; yield now and then."""
    bucket = host.bucket
    lags: list[tuple[int, str, Consumer]] = []
    for number, (consumer_name, consumer) in enumerate(list(bucket.consumer_positions)):
        if number % AT_ONCE == AT_ONCE - 1:
            yield b""
        lags.append((int(consumer.behind(bucket.partitions.high).sum()), consumer_name, consumer))
    page.gauge("upr_consumers", "Registered consumers.", len(lags), bucket=bucket.identity.name)
    now = host.disk.clock.now()
    for lag, consumer_name, consumer in heapq.nlargest(
        METRICS_CONSUMERS, lags, key=lambda one: one[0]
    ):
        labels = {"bucket": bucket.identity.name, "consumer": consumer_name}
        words = f"Mutations that a consumer has not acknowledged, of the {METRICS_CONSUMERS} with most of them."
        page.gauge("upr_consumer_lag_rows", words, lag, **labels)
        words = "Time since the last acknowledgement of these consumers."
        idle = max(now - consumer.last_ack_time, 0) / 1e6
        page.gauge("upr_consumer_idle_seconds", words, idle, **labels)
