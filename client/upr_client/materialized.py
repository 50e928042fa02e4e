"""The state of a bucket as it is kept up to date: what a view does with what it receives. Without I/O."""

from collections.abc import Iterator

from upr_client.events import Change, ChangeBatch
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partition_of


class Materialized:
    """Keys and values of all partitions.

    Args:
        at_markers: whether changes are shown only when a snapshot marker completes them.

    Attributes:
        seqnos: up to where each partition is shown.
    """

    def __init__(self, at_markers: bool) -> None:
        self.seqnos = [0] * PARTITIONS
        self._at_markers = at_markers
        self._shown: list[dict[bytes, bytes | None]] = [{} for _ in range(PARTITIONS)]
        self._pending: dict[int, list[Change]] = {}

    def get(self, key: bytes) -> bytes | None:
        """The value that is shown, None for none."""
        return self._shown[partition_of(key)].get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._shown[partition_of(key)]

    def __len__(self) -> int:
        return sum(map(len, self._shown))

    def items(self) -> Iterator[tuple[bytes, bytes | None]]:
        """All keys with their values, partition by partition."""
        for shown in self._shown:
            # Taken in one step, so that what arrives meanwhile does no harm.
            yield from list(shown.items())

    def take(self, batch: ChangeBatch) -> None:
        """Take what came, in the order in which it came within each partition.

        A partition that was rolled back shows nothing until it is received anew: what it showed may never have
        happened.
        """
        for rollback in batch.rollbacks:
            self._pending.pop(rollback.partition, None)
            self._shown[rollback.partition] = {}
            self.seqnos[rollback.partition] = 0
        if not self._at_markers:
            for change in batch.changes:
                self._apply(change)
                self.seqnos[change.partition] = change.seqno
            for marker in batch.markers:
                self.seqnos[marker.partition] = marker.seqno
            return
        for event in batch.events():
            if isinstance(event, Change):
                self._pending.setdefault(event.partition, []).append(event)
                continue
            for change in self._pending.pop(event.partition, ()):
                self._apply(change)
            self.seqnos[event.partition] = event.seqno

    def _apply(self, change: Change) -> None:
        shown = self._shown[change.partition]
        if change.op == "delete":
            shown.pop(change.key, None)
        else:
            shown[change.key] = change.value
