"""``upr-backup verify --against-server``: what is damaged beneath right checksums, and what only looks like it."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.cli.test_check import run_admin
from tests.spark.restoring import Source, document, source, upr_backup
from upr_backup import rows as point_module
from upr_backup.repository import LocalStorage
from upr_backup.repository.documents import Manifest, seal, sha256, unseal
from upr_client import Client
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.partitioning import partition_of


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Source]:
    """A repository of two backups and its server."""
    with source(tmp_path, "--tombstone-age", "0", "--purge-hold", "0") as known:
        yield known


@pytest.fixture
def copied(shared_source: Source, tmp_path: Path) -> Source:
    """A server that no test changes, and a copy of its repository."""
    repository = tmp_path / "copy"
    shutil.copytree(shared_source.repository, repository)
    return Source(shared_source.server, repository)


def compare(made: Source, *options: str) -> tuple[int, Any, str]:
    """Run the command; return its status, what it says of the comparison, and stderr."""
    done = upr_backup(made.repository, "verify", "--against-server", "--json", *options)
    return done.exit_code, document(done).get("against_server"), done.stderr


@pytest.mark.long
def test_an_equal_server_and_one_with_newer_writes(
    made: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told, _ = compare(made)
    # Of 3100 rows 429 are deletions.
    assert (code, told["keys"], told["undecided"]) == (0, 3100 - 429, 0)
    assert told["partitions"] == 1024
    real = point_module.grouped
    monkeypatch.setattr("upr_backup.verify.grouped", lambda sizes: real(sizes, 50_000))
    # A failover record above what the backup has changes nothing.
    made.server.kill()
    made.server.start()
    made.write([(b"key:%d" % n, b"third") for n in range(0, 3000, 5)])
    made.write([(b"key:%d" % n, None) for n in range(2, 3000, 5)])
    made.write([(b"another:%d" % n, b"x" * 100) for n in range(500)])
    made.write([(b"new:0", None), (b"new:0", b"once more")])
    code, told, _ = compare(made)
    assert (code, told["keys"], told["differences"]) == (0, 3100 - 429, [])
    plain = upr_backup(made.repository, "verify", "--against-server")
    assert "2671 keys in " in plain.stdout
    with Client(made.server.target) as client:
        assert client.admin.cuts("default") == []


def test_deletions_that_were_purged_are_no_difference(made: Source) -> None:
    deleted = [b"key:%d" % n for n in range(0, 120, 2)]
    made.write([(key, None) for key in deleted])
    # The newest row of a partition stays.
    made.write([(b"later:%d" % n, b"") for n in range(2000)])
    made.server.terminate()
    # Only what is stored is purged, and stopping stores everything.
    made.server.start()
    with Client(made.server.target) as client:
        purged = client.admin.purge("default", sorted(set(map(partition_of, deleted))))
        assert any(one.purged for one in purged)
    code, told, _ = compare(made)
    assert (code, told["differences"]) == (0, [])
    assert told["undecided"] > 0


def rewritten(made: Source, change: Callable[[Any], Any], number: int = 2) -> None:
    """Change the rows of a backup's file, and make file and manifest right about it, checksums and all."""
    storage = LocalStorage(made.repository)
    name = f"chain/{number:010d}.json"
    manifest = Manifest.from_json(unseal(storage.read(name), name), name)
    (file,) = manifest.files
    path = made.repository / file.path
    table = change(pq.read_table(path))
    path.unlink()
    pq.write_table(table, path, write_page_checksum=True, use_dictionary=["op"])
    data = path.read_bytes()
    files = (file._replace(bytes=len(data), sha256=sha256(data), rows=table.num_rows),)
    partitions = table.column("partition").to_pylist()
    lengths = pc.add(
        pc.binary_length(table.column("key")),
        pc.fill_null(pc.binary_length(table.column("value")), 0),
    ).to_pylist()
    entries = {}
    for partition, entry in manifest.entries.items():
        sizes = [n for p, n in zip(partitions, lengths, strict=True) if p == partition]
        entries[partition] = entry._replace(
            rows=len(sizes), data_bytes=sum(sizes), file=0 if sizes else None
        )
    damaged = dataclasses.replace(manifest, files=files, entries=entries)
    (made.repository / name).unlink()
    assert storage.put_if_absent(name, seal(damaged.to_json()))


def without(table: Any, key: bytes) -> Any:
    return table.filter(pc.not_equal(table.column("key"), pa.scalar(key, pa.binary())))


def replaced(table: Any, key: bytes, column: str, value: Any) -> Any:
    at = table.column("key").to_pylist().index(key)
    values = table.column(column).to_pylist()
    values[at] = value
    index = table.schema.get_field_index(column)
    return table.set_column(
        index, table.schema.field(index), pa.array(values, table.schema.types[index])
    )


def added(table: Any) -> Any:
    """Return the table with a key that nobody wrote, in the partition of another one, at an unused seqno."""
    partition = partition_of(b"key:7")
    own = [
        s
        for p, s in zip(*(table.column(n).to_pylist() for n in ("partition", "seqno")), strict=True)
        if p == partition
    ]
    key = next(b"f%d" % n for n in range(10_000) if partition_of(b"f%d" % n) == partition)
    row = table.slice(table.column("key").to_pylist().index(b"key:7"), 1)
    row = replaced(row, b"key:7", "key", key)
    assert max(own) > 0
    kept = without(table, b"key:7")
    return pa.concat_tables([kept, row]).sort_by(
        [("partition", "ascending"), ("seqno", "ascending")]
    )


DAMAGE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda table: replaced(table, b"key:7", "value", b"Second 7"), "another value"),
    (
        lambda table: replaced(replaced(table, b"key:7", "value", None), b"key:7", "op", "delete"),
        "are deleted in one",
    ),
    (
        lambda table: replaced(replaced(table, b"key:8", "value", b"x"), b"key:8", "op", "set"),
        "are deleted in one",
    ),
    (lambda table: without(table, b"key:7"), "another seqno"),
    (lambda table: without(table, b"new:7"), "are not in the backup"),
    (added, "are not at the server"),
]


@pytest.mark.parametrize(
    ("change", "words"),
    DAMAGE,
    ids=["value", "set as delete", "delete as set", "older version", "missing", "invented"],
)
def test_damage_beneath_right_checksums_is_found(
    copied: Source, change: Callable[[Any], Any], words: str
) -> None:
    rewritten(copied, change)
    assert upr_backup(copied.repository, "verify", "--full").exit_code == 0
    code, told, stderr = compare(copied)
    assert code == 11
    assert any(words in line for line in told["differences"]), told
    assert "different: partitions" in stderr


def test_a_lost_range_is_found(copied: Source) -> None:
    """A backup that says it reaches further than what was read."""
    rewritten(copied, lambda table: table.filter(pc.less(table.column("partition"), 512)))
    assert upr_backup(copied.repository, "verify", "--full").exit_code == 0
    code, told, _ = compare(copied)
    assert code == 11
    assert {
        line.split(": ", 1)[1].split(" ", 1)[1].split(";")[0] for line in told["differences"]
    } == {
        "keys have another seqno than at the server",
        "keys are not in the backup",
    }


@pytest.mark.long
def test_a_server_that_rolled_back_is_not_comparable(made: Source) -> None:
    server = made.server
    server.terminate()
    copy = server.folder / "copy"
    shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    server.start()
    keys = [b"later:%d" % n for n in range(50)]
    made.write([(key, b"") for key in keys])
    made.backup()
    server.terminate()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    partitions = sorted(set(map(partition_of, keys)))
    # Taken at its word, the copy has no record of what is missing from it.
    server.options.append("--data-moved")
    server.start()
    server.options.remove("--data-moved")
    code, told, stderr = compare(made)
    assert (code, told["differences"], "the server ends before that" in stderr) == (10, [], True)
    assert [one["partition"] for one in told["not_comparable"]] == partitions
    server.terminate()
    assert run_admin("restore-copy", "--yes", server.data).exit_code == 0
    server.start()
    code, told, stderr = compare(made)
    assert (code, told["differences"]) == (10, [])
    assert [one["partition"] for one in told["not_comparable"]] == partitions
    assert "rolled back since" in stderr
    assert stderr.count("warning: ") == 6
    # What rolled back is as little comparable when other mutations have the seqnos now.
    made.write([(key, b"again") for key in keys])
    assert compare(made)[0] == 10


def test_another_bucket_is_not_comparable(made: Source) -> None:
    with Client(made.server.target) as client:
        client.admin.drop_bucket("default")
        client.admin.create_bucket("default")
    code, told, stderr = compare(made)
    assert (code, told["partitions"], len(told["not_comparable"])) == (10, 0, 1024)
    assert "the bucket is another one" in stderr
    done = upr_backup(made.repository, "verify", "--against-server")
    assert done.stdout == "backup 2: nothing was compared with the server\n"
    with Client(made.server.target) as client:
        client.admin.drop_bucket("default")
    assert upr_backup(made.repository, "verify", "--against-server").exit_code == 3


def test_a_merged_backup_is_compared(copied: Source) -> None:
    merged = upr_backup(copied.repository, "merge", "--to", "2")
    assert merged.exit_code == 0, merged.stderr
    code, told, _ = compare(copied)
    assert (code, told["keys"], told["differences"]) == (0, 3100 - 429, [])


def test_bad_input_is_one_line(copied: Source) -> None:
    gone = upr_backup(copied.repository, "verify", "--against-server", "--target", "127.0.0.1:1")
    assert (gone.exit_code, "is the server running" in gone.stderr) == (5, True)
    shutil.rmtree(copied.repository / "chain")
    shutil.rmtree(copied.repository / "data")
    empty = upr_backup(copied.repository, "verify", "--against-server")
    assert (empty.exit_code, empty.stderr) == (
        3,
        "error: there is no backup yet ('backup' takes one)\n",
    )
