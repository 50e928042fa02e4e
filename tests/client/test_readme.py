"""The examples of the guide and of the project's README run as they are printed, against a real server."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf import json_format

import upr_client
from tests.harness import RunningServer
from upr_client import Client, admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2
from upr_protocol.wire.v1 import change_stream_service_pb2_grpc as stream_grpc

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "client" / "README.md").read_text()
README = (ROOT / "README.md").read_text()
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
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after the other in one bucket: what one writes another may read."""
    monkeypatch.chdir(tmp_path)
    server = server_process()
    examples = examples_of(GUIDE)
    assert len(examples) == 10
    for example in examples:
        exec(example.replace(TARGET, server.target), {"__name__": "example"})
        printed = capsys.readouterr().out.splitlines()
        lines = iter(printed)
        for line in promised(example):
            assert line in lines, (example, printed)
    assert sum(len(promised(example)) for example in examples) >= 14
    assert (tmp_path / "users.positions").exists()


@pytest.mark.parametrize("module", [upr_client, admin])
def test_every_class_that_a_user_meets_is_named(module: ModuleType) -> None:
    assert set(module.__all__) - set(re.findall(r"\w+", GUIDE)) == set()


def test_every_heading_that_is_named_is_there() -> None:
    headings = {
        heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", GUIDE, re.M)
    }
    assert {anchor for anchor in re.findall(r"\]\(#([^)]+)\)", GUIDE)} <= headings


def test_the_examples_of_the_project_run(
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    server = server_process()
    follows, cuts = examples_of(README)
    # The first goes on for ever as it is printed.
    follows = follows.replace("changes(resume", "changes(until='now', resume")
    names: dict[str, object] = {"__name__": "example"}
    for example in (follows, cuts):
        assert TARGET in example
        exec(example.replace(TARGET, server.target), names)
    changed, cut = capsys.readouterr().out.splitlines()
    assert changed.endswith("1 set b'user:2' b'Grace'")
    assert cut == "1 rows as of the cut"
    assert (tmp_path / "position").exists()
    with Client(server.target) as client:
        assert client.admin.cuts("default") == []


def test_the_requests_for_grpcurl_bring_rows(server_process: Callable[..., RunningServer]) -> None:
    server = server_process()
    with Client(server.target) as client:
        result = client.bucket().set(b"user:1", b"Ada")
    requests = re.findall(r"^ *'(\{.*\})'", README, re.MULTILINE)
    assert len(requests) == 2
    said = [json_format.Parse(text, stream_pb2.FollowRequest()) for text in requests]
    assert said[1].start.partitions[0].partition == result.partition
    with grpc.insecure_channel(server.target) as channel:
        call = stream_grpc.ChangeStreamServiceStub(channel).Follow(staying(said))
        rows = next(m.frame.plain_runs[0].rows for m in call if m.frame.plain_runs)
        assert [(row.key, row.value) for row in rows] == [(b"user:1", b"Ada")]
        call.cancel()
