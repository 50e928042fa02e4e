"""The store's file, extended by zeros where a transaction will put large values."""

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.service.test_vectors_live import run_of
from upr.storage.blocks import Replacement
from upr.storage.lmdb_pages import DATA_FILE
from upr.storage.store import EXTEND_BYTES, Store

PAGE = 4096
ROWS = 4000
_Piece = tuple[int, int]


def _large(first: int, count: int) -> list[tuple[int, int, bytes]]:
    return [(p, ROWS, run_of(p, 0, ROWS, ROWS)) for p in range(first, first + count)]


def _used(store: Store) -> int:
    return store.map_size - store.map_room()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[_Piece]:
    """What was written by sendfile: offset and bytes."""
    found: list[_Piece] = []
    real = os.sendfile

    def sendfile(to: int, source: int, offset: int, count: int) -> int:
        at = os.lseek(to, 0, os.SEEK_CUR)
        written = real(to, source, offset, count)
        found.append((at, written))
        return written

    monkeypatch.setattr(os, "sendfile", sendfile)
    return found


def test_it_grows_by_zeros_first_and_each_byte_once(tmp_path: Path, pieces: list[_Piece]) -> None:
    store = Store(tmp_path / "store")
    blocks = _large(0, 48)
    for first in (0, 16, 32):
        begin, told = _used(store), len(pieces)
        store.put_flush(blocks[first : first + 16], {}, {}, [b"h" * 8000] * 16)
        assert len(pieces) > told
        grown = _used(store) - begin
        assert 0 < grown <= sum(size for _, size in pieces[told:]) + 64 * PAGE, "it grew elsewhere"
    for (at, size), (following, _) in pairwise(pieces):
        assert following == at + size, "a part was written twice, or left out"
    # Where free pages are used instead, what was extended is there for the next transaction.
    replaced = [Replacement(p, [ROWS], [(ROWS, block)]) for p, _, block in blocks[:16]]
    for _ in range(6):
        store.replace(replaced)
    ends = {at + size for at, size in pieces}
    assert max(ends) == (tmp_path / "store" / DATA_FILE).stat().st_size
    assert max(ends) < _used(store) + 2 * sum(len(block) for _, _, block in blocks[:16])
    assert all(store.blocks(p, [ROWS]) == [block] for p, _, block in blocks)
    store.close()
    again = Store(tmp_path / "store")
    assert all(again.blocks(p, [ROWS]) == [block] for p, _, block in blocks)
    again.close()


def test_what_is_small_extends_nothing(tmp_path: Path, pieces: list[_Piece]) -> None:
    store = Store(tmp_path / "store")
    store.put_flush([(7, 20, run_of(7, 0, 20, 20))], {}, {})
    (block,) = _large(8, 1)
    assert len(block[2]) < EXTEND_BYTES
    store.put_flush([block], {}, {})
    assert not pieces
    store.close()


def test_a_full_disk_takes_no_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    file = tmp_path / "store" / DATA_FILE
    size, real, left = file.stat().st_size, os.sendfile, [1]

    def sendfile(to: int, source: int, offset: int, count: int) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()
        return real(to, source, offset, count // 2)

    monkeypatch.setattr(os, "sendfile", sendfile)
    blocks = _large(0, 16)
    store._extend(block for _, _, block in blocks)
    assert not left
    assert file.stat().st_size == max(size, _used(store)), "what zeros took was kept"
    store.put_flush(blocks, {}, {})
    assert all(store.blocks(p, [ROWS]) == [block] for p, _, block in blocks)
    store.close()


def test_a_file_in_its_place_is_left_alone(tmp_path: Path, pieces: list[_Piece]) -> None:
    store = Store(tmp_path / "store")
    file = tmp_path / "store" / DATA_FILE
    file.rename(tmp_path / "moved")
    file.write_bytes(b"another")
    store.put_flush(_large(0, 16), {}, {})
    assert file.read_bytes() == b"another"
    assert not pieces
    store.close()


def test_a_nearly_full_disk_is_left_what_it_has(
    tmp_path: Path, pieces: list[_Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    blocks = _large(0, 16)
    needed = sum(len(block) for _, _, block in blocks)

    def free(bytes_: int) -> Callable[[int], os.statvfs_result]:
        return lambda _: os.statvfs_result((1, 1, 0, 0, bytes_, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", free(2 * needed))
    store._extend(block for _, _, block in blocks)
    assert not pieces
    # What the last pages are expected to leave is counted as well.
    monkeypatch.setattr(os, "statvfs", free(3 * needed))
    store._extend(block for _, _, block in blocks)
    assert pieces
    store.close()


def test_many_small_values_extend_nothing(tmp_path: Path, pieces: list[_Piece]) -> None:
    store = Store(tmp_path / "store")
    store._extend([b"v" * 300] * 1000)
    assert not pieces
    store.close()


def test_a_python_without_memfd_create_stores_all_the_same(
    tmp_path: Path, pieces: list[_Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    store = Store(tmp_path / "store")
    store.put_flush(_large(0, 16), {}, {})
    assert store.blocks(3, [ROWS]) == [run_of(3, 0, ROWS, ROWS)]
    assert not pieces
    store.close()
