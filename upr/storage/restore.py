"""What the store of an old copy must forget: things that speak of a future which the copy does not have."""

from collections.abc import Mapping
from dataclasses import dataclass

from upr.storage.keyspace import ConsumerRow
from upr.storage.store import Store


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was removed.

    Attributes:
        cuts: the names of all cuts: what they were made for went on from another history.
        consumers: (name, partition, acknowledged seqno) above what the partition keeps.
    """

    cuts: tuple[str, ...]
    consumers: tuple[tuple[str, int, int], ...]


def forget_future(store: Store, ends: Mapping[int, int]) -> Forgotten:
    """Remove all cuts, and what was only acknowledged above what is kept; durable when it returns.

    Args:
        ends: by partition, the last complete marker that is kept; of others nothing is removed.
    """
    cuts = store.cuts()
    gone: dict[tuple[bytes, int], ConsumerRow | None] = {}
    told: list[tuple[str, int, int]] = []
    for name, rows in store.consumers().items():
        for partition, row in rows.items():
            # A saved position must stay, however high: its consumer has the data, and is to be rolled back.
            if partition in ends and row.seqno > ends[partition] and not row.position:
                gone[name, partition] = None
                told.append((name.decode(errors="replace"), partition, row.seqno))
    if cuts:
        store.put_cuts(dict.fromkeys(cuts))
    if gone:
        store.put_consumers(gone)
    return Forgotten(tuple(sorted(n.decode(errors="replace") for n in cuts)), tuple(sorted(told)))
