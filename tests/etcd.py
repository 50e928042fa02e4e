"""A real etcd, for tests of clusters and the demo of one."""

import json
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import WAIT_SECONDS, ServerFailed, wait_until

NAME = "test"
"""Name of the cluster whose servers it keeps."""


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on; etcd cannot choose them by itself."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class RunningEtcd:
    """One etcd of some members, each a process of its own on this machine.

    Args:
        folder: an empty folder, for data and logs.
        members: 1 or 3.
        tls: with key.pem and chain.pem, which clients must show too; None for no encryption. Others count from the next
            start on.
    """

    def __init__(self, folder: Path, members: int = 1, tls: Path | None = None) -> None:
        self._folder = folder
        self._tls = tls
        clients, peers = _free_ports(members), _free_ports(members)
        self.endpoints = [f"127.0.0.1:{port}" for port in clients]
        self._peers = [f"http://127.0.0.1:{port}" for port in peers]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def processes(self) -> list["subprocess.Popen[bytes]"]:
        """Those of the members that run."""
        return list(self._processes.values())

    @property
    def cluster(self) -> str:
        """What servers are given as --cluster."""
        return f"etcd://{','.join(self.endpoints)}/{NAME}"

    def url(self, endpoint: str) -> str:
        """Return where a member listens."""
        return f"{'http' if self._tls is None else 'https'}://{endpoint}"

    def ask(self, path: str, data: bytes | None = None, number: int = 0) -> bytes:
        """Return what a member answers over HTTP.

        Raises:
            OSError: it cannot be reached, or refuses.
        """
        # It is on this machine, whatever proxy the environment names.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls / "chain.pem")
            context.load_cert_chain(self._tls / "chain.pem", self._tls / "key.pem")
            handlers.append(urllib.request.HTTPSHandler(context=context))
        url = f"{self.url(self.endpoints[number])}/{path}"
        opener = urllib.request.build_opener(*handlers)
        with opener.open(url, data, timeout=WAIT_SECONDS) as answer:
            return bytes(answer.read(4096))

    def _is_ready(self, number: int) -> bool:
        endpoint = self.endpoints[number]
        if (status := self._processes[number].poll()) is not None:
            raise ServerFailed(f"etcd at {endpoint} ended with status {status}")
        try:
            return b'"true"' in self.ask("health", number=number)
        except OSError:
            return False

    def start(self) -> None:
        """Start the members that do not run, and wait until they are ready.

        Raises:
            ServerFailed: one ended.
        """
        together = ",".join(f"m{n}={peer}" for n, peer in enumerate(self._peers))
        for n, endpoint in enumerate(self.endpoints):
            if n in self._processes:
                continue
            url, peer = self.url(endpoint), self._peers[n]
            command = ["etcd", "--name", f"m{n}", "--data-dir", str(self._folder / f"m{n}")]
            command += ["--listen-client-urls", url, "--advertise-client-urls", url]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", together, "--log-level", "error"]
            if self._tls is not None:
                chain = str(self._tls / "chain.pem")
                command += ["--cert-file", chain, "--key-file", str(self._tls / "key.pem")]
                command += ["--trusted-ca-file", chain, "--client-cert-auth"]
            # What is synced is not tested here, and disks of test machines are slow.
            command += ["--heartbeat-interval", "100", "--election-timeout", "1000"]
            with (self._folder / f"m{n}.log").open("ab") as log:
                self._processes[n] = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True
                )
        for n, endpoint in enumerate(self.endpoints):
            wait_until(lambda n=n: self._is_ready(n), f"in vain for etcd at {endpoint}")  # type: ignore[misc]

    def _leader(self) -> int:
        """Return which member leads the others."""
        for n in self._processes:
            told = json.loads(self.ask("v3/maintenance/status", b"{}", number=n))
            if told["leader"] == told["header"]["member_id"]:
                return n
        raise ServerFailed("no member of etcd leads")

    def kill(self, *, leader: bool = False) -> None:
        """SIGKILL all members, or the one that leads the others."""
        for n in [self._leader()] if leader else list(self._processes):
            process = self._processes.pop(n)
            process.kill()
            process.wait(WAIT_SECONDS)


@contextmanager
def running_etcd(folder: Path, members: int = 1, tls: Path | None = None) -> Iterator[RunningEtcd]:
    """Give an etcd that runs; none is left after the body."""
    folder.mkdir(parents=True, exist_ok=True)
    etcd = RunningEtcd(folder, members, tls)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()
