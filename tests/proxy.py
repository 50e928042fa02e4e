"""A TCP proxy that does to connections what networks do. It runs in a thread of its own, on 127.0.0.1."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

Direction = Literal["to server", "to client"]
DIRECTIONS: tuple[Direction, Direction] = ("to server", "to client")
PIECE_BYTES = 16 * 2**10
STOP_SECONDS = 10.0
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing says RST, and drops what was not sent."""
T = TypeVar("T")


class _Lane:
    """What is done to the bytes of one direction."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.bytes_per_second = 0.0
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.open = asyncio.Event()
        self.open.set()


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.writers: dict[Direction, asyncio.StreamWriter] = {
            "to server": server,
            "to client": client,
        }
        self.tasks: list[asyncio.Task[None]] = []
        self.cut_after: dict[Direction, int | None] = {}

    def reset(self) -> None:
        for writer in self.writers.values():
            if writer.is_closing():
                continue
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        for task in self.tasks:
            task.cancel()


class Proxy:
    """Passes bytes on between clients and one server; used with ``with``. Faults last until ``heal``.

    The methods may be called from any thread, and have happened when they return.

    Args:
        server: "host:port" of the server; empty: each connection names its own, as gRPC does that was told of a proxy.

    Attributes:
        target: "host:port" for clients.
        accepted: connections so far.
        cuts: connections that ``cut_after`` ended.
        stalled: connections that ``stall_after`` holds, or held until they ended.
        passed: bytes passed on by direction, of all connections.
        on_change: called, in the proxy's thread, when a connection is accepted or cut.
    """

    def __init__(self, server: str = "") -> None:
        self._server = server
        self.target = ""
        self.accepted = self.cuts = self.stalled = 0
        self.passed: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self.on_change: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._connections: set[_Connection] = set()
        self._holes: dict[tuple[str, Direction], asyncio.Event] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        self._loop.close()

    def _do(self, work: Callable[[], Any]) -> None:
        async def done() -> None:
            result = work()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(STOP_SECONDS)

    async def _listen(self) -> None:
        self._lanes = {direction: _Lane() for direction in DIRECTIONS}
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        self.target = f"127.0.0.1:{port}"

    async def _close(self) -> None:
        self._listener.close()
        tasks = [task for connection in self._connections for task in connection.tasks]
        for connection in list(self._connections):
            connection.reset()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    # Faults

    def delay(self, seconds: float) -> None:
        """Hold each piece of up to 16 KiB back for so long, in both directions."""

        def delay() -> None:
            for lane in self._lanes.values():
                lane.seconds = seconds

        self._do(delay)

    def limit(self, bytes_per_second: float) -> None:
        """Pass no more than so much on in each direction of each connection."""

        def limit() -> None:
            for lane in self._lanes.values():
                lane.bytes_per_second = bytes_per_second

        self._do(limit)

    def cut_after(self, direction: Direction, count: int) -> None:
        """Reset the connection that first passes so many bytes on, of those that are there and those to come.

        Bytes are counted from now on, or from the beginning of a new connection. It happens once.
        """

        def arm() -> None:
            self._lanes[direction].cut_after = count
            for connection in self._connections:
                connection.cut_after[direction] = count

        self._do(arm)

    def stall_after(self, direction: Direction, count: int) -> None:
        """Pass no more than so many bytes on in each connection to come; its end is not held back."""

        def arm() -> None:
            self._lanes[direction].stall_after = count

        self._do(arm)

    def black_hole(self, *directions: Direction, server: str = "") -> None:
        """Pass nothing on and take nothing, as when packets are lost; new connections fare the same.

        Args:
            server: only where a connection names this one; by default all fare so.
        """

        def close() -> None:
            for direction in directions:
                (self._hole(server, direction) if server else self._lanes[direction].open).clear()

        self._do(close)

    def half_close(self, direction: Direction) -> None:
        """Say the end of the stream in one direction of the connections that are there."""

        def close() -> None:
            for connection in self._connections:
                with contextlib.suppress(OSError, RuntimeError):
                    connection.writers[direction].write_eof()

        self._do(close)

    def reset(self) -> None:
        """Reset all connections."""

        def reset() -> None:
            for connection in list(self._connections):
                connection.reset()

        self._do(reset)

    def heal(self) -> None:
        """End all faults; what a black hole held back goes on."""

        def heal() -> None:
            for lane in self._lanes.values():
                lane.seconds = lane.bytes_per_second = 0.0
                lane.open.set()
            for hole in self._holes.values():
                hole.set()
            self._disarm()

        self._do(heal)

    def _hole(self, server: str, direction: Direction) -> asyncio.Event:
        """Return what is set while bytes pass to or from a server."""
        if (server, direction) not in self._holes:
            self._holes[server, direction] = hole = asyncio.Event()
            hole.set()
        return self._holes[server, direction]

    def _disarm(self) -> None:
        for lane in self._lanes.values():
            lane.cut_after = None
        for connection in self._connections:
            connection.cut_after.clear()

    # Passing on

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.on_change()
        try:
            server = self._server or (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            host, _, port = server.rpartition(":")
            from_server, to_server = await asyncio.open_connection(host, int(port))
        except (OSError, asyncio.IncompleteReadError):
            # As a server that is not there would.
            writer.transport.abort()
            return
        if not self._server:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        connection = _Connection(writer, to_server)
        connection.cut_after = {d: lane.cut_after for d, lane in self._lanes.items()}
        self._connections.add(connection)
        connection.tasks = [
            asyncio.create_task(self._pass(connection, reader, "to server", server)),
            asyncio.create_task(self._pass(connection, from_server, "to client", server)),
        ]
        await asyncio.gather(*connection.tasks, return_exceptions=True)
        self._connections.discard(connection)
        for one in connection.writers.values():
            one.close()

    async def _pass(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        direction: Direction,
        server: str,
    ) -> None:
        lane, writer = self._lanes[direction], connection.writers[direction]
        stall, count = lane.stall_after, 0
        hole = self._hole(server, direction)
        try:
            while True:
                if self._must_cut(connection, direction, b"") == 0:
                    self._cut(connection, direction)
                    return
                await lane.open.wait()
                await hole.wait()
                piece = await reader.read(PIECE_BYTES)
                # Read before the hole opened, or while it was there: it is lost in it all the same.
                await lane.open.wait()
                await hole.wait()
                if not piece:
                    writer.write_eof()
                    return
                seconds = lane.seconds
                if lane.bytes_per_second:
                    seconds += len(piece) / lane.bytes_per_second
                if seconds:
                    await asyncio.sleep(seconds)
                left = self._must_cut(connection, direction, piece)
                writer.write(piece if left is None else piece[:left])
                self.passed[direction] += len(piece)
                await writer.drain()
                if left is not None:
                    self._cut(connection, direction)
                    return
                count += len(piece)
                if stall is not None and count >= stall:
                    self.stalled += 1
                    await asyncio.Event().wait()
        except (OSError, RuntimeError):
            connection.reset()

    def _must_cut(self, connection: _Connection, direction: Direction, piece: bytes) -> int | None:
        """How many bytes of a piece still pass before the connection is cut; None: it is not."""
        left = connection.cut_after.get(direction)
        if left is None:
            return None
        if left <= len(piece):
            return left
        connection.cut_after[direction] = left - len(piece)
        return None

    def _cut(self, connection: _Connection, direction: Direction) -> None:
        self.cuts += 1
        self.on_change()
        self._disarm()
        # A reset would take with it what the receiver has not read yet, and with it the piece of a message.
        connection.writers[direction].close()
        connection.reset()
