"""The compactor's turns: every partition is looked at, however fast others change; and what it leaves as it is."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.harness import pass_turns, until
from tests.raw import all_rows
from tests.service.bucket_state import started
from tests.service.keys import some_keys
from upr.config import ServerConfig
from upr.engine.compaction import BLOCK_COST, FAN_IN, JOIN_BYTES, plan_merge
from upr.engine.cuts import Cut
from upr.service.buckets import compactor as compactor_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.compactor import DIRECT_BYTES, LOOK_PARTITIONS
from upr.service.buckets.upstream_state import UpstreamState
from upr.service.storage_trouble import Failing
from upr.storage.blocks import HEAD_BYTES, BlockCursor, BlockRange
from upr_protocol.block import build_block
from upr_protocol.errors import DataDamagedError, NoRoomError
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.codec import decode_block

P = 9
Rows = dict[bytes, bytes]
Changes = Mapping[bytes, bytes | None]


@pytest.mark.asyncio
async def test_those_that_wait_longest_are_looked_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = BucketService(folder, ServerConfig(folder))
    compactor = host.compactor
    looked: list[int] = []

    async def look(partitions: Sequence[int]) -> None:
        looked.extend(partitions)
        # As flushes do, that touch every partition again and again.
        compactor.note(range(PARTITIONS))
        if len(looked) >= PARTITIONS:
            compactor.stop()

    monkeypatch.setattr(compactor, "_merge", look)
    monkeypatch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 0.0)
    await compactor.run()
    assert PARTITIONS % LOOK_PARTITIONS == 0
    assert len(looked) == PARTITIONS
    assert sorted(looked) == list(range(PARTITIONS))
    assert await host.close()


@pytest.mark.asyncio
async def test_the_compactor_looks_at_nothing_more_once_it_is_to_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = BucketService(folder, ServerConfig(folder))
    looked: list[int] = []

    def heads(partition: int) -> list[object]:
        looked.append(partition)
        host.compactor.stop()
        return []

    monkeypatch.setattr(host.disk.store, "heads", heads)
    await host.compactor._merge([3, 4, 5])
    assert looked == [3]
    assert await host.close()


@asynccontextmanager
async def compacted_by_hand(folder: Path) -> AsyncIterator[BucketService]:
    """Serve a bucket whose own compactor waits, and looks at nothing by itself, and close it, which must be clean."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 3600.0)
        host = started(BucketService(folder, ServerConfig(folder)))
        async with host.compactor.turn:
            yield host
        assert await host.close()


async def flush(host: BucketService, rows: Changes) -> None:
    block = build_block(list(rows), list(rows.values()))
    await host.durable((await host.write(block, b"", None, 0)).entry)
    assert await host.flusher.flush(wanted=True)


async def compact(host: BucketService) -> list[int]:
    """Have the compactor look until it has nothing to do, and return the rows of the partition's blocks."""
    # Its own task, which waits for its turn, may have taken it.
    host.compactor.note([P])
    while waiting := list(host.compactor._backlog.waiting):
        host.compactor._backlog.waiting.clear()
        await host.compactor._merge(waiting)
    return [head.rows for head in host.disk.store.heads(P)]


async def looked_at(host: BucketService) -> list[bytes]:
    """Store 40 keys in the partition, and have the compactor find nothing to do; returns the keys."""
    keys = some_keys(P, 40)
    await flush(host, dict.fromkeys(keys, bytes(100)))
    await compact(host)
    assert P in host.compactor._costs
    return keys


def stored_rows(host: BucketService) -> Rows:
    ends = [head.end for head in host.disk.store.heads(P)]
    found = all_rows(decode_block(data) for data in host.disk.store.blocks(P, ends))
    return {key: value for _, _, key, value in found if value is not None}


@pytest.mark.asyncio
async def test_a_partition_is_looked_at_once_a_flush_may_have_left_something_to_compact(
    folder: Path,
) -> None:
    async with compacted_by_hand(folder) as host:
        rng, keys = random.Random(1), some_keys(P, 60)
        await flush(host, dict.fromkeys(keys[:40], bytes(100)))
        await compact(host)
        wanted = set()
        for _ in range(40):
            rows = dict.fromkeys(rng.sample(keys, rng.choice([1, 3, 9])), bytes(90))
            await flush(host, rows)
            heads = host.disk.store.heads(P)
            found = plan_merge(P, heads, (), host.compactor.settled_of(P, heads))
            assert (P in host.compactor._backlog.waiting) == (found is not None)
            wanted.add(found is not None)
            await compact(host)
        assert wanted == {True, False}


@pytest.mark.asyncio
async def test_compaction_waits_while_flushes_follow_one_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(compactor_module, "QUIET_SECONDS", 3600.0)
    host = started(BucketService(folder, ServerConfig(folder)))

    def blocks() -> int:
        return len(host.disk.store.heads(P))

    flushes = 3 * FAN_IN
    await flush(host, dict.fromkeys(some_keys(P, 9), b""))
    # Nobody knew what waits there.
    await until(lambda: P in host.compactor._costs)
    for number in range(1, flushes):
        await flush(host, dict.fromkeys(some_keys(P, 9), b"%d" % number))
        await pass_turns()
    assert blocks() == flushes
    monkeypatch.setattr(compactor_module, "QUIET_SECONDS", 0.0)
    host.compactor.note([P])
    await until(lambda: blocks() == 1)
    monkeypatch.setattr(compactor_module, "QUIET_SECONDS", 3600.0)
    # A partition's share of a tail is reached at once.
    large = {key: bytes(host.flusher.tail_limit // PARTITIONS) for key in some_keys(P, 2)}
    await flush(host, large)
    await until(lambda: blocks() == 1)
    # Where room is short, as below a quota, nothing waits.
    await flush(host, dict.fromkeys(some_keys(P, 9), b""))
    await pass_turns()
    assert host.compactor.waiting == 1
    host.disk.quota.limit = 1
    host.compactor.note([P])
    await until(lambda: host.compactor.waiting == 0)
    assert await host.close()


@pytest.mark.asyncio
async def test_what_a_block_costs_counts_while_flushes_follow_one_another(folder: Path) -> None:
    """A trickle makes thousands of blocks before it has stored what one flush of a full tail does."""
    async with compacted_by_hand(folder) as host:
        await looked_at(host)
        backlog, share = host.compactor._backlog, host.flusher.tail_limit // PARTITIONS
        no_rows = bytes(HEAD_BYTES)
        blocks = [(P, end, no_rows) for end in range(share // (BLOCK_COST + HEAD_BYTES) + 1)]
        host.compactor.flushed(blocks[1:])
        assert backlog.take(PARTITIONS, 2**50) == []
        host.compactor.flushed(blocks[:1])
        assert backlog.take(PARTITIONS, 2**50) == [P]


@pytest.mark.asyncio
async def test_small_blocks_of_a_large_partition_are_joined_after_a_restart(folder: Path) -> None:
    """Its process before may have left them to wait."""
    sizes = [DIRECT_BYTES] + [100] * FAN_IN
    async with compacted_by_hand(folder) as host:
        keys = iter(some_keys(P, len(sizes)))
        for size in sizes:
            await flush(host, {next(keys): bytes(size)})
    async with compacted_by_hand(folder) as host:
        assert await compact(host) == [1, FAN_IN]


@pytest.mark.asyncio
async def test_a_large_partition_whose_keys_repeat_is_compacted_after_a_restart(
    folder: Path,
) -> None:
    """Servers may be restarted more often than new blocks become as large as all that was there before."""
    keys = some_keys(P, 8)
    async with compacted_by_hand(folder) as host:
        await flush(host, dict.fromkeys(keys, bytes(DIRECT_BYTES // 8)))
        assert sum(await compact(host)) == len(keys)
    for again in range(3):
        async with compacted_by_hand(folder) as host:
            await flush(host, dict.fromkeys(keys[:3], b"%d" % again * (DIRECT_BYTES // 8)))
    async with compacted_by_hand(folder) as host:
        assert sum(await compact(host)) == len(keys)


@pytest.mark.asyncio
@pytest.mark.parametrize("hashed", [True, False])
async def test_a_large_partition_is_not_read_after_a_restart_unless_its_keys_are_known_to_repeat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hashed: bool
) -> None:
    """Its keys are all different, or have no hashes, as what an older program stored."""
    keys = some_keys(P, 16)
    async with compacted_by_hand(folder) as host:
        for part in (keys[:8], keys[8:]) if hashed else (keys, keys):
            await flush(host, dict.fromkeys(part, bytes(DIRECT_BYTES // 8)))
    async with compacted_by_hand(folder) as host:
        store, rows = host.disk.store, sum(head.rows for head in host.disk.store.heads(P))
        monkeypatch.setattr(store, "_hashes_hold", hashed)
        monkeypatch.setattr(store, "blocks", None)
        assert sum(await compact(host)) == rows


@pytest.mark.asyncio
async def test_a_partition_with_a_cut_is_looked_at_after_each_flush(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the cut is released, what it kept apart may be compacted."""
    async with compacted_by_hand(folder) as host:
        keys = await looked_at(host)
        monkeypatch.setattr(type(host.bucket.cuts), "pinned", lambda self, partition: (40,))
        for _ in range(2):
            await flush(host, {keys[0]: b"v"})
            assert P in host.compactor._backlog.waiting
            await compact(host)
        assert P not in host.compactor._costs


async def released(host: BucketService, cut: Cut, join: UpstreamState) -> None:
    assert await host.cuts.release(cut.name)
    await join.set_joining(False)


async def expired(host: BucketService, cut: Cut, join: UpstreamState) -> None:
    await join.set_joining(False)
    cut.expires = 0
    assert not await host.cuts.release(cut.name)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [released, expired])
async def test_what_cuts_and_a_join_kept_apart_is_compacted_without_another_flush(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[BucketService, Cut, UpstreamState], Awaitable[None]],
) -> None:
    """With a quota there may be no other flush until compaction has made room."""
    monkeypatch.setattr(compactor_module, "FIRST_LOOK_SECONDS", 3600.0)
    host = started(BucketService(folder, ServerConfig(folder)))
    keys, join = some_keys(P, 20), UpstreamState(host.bucket, host.disk)
    await flush(host, dict.fromkeys(keys, b"older"))
    cut = await host.cuts.create("c", range(PARTITIONS), 10**12)
    await join.set_joining(True)
    await flush(host, dict.fromkeys(keys, b"newer"))
    await until(lambda: host.compactor.waiting == 0 and not host.compactor.turn.locked())
    assert [head.rows for head in host.disk.store.heads(P)] == [20, 20]
    await end(host, cut, join)
    await until(lambda: [head.rows for head in host.disk.store.heads(P)] == [20])
    assert await host.close()


@pytest.mark.asyncio
async def test_a_purge_has_its_partition_looked_at_again(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        await looked_at(host)
        one = BlockRange(P, tuple(host.disk.store.heads(P)))
        await host.compactor.rewrite(one, await host.compactor.examine(one))
        assert P in host.compactor._backlog.waiting
        assert P not in host.compactor._costs


@pytest.mark.asyncio
async def test_a_partition_that_is_damaged_costs_nothing_more(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        keys = await looked_at(host)
        host.compactor.damaged({P: DataDamagedError("by hand")})
        await flush(host, {keys[0]: b"v"})
        assert P not in host.compactor._costs
        assert P not in host.compactor._backlog.waiting


async def filled(host: BucketService, keys: Sequence[bytes]) -> list[int]:
    """Store values of 4,000 bytes in several flushes, and compact them; returns the rows of each block."""
    for first in range(0, len(keys), 500):
        await flush(host, dict.fromkeys(keys[first : first + 500], bytes(4000)))
    return await compact(host)


async def delete(host: BucketService, keys: Sequence[bytes]) -> None:
    await flush(host, dict.fromkeys(keys))


@pytest.mark.asyncio
async def test_a_partition_at_its_quota_is_compacted_for_few_deletes(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 100)
        one_block = some_keys(P + 1, 1)
        await flush(host, dict.fromkeys([*keys, *one_block], bytes(1000)))
        await delete(host, keys[:15])
        assert await compact(host) == [100, 15]
        host.compactor.reclaim()
        assert await compact(host) == [100]
        # So is what is flushed from now on, but nothing anew that was looked at.
        await delete(host, keys[15:30])
        assert await compact(host) == [100]
        host.compactor._backlog.waiting.clear()
        host.compactor.reclaim()
        assert host.compactor.waiting == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [500, 3000])
async def test_a_quota_has_less_reclaimed_than_other_compaction_also_after_a_sweep(
    folder: Path, count: int
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, count)
        before = await filled(host, keys)
        # The few rows are in one block; its hashes alone do not tell that it is worth it.
        await delete(host, few := keys[: count // 50])
        host.compactor._reclaim_now()
        assert await compact(host) == [*before, len(few)], "a sweep leaves it"
        host.compactor.reclaim()
        assert sum(await compact(host)) == count


@pytest.mark.asyncio
async def test_what_was_chosen_for_a_quota_is_rewritten_so_when_nothing_is_refused_any_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 3000)
        await filled(host, keys)
        await delete(host, keys[:60])
        await compact(host)
        look = host.compactor._look

        def last(pins: Mapping[int, Sequence[int]]) -> object:
            found = look(pins)
            host.compactor._reclaim_until = -math.inf
            return found

        monkeypatch.setattr(host.compactor, "_look", last)
        host.compactor.reclaim()
        assert sum(await compact(host)) == 3000


@pytest.mark.asyncio
async def test_at_a_quota_what_is_on_either_side_of_a_cut_is_reclaimed(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        old, new = (keys := some_keys(P, 200))[:100], keys[100:]
        for some in (old, new):
            await flush(host, dict.fromkeys(some, bytes(1000)))
            await compact(host)
            await delete(host, some[:30])
            # As of somebody who makes the next one before the last one is released.
            await host.cuts.create(f"cut-{some is new}", [P], 10**12)
        await delete(host, old[30:31])
        host.compactor.reclaim()
        assert await compact(host) == [100, 100, 1]


@pytest.mark.asyncio
async def test_what_is_deleted_little_by_little_at_a_quota_is_reclaimed(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 1000)
        await flush(host, dict.fromkeys(keys, bytes(1000)))
        await compact(host)
        host.compactor.reclaim()
        for first in range(0, 60, 6):
            await delete(host, keys[first : first + 6])
            await compact(host)
        assert sum(await compact(host)) < len(keys) + 20


@pytest.mark.asyncio
async def test_few_deletes_of_many_rows_are_reclaimed_where_they_have_much_below(
    folder: Path,
) -> None:
    async with compacted_by_hand(folder) as host:
        small, large = (keys := some_keys(P, 2000))[:-4], keys[-4:]
        await flush(host, dict.fromkeys(small, b"v" * 50) | dict.fromkeys(large, bytes(60_000)))
        await delete(host, small[:4])
        host.compactor.reclaim()
        assert await compact(host) == [2000, 4], "to rewrite it all would have freed 200 bytes"
        await delete(host, large)
        assert await compact(host) == [1996 + 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [15_000, 50_000])
@pytest.mark.parametrize("at_quota", [False, True])
async def test_large_values_are_not_written_anew_for_counters_in_their_blocks(
    folder: Path, size: int, at_quota: bool
) -> None:
    async with compacted_by_hand(folder) as host:
        large, counters = (keys := some_keys(P, 50))[:20], keys[20:]
        await flush(host, dict.fromkeys(large, bytes(size)) | dict.fromkeys(counters, b"0"))
        assert await compact(host) == [50]
        before = host.disk.counters.merge_output_bytes
        for _ in range(10):
            if at_quota:
                host.compactor.reclaim()
            await flush(host, dict.fromkeys(counters, b"1"))
            await compact(host)
        assert host.disk.counters.merge_output_bytes - before < 20 * size
        # They go as soon as they are replaced themselves.
        await flush(host, dict.fromkeys(large, b"small"))
        host.compactor.reclaim()
        assert sum(await compact(host)) < 10 * len(counters)
        assert host.disk.store.used_bytes() < 20 * size


@pytest.mark.asyncio
async def test_a_range_for_which_there_is_no_room_takes_no_other_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compacted_by_hand(folder) as host:
        await flush(host, dict.fromkeys([*some_keys(P, 3), *some_keys(P + 1, 3)], b"v"))
        await flush(host, dict.fromkeys([*some_keys(P, 3), *some_keys(P + 1, 3)], b"w"))
        check = host.compactor._check_room

        def none_for_p(ranges: Sequence[BlockRange]) -> int:
            if P in [one.partition for one in ranges]:
                raise NoRoomError("no room")
            return check(ranges)

        monkeypatch.setattr(host.compactor, "_check_room", none_for_p)
        with pytest.raises(NoRoomError):
            await host.compactor._merge([P, P + 1])
        assert [len(host.disk.store.heads(p)) for p in (P, P + 1)] == [2, 1]
        # The trouble lasts while others are compacted.
        await host.compactor._merge([P + 1])
        assert host.compactor._without_room == {P}
        monkeypatch.undo()
        await host.compactor._merge([P])
        assert not host.compactor._without_room


@pytest.mark.asyncio
async def test_what_is_flushed_while_a_partition_is_looked_at_has_it_looked_at_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = await looked_at(host)
        look, loop = host.compactor._look, asyncio.get_running_loop()

        def meanwhile(pins: Mapping[int, Sequence[int]]) -> object:
            found = look(pins)
            asyncio.run_coroutine_threadsafe(flush(host, {keys[0]: b"v"}), loop).result()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(host.compactor, "_look", meanwhile)
            host.compactor.note([P])
            # As its own task takes it.
            host.compactor._backlog.waiting.clear()
            await host.compactor._merge([P])
        assert P in host.compactor._backlog.waiting
        assert P not in host.compactor._costs


@pytest.fixture
def always_by_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small ranges looked at by their hashes too."""
    monkeypatch.setattr(compactor_module, "HASHES_RANGE_BYTES", 0)


@pytest.mark.asyncio
async def test_a_small_range_is_compacted_whatever_its_keys_are(folder: Path) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 20)
        for part in (keys[:10], keys[10:]):
            await flush(host, dict.fromkeys(part, b"v"))
        assert await compact(host) == [20]


@pytest.mark.asyncio
@pytest.mark.usefixtures("always_by_hashes")
async def test_blocks_that_are_all_small_are_joined_whatever_their_hashes_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, FAN_IN)
        for key in keys:
            await flush(host, {key: b""})
        monkeypatch.setattr(BlockCursor, "hashes", None)
        assert await compact(host) == [len(keys)]


@pytest.mark.asyncio
@pytest.mark.usefixtures("always_by_hashes")
async def test_keys_that_are_all_different_are_joined_and_those_that_are_repeated_compacted(
    folder: Path,
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 10 * FAN_IN)
        found = []
        for at in range(0, len(keys), 10):
            await flush(host, dict.fromkeys(keys[at : at + 10], b"v"))
            found.append(await compact(host))
        assert found[:2] == [[10], [10, 10]], "rows were written anew, and none was dropped"
        assert found[-1] == [len(keys)]
        assert host.disk.counters.merge_input_rows == len(keys)
        # Now half of the rows are older ones of keys that came again.
        await flush(host, dict.fromkeys(keys, b"a newer value"))
        assert await compact(host) == [len(keys)]


@pytest.mark.asyncio
@pytest.mark.usefixtures("always_by_hashes")
async def test_small_blocks_on_both_sides_of_a_large_one_are_joined_one_side_after_the_other(
    folder: Path,
) -> None:
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 2 * FAN_IN + 1)
        rows = {key: b"%d" % at for at, key in enumerate(keys)}
        rows[keys[FAN_IN]] = bytes(JOIN_BYTES)
        for key in keys:
            await flush(host, {key: rows[key]})
        assert await compact(host) == [FAN_IN, 1, FAN_IN]
        assert stored_rows(host) == rows


@pytest.mark.asyncio
@pytest.mark.usefixtures("always_by_hashes")
async def test_keys_are_compared_where_their_hashes_are_not_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(BucketService(folder, ServerConfig(folder)))
    put_flush = host.disk.store.put_flush
    monkeypatch.setattr(
        host.disk.store,
        "put_flush",
        lambda blocks, ends, producers, hashes, counts: put_flush(blocks, ends, producers),
    )
    async with host.compactor.turn:
        keys = some_keys(P, 20)
        await flush(host, dict.fromkeys(keys[:10], b"v"))
        assert await compact(host) == [10]
        await flush(host, dict.fromkeys(keys[10:], b"v"))
        assert await compact(host) == [20]
    assert await host.close()


@pytest.mark.asyncio
@pytest.mark.usefixtures("always_by_hashes")
@pytest.mark.parametrize("large", [0, 10**5])
async def test_what_is_stored_is_bounded_by_what_is_alive_however_few_rows_are_superseded(
    folder: Path, large: int
) -> None:
    """Beside new keys, one large value comes again each time, or some small ones that are all there is; then nothing."""
    async with compacted_by_hand(folder) as host:
        keys = some_keys(P, 601)
        rows: Rows = {}
        for turn in range(20):
            now = keys[30 * turn : 30 * turn + 30] if large else keys[:30]
            new = dict.fromkeys(now, b"v" * 50) | {keys[-1]: bytes([turn]) * large}
            await flush(host, new)
            await compact(host)
            rows |= new
        alive = sum(len(key) + len(value) + 8 for key, value in rows.items())
        used = sum(head.size for head in host.disk.store.heads(P))
        assert used < 2.2 * alive
        assert stored_rows(host) == rows


@pytest.mark.asyncio
async def test_what_is_said_of_a_damaged_partition_holds_nothing_that_was_merged_with_it(
    folder: Path,
) -> None:
    host = BucketService(folder, ServerConfig(folder))

    def merge(batch: bytes) -> None:
        raise DataDamagedError(f"one of {len(batch)} bytes is damaged") from ValueError("why")

    try:
        merge(bytes(9))
    except DataDamagedError as error:
        host.compactor.damaged({P: error})
    kept = host.bucket.partitions.problems[P]
    assert kept.message == "one of 9 bytes is damaged"
    assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
    assert await host.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("worker", "step", "failing"),
    [
        ("compactor", "_look", Failing.MERGE),
        ("compactor", "purge", Failing.PURGE),
        ("flusher", "flush", Failing.FLUSH),
        ("bucket", "take_commit", Failing.JOURNAL),
        ("disk", "append", Failing.JOURNAL),
    ],
)
async def test_what_works_in_the_background_goes_on_once_there_is_memory_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, worker: str, step: str, failing: Failing
) -> None:
    monkeypatch.setattr(compactor_module, "SWEEP_SECONDS_MIN", 0.05)
    host = started(
        BucketService(folder, ServerConfig(folder, tombstone_seconds=0.0, flush_seconds=0.05))
    )

    def lacks(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(getattr(host, worker), step, lacks)
        await host.write(build_block([b"a"], [b"v"]), b"", None, 0)
        host.flusher.wanted.set()
        host.compactor.note([1])
        await until(lambda: failing in host.disk.troubles)
    assert host.bucket.failure is None
    await host.durable((await host.write(build_block([b"b"], [b"v"]), b"", None, 0)).entry)
    host.flusher.wanted.set()
    await until(lambda: host.problem is None)
    assert await host.close()
