"""The newest mutations of keys, out of tail and store, against a dictionary."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.model import Row, partition_of
from tests.service.keys import some_keys
from tests.storage.stored_blocks import block_of, store_of
from upr.storage import search as lookup_module
from upr.storage.blocks import Replacement
from upr.storage.search import Lookup, Newest, StoreSearch, TailKeys, TailSearch
from upr.storage.store import Store
from upr_protocol.block import U64, Runs, build_block, make_runs
from upr_protocol.errors import DataDamagedError
from upr_protocol.wire.codec import compress_block, decode_block, encode_block

P, Q = 7, 900
NOTHING = np.zeros(1024, np.uint64)


@dataclass
class Entry:
    runs: Runs
    data: bytes


def entry(*changes: tuple[int, list[Row]]) -> Entry:
    """A tail entry of partitions, ascending, and the rows that continue each."""
    rows = [row for _, of in changes for row in of]
    block = build_block([row.key for row in rows], [row.value for row in rows])
    assert [partition_of(row.key) for row in rows] == [p for p, of in changes for _ in of]
    runs = make_runs(
        [p for p, _ in changes],
        [len(of) for _, of in changes],
        [of[0].seqno - 1 for _, of in changes],
        [of[-1].seqno for _, of in changes],
        [of[-1].seqno for _, of in changes],
        9,
    )
    block.runs = runs
    return Entry(runs, encode_block(block))


def run(search: TailSearch | StoreSearch) -> int:
    bites = 1
    while not search.bite():
        bites += 1
    return bites


def ends_of(store: Store) -> U64:
    """The ends of the partitions' newest blocks."""
    with store.look() as cursor:
        return np.array([cursor.newest_end(p) for p in range(1024)], np.uint64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path / "store")


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_was_written_last(
    seed: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(lookup_module, "BITE_BYTES", rng.choice([1, 300, 10**6]))
    keys = [*some_keys(P, 20), *some_keys(Q, 20)]
    expected: dict[bytes, Newest] = {}
    high = {P: 0, Q: 0}
    blocks: list[tuple[int, int, bytes]] = []
    entries: list[Entry] = []
    for i in range(30):
        changes = []
        for partition in (P, Q) if i > 15 else (rng.choice([P, Q]),):
            mine = [key for key in keys if partition_of(key) == partition]
            rows: list[Row] = []
            for _ in range(rng.randint(1, 4)):
                high[partition] += 1
                key = rng.choice(mine[:15])
                value = None if rng.random() < 0.2 else b"%d" % rng.getrandbits(30)
                # Superseded rows may be gone already; the newest of a block is there.
                rows = [row for row in rows if row.key != key or rng.random() < 0.5]
                rows.append(Row(high[partition], key, value))
                expected[key] = (high[partition], value)
            changes.append((partition, rows))
        if i > 15:
            dense = [
                (p, [Row(high[p] - len(rows) + 1 + n, *row[1:]) for n, row in enumerate(rows)])
                for p, rows in changes
            ]
            for _, rows in dense:
                for row in rows:
                    expected[row.key] = (row.seqno, row.value)
            entries.append(entry(*dense))
            continue
        ((partition, rows),) = changes
        start = next((end for p, end, _ in blocks[::-1] if p == partition), 0)
        block = block_of(partition, start, rows, end=high[partition])
        data = compress_block(block[2]) if rng.random() < 0.5 else block[2]
        blocks.append((partition, high[partition], data))
    store.put_flush(blocks, {}, {})
    found = Lookup(keys, 10**6)
    run(TailSearch(found, TailKeys(), 0, entries))
    in_tail = dict(found.found)
    run(StoreSearch(found, store, NOTHING, ends_of(store)))
    assert {keys[i]: newest for i, newest in found.found.items()} == expected
    # What lies above the floors was found already.
    above = Lookup(keys, 10**6)
    run(TailSearch(above, TailKeys(), 0, entries))
    run(StoreSearch(above, store, np.full(1024, 10**6, np.uint64), ends_of(store)))
    assert above.found == in_tail
    store.close()


def test_a_search_begins_where_it_is_told_to(store: Store) -> None:
    """What was flushed since is left to the next one; what was merged with it since is found."""
    first, second, third = some_keys(P, 3)
    rows = [Row(i + 1, key, b"%d" % i) for i, key in enumerate((first, second, third))]
    store.put_flush([block_of(P, i, [rows[i]]) for i in range(2)], {}, {})
    ends = ends_of(store)
    assert ends[P] == 2
    store.put_flush([block_of(P, 2, [rows[2]])], {}, {})
    late = Lookup([third], 1000)
    run(StoreSearch(late, store, NOTHING, ends))
    assert not late.found
    assert not late.problems
    store.replace([Replacement(P, [2, 3], [block_of(P, 1, rows[1:])[1:]])])
    found = Lookup([first, second], 1000)
    run(StoreSearch(found, store, NOTHING, ends))
    assert {i: seqno for i, (seqno, _) in found.found.items()} == {0: 1, 1: 2}
    store.close()


def test_a_newest_block_that_is_gone_is_damage(store: Store) -> None:
    """The keys of its partition may have been in it."""
    (key,) = some_keys(P, 1)
    store.put_flush([block_of(P, 0, [Row(1, key, b"old")])], {}, {})
    ends = ends_of(store)
    ends[P] = 2
    found = Lookup([key], 1000)
    run(StoreSearch(found, store, NOTHING, ends))
    assert isinstance(found.problems[P], DataDamagedError)
    assert not found.found
    store.close()


def test_a_key_in_another_partition_than_its_own_is_not_it(store: Store) -> None:
    (key,) = some_keys(P, 1)
    store.put_flush([block_of(Q, 0, [Row(1, key, b"elsewhere")])], {}, {})
    block = build_block([key], [b"elsewhere"])
    block.runs = make_runs([Q], [1], [1], [2], [2], 9)
    found = Lookup([key], 100)
    run(TailSearch(found, TailKeys(), 0, [Entry(block.runs, encode_block(block))]))
    run(StoreSearch(found, store, NOTHING, ends_of(store)))
    assert found.found == {}
    assert found.pending == [P]
    found.settle(np.ones(1024, bool))
    assert found.pending == []
    store.close()


def test_values_that_do_not_fit_together_are_given_up_from_the_end(store: Store) -> None:
    keys = some_keys(P, 6)
    # The last ones are found first.
    rows = [Row(i + 1, key, b"v" * 40) for i, key in enumerate(keys)]
    store.put_flush([block_of(P, i, [rows[i]]) for i in range(6)], {}, {})
    found = Lookup(keys, 100)
    run(StoreSearch(found, store, NOTHING, ends_of(store)))
    assert found.end == 2
    assert sorted(found.found) == [0, 1]
    one = Lookup(keys[::-1], 30)
    run(StoreSearch(one, store, NOTHING, ends_of(store)))
    assert (one.end, sorted(one.found)) == (1, [0])
    store.close()


def test_blocks_merged_between_two_bites_are_gone_through(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_module, "BITE_BYTES", 1)
    keys = some_keys(P, 6)
    rows = [Row(i + 1, key, b"%d" % i) for i, key in enumerate(keys)]
    store.put_flush([block_of(P, i, [rows[i]]) for i in range(6)], {}, {})
    found = Lookup(keys, 1000)
    search = StoreSearch(found, store, NOTHING, ends_of(store))
    assert not search.bite()
    assert not search.bite()
    assert len(found.found) == 2
    merged = block_of(P, 1, rows[1:])
    store.replace([Replacement(P, [2, 3, 4, 5, 6], [merged[1:]])])
    run(search)
    assert {i: seqno for i, (seqno, _) in found.found.items()} == {i: i + 1 for i in range(6)}
    store.close()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_block_is_a_problem_of_what_lies_behind_it(store: Store, damage: str) -> None:
    below, inside, above = some_keys(P, 3)
    (other,) = some_keys(Q, 1)
    blocks = [
        block_of(P, i, [Row(i + 1, key, b"needle")]) for i, key in enumerate((below, inside, above))
    ]
    data = bytearray(blocks[1][2])
    data[data.index(b"needle")] ^= 1
    if damage == "missing":
        del blocks[1]
    else:
        blocks[1] = (P, 2, bytes(data))
    store.put_flush([*blocks, block_of(Q, 0, [Row(1, other, b"v")])], {}, {})
    found = Lookup([below, inside, above, other], 100)
    run(StoreSearch(found, store, NOTHING, ends_of(store)))
    assert sorted(found.found) == [2, 3]
    assert isinstance(found.problems[P], DataDamagedError)
    assert list(found.problems) == [P]
    assert found.pending == []
    store.close()


def test_a_damaged_entry_of_the_tail_is_a_problem_of_its_partitions() -> None:
    first, second = some_keys(P, 2)
    (other,) = some_keys(Q, 1)
    entries = [
        entry((P, [Row(1, first, b"old")]), (Q, [Row(1, other, b"v")])),
        entry((P, [Row(2, first, b"needle")])),
        entry((P, [Row(3, second, b"new")])),
    ]
    data = bytearray(entries[1].data)
    data[data.index(b"needle")] ^= 1
    entries[1].data = bytes(data)
    found = Lookup([first, second, other], 100)
    run(TailSearch(found, TailKeys(), 0, entries))
    assert sorted(found.found) == [1, 2]
    assert list(found.problems) == [P]


def test_large_tails_are_looked_through_in_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "BITE_BLOCKS", 10)
    keys = some_keys(P, 2)
    entries = [entry((P, [Row(i + 1, keys[i > 0], b"%d" % i)])) for i in range(35)]
    found = Lookup(keys, 100)
    assert run(TailSearch(found, TailKeys(), 0, entries)) == 4
    assert [found.found[i][1] for i in range(2)] == [b"0", b"34"]
    assert decode_block(entries[0].data).rows == 1
