"""The real server of the testing kit, the scripted one judged by it, and the fixtures."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_until
from tests.proxy import Proxy
from upr_client import Change, Client, Marker, MemoryPositions, Only, Rollback, Tuning
from upr_client.errors import UnavailableError, UnknownOutcomeError
from upr_client.lowlevel import hello
from upr_client.testing import ScriptedServer, ServerProcess, ServerProcessError, keys_in, process

GUIDE = Path(__file__).resolve().parents[2] / "client" / "README.md"


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


def gone(pid: int) -> bool:
    """Whether a process is not there, or is only waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def read(target: str) -> dict[bytes, bytes | None]:
    with Client(target) as client, client.bucket().changes(until="now") as changes:
        return {event.key: event.value for event in changes if isinstance(event, Change)}


# The real server.


def test_restarts_keep_address_and_data() -> None:
    server = ServerProcess(options=["--flush-seconds", "5"])
    assert not server.running
    with server:
        target, first, folder = server.target, server.pid, server.directory
        with Client(target) as client:
            bucket = client.bucket()
            bucket.set(b"a", b"1")
            logs = client.admin.failover_logs(bucket)
            server.restart()
            assert server.target == target
            assert server.pid != first
            bucket.set(b"b", b"2")
            assert client.admin.failover_logs(bucket) == logs
            server.restart(clean=False)
            assert all(len(log) == 2 for log in client.admin.failover_logs(bucket).values())
            assert read(target) == {b"a": b"1", b"b": b"2"}
        assert server.log_text().count('"serving"') == 3
        assert server.start() is server
    assert gone(server.pid)
    assert not folder.parent.exists()
    server.close()
    with pytest.raises(ServerProcessError):
        _ = server.directory


def test_a_directory_of_your_own_stays(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data) as server, Client(server.target) as client:
        assert server.directory == data
        client.bucket().set(b"a", b"1")
        logs = client.admin.failover_logs("default")
    with ServerProcess(data) as server, Client(server.target) as client:
        assert read(server.target) == {b"a": b"1"}
        # It was stopped cleanly.
        assert client.admin.failover_logs("default") == logs


def test_pause_and_resume(shared: ServerProcess) -> None:
    with Client(shared.target) as client, Client(shared.target, request_timeout=0.3) as hasty:
        shared.pause()
        with pytest.raises(UnavailableError):
            hasty.admin.partitions("default", [0])
        shared.resume()
        assert client.admin.partitions("default", [0])
        shared.resume()
    shared.pause()
    shared.restart()
    assert shared.running


def test_a_write_to_a_server_that_stands_still_ends_with_its_time(shared: ServerProcess) -> None:
    """Not only when gRPC finds its connection dead, a minute later."""
    with Client(shared.target, connect_timeout=3, retry_seconds=2) as client:
        bucket = client.bucket()
        bucket.set(b"a", b"1")
        shared.pause()
        try:
            with pytest.raises(UnknownOutcomeError, match="says nothing"):
                bucket.set(b"b", b"1")
        finally:
            shared.resume()
        bucket.set(b"c", b"1")
        assert bucket.get_many([b"a", b"c"]) == {b"a": b"1", b"c": b"1"}


def test_a_large_write_over_a_slow_link_is_waited_for(shared: ServerProcess) -> None:
    """Nothing else gets through behind it, and the server is well all the same."""
    value = os.urandom(5_000_000)
    with (
        Proxy(shared.target) as proxy,
        Client(proxy.target, connect_timeout=2, retry_seconds=1) as client,
    ):
        bucket = client.bucket()
        bucket.set(b"a", b"1")
        proxy.limit(500_000)
        bucket.set(b"large", value)
    with Client(shared.target) as client:
        assert client.bucket().get(b"large") == value


@pytest.mark.long
def test_a_large_value_over_a_slow_link_is_waited_for(shared: ServerProcess) -> None:
    """No heartbeat gets through before it, at either side, and the server is well all the same."""
    value = os.urandom(1_500_000)
    said: list[str] = []
    with Client(shared.target) as client:
        client.bucket().set(b"large", value)
    with Proxy(shared.target) as proxy, Client(proxy.target) as client:
        proxy.limit(300_000)
        patience = Tuning(heartbeat_seconds=1, retry_seconds=0)
        with client.bucket().changes(
            until="now", tuning=patience, on_status=said.append
        ) as changes:
            values = [event.value for event in changes if isinstance(event, Change)]
    assert value in values
    assert said == []


def test_several_side_by_side(shared: ServerProcess) -> None:
    servers = [ServerProcess() for _ in range(2)]
    threads = [threading.Thread(target=server.start) for server in servers]
    with ExitStack() as stack:
        for server, thread in zip(servers, threads, strict=True):
            stack.callback(server.close)
            thread.start()
        for thread in threads:
            thread.join()
        # Those that were started in threads outlive their threads.
        for number, server in enumerate(servers):
            with Client(server.target) as client:
                client.bucket().set(b"k", b"%d" % number)
        assert [read(server.target)[b"k"] for server in servers] == [b"0", b"1"]
        assert len({shared.target, *(server.target for server in servers)}) == 3


def test_a_server_that_does_not_come_up_is_an_error_with_its_words() -> None:
    server = ServerProcess(options=["--tail-bytes", "0"])
    with pytest.raises(
        ServerProcessError, match=r"'--tail-bytes'.*must be a size of 1B to"
    ) as caught:
        server.start()
    assert "ended with status" in caught.value.message
    with pytest.raises(ServerProcessError), server:
        pass
    server.close()


def test_a_server_that_is_not_ready_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "READY_SECONDS", 0.0)
    server = ServerProcess()
    with pytest.raises(ServerProcessError, match="not ready within 0 s"):
        server.start()
    assert not server.running
    server.close()


def test_a_server_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerProcessError, match="not installed") as caught:
        ServerProcess().start()
    assert "upr-stream[server]" in caught.value.hint


def test_what_was_never_started() -> None:
    server = ServerProcess()
    with pytest.raises(ServerProcessError):
        server.pause()
    with pytest.raises(ServerProcessError):
        _ = server.pid
    server.stop()
    server.kill()
    assert server.target == server.log_text() == ""
    server.close()


ORPHAN = """
import json, sys, threading
from upr_client.testing import ServerProcess
servers = [ServerProcess(), ServerProcess()]
for server in servers:
    server.start()
servers[1].pause()
print(json.dumps([server.pid for server in servers]), flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for processes")
def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        try:
            assert not any(gone(pid) for pid in pids)
            parent.kill()
            parent.wait()
            wait_until(lambda: all(gone(pid) for pid in pids), "the end of the servers")
        finally:
            parent.kill()
            for pid in pids:
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


# The scripted server does as the real one.


class World:
    """One server, and one follower that goes away and comes back."""

    def __init__(self, server: ServerProcess | ScriptedServer) -> None:
        self.server = server
        self.positions = MemoryPositions()
        self.held: dict[bytes, bytes] = {}
        self.log: list[Any] = []
        self.stack = ExitStack()
        self.client = self.stack.enter_context(Client(server.target))
        self.bucket = self.client.bucket()

    def write(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        results = self.bucket.write_many(rows)
        self.log.append(("written", sorted(run[:3] for run in results.runs)))

    def follow(self, partitions: list[int], count: int | None = None) -> None:
        """Follow to the end, or leave in the middle: then what was handed out last comes again."""
        with self.bucket.changes(
            resume=self.positions, until="now", only=Only(partitions), on_rollback="event"
        ) as changes:
            last: Any = None
            for last in islice(changes, count):
                assert not isinstance(last, Rollback)
                if isinstance(last, Change):
                    self.held.pop(last.key, None)
                    if last.value is not None:
                        self.held[last.key] = last.value
            if count is not None:
                return
            assert last is None or isinstance(last, Marker)
            at = {p: (at.seqno, at.horizon) for p, at in changes.positions().items()}
        self.log.append(("followed", at, dict(self.held)))

    def restart(self, clean: bool) -> None:
        before = {
            p: log.newest.failover_id
            for p, log in self.client.admin.failover_logs(self.bucket).items()
        }
        self.server.restart(clean=clean)
        answers = hello(self.bucket, dict(before))
        told = [
            (a.HasField("rollback_seqno"), a.rollback_seqno, a.rule, a.high_seqno) for a in answers
        ]
        logs = self.client.admin.failover_logs(self.bucket)
        self.log.append(("restarted", told, [[r.seqno for r in log] for log in logs.values()]))


def test_the_scripted_server_does_as_the_real_one() -> None:
    """The same writes, follows and restarts give the same seqnos, logs, answers, positions and states."""
    partitions = [3, 500, 1023]
    keys = [key for partition in partitions for key in keys_in(partition, 5)]
    with ServerProcess() as real, ScriptedServer() as scripted:
        worlds = [World(real), World(scripted)]
        pick = random.Random(0)
        expected: dict[bytes, bytes] = {}
        for step in range(25):
            kind = pick.random()
            if kind < 0.6:
                rows: list[tuple[bytes, bytes | None]] = [
                    (pick.choice(keys), None if pick.random() < 0.3 else b"%d" % step)
                    for _ in range(pick.randint(1, 12))
                ]
                for key, value in rows:
                    expected.pop(key, None)
                    if value is not None:
                        expected[key] = value
                for world in worlds:
                    world.write(rows)
            elif kind < 0.75:
                count = pick.randint(0, 20)
                for world in worlds:
                    world.follow(partitions, count)
            elif kind < 0.92:
                for world in worlds:
                    world.follow(partitions)
                assert worlds[0].held == expected
            else:
                clean = pick.random() < 0.5
                for world in worlds:
                    world.restart(clean)
        for world in worlds:
            world.follow(partitions)
            world.stack.close()
        assert worlds[0].log == worlds[1].log
        assert worlds[1].held == expected == scripted.state()


# The fixtures.


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    found = re.search(r"## Testing your code.*?```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "test_it.py").write_text(found[1])
    plain = ["-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
