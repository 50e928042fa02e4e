"""``upr-admin check`` and ``upr-admin restore-copy`` on directories that a real server left."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.storage.closed import NEVER, Closed, block_of
from tests.storage.stored_blocks import consumers_of
from upr.cli import admin
from upr.service.buckets.catalog import create_bucket
from upr.storage.directory import DataDirectory
from upr.storage.journal import _HEADER, _record_at
from upr.storage.keyspace import ConsumerRow, CutRow, Pin
from upr_client import Client, Only
from upr_protocol.limits import ADMIN_SOCKET
from upr_protocol.partitioning import partition_of


def run_admin(*arguments: object) -> Result:
    return CliRunner().invoke(admin.main, [str(a) for a in arguments])


def failed(*arguments: object) -> tuple[int, str]:
    """The exit status and the one line of an error."""
    done = run_admin(*arguments)
    return done.exit_code, done.stderr


def write(server: RunningServer, count: int, text: str = "value") -> None:
    with Client(server.target) as client:
        bucket = client.bucket("default")
        for first in range(0, count, 500):
            rows = [(b"key %d" % i, f"{text} {i}".encode()) for i in range(first, first + 500)]
            bucket.write_many(rows)


@pytest.mark.long
def test_a_server_that_was_stopped_or_killed_leaves_a_directory_that_is_fine(
    server_process: StartServer,
) -> None:
    server = server_process("--tail-bytes", "50000")
    write(server, 1000)
    refused, words = failed("check", server.data)
    assert (refused, words.count("\n")) == (2, 1)
    assert "is in use" in words
    assert server.terminate() == 0
    result = run_admin("check", server.data)
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert result.stdout.startswith("bucket default: fine: 1000 seqnos in ")

    server.start()
    write(server, 1000, "another")
    server.kill()
    assert run_admin("check", server.data).exit_code == 0
    journal = sorted(server.data.glob("buckets/*/journal/*.journal"))[-1]
    data, size = journal.read_bytes(), _HEADER.size
    while (record := _record_at(data, size)) is not None:
        size = record[1]
    assert not data[size:].strip(b"\0"), "behind the records is room"
    with journal.open("r+b") as file:
        file.seek(size)
        file.write(b"\xf5UR\xfa\x01")
    result = run_admin("check", server.data, "--json")
    assert result.exit_code == 0
    (bucket,) = json.loads(result.stdout)["buckets"]
    (finding,) = bucket["findings"]
    assert (finding["severity"], finding["offset"]) == ("note", size)
    assert finding["file"] == f"journal/{journal.name}"
    server.start()
    assert server.terminate() == 0
    assert run_admin("check", server.data).exit_code == 0


def test_damage_is_told_with_its_place_and_with_what_can_be_read(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    closed.put(block_of(7, 0, 10), block_of(7, 12, 20))
    closed.put(block_of(8, 0, 10))
    result = run_admin("check", closed.path)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "damage: bucket default, partition 7, seqnos 11 to 12: no block tells of these seqnos",
        "readable: bucket default, partition 7: seqnos 1 to 10",
        "bucket default: damaged: 1 findings in 1 partitions",
    ]
    assert "from a replica or a backup" in result.stderr
    assert run_admin("check", closed.path, "--partitions", "8-1023").exit_code == 0
    document = json.loads(run_admin("check", closed.path, "--json").stdout)
    assert document["damaged"] is True
    assert [f["partition"] for f in document["buckets"][0]["findings"]] == [7]


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_part_in_a_set_that_no_server_can_read_is_told(text: str, tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    (closed.path / "owner.json").write_text(text)
    result = run_admin("check", closed.path)
    assert result.exit_code == 2
    # What can be checked without it is.
    assert result.stdout == "bucket default: fine: 0 seqnos in 0 partitions\n"
    assert "owner.json is malformed" in result.stderr


def test_a_truncated_file_ends_the_server_with_one_line(server_process: StartServer) -> None:
    server = server_process()
    write(server, 500)
    assert server.terminate() == 0
    (file,) = server.data.glob("buckets/*/store/data.mdb")
    os.truncate(file, file.stat().st_size // 2)
    server.launch()
    assert server.wait() == 1
    (last,) = [line for line in server.log_text().splitlines() if "its end is missing" in line]
    assert last.startswith(f"error: {file.relative_to(server.data / 'buckets')} has ")


@pytest.mark.parametrize("gone", [False, True])
def test_a_store_that_is_empty_or_gone_is_damage(server_process: StartServer, gone: bool) -> None:
    server = server_process()
    assert server.terminate() == 0
    (file,) = server.data.glob("buckets/*/store/data.mdb")
    file.unlink()
    if not gone:
        file.touch()
    server.launch()
    assert server.wait() == 1
    last = server.log_text().splitlines()[-1]
    assert last.startswith(
        f"error: {file.relative_to(server.data / 'buckets')} has no identity of a bucket"
    )
    assert last.endswith("(restore the data directory from a replica or a backup)")


def logs(server: RunningServer) -> dict[int, Any]:
    with Client(server.target) as client:
        return dict(client.admin.failover_logs("default"))


def test_clients_of_a_copy_that_was_restored_roll_back_to_its_record(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    write(server, 500)
    assert server.terminate() == 0
    copy = tmp_path / "copy"
    shutil.copytree(server.data, copy, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    server.start()
    before = logs(server)
    write(server, 500, "lost")
    assert server.terminate() == 0
    shutil.rmtree(server.data)
    shutil.copytree(copy, server.data, ignore=shutil.ignore_patterns(ADMIN_SOCKET))

    result = run_admin("restore-copy", "--yes", server.data, "--json")
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)
    assert len(document["records"]) == 1024
    assert run_admin("check", server.data).exit_code == 0
    server.start()
    after = logs(server)
    told = {r["partition"]: (int(r["failover_id"], 16), r["seqno"]) for r in document["records"]}
    with Client(server.target) as client:
        highs = {p.partition: p.high_seqno for p in client.admin.partitions("default")}
    for partition, log in after.items():
        assert log.to_pairs() == [*before[partition].to_pairs(), told[partition]]
        assert log.newest.seqno == highs[partition]
    assert server.terminate() == 0

    again = run_admin("restore-copy", "--yes", server.data)
    assert again.exit_code == 0
    assert again.stdout == (
        "bucket default: new failover records in 1024 partitions, 0 are not active and keep theirs\n"
    )
    server.start()
    assert {len(log) for log in logs(server).values()} == {3}


def test_what_lies_above_the_marker_and_speaks_of_the_future_goes(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    closed.put(block_of(3, 0, 10))
    closed.put(block_of(5, 0, 10), state=2)
    closed.journal((1, [block_of(3, 10, 12)]), (2, [block_of(3, 12, 15, horizon=20)]))
    old = closed.row(3).log.newest.failover_id
    store = closed.store()
    store.put_consumers(
        {
            (b"behind", 3): ConsumerRow(1, old, 12, 1),
            (b"ahead", 3): ConsumerRow(1, old, 13, 1),
            (b"replica", 5): ConsumerRow(1, old, 99, 1),
        }
    )
    store.put_cuts({b"nightly": CutRow(1, NEVER, 1, {3: Pin(old, 10)})})
    store.close()

    result = run_admin("restore-copy", "--yes", closed.path)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "bucket default: new failover records in 1023 partitions, 1 are not active and keep theirs",
        "released: nightly, a cut of bucket default",
        "bucket default: consumer 'ahead' was at 13 in partition 3, which the copy does not have: removed",
    ]
    row = closed.row(3)
    assert (row.stored_high, row.log.newest.seqno, len(row.log)) == (12, 12, 2)
    assert len(closed.row(5).log) == 1
    store = closed.store()
    assert store.cuts() == {}
    assert {name: list(rows) for name, rows in consumers_of(store).items()} == {
        b"behind": [3],
        b"replica": [5],
    }
    store.close()
    assert run_admin("check", closed.path).exit_code == 0


def test_a_bucket_that_cannot_be_restored_leaves_the_others_restored(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    directory = DataDirectory(closed.path)
    # On both sides of the one that is fine.
    folders = [create_bucket(directory, f"b{n}", version=n) for n in (1, 2**64 - 1)]
    directory.close()
    for folder in folders:
        (folder / "store" / "data.mdb").write_text("junk")
    result = run_admin("restore-copy", "--yes", closed.path)
    assert result.exit_code == 1
    assert result.stdout.startswith("bucket default: new failover records in 1024 partitions")
    assert result.stderr.count("error: ") == 2
    assert all(f"not restored: bucket {folder.name}\n" in result.stderr for folder in folders)
    assert len(closed.row(0).log) == 2


@pytest.mark.parametrize(("answer", "records"), [("n\n", 1), ("y\n", 2)])
def test_it_asks_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, records: int
) -> None:
    closed = Closed(tmp_path / "data")
    monkeypatch.setattr("upr_cli_kit.output.can_ask", lambda: True)
    result = CliRunner().invoke(admin.main, ["restore-copy", str(closed.path)], input=answer)
    assert "Go on?" in result.stderr
    assert len(closed.row(0).log) == records


def test_it_changes_nothing_where_nobody_can_be_asked(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    code, words = failed("restore-copy", closed.path)
    assert code == 2
    assert "give --yes" in words
    assert len(closed.row(0).log) == 1


def test_what_is_not_served_is_not_checked(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    closed.put(block_of(7, 0, 10))
    dropped = closed.bucket.with_suffix(".dropped")
    shutil.copytree(closed.bucket, dropped)
    shutil.rmtree(dropped / "journal")
    shutil.copytree(closed.bucket, closed.bucket.with_name("of yesterday"))
    (closed.bucket.parent / "0123456789abcdef.new").mkdir()
    result = run_admin("check", closed.path)
    assert (result.exit_code, result.stdout, result.stderr) == (
        0,
        "bucket default: fine: 10 seqnos in 1 partitions\n",
        "buckets/of yesterday is not the folder of a bucket: it is not checked, and no server serves it\n",
    )


def test_a_folder_of_a_bucket_that_was_renamed_is_told_by_the_server(
    server_process: StartServer,
) -> None:
    server = server_process()
    assert server.terminate() == 0
    (folder,) = server.data.glob("buckets/*")
    folder.rename(folder.with_suffix(".bak"))
    server.start()
    assert f"{folder.name}.bak" in server.log_text()


def test_a_stray_file_in_the_journal_is_no_damage(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    shutil.copy(closed.journal_files[0], closed.journal_files[0].with_name("copy.journal"))
    result = run_admin("check", closed.path)
    assert (result.exit_code, result.stderr) == (2, "")
    assert result.stdout.startswith("bucket default: not checked: ")
    assert "move it out of the folder" in result.stdout


@pytest.mark.parametrize("command", [("check",), ("restore-copy", "--yes")])
def test_a_file_in_the_place_of_the_buckets_is_told(tmp_path: Path, command: list[str]) -> None:
    closed = Closed(tmp_path / "data")
    shutil.rmtree(closed.bucket.parent)
    closed.bucket.parent.touch()
    code, words = failed(*command, closed.path)
    assert (code, "buckets is a file; must be the folder" in words) == (2, True)


class MetDamageError(Exception):
    """Ends a follower that was told of damage."""


def met(line: str) -> None:
    if "STORAGE_ERROR" in line:
        raise MetDamageError


def test_a_damaged_block_that_a_follower_met_is_told_by_the_server(
    server_process: StartServer,
) -> None:
    server = server_process()
    write(server, 500)
    assert server.terminate() == 0
    (file,) = server.data.glob("buckets/*/store/data.mdb")
    data = file.read_bytes()
    # Copies of it on pages that are free again do not matter.
    file.write_bytes(data.replace(b"key 77", b"key 7x"))
    server.start()
    partition = partition_of(b"key 77")
    target = ("--target", server.target)
    with Client(server.target) as client:
        changes = client.bucket().changes(until="now", only=Only([partition]), on_status=met)
        # Without that it would be started again and again.
        with changes, pytest.raises(MetDamageError):
            list(changes.batches())
    (shown,) = json.loads(run_admin("partitions", str(partition), "--json", *target).stdout)
    assert shown["state"] == "active"
    assert shown["problem"]["reason"] == "DATA_DAMAGED"
    table = run_admin("partitions", str(partition), *target).stdout.splitlines()
    assert table[0].endswith("problem")
    assert table[1].endswith(shown["problem"]["message"])
    (bucket,) = json.loads(run_admin("status", "--json", *target).stdout)["buckets"]
    assert bucket["damaged_partitions"] == 1
    lines = [json.loads(line) for line in server.log_text().splitlines()]
    # Once, and with the bucket: partitions of all buckets have the same numbers.
    (damaged,) = [line for line in lines if line["event"] == "a partition is damaged"]
    (ended,) = [line for line in lines if line["event"] == "follow ended"]
    assert damaged["bucket"] == ended["bucket"] == "default"
