"""The compactor's part of the simulated world: its steps apart, so that anything may happen between them."""

import random
from collections.abc import Mapping, Sequence

from tests.model import ModelPartition
from tests.simulation.recording import Recorder
from upr.engine.bucket import Bucket
from upr.engine.compaction import (
    PurgeAges,
    begin_purge,
    end_purge,
    plan_merge,
    plan_whole,
    purge_limits,
    segments,
)
from upr.storage.blocks import BlockRange, Head, Replacement, last_complete
from upr.storage.compact import Purge, examine, merge_direct, rewrite_group
from upr.storage.store import Store

PURGE_HASTE = 0.25
"""How likely a purge that has begun is stored in a step: much may happen in between."""
AGES = PurgeAges(young=3_000, held=6_000)


class SimulatedMerger:
    """Merges one or several partitions at a time; ``step`` does the next thing.

    Attributes:
        settled: what plan_merge is told of ranges that were compared as a whole.
    """

    def __init__(
        self,
        bucket: Bucket,
        store: Store,
        model: Mapping[int, ModelPartition],
        times: Mapping[int, Sequence[int]],
        rng: random.Random,
        recorder: Recorder,
    ) -> None:
        self._bucket = bucket
        self._store = store
        self._model = model
        self._times = times
        self._rng = rng
        self._recorder = recorder
        self._settled: dict[int, list[tuple[int, int]]] = {p: [] for p in times}
        self._todo: list[Replacement] = []
        self._raised: dict[int, int] = {}
        self.counts: dict[str, int] = {}

    def step(self, now: int) -> bool:
        """Choose and compute, or store one replacement; False when there is nothing to merge."""
        if self._todo:
            if not self._raised or self._rng.random() < PURGE_HASTE:
                self._store_one()
            return True
        if self._raised:
            end_purge(self._bucket, self._raised)
            self._raised = {}
            return True
        return self._choose(now)

    def give_up(self) -> None:
        """The store failed: what is left of the merge is not done; it is chosen anew."""
        end_purge(self._bucket, self._raised)
        self._raised, self._todo = {}, []
        self._settled = {p: [] for p in self._times}

    def _choose(self, now: int) -> bool:
        ranges = []
        whole = self._rng.random() < 0.3
        for partition in self._model:
            heads = self._store.heads(partition)
            pinned = self._bucket.cuts.pinned(partition)
            found = (
                plan_whole(partition, heads, pinned)
                if whole
                else self._any_range(partition, heads, pinned)
                or plan_merge(partition, heads, pinned, self._settled[partition])
            )
            if found is not None and self._rng.random() < 0.8:
                ranges.append(found)
        if not ranges:
            return False
        if self._rng.random() < 0.5:
            self._direct(ranges, now)
        else:
            self._large(self._rng.choice(ranges), now)
        return True

    def _any_range(
        self, partition: int, heads: list[Head], pinned: tuple[int, ...]
    ) -> BlockRange | None:
        """Now and then merge neighbours that no policy would choose: they must be right as well."""
        if self._rng.random() < 0.5:
            return None
        segment = self._rng.choice([*segments(heads, pinned), []])
        if len(segment) < 2:
            return None
        last = self._rng.randint(2, len(segment))
        chosen = tuple(segment[self._rng.randrange(last - 1) : last])
        # What is above the range has not been looked at, so the range must end in a marker of its own.
        return (
            BlockRange(partition, chosen)
            if last_complete(heads[: heads.index(chosen[-1]) + 1]) == chosen[-1].end
            else None
        )

    def _direct(self, ranges: list[BlockRange], now: int) -> None:
        limits = purge_limits(self._bucket, AGES, now)
        direct = merge_direct(ranges, self._store.blocks, limits)
        assert not direct.damaged
        self._raise(direct.purges, now)
        self._todo = [
            one
            for one in direct.replacements
            if one.partition in self._raised or one.partition not in direct.purges
        ]
        self._count("direct merges")

    def _large(self, one: BlockRange, now: int) -> None:
        limits = purge_limits(self._bucket, AGES, now)
        examined = examine(one, self._store.blocks, limits)
        if examined.purge is not None:
            self._raise({one.partition: examined.purge}, now)
            if not self._raised:
                examined = examine(one, self._store.blocks, None)
        self._todo = [
            rewrite_group(examined, group, self._store.blocks) for group in examined.groups()
        ]
        self._settled[one.partition] = [(one.start, one.end)]
        self._count("large merges")

    def _raise(self, purges: Mapping[int, Purge], now: int) -> None:
        passed = [follower.passed() for follower in self._bucket.followers]
        positions = self._bucket.consumer_positions
        passed += [one.passed(self._bucket.partitions.newest_id) for _, one in positions]
        pinned = self._bucket.cuts.lowest()
        self._raised = begin_purge(self._bucket, purges, AGES, now)
        for partition, seqno in self._raised.items():
            assert self._model[partition].rows[seqno - 1].value is None
            assert seqno < self._model[partition].high
            assert seqno <= pinned[partition], "a cut was passed"
            age = now - self._times[partition][seqno - 1]
            self._recorder.add(
                "purge",
                partition=partition,
                seqno=seqno,
                age=age,
                young=AGES.young,
                held=AGES.held,
            )
            assert age >= AGES.young
            if any(one[partition] < seqno for one in passed):
                assert age >= AGES.held, "somebody must begin anew without need"
                self._count("forced purges")
            self._model[partition].purged = max(self._model[partition].purged, seqno)
            self._count("purges")

    def _store_one(self) -> None:
        """In the order of the ranges: older blocks of a key go before its tombstone."""
        self._store.replace([self._todo.pop(0)])

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
