"""Start and stop of a server."""

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from upr import __version__
from upr.config import ServerConfig
from upr.service import logs
from upr.service.access.files import (
    CLUSTER_CA,
    IDENTITIES,
    LOOK_SECONDS,
    PEER_CA,
    Certificates,
    Expiring,
    Watched,
    authorities,
)
from upr.service.access.identities import Identity
from upr.service.access.rules import Access
from upr.service.admin import AdminMethods, Process
from upr.service.buckets.bucket_service import new_id
from upr.service.buckets.catalog import Catalog
from upr.service.buckets.keepers import lasting
from upr.service.change_stream import ChangeStreamMethods
from upr.service.clock import ClockKeeper
from upr.service.health import REQUEST_BYTES as HEALTH_BYTES
from upr.service.health import Health
from upr.service.key_value import KeyValueMethods
from upr.service.overload import process as resources
from upr.service.overload.callers import Callers, Turns
from upr.service.overload.gate import Gate
from upr.service.overload.intake import Intake
from upr.service.sight import traces, web
from upr.service.text.port import TextPort
from upr.storage.directory import DataDirectory
from upr_protocol.errors import ListenError, UprError
from upr_protocol.limits import (
    ADMIN_SOCKET,
    GET_BYTES_MAX,
    SAVE_BYTES_MAX,
    SOCKET_PATH_MAX,
    TEXT_CONNECTIONS_MAX,
)
from upr_protocol.wire.compression import zstd_available
from upr_protocol.wire.grpc import SERVER_OPTIONS
from upr_protocol.wire.v1 import (
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
    replica_service_pb2,
)
from upr_protocol.wire.v1.types_pb2 import SetPart

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
TELL_SECONDS = 5.0
"""Interval at which the log reports suppressed events."""
_SERVED = (
    (admin_service_pb2, "AdminService"),
    (change_stream_service_pb2, "ChangeStreamService"),
    (key_value_service_pb2, "KeyValueService"),
)
_REQUEST_LIMITS = {
    "Get": GET_BYTES_MAX,
    "SavePositions": SAVE_BYTES_MAX,
    "Check": HEALTH_BYTES,
    "Watch": HEALTH_BYTES,
}
_SERVICES = [module.DESCRIPTOR.services_by_name[name].full_name for module, name in _SERVED]
_HAS_SCHEME = re.compile("[^[].*:")
"""Beginning of a host that gRPC takes for an address of another kind; that of IPv6 stands in brackets."""


def check_listen(
    address: str, *, insecure: bool, guarded: bool = False, option: str = "--listen"
) -> bool:
    """Return whether the address is loopback.

    Args:
        guarded: whether what is served there has TLS and identities.
        option: what gives the address; the ports of the others than --listen have no TLS.

    Raises:
        ListenError: it is not HOST:PORT, or neither loopback nor allowed to be insecure.
    """
    host, _, port = address.rpartition(":")
    # gRPC takes the others for sockets that are no TCP.
    named = host in ("", "unix", "unix-abstract", "vsock")
    if named or _HAS_SCHEME.match(host) or not port.isdigit() or int(port) > 65535:
        raise ListenError(
            f"{option} is {address!r}; must be HOST:PORT", hint="for example 127.0.0.1:7711"
        )
    bare = host.strip("[]")
    try:
        loopback = bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not insecure and not guarded:
        without, hint = "--insecure", "give --insecure to serve there without encryption"
        if option == "--listen":
            without = "TLS and identities"
            hint = (
                "give --tls-cert and --tls-key, and --tokens or --tls-client-ca; or --insecure to listen there without"
                " encryption or authentication"
            )
        raise ListenError(f"{option} is {address}; must be loopback without {without}", hint=hint)
    if not loopback and not guarded:
        log.warning(
            "listening for everybody, without TLS or without identities", extra={"address": address}
        )
    return loopback


def _encode(message: Any) -> bytes:
    encoded: bytes = message if type(message) is bytes else message.SerializeToString()
    return encoded


def _handlers(descriptor: Any, service: str, methods: Any) -> grpc.GenericRpcHandler:
    """Register a service by its descriptor.

    The generated registration would refuse frames, which are bytes that are encoded already.
    """
    found = descriptor.services_by_name[service]
    handlers = {}
    for method in found.methods:
        request = GetMessageClass(method.input_type)
        served = getattr(methods, method.name)
        # Streaming calls receive bytes: they count them, and parse them in their turn.
        handlers[method.name] = (
            grpc.stream_stream_rpc_method_handler(served, None, _encode)
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler(served, request.FromString, _encode)
        )
    return grpc.method_handlers_generic_handler(found.full_name, handlers)


class SetMethods(Protocol):
    """The methods of ReplicaService, and the task behind them.

    Attributes:
        serves: whether the server serves in its set: as the active one, or as a replica that is in step.
    """

    @property
    def serves(self) -> bool: ...

    @property
    def part(self) -> SetPart:
        """Its part in its set."""

    @property
    def troubles(self) -> Mapping[str, UprError | None]:
        """What is wrong with that, by kind; None where nothing is."""

    async def run(self) -> None:
        """Take part in the set of servers until cancelled."""

    async def end(self) -> None:
        """End what calls began, once ``run`` was cancelled and no call is open."""

    def topology(self, told_why: bool) -> replica_service_pb2.GetTopologyResponse:
        """Return what the server knows of its set; why it waits, which may name any bucket, only if that may be told."""


Replicate = Callable[[Catalog, ServerConfig, Callable[[], str]], SetMethods]


class Server:
    """A running server.

    Args:
        replicate: makes the part that the server takes in a set of servers, given the catalog, the settings and a
            function that returns the bound address; None for a server that is always alone.

    Raises:
        ListenError: the address cannot be listened on.
        DataDirectoryError, DataDamagedError: the data directory cannot be used.
    """

    def __init__(
        self,
        config: ServerConfig,
        log_limit: logs.EventLimit | None = None,
        replicate: Replicate | None = None,
    ) -> None:
        self._import_all()
        self._config = config
        self._log_limit = log_limit or logs.EventLimit()
        self._tls: Certificates | None = None
        if config.encrypted:
            self._tls = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
        self._access = Access(config.tokens, config.tls_client_ca is not None, config.open_admin)
        guarded = self._tls is not None and self._access.has_identities
        check_listen(config.listen, insecure=config.insecure, guarded=guarded)
        loopback = bool(config.http) and check_listen(
            config.http, insecure=config.insecure, option="--http"
        )
        self._check_text()
        self._directory = DataDirectory(config.data, must_exist=config.require_data)
        try:
            if config.ready_file:
                # Who waits for it must not take that of an earlier start for this one's.
                config.ready_file.unlink(missing_ok=True)
            self._directory.check_place(may_be_moved=config.data_moved)
            self._clock = ClockKeeper(self._directory, config.clock_jump_seconds)
            self._catalog = Catalog(self._directory, config, self._clock.clock)
        except BaseException:
            self._directory.close()
            raise
        server_id = new_id()
        callers = Callers()
        self._intake = Intake(lambda: sum(one.bucket.tail.bytes for one in self._catalog.hosts))
        self._changes = ChangeStreamMethods(
            self._catalog,
            self._intake,
            server_id,
            config.heartbeat_seconds,
            config.reader_seconds,
            callers,
        )
        self._delays = resources.LoopDelays()
        self._text = TextPort(
            self._catalog, callers, config.heartbeat_seconds, config.reader_seconds
        )
        self._writes = KeyValueMethods(self._catalog, self._intake, self._delays, callers)
        self._tasks: list[asyncio.Task[None]] = []
        self._connections = resources.Connections(self._room())
        self._process = process = self._state_of(server_id)
        self._admin = AdminMethods(self._catalog, process)
        self._sets = replicate and replicate(
            self._catalog, config, lambda: config.advertise or self.address
        )
        self._expiring = _expiring(config, self._tls)
        self._serving = False
        self._web = self._web_port(process, loopback) if config.http else None
        self._replicating: asyncio.Task[None] | None = None
        self._served = [*zip(_SERVED, (self._admin, self._changes, self._writes), strict=True)]
        if self._sets is not None:
            self._served.append(((replica_service_pb2, "ReplicaService"), self._sets))
        self._health = Health(_SERVICES, _SERVICES[2:])
        self._grpc = grpc.aio.server(
            interceptors=[Gate(self._intake, callers, _REQUEST_LIMITS, self._access)],
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_allowed_incoming_connections", self._connections.limit),
            ],
        )
        self.address = ""

    def _state_of(self, server_id: int) -> Process:
        return Process(
            server_id,
            lambda: self._changes.open_calls,
            lambda: self._writes.open_calls,
            self._text.status,
            self._delays,
            self._clock.clock,
            self._file_troubles,
            lambda: {file: end for one in self._expiring for file, end in one.ends.items()},
            lambda: None if self._sets is None else self._sets.part,
            lambda: {} if self._sets is None else self._sets.troubles,
            self._connections,
        )

    def _check_text(self) -> None:
        """Raise ListenError if the text port is not allowed: what it serves, it serves to anyone who connects."""
        if not self._config.text:
            return
        if self._access.has_identities:
            raise ListenError(
                "--text is given with --tokens or --tls-client-ca; must be without, because it knows no credentials",
                hint="leave out --text, and follow with upr-cat or the SDK",
            )
        check_listen(self._config.text, insecure=self._config.insecure, option="--text")

    @staticmethod
    def _import_all() -> None:
        """Import modules that libraries import on first use, when there may be no descriptor left."""
        importlib.import_module("numpy.ma")  # np.unique
        importlib.import_module("concurrent.futures.thread")  # asyncio.to_thread
        zstd_available()
        traces.prepare()

    def _room(self) -> int:
        """Return the largest number of connections for each listen address."""
        try:
            others = web.DESCRIPTORS if self._config.http else 0
            others += TEXT_CONNECTIONS_MAX if self._config.text else 0
            count = resources.connections_max(len(self._catalog.hosts), others)
        except BaseException:
            self._directory.close()
            raise
        host = self._config.listen.rpartition(":")[0].strip("[]")
        with contextlib.suppress(OSError):
            # "localhost" is two addresses, and gRPC counts for each.
            count //= len({found[4][0] for found in socket.getaddrinfo(host, None)}) or 1
        return max(count, 1)

    def _web_port(self, process: Process, loopback: bool) -> web.WebPort:
        # With all that they import, they are for those who have the port.
        from upr.service.sight import feed, metrics

        turns = Turns()
        found = metrics.Metrics(self._catalog, process, self._is_ready, turns)
        topology = None if self._sets is None else self._sets.topology
        fed = feed.Feed(self._catalog, process, self._is_ready, topology, turns)

        async def page(request: web.Request, viewer: Identity) -> web.Answer:
            return web.Answer(200, await found.page(), metrics.CONTENT_TYPE)

        async def healthy(request: web.Request, viewer: Identity) -> web.Answer:
            return web.said(self._serving)

        async def ready(request: web.Request, viewer: Identity) -> web.Answer:
            return web.said(self._is_ready())

        pages = fed.pages() | {
            "/metrics": web.Page(page),
            "/healthz": web.Page(healthy, is_open=True),
            "/readyz": web.Page(ready, is_open=True),
        }

        def viewer(request: web.Request, page: web.Page) -> Identity | None:
            shown = request.headers.get("authorization", "")
            access = self._access
            return access.viewer(request.path, request.peer, shown, everything=page.about_all)

        return web.WebPort(self._config.http, pages, loopback=loopback, viewer=viewer)

    def _is_ready(self) -> bool:
        """Return whether every bucket serves, and a replica is in step."""
        in_set = self._sets is None or self._sets.serves
        return self._serving and in_set and all(self._catalog.fine.values())

    async def start(self) -> None:
        host = self._config.listen.rpartition(":")[0]
        try:
            if self._tls is None:
                port = self._grpc.add_insecure_port(self._config.listen)
            else:
                port = self._grpc.add_secure_port(self._config.listen, self._tls.credentials())
        except RuntimeError as error:
            raise ListenError(
                f"{self._config.listen} cannot be listened on: the port is in use, or the address is not this host's",
                hint="give --listen another port; port 0 picks a free one",
            ) from error
        self.address = f"{host}:{port}"
        self._listen_for_the_owner()
        self._grpc.add_generic_rpc_handlers(
            tuple(
                _handlers(module.DESCRIPTOR, name, methods)
                for (module, name), methods in self._served
            )
        )
        # Of methods that are registered by name gRPC would wait for each anew with every call of any method.
        self._grpc.add_registered_method_handlers = lambda *_: None  # type: ignore[method-assign]
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        reflection.enable_server_reflection(
            [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._grpc
        )
        self._catalog.start(self._storage_changed)
        await self._grpc.start()
        if self._config.text:
            await self._text.start(self._config.text)
        works = (
            self._delays.run,
            self._intake.watch,
            partial(self._connections.watch, port),
            partial(resources.collect_garbage, self._catalog.dropped),
            self._tell_suppressed,
            self._watch_files,
            self._clock.run,
        )
        self._tasks = [asyncio.create_task(lasting(work)) for work in works]
        if self._sets is not None:
            self._replicating = asyncio.create_task(self._sets.run())
            self._tasks.append(self._replicating)
        for task in self._tasks:
            task.add_done_callback(_told)
        if self._web is not None:
            await self._web.start()
        self._serving = True
        await self._health.serving()
        await self._storage_changed()
        if self._config.ready_file:
            _write_ready(self._config.ready_file, self.address)
        told = {"address": self.address, "version": __version__, "pid": os.getpid()}
        ports = (("http", self._web), ("text", self._text))
        told |= {name: port.address for name, port in ports if port is not None and port.address}
        log.info("serving", extra=told)
        _notify("READY=1")
        self._log_limit.on = True

    def _listen_for_the_owner(self) -> None:
        """Listen on a Unix socket in the data directory, where its owner may do everything."""
        path = os.path.abspath(self._config.data / ADMIN_SOCKET)
        size, why = len(os.fsencode(path)), "the system refuses it"
        before = os.umask(0o077)
        try:
            if size > SOCKET_PATH_MAX:
                why = f"its path is {size} bytes; must be at most {SOCKET_PATH_MAX}"
            elif "," in path:
                why = "its path has a comma, which gRPC takes for the end of an address"
            elif self._grpc.add_insecure_port(f"unix:{quote(path)}"):
                return
        except RuntimeError:
            pass
        finally:
            os.umask(before)
        log.warning("there is no admin socket", extra={"path": path, "reason": why})

    def _file_troubles(self) -> dict[str, UprError | None]:
        """Return what is wrong with the files that are read again, by file; None where nothing is."""
        found = {file: why for one in self._expiring for file, why in one.troubles.items()}
        watched = self._access.watched
        return found if watched is None else {**found, IDENTITIES: watched.problem}

    @property
    def _watched(self) -> list[Watched[Any]]:
        files = [one.watched for one in self._expiring]
        return files if self._access.watched is None else [*files, self._access.watched]

    async def _watch_files(self) -> None:
        """Read the certificate and the identities again when their files change; tell of a certificate's end."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for one in self._watched:
                if await one.look() and one is self._access.watched:
                    self._access.identities_changed()
            for certificates in self._expiring:
                certificates.tell()

    async def _tell_suppressed(self) -> None:
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self._log_limit.tell_suppressed()

    async def _storage_changed(self) -> None:
        """Report the health of the writing services, which serve until the storage of every bucket has failed, and of
        each bucket."""
        await self._health.tell(writes=not self._catalog.failed, buckets=self._catalog.fine)

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Run the intake's watching thread while the body runs."""
        return self._intake.guarded()

    async def stop(self) -> bool:
        """Drain, end every stream with a reason, flush, prove the clean shutdown; False if it is not one."""
        log.info("stopping")
        _notify("STOPPING=1")
        self._serving = False
        for task in self._tasks:
            task.cancel()
        if self._replicating is not None:
            # What it does at its end may wait for a disk that is full, which fails once the buckets are closed.
            await asyncio.wait([self._replicating], timeout=GRACE_SECONDS)
        await self._health.shut_down()
        self._changes.shut_down()
        self._writes.shut_down()
        await asyncio.gather(self._text.stop(), self._grpc.stop(GRACE_SECONDS))
        if self._sets is not None:
            await self._sets.end()
        clean = await self._catalog.close()
        if self._web is not None:
            await self._web.stop()
        self._clock.store()
        self._directory.close()
        self._log_limit.tell_suppressed()
        log.info("stopped", extra={"clean": clean})
        return clean

    async def abandon(self) -> None:
        """Release everything after a failed start."""
        for task in self._tasks:
            task.cancel()
        await self._text.stop()
        await self._grpc.stop(None)
        if self._web is not None:
            await self._web.stop()
        await self._catalog.close()
        self._directory.close()


def _told(task: asyncio.Task[None]) -> None:
    """Log the end of a task that should last as long as the server: its limits no longer hold."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.critical("a task of the server failed: restart it", exc_info=error)


def _write_ready(path: Path, address: str) -> None:
    """Create the file with its complete content in one step, so that a waiting program never reads a part."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(address + "\n")
    os.replace(temporary, path)


def _notify(state: str) -> None:
    """Tell systemd the state, where it waits for that (Type=notify)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(1.0)
        # An abstract socket begins with a null byte, which the environment cannot have.
        manager.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)


async def serve(config: ServerConfig, replicate: Replicate | None = None) -> int:
    """Run a server until SIGTERM, SIGINT or SIGHUP; ``replicate`` as in Server.

    Returns the exit status: 0 after a clean shutdown, 1 otherwise.

    Raises:
        ListenError, DataDirectoryError, DataDamagedError: see Server.
    """
    log_limit = logs.configure(config.log_format)
    resources.raise_descriptor_limit()
    resources.share_free_memory()
    resources.take_events_at_once()
    server = Server(config, log_limit, replicate)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # What nohup started stays when the terminal is closed.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    resources.tame_collector()
    try:
        await server.start()
    except BaseException:
        await server.abandon()
        raise
    with server.guarded():
        await stop.wait()
    return 0 if await server.stop() else 1


def _expiring(config: ServerConfig, tls: Certificates | None) -> list[Expiring[Any]]:
    """Return the files of a server that have certificates."""
    others = (
        (PEER_CA, "the other servers of the set", config.peer_ca),
        # Without a cluster nobody reads it.
        (CLUSTER_CA, "etcd", config.cluster_ca if config.cluster else None),
    )
    found: list[Expiring[Any]] = [
        authorities(file, whose, path) for file, whose, path in others if path is not None
    ]
    return found if tls is None else [*found, tls.expiring]
