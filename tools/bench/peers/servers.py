"""Servers to measure, each with an empty directory, on a free port of 127.0.0.1."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.harness import RunningServer
from tools.bench.peers.stores import (
    Etcd,
    Nats,
    Postgres,
    RabbitQueue,
    RabbitStream,
    Redis,
    Store,
    Upr,
)

START_SECONDS: Final = 30.0
_PORT: Final = "%PORT%"
_FOLDER: Final = "%FOLDER%"
_NODES_PORT: Final = "%NODES_PORT%"
"""Where other servers of the kind would call."""
_NAMES_PORT: Final = "%NAMES_PORT%"
"""Where Erlang knows its nodes by their names."""
MANY: Final = "drain by many"
GET: Final = "get"
"""What a store may lack."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What can be measured.

    Attributes:
        store: makes a connection to an address.
        durability: when a write is acknowledged.
        fsynced: whether that is after it is on the disk.
        command: that serves, without the place of the program; empty for this server.
        package: of Debian, which has the program.
        environment: of the server, instead of this process's.
        beside: command of what the server needs before it starts, which listens on ``_NAMES_PORT``.
        lacks: what cannot be measured, and why.
    """

    store: Callable[[str], Store]
    durability: str
    fsynced: bool
    command: tuple[str, ...] = ()
    package: str = ""
    environment: Mapping[str, str] | None = None
    beside: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)


_REDIS = (
    *("redis-server", "--bind", "127.0.0.1", "--port", _PORT, "--dir", _FOLDER, "--save", ""),
    *("--appendonly", "yes", "--appendfsync"),
)


def _rabbitmq(
    store: Callable[[str], Store],
    durability: str,
    fsynced: bool,
    arguments: str,
    lacks: Mapping[str, str],
    plugins: str = "",
) -> Kind:
    """Return RabbitMQ with one listener, and with nothing outside its folder."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": _FOLDER,
        # Erlang itself is the process, and not the child of a shell.
        "RUNNING_UNDER_SYSTEMD": "1",
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_DIST_PORT": _NODES_PORT,
        "ERL_EPMD_PORT": _NAMES_PORT,
        "RABBITMQ_MNESIA_BASE": _FOLDER,
        "RABBITMQ_LOG_BASE": _FOLDER,
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_CONFIG_FILE": f"{_FOLDER}/none",
        "RABBITMQ_CONF_ENV_FILE": f"{_FOLDER}/none",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{_FOLDER}/plugins",
        "RABBITMQ_ENABLED_PLUGINS": plugins,
        # Ctrl-C would have it ask what to do.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+B i -kernel inet_dist_use_interface {127,0,0,1} "
        + arguments,
    }
    return Kind(
        store,
        durability,
        fsynced,
        ("rabbitmq-server",),
        "rabbitmq-server",
        environment,
        ("epmd", "-port", _NAMES_PORT, "-address", "127.0.0.1"),
        lacks,
    )


KINDS: Final = {
    "upr": Kind(Upr, "fsync before each answer", True),
    "redis": Kind(Redis, "appendfsync everysec", False, (*_REDIS, "everysec"), "redis-server"),
    "redis-always": Kind(Redis, "appendfsync always", True, (*_REDIS, "always"), "redis-server"),
    "postgres": Kind(
        Postgres,
        "synchronous_commit on",
        True,
        # max_connections: eight consumers with a pool each.
        (
            *("postgres", "-D", _FOLDER, "-p", _PORT, "-k", _FOLDER),
            *("-c", "max_connections=300", "-c", "wal_level=logical"),
        ),
        "postgresql",
    ),
    "nats": Kind(
        Nats,
        "sync_interval of two minutes",
        False,
        ("nats-server", "-js", "-a", "127.0.0.1", "-p", _PORT, "-sd", _FOLDER),
        "nats-server",
    ),
    "rabbitmq": _rabbitmq(
        RabbitStream,
        "a stream's confirm, without fsync",
        False,
        f'-rabbit tcp_listeners [] -rabbitmq_stream tcp_listeners [{{"127.0.0.1",{_PORT}}}] '
        f'-rabbitmq_stream advertised_host "127.0.0.1" -rabbitmq_stream advertised_port {_PORT}',
        {GET: "a stream has no keys"},
        "rabbitmq_stream",
    ),
    "rabbitmq-quorum": _rabbitmq(
        RabbitQueue,
        "a quorum queue's confirm, after fsync",
        True,
        f'-rabbit tcp_listeners [{{"127.0.0.1",{_PORT}}}]',
        {GET: "a queue has no keys", MANY: "a queue gives each change to one consumer"},
    ),
    "etcd": Kind(
        Etcd,
        "fsync before each answer",
        True,
        (
            *("etcd", "--data-dir", f"{_FOLDER}/data", "--log-level", "error"),
            *("--listen-client-urls", f"http://127.0.0.1:{_PORT}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{_PORT}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{_NODES_PORT}"),
        ),
        "etcd-server",
    ),
}
"""The first is this server."""


class MissingServerError(Exception):
    """A program is not installed; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class Running:
    """Server that takes calls at ``address``; ``pid`` is its first process."""

    address: str
    pid: int


def program(name: str, package: str) -> str:
    """Return the path of a program of a peer; MissingServerError when it is not installed."""
    # Debian keeps PostgreSQL's outside the search path, by version; and RabbitMQ's, beside one that changes the user.
    places = sorted(Path("/usr/lib").glob(f"postgresql/*/bin/{name}"))
    places += Path("/usr/lib/rabbitmq/bin").glob(name)
    found = str(places[-1]) if places else shutil.which(name)
    if found is None:
        raise MissingServerError(f"{name} is not installed; apt-get install {package}")
    return found


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(name: str) -> Iterator[Running]:
    """Run one of KINDS, with its stream of changes made.

    Raises:
        MissingServerError: its program is not installed.
        subprocess.CalledProcessError: it could not be prepared.
    """
    with tempfile.TemporaryDirectory(prefix=f"upr-bench-{name}-") as folder:
        if not KINDS[name].command:
            server = RunningServer(Path(folder)).start(prefix=["env"])
            try:
                yield Running(server.target, server.pid)
            finally:
                server.close()
            return
        with _running_peer(KINDS[name], Path(folder)) as peer:
            yield peer


@contextmanager
def _running_peer(kind: Kind, folder: Path) -> Iterator[Running]:
    name = kind.command[0]
    found = program(name, kind.package)
    as_user: list[str] = []
    if name == "postgres":
        if os.getuid() == 0:
            # It refuses to run as root, and Debian's package makes this user. Python would fork to change it, which a
            # process that uses gRPC may not survive.
            as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
            shutil.chown(folder, "postgres")
        prepare = [program("initdb", kind.package), "-A", "trust", "-U", "postgres", str(folder)]
        subprocess.run([*as_user, *prepare], check=True, stdout=subprocess.DEVNULL)
    values = {name: str(free_port()) for name in (_PORT, _NAMES_PORT, _NODES_PORT)}
    values[_FOLDER] = str(folder)

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    environment = kind.environment and {k: filled(v) for k, v in kind.environment.items()}
    with ExitStack() as stack, (folder / "bench.log").open("wb") as log:

        def start(command: list[str], port: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [*as_user, *command], env=environment, stdout=log, stderr=log
            )
            stack.callback(_stop, process)
            _wait_until_open(process, int(port), folder / "bench.log")
            return process

        if kind.beside:
            start([filled(part) for part in kind.beside], values[_NAMES_PORT])
        process = start([found, *map(filled, kind.command[1:])], values[_PORT])
        address = f"127.0.0.1:{values[_PORT]}"
        asyncio.run(_create(kind.store(address)))
        yield Running(address, process.pid)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        # Or it would be busy beside the next one.
        process.kill()
        process.wait()


async def _create(store: Store) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            await store.open()
            break
        except Exception:
            # The port is open before the server takes calls.
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
    await store.create()
    await store.close()


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise MissingServerError(f"the server did not start: {log.read_text()}") from None
            time.sleep(0.02)
