"""Which stored blocks to merge: size-tiered for each partition.

A stretch is what was merged together. Whenever the oldest stretch is no larger than all that was stored after it,
everything is merged, so what can be superseded is less than the oldest stretch. In between, a stretch that is no
larger than all behind it is merged with that as soon as these are FAN_IN together: a row is merged again only
after as much as its stretch was stored behind it, about log2(partition / flush) times at most, and less often
than that where flushes are small.

No merge goes across a pinned seqno, or past the last complete marker.
"""

from collections.abc import Iterable, Iterator, Sequence

from upr.storage.heads import Head, MergeRange, Stretch, last_complete, stretches

FAN_IN = 4
"""Fewer stretches than this are not merged, but for space: each merge costs something for each block it reads."""
BLOCK_COST = 1024
"""Counted on top of each block's bytes: the pages that it does not fill and the work that it makes anyway."""


def plan_merge(
    partition: int,
    heads: Sequence[Head],
    pinned: Sequence[int],
    settled: Iterable[tuple[int, int]] = (),
) -> MergeRange | None:
    """Return what to merge next in a partition, None when its tiers are in order.

    Args:
        heads: its stored blocks, oldest first.
        pinned: seqnos that no merge may cross, ascending.
        settled: see ``stretches``.
    """
    complete = last_complete(heads)
    mergeable = [head for head in heads if head.end <= complete]
    for segment in segments(mergeable, pinned):
        tiers = stretches(segment, settled)
        first = _first_to_merge(tiers)
        if first is not None:
            chosen = [head for tier in tiers[first:] for head in tier.heads]
            return MergeRange(partition, tuple(chosen))
    return None


def plan_whole(partition: int, heads: Sequence[Head], pinned: Sequence[int]) -> MergeRange | None:
    """Return the longest range that begins at 0 and may be merged, for dropping tombstones."""
    complete = last_complete(heads)
    first = next(segments([h for h in heads if h.end <= complete], pinned), [])
    if not first or first[0].start != 0:
        return None
    return MergeRange(partition, tuple(first))


def segments(heads: Sequence[Head], pinned: Sequence[int]) -> Iterator[list[Head]]:
    """Yield the blocks between pinned seqnos, oldest first.

    A block across a pinned seqno, which there may be if the pin came back from the dead, is a segment of its own.
    """
    segment: list[Head] = []
    for head in heads:
        if segment and any(segment[0].start < pin < head.end for pin in pinned):
            yield segment
            segment = []
        segment.append(head)
    if segment:
        yield segment


def _first_to_merge(tiers: Sequence[Stretch]) -> int | None:
    """Return the first stretch that is no larger than all behind it, and has enough behind it."""
    behind = sum(_cost(tier) for tier in tiers)
    for i, tier in enumerate(tiers[:-1]):
        cost = _cost(tier)
        behind -= cost
        if cost <= behind and (i == 0 or len(tiers) - i >= FAN_IN):
            return i
    return None


def _cost(tier: Stretch) -> int:
    return tier.size + BLOCK_COST * len(tier.heads)
