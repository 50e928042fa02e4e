"""A real server process for tests."""

import asyncio
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import lmdb

WAIT_SECONDS = 90.0
"""For what comes in an instant on an idle machine: a wait that ends is a failure, on a busy one as well."""
STAMPS = "UPR_TEST_STAMPS"
"""Environment variable of a forked server: the file for its stamps, see ``tests/cluster/stamps.py``."""
_POLL_SECONDS = 0.01
_PORT_IS_USED = "cannot be listened on: the port is in use"
_PAUSE_SECONDS = 0.2
_T = TypeVar("_T")

# What a server imports takes it several times as long as all else at its start. So it is imported once, in a process
# of its own that is no server, and each server is a fork of that.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "encodings.idna",
        "lmdb._envid",
        "numpy.ma",
        "tests.harness",
        "upr.cli.server",
        "upr.cluster.etcd",
        "upr.cluster.keeper",
        "upr.replica.replica_service",
        "upr.service.server",
        "upr.service.sight.feed",
        "uvloop",
        "zstandard",
    ]
)


def skip_syncs(put: Callable[[object, str, object], None] = setattr) -> None:
    """Have this process sync nothing: tests end processes and not machines, so what the system was given stays."""
    put(lmdb, "open", functools.partial(lmdb.open, sync=False))
    put(os, "fsync", lambda _: None)
    put(os, "O_DSYNC", 0)


def pause(began: float) -> float:
    """Return how long to wait after a look that began then: twice its time, as what is waited for needs the processor."""
    return min(max(_POLL_SECONDS, 2 * (time.monotonic() - began)), _PAUSE_SECONDS)


def wait_until(
    holds: Callable[[], object],
    what: Callable[[], object] | str,
    seconds: float = WAIT_SECONDS,
) -> None:
    """Wait until something is so; after that many seconds an AssertionError with ``what`` was waited for."""
    began = time.monotonic()
    deadline = began + seconds
    while not holds():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(pause(began))
        began = time.monotonic()


async def poll(ask: Callable[[], Awaitable[_T]], enough: Callable[[_T], object] = bool) -> _T:
    """Ask until an answer is enough, and return it.

    Raises:
        TimeoutError: none was within WAIT_SECONDS.
    """
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            began = time.monotonic()
            if enough(answer := await ask()):
                return answer
            await asyncio.sleep(pause(began))


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so that takes no asking."""

    async def asked() -> object:
        return is_so()

    await poll(asked)


async def pass_turns(count: int = 1000) -> None:
    """Give others turns of the event loop: more than anything needs that waits for no thread."""
    for _ in range(count):
        await asyncio.sleep(0)


class ServerFailed(Exception):
    """The server ended, or was not ready in time."""


def _serve(
    log: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    constants: Mapping[str, float],
    syncs: bool,
) -> None:
    """Do what ``python -m upr.cli`` does with these arguments, in a process that was forked for it."""
    # A Ctrl-C at the terminal is for pytest, which then stops the server itself.
    os.setsid()
    # nohup may have started pytest.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["upr.cli", *arguments]
    from upr import failpoints
    from upr.cli.__main__ import main

    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(importlib.import_module(module), constant, value)
    if not syncs:
        skip_syncs()
    # The server's first collection need not look through all that was imported, and copy its pages.
    gc.freeze()
    # They were read when the module was imported.
    failpoints.arm(os.environ.get("UPR_FAILPOINTS", ""))
    if path := os.environ.get(STAMPS):
        from tests.cluster.stamps import stamp_answers

        stamp_answers(path)
    main()


class _Forked:
    """A forked server, with as much of Popen as is needed."""

    def __init__(self, log: Path, *arguments: Any) -> None:
        self._process = _FORKS.Process(target=_serve, args=(log, *arguments), daemon=True)
        # What is forked is made at the first start. gRPC reads this when it is imported; the command sets it before.
        with mock.patch.dict(os.environ, GRPC_VERBOSITY="NONE"):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("upr.cli", seconds)
        return self._process.exitcode


class RunningServer:
    """One server process after the other on one data directory.

    Each of them but the first listens where the first did, so that clients find it again.

    Args:
        folder: an empty folder; gets the data directory, the ready file and the log.
        options: further options of the command.
        environment: added to the process's environment, for failpoints.
        constants: other values for constants of the server's modules, such as a time that a test would wait for, each
            by the name of the module that uses it and its own.
        syncs: whether it syncs what it writes, as the command does; without, a test waits for no disk.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
        syncs: bool = False,
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "server.log"
        self.environment = dict(environment or {})
        self.constants = dict(constants or {})
        self.syncs = syncs
        self.options = list(options)
        self.target = "127.0.0.1:0"
        self._ready = folder / "ready"
        self._process: subprocess.Popen[bytes] | _Forked | None = None

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def start(
        self, *, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> "RunningServer":
        """Start the server and wait until it says that it is ready.

        Args:
            environment: for this start only, added to what the object was made with.
            prefix: a command that starts it, such as ``prlimit`` or ``env``; without one it is a fork, which is
                there sooner.

        Raises:
            ServerFailed: it ended, or was not ready in time; with its log.
        """
        assert not self.running
        launched = len(self.log_text())
        self.launch(environment=environment, prefix=prefix)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (self._ready.exists() and self._ready.read_text().endswith("\n")):
            if not self.running:
                said = self.log_text()[launched:]
                if _PORT_IS_USED not in said or time.monotonic() > deadline:
                    raise ServerFailed(f"the server ended:\n{self.log_text()}")
                # While the server was down its port became that of somebody's connection, which ends.
                launched += len(said)
                self.launch(environment=environment, prefix=prefix)
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server was not ready in time:\n{self.log_text()}")
            time.sleep(_POLL_SECONDS)
        self.target = self._ready.read_text().strip()
        return self

    def launch(
        self, *, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """Start the server without waiting, for one that is expected to end by itself."""
        self._ready.unlink(missing_ok=True)
        arguments = ["server", "--data", str(self.data), "--listen", self.target]
        arguments += ["--ready-file", str(self._ready), *self.options]
        # Tests drop buckets and forget consumers as they like; those of access take this away.
        variables = {"UPR_SERVER_OPEN_ADMIN": "1", **os.environ}
        variables |= {**self.environment, **(environment or {})}
        if not prefix:
            self._process = _Forked(self.log, arguments, variables, self.constants, self.syncs)
            return
        assert not self.constants, "only a fork has other constants"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "upr.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(WAIT_SECONDS)

    def terminate(self) -> int:
        """SIGTERM, and wait for the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; returns the exit status, negative for a signal."""
        assert self._process is not None
        try:
            return self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server did not end in time:\n{self.log_text()}") from None

    def log_text(self) -> str:
        """What all processes so far wrote on stdout and stderr."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """Leave no process behind."""
        if self.running:
            self.kill()
