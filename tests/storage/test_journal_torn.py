"""Records torn in ways that look like something else."""

import os
from pathlib import Path

import google_crc32c
import pytest

from upr.storage.journal import _RECORD, Commit, Journal, JournalEntry, encode_record
from upr_protocol.errors import DataDamagedError


def test_a_torn_record_whose_value_holds_a_whole_record_is_torn(tmp_path: Path) -> None:
    inner = b"".join(encode_record(Commit(1, (JournalEntry(b"somebody's backup"),))))
    journal = Journal(tmp_path / "j", 7)
    list(journal.replay())
    journal.append(Commit(1, (JournalEntry(b"first"),)))
    journal.append(Commit(2, (JournalEntry(inner + b"x" * 100),)))
    journal.close()
    (file,) = (tmp_path / "j").iterdir()
    os.truncate(file, file.stat().st_size - 10)
    again = Journal(tmp_path / "j", 7)
    found = [(one.commit and one.commit.number, one.torn_by_kill) for one in again.inspect()]
    assert found == [(1, False), (None, True)]
    assert [commit.number for commit in again.replay()] == [1]
    again.close()


def test_a_segment_whose_header_never_reached_the_disk_is_taken_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", 7)
    list(journal.replay())
    journal.append(Commit(1, (JournalEntry(b"first"),)))
    journal.close()
    # The size was there after the power failure, the bytes were not.
    (tmp_path / "j" / f"{2:016d}.journal").write_bytes(bytes(28))
    again = Journal(tmp_path / "j", 7)
    assert [commit.number for commit in again.replay()] == [1]
    again.append(Commit(2, (JournalEntry(b"second"),)))
    again.close()


def test_a_value_that_looks_like_a_record_is_none(tmp_path: Path) -> None:
    # All checksums of it are right, and what it holds is not what a record holds.
    payload = b"\1"
    record = encode_record(Commit(1, (JournalEntry(b"x"),)))[0]
    fields = [*_RECORD.unpack(record)][:-1]
    fields[1], fields[3] = len(payload), google_crc32c.value(payload)
    head = _RECORD.pack(*fields, 0)[:-4]
    image = head + google_crc32c.value(head).to_bytes(4, "little") + payload
    journal = Journal(tmp_path / "j", 7)
    list(journal.replay())
    journal.append(Commit(1, (JournalEntry(image + b"x" * 100),)))
    journal.append(Commit(2, (JournalEntry(b"second"),)))
    journal.close()
    (file,) = (tmp_path / "j").iterdir()
    data = bytearray(file.read_bytes())
    data[data.index(record[:4]) + 8] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataDamagedError, match="whole records follow"):
        list(Journal(tmp_path / "j", 7).replay())
    assert any(one.commit for one in Journal(tmp_path / "j", 7).inspect())
