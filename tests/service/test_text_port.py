"""The text port of a real server, by raw sockets: each command, keep-alive, congestion, batches, writers, resuming."""

import asyncio
import json
import math
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import create_autospec

import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, ServerFailed, pass_turns, wait_until
from tests.proxy import Proxy
from tests.service.pages import http_of, numbers
from tests.service.test_text_lines import read_line, row_of
from upr.service.text import port
from upr.service.text.lines import split_token
from upr_client import Client
from upr_client.testing import keys_in
from upr_protocol.limits import (
    ADMIN_SOCKET,
    CREDIT_FRAMES,
    PARTITIONS,
    PEER_CALLS,
    TEXT_BUCKETS_MAX,
    TEXT_CONNECTIONS_MAX,
    TEXT_PIECE_BYTES,
)
from upr_protocol.partitioning import partition_of

P = 5
KEYS = keys_in(P, 50)
State = dict[int, dict[bytes, bytes]]


def text_address(server: RunningServer) -> str:
    """Where the newest process serves lines."""
    return str(text_status(server).address)


def write(
    server: RunningServer, *rows: tuple[bytes, bytes | None], bucket: str = "default"
) -> None:
    with Client(server.target) as client:
        client.bucket(bucket).write_many(rows)


def text_status(server: RunningServer) -> Any:
    with Client(server.target) as client:
        return client.admin.status().text_port


class Lines:
    """A connection, with what a client knows by its lines; PINGs are counted.

    Attributes:
        state: keys and values by partition, of complete batches.
        tokens: the newest of each bucket and partition.
        heard: all lines.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), WAIT_SECONDS)
        self._file = self.socket.makefile("r", encoding="ascii", newline="\n")
        self.pings = 0
        self.heard: list[str] = []
        self.state: State = defaultdict(dict)
        self.tokens: dict[tuple[str, int], int] = {}
        self.batches: dict[tuple[str, int], list[Any]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def say(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def read(self) -> tuple[str, list[str], Any]:
        """Return the next line but PINGs; "" for the end."""
        while line := self._file.readline():
            self.heard.append(line)
            kind, words, row = read_line(line.removesuffix("\n"))
            if kind != "PING":
                self.take(kind, words, row)
                return kind, words, row
            self.pings += 1
        return "", [], None

    def read_ping(self) -> None:
        assert self._file.readline().startswith("PING ")
        self.pings += 1

    def take(self, kind: str, words: list[str], row: Any) -> None:
        if kind == "RDATA":
            place = words[0], int(words[1])
            if row is not None:
                self.batches[place].append(row_of(row))
            if words[2] != "batch":
                for _, key, value in self.batches.pop(place, []):
                    if value is None:
                        self.state[place[1]].pop(key, None)
                    else:
                        self.state[place[1]][key] = value
                self.tokens[place] = int(words[2])
        elif kind == "POSITION":
            self.tokens[words[0], int(words[1])] = int(words[3])

    def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            kind, words, _ = self.read()
            assert kind, "the connection ended"
            assert kind != "ERROR", words

    def read_on(self, count: int) -> bool:
        """Read until there are so many keys, or the connection is cut, maybe within a line; return whether it was."""
        while len(self.rows()) < count:
            try:
                if not self.read()[0]:
                    return True
            except (AssertionError, OSError, ValueError):
                return True
        return False

    def error(self) -> str:
        """Return the next line, which is an ERROR."""
        kind, words, _ = self.read()
        assert kind == "ERROR", (kind, words)
        return words[0]

    def end(self) -> None:
        """Wait for the end of the connection."""
        while self.read()[0]:
            pass

    def rows(self, partition: int = P) -> dict[bytes, bytes]:
        return self.state[partition]


@contextmanager
def replicating(address: str, *lines: str) -> Iterator[Lines]:
    with Lines(address) as client:
        assert client.read()[0] == "SERVER"
        client.say(*lines)
        yield client


@pytest.fixture
def server(server_process: StartServer) -> RunningServer:
    return server_process("--text", "127.0.0.1:0")


def test_a_connection_is_told_who_the_server_is_and_follows_from_now(
    server_process: StartServer,
) -> None:
    # Who is gone without a word shows when a PING is sent.
    server = server_process("--text", "127.0.0.1:0", "--heartbeat-seconds", "0.2")
    address = text_address(server)
    write(server, (KEYS[0], b"before"))
    with Lines(address) as client:
        kind, (name,), _ = client.read()
        assert (kind, len(name)) == ("SERVER", 16)
        client.say("", "NAME somebody", "REPLICATE")
        client.until(lambda: len(client.tokens) == PARTITIONS)
        assert client.pings
        positions = {p: split_token(token) for (_, p), token in client.tokens.items()}
        assert [p for p, (_, seqno) in positions.items() if seqno] == [P]
        assert all(failover_id for failover_id, _ in positions.values())
        write(
            server,
            (KEYS[1], b"1"),
            (KEYS[2], "é\u2028\n".encode()),
            (KEYS[0], None),
            (b"\xff", b"\0\xfe"),
        )
        other = partition_of(b"\xff")
        client.until(lambda: len(client.rows()) == 2 and client.state[other])
        assert client.rows() == {KEYS[1]: b"1", KEYS[2]: "é\u2028\n".encode()}
        assert client.state[other] == {b"\xff": b"\0\xfe"}
        assert text_status(server).connections == 1
    assert '"consumer": "somebody"' in server.log_text()
    with Lines(address) as again:
        assert again.read()[1] == [name]
    wait_until(lambda: text_status(server).connections == 0, "a connection is left")


def test_bad_lines_are_told_and_change_nothing(server: RunningServer) -> None:
    with replicating(text_address(server), f"REPLICATE default {P} 0") as client:
        client.until(lambda: client.tokens)
        for line, words in {
            "USER_SYNC x": "INVALID_ARGUMENT command is 'USER_SYNC'; must be one of PING",
            "REPLICATE nowhere 5 0": "BUCKET_NOT_FOUND nowhere there is no bucket 'nowhere'; 'upr-admin bucket list' shows all, and 'create' makes one",
            "REPLICATE default 5 12": "INVALID_ARGUMENT token is '12'; must be 0, or",
            "REPLICATE default 1024": "INVALID_ARGUMENT partition is '1024'; must be 0 to 1023",
        }.items():
            client.say(line)
            assert client.error().startswith(words)
        write(server, (KEYS[0], b"1"))
        client.until(lambda: client.rows() == {KEYS[0]: b"1"})
        client.say("x" * 5000)
        assert "must be at most 4096; end each command with a line feed" in client.error()
        client.end()


def test_a_connection_goes_on_behind_many_small_frames(server: RunningServer) -> None:
    with replicating(text_address(server), f"REPLICATE default {P} 0") as client:
        client.until(lambda: client.tokens)
        # One at a time: each costs more of the credit than its bytes.
        with Client(server.target) as writer:
            bucket = writer.bucket()
            for number in range(CREDIT_FRAMES + 50):
                bucket.set(KEYS[0], b"%d" % number)
                while client.rows().get(KEYS[0]) != b"%d" % number:
                    assert client.read()[0] == "RDATA"


def test_a_batch_has_its_token_at_the_end_and_several_partitions_go_on_by_themselves(
    server: RunningServer,
) -> None:
    other = keys_in(P + 1, 3)
    write(server, *((key, b"1") for key in KEYS), *((key, b"2") for key in other))
    with replicating(text_address(server), "REPLICATE default * 0") as client:
        seen: dict[int, list[str]] = defaultdict(list)
        while len(seen[P]) < len(KEYS) or len(seen[P + 1]) < len(other):
            kind, words, _ = client.read()
            if kind == "RDATA":
                seen[int(words[1])].append(words[2])
        for partition, count in ((P, len(KEYS)), (P + 1, len(other))):
            assert seen[partition][:-1] == ["batch"] * (count - 1)
            assert split_token(int(seen[partition][-1]))[1] == count
        assert client.rows() == dict.fromkeys(KEYS, b"1")
        tokens = dict(client.tokens)
    write(server, (other[0], b"3"), (KEYS[0], None))
    asked = [f"REPLICATE default {p} {tokens['default', p]}" for p in (P, P + 1)]
    with replicating(text_address(server), *asked) as client:
        # Nothing that was had comes again.
        client.until(lambda: client.rows(P + 1))
        assert client.rows(P + 1) == {other[0]: b"3"}
        client.until(lambda: split_token(client.tokens["default", P])[1] == len(KEYS) + 1)


def test_a_client_goes_on_behind_cuts_of_its_connection_and_starts_of_the_server(
    server: RunningServer,
) -> None:
    rows = [(key, b"%d " % number * 2000) for number, key in enumerate(KEYS)]
    state: dict[bytes, bytes] = {}
    token, rounds = 0, 0
    with Proxy(text_address(server)) as proxy:
        for row in rows:
            write(server, row)
        while len(state) < len(rows):
            proxy.cut_after("to client", 40_000)
            with replicating(proxy.target, f"REPLICATE default {P} {token}") as client:
                rounds += client.read_on(len(rows) - len(state))
                assert not state.keys() & client.rows().keys()
                state |= client.rows()
                token = client.tokens.get(("default", P), token)
    assert rounds > 2
    assert state == dict(rows)
    # A kill gives the partition a new id; what is durable is the same.
    server.kill()
    server.start()
    write(server, (KEYS[0], b"new"))
    with replicating(text_address(server), f"REPLICATE default {P} {token}") as client:
        kind, words, _ = client.read()
        assert (kind, int(words[2])) == ("POSITION", token)
        assert split_token(int(words[3]))[1] == split_token(token)[1]
        assert split_token(int(words[3]))[0] != split_token(token)[0]
        client.until(lambda: client.rows() == {KEYS[0]: b"new"})


def test_the_token_of_an_undone_branch_gets_an_error_with_the_seqno_to_go_back_to(
    server: RunningServer,
) -> None:
    write(server, (KEYS[0], b"kept"), (KEYS[1], b"kept"))
    assert server.terminate() == 0
    copy = server.folder / "copy"
    shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    server.start()
    with replicating(text_address(server), f"REPLICATE default {P} 0") as client:
        client.until(lambda: len(client.rows()) == 2)
        kept = client.tokens["default", P]
        write(server, (KEYS[2], b"undone"))
        client.until(lambda: len(client.rows()) == 3)
        undone = client.tokens["default", P]
    server.kill()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    server.start()
    write(server, *((key, b"another") for key in KEYS[3:6]))
    with replicating(text_address(server), f"REPLICATE default {P} {undone}") as client:
        assert client.error().startswith(f"ROLLBACK default {P} 2 ")
        # No stream was opened; the client asks with what it had there.
        client.say(f"REPLICATE default {P} {kept}")
        client.until(lambda: client.rows())
        assert client.rows().keys() <= set(KEYS[3:6])
        client.until(lambda: len(client.rows()) == 3)
        assert split_token(client.tokens["default", P])[1] == 5


def test_a_dropped_bucket_ends_and_names_are_words(server: RunningServer) -> None:
    with Client(server.target) as admin:
        admin.admin.create_bucket("my bücket")
        word = "my%20b%C3%BCcket"
        with replicating(
            text_address(server), "REPLICATE default 5 0", f"REPLICATE {word} 5 0"
        ) as client:
            client.until(lambda: len(client.tokens) == 2)
            token = client.tokens[word, P]
            write(server, (KEYS[0], b"1"), bucket="my bücket")
            client.until(lambda: client.rows() == {KEYS[0]: b"1"})
            token = client.tokens[word, P]
            admin.admin.drop_bucket("my bücket")
            assert client.error().startswith(f"BUCKET_GONE {word} 5 the bucket was dropped")
            # The other one goes on.
            write(server, (KEYS[1], b"2"))
            client.until(lambda: KEYS[1] in client.rows())
            admin.admin.create_bucket("my bücket")
            client.say(f"REPLICATE {word} 5 {token}")
            assert client.error().startswith(f"ROLLBACK {word} 5 0 ")


def test_a_client_that_closes_its_half_goes_on_reading(server: RunningServer) -> None:
    with replicating(text_address(server), f"REPLICATE default {P}") as client:
        client.socket.shutdown(socket.SHUT_WR)
        client.until(lambda: client.tokens)
        write(server, (KEYS[0], b"1"))
        client.until(lambda: client.rows() == {KEYS[0]: b"1"})


def test_an_error_of_the_client_ends_the_connection(server: RunningServer) -> None:
    with replicating(text_address(server), "ERROR I give up") as client:
        client.end()
    wait_until(lambda: '"words": "I give up"' in server.log_text(), server.log_text)


@pytest.mark.long
def test_silence_ends_a_connection_that_pinged_and_no_other(server_process: StartServer) -> None:
    server = server_process("--text", "127.0.0.1:0", "--heartbeat-seconds", "0.4")
    address = text_address(server)
    with (
        replicating(address, f"REPLICATE default {P}") as patient,
        replicating(address, "PING 1") as silent,
    ):
        assert silent.error().startswith("SILENT no line came for 1.2 s; send a PING")
        silent.end()
        before = silent.pings
        assert before >= 2
        # The other one never pinged, is pinged, and goes on.
        write(server, (KEYS[0], b"1"))
        patient.until(lambda: patient.rows() == {KEYS[0]: b"1"})
        assert patient.pings >= before
    with replicating(address, "PING 1") as alive:
        # For several times as long as silence is borne, a PING goes with each that comes.
        while alive.pings < 9:
            alive.say("PING 2", "x")
            assert alive.error().startswith("INVALID_ARGUMENT command is 'x'")
            pings = alive.pings
            while alive.pings == pings:
                alive.read_ping()


def test_who_takes_nothing_is_ended_loudly_and_resumes(server_process: StartServer) -> None:
    both = ("--text", "127.0.0.1:0", "--http", "127.0.0.1:0")
    server = server_process(*both, "--reader-timeout", "0.5s")
    rows = [(key, b"%d" % number * 500_000) for number, key in enumerate(KEYS[:40])]
    write(server, *rows)
    with replicating(text_address(server), "NAME slow", f"REPLICATE default {P} 0") as client:
        wait_until(lambda: "a consumer is too slow" in server.log_text(), server.log_text)
        assert '"consumer": "slow"' in server.log_text()
        assert text_status(server).too_slow == 1
        assert numbers(http_of(server))["upr_text_too_slow_total", ""] == 1
        # What is on its way can still be read; then the connection ends, in the middle of the rows.
        assert client.read_on(len(rows))
        assert len(client.rows()) < len(rows)
    token = client.tokens["default", P]
    with replicating(text_address(server), f"REPLICATE default {P} {token}") as again:
        again.until(lambda: len(again.rows()) + len(client.rows()) >= len(rows))
        assert client.rows() | again.rows() == dict(rows)


def test_a_shell_without_any_client_reads_a_bucket(server: RunningServer) -> None:
    """What nc does: lines go out as they are, the half of the sender is closed, and what comes is printed to its end."""
    write(server, (KEYS[0], b"by a shell"))
    host, port = text_address(server).split(":")
    script = (
        f"exec 3<>/dev/tcp/{host}/{port}; printf 'NAME shell\\nREPLICATE default {P} 0\\n' >&3;"
        ' while read -r line <&3; do echo "$line"; case $line in RDATA*) exit;; esac; done'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[0].startswith("SERVER ")
    assert f"RDATA default {P} " in said[-1]
    assert json.loads(said[-1].split(" ", 4)[4])["value"] == "by a shell"


def test_connections_and_buckets_of_one_are_limited(server: RunningServer) -> None:
    address, most = text_address(server), int(TEXT_CONNECTIONS_MAX * PEER_CALLS)
    with Client(server.target) as admin:
        for number in range(TEXT_BUCKETS_MAX):
            admin.admin.create_bucket(f"b{number}")
    clients = [Lines(address) for _ in range(most)]
    try:
        for client in clients:
            assert client.read()[0] == "SERVER"
        with Lines(address) as refused:
            assert refused.error().startswith(
                f"TOO_MANY open Text calls of 127.0.0.1 are {most}; must be below"
            )
            refused.end()
        clients[0].say("REPLICATE")
        assert (
            clients[0]
            .error()
            .startswith("TOO_MANY buckets of a connection are 9; must be at most 8; name some")
        )
        clients[0].say("REPLICATE b0 5")
        clients[0].until(lambda: clients[0].tokens)
    finally:
        for client in clients:
            client.socket.close()


REFERENCE = Path(__file__).resolve().parents[2] / ".venv-reference" / "bin" / "python"
PARSER = """
import json, sys
from synapse.replication.tcp.commands import parse_command_from_line
for line in sys.stdin.read().splitlines():
    command = parse_command_from_line(line)
    print(json.dumps([command.NAME, {name: getattr(command, name) for name in command.__slots__}, vars(command)
        if hasattr(command, "__dict__") else {}]))
"""


@pytest.mark.long
@pytest.mark.reference
def test_the_reference_implementation_understands_every_line(server: RunningServer) -> None:
    strange = "é\u2028".encode()
    write(server, *((key, b"\xff\0") for key in KEYS), (strange, b"a b\n"))
    with replicating(text_address(server), "REPLICATE default * 0") as client:
        client.until(lambda: len(client.rows()) == len(KEYS) and client.rows(partition_of(strange)))
        client.say("NAME", f"REPLICATE default {P} {1 << 48 | 7}", "ERROR enough")
        client.end()
        lines = "".join(client.heard)
    done = subprocess.run([REFERENCE, "-c", PARSER], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds: defaultdict[str, int] = defaultdict(int)
    for line, parsed in zip(lines.splitlines(), done.stdout.splitlines(), strict=True):
        kind, words, row = read_line(line)
        name, slots, others = json.loads(parsed)
        fields = slots | others
        kinds[kind] += 1
        assert name == kind
        if kind == "RDATA":
            token = None if words[2] == "batch" else int(words[2])
            assert list(fields.values()) == [*words[:2], token, row]
        elif kind == "POSITION":
            assert list(fields.values()) == [*words[:2], *map(int, words[2:])]
        else:
            assert list(fields.values()) == words
    assert (kinds["SERVER"], kinds["POSITION"], kinds["ERROR"]) == (1, PARTITIONS, 2)
    assert kinds["RDATA"] == len(KEYS) + 1
    assert kinds["PING"]


def test_the_stop_says_so_and_is_clean(server: RunningServer) -> None:
    with replicating(text_address(server), f"REPLICATE default {P}") as client:
        client.until(lambda: client.tokens)
        server_status = server.terminate()
        assert client.error().startswith("SHUTTING_DOWN the server is stopping")
        client.end()
    assert server_status == 0


def test_without_the_option_there_is_no_port_and_no_other_address_without_insecure(
    server_process: StartServer, shared_server: RunningServer
) -> None:
    assert text_status(shared_server) is None
    with pytest.raises(ServerFailed, match=r"--text is 0\.0\.0\.0:0; must be loopback"):
        server_process("--text", "0.0.0.0:0")


@pytest.mark.asyncio
async def test_whoever_sends_wrong_lines_and_reads_nothing_is_not_read_any_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "TEXT_COMMANDS_A_SECOND", math.inf)
    reader, writer = asyncio.StreamReader(), create_autospec(asyncio.StreamWriter, instance=True)
    reader.feed_data(b"x\n" * 100_000)
    reader.feed_eof()
    nobody = create_autospec(port.TextPort, instance=True, heartbeat_seconds=1.0)
    connection = port.Connection(nobody, reader, writer, "ipv4:127.0.0.1:1")
    reading = asyncio.create_task(connection._read())
    told, most = 0, 0
    while not reading.done():
        # Without a wait for what it said it goes through all lines in its turns.
        await pass_turns()
        most = max(most, sum(map(len, connection._said)))
        told += len(connection._said)
        connection._said.clear()
        connection._drained.set()
    await reading
    assert told == 100_000
    assert most < 2 * TEXT_PIECE_BYTES
