"""Start and stop of a server."""

import asyncio
import ipaddress
import logging
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from upr import __version__
from upr.config import ServerConfig
from upr.service import logs
from upr.service.admin import AdminMethods
from upr.service.catalog import Catalog
from upr.service.follow import ChangeStreamMethods
from upr.service.memory import share_free_memory
from upr.service.status import Process
from upr.service.writes import KeyValueMethods
from upr.storage.directory import DataDirectory
from upr_protocol.errors import ListenError
from upr_protocol.wire.channel import SERVER_OPTIONS
from upr_protocol.wire.v1 import (
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
)

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
_SERVED = (
    (admin_service_pb2, "AdminService"),
    (change_stream_service_pb2, "ChangeStreamService"),
    (key_value_service_pb2, "KeyValueService"),
)
_SERVICES = [module.DESCRIPTOR.services_by_name[name].full_name for module, name in _SERVED]


def check_listen(address: str, *, insecure: bool) -> None:
    """Raise ListenError unless the address is HOST:PORT, and loopback or allowed to be insecure."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"{address!r} is not HOST:PORT", hint="for example 127.0.0.1:7711")
    bare = host.strip("[]")
    try:
        loopback = bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not insecure:
        raise ListenError(
            f"{address} is not a loopback address and there is no TLS yet",
            hint="give --insecure to listen there without encryption or authentication",
        )


def _encode(message: Any) -> bytes:
    encoded: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return encoded


def _handlers(descriptor: Any, service: str, methods: Any) -> grpc.GenericRpcHandler:
    """Register a service by its descriptor.

    The generated registration would refuse frames, which are handed to the transport as bytes that are encoded
    already.
    """
    found = descriptor.services_by_name[service]
    handlers = {}
    for method in found.methods:
        request = GetMessageClass(method.input_type)
        kind = (
            grpc.stream_stream_rpc_method_handler
            if method.client_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = kind(getattr(methods, method.name), request.FromString, _encode)
    return grpc.method_handlers_generic_handler(found.full_name, handlers)


class Server:
    """A running server.

    Args:
        config: its settings.

    Raises:
        ListenError: the address cannot be listened on.
        DataDirectoryError, DataDamagedError: the data directory cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        check_listen(config.listen, insecure=config.insecure)
        self._directory = DataDirectory(config.data)
        try:
            self._catalog = Catalog(self._directory, config)
        except BaseException:
            self._directory.close()
            raise
        server_id = 1 + secrets.randbelow(2**64 - 1)
        self._changes = ChangeStreamMethods(self._catalog, server_id, config.heartbeat_seconds)
        self._writes = KeyValueMethods(self._catalog)
        process = Process(
            server_id, lambda: self._changes.open_calls, lambda: self._writes.open_calls
        )
        self._admin = AdminMethods(self._catalog, process)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(options=SERVER_OPTIONS)
        self.address = ""

    async def start(self) -> None:
        """Listen and serve."""
        host = self._config.listen.rpartition(":")[0]
        try:
            port = self._grpc.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ListenError(
                f"{self._config.listen} cannot be listened on: the port is in use, or the address is not this host's",
                hint="give --listen another port; port 0 takes a free one",
            ) from error
        self.address = f"{host}:{port}"
        served = (self._admin, self._changes, self._writes)
        self._grpc.add_generic_rpc_handlers(
            tuple(
                _handlers(module.DESCRIPTOR, name, methods)
                for (module, name), methods in zip(_SERVED, served, strict=True)
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection(
            [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._grpc
        )
        self._catalog.start(self._storage_changed)
        await self._grpc.start()
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        if self._config.ready_file:
            _write_ready(self._config.ready_file, self.address)
        log.info(
            "serving", extra={"address": self.address, "version": __version__, "pid": os.getpid()}
        )

    async def _storage_changed(self) -> None:
        """Say whether writes are taken: while one bucket's storage works, they are; the status has the others."""
        answers = health_pb2.HealthCheckResponse
        status = answers.NOT_SERVING if self._catalog.failed else answers.SERVING
        for name in ("", _SERVICES[2]):
            await self._health.set(name, status)

    async def stop(self) -> bool:
        """Drain, end every stream with a reason, flush, prove the clean shutdown; False if it is not one."""
        log.info("stopping")
        await self._health.enter_graceful_shutdown()
        self._changes.shut_down()
        self._writes.shut_down()
        await self._grpc.stop(GRACE_SECONDS)
        clean = await self._catalog.close()
        self._directory.close()
        log.info("stopped", extra={"clean": clean})
        return clean

    async def abandon(self) -> None:
        """Give everything back after a start that failed."""
        await self._grpc.stop(None)
        await self._catalog.close()
        self._directory.close()


def _write_ready(path: Path, address: str) -> None:
    """Make the file appear with its whole content, so that who waits for it never reads half of it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(address + "\n")
    os.replace(temporary, path)


async def serve(config: ServerConfig) -> int:
    """Run a server until SIGTERM or SIGINT.

    Returns the exit status: 0 after a clean shutdown, 1 otherwise.

    Raises:
        ListenError, DataDirectoryError, DataDamagedError: see Server.
    """
    logs.configure(config.log_format)
    share_free_memory()
    server = Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await server.start()
    except BaseException:
        await server.abandon()
        raise
    await stop.wait()
    return 0 if await server.stop() else 1
