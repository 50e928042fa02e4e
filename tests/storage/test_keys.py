"""The index of keys: a search that uses it finds what a dictionary has, whatever happened to the blocks."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.model import Row
from tests.service.keys import some_keys
from tests.storage.stored_blocks import block_of, limits_of, store_of, whole_range
from tests.storage.test_lookup import NOTHING, Entry, ends_of, entry, run
from upr.engine.tail import TailEntry
from upr.storage import blocks as blocks_module
from upr.storage import keyspace
from upr.storage.blocks import BlockCursor, Encoded
from upr.storage.compact import (
    Chunk,
    FlushSlice,
    examine,
    merge_direct,
    merge_slice,
    rewrite_group,
)
from upr.storage.keyspace import HASHED, hash_of, hashes_of
from upr.storage.search import InTail, Lookup, Newest, StoreSearch, TailKeys, TailPart, TailSearch
from upr.storage.store import Store
from upr_client.testing.memory import run_block
from upr_protocol.block import I64, U32, make_runs, sealed
from upr_protocol.wire.codec import compress_block, encode_block

P, Q = 7, 900


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = store_of(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ends of the blocks that searches read."""
    ends: list[int] = []
    mapped = BlockCursor.mapped

    def noting(cursor: BlockCursor, partition: int, end: int) -> Any:
        ends.append(end)
        return mapped(cursor, partition, end)

    monkeypatch.setattr(BlockCursor, "mapped", noting)
    return ends


def flush(store: Store, *entries: Entry, compressed: bool = False) -> None:
    """Store entries as a flush does: with the hashes of their keys."""
    stored = np.zeros(1024, np.uint64)
    for partition in {int(p) for one in entries for p in one.runs["partition"]}:
        heads = store.heads(partition)
        stored[partition] = heads[-1].end if heads else 0
    chunk = Chunk([Encoded(one.runs, one.data) for one in entries])
    merged = merge_slice(
        [chunk],
        FlushSlice(0, 1024, 0, 1),
        stored,
        compress=compress_block if compressed else None,
    )
    store.put_flush(merged.blocks, {}, {}, merged.hashes)


def found(store: Store, keys: list[bytes]) -> dict[bytes, Newest]:
    lookup = Lookup(keys, 10**9)
    run(StoreSearch(lookup, store, NOTHING, ends_of(store)))
    assert not lookup.problems
    # A view would show something else when the transaction has ended.
    assert {type(value) for _, value in lookup.found.values()} <= {bytes, type(None)}
    return {keys[number]: newest for number, newest in lookup.found.items()}


def hashes_at(store: Store, partition: int) -> list[int]:
    """The ends of a partition's blocks that have hashes, newest first; each is checked against its block."""
    heads = store.heads(partition)
    ends: list[int] = []
    with store.look() as cursor:
        for head in heads[::-1]:
            known = cursor.hashes(partition, head.end, head.start, 1)
            if known.ends:
                block = blocks_module.checked(cursor.data(partition, head.end))
                assert known.starts == [head.start]
                assert known.hashes.tolist() == blocks_module.key_hashes(block).tolist()
                ends.append(head.end)
    return ends


def change_hashes(store: Store, end: int, how: Callable[[bytes], bytes]) -> None:
    """Change the packed hashes of a block of P behind the store's back, with the mark of a program that knows them."""
    key = keyspace.block_key(P, end)
    with store._writing() as txn:
        txn.put(key, how(bytes(txn.get(key, db=store._hashes))), db=store._hashes)


def test_hashes_are_those_of_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [b"a", b"key-000000000001", b"key-000000000002", bytes(range(100)), b"k" * 4096]
    known = [535352397, 36391312, 1201032292, 1621813397, 392345314]
    offsets = np.cumsum([0, *map(len, keys)])
    assert hashes_of(offsets, b"".join(keys)).tolist() == known
    # A column of keys of one length goes another way.
    for key, one in zip(keys, known, strict=True):
        assert hashes_of(np.array([0, len(key)]), key).tolist() == [one] == [hash_of(key)]
        assert hashes_of(np.array([2, 2 + len(key)]), b"xx" + key + b"y").tolist() == [one]
    monkeypatch.setattr(keyspace, "HASHED_BYTES", 50)
    assert hashes_of(offsets, b"".join(keys)).tolist() == known


@pytest.mark.parametrize("offsets", [b"", bytes(4)])
def test_a_flush_passes_over_a_range_of_seqnos_without_a_row(store: Store, offsets: bytes) -> None:
    """A replica gets one as a block of its own, where all rows of the range were superseded at its upstream."""
    keys = some_keys(P, 4)
    before = entry((P, [Row(1, keys[0], b"v"), Row(2, keys[1], b"w")]))
    none = run_block(P, [], 2, 4, 4, 9)
    none = sealed(replace(none, key_offsets=offsets, value_offsets=offsets))
    empty = Entry(none.runs, encode_block(none))
    after = entry((P, [Row(5, keys[2], b"x"), Row(6, keys[3], None)]))
    flush(store, before, empty, after)
    assert [head.end for head in store.heads(P)][-1] == 6
    values = {key: value for key, (_, value) in found(store, keys).items()}
    assert values == dict(zip(keys, (b"v", b"w", b"x", None), strict=True))
    flush(store, Entry(make_runs([P], [0], [6], [8], [8], 9), empty.data))


FORGED = {
    "as they are": lambda hashes: hashes,
    "all the same": lambda hashes: hashes & np.uint32(0),
    "of three bits": lambda hashes: hashes & np.uint32(7),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_a_dictionary_has(
    seed: int, forged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing, hashing_one = hashes_of, hash_of
    monkeypatch.setattr(
        "upr.storage.search.hash_of", lambda key: int(FORGED[forged](np.uint32(hashing_one(key))))
    )
    # It makes hashes of its own, which cannot be forged here.
    monkeypatch.setattr(blocks_module, "MERGE", None)
    for module in ("keyspace", "compact", "search"):
        monkeypatch.setattr(
            f"upr.storage.{module}.hashes_of", lambda *args: FORGED[forged](hashing(*args))
        )
    rng = random.Random(seed)
    store = store_of(tmp_path / "store")
    monkeypatch.setattr("upr.storage.search.BITE_BYTES", rng.choice([1, 500, 10**6]))
    keys = {P: some_keys(P, 25), Q: some_keys(Q, 25)}
    model: dict[bytes, Newest] = {}
    high = {P: 0, Q: 0}
    tail: list[Entry] = []
    first = 0
    index = TailKeys()
    for step in range(60):
        what = rng.choice(
            [
                "write",
                "write",
                "write",
                "flush",
                "merge",
                "large merge",
                "purge",
                "truncate",
                "restart",
            ]
        )
        if what == "write":
            changes = []
            for partition in (P, Q) if rng.random() < 0.5 else (rng.choice([P, Q]),):
                rows = []
                for _ in range(rng.randint(1, 5)):
                    high[partition] += 1
                    value = None if rng.random() < 0.25 else b"%d" % step
                    row = Row(high[partition], rng.choice(keys[partition][:20]), value)
                    model[row.key] = (row.seqno, row.value)
                    rows.append(row)
                changes.append((partition, rows))
            tail.append(entry(*changes))
        elif what == "flush" and tail:
            part = rng.randint(1, len(tail))
            flush(store, *tail[:part], compressed=rng.random() < 0.3)
            del tail[:part]
            first += part
            index.drop_before(first)
        elif what in ("merge", "purge", "large merge"):
            for partition in (P, Q):
                merge(store, partition, what, model)
        elif what == "truncate" and not tail:
            truncate(store, rng, high, model)
        elif what == "restart":
            store.close()
            store = Store(tmp_path / "store")
            index = TailKeys()
            index.drop_before(first)
        every = [*keys[P], *keys[Q]]
        for asked in ([rng.choice(every)], every):
            lookup = Lookup(asked, 10**9)
            in_tail = TailSearch(lookup, index, first, tail)
            # As the event loop does, which leaves the rest to a thread.
            in_tail.bite(rng.choice([1, 300, 10**6]))
            run(in_tail)
            run(StoreSearch(lookup, store, NOTHING, ends_of(store)))
            told = {asked[number]: newest for number, newest in lookup.found.items()}
            assert told == {key: model[key] for key in asked if key in model}, (step, what)
    for partition in (P, Q):
        assert hashes_at(store, partition) == [h.end for h in store.heads(partition)][::-1]
    store.close()


def merge(store: Store, partition: int, what: str, model: dict[bytes, Newest]) -> None:
    """Compact all that a partition has stored; a purge forgets the tombstones that it drops."""
    heads = store.heads(partition)
    if not heads:
        return
    limits = limits_of(heads[-1].end - 1) if what == "purge" else None
    chosen = whole_range(store, partition)
    if what == "large merge":
        examined = examine(chosen, store.blocks, None)
        for group in examined.groups():
            store.replace([rewrite_group(examined, group, store.blocks)])
        return
    result = merge_direct([chosen], store.blocks, limits)
    store.replace(result.replacements)
    if partition in result.purges:
        for key in [k for k, one in model.items() if purged(store, partition, k, one)]:
            del model[key]


def purged(store: Store, partition: int, key: bytes, newest: Newest) -> bool:
    """Whether a key's tombstone was dropped: no row of its seqno is stored."""
    seqno, value = newest
    if value is not None or Lookup([key], 1).partitions[0] != partition:
        return False
    ends = [head.end for head in store.heads(partition)]
    if seqno > ends[-1]:
        return False
    rows = Chunk([blocks_module.checked(data) for data in store.blocks(partition, ends)]).sorted()
    return seqno not in rows.seqnos.tolist()


def truncate(
    store: Store, rng: random.Random, high: dict[int, int], model: dict[bytes, Newest]
) -> None:
    """Undo a partition's last block, and what the model has of it; older rows of its keys are read from the store."""
    partition = rng.choice([P, Q])
    heads = store.heads(partition)
    if not heads:
        return
    start = heads[-1].start
    store.write_recovery({}, [], {partition: start}, np.zeros(1024, np.uint64))
    high[partition] = start
    for key in [k for k in model if Lookup([k], 1).partitions[0] == partition]:
        del model[key]
    ends = [head.end for head in store.heads(partition)]
    for data in store.blocks(partition, ends):
        chunk = Chunk([blocks_module.checked(data)]).sorted()
        for key, value, op, seqno in zip(
            chunk.keys.to_pylist(),
            chunk.values(np.arange(len(chunk.seqnos))).to_pylist(),
            chunk.ops.tolist(),
            chunk.seqnos.tolist(),
            strict=True,
        ):
            model[key] = (seqno, None if op else value)


def six_blocks(store: Store) -> tuple[list[bytes], dict[bytes, Newest]]:
    """Flush six keys of P, each into a block of its own."""
    keys = some_keys(P, 6)
    for seqno, key in enumerate(keys, 1):
        flush(store, entry((P, [Row(seqno, key, b"v%d" % seqno)])))
    return keys, {key: (n, b"v%d" % n) for n, key in enumerate(keys, 1)}


def test_only_blocks_that_may_have_the_key_are_read(store: Store, read: list[int]) -> None:
    keys, model = six_blocks(store)
    assert found(store, [keys[1]]) == {keys[1]: model[keys[1]]}
    assert read == [2]
    assert found(store, [b"never", *some_keys(P, 9)[6:]]) == {}
    assert read == [2]


def test_blocks_that_were_stored_without_hashes_are_read_until_they_are_merged(
    store: Store, read: list[int]
) -> None:
    keys, model = six_blocks(store)
    with store._writing() as txn:
        for end in (2, 5):
            txn.delete(keyspace.block_key(P, end), db=store._hashes)
    assert found(store, keys) == model
    read.clear()
    assert found(store, [keys[0]]) == {keys[0]: model[keys[0]]}
    assert read == [5, 2, 1]
    store.replace(merge_direct([whole_range(store, P)], store.blocks, None).replacements)
    assert hashes_at(store, P) == [6]
    read.clear()
    assert found(store, some_keys(P, 9)[6:]) == {}
    assert read == []


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda value: value[:-5] + bytes([value[-5] ^ 1]) + value[-4:],
    "short": lambda value: value[:-1],
    "empty": lambda value: b"",
    "of another block": lambda value: keyspace.pack_hashes(P, 2, 4, np.zeros(1, np.uint32)),
    "of an unknown kind": lambda value: keyspace.seal(
        bytes([2]) + value[1:-4], keyspace.block_key(P, 3)
    ),
    "of more rows": lambda value: keyspace.pack_hashes(
        P, 2, 3, np.full(2, np.frombuffer(value, "<u4", 1, 12)[0])
    ),
    "of an earlier start": lambda value: keyspace.pack_hashes(
        P, 1, 3, np.frombuffer(value, "<u4", 1, 12)
    ),
    "of half a row": lambda value: keyspace.seal(value[:-6], keyspace.block_key(P, 3)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_hashes_are_as_none(store: Store, damage: str) -> None:
    keys, model = six_blocks(store)
    change_hashes(store, 3, DAMAGE[damage])
    for asked in (keys, keys[2:3], some_keys(P, 9)[6:]):
        assert found(store, asked) == {key: model[key] for key in asked if key in model}


@pytest.mark.parametrize(("source", "place"), [(6, 3), (1, 6)])
def test_a_block_under_the_key_of_another_is_damage(store: Store, source: int, place: int) -> None:
    keys, _ = six_blocks(store)
    with store._writing() as txn:
        data = bytes(txn.get(keyspace.block_key(P, source), db=store._blocks))
        txn.put(keyspace.block_key(P, place), data, db=store._blocks)
    lookup = Lookup(list({keys[place - 1], keys[2]}), 10**9)
    search = StoreSearch(lookup, store, NOTHING, ends_of(store))
    assert any(search.bite() for _ in range(10)), "it goes on for ever"
    assert list(lookup.problems) == [P]
    assert not lookup.found


def test_a_damaged_block_to_which_hashes_lead_is_damage(store: Store) -> None:
    keys, model = six_blocks(store)
    with store._writing() as txn:
        key = keyspace.block_key(P, 3)
        changed = bytes(txn.get(key, db=store._blocks)).replace(b"v3", b"w3")
        txn.put(key, changed, db=store._blocks)
    lookup = Lookup(keys[1:5], 10**9)
    run(StoreSearch(lookup, store, NOTHING, ends_of(store)))
    assert lookup.found == {2: model[keys[3]], 3: model[keys[4]]}
    assert list(lookup.problems) == [P]


def test_a_search_of_many_small_blocks_comes_in_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, model = six_blocks(store)
    monkeypatch.setattr(blocks_module, "HASHED_BLOCKS", 2)
    with store.look() as cursor:
        assert cursor.hashes(P, 6, 0, 10**9).ends == [6, 5]
    assert found(store, keys) == model


def test_a_block_without_any_of_many_keys_costs_no_arrays_where_nothing_is_compiled(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may have a thousand blocks."""
    keys, _ = six_blocks(store)
    looked: list[int] = []
    rows_with = blocks_module.rows_with

    def noting(hashes: U32, sought: set[int]) -> I64:
        looked.append(len(hashes))
        return rows_with(hashes, sought)

    monkeypatch.setattr(blocks_module, "CANDIDATE", None)
    monkeypatch.setattr(blocks_module, "rows_with", noting)
    sought = {hash_of(key) for key in (*some_keys(P, 29)[9:], keys[0])}
    with store.look() as cursor:
        assert cursor.candidate(P, 6, 0, 10**9, sought)[0] == (0, 1, 1, [0])
    assert looked == [1]


def test_a_search_stops_at_the_first_block_that_has_a_key(store: Store) -> None:
    keys, model = six_blocks(store)
    with store.look() as cursor:
        assert cursor.candidate(P, 6, 0, 10**9, {hash_of(keys[3]), hash_of(keys[1])})[0] == (
            3,
            4,
            1,
            [0],
        )
        assert cursor.candidate(P, 6, 0, 10**9, {hash_of(b"none")})[0] == (0, 1, 1, [])
    for key in (keys[3], keys[0], some_keys(P, 9)[8]):
        assert found(store, [key]) == ({key: model[key]} if key in model else {})


def test_an_index_that_cannot_be_dropped_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    store = store_of(tmp_path / "store")
    keys, model = six_blocks(store)
    with store._env.begin(write=True) as txn:
        # As a program writes that does not know the index.
        txn.put(b"other", b"", db=store._meta)
    store.close()

    def full(self: Store) -> Any:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_writing", full)
        store = Store(tmp_path / "store")
    assert found(store, keys[:1]) == {keys[0]: model[keys[0]]}
    assert read == [6, 5, 4, 3, 2, 1]
    # What is written meanwhile does not vouch for it.
    flush(store, entry((Q, [Row(1, some_keys(Q, 1)[0], b"v")])))
    store.close()
    store = Store(tmp_path / "store")
    assert hashes_at(store, P) == []
    assert found(store, keys) == model
    store.close()


def test_hashes_go_with_their_blocks(store: Store) -> None:
    six_blocks(store)
    flush(store, entry((Q, [Row(1, some_keys(Q, 1)[0], b"v")])))

    def rows() -> list[tuple[int, int]]:
        with store._env.begin() as txn, txn.cursor(db=store._hashes) as cursor:
            return [keyspace.unpack_block_key(bytes(key)) for key in cursor.iternext(values=False)]

    assert rows() == [(P, end) for end in range(1, 7)] + [(Q, 1)]
    store.write_recovery({}, [], {P: 4}, np.zeros(1024, np.uint64))
    assert rows() == [(P, end) for end in range(1, 5)] + [(Q, 1)]
    # A block that recovery stores under the key of another has no hashes, and not those of the other.
    store.write_recovery(
        {}, [block_of(P, 3, [Row(4, some_keys(P, 9)[8], b"v")])], {}, np.zeros(1024, np.uint64)
    )
    assert rows() == [(P, end) for end in range(1, 4)] + [(Q, 1)]
    assert list(found(store, some_keys(P, 9)[8:])) == some_keys(P, 9)[8:]
    store.replace(merge_direct([whole_range(store, P)], store.blocks, None).replacements)
    assert rows() == [(P, 4), (Q, 1)]


def test_hashes_are_dropped_after_a_program_that_does_not_know_them(
    tmp_path: Path, read: list[int]
) -> None:
    folder = tmp_path / "store"
    store = store_of(folder)
    keys, model = six_blocks(store)
    store.close()
    store = Store(folder)
    assert hashes_at(store, P) == [6, 5, 4, 3, 2, 1], "a restart keeps them"
    store.close()
    # It undoes the last block and stores another one in its place.
    new = some_keys(P, 7)[6]
    with lmdb.open(str(folder), max_dbs=16, map_size=2**30) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True) as txn:
            txn.put(keyspace.block_key(P, 6), block_of(P, 5, [Row(6, new, b"new")])[2], db=blocks)
    store = Store(folder)
    assert hashes_at(store, P) == []
    model[new] = (6, b"new")
    del model[keys[5]]
    assert found(store, [*keys, new]) == model
    store.replace(merge_direct([whole_range(store, P)], store.blocks, None).replacements)
    assert hashes_at(store, P) == [6]
    assert found(store, [*keys, new]) == model
    store.close()


def tail_of(count: int) -> tuple[list[bytes], list[Entry]]:
    keys = some_keys(P, 10)
    return keys, [entry((P, [Row(n + 1, keys[n % 10], b"%d" % n)])) for n in range(count)]


def in_tail(index: TailKeys, first: int, entries: list[Entry], *keys: bytes) -> list[int]:
    """The seqnos of keys that the tail has."""
    lookup = Lookup(list(keys), 10**9)
    run(TailSearch(lookup, index, first, entries))
    return [lookup.found[number][0] for number in sorted(lookup.found)]


def test_the_index_of_the_tail_grows_and_goes_with_it() -> None:
    keys, entries = tail_of(400)
    index = TailKeys()
    for end in range(1, 301):
        assert (
            in_tail(index, index.end, entries[index.end : end], keys[0])[-1]
            == (end - 1) // 10 * 10 + 1
        )
    assert len(index.parts) < 12, "an entry makes no part of its own"
    index.drop_before(250)
    assert sum(len(part.entries) for part in index.parts) == 50
    assert sum(len(part.hashes) for part in index.parts) == 50
    assert (index.parts[0].first, index.end) == (250, 300)
    assert in_tail(index, 300, entries[300:], keys[9], keys[0]) == [400, 391]
    index.drop_before(400)
    assert (index.parts, index.end) == ([], 400)
    # What a search took along of a tail that was flushed meanwhile is not kept.
    assert in_tail(index, 300, entries[300:], keys[9]) == []
    assert index.parts == []


def test_searches_that_extend_the_index_at_once_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, entries = tail_of(30)
    index = TailKeys()
    of = TailPart.of

    def overtaken(first: int, some: list[InTail]) -> TailPart:
        monkeypatch.setattr(TailPart, "of", of)
        assert in_tail(index, 0, entries[:20], keys[9]) == [20]
        return of(first, some)

    monkeypatch.setattr(TailPart, "of", overtaken)
    assert in_tail(index, 0, entries, keys[9]) == [30]
    assert sum(len(part.hashes) for part in index.parts) == 30


def test_a_row_of_the_tail_counts_its_hash() -> None:
    keys = some_keys(P, 50)
    one, many = (
        entry((P, [Row(n + 1, key, b"v") for n, key in enumerate(some)]))
        for some in (keys[:1], keys)
    )
    sizes = [TailEntry(e.runs, e.data, (), 1).size - len(e.data) for e in (one, many)]
    assert sizes[1] - sizes[0] >= 49 * TailPart.of(0, [many]).hashes.itemsize


def test_a_store_from_before_the_index_opens_and_gets_it_with_compaction(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = store_of(folder)
    keys, model = six_blocks(store)
    store.close()
    with lmdb.open(str(folder), max_dbs=16, map_size=2**30) as env:
        hashes, meta = env.open_db(b"hashes"), env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.drop(hashes)
            assert txn.delete(HASHED, db=meta)
    store = Store(folder)
    assert hashes_at(store, P) == []
    assert found(store, keys) == model
    flush(store, entry((P, [Row(7, keys[0], b"new")])))
    model[keys[0]] = (7, b"new")
    store.close()
    store = Store(folder)
    assert hashes_at(store, P) == [7], "what this program wrote is kept"
    assert found(store, keys) == model
    store.replace(merge_direct([whole_range(store, P)], store.blocks, None).replacements)
    assert hashes_at(store, P) == [7]
    assert found(store, keys) == model
    store.close()
