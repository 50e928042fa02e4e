"""The journal: what was appended is there, a torn end is cut off, damage is damage."""

import errno
import fcntl
import os
import posix
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from upr import failpoints
from upr.storage import journal as journal_module
from upr.storage.journal import (
    PIECES_MAX,
    ROOM_BYTES,
    ROOM_RECORD_BYTES,
    Commit,
    Journal,
    JournalEntry,
    NumberedWrite,
    encode_record,
)
from upr_protocol.errors import DataDamagedError, DataDirectoryError, StorageFailedError

VERSION = 7


def commit(number: int, size: int = 10) -> Commit:
    """Two entries of one write each, one of several, and one without a producer."""
    blocks = [bytes([number % 256]) * size, b"second"]
    whole = [JournalEntry(b, (NumberedWrite(b"p%d" % i, number),)) for i, b in enumerate(blocks)]
    parts = (NumberedWrite(b"p0", number + 1, b"r" * 40), NumberedWrite(b"", 7, b"s" * 80))
    return Commit(number, (*whole, JournalEntry(b"joined", parts), JournalEntry(b"nobody's")))


def filled(folder: Path, count: int) -> list[Path]:
    journal = Journal(folder, VERSION)
    assert list(journal.replay()) == []
    for number in range(1, count + 1):
        journal.append(commit(number))
    journal.close()
    return sorted(folder.iterdir())


def record(one: Commit) -> bytes:
    return b"".join(encode_record(one))


def replayed(folder: Path) -> tuple[list[Commit], int]:
    journal = Journal(folder, VERSION)
    commits = list(journal.replay())
    journal.close()
    return commits, journal.torn_bytes


def test_commits_come_back_in_order(tmp_path: Path) -> None:
    filled(tmp_path / "j", 5)
    assert replayed(tmp_path / "j") == ([commit(n) for n in range(1, 6)], 0)


def test_one_write_with_runs_of_its_own_keeps_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    assert list(journal.replay()) == []
    alone = Commit(1, (JournalEntry(b"block", (NumberedWrite(b"p", 3, b"r" * 40),)),))
    written = journal.append(alone)
    journal.close()
    assert replayed(tmp_path / "j") == ([alone], 0)
    (segment,) = (tmp_path / "j").iterdir()
    assert written == len(record(alone))
    assert segment.stat().st_size == journal.size


def test_a_segment_of_format_1_is_read_and_not_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FORMAT", 1)
    (old,) = filled(tmp_path / "j", 2)
    monkeypatch.undo()
    before = old.read_bytes()
    for number in (3, 4):
        journal = Journal(tmp_path / "j", VERSION)
        assert list(journal.replay()) == [commit(n) for n in range(1, number)]
        journal.append(commit(number))
        journal.close()
    assert old.read_bytes() == before
    names = sorted(path.name for path in (tmp_path / "j").iterdir())
    assert names == [f"{n:016d}.journal" for n in (1, 2)]
    assert [commit.number for commit in replayed(tmp_path / "j")[0]] == [1, 2, 3, 4]


def test_a_segment_of_an_unknown_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FORMAT", 3)
    filled(tmp_path / "j", 1)
    monkeypatch.undo()
    with pytest.raises(DataDirectoryError, match="the segment is of format 3"):
        replayed(tmp_path / "j")


def test_segments_rotate_and_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    files = filled(tmp_path / "j", 6)
    assert len(files) > 2
    journal = Journal(tmp_path / "j", VERSION)
    assert [c.number for c in journal.replay()] == [1, 2, 3, 4, 5, 6]
    journal.drop_through(3)
    # Commits do not wait until they are gone, and until then they count.
    size = journal.size
    assert size == sum(file.stat().st_size for file in files)
    journal.remove_dropped()
    assert journal.size == sum(f.stat().st_size for f in files if f.exists()) < size
    assert [c.number for c in replayed(tmp_path / "j")[0]][-3:] == [4, 5, 6]
    journal.drop_through(6)
    journal.remove_dropped()
    assert not any(found.commit for found in journal.inspect())
    journal.append(commit(7))
    journal.close()
    assert [c.number for c in replayed(tmp_path / "j")[0]] == [7]


@pytest.mark.parametrize("cut", range(1, len(record(commit(3)))))
def test_a_record_torn_at_any_byte_is_cut_off(tmp_path: Path, cut: int) -> None:
    (file,) = filled(tmp_path / "j", 3)
    size = file.stat().st_size
    os.truncate(file, size - cut)
    commits, torn = replayed(tmp_path / "j")
    assert commits == [commit(1), commit(2)]
    # What it ends with may be room.
    assert torn == len(record(commit(3))[:-cut].rstrip(b"\0"))
    assert replayed(tmp_path / "j") == ([commit(1), commit(2)], 0)


def test_room_behind_the_records_is_nothing_torn(tmp_path: Path) -> None:
    ends_with_zeros = Commit(2, (JournalEntry(bytes(40)),))
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(commit(1))
    journal.append(ends_with_zeros)
    # As a killed process leaves it.
    (file,) = (tmp_path / "j").glob("*.journal")
    left = file.read_bytes()
    journal.close()
    written = file.read_bytes()
    assert len(left) > len(written) + ROOM_RECORD_BYTES // 2
    assert left.rstrip(b"\0") == written.rstrip(b"\0")
    file.write_bytes(left)
    assert [
        found.problem or found.torn_bytes for found in Journal(tmp_path / "j", VERSION).inspect()
    ] == [0, 0]
    assert replayed(tmp_path / "j") == ([commit(1), ends_with_zeros], 0)
    assert file.read_bytes() == written


def test_a_damaged_last_record_without_room_is_not_what_a_killed_process_leaves(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(Commit(1, (JournalEntry(b"value" + bytes(40)),)))
    journal.close()
    (file,) = (tmp_path / "j").glob("*.journal")
    file.write_bytes(file.read_bytes().replace(b"value", b"walue"))
    (torn,) = Journal(tmp_path / "j", VERSION).inspect()
    assert torn.torn_bytes
    assert not torn.torn_by_kill


def test_a_record_torn_in_its_room_is_cut_off(tmp_path: Path) -> None:
    (file,) = filled(tmp_path / "j", 2)
    whole = file.read_bytes()
    # The head and the end of the payload reached the disk, and what lies between did not.
    file.write_bytes(whole + record(commit(3))[:40] + bytes(ROOM_BYTES))
    (torn,) = [one for one in Journal(tmp_path / "j", VERSION).inspect() if one.commit is None]
    assert torn.torn_by_kill
    commits, size = replayed(tmp_path / "j")
    assert (commits, size) == ([commit(1), commit(2)], torn.torn_bytes)
    assert file.read_bytes() == whole


def test_a_record_that_would_fill_its_room_is_torn_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(record(commit(2)))
    monkeypatch.setattr(journal_module, "ROOM_BYTES", len(record(commit(1))) + size)
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(commit(1))
    arm(monkeypatch, "journal.half_append=error:ENOSPC:1")
    # As a killed process leaves it.
    monkeypatch.setattr(journal, "_take_back", lambda _: None)
    with pytest.raises(OSError, match=r"\[Errno 28\]"):
        journal.append(commit(2))
    *_, torn = Journal(tmp_path / "j", VERSION).inspect()
    assert torn.torn_bytes
    assert torn.torn_by_kill
    journal.close()


def test_room_of_a_segment_that_is_full_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    older, newer = filled(tmp_path / "j", 2)
    # Its new end was not recorded when the power went.
    with older.open("ab") as file:
        file.write(bytes(ROOM_BYTES))
    assert replayed(tmp_path / "j") == ([commit(1), commit(2)], 0)
    assert newer.exists()


def test_appending_goes_on_behind_a_torn_record(tmp_path: Path) -> None:
    (file,) = filled(tmp_path / "j", 2)
    os.truncate(file, file.stat().st_size - 1)
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(commit(2, 50))
    journal.close()
    assert replayed(tmp_path / "j")[0] == [commit(1), commit(2, 50)]


def test_garbage_of_the_length_of_a_record_is_torn_too(tmp_path: Path) -> None:
    (file,) = filled(tmp_path / "j", 2)
    with file.open("ab") as f:
        f.write(os.urandom(200))
    assert [c.number for c in replayed(tmp_path / "j")[0]] == [1, 2]


@pytest.mark.parametrize("where", [40, 60, 80])
def test_damage_before_the_last_record_is_refused(tmp_path: Path, where: int) -> None:
    (file,) = filled(tmp_path / "j", 4)
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataDamagedError, match=f"{file.name}.*damaged"):
        replayed(tmp_path / "j")


@pytest.mark.parametrize("killed", [False, True])
def test_damage_before_a_last_record_that_ends_with_zeros_is_refused(
    tmp_path: Path, killed: bool
) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(commit(1))
    damaged = journal._size
    journal.append(commit(2))
    journal.append(Commit(3, (JournalEntry(bytes(40)),)))
    (file,) = (tmp_path / "j").glob("*.journal")
    if not killed:
        journal.close()
    data = bytearray(file.read_bytes())
    data[damaged + 9] ^= 1
    file.write_bytes(data)
    found = list(Journal(tmp_path / "j", VERSION).inspect())
    assert [one.commit and one.commit.number for one in found] == [1, None, 3]
    with pytest.raises(DataDamagedError, match=f"byte {damaged} is damaged and whole"):
        replayed(tmp_path / "j")
    assert file.read_bytes() == data
    journal.close()


def test_a_torn_record_in_an_older_segment_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    files = filled(tmp_path / "j", 6)
    os.truncate(files[0], files[0].stat().st_size - 1)
    with pytest.raises(DataDamagedError):
        replayed(tmp_path / "j")


def test_a_missing_segment_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    files = filled(tmp_path / "j", 8)
    files[1].unlink()
    with pytest.raises(DataDamagedError, match="follows commit"):
        replayed(tmp_path / "j")


def test_a_segment_of_another_bucket_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "j", 1)
    with pytest.raises(DataDamagedError, match="bucket 0000000000000007"):
        list(Journal(tmp_path / "j", 8).replay())


@pytest.mark.parametrize("name", ["1.journal", "._0000000000000001.journal", "copy of 1.journal"])
def test_a_file_that_is_no_segment_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (segment,) = filled(tmp_path / "j", 2)
    segment.with_name(name).write_bytes(segment.read_bytes())
    with pytest.raises(DataDirectoryError, match="is no segment of this journal") as refused:
        replayed(tmp_path / "j")
    assert name in refused.value.message
    assert refused.value.hint.startswith("move it out of the folder")


def test_a_segment_torn_at_its_birth_is_taken_over(tmp_path: Path) -> None:
    (file,) = filled(tmp_path / "j", 1)
    os.truncate(file, 10)
    journal = Journal(tmp_path / "j", VERSION)
    assert list(journal.replay()) == []
    journal.append(commit(1))
    journal.close()
    assert replayed(tmp_path / "j")[0] == [commit(1)]


def arm(monkeypatch: pytest.MonkeyPatch, specification: str) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    failpoints.arm(specification)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "j", 1)
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    arm(monkeypatch, "journal.half_append=error:ENOSPC:1")
    (file,) = (tmp_path / "j").iterdir()
    size = file.stat().st_size
    with pytest.raises(OSError, match=r"\[Errno 28\]") as caught:
        journal.append(commit(2))
    assert caught.value.errno == errno.ENOSPC
    assert file.stat().st_size == size
    journal.append(commit(2))
    assert file.stat().st_size >= size + ROOM_RECORD_BYTES, "the room was taken back too"
    journal.close()
    assert replayed(tmp_path / "j") == ([commit(1), commit(2)], 0)


def test_a_record_for_which_there_is_no_memory_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "j", 1)
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    (file,) = (tmp_path / "j").iterdir()
    size = file.stat().st_size

    def half(fd: int, data: bytes | memoryview, at: int) -> None:
        os.pwrite(fd, data[: len(data) // 2], at)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_write_whole", half)
        patch.setattr(journal_module, "PIECES_MAX", 1)
        with pytest.raises(MemoryError):
            journal.append(commit(2))
    assert file.stat().st_size == size
    journal.append(commit(2))
    journal.close()
    assert replayed(tmp_path / "j") == ([commit(1), commit(2)], 0)


def test_room_that_a_full_disk_has_in_part_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def in_part(fd: int, data: memoryview, at: int) -> int:
        if len(data) < ROOM_RECORD_BYTES // 2:
            return pwrite(fd, data, at)
        pwrite(fd, data[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, "")

    (file,) = filled(tmp_path / "j", 1)
    size = file.stat().st_size
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    monkeypatch.setattr(os, "pwrite", in_part)
    size += journal.append(commit(2))
    assert file.stat().st_size == size
    journal.close()
    assert replayed(tmp_path / "j") == ([commit(1), commit(2)], 0)


def test_room_that_the_disk_fails_to_write_fails_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int, _data: memoryview, _at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(StorageFailedError, match="Input/output error"):
        journal.append(commit(1))
    monkeypatch.undo()
    with pytest.raises(StorageFailedError, match="Input/output error"):
        journal.append(commit(1))
    journal.close()


def test_a_disk_that_takes_nothing_fails_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StorageFailedError, match="Input/output error"):
        journal.append(commit(1, ROOM_RECORD_BYTES))
    journal.close()


def test_room_grows_with_the_segment(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    (file,) = (tmp_path / "j").iterdir()
    written, rooms = file.stat().st_size, set()
    for number in range(1, 70):
        written += journal.append(Commit(number, (JournalEntry(b"x" * 60_000),)))
        size = file.stat().st_size
        assert size < written + min(max(written, ROOM_RECORD_BYTES), ROOM_BYTES)
        rooms.add(size)
    assert 0 <= ROOM_BYTES - (max(rooms) - sorted(rooms)[-2]) < ROOM_RECORD_BYTES
    assert 4 < len(rooms) < 12
    journal.close()


def test_after_a_failed_fsync_nothing_is_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    arm(monkeypatch, "journal.before_sync=error:EIO:1")
    with pytest.raises(StorageFailedError, match="fsync"):
        journal.append(commit(1))
    with pytest.raises(StorageFailedError, match="fsync"):
        journal.append(commit(1))
    journal.close()


def test_nothing_is_durable_in_a_segment_that_was_deleted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    assert list(journal.replay()) == []
    journal.append(commit(1))
    assert not journal.lost()
    (segment,) = (tmp_path / "j").iterdir()
    segment.unlink()
    assert "deleted" in journal.lost()
    for _ in range(2):
        with pytest.raises(StorageFailedError, match="deleted"):
            journal.append(commit(2))
    # And a copy that was put in its place is not the file that is written.
    segment.write_bytes(b"")
    assert "another journal" in journal.lost()
    journal.close()


def test_a_segment_is_asked_whether_it_is_there_only_where_its_folder_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    asked = 0
    fstat = os.fstat

    def counted(fd: int) -> os.stat_result:
        nonlocal asked
        asked += 1
        return fstat(fd)

    monkeypatch.setattr(os, "fstat", counted)
    # The time of a folder that changed just now may be that of its next change too.
    os.utime(tmp_path / "j", ns=(1, 1))
    for number in range(1, 4):
        journal.append(commit(number))
    assert asked == 1
    (tmp_path / "j" / "other").touch()
    journal.append(commit(4))
    journal.append(commit(5))
    assert asked == 3
    os.utime(tmp_path / "j", ns=(2, 2))
    journal.append(commit(6))
    journal.append(commit(7))
    assert asked == 4
    (tmp_path / "j").rename(tmp_path / "moved")
    journal.append(commit(8))
    assert asked == 5
    for segment in (tmp_path / "moved").glob("*.journal"):
        segment.unlink()
    with pytest.raises(StorageFailedError, match="deleted"):
        journal.append(commit(9))
    journal.close()


@pytest.mark.parametrize("step", [4 * 10**6, 10**9])
def test_a_segment_that_is_deleted_right_after_another_change_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Older kernels, and some file systems, count the times of files in steps."""
    folder = tmp_path / "j"
    journal = Journal(folder, VERSION)
    list(journal.replay())
    (segment,) = folder.iterdir()
    stat = os.stat
    # Both changes in one step.
    changed = folder.stat().st_mtime_ns // step * step

    def in_steps(path: Any, **options: Any) -> Any:
        found = stat(path, **options)
        return SimpleNamespace(st_mtime_ns=changed) if path == folder else found

    monkeypatch.setattr(os, "stat", in_steps)
    journal.append(commit(1))
    segment.unlink()
    with pytest.raises(StorageFailedError, match="deleted"):
        journal.append(commit(2))
    journal.close()


def test_unknown_failpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown failpoint 'nowhere'"):
        arm(monkeypatch, "nowhere=kill")


def test_every_append_is_synced_by_the_call_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests sync nothing else.
    monkeypatch.setattr(os, "O_DSYNC", posix.O_DSYNC)
    pwritev, synced = os.pwritev, list[int]()

    def note(fd: int, pieces: Sequence[bytes], at: int) -> int:
        synced.append(fcntl.fcntl(fd, fcntl.F_GETFL) & posix.O_DSYNC)
        return pwritev(fd, pieces, at)

    monkeypatch.setattr(os, "pwritev", note)
    # In a segment that is new, and in one that a start found.
    filled(tmp_path / "j", 1)
    journal = Journal(tmp_path / "j", VERSION)
    assert list(journal.replay()) == [commit(1)]
    journal.append(commit(2))
    journal.close()
    assert synced == [posix.O_DSYNC] * 2
    assert replayed(tmp_path / "j")[0] == [commit(1), commit(2)]


def test_a_record_of_more_pieces_than_one_call_writes_is_written_whole(tmp_path: Path) -> None:
    entries = tuple(JournalEntry(bytes([n % 256])) for n in range(PIECES_MAX))
    journal = Journal(tmp_path / "j", VERSION)
    list(journal.replay())
    journal.append(Commit(1, entries))
    journal.append(commit(2))
    journal.close()
    assert replayed(tmp_path / "j")[0] == [Commit(1, entries), commit(2)]
