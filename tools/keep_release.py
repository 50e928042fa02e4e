"""Keep what a release writes on disk and speaks on the wire, for the tests of those that come after it.

``.venv/bin/python -m tools.keep_release VERSION`` writes into ``tests/packaging/releases/VERSION``:

- ``directory.tar.xz``: a data directory with rows, deletions, a large value, a cut, consumers, producers, a compressed bucket
  with a quota, failover logs of several records, and rows that are in the journal alone, because its server was killed.
- ``contents.json``: what the server answered about it.
- ``promoted.tar.xz``: a data directory of a server that was replaced, came back as a replica, undid what nobody else had, and was
  promoted; with a group's positions; stopped cleanly, so that its proof holds where it is said to have been moved.
- ``promoted.json``: what that server answered.
- ``wire.binpb``: the descriptors of the wire, as a FileDescriptorSet.

What is there is not replaced: who wrote a release's directories cannot write them anew.
"""

import argparse
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tests.harness import RunningServer, wait_until
from tests.replica.sets import counted, is_active, wait_until_counted, wait_until_equal
from upr.storage.undone import undone_files
from upr_client import Client, Group, ServerPositions
from upr_client.lowlevel import write_blocks
from upr_client.types import Bucket
from upr_protocol.block import build_blocks
from upr_protocol.wire.v1 import (
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
    replica_service_pb2,
    types_pb2,
)

RELEASES = Path(__file__).resolve().parent.parent / "tests" / "packaging" / "releases"
KEYS = [f"user:{number}".encode() for number in range(300)]
ONCE = "loaded once"
"""Name of the producer whose blocks may be sent again."""
_PARTS = (
    types_pb2,
    admin_service_pb2,
    change_stream_service_pb2,
    key_value_service_pb2,
    replica_service_pb2,
)


def described_wire() -> FileDescriptorSet:
    """Return the descriptors of the wire that this program speaks."""
    found = FileDescriptorSet()
    for part in _PARTS:
        part.DESCRIPTOR.CopyToProto(found.file.add())
    return found


def load_once(bucket: Bucket) -> list[list[int]]:
    """Write the rows of the producer ONCE, or have them recognised; return partition, start, end and id of its runs."""
    keys = [b"once:%d" % number for number in range(50)]
    written = write_blocks(bucket, build_blocks(keys, [b"1"] * 50), once=ONCE)
    return [list(run) for run in written.runs]


def contents(client: Client, name: str) -> dict[str, object]:
    """Return all that a bucket has, in plain JSON: what a release must find as the one before it left it."""
    bucket, admin = client.bucket(name), client.admin
    rows: dict[str, tuple[int, int, str, int, str | None]] = {}
    with bucket.changes(until="now") as changes:
        for batch in changes.batches():
            for partition, seqno, op, key, value in batch.changes:
                text = None if value is None else value[:8].decode()
                rows[key.decode()] = (partition, seqno, op, len(value or b""), text)
    (info,) = [one for one in admin.buckets() if one.name == name]
    held = sorted({row[0] for row in rows.values()})
    return {
        "bucket": [f"{info.version:016x}", info.compression, info.quota_bytes],
        "rows": dict(sorted(rows.items())),
        "failover_logs": {
            str(partition): [[f"{one.failover_id:016x}", one.seqno] for one in log.records]
            for partition, log in admin.failover_logs(name).items()
            if partition in held
        },
        "consumers": {
            one.name: {
                str(partition): [f"{place.failover_id:016x}", place.seqno]
                for partition, place in one.positions.items()
                if partition in held
            }
            for one in admin.consumers(name, with_positions=True)
        },
        "cuts": {
            cut.name: {
                str(partition): [f"{pin.failover_id:016x}", pin.seqno]
                for partition, pin in cut.pins.items()
                if partition in held
            }
            for cut in admin.cuts(name, with_pins=True)
        },
    }


def _write(client: Client, round_number: int) -> None:
    for name in ("default", "packed"):
        value = f"value {round_number}, {'of some length, ' * 10}".encode()
        client.bucket(name).write_many([(key, value) for key in KEYS])


def _consume(client: Client) -> None:
    """Have a consumer keep its positions in the server, at all that is there."""
    with client.bucket().changes(resume=ServerPositions("indexer"), until="now") as changes:
        for _ in changes.batches():
            pass


def _fill(server: RunningServer) -> dict[str, object]:
    """Give a server's directory a history, kill it, and return what it had."""
    server.options = ["--flush-seconds", "0.1"]
    with Client(server.start().target) as client:
        client.admin.create_bucket("packed", compression="zstd", quota_bytes=2**30)
        _write(client, 1)
        load_once(client.bucket())
        client.bucket().set(b"large", b"x" * 200_000)
        for key in KEYS[::10]:
            client.bucket().delete(key)
        _consume(client)
        wait_until(
            lambda: not any(one.tail_bytes for one in client.admin.status().buckets), "a flush"
        )
    server.kill()
    server.options = ["--flush-seconds", "1h"]
    with Client(server.start().target) as client:
        _write(client, 2)
        client.admin.create_cut("default", "kept", lease=30 * 24 * 3600)
        for key in KEYS[::7]:
            client.bucket().delete(key)
        found: dict[str, object] = {name: contents(client, name) for name in ("default", "packed")}
        found["once"] = load_once(client.bucket())
    server.kill()
    return found


def standing(client: Client, data: Path) -> dict[str, object]:
    """Return what a server that was promoted has beside its rows: its place in its set, and what it undid."""
    known = client.admin.topology()
    return {
        "set": [known.replica_set, known.directory, known.active, known.epoch, known.waiting],
        "undone": sorted(
            [row["partition"], row["seqno"], row["key"], row["value"]]
            for one in undone_files(data)
            for row in one.rows()
        ),
        "bucket": contents(client, "default"),
    }


def _read_as_a_group(client: Client) -> None:
    """Have a member of a group read 50 values of the second round."""
    newest: set[bytes] = set()
    with client.bucket().changes(resume=Group("readers")) as changes:
        for batch in changes.batches():
            newest |= {key for _, _, _, key, value in batch.changes if value == b"2"}
            if len(newest) == 50:
                break


def _is_alone(client: Client) -> bool:
    return not any(one.reached for one in client.admin.topology().members if not one.active)


def _promote(server: RunningServer) -> dict[str, object]:
    """Have a server be replaced, come back, and be active again; stop it cleanly, and return what it had."""
    folder = server.folder / "other"
    folder.mkdir()
    other = RunningServer(folder)
    try:
        with Client(server.start().target) as client:
            client.bucket().write_many([(key, b"1") for key in KEYS[:100]])
            other.options = ["--replicate-from", server.target]
            other.start()
            wait_until_counted([server, other], server)
            assert other.terminate() == 0
            client.bucket().write_many([(b"alone:%d" % number, b"1") for number in range(5)])
        server.kill()
        with Client(other.start().target) as client:
            client.admin.promote(force=True)
            server.options = ["--replicate-from", other.target]
            server.start()
            wait_until_counted([server, other], other)
        with Client(server.target) as client:
            client.admin.promote(takeover=True)
            wait_until(
                lambda: not is_active(other) and other.target in counted(server.target), "a set"
            )
            client.bucket().write_many([(key, b"2") for key in KEYS[:50]])
            _read_as_a_group(client)
            wait_until_equal([server, other])
            assert other.terminate() == 0
            wait_until(lambda: _is_alone(client), "the other server is away")
            client.admin.forget_server(other.target)
            found = standing(client, server.data)
        assert server.terminate() == 0
        return found
    finally:
        other.close()


def _keep_directory(
    folder: Path, directory: str, told: str, fill: Callable[[RunningServer], dict[str, object]]
) -> None:
    """Write a data directory, and what its server answered, unless they are there."""
    # It is written last.
    if (folder / told).exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        server = RunningServer(Path(scratch))
        try:
            found = fill(server)
        finally:
            server.close()
        with tarfile.open(folder / directory, "w:xz") as archive:
            for file in sorted(server.data.rglob("*")):
                if file.is_file() and file.name != "lock":
                    archive.add(file, file.relative_to(server.data))
    (folder / told).write_text(json.dumps(found, separators=(",", ":")) + "\n")


def keep(version: str) -> Path:
    """Write what is not there yet in the folder of a release, and return the folder."""
    folder = RELEASES / version
    folder.mkdir(parents=True, exist_ok=True)
    _keep_directory(folder, "directory.tar.xz", "contents.json", _fill)
    _keep_directory(folder, "promoted.tar.xz", "promoted.json", _promote)
    wire = folder / "wire.binpb"
    if not wire.exists():
        wire.write_bytes(described_wire().SerializeToString(deterministic=True))
    return folder


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reader.add_argument("version", help="of the release, as in pyproject.toml")
    folder = keep(reader.parse_args().version)
    for file in sorted(folder.iterdir()):
        print(f"{file.relative_to(RELEASES)}  {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
