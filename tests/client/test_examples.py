"""The examples run as the guide says, against a real server, and end cleanly; the one with SQLite has its own test too."""

import json
import os
import queue
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, wait_until
from tests.service.test_dead_partitions import OTHER, P, Q, with_a_gap
from tests.service.test_text_port import text_address
from upr.service.text.lines import Replicate, parse_command
from upr_client import Client, UprError
from upr_client.testing import ScriptedServer, keys_in
from upr_client.types import WriteResult
from upr_protocol.limits import ADMIN_SOCKET

CLIENT = Path(__file__).resolve().parents[2] / "client"
EXAMPLES = sorted(path.name for path in (CLIENT / "examples").glob("*.py"))
COMMANDS = re.findall(
    r"^python (client/examples/(\w+\.py).*)$", (CLIENT / "README.md").read_text(), re.M
)


def command_of(name: str, target: str) -> list[str]:
    """The guide's first command line for an example, with another target."""
    line = next(line for line, file in COMMANDS if file == name)
    words = shlex.split(line.partition(" #")[0])
    script = str(CLIENT.parent / words[0])
    return [sys.executable, "-W", "error", script, *words[1:], "--target", target]


class Example:
    """An example as a process; what it prints goes to files."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self.process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.PIPE, stdout=out, stderr=err
            )

    @property
    def lines(self) -> list[str]:
        """What it printed, whole lines."""
        return self._out.read_text().split("\n")[:-1]

    @property
    def words(self) -> str:
        """What it said."""
        return self._err.read_text()

    def wait_until(self, holds: Callable[[], object]) -> None:
        wait_until(
            lambda: holds() or self.process.poll() is not None,
            lambda: (self.lines[-5:], self.words),
        )
        assert holds(), self.words

    def ask(self, line: bytes) -> str:
        """Give it a line, and return the one that it prints."""
        count = len(self.lines)
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        self.wait_until(lambda: len(self.lines) > count)
        return self.lines[-1]

    def end(self, number: int | None = None) -> int:
        """Wait for its end, and return the status; no traceback was printed."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(WAIT_SECONDS)
        assert "Traceback" not in self.words, self.words
        return status


@contextmanager
def running(folder: Path, command: list[str], *options: str) -> Iterator[Example]:
    folder.mkdir(exist_ok=True)
    example = Example(folder, [*command, *options])
    try:
        yield example
    finally:
        example.process.kill()
        example.process.communicate()


def write(server: RunningServer, *rows: tuple[bytes, bytes | None]) -> None:
    with Client(server.target) as client:
        client.bucket().write_many(rows)


def test_the_guide_tells_how_to_run_each_of_them() -> None:
    assert sorted({file for _, file in COMMANDS}) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_a_server_there_is_a_line_and_no_traceback(name: str, tmp_path: Path) -> None:
    if name == "sqlite_mirror.py":
        # It waits for a server that is away, from the beginning on.
        with running(tmp_path, command_of(name, "127.0.0.1:1")) as example:
            example.wait_until(lambda: "UNAVAILABLE" in example.words)
            assert example.end(signal.SIGINT) == 0
        return
    # It asks the database first; there may be one at the guide's address.
    nobody = ("--dsn", "postgresql://127.0.0.1:1/none") if name.startswith("postgres") else ()
    with running(tmp_path, command_of(name, "127.0.0.1:1"), *nobody) as example:
        assert example.end() == 1
        assert example.words.startswith(f"{name.removesuffix('.py')}: ")
        assert len(example.words.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("line_client.py", ["--target", "localhost"], "--target is localhost; must be HOST:PORT"),
        ("write_fast.py", ["--keys", "0"], "--keys is 0; must be at least 1"),
        ("write_fast.py", ["--rows", "-1"], "--rows is -1; must be at least 0"),
        ("write_fast.py", ["--value-bytes", "-1"], "--value-bytes is -1; must be at least 0"),
    ],
)
def test_a_wrong_option_is_a_line_and_no_traceback(
    name: str, options: list[str], words: str, target: str, tmp_path: Path
) -> None:
    with running(tmp_path, [*command_of(name, target), *options]) as example:
        assert example.end() == 2
        assert example.words.endswith(f"error: {words}\n")


@pytest.mark.long
def test_follow_goes_on_where_it_stood(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    command = command_of("follow.py", server.target)
    write(server, (b"a", b"1"), (b"b", b"2"))
    with running(tmp_path, command) as example:
        example.wait_until(lambda: len(example.lines) == 2)
        write(server, (b"b", None))
        example.wait_until(lambda: len(example.lines) == 3)
        assert example.end(signal.SIGINT) == 0
        assert example.words.endswith("stopped\n")
        assert {line.split(maxsplit=2)[2] for line in example.lines} == {
            "set b'a' b'1'",
            "set b'b' b'2'",
            "delete b'b' -",
        }
    server.kill()
    server.start()
    write(server, (b"c", b"3"))
    with running(tmp_path, command, "--until-now") as example:
        assert example.end() == 0
        # What the interrupt came between may be there twice.
        assert example.lines[-1].endswith(" set b'c' b'3'")
        assert len(example.lines) <= 5


@pytest.mark.parametrize(
    "name",
    [
        "cache_invalidator.py",
        "follow.py",
        "group.py",
        "line_client.py",
        "search_index.py",
        "write_fast.py",
    ],
)
def test_it_ends_when_nobody_reads_what_it_prints(
    name: str, server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process("--text", "127.0.0.1:0")
    write(server, *((b"key %d" % number, b"red apple") for number in range(100)))
    command = command_of(name, text_address(server) if name == "line_client.py" else server.target)
    # In the endless one a handler prints, whose errors are for the dead letters.
    command = [word for word in command if word != "--until-now"]
    command += ["--rows", "10"] if name == "write_fast.py" else []
    reading, writing = os.pipe()
    os.close(reading)
    with open(tmp_path / "err", "wb") as err:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=writing, stderr=err
        )
    os.close(writing)
    try:
        if name == "cache_invalidator.py":
            assert process.stdin is not None
            process.stdin.write(b"key 1\n" * 100)
            process.stdin.flush()
        status = process.wait(WAIT_SECONDS)
    finally:
        process.kill()
        process.communicate()
    words = (tmp_path / "err").read_text()
    assert (status, "Error" in words, "Broken" in words) == (0, False, False), words


def test_follow_from_now_and_by_prefix(
    shared_server: RunningServer, target: str, tmp_path: Path
) -> None:
    write(shared_server, (b"user:1", b"old"), (b"other", b"old"))
    command = command_of("follow.py", target)
    options = ["--start", "now", "--prefix", "user:", "--positions", "others"]
    with running(tmp_path, command, *options) as example:
        # From when on "now" is, is not printed: write until something is seen.
        number = 0
        while not example.lines:
            number += 1
            write(shared_server, (b"user:1", b"%d" % number), (b"other", b"%d" % number))
            assert example.process.poll() is None, example.words
        example.wait_until(lambda: any(line.endswith(f"b'{number}'") for line in example.lines))
        assert example.end(signal.SIGINT) == 0
        assert all("b'user:1'" in line and "old" not in line for line in example.lines)


@pytest.mark.long
def test_the_search_index_is_in_step(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        command = command_of("search_index.py", server.target)
        first, second, third = keys_in(7, 3)
        server.write(first, b"A red apple")
        server.write(second, b"a green apple")
        server.write(third, b"\xff red apple")
        with running(tmp_path / "once", command) as example:
            assert example.end() == 0
            assert example.lines == [first.decode()]
            assert repr(third) in example.words
        endless = [word for word in command if word != "--until-now"]
        with running(tmp_path / "endless", endless) as example:
            example.wait_until(lambda: example.lines == [f"+ {first.decode()}"])
            server.write(second, b"apple, RED")
            example.wait_until(lambda: example.lines[1:] == [f"+ {second.decode()}"])
            server.write(first, b"yellow apple")
            example.wait_until(lambda: example.lines[2:] == [f"- {first.decode()}"])
            server.delete(second)
            example.wait_until(lambda: example.lines[3:] == [f"- {second.decode()}"])
            # The history goes back to when both were as they were.
            server.roll_back(7, 3)
            example.wait_until(lambda: example.lines[4:] == [f"+ {first.decode()}"])
            assert example.end(signal.SIGINT) == 0


@pytest.mark.long
def test_members_of_the_group_share_and_take_over(
    shared_server: RunningServer, target: str, tmp_path: Path
) -> None:
    rows = [(b"key %d" % number, b"1") for number in range(2000)]
    write(shared_server, *rows)
    command = command_of("group.py", target)
    with running(tmp_path / "a", command, "--member", "a") as a:
        a.wait_until(lambda: len(a.lines) >= len(rows))
        with running(tmp_path / "b", command, "--member", "b") as b:
            b.wait_until(lambda: ": 512 partitions" in b.words)
            write(shared_server, *rows)
            a.wait_until(lambda: len(places(a) | places(b)) == 2 * len(rows))
            assert a.end(signal.SIGINT) == 0
            b.wait_until(lambda: ": 1024 partitions" in b.words)
            write(shared_server, *rows)
            b.wait_until(lambda: len(places(a) | places(b)) == 3 * len(rows))
            # What the interrupt came between may have been printed by both.
            assert 0 < len(places(a)) < 2 * len(rows)
            assert len(places(b)) < 3 * len(rows)
            assert b.end(signal.SIGTERM) == 0
    with Client(target) as client:
        (info,) = client.admin.consumers("default")
        assert (info.name, info.lag, info.members) == ("indexer", 0, ())


def places(example: Example) -> set[tuple[str, ...]]:
    """Which partitions and seqnos it printed."""
    return {tuple(line.split()[1:3]) for line in example.lines}


def kept_seqno(state: Path, partition: int) -> int:
    """The seqno of the newest token in the line client's file."""
    newest: int = json.loads(state.read_text())["tokens"][str(partition)][-1]
    return newest % 2**48


def test_the_line_client_goes_on_and_says_what_was_undone(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process("--text", "127.0.0.1:0")
    address = text_address(server)
    # It finds the server again after each start.
    server.options = ["--text", address]
    command = [*command_of("line_client.py", address), "--retry-seconds", "0.1"]
    keys = keys_in(7, 5)
    write(server, (keys[0], b"kept"), (b"\xff", b"\0"))
    with running(tmp_path, command) as example:
        example.wait_until(lambda: len(example.lines) == 2)
        row = {"seqno": 1, "op": "set", "key": keys[0].decode(), "value": "kept"}
        assert f"7 {json.dumps(row)}" in example.lines
        assert server.terminate() == 0
        copy = server.folder / "copy"
        shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
        server.start()
        write(server, (keys[1], b"undone"), (keys[0], None))
        example.wait_until(lambda: len(example.lines) == 4)
        # An older copy takes the server's place while the client is there.
        server.kill()
        shutil.rmtree(server.data)
        copy.rename(server.data)
        server.start()
        example.wait_until(lambda: example.lines[4:] == ["7 rollback 1"])
        write(server, (keys[2], b"another"))
        example.wait_until(lambda: len(example.lines) == 6)
        assert '"seqno": 2' in example.lines[5]
        # What an interrupt comes between would be printed again.
        example.wait_until(lambda: kept_seqno(tmp_path / "lines.json", 7) == 2)
        assert example.end(signal.SIGINT) == 0
    server.kill()
    server.start()
    write(server, (keys[3], b"last"))
    with running(tmp_path, command) as example:
        # Nothing that it had comes again.
        example.wait_until(lambda: len(example.lines) == 7)
        assert '"last"' in example.lines[6]
        assert example.end(signal.SIGINT) == 0
    with running(tmp_path, command, "--server", "0123456789abcdef") as example:
        assert example.end() == 1
        assert "; expected 0123456789abcdef" in example.words


def test_the_line_client_writes_a_name_as_one_word() -> None:
    example = runpy.run_path(str(CLIENT / "examples" / "line_client.py"))
    for name in ("default", "my bucket", "100%", "a%20b", "bü/1"):
        line = example["LineClient"](name, None, None).ask(7)
        assert parse_command(line.removesuffix(b"\n")) == Replicate(name, 7, 0)


def test_the_line_client_ends_where_its_state_cannot_be_used(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process("--text", "127.0.0.1:0")
    (tmp_path / "damaged").write_text('{"server": "0123456789abcdef"}')
    (tmp_path / "torn").write_text('{"ser')
    command = command_of("line_client.py", text_address(server))
    for state, words in (
        ("nowhere/lines.json", "the state cannot be written: "),
        (".", "the state cannot be read: "),
        ("damaged", "damaged is no state of this program; remove it to begin anew"),
        ("torn", "torn is no state of this program; remove it to begin anew"),
    ):
        with running(tmp_path / "run", [*command, "--state", str(tmp_path / state)]) as example:
            assert example.end() == 1
            line = example.words.splitlines()[-1]
        assert line.startswith("line_client: ")
        assert words in line


def test_the_line_client_follows_all_partitions_but_a_dead_one(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = with_a_gap(server_process, "--text", "127.0.0.1:0")
    server.start()
    with running(tmp_path, command_of("line_client.py", text_address(server))) as example:
        example.wait_until(lambda: example.lines and '"seqno": 5' in example.lines[-1])
        write(server, (OTHER, b"last"))
        example.wait_until(lambda: '"value": "last"' in example.lines[-1])
        assert {line.partition(" ")[0] for line in example.lines} == {str(Q)}
        assert f"line_client: DATA_DAMAGED default {P} " in example.words
        assert example.end(signal.SIGINT) == 0


def test_write_fast_writes_all(target: str, tmp_path: Path) -> None:
    command = command_of("write_fast.py", target)
    with running(tmp_path, command, "--rows", "50000", "--keys", "20000") as example:
        assert example.end() == 0
        (line,) = example.lines
        assert line.startswith("50000 rows in ")
    with Client(target) as client:
        bucket = client.bucket()
        assert sum(info.high_seqno for info in client.admin.partitions(bucket)) == 50_000
        assert bucket.get(b"row:19999") == b"x" * 100
        assert bucket.get(b"row:20000") is None


def test_write_fast_writes_what_it_took_when_interrupted(target: str, tmp_path: Path) -> None:
    command = command_of("write_fast.py", target)
    with running(tmp_path, command, "--rows", "1000000000") as example, Client(target) as c:
        example.wait_until(
            lambda: any(info.high_seqno for info in c.admin.partitions("default", range(64)))
        )
        assert example.end(signal.SIGINT) == 0
        written = int(example.lines[0].split()[0])
        assert sum(info.high_seqno for info in c.admin.partitions("default")) == written


def test_write_fast_says_what_failed(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        partition = WriteResult(*server.write(b"row:5", b"")).partition
        server.refuse(partition)
        command = command_of("write_fast.py", server.target)
        with running(tmp_path, command, "--rows", "10", "--retry-seconds", "0.2") as example:
            assert example.end() == 1
            assert example.words.startswith("write_fast: ")
            assert f"[{partition}" in example.words or f" {partition}" in example.words


def test_the_mirror_has_what_the_bucket_has(
    shared_server: RunningServer, target: str, tmp_path: Path
) -> None:
    write(shared_server, (b"a", b"1"), (b"b", b"2"), (b"a", None))
    with running(tmp_path, command_of("sqlite_mirror.py", target), "--until-now") as example:
        assert example.end() == 0
        assert (tmp_path / "mirror.db").exists()


@contextmanager
def receiver(answers: list[int]) -> Iterator[tuple[str, "queue.Queue[list[dict[str, Any]]]"]]:
    """A receiver of events that gives some answers first, and then 204: its URL, and the batches that it took."""
    taken: queue.Queue[list[dict[str, Any]]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = answers.pop(0) if answers else 204
            if status == 204:
                assert self.headers["Content-Type"].startswith("application/cloudevents-batch+json")
                taken.put(json.loads(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def handle(self) -> None:
            # A follower that was interrupted closes the connection as it is.
            with suppress(ConnectionError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/events?a=b", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.long
def test_cloud_events_come_in_order_and_again_until_they_are_taken(tmp_path: Path) -> None:
    first, second, third = keys_in(7, 3)
    with ScriptedServer() as server, receiver([503, 429]) as (url, taken):
        server.write(first, b"red")
        server.write(second, b"\xff")
        server.delete(first)
        command = [*command_of("cloudevents.py", server.target), "--url", url]
        with running(tmp_path, command) as example:
            events: list[dict[str, Any]] = []
            while len(events) < 3:
                events += taken.get(timeout=WAIT_SECONDS)
            assert [(one["type"], one["seqno"], one["subject"]) for one in events] == [
                ("upr.set", "1", first.decode()),
                ("upr.set", "2", second.decode()),
                ("upr.delete", "3", first.decode()),
            ]
            assert (events[0]["data"], events[0]["datacontenttype"]) == ("red", "text/plain")
            assert events[1]["data_base64"] == b64encode(b"\xff").decode()
            assert len({one["id"] for one in events}) == 3
            assert all(one["specversion"] == "1.0" and one["source"] for one in events)
            assert "answered 503; again in" in example.words
            assert "answered 429; again in" in example.words
            # What did not happen is taken back, and what did is sent.
            server.roll_back(7, 2)
            server.write(third, b"new")
            (back,) = taken.get(timeout=WAIT_SECONDS)
            assert (back["type"], back["partition"]) == ("upr.rollback", 7)
            assert 0 <= int(back["seqno"]) <= 2
            again: list[dict[str, Any]] = []
            while not again or again[-1]["seqno"] != "3":
                again += taken.get(timeout=WAIT_SECONDS)
            assert again[-1]["data"] == "new"
            # A receiver that drops ids that it knows drops none of these.
            assert not {one["id"] for one in again} & {one["id"] for one in events}
            assert example.end(signal.SIGINT) == 0
        with receiver([400]) as (refusing, none):
            server.write(b"a\x1b", b"last")
            last = [*command, "--url", refusing, "--until-now"]
            with running(tmp_path, last) as example:
                assert example.end() == 1
                assert example.words.endswith("cloudevents: the receiver answered 400\n")
        # The position stands before what was refused, and behind all else.
        with running(tmp_path, [*command, "--until-now"]) as example:
            assert example.end() == 0
        sent: list[dict[str, Any]] = []
        while not taken.empty():
            sent += taken.get_nowait()
        (event,) = [one for one in sent if one.get("data") == "last"]
        assert (event["keybase64"], "subject" in event) == (b64encode(b"a\x1b").decode(), False)
        # What the interrupt came between is there twice.
        assert {one["id"] for one in sent} <= {event["id"], *(one["id"] for one in again)}
        assert none.empty()


def test_the_source_of_cloud_events_is_a_uri_whatever_the_bucket_is_called(
    target: str, tmp_path: Path
) -> None:
    name = "my bucket/50%"
    with Client(target) as client, receiver([]) as (url, taken):
        client.admin.create_bucket(name)
        client.bucket(name).set(b"a", b"red")
        options = ["--url", url, "--bucket", name, "--until-now"]
        with running(tmp_path, command_of("cloudevents.py", target), *options) as example:
            assert example.end() == 0, example.words
        (event,) = taken.get(timeout=WAIT_SECONDS)
    assert event["source"] == f"upr://{target}/my%20bucket%2F50%25"


def test_a_receiver_that_is_away_for_hours_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(CLIENT / "examples" / "cloudevents.py"))
    for url in ("http://127.0.0.1:99999/", "http://[::1/", "127.0.0.1:80", "http://a/b c"):
        with pytest.raises(example["RefusedError"], match=re.escape(repr(url))):
            example["Receiver"](url, 1.0)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1100:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        example["Receiver"]("http://127.0.0.1:1/", 1.0).send([])
    assert pauses[0] == 0.1
    assert pauses[-1] == 30.0


def test_the_cache_forgets_what_changes_and_everything_on_a_rollback(tmp_path: Path) -> None:
    key, other = keys_in(7, 2)
    with ScriptedServer() as server:
        server.write(key, b"1")
        with running(tmp_path, command_of("cache_invalidator.py", server.target)) as example:
            assert example.process.stdin is not None
            # That is no key.
            example.process.stdin.write(b"\n")
            assert [example.ask(key), example.ask(key)] == ["b'1'", "b'1'"]
            assert "must be 1 to" in example.words
            assert example.words.splitlines()[-2:] == ["miss", "hit"]
            server.write(key, b"2")
            example.wait_until(lambda: f"forgot {key!r}" in example.words)
            assert example.ask(key) == "b'2'"
            assert example.ask(other) == "-"
            server.roll_back(7, 1)
            example.wait_until(lambda: "roll back to 1" in example.words)
            assert "emptied of 2 keys" in example.words
            assert example.ask(key) == "b'1'"
            assert example.ask(key) == "b'1'"
            assert example.words.endswith("hit\n")
            example.process.stdin.close()
            assert example.end() == 0


def test_the_cache_outlasts_a_server_that_is_away(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    write(server, (b"key", b"1"))
    with running(tmp_path, command_of("cache_invalidator.py", server.target)) as example:
        assert example.ask(b"key") == "b'1'"
        server.kill()
        example.wait_until(lambda: "emptied of 1 keys" in example.words)
        assert example.process.stdin is not None
        example.process.stdin.write(b"key\n")
        example.process.stdin.flush()
        example.wait_until(lambda: f"\n{server.target}: nothing listens there" in example.words)
        server.start()

        def reads() -> bool:
            assert example.process.stdin is not None
            example.process.stdin.write(b"key\n")
            example.process.stdin.flush()
            return len(example.lines) > 1

        # A connection that was refused is tried again after a pause.
        example.wait_until(reads)
        assert set(example.lines) == {"b'1'"}
        example.process.stdin.close()
        assert example.end() == 0


def test_a_search_index_keeps_no_words_that_nothing_has() -> None:
    example = runpy.run_path(str(CLIENT / "examples" / "search_index.py"))
    index = example["Index"](lambda *_: None)
    for number in range(100):
        index.put(7, b"key", frozenset({"red", f"word{number}"}))
    assert index.find(frozenset({"red", "word99"})) == {b"key"}
    index.put(7, b"key", frozenset())
    assert not index._keys


def test_a_key_that_changes_while_it_is_read_is_not_kept() -> None:
    example = runpy.run_path(str(CLIENT / "examples" / "cache_invalidator.py"))

    class Changing:
        """A bucket whose key changes behind each read."""

        def get(self, key: bytes) -> bytes:
            cache.forget([key])
            return b"old"

    cache = example["Cache"](Changing(), 10)
    assert [cache.get(b"key"), cache.get(b"key")] == [(b"old", False)] * 2


@pytest.mark.parametrize("error", [UprError("lost"), BrokenPipeError()])
def test_a_cache_that_nothing_tells_of_changes_ends(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = runpy.run_path(str(CLIENT / "examples" / "cache_invalidator.py"))
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    class Broken:
        """A stream that fails."""

        def batches(self) -> Iterator[None]:
            raise error

    with suppress(BrokenPipeError):
        example["invalidate"](Broken(), example["Cache"](None, 10))
    assert statuses == [1]
