"""gRPC between simulated processes: channels, calls and servers with the methods that are used of ``grpc.aio``.

A call has two directions, each in order, each as slow as the seed wants. What is sent while its direction is cut waits at
the sender, as TCP has it, and comes when that is healed; neither end is told. A process that dies, and a connection that
is reset, are told to the other end, unless that direction is cut.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc

from tests.simulation.looping import SimulatedLoop, Timeline, running

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]
OK: Status = (grpc.StatusCode.OK, "", ())
RESET: Status = (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer", ())
NO_CONNECTION: Status = (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", ())
CANCELLED: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
CONNECT_SECONDS = 2.0
UNSENT_MAX = 16
"""Messages that the transport takes before a write to it waits."""


class Direction:
    """Messages from one end of a call to the other."""

    def __init__(self, net: "Net", source: SimulatedLoop, target: SimulatedLoop, name: str) -> None:
        self._net = net
        self.source, self.target = source, target
        self._rng = net.timeline.drawn(source.host, target.host, name)
        self._lazy = self._rng.choice((0.001, 0.001, 0.001, 0.003, 0.1))
        self._due = 0.0
        self.held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.flying = 0
        self.lossy = False
        self._room: list[asyncio.Future[None]] = []

    def send(self, take: Callable[..., None], *args: Any) -> None:
        """Have the other end take something."""
        self.flying += 1
        if self.held or self._net.is_cut(self.source.host, self.target.host):
            self.held.append((take, args))
            self._net.holding[self] = None
        else:
            self._fly(take, args)

    def _fly(self, take: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._due = max(
            self._due, self._net.timeline.now + 0.0002 + self._rng.random() * self._lazy
        )
        handle = self.target.handle(self._arrive, take, args, self.lossy)
        self._net.timeline.at(self._due, self.target, handle)

    def _arrive(self, take: Callable[..., None], args: tuple[Any, ...], sure: bool) -> None:
        self.flying -= 1
        self._wake()
        if sure or not self.lossy:
            take(*args)

    def _wake(self) -> None:
        for future in self._room:
            if not future.done():
                future.set_result(None)
        self._room.clear()

    def release(self) -> None:
        """Send what waits; the direction is not cut any more."""
        while self.held:
            self._fly(*self.held.popleft())

    def lose(self) -> None:
        """Lose what is on its way; what is sent from now on arrives."""
        self.flying -= len(self.held)
        self.held.clear()
        self.lossy = True
        self._wake()

    async def room(self) -> None:
        """Wait until the transport takes another message."""
        while self.flying >= UNSENT_MAX:
            future = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future


class Net:
    """What connects all processes.

    Attributes:
        servers: by address.
        cuts: (from, to) by host: directions in which nothing passes.
        holding: directions that hold messages back.
        broken: numbers of the connections that broke.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.servers: dict[str, GrpcServer] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.holding: dict[Direction, None] = {}
        self.calls: dict[ClientCall, None] = {}
        self._numbers: Counter[tuple[str, str, str]] = Counter()
        self._hosts: dict[str, int] = {}
        self.broken = itertools.count()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    def heal(self, *cuts: tuple[str, str]) -> None:
        """Have cut directions pass messages again; all without any named."""
        self.cuts.difference_update(cuts or set(self.cuts))
        for direction in list(self.holding):
            if not self.is_cut(direction.source.host, direction.target.host):
                del self.holding[direction]
                direction.release()

    def host_number(self, host: str) -> int:
        return self._hosts.setdefault(host, len(self._hosts) + 1)

    def number(self, source: str, address: str, method: str) -> int:
        self._numbers[source, address, method] += 1
        return self._numbers[source, address, method]

    def died(self, loop: SimulatedLoop) -> None:
        """Tell the other ends that a process has ended."""
        self.servers = {a: s for a, s in self.servers.items() if s.loop is not loop}
        for call in list(self.calls):
            if loop in (call.loop, call.server and call.server.loop):
                call.break_off(client=call.loop is not loop, server=call.loop is loop)

    def lose(self, source: str, target: str) -> None:
        """Lose what servers of one host have sent to clients on another, and that has not arrived."""
        for call in self.calls:
            if call.server is not None and (call.server.loop.host, call.loop.host) == (
                source,
                target,
            ):
                call.server.to_client.lose()

    def reset(self, a: str, b: str) -> None:
        """Break all connections between two hosts."""
        for call in list(self.calls):
            if call.server is not None and {call.loop.host, call.server.loop.host} == {a, b}:
                call.break_off(client=True, server=True)


class ClientCall:
    """The client's end of a call; what is used of grpc.aio's StreamStreamCall."""

    def __init__(self, channel: "Channel", method: str, serialize: Any, deserialize: Any) -> None:
        loop = running()
        net = channel.net
        self._net, self.loop, self.method = net, loop, method
        self._serialize, self._deserialize = serialize, deserialize
        self._messages: deque[bytes] = deque()
        self._status: Status | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._half_closed = False
        self.server: ServerCall | None = None
        self._channel = channel
        number = net.number(loop.host, channel.address, method)
        name = f"{channel.address} {method} {number}"
        net.calls[self] = None
        channel.calls[self] = None
        server = net.servers.get(channel.address)
        if server is None or not server.loop.alive:
            loop.call_later(0.002, self.ended, NO_CONNECTION)
        elif not {(loop.host, server.loop.host), (server.loop.host, loop.host)}.isdisjoint(
            net.cuts
        ):
            loop.call_later(CONNECT_SECONDS, self.ended, NO_CONNECTION)
        else:
            peer = f"ipv4:10.0.0.{net.host_number(loop.host)}:{len(net.calls)}"
            self.server = ServerCall(server, self, method, peer)
            self._to_server = Direction(net, loop, server.loop, f"> {name}")
            self.server.to_client = Direction(net, server.loop, loop, f"< {name}")
            self._to_server.send(self.server.begin)

    # What comes from the server, and from the network.

    def arrived(self, message: bytes) -> None:
        if self._status is None:
            self._messages.append(message)
            self._wake()

    def ended(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            self._net.calls.pop(self, None)
            self._channel.calls.pop(self, None)
            self._wake()

    def break_off(self, *, client: bool, server: bool) -> None:
        """Break the connection; each end is told, or its process is dead."""
        if self.server is None:
            self._net.calls.pop(self, None)
            return
        rng = self._net.timeline.drawn(
            self.loop.host, self._channel.address, "broken", next(self._net.broken)
        )
        if client:
            if rng.random() < 0.5:
                self.server.to_client.lose()
            self.server.to_client.send(self.ended, RESET)
        else:
            self._net.calls.pop(self, None)
        if server:
            if rng.random() < 0.5:
                self._to_server.lose()
            self._to_server.send(self.server.lost)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def _changed(self) -> None:
        future = self.loop.create_future()
        self._waiting.append(future)
        await future

    async def _turn(self) -> None:
        future = self.loop.create_future()
        self.loop.call_soon(lambda: None if future.done() else future.set_result(None))
        await future

    # What the client does.

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self._status is CANCELLED

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self.ended(CANCELLED)
        self._messages.clear()
        if self.server is not None:
            self._to_server.send(self.server.lost)
        return True

    async def write(self, request: Any) -> None:
        if self.done() or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        data = self._serialize(request)
        if self.server is not None:
            self._to_server.send(self.server.arrived, data)
            await self._to_server.room()
        await self._turn()

    async def wait_for_connection(self) -> None:
        await self._turn()
        if self.done():
            self.check()

    async def done_writing(self) -> None:
        if not self.done() and not self._half_closed:
            self._half_closed = True
            if self.server is not None:
                self._to_server.send(self.server.half_closed)

    async def read(self) -> Any:
        while not self._messages and self._status is None:
            await self._changed()
        if self._messages:
            return self._deserialize(self._messages.popleft())
        self.check()
        return grpc.aio.EOF

    def check(self) -> None:
        """Raise what a call that has ended badly raises."""
        assert self._status is not None
        if self.cancelled():
            raise asyncio.CancelledError
        code, details, trailing = self._status
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details
            )

    async def _ended(self) -> Status:
        while self._status is None:
            await self._changed()
        return self._status

    async def code(self) -> grpc.StatusCode:
        return (await self._ended())[0]

    async def details(self) -> str:
        return (await self._ended())[1]

    async def trailing_metadata(self) -> Any:
        return grpc.aio.Metadata(*(await self._ended())[2])

    async def initial_metadata(self) -> Any:
        return grpc.aio.Metadata()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


class Channel:
    """A channel to an address."""

    def __init__(self, net: Net, address: str) -> None:
        self.net, self.address = net, address
        self.calls: dict[ClientCall, None] = {}

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., ClientCall]:
        def begin(requests: Any = None, metadata: Any = None) -> ClientCall:
            assert requests is None, "requests are written"
            return ClientCall(self, method, request_serializer, response_deserializer)

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Awaitable[Any]]:
        async def ask(request: Any, **options: Any) -> Any:
            call = ClientCall(self, method, request_serializer, response_deserializer)
            try:
                async with asyncio.timeout(options.get("timeout")):
                    with suppress(asyncio.InvalidStateError):
                        await call.write(request)
                        await call.done_writing()
                    answer = await call.read()
                    await call.code()
                    call.check()
                    return answer
            except TimeoutError:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise grpc.aio.AioRpcError(
                    code, grpc.aio.Metadata(), grpc.aio.Metadata(), "Deadline Exceeded"
                ) from None
            finally:
                call.cancel()

        return ask

    unary_stream = stream_unary = stream_stream

    async def close(self, grace: float | None = None) -> None:
        for call in list(self.calls):
            call.cancel()

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Details:
    """What an interceptor is told of a call."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class ServerCall:
    """The server's end of a call; what is used of ServicerContext."""

    to_client: Direction

    def __init__(self, server: "GrpcServer", call: ClientCall, method: str, peer: str) -> None:
        self._server, self.loop = server, server.loop
        self._call, self._method, self._peer = call, method, peer
        self._messages: deque[bytes] = deque()
        self._eof = False
        self._waiting: list[asyncio.Future[None]] = []
        self._status: Status | None = None
        self._task: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._serialize: Any = None

    # What comes from the client.

    def begin(self) -> None:
        if self._server.refuses:
            self.to_client.send(self._call.ended, RESET)
            return
        self._task = self.loop.create_task(self._serve())
        self._server.tasks[self._task] = None
        self._task.add_done_callback(lambda task: self._server.tasks.pop(task, None))

    def arrived(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def half_closed(self) -> None:
        self._eof = True
        self._wake()

    def lost(self) -> None:
        """The client is gone: reads find the end, and the handler is cancelled a moment later."""
        self._messages.clear()
        self.half_closed()
        if self._task is not None:
            self.loop.call_later(0.001, self._task.cancel)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def _serve(self) -> None:
        status: Status = (grpc.StatusCode.CANCELLED, "", ())
        try:
            handler = await self._server.handler_of(self._method)
            self._serialize = handler.response_serializer
            if handler.response_streaming:
                await handler.stream_stream(None, self)
            else:
                await self.write(await handler.stream_unary(None, self))
            status = OK
        except grpc.aio.AbortError:
            assert self._status is not None
            status = self._status
        finally:
            self._eof = True
            self._wake()
            for callback in self._callbacks:
                callback(self)
            self.to_client.send(self._call.ended, status)

    # What the handler does.

    async def read(self) -> Any:
        while not self._messages and not self._eof:
            future = self.loop.create_future()
            self._waiting.append(future)
            await future
        return self._messages.popleft() if self._messages else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        # Without a serializer they are bytes already.
        data = self._serialize(message) if self._serialize else message
        self.to_client.send(self._call.arrived, data)
        await self.to_client.room()
        await asyncio.sleep(0)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        self._status = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        # A client keeps its deadline to itself.
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)


class GrpcServer:
    """What is used of grpc.aio's server, on the loop of its process."""

    def __init__(self, net: Net, interceptors: Any = (), **_: Any) -> None:
        loop = running()
        self.loop = loop
        self._net = net
        self._interceptors = list(interceptors)
        self._generic: list[Any] = []
        self._address = ""
        self.refuses = True
        self.tasks: dict[asyncio.Task[None], None] = {}

    def add_insecure_port(self, address: str) -> int:
        if address.startswith("unix:"):
            return 1
        self._address = address
        return int(address.rpartition(":")[2])

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, *_: Any) -> None:
        """Do nothing: the generic ones are found."""

    async def handler_of(self, method: str) -> Any:
        details = Details(method)

        async def found(_: Any) -> Any:
            handlers = (generic.service(details) for generic in self._generic)
            return next((handler for handler in handlers if handler is not None), None)

        (interceptor,) = self._interceptors
        return await interceptor.intercept_service(found, details)

    async def start(self) -> None:
        self.refuses = False
        self._net.servers[self._address] = self

    async def stop(self, grace: float | None) -> None:
        self.refuses = True
        if self._net.servers.get(self._address) is self:
            del self._net.servers[self._address]
        if self.tasks and grace:
            await asyncio.wait(list(self.tasks), timeout=grace)
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks))
