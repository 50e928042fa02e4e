"""Records torn in ways that look like something else."""

import os
from pathlib import Path

from upr.storage.journal import Commit, Journal, JournalEntry, encode_record


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
