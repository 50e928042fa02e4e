"""The process: its file descriptors and connections, memory, garbage collector, and how late its event loop is.

*Descriptors*: a bound on those of connections, so that journal and stores always find some.

*Garbage*: a full collection looks at every object, and with a thousand followers that takes a tenth of a second. So
survivors of one are frozen (``gc.freeze``): the next one looks only at newer objects. Reference counts free most
garbage; frozen objects are searched for cycles once an hour, and after a bucket was dropped, as its parts know each other.
"""

import asyncio
import ctypes
import fcntl
import gc
import logging
import os
import resource
import socket
import sys
import termios
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pyarrow as pa

from upr_protocol.errors import ListenError, TooManyError
from upr_protocol.limits import BUCKETS_MAX, CONNECTIONS_MAX

log = logging.getLogger(__name__)

BUCKET_DESCRIPTORS: Final = 8
"""Descriptors of a bucket: the store's files, the journal's segment and the next one, a folder to sync."""
SPARE_DESCRIPTORS: Final = 16
"""Descriptors for short use: a refused connection, a file of /proc, the ready file."""
CONNECTIONS_MIN: Final = 8
_OF_A_BUCKET: Final = 4 * BUCKET_DESCRIPTORS
"""With so many more descriptors there may be one bucket more."""
_OPEN = Path("/proc/self/fd")


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one, as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # Some systems report an unlimited hard limit and refuse to set it; then the soft limit stays.


def descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def buckets_max(limit: int | None = None) -> int:
    """Return how many buckets there may be: they take at most a quarter of the descriptors."""
    limit = descriptor_limit() if limit is None else limit
    return max(min(BUCKETS_MAX, limit // _OF_A_BUCKET), 1)


def connections_max(buckets: int, others: int = 0) -> int:
    """Return the largest number of connections: the descriptors that journal, stores and ``others`` do not need.

    Raises:
        ListenError: it is below CONNECTIONS_MIN.
    """
    try:
        now = len(os.listdir(_OPEN))
    except OSError:
        now = SPARE_DESCRIPTORS + buckets * BUCKET_DESCRIPTORS

    def left_of(limit: int) -> int:
        kept = max(buckets, buckets_max(limit)) * BUCKET_DESCRIPTORS + SPARE_DESCRIPTORS + others
        return limit - now - kept

    limit = least = descriptor_limit()
    if left_of(limit) < CONNECTIONS_MIN:
        # A larger limit is one for more buckets too, so that what is left falls back now and then.
        while min(map(left_of, range(least, least + _OF_A_BUCKET + 1))) < CONNECTIONS_MIN:
            least += 1
        raise ListenError(
            f"the limit of open files is {limit}; must be at least {least}",
            hint="raise it with 'ulimit -n', or LimitNOFILE of systemd",
        )
    return min(left_of(limit), CONNECTIONS_MAX)


LOOK_SECONDS: Final = 5.0
"""Time between two counts of the connections: one takes some 10 microseconds for each."""


class Connections:
    """Connections to the gRPC port: gRPC closes those above the limit, and tells nobody.

    Attributes:
        limit: the largest number at one address that is listened on; "localhost" is two.
        open: how many there were at the last count, at the address that had most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0

    @property
    def problem(self) -> TooManyError | None:
        """Return why others may find no connection; None while there is room."""
        if self.open < self.limit:
            return None
        return TooManyError(
            f"connections are {self.open}; must be below {self.limit}, because others are closed",
            hint="end some, or raise the limit of open files while there may be more of them",
        )

    async def watch(self, port: int) -> None:
        """Count the connections now and then until cancelled. The log tells when there is no room, and when there is again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            had_room = self.problem is None
            self.open = await asyncio.to_thread(_count_at, port)
            if had_room is (self.problem is None):
                continue
            told = {"connections": self.open, "limit": self.limit}
            if had_room:
                log.warning("there are too many connections: new ones are closed", extra=told)
            else:
                log.info("connections have room again", extra=told)


def _count_at(port: int) -> int:
    found = Counter(
        one.family
        for one in tcp_sockets()
        if one.getsockname()[1] == port
        and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )
    return max(found.values(), default=0)


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket, which stays valid if that is closed meanwhile; none where there is no /proc."""
    try:
        numbers = os.listdir(_OPEN)
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):
            copy = os.dup(int(number))
            try:
                one = socket.socket(fileno=copy)
            except OSError:
                # Of a file, or of what has its number by now.
                os.close(copy)
                continue
            with one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one


_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_MMAP_BYTES = 4 * 2**20
"""Smallest allocation with pages of its own, which return to the system when freed. By default glibc raises this to 32
MiB with the first large block freed, and holes of that size stay in the heap."""
_TRIM_BYTES = 16 * 2**20


def share_free_memory() -> None:
    """Let all threads, and pyarrow, share a few memory arenas. Call once, before anything is served.

    By default each thread has an arena of its own with glibc, and pyarrow a pool of its own; none reuses memory that
    another freed. For blocks that move between threads that costs about 60 MiB, and gains no speed.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def give_back_freed() -> None:
    """Return freed memory inside the heaps to the system; may take milliseconds."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def memory_bytes() -> tuple[int, int]:
    """Return the process's anonymous and its mapped memory in bytes, cheaply; zeros where there is no /proc."""
    try:
        file = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0
    try:
        resident, mapped = map(int, os.read(file, 128).split()[1:3])
    finally:
        os.close(file)
    return (resident - mapped) * _PAGE, mapped * _PAGE


WHOLE_SECONDS: Final = 3600.0
DROPPED_SECONDS: Final = 15.0
"""Time from a dropped bucket to its collection, so that its open calls have ended, and many are collected at once."""


def _set_aside(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def tame_collector() -> None:
    """Freeze existing objects, and later the survivors of each full collection. Call once, before anything is
    served."""
    if _set_aside not in gc.callbacks:
        gc.callbacks.append(_set_aside)
    gc.freeze()


async def collect_garbage(dropped: asyncio.Event) -> None:
    """Collect all objects, frozen ones too, now and then, and when a bucket was dropped, until cancelled."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(WHOLE_SECONDS):
                await dropped.wait()
        if dropped.is_set():
            await asyncio.sleep(DROPPED_SECONDS)
            dropped.clear()
        gc.unfreeze()
        gc.collect()
        await asyncio.to_thread(give_back_freed)


def take_events_at_once() -> None:
    """Have gRPC's events come as soon as the event loop can take them. Call in the loop, before gRPC is used.

    gRPC's thread writes a byte into a socket for each event, and the loop takes one byte a round, with all events that
    are there. Where more than one comes in a round, the socket fills up; then the thread stands still until most of it
    is read, and each event waits for hundreds of rounds.
    """
    loop = asyncio.get_running_loop()
    add_reader = loop.add_reader

    def added(told: socket.socket, take: Callable[[], object]) -> None:
        fd, size = told.fileno(), bytearray(4)

        def take_all() -> None:
            fcntl.ioctl(fd, termios.FIONREAD, size)
            # gRPC reads one, and would wait for it.
            if (more := int.from_bytes(size, sys.byteorder) - 1) > 0:
                os.read(fd, more)
            take()

        add_reader(told, take_all)

    loop.add_reader = added  # type: ignore[method-assign, assignment]
    try:
        grpc.aio.init_grpc_aio()
    finally:
        del loop.add_reader


BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Upper bounds of the histogram's parts; the last part has no bound."""
SAMPLE_SECONDS: Final = 0.1
FADE: Final = 0.9


class LoopDelays:
    """Delays of the event loop, sampled.

    Attributes:
        counts: samples in each part of the histogram.
        longest_ms: the largest delay of all.
        seconds: all of them together.
        recent: the newest delay in seconds, or an older one that was longer, times FADE for each sample since.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.longest_ms = self.seconds = 0.0
        self.recent = 0.0

    def add(self, seconds: float) -> None:
        self.recent = max(seconds, self.recent * FADE)
        late_ms = max(seconds * 1e3, 0.0)
        self.seconds += late_ms / 1e3
        self.counts[bisect_left(BOUNDS_MS, late_ms)] += 1
        self.longest_ms = max(self.longest_ms, late_ms)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)
            self.add(loop.time() - due)
