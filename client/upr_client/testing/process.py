"""A real server in a process of its own, for tests."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from upr_protocol.errors import UprError

READY_SECONDS: Final = 30.0
"""So long a server may take until it is ready."""
STOP_SECONDS: Final = 30.0
"""So long a server may take to stop."""
_POLL_SECONDS: Final = 0.01
_LOG_CHARACTERS: Final = 4000
_CHILD: Final = Path(__file__).with_name("child.py")


class ServerProcessError(UprError):
    """The server process could not be started, was not ready or did not stop in time, or ended by itself."""

    default_reason = "SERVER_PROCESS"


class ServerProcess:
    """One server process after the other on one data directory; used with ``with``.

    It listens on a free port of 127.0.0.1, and after each restart on the same one, so that clients find it again.
    It ends with the process that made it, however that ends. Any number may run side by side. All methods block;
    beside asyncio call them through ``asyncio.to_thread``.

    Args:
        directory: the data directory, made when it is not there; it stays. None: a temporary one, removed at the end.
        options: further options of ``upr-server``, as on a command line.
        environment: added to the variables of this process.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = None if directory is None else Path(directory).absolute()
        self._options = list(options)
        self._environment = dict(environment or {})
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._paused = False
        self._target = ""

    # Queries.

    @property
    def target(self) -> str:
        """Return its address, "host:port", for ``Client`` and ``AsyncClient``; empty before the first start."""
        return self._target

    @property
    def directory(self) -> Path:
        """The data directory.

        Raises:
            ServerProcessError: it is temporary, and the server was never started or was closed.
        """
        return self._directory or self._private() / "data"

    @property
    def pid(self) -> int:
        """The number of the newest process.

        Raises:
            ServerProcessError: there was none.
        """
        return self._newest().pid

    @property
    def running(self) -> bool:
        """Return whether the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """Return the output of all processes so far, stdout and stderr; empty once the server was closed."""
        log = None if self._folder is None else self._private() / "server.log"
        return log.read_text(errors="replace") if log is not None and log.exists() else ""

    # Actions.

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start the server, and wait until it takes calls; nothing when it runs.

        Raises:
            ServerProcessError: the server is not installed, ended, or was not ready in time; with what it wrote.
        """
        if self.running:
            return self
        if importlib.util.find_spec("upr") is None:
            raise ServerProcessError(
                "the server is not installed here", hint="pip install 'upr-stream[server]'"
            )
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="upr-server-")
        ready = self._private() / "ready"
        ready.unlink(missing_ok=True)
        self._launch(ready)
        deadline = time.monotonic() + READY_SECONDS
        while not ready.exists():
            if not self.running:
                raise self._failed(f"the server ended with status {self._newest().returncode}")
            if time.monotonic() > deadline:
                self.kill()
                raise self._failed(f"the server was not ready within {READY_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        self._target = ready.read_text().strip()
        return self

    def stop(self) -> None:
        """Stop the server cleanly (SIGTERM), and wait; nothing when it does not run.

        Raises:
            ServerProcessError: it did not stop in time and was killed, or said that it did not stop cleanly.
        """
        if not self.running:
            return
        self.resume()
        process = self._newest()
        process.terminate()
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._failed(f"the server did not stop within {STOP_SECONDS:.0f} s") from None
        self._drop_pipe()
        if status:
            raise self._failed(f"the server stopped with status {status}")

    def kill(self) -> None:
        """Kill the server (SIGKILL), paused or not, and wait; nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._paused = False
        self._drop_pipe()

    def restart(self, clean: bool = True) -> None:
        """Stop the server, or with ``clean=False`` kill it, and start it again at the same address.

        After a kill each partition's history goes on under a new failover id; what was durable is still there.

        Raises:
            ServerProcessError: see ``stop`` and ``start``.
        """
        if clean:
            self.stop()
        else:
            self.kill()
        self.start()

    def pause(self) -> None:
        """Stop the process (SIGSTOP), and wait until it is stopped: its calls stay open and silent.

        Raises:
            ServerProcessError: it does not run.
        """
        if not self.running:
            raise ServerProcessError("the server does not run", hint="start it first")
        process = self._newest()
        process.send_signal(signal.SIGSTOP)
        self._paused = True
        # Whatever it is, it stays to be asked for: how it ended is for Popen.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue a paused process (SIGCONT); do nothing if it is not paused."""
        if self._paused and self.running:
            self._newest().send_signal(signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        """Leave no process and no temporary directory behind. A directory of your own is left after a clean stop.

        Doing it twice is harmless.

        Raises:
            ServerProcessError: see ``stop``.
        """
        try:
            if self._directory is not None:
                self.stop()
        finally:
            self.kill()
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.cleanup()

    # How.

    def _launch(self, ready: Path) -> None:
        command = [sys.executable, "-P", str(_CHILD)]
        options = ["server", "--data", str(self.directory)]
        options += ["--listen", self._target or "127.0.0.1:0", "--ready-file", str(ready)]
        # Its data is for tests, which drop buckets and forget consumers.
        open_admin = {"UPR_SERVER_OPEN_ADMIN": "1"}
        pipe, self._pipe = os.pipe()
        try:
            with (self._private() / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, str(pipe), *options, *self._options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        **open_admin,
                        **os.environ,
                        "PYTHONPATH": _python_path(),
                        **self._environment,
                    },
                    pass_fds=[pipe],
                    # A Ctrl-C at the terminal is for this process, which then ends the server. No session of its
                    # own: so the kernel wakes up and ends a paused one, too, when this process is killed.
                    process_group=0,
                )
        except BaseException:
            self._drop_pipe()
            raise
        finally:
            os.close(pipe)

    def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)

    def _newest(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerProcessError(
                "the server was never started", hint="use it in a with statement"
            )
        return self._process

    def _private(self) -> Path:
        if self._folder is None:
            raise ServerProcessError("the server does not run", hint="use it in a with statement")
        return Path(self._folder.name)

    def _failed(self, what: str) -> ServerProcessError:
        log = self.log_text().strip()
        self._drop_pipe()
        return ServerProcessError(f"{what}; it wrote:\n{log[-_LOG_CHARACTERS:] or '(nothing)'}")


def _python_path() -> str:
    """Return the PYTHONPATH with which the child finds the same packages as this process."""
    folders = []
    for package in ("upr", "upr_protocol"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            folders.append(str(Path(folder).absolute().parent))
    folders += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(folders))
