"""Page trees of an LMDB data file: a check that its pages form consistent trees.

LMDB's pages have no checksums. But every page from 2 to the last is either part of exactly one tree or free, only free
pages hold old states, and a tree counts its pages and entries. So a damaged pointer, bound or number contradicts
another one. Damage that this does not find is in bytes that LMDB never uses.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np

from upr.storage.keyspace import TABLES
from upr.storage.lmdb_pages import (
    BRANCH,
    DEPTH_MAX,
    HEADER,
    LEAF,
    NO_PAGE,
    SUB_TREE,
    MetaPage,
    Node,
    PageDamage,
    PageFile,
    Tree,
    parse_tree,
)

_BY_NUMBER = 0x08
_COUNTS = "branch_pages", "leaf_pages", "overflow_pages", "entries"
_Sink = Callable[[str, int | None], None]


def check_pages(
    file: PageFile, report: _Sink, note: _Sink, tick: Callable[[], None] = lambda: None
) -> None:
    """Check the metas and all trees of a data file.

    Args:
        report: called with words and the page's number, if one is meant, for every contradiction.
        note: called alike for what LMDB leaves behind where the disk fails.
        tick: called for every page, as a sign of progress.
    """
    _Walk(file, report, note, tick).run()


class _Walk:
    def __init__(
        self, file: PageFile, report: _Sink, note: _Sink, tick: Callable[[], None]
    ) -> None:
        self._note = note
        self._tick = tick
        self._file = file
        self._report = report
        self._meta = file.chosen
        there = file.size // file.page_bytes
        self._pages = max(min(self._meta.last_page + 1, there), 2)
        self._used = np.zeros(self._pages, bool)
        self._bad_page: int | None = None

    def run(self) -> None:
        freed = self._check_metas()
        self._walk("the list of free pages", self._meta.free, by_number=True)
        tables = self._walk("the list of tables", self._meta.main, by_number=False)
        for node in tables:
            name = node.key.decode(errors="replace")
            if node.key not in TABLES:
                self._report(f"there is a table of the unknown name {name!r}", None)
            try:
                if node.flags != SUB_TREE:
                    raise PageDamage(f"the record of table {name!r} has flags {node.flags:#x}")
                tree = parse_tree(node.data)
            except PageDamage as damage:
                self._report(str(damage), None)
                continue
            self._walk(f"table {name!r}", tree, by_number=False)
        self._check_free(freed)

    def _check_metas(self) -> list[int]:
        """Check that the metas are of consecutive transactions; return the free pages."""
        older, newer = sorted(self._file.metas, key=lambda meta: meta.transaction)
        for meta in (older, newer):
            newest = self._newest_freed(meta)
            # Every transaction but the first frees a page, and the list cannot have pages of a later one.
            if newest is not None and (
                newest > meta.transaction
                or (meta is newer and newest < meta.transaction and meta.transaction > 1)
            ):
                # Of a failed transaction LMDB writes the trees, and back the number and last page that were there before.
                failed = meta is older and meta.last_page <= newer.last_page
                (self._note if failed else self._report)(
                    f"meta page {meta.number} is of transaction {meta.transaction}, its list of free pages of {newest}"
                    + (
                        ", as LMDB leaves them of a transaction that failed; it does not use them"
                        if failed
                        else ""
                    ),
                    meta.number,
                )
        if self._meta.free.flags != _BY_NUMBER or self._meta.main.flags:
            self._report(f"meta page {self._meta.number} has wrong flags", self._meta.number)
        try:
            return [page for _, pages in self._file.free_pages(self._meta) for page in pages]
        except PageDamage:
            return []

    def _newest_freed(self, meta: MetaPage) -> int | None:
        try:
            return max((number for number, _ in self._file.free_pages(meta)), default=None)
        except PageDamage:
            # The list of the older meta is unused; the walk of the chosen one reports its list.
            return None

    def _check_free(self, freed: list[int]) -> None:
        last = self._meta.last_page
        wrong = [page for page in freed if not 2 <= page <= last]
        twice = len(freed) - len(set(freed))
        both = sorted(page for page in set(freed) if page < self._pages and self._used[page])
        if wrong:
            self._report(
                f"the list of free pages names page {wrong[0]}, pages are 2 to {last}", None
            )
        if twice:
            self._report(f"the list of free pages names {twice} pages twice", None)
        if both:
            self._report(f"{len(both)} pages are used and free, page {both[0]} for one", both[0])

    def _use(self, first: int, count: int) -> None:
        if first < 2 or first + count > self._pages:
            raise PageDamage(
                f"page {first} ({count} of them) lies outside the {self._pages} pages that are there"
            )
        if self._used[first : first + count].any():
            raise PageDamage(f"page {first} is used twice")
        self._used[first : first + count] = True

    def _walk(self, what: str, tree: Tree, *, by_number: bool) -> list[Node]:
        """Check one tree; returns the entries of its leaves that are tables."""
        self._by_number, self._counted, self._tables = by_number, Counter[str](), list[Node]()
        self._bad_page = None
        if tree.root == NO_PAGE:
            if tree.depth or tree.entries:
                self._report(f"{what} is empty and says that it has {tree.entries} entries", None)
            return []
        try:
            self._under(tree.root, tree.depth, None, None)
            told = tuple(getattr(tree, name) for name in _COUNTS)
            found = tuple(self._counted[name] for name in _COUNTS)
            if told != found:
                raise PageDamage(
                    f"it says that it has {told} branch pages, leaf pages, overflow pages and entries, there are {found}"
                )
        except PageDamage as damage:
            self._report(f"{what}: {damage}", self._bad_page)
        return self._tables

    def _under(self, number: int, depth: int, low: bytes | None, high: bytes | None) -> None:
        """Check a page and its subtree; its keys must be at least ``low`` and below ``high``."""
        self._bad_page = number
        self._tick()
        data = self._file.page(number)
        self._use(number, 1)
        kind = HEADER.unpack_from(data)[2]
        if not 1 <= depth <= DEPTH_MAX or kind != (LEAF if depth == 1 else BRANCH):
            raise PageDamage(
                f"page {number} has flags {kind:#x}, {depth - 1} levels above the leaves"
            )
        nodes = self._file.nodes(number, data)
        if len(nodes) < (1 if kind == LEAF else 2):
            raise PageDamage(f"page {number} has {len(nodes)} entries")
        # As LMDB sorts them. The first child of a branch holds what is below the second's key, whatever its own key says.
        keys = [node.key[::-1] if self._by_number else node.key for node in nodes]
        ranked = keys if kind == LEAF else keys[1:]
        edges = [*([low] if low is not None else []), *ranked]
        for left, right in itertools.pairwise(edges):
            if left > right or (left == right and (kind == BRANCH or left is not low)):
                raise PageDamage(f"the keys of page {number} do not rise")
        if high is not None and ranked and ranked[-1] >= high:
            raise PageDamage(f"page {number} has a key that belongs into a later page")
        if kind == LEAF:
            self._counted["leaf_pages"] += 1
            self._counted["entries"] += len(nodes)
            self._leaf(nodes)
            return
        self._counted["branch_pages"] += 1
        for i, node in enumerate(nodes):
            above = keys[i + 1] if i + 1 < len(nodes) else high
            self._under(node.child, depth - 1, keys[i] if i else low, above)

    def _leaf(self, nodes: list[Node]) -> None:
        for node in nodes:
            if node.flags & ~3:
                raise PageDamage(f"an entry has flags {node.flags:#x}")
            if node.flags & SUB_TREE:
                self._tables.append(node)
            first, pages = self._file.overflow(node)
            if pages:
                self._use(first, pages)
                self._counted["overflow_pages"] += pages
