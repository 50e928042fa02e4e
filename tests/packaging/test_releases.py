"""What releases wrote is opened by this one, and what they said on the wire means the same."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.json_format import MessageToDict

import upr
from tests.harness import RunningServer
from tools.keep_release import RELEASES, contents, described_wire, load_once, standing
from upr_client import Client, ServerPositions

KEPT = sorted(folder.name for folder in RELEASES.iterdir())
ROOT = Path(__file__).resolve().parents[2]
FIRST = "0.1.0"
"""Release of which nothing is kept."""


def messages(
    found: FileDescriptorSet,
) -> Iterator[tuple[str, DescriptorProto]]:
    """Yield all messages with their full names, those within others too."""
    waiting = [(f".{file.package}", one) for file in found.file for one in file.message_type]
    while waiting:
        place, message = waiting.pop()
        name = f"{place}.{message.name}"
        yield name, message
        waiting += [(name, one) for one in message.nested_type]


def parts(found: FileDescriptorSet) -> dict[str, Any]:
    """Return all that a peer relies on: fields, values of enums and methods, by a name that says which."""
    told: dict[str, Any] = {}
    for name, message in messages(found):
        told[name] = "message"
        for one in message.field:
            meaning = MessageToDict(one)
            # The name is the key; how it is written in JSON follows from it.
            # Options, deprecated for one, change nothing on the wire.
            for of_text in ("jsonName", "name", "options"):
                meaning.pop(of_text, None)
            if "oneofIndex" in meaning:
                meaning["oneofIndex"] = message.oneof_decl[one.oneof_index].name
            told[f"{name}.{one.name}"] = meaning
        for enum in message.enum_type:
            told |= {f"{name}.{enum.name}.{one.name}": one.number for one in enum.value}
    for file in found.file:
        for enum in file.enum_type:
            place = f".{file.package}.{enum.name}"
            told |= {f"{place}.{one.name}": one.number for one in enum.value}
        for service in file.service:
            for method in service.method:
                meaning = MessageToDict(method)
                meaning.pop("options", None)
                told[f".{file.package}.{service.name}/{method.name}"] = meaning
    return told


def broken(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return what peers of the old wire would not find, or misread, on the new one."""
    there = parts(new)
    return [
        f"{name} was {meaning}; is {there.get(name, 'gone')}"
        for name, meaning in parts(old).items()
        if there.get(name) != meaning
    ]


def test_what_breaks_the_wire_is_found() -> None:
    wire = described_wire()
    assert {Path(file.name).name for file in wire.file} == {
        path.name for path in (ROOT / "protos" / "upr" / "v1").iterdir()
    }
    assert broken(wire, wire) == []
    for spoil in ("number", "type", "name", "label", "oneof", "enum", "method", "message"):
        changed = FileDescriptorSet()
        changed.CopyFrom(wire)
        file = next(f for f in changed.file if f.name.endswith("/change_stream_service.proto"))
        message = next(m for m in file.message_type if m.name == "HelloPartition")
        field = message.field[0]
        if spoil == "number":
            field.number = 99
        elif spoil == "type":
            field.type = field.TYPE_SINT32
        elif spoil == "name":
            field.name = "another"
        elif spoil == "label":
            field.label = field.LABEL_REPEATED
        elif spoil == "oneof":
            follow = next(m for m in file.message_type if m.name == "FollowRequest")
            next(one for one in follow.field if one.HasField("oneof_index")).ClearField(
                "oneof_index"
            )
        elif spoil == "enum":
            next(f for f in changed.file if f.enum_type).enum_type[0].value[1].number = 77
        elif spoil == "method":
            file.service[0].method[0].server_streaming ^= True
        else:
            file.message_type.remove(message)
        assert broken(wire, changed), spoil
        # What was added is no break.
        added = FileDescriptorSet()
        added.CopyFrom(wire)
        added.file[0].message_type[0].field.add(name="added", number=1000, type=5, label=1)
        added.file[0].message_type[0].field[0].options.deprecated = True
        next(f for f in added.file if f.service).service[0].method[0].options.deprecated = True
        assert broken(wire, added) == []


@pytest.mark.parametrize("version", KEPT)
def test_the_wire_of_a_release_is_spoken(version: str) -> None:
    kept = FileDescriptorSet.FromString((RELEASES / version / "wire.binpb").read_bytes())
    assert len(kept.file) >= 5
    assert broken(kept, described_wire()) == []


def test_every_release_is_kept() -> None:
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(released) - {FIRST} <= set(KEPT)
    # Also that of a development version: what a program calls itself is never that of directories that it does not open.
    assert upr.__version__ in KEPT


@pytest.mark.parametrize("version", KEPT)
def test_a_promoted_server_of_a_release_is_still_active_and_proven(
    version: str, tmp_path: Path
) -> None:
    server = RunningServer(tmp_path, "--data-moved")
    with tarfile.open(RELEASES / version / "promoted.tar.xz") as archive:
        archive.extractall(server.data, filter="data")
    told = json.loads((RELEASES / version / "promoted.json").read_text())
    assert told["set"][2]
    assert len(told["undone"]) == 5
    try:
        with Client(server.start().target) as client:
            # Failover logs too: where the proof counts, a start adds no record.
            assert json.loads(json.dumps(standing(client, server.data))) == told
            client.bucket().set(b"user:0", b"new")
            assert client.bucket().get(b"user:0") == b"new"
    finally:
        server.close()


@pytest.mark.parametrize("version", KEPT)
def test_the_directory_of_a_release_is_opened_and_gone_on_with(
    version: str, tmp_path: Path
) -> None:
    server = RunningServer(tmp_path)
    with tarfile.open(RELEASES / version / "directory.tar.xz") as archive:
        archive.extractall(server.data, filter="data")
    told = json.loads((RELEASES / version / "contents.json").read_text())
    once = told.pop("once")
    try:
        with Client(server.start().target) as client:
            for name, kept in told.items():
                found = json.loads(json.dumps(contents(client, name)))
                logs = found.pop("failover_logs")
                assert {n: v for n, v in kept.items() if n != "failover_logs"} == found
                # Its server was killed, so this start adds a record to each.
                assert {p: log[:-1] for p, log in logs.items()} == kept["failover_logs"]
            assert load_once(client.bucket()) == once
            with client.bucket().changes(resume=ServerPositions("indexer"), until="now") as new:
                assert len([change for batch in new.batches() for change in batch.changes]) > 100
            client.bucket().set(b"user:0", b"new")
            written = contents(client, "default")
        assert server.terminate() == 0
        with Client(server.start().target) as client:
            assert contents(client, "default") == written
            assert client.bucket().get(b"user:0") == b"new"
            assert (client.bucket("packed").get(b"user:1") or b"").startswith(b"value 2")
        assert server.terminate() == 0
    finally:
        server.close()
