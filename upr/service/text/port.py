"""The text port: connections that follow buckets by lines, for people with netcat and for small tools.

The server pulls: it asks for the next frame when the lines of the one before were taken. A connection holds a bounded
amount of text, and one that takes nothing for ``--reader-timeout`` is ended with a line in the log.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from upr.engine.streams import SHUTTING_DOWN, EndReason, too_slow
from upr.service.buckets.catalog import Catalog
from upr.service.overload.callers import CHEAP_SECONDS, Callers, peer_of
from upr.service.overload.sending_room import Sender, SendingRoom
from upr.service.storage_trouble import words_of
from upr.service.text.feed import Feed, Lines
from upr.service.text.lines import (
    Command,
    LineSplitter,
    Replicate,
    Said,
    error_line,
    parse_command,
    shown_name,
)
from upr.storage.store import ReadRequest
from upr_protocol.errors import (
    BucketNotFoundError,
    ListenError,
    ShuttingDownError,
    TooManyError,
    UprError,
)
from upr_protocol.limits import (
    FRAME_BYTES,
    PARTITIONS,
    SENDING_SECONDS,
    SILENT_INTERVALS,
    SLOW_BYTES_A_SECOND,
    TEXT_BUCKETS_MAX,
    TEXT_BUFFER_BYTES,
    TEXT_COMMANDS_A_SECOND,
    TEXT_PIECE_BYTES,
    TEXT_SILENT_SECONDS,
)
from upr_protocol.wire.v1.admin_service_pb2 import TextPortStatus

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""Longest time for what was said last to be taken."""
READ_BYTES: Final = 16 * 2**10
AT_ONCE_BYTES: Final = 32 * 2**10
"""Size from which the lines of a frame are made in a thread."""
LINES_AT_ONCE: Final = PARTITIONS
"""Most lines taken before the answers have to be on their way."""
START_SECONDS: Final = 40e-6
"""CPU seconds that a stream costs when it is opened."""


class TextPort:
    """The connections of a server's text port.

    Args:
        heartbeat_seconds: a PING is sent when nothing was sent for so long.
        reader_seconds: longest time that a connection may take nothing.

    Attributes:
        address: HOST:PORT where it listens; empty before.
        too_slow: connections that were ended because they took nothing.
    """

    def __init__(
        self, catalog: Catalog, callers: Callers, heartbeat_seconds: float, reader_seconds: float
    ) -> None:
        self.address = ""
        self.too_slow = 0
        self.catalog = catalog
        self.callers = callers
        self.heartbeat_seconds = heartbeat_seconds
        self.reader_seconds = reader_seconds
        self.room = SendingRoom()
        self._stopping = False
        self._connections: dict[Connection, asyncio.Task[Any] | None] = {}
        self._server: asyncio.Server | None = None

    def status(self) -> TextPortStatus | None:
        """Return the state for operators; None when it does not listen."""
        if not self.address:
            return None
        return TextPortStatus(
            address=self.address, connections=len(self._connections), too_slow=self.too_slow
        )

    async def start(self, listen: str) -> None:
        """Listen on HOST:PORT; ListenError if the port is in use, or the address is not this host's."""
        host, _, port = listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._accept, host.strip("[]"), int(port), limit=READ_BYTES
            )
        except OSError as error:
            raise ListenError(
                f"{listen} cannot be listened on for the text port: {words_of(error)}",
                hint="give --text another port; port 0 picks a free one",
            ) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """End all connections with a reason, and wait for them."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        tasks = [task for task in self._connections.values() if task is not None]
        for connection in self._connections:
            connection.end(SHUTTING_DOWN)
        if tasks:
            await asyncio.wait(tasks)

    def _allow(self, peer: str) -> Callable[[], None]:
        """Count a connection until what this returns is called; TooManyError or ShuttingDownError if it is refused."""
        if self._stopping:
            raise ShuttingDownError(SHUTTING_DOWN.words, hint=SHUTTING_DOWN.hint)
        return self.callers.open("Text", peer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("peername")
        host, port = found[:2] if found else ("?", 0)
        address = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        task = asyncio.current_task()
        try:
            with contextlib.ExitStack() as opened:
                opened.callback(self._allow(peer_of(address)))
                connection = Connection(self, reader, writer, address)
                self._connections[connection] = task
                try:
                    await connection.run()
                finally:
                    del self._connections[connection]
        except UprError as error:
            writer.write(error_line(error))
        except OSError:
            log.info("line reader was lost", extra={"peer": address})
        except Exception as error:
            log.exception("a connection failed", extra={"peer": address})
            writer.write(error_line(UprError(words_of(error), hint="see the server's log")))
        finally:
            await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection when all that was said is taken, or when LEAVE_SECONDS have passed."""
    writer.close()
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


class Connection:
    """One connection: a task that reads commands, and one that sends lines."""

    def __init__(
        self,
        port: TextPort,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
    ) -> None:
        self._port = port
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(TEXT_BUFFER_BYTES)
        self._peer = peer_of(address)
        self._who = {"peer": address, "consumer": ""}
        self._address = address
        self._feeds: dict[str, Feed] = {}
        self._said: list[bytes] = []
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._sending = Sender(self._wake.set, self._end_slow)
        self._reads: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._ending: EndReason | None = None
        # Whether a PING came: from then on silence ends the connection.
        self._is_armed = False
        self._has_spoken = False
        # When the commands so far are paid for, and when a line was sent last, by the event loop's clock.
        self._free_at = self._sent_at = 0.0

    async def run(self) -> None:
        """Serve until the client leaves or fails, or the connection is ended; OSError if it was lost."""
        self._say(f"SERVER {self._port.catalog.directory_id}\n".encode(), _ping())
        reading = asyncio.create_task(self._read())
        sending = self._sender = asyncio.create_task(self._send())
        try:
            await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if self._ending is not None:
                await asyncio.wait({sending})
            for task in (reading, sending):
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            tasks = [reading, sending, *self._reads]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for feed in self._feeds.values():
                feed.close()
            self._port.room.leave(self._sending)
            why = self._ending.reason if self._ending else "CLIENT_LEFT"
            log.info("line reader left", extra={**self._who, "reason": why})

    def end(self, why: EndReason, *, told: bool = True) -> None:
        """End the connection with an ERROR line, unless the client said so itself."""
        if self._ending is not None:
            return
        self._ending = why
        if told:
            self._say(error_line(why.error()))
        self._wake.set()
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._sender is not None:
            self._sender.cancel()

    def _end_slow(self, seconds: float = SENDING_SECONDS) -> None:
        """End the connection, because it does not take what waits; the ERROR line is behind that."""
        if self._ending is None:
            self._ending = too_slow(seconds)
            self._port.too_slow += 1
            log.warning("a consumer is too slow", extra=self._who)
            self._writer.write(error_line(self._ending.error()))
        self._give_up()

    def _say(self, *lines: bytes) -> None:
        self._said += lines
        self._wake.set()

    # Reading

    async def _read(self) -> None:
        splitter = LineSplitter()
        while self._ending is None:
            data = await self._received()
            if data is None:
                return
            try:
                lines = splitter.feed(data)
            except UprError as error:
                self.end(EndReason.of(error))
                return
            for first in range(0, len(lines), LINES_AT_ONCE):
                await self._take_lines(lines[first : first + LINES_AT_ONCE])

    async def _received(self) -> bytes | None:
        """Return what the client sent next; None when it said its last word."""
        armed = self._port.heartbeat_seconds * SILENT_INTERVALS
        silent = armed if self._is_armed else None if self._has_spoken else TEXT_SILENT_SECONDS
        try:
            async with asyncio.timeout(silent):
                data = await self._reader.read(READ_BYTES)
        except TimeoutError:
            if silent is None:
                # The socket's own: nothing was acknowledged for too long.
                raise
            words = f"no line came for {silent:g} s"
            self.end(EndReason("SILENT", True, words, "send a PING every few seconds"))
            return None
        if data:
            return data
        if self._feeds and not self._is_armed:
            # A client that closes only its own half, as netcat at the end of its input, goes on reading. One that is
            # gone shows when a PING is sent.
            await asyncio.Event().wait()
        return None

    async def _take_lines(self, lines: Sequence[bytes]) -> None:
        """Handle commands in order. REPLICATEs of partitions of one bucket go together, as many as fit into a step."""
        together: list[Replicate] = []
        for line in lines:
            self._has_spoken = True
            try:
                command: Command | UprError | None = parse_command(line)
            except UprError as error:
                command = error
            if together and not _goes_with(command, together):
                await self._replicate(together)
                together = []
            if isinstance(command, Replicate):
                together.append(command)
            elif command is not None:
                self._take(command)
        if together:
            await self._replicate(together)
        # ERROR lines too: whoever sends nonsense may not read what is said of it.
        await self._until_taken()
        await self._keep_rate(len(lines))

    def _take(self, command: Said | UprError) -> None:
        if isinstance(command, UprError):
            # It changes nothing.
            self._say(error_line(command))
        elif command.kind == "NAME":
            self._who["consumer"] = command.words
            log.info("line reader named", extra=self._who)
        elif command.kind == "ERROR":
            log.warning("a line reader failed", extra={**self._who, "words": command.words})
            self.end(EndReason("CLIENT_FAILED", False, command.words), told=False)
        else:
            self._is_armed = True

    async def _keep_rate(self, count: int) -> None:
        """Read on only when the commands of more than a second are paid for."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / TEXT_COMMANDS_A_SECOND
        if self._free_at > now + 1:
            await asyncio.sleep(self._free_at - now - 1)

    async def _replicate(self, asked: Sequence[Replicate]) -> None:
        """Open streams, in the peer's turn when they are many; then wait until the answers are on their way."""
        bucket = asked[0].bucket
        try:
            names = self._names_of(bucket)
        except UprError as error:
            self._say(error_line(error, *([shown_name(bucket)] if bucket else [])))
            return
        count = len(names) * sum(PARTITIONS if one.partition is None else 1 for one in asked)
        seconds = count * START_SECONDS
        if seconds >= CHEAP_SECONDS:
            await self._port.callers.turn(self._peer, seconds)
            with self._port.callers.charged(self._peer, seconds):
                self._open(names, asked)
        else:
            self._open(names, asked)
        self._gather()
        await self._until_taken()

    async def _until_taken(self) -> None:
        """Wait until less than a piece of what was said is left."""
        while sum(map(len, self._said)) > TEXT_PIECE_BYTES and self._ending is None:
            self._drained.clear()
            await self._drained.wait()

    def _names_of(self, bucket: str | None) -> list[str]:
        """Return the buckets that a request means.

        Raises:
            TooManyError: the connection may not follow as many.
            BucketNotFoundError: there is none at all.
        """
        catalog = self._port.catalog
        names = [bucket] if bucket is not None else sorted(catalog.fine)
        if not names:
            raise BucketNotFoundError(
                "there is no bucket", hint="'upr-admin bucket create' makes one"
            )
        count = len(self._feeds.keys() | set(names))
        if count > TEXT_BUCKETS_MAX:
            raise TooManyError(
                f"buckets of a connection are {count}; must be at most {TEXT_BUCKETS_MAX}",
                hint="name some, as in REPLICATE default, and connect again for others",
            )
        return names

    def _open(self, names: Sequence[str], asked: Sequence[Replicate]) -> None:
        for name in names:
            try:
                self._feed(name).start(asked)
            except UprError as error:
                self._say(error_line(error, shown_name(name)))

    def _feed(self, name: str) -> Feed:
        feed = self._feeds.get(name)
        if feed is not None and not feed.is_gone:
            return feed
        host = self._port.catalog.find(name)
        if feed is not None:
            # Its end goes before the answers of the new one.
            self._drop(name, feed)
        feed = self._feeds[name] = Feed(host, self._address, self._wake.set)
        return feed

    def _drop(self, name: str, feed: Feed) -> None:
        self._say(*feed.take_said())
        feed.close()
        del self._feeds[name]

    # Sending

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._gather()
            if self._said:
                said, self._said = self._said, []
                self._sending.is_busy = True
                await self._write(b"".join(said))
                self._sending.is_busy = False
                self._drained.set()
                continue
            if self._ending is not None:
                return
            if loop.time() >= self._sent_at + self._port.heartbeat_seconds:
                self._say(_ping())
                continue
            self._account()
            if self._port.room.join(self._sending):
                if (found := self._next_lines()) is not None:
                    await self._send_lines(*found)
                    continue
                self._begin_reads()
            self._port.room.pass_on()
            if self._wake.is_set():
                await asyncio.sleep(0)
                continue
            await self._idle(self._sent_at + self._port.heartbeat_seconds - loop.time())

    def _gather(self) -> None:
        """Take the answers and ends of all feeds; drop the feeds whose bucket is gone."""
        for name, feed in list(self._feeds.items()):
            if feed.is_gone:
                self._drop(name, feed)
            else:
                self._said += feed.take_said()

    async def _idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._wake.wait()

    def _next_lines(self) -> tuple[Feed, Lines] | None:
        """Return the lines of the next frame; the feeds have their turns. Answers were taken in this step."""
        for name, feed in list(self._feeds.items()):
            lines = feed.next_lines()
            if lines is not None:
                self._feeds[name] = self._feeds.pop(name)
                return feed, lines
        return None

    async def _send_lines(self, feed: Feed, lines: Lines) -> None:
        small = lines.size < AT_ONCE_BYTES
        while self._ending is None:
            self._account(lines.size)
            piece = (
                next(lines.pieces, b"")
                if small
                else await asyncio.to_thread(next, lines.pieces, b"")
            )
            if not piece:
                break
            self._account(lines.size + len(piece), is_sending=True)
            await self._write(piece)
        feed.sent(lines)

    def _account(self, size: int = 0, *, is_sending: bool = False) -> None:
        size += sum([feed.held for feed in self._feeds.values()])
        self._port.room.hold(self._sending, size, sending=is_sending)

    async def _write(self, data: bytes) -> None:
        """Write text, and wait until the connection holds no more than it may; OSError if it is gone."""
        seconds = self._port.reader_seconds
        patience = seconds + max(len(data) - FRAME_BYTES, 0) / SLOW_BYTES_A_SECOND
        self._writer.write(data)
        try:
            async with asyncio.timeout(patience):
                await self._writer.drain()
        except TimeoutError:
            self._end_slow(seconds)
        self._sent_at = asyncio.get_running_loop().time()

    def _begin_reads(self) -> None:
        for feed in self._feeds.values():
            wanted = feed.next_read()
            if wanted is not None:
                self._account()
                task = asyncio.create_task(self._read_store(feed, *wanted))
                self._reads.add(task)
                task.add_done_callback(self._reads.discard)

    async def _read_store(self, feed: Feed, requests: list[ReadRequest], max_bytes: int) -> None:
        await feed.read(requests, max_bytes)
        self._account()
        if self._port.room.exceeds(self._sending):
            # How large a block is shows when it is read, and others may have read one at the same time.
            feed.put_back()
            self._account()


def _ping() -> bytes:
    return f"PING {time.time_ns() // 10**6}\n".encode()


def _goes_with(command: object, together: Sequence[Replicate]) -> bool:
    """Return whether a command can be decided in one step with the REPLICATEs before it."""
    return (
        isinstance(command, Replicate)
        and command.bucket == together[0].bucket
        and None not in (command.partition, together[0].partition)
        and len(together) < PARTITIONS
    )
