"""The examples of the guide and of the project's README run as they are printed, against a real server."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf import json_format

import upr_client
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
    assert (tmp_path / "users.positions").exists()


@pytest.mark.parametrize("module", [upr_client, admin, errors])
def test_every_class_that_a_user_meets_is_named(module: ModuleType) -> None:
    assert set(module.__all__) - set(re.findall(r"\w+", GUIDE)) == set()


def headings_of(text: str) -> set[str]:
    return {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, re.M)}


def test_every_heading_that_is_named_is_there() -> None:
    for text in (GUIDE, WIRE):
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings_of(text)
    named = re.findall(r"\]\(\S*protos/README\.md#([^)]+)\)", README + GUIDE)
    assert named
    assert set(named) <= headings_of(WIRE)


def test_the_example_of_the_project_runs(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = examples_of(README)
    assert TARGET in example
    # As it is printed it never ends.
    ending = example.replace("changes(resume", "changes(until='now', resume")
    exec(ending.replace(TARGET, target), {"__name__": "example"})
    (changed,) = capsys.readouterr().out.splitlines()
    assert changed.endswith("1 set b'user:2' b'Grace'")
    assert (tmp_path / "position").exists()


def test_the_requests_for_grpcurl_bring_rows(target: str) -> None:
    with Client(target) as client:
        result = client.bucket().set(b"user:1", b"Ada")
    requests = re.findall(r"^ *'(\{.*\})'", README, re.MULTILINE)
    assert len(requests) == 2
    said = [json_format.Parse(text, stream_pb2.FollowRequest()) for text in requests]
    assert said[1].start.partitions[0].partition == result.partition
    with grpc.insecure_channel(target) as channel:
        call = stream_grpc.ChangeStreamServiceStub(channel).Follow(staying(said))
        rows = next(m.frame.plain_runs[0].rows for m in call if m.frame.plain_runs)
        assert [(row.key, row.value) for row in rows] == [(b"user:1", b"Ada")]
        call.cancel()


def test_the_requests_for_grpcurl_write_rows(target: str) -> None:
    requests = re.findall(r"^ *'(\{.*\})'", WIRE, re.MULTILINE)
    said = [json_format.Parse(text, kv_pb2.WriteRequest()) for text in requests]
    with grpc.insecure_channel(target) as channel:
        answers = list(kv_grpc.KeyValueServiceStub(channel).Write(iter(said)))
    assert [answer.WhichOneof("message") for answer in answers] == ["opened", "result"]
    assert not answers[1].result.HasField("refused")
    with Client(target) as client, client.bucket().changes(until="now") as changes:
        rows = {(c.key, c.op, c.value) for batch in changes.batches() for c in batch.changes}
    assert rows == {(b"user:1", "set", b"Ada"), (b"user:2", "delete", None)}
