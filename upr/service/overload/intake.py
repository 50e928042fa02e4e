"""The intake: messages on their way to a handler, bounded for each call and by the memory of the process.

gRPC takes a message into memory for each call that waits for one, up to MESSAGE_BYTES_MAX, and reports it only when it
is complete. The number of waiting calls cannot be bounded further, since idle calls wait too. So bytes are counted
where they arrive: each connection's socket tells how many it received, and this module counts those delivered as
messages. When the process holds too much memory, the connections with the largest difference lose their calls, with
TOO_MANY. Large messages may arrive faster than the event loop handles them, so a thread watches as well: above a higher
limit it shuts those connections down, and their clients reconnect. The limits leave room for tails of TAIL_BYTES in all;
more than that in tails was allowed by whoever configured it, and is not counted.
"""

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import grpc

from upr.config import TAIL_BYTES
from upr.service.overload.process import give_back_freed, memory_bytes, tcp_sockets
from upr.service.sight.counts import count_reason, refusals
from upr_protocol.errors import InvalidArgumentError, TooManyError, UprError
from upr_protocol.limits import (
    MESSAGE_BYTES_MAX,
    OPEN_SECONDS,
    RECEIVE_CLOSE_BYTES,
    RECEIVE_LIMIT_BYTES,
    RECEIVE_WATCH_BYTES,
)
from upr_protocol.wire import grpc as status

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
GUARD_SECONDS = 0.01
"""Interval of the thread while RECEIVE_WATCH_BYTES or more are held; otherwise that of the loop."""
BASE_SECONDS = 60.0
"""Longest time over which received bytes are compared: over more, frames and headers add up."""
ARRIVING_BYTES_MIN = 2**20
"""Smallest number of arriving bytes for which a connection loses calls."""
LARGE_BYTES = 2**20
CALM_SECONDS = 0.5
"""Longest pause before the next read of a call that sent LARGE_BYTES at once, while much memory is held."""
FREE_SECONDS = 0.25
QUIET_TICKS = 20
GIVE_BACK_BYTES = 24 * 2**20
"""Growth since freed memory was last returned to the system, after which QUIET_TICKS of quiet return it again."""
_TCP_INFO_BYTES_RECEIVED = struct.Struct("@Q")
_TCP_INFO_OFFSET = 128
Context = grpc.aio.ServicerContext[Any, Any]


async def abort(context: Context, error: UprError) -> NoReturn:
    """End a call with a domain error, and count it."""
    count_reason(refusals, error.reason)
    # Their frames hold the request, which may be large, until the client has taken the status.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(status.code_of(error), error.message, status.metadata_of(error))


_left: set[asyncio.Future[Any]] = set()


def leave(reading: asyncio.Future[Any]) -> None:
    """Detach a task that waits for a message: it ends with its call.

    Cancelling it would leak a message that arrived meanwhile: gRPC frees only messages that are taken.
    """
    _left.add(reading)
    reading.add_done_callback(_ended)


def _ended(reading: asyncio.Future[Any]) -> None:
    _left.discard(reading)
    if not reading.cancelled():
        # Retrieve the exception, or asyncio logs it as never retrieved.
        reading.exception()


def _step(reading: Coroutine[Any, Any, Any], end: Callable[[object], None], _: Any = None) -> None:
    """Take the steps of gRPC's coroutine that reads a message, and hand over what it returns or raises.

    A task costs a short call more. This goes on, and takes the message, also when nobody waits for it any more.
    """
    try:
        waited = reading.send(None)
    except StopIteration as read:
        end(read.value)
    except BaseException as error:
        end(error)
    else:
        waited.add_done_callback(partial(_step, reading, end))


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection.

    Attributes:
        name: gRPC's name of it.
        delivered: bytes of the messages that came out.
        base: received minus delivered bytes when nothing counted as arriving.
        calls: those for which messages may arrive.
    """

    name: str
    delivered: int = 0
    base: int = 0
    calls: "set[Arriving]" = field(default_factory=set)


class Arriving:
    """Call for which messages may be arriving; ``shed`` is called to end it at once."""

    def __init__(
        self, intake: "Intake", peer: _Peer, context: Context, shed: Callable[[], object]
    ) -> None:
        self._intake = intake
        self._peer = peer
        self._context = context
        self._reading = self._stopped = False
        self.shed = shed
        peer.calls.add(self)

    async def read(self) -> Any:
        """Return the call's next message, or EOF. The task that reads is ended with ``stop``."""
        self._reading = True
        raw = await self._context.read()
        self._reading = False
        if self._stopped:
            raise asyncio.CancelledError
        if raw is not grpc.aio.EOF:
            self.received(len(raw))
        return raw

    def stop(self, reader: asyncio.Task[None]) -> bool:
        """End the task that reads; False if it waits for a message and therefore ends with the call."""
        if self._reading and not reader.done():
            if not self._stopped:
                self._stopped = True
                leave(reader)
            return False
        reader.cancel()
        return True

    def received(self, size: int) -> None:
        self._peer.delivered += size
        if size >= LARGE_BYTES:
            # Checked at once: more large messages may be handled before the next tick.
            self._intake.look()

    async def calm(self) -> None:
        """Wait while the process holds much memory, for CALM_SECONDS at most."""
        left = CALM_SECONDS
        while left > 0 and self._intake.held() >= RECEIVE_WATCH_BYTES:
            await asyncio.sleep(TICK_SECONDS)
            left -= TICK_SECONDS

    def close(self) -> None:
        self._peer.calls.discard(self)


def shed_error() -> TooManyError:
    """Return the error of a call that was ended because too much was arriving."""
    return TooManyError(
        "the server holds too many bytes of unfinished requests",
        hint="retry after a moment, with fewer large values at once",
    )


class Intake:
    """Intake of a server; ``tail_bytes``, those in the tails of all buckets, is called by any thread."""

    def __init__(self, tail_bytes: Callable[[], int] = lambda: 0) -> None:
        self._tail_bytes = tail_bytes
        self._peers: dict[str, _Peer] = {}
        self._told = False
        self._freed_at = 0.0
        self._given_back = 0
        self._last = 0
        self._quiet = 0

    def expect(self, context: Context, shed: Callable[[], object]) -> Arriving:
        """Register a call that waits for messages, until it is closed."""
        name = context.peer()
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(name)
        return Arriving(self, peer, context, shed)

    async def receive(self, context: Context, limit: int, what: str) -> bytes | None:
        """Return a call's first message, None when there is none.

        Raises:
            InvalidArgumentError: it has more than ``limit`` bytes, or was not there within OPEN_SECONDS.
            TooManyError: too much was arriving.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Any] = loop.create_future()

        def end(outcome: object) -> None:
            if not over.done():
                over.set_result(outcome)

        timer = loop.call_later(OPEN_SECONDS, end, None)
        arriving = self.expect(context, lambda: end(shed_error()))
        _step(context.read(), end)
        try:
            raw = await over
        finally:
            timer.cancel()
            arriving.close()
        if raw is None:
            raise InvalidArgumentError(
                f"no {what} within {OPEN_SECONDS:.0f} s", hint="it is the first message of a call"
            )
        if isinstance(raw, BaseException):
            raise raw
        if raw is grpc.aio.EOF:
            return None
        arriving.received(len(raw))
        if len(raw) > limit:
            raise InvalidArgumentError(f"{what} is {len(raw)} bytes; must be at most {limit}")
        message: bytes = raw
        return message

    # Watching

    async def watch(self) -> None:
        """Watch the process's memory until cancelled."""
        base_at = time.monotonic() + BASE_SECONDS
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self._give_back(self.look())
            if time.monotonic() >= base_at:
                base_at = time.monotonic() + BASE_SECONDS
                self._begin_anew(await asyncio.to_thread(received_by_peer))

    def _begin_anew(self, sizes: Mapping[str, int]) -> None:
        """Restart the counts of all connections, and drop closed ones."""
        for name, peer in list(self._peers.items()):
            if name in sizes:
                peer.base = sizes[name] - peer.delivered
            elif not peer.calls:
                del self._peers[name]

    async def _give_back(self, held: int) -> None:
        """Return freed memory to the system once it has grown and is quiet."""
        spare = self._spare(held)
        self._quiet = self._quiet + 1 if abs(spare - self._last) < 2**20 else 0
        self._last = spare
        if self._quiet >= QUIET_TICKS and spare > self._given_back + GIVE_BACK_BYTES:
            await asyncio.to_thread(give_back_freed)
            spare = self._given_back = self._spare(self.held())
            self._quiet = 0
        self._given_back = min(self._given_back, spare)

    def _spare(self, held: int) -> int:
        # What a flush frees of the tails is growth, though the process holds no more than before.
        return held - min(self._tail_bytes(), TAIL_BYTES)

    def held(self) -> int:
        """Return the process's anonymous memory without what tails hold above TAIL_BYTES."""
        return memory_bytes()[0] - max(self._tail_bytes() - TAIL_BYTES, 0)

    def look(self) -> int:
        """End calls if the process holds too much memory; return how much it holds."""
        held = self.held()
        if held >= RECEIVE_LIMIT_BYTES and time.monotonic() > self._freed_at + FREE_SECONDS:
            # Freed memory may not have been returned yet.
            give_back_freed()
            self._freed_at = time.monotonic()
            held = self.held()
        if held >= RECEIVE_LIMIT_BYTES:
            self._shed(held)
        elif self._told and held < RECEIVE_WATCH_BYTES:
            self._told = False
            log.info("no call is ended any more for what arrives")
        return held

    def _shed(self, held: int) -> None:
        """End calls of the connections with the most arriving bytes, until that would free enough."""
        ended = 0
        for size, peer in self._over(received_by_peer(), held):
            peer.base += size
            ended += len(peer.calls)
            for call in list(peer.calls):
                call.shed()
        if ended and not self._told:
            self._told = True
            log.warning(
                "too much is arriving: calls are ended",
                extra={"held_bytes": held, "calls": ended},
            )

    def _over(self, sizes: Mapping[str, int], held: int) -> list[tuple[int, "_Peer"]]:
        """Return the connections with the most arriving bytes, until closing them would free enough."""
        arriving = sorted(
            (
                (sizes[name] - peer.delivered - peer.base, peer)
                for name, peer in list(self._peers.items())
                if name in sizes and peer.calls
            ),
            key=lambda one: one[0],
        )
        # One message always passes, however slow the flush is: otherwise a single writer would starve.
        left = min(
            held - RECEIVE_WATCH_BYTES, sum(size for size, _ in arriving) - MESSAGE_BYTES_MAX
        )
        found = []
        while left > 0 and arriving and arriving[-1][0] >= ARRIVING_BYTES_MIN:
            found.append(arriving.pop())
            left -= found[-1][0]
        return found

    # The thread

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the watching thread while the body runs."""
        stop = threading.Event()
        thread = threading.Thread(target=self._guard, args=(stop,), name="intake", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _guard(self, stop: threading.Event) -> None:
        seconds = TICK_SECONDS
        while not stop.wait(seconds):
            # Where there is no memory for that, it is tried again.
            with suppress(MemoryError):
                held = self.held()
                seconds = GUARD_SECONDS if held >= RECEIVE_WATCH_BYTES else TICK_SECONDS
                if held >= RECEIVE_CLOSE_BYTES:
                    give_back_freed()
                    held = self.held()
                if held >= RECEIVE_CLOSE_BYTES:
                    self._shut_down_connections(held)

    def _shut_down_connections(self, held: int) -> None:
        over = set()
        for size, peer in self._over(received_by_peer(), held):
            peer.base += size
            over.add(peer.name)
        if not over:
            return
        for name, one, _ in _connections():
            if name in over:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        log.warning(
            "too much is arriving: connections are closed",
            extra={"held_bytes": held, "connections": len(over)},
        )


def received_by_peer() -> dict[str, int]:
    """Return the bytes that each TCP connection has received, by gRPC's name of its peer; empty if unknown."""
    return {name: received for name, _, received in _connections()}


def _connections() -> Iterator[tuple[str, socket.socket, int]]:
    """Yield each TCP connection: gRPC's name of its peer, a copy of the socket, and the bytes that it has received."""
    for one in tcp_sockets():
        with suppress(OSError, struct.error):
            name = _peer_name(one.getpeername())
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            yield name, one, _TCP_INFO_BYTES_RECEIVED.unpack_from(info, _TCP_INFO_OFFSET)[0]


def _peer_name(address: tuple[Any, ...]) -> str:
    host, port = address[0], address[1]
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host[7:]}:{port}"
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
