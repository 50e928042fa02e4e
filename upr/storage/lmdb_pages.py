"""The pages of an LMDB data file, read with pread and without LMDB.

LMDB maps the file and trusts it: a file that lost its end is a SIGBUS, and no page carries a checksum. So the file's length
is compared before it is mapped, and ``upr-admin check`` walks the pages here, where damage is a value.

Layout (LMDB 0.9, little-endian): a page begins with its number uint64, pad uint16, flags uint16, lower and upper
uint16 (an overflow page has its number of pages as uint32 there). Pages 0 and 1 are metas: behind the header magic
uint32, version uint32, address uint64, map size uint64, two trees of 48 bytes (free pages, main), last page
uint64, transaction uint64. The page size is the first field of the first tree.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from upr_protocol.errors import DataDamagedError

DATA_FILE = "data.mdb"
HEADER = struct.Struct("<QHHHH")
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG_DATA, SUB_TREE = 1, 2
NO_PAGE = 2**64 - 1
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_TAIL = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_BYTES = HEADER.size + _META.size + 2 * _TREE.size + _TAIL.size
_PAGE_SIZES = {2**n for n in range(9, 16)}
DEPTH_MAX = 32
MAP_BYTES_MIN = 64 * 2**30
MAP_BYTES_USUAL = 3 * 2**40
MAP_BYTES = 16 * 2**40
"""Bounds of a map, see ``map_bytes``. A process has 128 TiB of addresses; BUCKETS_MAX usual maps take 96."""
_MAP_GRAIN = 2**20
RESTORE_HINT = "restore the data directory from a replica or a backup"


class PageDamage(Exception):
    """A page contradicts itself or its parent; the text says how."""


@dataclass(frozen=True, slots=True)
class Tree:
    """B+ tree: its root page (NO_PAGE if empty) and its counts."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class MetaPage:
    """Meta page, one of two. ``page_bytes`` is the size of a page."""

    number: int
    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int


@dataclass(frozen=True, slots=True)
class Node:
    """Entry of a page: a child of a branch, or a key of a leaf with its value.

    Attributes:
        key: the key's bytes; of a branch's first child without meaning.
        child: the child's page, of a branch.
        size: bytes of the value, of a leaf.
        flags: BIG_DATA, SUB_TREE, of a leaf.
        data: the value where it lies in the page itself, else the 8 bytes that name its overflow page.
    """

    key: bytes
    child: int
    size: int
    flags: int
    data: bytes


def _tree_of(data: bytes, at: int) -> Tree:
    _, flags, depth, branches, leaves, overflows, entries, root = _TREE.unpack_from(data, at)
    return Tree(flags, depth, branches, leaves, overflows, entries, root)


def parse_tree(data: bytes) -> Tree:
    """Return the tree that a named table's record describes, or raise PageDamage."""
    if len(data) != _TREE.size:
        raise PageDamage(f"a table's record has {len(data)} bytes, not {_TREE.size}")
    return _tree_of(data, 0)


class PageFile:
    """An LMDB data file, open for reading until ``close``.

    Raises:
        OSError: it cannot be opened.
        DataDamagedError: its meta pages are not those of an LMDB file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._fd).st_size
            self.metas = self._read_metas()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _read_metas(self) -> tuple[MetaPage, MetaPage]:
        first = self._meta_at(0, 0)
        second = self._meta_at(1, first.page_bytes)
        if second.page_bytes != first.page_bytes:
            raise self._damaged(
                f"one meta page says that pages have {first.page_bytes} bytes, the other {second.page_bytes}"
            )
        return first, second

    def _meta_at(self, number: int, offset: int) -> MetaPage:
        data = os.pread(self._fd, _META_BYTES, offset)
        if len(data) < _META_BYTES:
            raise self._damaged(
                f"the file has {self.size} bytes, its two meta pages need at least {offset + _META_BYTES}"
            )
        page, _, flags, _, _ = HEADER.unpack_from(data)
        magic, version, _, _ = _META.unpack_from(data, HEADER.size)
        if magic != _MAGIC or version != _VERSION or flags != META or page != number:
            raise self._damaged(
                f"meta page {number} at byte {offset} has page number {page}, flags {flags:#x}, magic {magic:08x}, version {version}; "
                f"expected are {number}, {META:#x}, {_MAGIC:08x}, {_VERSION}"
            )
        at = HEADER.size + _META.size
        page_bytes: int = _TREE.unpack_from(data, at)[0]
        if page_bytes not in _PAGE_SIZES:
            raise self._damaged(f"meta page {number} says that pages have {page_bytes} bytes")
        last, transaction = _TAIL.unpack_from(data, at + 2 * _TREE.size)
        return MetaPage(
            number,
            page_bytes,
            _tree_of(data, at),
            _tree_of(data, at + _TREE.size),
            last,
            transaction,
        )

    def _damaged(self, words: str) -> DataDamagedError:
        return DataDamagedError(f"{self.path}: {words}", hint=RESTORE_HINT)

    @property
    def page_bytes(self) -> int:
        return self.metas[0].page_bytes

    @property
    def chosen(self) -> MetaPage:
        """Return the meta that LMDB uses: that of the later transaction."""
        first, second = self.metas
        return second if second.transaction > first.transaction else first

    @property
    def in_turn(self) -> bool:
        """Return whether the metas are of consecutive transactions, as LMDB writes them in turn; otherwise one is
        wrong."""
        first, second = (meta.transaction for meta in self.metas)
        return first == second == 0 or (
            abs(first - second) == 1 and first % 2 == 0 and second % 2 == 1
        )

    def page(self, number: int) -> bytes:
        """Return one page, or raise PageDamage when it lies behind the end."""
        data = (
            os.pread(self._fd, self.page_bytes, number * self.page_bytes) if number < 2**48 else b""
        )
        if len(data) < self.page_bytes:
            raise PageDamage(f"page {number} lies behind the end of the file")
        if HEADER.unpack_from(data)[0] != number:
            raise PageDamage(f"page {number} says that it is page {HEADER.unpack_from(data)[0]}")
        return data

    def nodes(self, number: int, data: bytes) -> list[Node]:
        """Return the entries of a branch or leaf page, or raise PageDamage.

        The entries fill the page from its upper bound to its end without a hole; that is checked.
        """
        _, _, flags, lower, upper = HEADER.unpack_from(data)
        if flags not in (BRANCH, LEAF):
            raise PageDamage(f"page {number} has flags {flags:#x}, neither a branch nor a leaf")
        if lower < HEADER.size or lower % 2 or lower > upper or upper > len(data):
            raise PageDamage(f"page {number} has bounds {lower} and {upper}")
        found = []
        filled = 0
        for (offset,) in struct.iter_unpack("<H", data[HEADER.size : lower]):
            if offset < upper or offset + _NODE.size > len(data):
                raise PageDamage(f"page {number} has an entry at byte {offset} of it")
            node, size = _node_at(data, offset, flags)
            if offset + size > len(data):
                raise PageDamage(f"page {number}: the entry at byte {offset} of it is too long")
            filled += size + size % 2
            found.append(node)
        if filled != len(data) - upper:
            raise PageDamage(
                f"the entries of page {number} take {filled} bytes, there are {len(data) - upper}"
            )
        return found

    def overflow(self, node: Node) -> tuple[int, int]:
        """Return where a leaf entry's value begins and how many pages it takes; (0, 0) when it lies in the leaf."""
        if not node.flags & BIG_DATA:
            return 0, 0
        number = int.from_bytes(node.data, "little")
        needed = (HEADER.size - 1 + node.size) // self.page_bytes + 1
        head = self.page(number)
        flags, pages = HEADER.unpack_from(head)[2], int.from_bytes(head[12:16], "little")
        # A value that was replaced by a shorter one in the same transaction keeps all its pages.
        if flags != OVERFLOW or pages < needed:
            raise PageDamage(
                f"page {number} has flags {flags:#x} and {pages} pages, a value of {node.size} bytes needs {needed}"
            )
        return number, pages

    def value(self, node: Node) -> bytes:
        """Return a leaf entry's value, or raise PageDamage."""
        number, pages = self.overflow(node)
        if not pages:
            return node.data
        return os.pread(self._fd, node.size, number * self.page_bytes + HEADER.size)

    def free_pages(self, meta: MetaPage) -> Iterator[tuple[int, list[int]]]:
        """Yield the free pages by the transaction that freed them, or raise PageDamage."""
        for node in self.leaves(meta.free):
            value = self.value(node)
            if len(node.key) != 8 or len(value) % 8 or not value:
                raise PageDamage("an entry of the list of free pages is malformed")
            count, *pages = struct.unpack(f"<{len(value) // 8}Q", value)
            if count > len(pages):
                raise PageDamage(f"an entry of the list of free pages counts {count}")
            yield int.from_bytes(node.key, "little"), list(pages[:count])

    def leaves(self, tree: Tree) -> Iterator[Node]:
        """Yield the entries of all leaves of a tree in order, or raise PageDamage."""
        if tree.root != NO_PAGE:
            if tree.depth > DEPTH_MAX:
                raise PageDamage(f"a tree says that it is {tree.depth} pages deep")
            yield from self._leaves_under(tree.root, tree.depth)

    def _leaves_under(self, number: int, depth: int) -> Iterator[Node]:
        data = self.page(number)
        kind = HEADER.unpack_from(data)[2]
        if depth < 1 or (kind == LEAF) != (depth == 1):
            raise PageDamage(f"page {number} has flags {kind:#x}, {depth} levels above the leaves")
        for node in self.nodes(number, data):
            if kind == LEAF:
                yield node
            else:
                yield from self._leaves_under(node.child, depth - 1)


def _node_at(data: bytes, offset: int, page_flags: int) -> tuple[Node, int]:
    low, high, flags, key_size = _NODE.unpack_from(data, offset)
    at = offset + _NODE.size
    key = data[at : at + key_size]
    if page_flags == BRANCH:
        return Node(key, low | high << 16 | flags << 32, 0, 0, b""), _NODE.size + key_size
    size = low | high << 16
    inside = 8 if flags & BIG_DATA else size
    value = data[at + key_size : at + key_size + inside]
    return Node(key, 0, size, flags, value), _NODE.size + key_size + inside


def check_length(folder: Path) -> None:
    """Raise DataDamagedError unless a store's data file is as long as it says; it may be absent or empty.

    Metas of transactions that are not consecutive are refused too: LMDB would silently serve the older state. LMDB may
    leave out pages at the end that one transaction took and freed, so a shorter file is complete if every missing page
    is free.
    """
    path = folder / DATA_FILE
    if not path.exists() or path.stat().st_size == 0:
        return
    with closing(PageFile(path)) as file:
        if not file.in_turn:
            numbers = " and ".join(str(meta.transaction) for meta in file.metas)
            raise DataDamagedError(
                f"{path}: its meta pages are of the transactions {numbers}, not of two in a row",
                hint=RESTORE_HINT,
            )
        meta = file.chosen
        needed = (meta.last_page + 1) * file.page_bytes
        if file.size >= needed:
            return
        first_missing = file.size // file.page_bytes
        missing = meta.last_page + 1 - first_missing
        try:
            free = {page for _, pages in file.free_pages(meta) for page in pages}
            lacking = missing - sum(first_missing <= page <= meta.last_page for page in free)
        except PageDamage:
            lacking = missing
        if lacking:
            raise DataDamagedError(
                f"{path} has {file.size} bytes, it should have {needed}: its end is missing",
                hint=RESTORE_HINT,
            )


def free_bytes(where: Path | int) -> int:
    """Return how many bytes are free for this process in the file system of a path or descriptor."""
    disk = os.statvfs(where)
    return disk.f_bavail * disk.f_frsize


def map_bytes(folder: Path) -> int:
    """Return the size of the map for the environment in a folder, in bytes.

    It takes addresses and neither memory nor disk, and is set at each open: twice the file system, so that "disk full"
    comes first and the file system can grow while the server runs. That is cut at MAP_BYTES_USUAL, or at the size of
    a larger file system, so that a server's maps fit beside each other; at least MAP_BYTES_MIN, at most MAP_BYTES,
    and never less than the file that is there.
    """
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    wanted = max(MAP_BYTES_MIN, min(2 * size, max(MAP_BYTES_USUAL, size)))
    file = folder / DATA_FILE
    there = file.stat().st_size if file.exists() else 0
    return max(min(wanted, MAP_BYTES), -(-there // _MAP_GRAIN) * _MAP_GRAIN)
