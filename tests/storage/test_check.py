"""``check``: each contradiction is found, and what is lawful is not one."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.storage.closed import NEVER, Closed, block_of, filled
from tests.storage.stored_blocks import numbers_of, put_rows
from upr.storage import journal, keyspace
from upr.storage.check.contents import DAMAGE, NOTE, Finding
from upr.storage.check.directory import BucketReport, check_directory
from upr.storage.check.worker import Task, check_bucket
from upr.storage.directory import DataDirectory
from upr.storage.keyspace import (
    HASHED,
    ConsumerRow,
    CutRow,
    PartitionRow,
    Pin,
    ProducerRow,
    block_key,
    pack_hashes,
    partition_key,
)
from upr.storage.lmdb_pages import PageFile, check_length
from upr_protocol.errors import DataDamagedError, DataDirectoryError
from upr_protocol.failover import FailoverLog
from upr_protocol.wire.codec import encode_block


@pytest.fixture
def closed(tmp_path: Path) -> Closed:
    return Closed(tmp_path / "data")


def checked(closed: Closed, partitions: list[int] | None = None) -> BucketReport:
    return checked_at(closed.path, partitions)


def checked_at(data: Path, partitions: list[int] | None = None) -> BucketReport:
    """What the worker tells, without a process of its own."""
    (folder,) = (data / "buckets").iterdir()
    report = BucketReport(folder.name)
    wanted = list(range(1024)) if partitions is None else partitions
    check_bucket(Task(str(folder), wanted), lambda **line: report.take(line))
    return report


def only(report: BucketReport) -> Finding:
    (finding,) = report.findings
    return finding


def change(closed: Closed, table: bytes, key: bytes, value: bytes | None) -> None:
    """Write or remove a value behind the store's back."""
    with lmdb.open(str(closed.bucket / "store"), max_dbs=16, map_size=2**30) as env:
        db = env.open_db(table)
        with env.begin(write=True) as txn:
            if value is None:
                assert txn.delete(key, db=db)
            else:
                txn.put(key, value, db=db)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_new_directory_is_fine(closed: Closed) -> None:
    report = checked(closed)
    assert (report.name, report.findings, report.readable) == ("default", [], {})


def test_a_full_directory_is_fine_and_not_changed(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 5)
    before = contents(tmp_path)
    (report,) = check_directory(closed.path)
    assert report.findings == []
    assert len(report.readable) > 12
    assert contents(tmp_path) == before


def test_lawful_blocks_are_fine(closed: Closed) -> None:
    closed.put(
        # A stretch: two runs share the horizon of which only the second ends in a marker.
        block_of(3, 0, 10, horizon=20, seqnos=[2, 7]),
        block_of(3, 10, 20, seqnos=[15, 20]),
        block_of(3, 20, 30),
    )
    # Tombstones at or below the purge seqno may be gone, the one at a marker too.
    closed.put(block_of(4, 0, 10, seqnos=[]), purge_seqno=10)
    # A replica has not received the rest of a stretch yet.
    closed.put(block_of(5, 0, 10, horizon=90, seqnos=[1]), state=2)
    closed.journal((1, [block_of(3, 30, 31), block_of(4, 10, 12)]), (2, [block_of(3, 31, 40)]))
    report = checked(closed)
    assert report.findings == []
    assert report.readable == {3: [[0, 40]], 4: [[0, 12]], 5: [[0, 10]]}


def test_a_damaged_block_is_found_and_the_rest_can_be_read(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10), block_of(3, 10, 20), block_of(3, 20, 30))
    block = bytearray(encode_block(block_of(3, 10, 20)))
    block[-20] ^= 1
    change(closed, b"blocks", block_key(3, 20), bytes(block))
    report = checked(closed)
    finding = only(report)
    assert (finding.severity, finding.partition) == (DAMAGE, 3)
    assert (finding.above, finding.end) == (10, 20)
    assert report.readable == {3: [[0, 10], [20, 30]]}


BAD_BLOCKS: list[tuple[str, list[Any], dict[str, int], str]] = [
    ("gap", [block_of(3, 0, 10), block_of(3, 12, 20)], {}, "no block tells"),
    ("overlap", [block_of(3, 0, 10), block_of(3, 9, 20)], {}, "two blocks tell"),
    ("row ends before", [block_of(3, 0, 10)], {"stored_high": 9}, "the blocks end at 10"),
    ("row ends behind", [block_of(3, 0, 10)], {"stored_high": 11}, "the blocks end at 10"),
    ("marker", [block_of(3, 0, 10, seqnos=[1, 9])], {}, "the marker at 10 is not true"),
    ("horizon", [block_of(3, 0, 10, horizon=12, seqnos=[1])], {}, "the data ends at 10"),
    (
        "complete",
        [block_of(3, 0, 10)],
        {"complete": 9},
        "are (9, 10), of the blocks they are (10, 10)",
    ),
    ("horizon told", [block_of(3, 0, 10)], {"horizon": 12}, "are (10, 12), of the blocks they are"),
    ("purge", [block_of(3, 0, 10)], {"purge_seqno": 11}, "purge seqno is 11"),
    ("state", [block_of(3, 0, 10)], {"state": 9}, "its state is 9"),
]


@pytest.mark.parametrize(
    ("blocks", "row", "words"), [c[1:] for c in BAD_BLOCKS], ids=[c[0] for c in BAD_BLOCKS]
)
def test_contradicting_blocks_and_rows(
    closed: Closed, blocks: list[Any], row: dict[str, int], words: str
) -> None:
    closed.put(*blocks, **row)
    findings = checked(closed).findings
    assert any(words in finding.what for finding in findings), findings
    assert {finding.partition for finding in findings} == {3}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"rotten", "the index of its keys is damaged"),
        (pack_hashes(5, 0, 3, np.arange(3, dtype=np.uint32)), "the index of its keys is damaged"),
        (None, ""),
    ],
)
def test_an_index_that_is_not_of_its_block(closed: Closed, value: bytes | None, words: str) -> None:
    closed.put(block_of(5, 0, 3), block_of(5, 3, 6))
    change(closed, b"hashes", block_key(5, 3), value)
    # Another program wrote last: the next start drops all of it.
    assert checked(closed).findings == []
    vouch(closed)
    if value is None:
        assert checked(closed).findings == []
        return
    finding = only(checked(closed))
    assert words in finding.what
    assert (finding.partition, finding.above, finding.end) == (5, 0, 3)


def test_an_index_without_its_block(closed: Closed) -> None:
    closed.put(block_of(5, 0, 3))
    store = closed.store()
    store.put_flush([], {}, {})
    store.close()
    change(closed, b"hashes", block_key(5, 7), b"left over")
    vouch(closed)
    finding = only(checked(closed))
    assert (finding.partition, finding.end) == (5, 7)
    assert "no block" in finding.what


def vouch(closed: Closed) -> None:
    """Let the last transaction be one of a program that knows the index of keys."""
    with lmdb.open(str(closed.bucket / "store"), max_dbs=16, map_size=2**30) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(HASHED, keyspace.seal(txn.id().to_bytes(8, "little"), HASHED), db=meta)


def test_a_block_under_the_key_of_another(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10))
    change(closed, b"blocks", block_key(3, 10), encode_block(block_of(4, 0, 10)))
    assert "its key says 3 to 10" in only(checked(closed)).what


def test_a_key_that_is_no_block_key(closed: Closed) -> None:
    change(closed, b"blocks", b"\xff\xff\xff", b"?")
    assert "1 entries, 0 are blocks" in only(checked(closed)).what


def test_a_failover_record_above_the_data(closed: Closed) -> None:
    log = FailoverLog.born(5).with_record(6, 11)
    closed.put(block_of(3, 0, 10), log=log)
    assert "a record at 11" in only(checked(closed)).what


@pytest.mark.parametrize(
    "table", [b"partitions", b"cuts", b"consumers", b"producers", b"replaced", b"meta"]
)
def test_a_row_that_fails_its_checksum(closed: Closed, table: bytes) -> None:
    key = {
        b"partitions": partition_key(3),
        b"cuts": b"nightly",
        b"consumers": keyspace.consumer_key(b"me", 3),
        b"producers": keyspace.producer_key(b"me", 0),
        b"replaced": keyspace.producer_key(b"me", 0),
        b"meta": b"clean_shutdown_proof",
    }[table]
    change(closed, table, key, b"x" * 44)
    finding = only(checked(closed))
    assert "fails its checksum" in finding.what


def test_a_missing_row_and_a_missing_identity(closed: Closed) -> None:
    change(closed, b"partitions", partition_key(1000), None)
    finding = only(checked(closed))
    assert (finding.partition, finding.what) == (1000, "its row is missing")
    change(closed, b"meta", b"identity", None)
    report = checked(closed)
    assert "identity is missing" in report.findings[0].what
    assert report.name == ""


def test_a_bucket_in_the_folder_of_another(closed: Closed) -> None:
    os.rename(closed.bucket, closed.bucket.with_name("0123456789abcdef"))
    assert "the folder is 0123456789abcdef" in checked(closed).findings[0].what


def test_two_buckets_of_one_name(closed: Closed, tmp_path: Path) -> None:
    other = Closed(tmp_path / "other")
    shutil.copytree(other.bucket, closed.path / "buckets" / other.bucket.name)
    found = [report.findings for report in check_directory(closed.path)]
    assert sorted(map(len, found)) == [0, 1]
    assert "has the same name 'default'" in (found[0] + found[1])[0].what


def pin(closed: Closed, seqno: int, failover_id: int, expires: int = NEVER) -> None:
    store = closed.store()
    store.put_cuts({b"nightly": CutRow(1, expires, 1, {3: Pin(failover_id, seqno)})})
    store.close()


@pytest.mark.parametrize(
    ("seqno", "expires", "words"),
    [
        (10, NEVER, ""),
        (20, NEVER, ""),
        (15, NEVER, "pins 15, merged across"),
        (15, 5, ""),
        (5, NEVER, "pins 5, merged across"),
        (25, NEVER, "its history ends at 20"),
    ],
)
def test_a_cut_that_is_not_exact(closed: Closed, seqno: int, expires: int, words: str) -> None:
    closed.put(block_of(3, 0, 10), block_of(3, 10, 20))
    pin(closed, seqno, closed.row(3).log.newest.failover_id, expires)
    findings = checked(closed).findings
    assert [words in finding.what for finding in findings] == ([True] if words else [])


def test_a_cut_below_a_horizon_that_crosses_it(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10, horizon=20, seqnos=[1]), block_of(3, 10, 20))
    pin(closed, 10, closed.row(3).log.newest.failover_id)
    assert "(horizon 20)" in only(checked(closed)).what


def test_positions_above_the_data(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10))
    known = closed.row(3).log.newest.failover_id
    store = closed.store()
    store.put_consumers(
        {
            (b"fine", 3): ConsumerRow(1, known, 10, 1),
            (b"ahead", 3): ConsumerRow(1, known, 11, 1),
            # Of a history that was undone: lawful.
            (b"older", 3): ConsumerRow(1, known + 1, 99, 1),
        }
    )
    told = numbers_of({3: ProducerRow(1, known, 9, 12)}, 1)
    store.put_flush([], {}, {b"loader": told})
    store.close()
    words = [finding.what for finding in checked(closed).findings]
    assert words == [
        "consumer 'ahead' is at 11, the data ends at 10",
        "producer 'loader' is at 12, the data ends at 10",
    ]


def test_a_position_that_no_start_loads(closed: Closed) -> None:
    store = closed.store()
    store.put_consumers({(b"\xff", 3): ConsumerRow(1, 5, 0, 1)})
    store.close()
    assert "row of the consumers has the key" in only(checked(closed)).what


# The journal


def test_a_record_cut_short_is_a_note_and_is_left_alone(closed: Closed) -> None:
    closed.journal((1, [block_of(3, 0, 10)]), (2, [block_of(3, 10, 20)]))
    change(closed, b"meta", b"clean_shutdown_proof", None)
    (file,) = closed.journal_files
    os.truncate(file, file.stat().st_size - 3)
    before = file.read_bytes()
    report = checked(closed)
    finding = only(report)
    assert finding.severity == NOTE
    assert not report.damaged
    assert finding.file == f"journal/{file.name}"
    assert finding.offset is not None
    assert str(len(before) - finding.offset) in finding.what
    assert file.read_bytes() == before
    assert report.readable == {3: [[0, 10]]}


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", ["head", "payload"])
def test_a_damaged_record_in_the_middle(closed: Closed, place: str) -> None:
    change(closed, b"meta", b"clean_shutdown_proof", None)
    closed.journal((1, [block_of(3, 0, 10)]))
    (file,) = closed.journal_files
    begin = file.stat().st_size
    closed.journal((2, [block_of(4, 0, 10)]), (3, [block_of(5, 0, 10)]))
    flip(file, begin + (5 if place == "head" else 60))
    report = checked(closed)
    assert [(f.severity, f.offset) for f in report.findings[:1]] == [(DAMAGE, begin)]
    assert report.readable == {3: [[0, 10]], 5: [[0, 10]]}


def test_damage_in_the_last_record_is_more_than_a_kill_leaves(closed: Closed) -> None:
    change(closed, b"meta", b"clean_shutdown_proof", None)
    closed.journal((1, [block_of(3, 0, 10)]))
    (file,) = closed.journal_files
    for offset in (30, 60, file.stat().st_size - 1):
        flip(file, offset)
        finding = only(checked(closed))
        assert finding.severity == DAMAGE
        assert "power was lost, or they were damaged" in finding.what
        flip(file, offset)
    assert checked(closed).findings == []


def test_a_damaged_segment_header(closed: Closed) -> None:
    change(closed, b"meta", b"clean_shutdown_proof", None)
    closed.journal((1, [block_of(3, 0, 10)]))
    flip(closed.journal_files[0], 9)
    report = checked(closed)
    assert "header is damaged" in only(report).what
    assert report.readable == {3: [[0, 10]]}


@pytest.mark.parametrize(
    ("commits", "words"),
    [
        ([(1, [block_of(3, 10, 12)]), (3, [block_of(3, 12, 14)])], "commit 3 follows commit 1"),
        ([(1, [block_of(3, 11, 12)])], "goes on at seqno 11, what is there ends at 10"),
        ([(1, [block_of(3, 9, 12)])], "goes on at seqno 9, what is there ends at 10"),
        ([(1, [block_of(3, 10, 12, seqnos=[11])])], "the marker at 12 is not true"),
        ([(1, [block_of(3, 10, 12, horizon=13)])], "newer ones up to 13"),
    ],
)
def test_contradictions_in_the_journal(
    closed: Closed, commits: list[tuple[int, Any]], words: str
) -> None:
    closed.put(block_of(3, 0, 10))
    closed.journal(*commits)
    assert words in only(checked(closed)).what


def test_commits_that_do_not_count_are_left_out(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10), first_commit=2)
    closed.journal((1, [block_of(3, 10, 99)]), (2, [block_of(3, 10, 12)]))
    report = checked(closed)
    assert report.findings == []
    assert report.readable == {3: [[0, 12]]}


def test_a_proof_that_the_journal_contradicts(closed: Closed) -> None:
    closed.journal((1, [block_of(3, 0, 10)]))
    assert "everything was stored at shutdown" in only(checked(closed)).what
    # The proof that recovery writes says only that nothing was numbered since.
    store = closed.store()
    store.write_recovery({}, [], {}, np.zeros(1024, np.uint64))
    store.close()
    assert checked(closed).findings == []


def test_a_copy_without_its_journal_is_damage_and_the_original_is_not(
    closed: Closed, tmp_path: Path
) -> None:
    for file in closed.journal_files:
        file.unlink()
    assert checked(closed).findings == []
    copy = shutil.copytree(closed.path, tmp_path / "copy")
    assert "the journal has no segment" in only(checked_at(copy)).what


# The file


def with_pages(closed: Closed, change_it: Callable[[bytearray, PageFile], None]) -> None:
    with closing(PageFile(closed.data_file)) as file:
        data = bytearray(closed.data_file.read_bytes())
        change_it(data, file)
    closed.data_file.write_bytes(data)


def transaction_at(file: PageFile, number: int) -> int:
    return number * file.page_bytes + 16 + 24 + 2 * 48 + 8


def test_an_older_state_that_is_whole_in_itself_is_found(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 3)
    # No failed transaction leaves the number of a last page that is new.
    change(closed, b"meta", b"grown", bytes(10**5))

    def go_back(data: bytearray, file: PageFile) -> None:
        newest = file.chosen
        at = transaction_at(file, newest.number)
        data[at : at + 8] = struct.pack("<Q", newest.transaction - 2)

    with_pages(closed, go_back)
    report = checked(closed)
    assert any("list of free pages of" in f.what and f.severity == DAMAGE for f in report.findings)


def test_what_lmdb_leaves_of_a_failed_transaction_is_no_damage(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 3)
    before = closed.data_file.read_bytes()
    closed.store().put_quota(1)

    def fail(data: bytearray, file: PageFile) -> None:
        at = transaction_at(file, file.chosen.number)
        # As LMDB does where the meta page could not be written: the last page and the transaction that were there.
        data[at - 8 : at + 8] = before[at - 8 : at + 8]

    with_pages(closed, fail)
    finding = only(checked(closed))
    assert finding.severity == NOTE
    assert "of a transaction that failed" in finding.what


def test_a_server_does_not_go_back_to_an_older_state(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 3)

    def go_back(data: bytearray, file: PageFile) -> None:
        at = transaction_at(file, file.chosen.number)
        data[at] ^= 0x80

    with_pages(closed, go_back)
    with pytest.raises(DataDamagedError, match="not of two in a row"):
        closed.store()
    assert any("not of two in a row" in finding.what for finding in checked(closed).findings)


def test_a_pointer_to_an_older_page_is_found(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 4)

    def repoint(data: bytearray, file: PageFile) -> None:
        newest = file.chosen
        older = file.metas[1 - newest.number]
        at = newest.number * file.page_bytes + 16 + 24 + 2 * 48 - 8
        assert data[at : at + 8] == struct.pack("<Q", newest.main.root)
        data[at : at + 8] = struct.pack("<Q", older.main.root)

    with_pages(closed, repoint)
    report = checked(closed)
    assert any("used and free" in finding.what for finding in report.findings)


@pytest.mark.long
def test_a_truncated_file_kills_the_reader_and_not_the_check(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 6)
    (tmp_path / "other").mkdir()
    other = filled(tmp_path / "other" / "data", 7)
    folder = closed.path / "buckets" / other.bucket.name
    shutil.copytree(other.bucket, folder)
    os.truncate(closed.data_file, 3 * 4096)
    reports = {report.version: report for report in check_directory(closed.path)}
    words = [finding.what for finding in reports[closed.bucket.name].findings]
    assert "its end is missing" in words[0]
    assert any("killed by SIGBUS" in text or "reading ends here" in text for text in words[1:])
    # The other one was read nevertheless; only its name is taken twice.
    assert all("same name" in f.what for f in reports[other.bucket.name].findings)
    assert reports[other.bucket.name].readable


def test_a_reader_that_hangs_is_damage(
    closed: Closed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    (report,) = check_directory(closed.path, hang_seconds=0.2)
    assert "nothing was read for 0.2 s" in only(report).what


def test_a_reader_that_is_killed_is_followed_by_one_behind_that_partition(
    closed: Closed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, asked = tmp_path / "reader", tmp_path / "asked"
    reader.write_text(
        f"""#!/bin/sh
echo "$3" >> '{asked}'
case "$3" in *'"again": false'*) echo '{{"at": [1021, "blocks"]}}'; kill -9 $$;; esac
echo '{{"end": true}}'
"""
    )
    reader.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(reader))
    (report,) = check_directory(closed.path)
    (finding,) = report.findings
    assert finding.partition == 1021
    assert finding.what == "the reading process was killed by SIGKILL while reading blocks"
    tasks = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [task["partitions"] for task in tasks] == [list(range(1024)), [1022, 1023]]


def test_lengths_that_are_lawful(tmp_path: Path) -> None:
    check_length(tmp_path)
    (tmp_path / "data.mdb").touch()
    check_length(tmp_path)


@pytest.mark.parametrize("offset", [16, 20, 10, 4096 + 16, 40])
def test_a_file_that_is_none_of_lmdb(closed: Closed, offset: int) -> None:
    flip(closed.data_file, offset)
    with pytest.raises(DataDamagedError, match="meta page"):
        closed.store()
    assert checked(closed).damaged


def test_a_short_file_whose_lost_pages_are_free_is_whole(tmp_path: Path) -> None:
    closed = filled(tmp_path / "data", 8)
    with closing(PageFile(closed.data_file)) as file:
        meta = file.chosen
        free = {page for _, pages in file.free_pages(meta) for page in pages}
    end = meta.last_page + 1
    while end - 1 in free:
        end -= 1
    os.truncate(closed.data_file, end * 4096)
    check_length(closed.bucket / "store")
    os.truncate(closed.data_file, end * 4096 - 1)
    with pytest.raises(DataDamagedError, match=f"has {end * 4096 - 1} bytes, it should have"):
        check_length(closed.bucket / "store")


# The directory


def test_a_directory_in_use_or_foreign_is_refused(closed: Closed, tmp_path: Path) -> None:
    held = DataDirectory(closed.path)
    with pytest.raises(DataDirectoryError, match="in use"):
        check_directory(closed.path)
    held.close()
    with pytest.raises(DataDirectoryError, match="not a data directory"):
        check_directory(tmp_path)
    with pytest.raises(DataDirectoryError, match="not a data directory"):
        check_directory(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (closed.path / "upr-stream.json").write_text('{"program": "upr-stream", "format": 99}')
    with pytest.raises(DataDirectoryError, match="is 99; must be"):
        check_directory(closed.path)


def test_a_newer_store_is_not_judged(closed: Closed) -> None:
    text = b'{"format": 99, "name": "default", "version": "1"}'
    change(closed, b"meta", b"identity", keyspace.seal(text, b"identity"))
    report = checked(closed)
    assert "is 99; must be" in report.unusable
    assert report.findings == []


def test_a_newer_journal_is_not_judged(closed: Closed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FORMAT", 3)
    closed.journal((1, [block_of(4, 0, 1)]))
    monkeypatch.undo()
    report = checked(closed)
    assert "the segment is of format 3; must be 1 or 2" in report.unusable
    assert report.findings == []


def test_only_some_partitions(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10), stored_high=11)
    closed.put(block_of(4, 0, 10))
    closed.journal((1, [block_of(4, 10, 11)]))
    assert checked(closed, [4]).findings == []
    assert checked(closed, [4]).readable == {4: [[0, 11]]}
    assert checked(closed, [3, 4]).damaged


def test_what_is_kept_aside_of_dead_partitions_is_checked(tmp_path: Path) -> None:
    closed = Closed(tmp_path / "data")
    row = PartitionRow(4, 1, 0, 0, 0, FailoverLog.born(6), reason="the store ends at 0")
    good = encode_block(block_of(5, 3, 5))
    store = closed.store()
    put_rows(store, {5: row})
    store.put_aside({(5, 2, 0): good, (6, 2, 0): encode_block(block_of(6, 3, 5))})
    store.put_aside({(5, 3, 0): good[:-1] + bytes([good[-1] ^ 1]), (5, 4, 0): good[:9]})
    store.close()
    findings = checked(closed).findings
    found = [(f.severity, f.partition, f.above, f.end, f.what) for f in findings]
    assert [one[-1].split(":")[0] for one in found if one[0] == "damage"] == [
        "a block that is kept aside is damaged",
        "a block that is kept aside is damaged",
        "it is dead",
    ]
    assert (
        "damage",
        5,
        3,
        5,
        "it is dead: the store ends at 0; 2 rows of it are kept aside",
    ) in found
    assert ("note", 6, 3, 5, "2 rows of it are kept aside, and it is not dead") in found
