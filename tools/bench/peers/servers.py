"""Servers to measure, each with an empty directory, on a free port of 127.0.0.1."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness import RunningServer
from tools.bench.peers.stores import Nats, Postgres, Redis, Store, Upr

START_SECONDS: Final = 30.0
_PORT: Final = "PORT"
_FOLDER: Final = "FOLDER"


@dataclass(frozen=True, slots=True)
class Kind:
    """What can be measured.

    Attributes:
        store: makes a connection to an address.
        durability: when a write is acknowledged.
        fsynced: whether that is after it is on the disk.
        command: that serves, without the place of the program; empty for this server.
        package: of Debian, which has the program.
    """

    store: Callable[[str], Store]
    durability: str
    fsynced: bool
    command: tuple[str, ...] = ()
    package: str = ""


_REDIS = (
    *("redis-server", "--bind", "127.0.0.1", "--port", _PORT, "--dir", _FOLDER, "--save", ""),
    *("--appendonly", "yes", "--appendfsync"),
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
}
"""The first is this server. RabbitMQ and etcd are not here: their Python clients are not of this shape."""


class MissingServerError(Exception):
    """A program is not installed; the text says how to get it."""


@dataclass(frozen=True, slots=True)
class Running:
    """Server that takes calls at ``address``; ``pid`` is its first process."""

    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return what its processes have used so far, those that ended included."""
        parents: dict[int, list[int]] = {}
        used: dict[int, float] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                # The name, in brackets, may hold blanks.
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            pid = int(entry.parent.name)
            parents.setdefault(int(fields[1]), []).append(pid)
            used[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        total, left = 0.0, [self.pid]
        while left:
            pid = left.pop()
            total += used.get(pid, 0.0)
            left += parents.get(pid, [])
        return total


def program(name: str, package: str) -> str:
    """Return the path of a program of a peer.

    Raises:
        MissingServerError: it is not installed.
    """
    # Debian keeps PostgreSQL's outside the search path, by version.
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(places[-1]) if places else None)
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
    port, name = str(free_port()), kind.command[0]
    found = program(name, kind.package)
    user = None
    if name == "postgres":
        # It refuses to run as root, and Debian's package makes this user.
        user = "postgres" if os.getuid() == 0 else None
        if user:
            shutil.chown(folder, user)
        prepare = [program("initdb", kind.package), "-A", "trust", "-U", "postgres", str(folder)]
        subprocess.run(prepare, user=user, check=True, stdout=subprocess.DEVNULL)
    values = {_PORT: port, _FOLDER: str(folder)}
    command = [found, *(values.get(part, part) for part in kind.command[1:])]
    with (folder / "bench.log").open("wb") as log:
        process = subprocess.Popen(command, user=user, stdout=log, stderr=log)
    try:
        _wait_until_open(process, int(port), folder / "bench.log")
        address = f"127.0.0.1:{port}"
        asyncio.run(_create(kind.store(address)))
        yield Running(address, process.pid)
    finally:
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
