"""The examples of the guide and of the project's README run as they are printed, against a real server."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format

import upr_client
from tests.cli.git_repos import RepoBuilder
from tests.harness import wait_until
from upr_client import Client, admin, errors
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2_grpc as stream_grpc
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import key_value_service_pb2_grpc as kv_grpc

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "client" / "README.md").read_text()
README = (ROOT / "README.md").read_text()
WIRE = (ROOT / "protos" / "README.md").read_text()
TARGET = "127.0.0.1:7711"


def examples_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def staying(messages: list[stream_pb2.FollowRequest]) -> Iterator[stream_pb2.FollowRequest]:
    """The messages, and no half-close for a minute, like a sleep in front of grpcurl."""
    yield from messages
    threading.Event().wait(60)


def promised(example: str) -> list[str]:
    """What the comments say that an example prints."""
    return re.findall(r"print\(.*\)  # -> (.*)$", example, re.MULTILINE)


def test_the_examples_run(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other in one bucket: what one writes another may read."""
    monkeypatch.chdir(tmp_path)
    examples = examples_of(GUIDE)
    assert len(examples) == 12
    for example in examples:
        exec(example.replace(TARGET, target), {"__name__": "example"})
        printed = capsys.readouterr().out.splitlines()
        lines = iter(printed)
        for line in promised(example):
            assert line in lines, (example, printed)
    assert sum(len(promised(example)) for example in examples) >= 14
    assert (tmp_path / "acks").exists()


@pytest.mark.parametrize(
    "names",
    [upr_client.__all__, admin.__all__, [name for name in vars(errors) if name.endswith("Error")]],
)
def test_every_class_that_a_user_meets_is_named(names: list[str]) -> None:
    assert set(names) - set(re.findall(r"\w+", GUIDE)) == set()


def headings_of(text: str) -> set[str]:
    return {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, re.M)}


def test_every_heading_that_is_named_is_there() -> None:
    for text in (GUIDE, WIRE):
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings_of(text)
    named = re.findall(r"\]\(\S*protos/README\.md#([^)]+)\)", README + GUIDE)
    assert named
    assert set(named) <= headings_of(WIRE)


class Terminal:
    """A shell that is typed into, line by line; what the README has in /tmp is in a folder of the test's.

    Args:
        folder: where the shell is, and what it takes for /tmp.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Of the server, once it listens.
        self.target = TARGET
        self._ready = folder / "ready"
        programs = Path(sys.executable).parent
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "UPR_CONTEXTS": str(folder / "contexts.json"),
            "UPR_SERVER_LISTEN": "127.0.0.1:0",
            "UPR_SERVER_READY_FILE": str(self._ready),
        }
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def type(self, line: str) -> str:
        """Type a line and return what is printed; of a server, wait until it serves."""
        self._ready.unlink(missing_ok=True)
        printed = self._typed(
            line.replace("/tmp/", f"{self._folder}/").replace(TARGET, self.target)
        )
        if line.startswith("upr-server "):
            wait_until(self._ready.exists, "the server of the README")
            self.target = self._ready.read_text().strip()
            self._typed(f"export UPR_SERVER_LISTEN={self.target} UPR_TARGET={self.target}")
        return printed

    def _typed(self, line: str) -> str:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f'{line}\necho "(status $?)"\n')
        self._shell.stdin.flush()
        printed = ""
        while not (ended := re.search(r"\(status (\d+)\)\n$", printed)):
            read = self._shell.stdout.readline()
            assert read, (line, printed)
            printed += read
        assert ended[1] == "0", (line, printed)
        return printed[: ended.start()]

    def close(self) -> None:
        """End the shell, and the server that it may have started."""
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A shell in a folder that is a git repository, as the README's is."""
    repo = RepoBuilder(tmp_path / "repo")
    repo.commit({b"upr/a": b"1", b"upr/b": b"2", b"upr/c": b"3", b"user:1": b"4", b"user:2": b"5"})
    repo.make()
    (tmp_path / "repo" / ".git").rename(tmp_path / ".git")
    opened = Terminal(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def without_ids(text: str) -> str:
    """The text with its random ids made equal."""
    return re.sub(r"\b[0-9a-f]{16}\b", "ID", text)


@pytest.mark.long
def test_five_minutes_print_what_the_readme_shows(
    terminal: Terminal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All commands and the example, from the top to the bottom, in one shell and on one data directory."""
    monkeypatch.chdir(tmp_path)
    part = README.partition("\n## Five minutes\n")[2].partition("\n## ")[0]
    compared, before = 0, ""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL):
        if language == "python":
            example = block.replace(TARGET, terminal.target).replace("/tmp/", f"{tmp_path}/")
            exec(example, {"__name__": "example"})
            assert capsys.readouterr().out.splitlines() == promised(block)
            continue
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = command.partition("\n")
            if line.startswith((". ", "pip ")):
                # They are in the PATH already.
                continue
            if before.startswith("upr-server "):
                # Whoever pastes the lines does not wait as the terminal here does.
                assert line.startswith("until upr-admin status ")
            before = line
            # What the commands take for the target without one is another port here; upr-backup takes none.
            asked = f"env -u UPR_TARGET {line}" if line.startswith("upr-backup ") else line
            printed = terminal.type(asked)
            # What depends on the repository is not shown.
            if expected.strip():
                assert without_ids(printed) == without_ids(expected), line
                compared += 1
    assert compared >= 8


def requests_of(method: str) -> list[str]:
    """The two messages with which the wire's page has grpcurl call a method."""
    (command,) = (text for text in WIRE.split("\n$ ") if f"upr.v1.{method}" in text)
    requests = re.findall(r"^ *'(\{.*\})'", command, re.MULTILINE)
    assert len(requests) == 2
    return requests


def test_the_requests_for_grpcurl_bring_rows(target: str) -> None:
    with Client(target) as client:
        result = client.bucket().set(b"user:1", b"Ada")
    requests = requests_of("ChangeStreamService/Follow")
    said = [json_format.Parse(text, stream_pb2.FollowRequest()) for text in requests]
    assert said[1].start.partitions[0].partition == result.partition
    with grpc.insecure_channel(target) as channel:
        call = stream_grpc.ChangeStreamServiceStub(channel).Follow(staying(said))
        rows = next(m.frame.plain_runs[0].rows for m in call if m.frame.plain_runs)
        assert [(row.key, row.value) for row in rows] == [(b"user:1", b"Ada")]
        call.cancel()


def test_the_requests_for_grpcurl_write_rows(target: str) -> None:
    requests = requests_of("KeyValueService/Write")
    said = [json_format.Parse(text, kv_pb2.WriteRequest()) for text in requests]
    with grpc.insecure_channel(target) as channel:
        answers = list(kv_grpc.KeyValueServiceStub(channel).Write(iter(said)))
    assert [answer.WhichOneof("message") for answer in answers] == ["opened", "result"]
    assert not answers[1].result.HasField("refused")
    with Client(target) as client, client.bucket().changes(until="now") as changes:
        rows = {(c.key, c.op, c.value) for batch in changes.batches() for c in batch.changes}
    assert rows == {(b"user:1", "set", b"Ada"), (b"user:2", "delete", None)}
