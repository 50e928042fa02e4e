"""Following the ranges of a task over the SDK."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from upr_client import ChangeBatch, MemoryPositions, Pin, Position
from upr_client.arrow import record_batch
from upr_protocol.block import Block
from upr_protocol.errors import SnapshotGoneError, UprError
from upr_spark.errors import UprSparkError
from upr_spark.source.options import Settings
from upr_spark.source.planning import Answer, Range
from upr_spark.source.reading import Told
from upr_spark.source.server import Server, bucket_mismatch


class Follower:
    """Follows ranges and gives their rows as record batches of about the size that the settings say.

    Args:
        server: of this process.
        settings: of the query.
        bucket_version: the one that the ranges are of.
        ranges: at most one a partition.
        cut: the cut at which they end, renewed while this reads; None for none.
    """

    def __init__(
        self,
        server: Server,
        settings: Settings,
        bucket_version: int,
        ranges: Sequence[Range],
        cut: str | None,
    ) -> None:
        self._server = server
        self._settings = settings
        self._version = bucket_version
        self._pins = {one.partition: Pin(one.end_id, one.end_seqno) for one in ranges}
        self._positions = {one.partition: _position(bucket_version, one) for one in ranges}
        self._cut = cut
        self._renewed = time.monotonic()

    def reached(self, partition: int) -> int:
        """Return up to which seqno a partition was read."""
        return self._positions[partition].seqno

    def forget(self, partition: int) -> None:
        """Have a partition begin at 0 when it is followed again."""
        self._positions[partition] = Position.fresh(self._version)

    def ask(self, ids: Mapping[int, int | None]) -> dict[int, Answer]:
        """Say hello.

        Raises:
            UprSparkError: UPR_BUCKET_MISMATCH, or as the server refused.
        """
        answers = self._server.ask(ids, whole=True)
        if self._server.bucket_version != self._version:
            raise bucket_mismatch("the bucket was dropped and created anew while it was read")
        return answers

    def follow(self, partitions: Sequence[int], *, exact: bool) -> Generator[Any]:
        """Yield record batches of ``upr_client.arrow``'s schema, and lists of ``Told``; see ``reading.Followed``."""
        settings = self._settings
        ends: dict[str, Any] = {"until_now": True}
        if exact:
            ends = {"until": _Pinned({p: self._pins[p] for p in partitions})}
        changes = self._server.bucket.changes(
            partitions,
            positions=MemoryPositions({p: self._positions[p] for p in partitions}),
            on_rollback="event",
            markers_at_record=True,
            keys_only=not settings.include_values,
            key_prefix=settings.key_prefix,
            recent_key_bytes=0,
            credit_bytes=settings.credit_bytes,
            retry_seconds=settings.connection.retry_timeout,
            **ends,
        )
        try:
            with changes:
                try:
                    yield from self._items(changes.batches())
                finally:
                    self._positions.update(changes.positions())
        except SnapshotGoneError:
            raise
        except UprSparkError:
            raise
        except UprError as error:
            raise UprSparkError.of(error) from None

    def _items(self, batches: Any) -> Iterator[Any]:
        gathered = _Gathered()
        try:
            for batch in batches:
                if batch.rollbacks:
                    yield from gathered.take()
                    yield [Told(one.partition, one.rule, one.words) for one in batch.rollbacks]
                    continue
                gathered.add(batch.blocks)
                if (
                    gathered.rows >= self._settings.batch_rows
                    or gathered.size >= self._settings.batch_bytes
                ):
                    yield from gathered.take()
                    self._renew()
        except SnapshotGoneError:
            # What was gathered counts as read by now, and reading may go on behind it.
            yield from gathered.take()
            raise
        yield from gathered.take()

    def _renew(self) -> None:
        lease = self._settings.lease
        if self._cut is None or time.monotonic() - self._renewed < lease / 3:
            return
        self._renewed = time.monotonic()
        # One that is gone shows when the rest cannot be served as of its end.
        with suppress(UprError):
            self._server.bucket.renew_cut(self._cut, lease)


class _Gathered:
    """Blocks that wait to become one record batch."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self.rows = 0
        self.size = 0

    def add(self, blocks: Sequence[Block]) -> None:
        self._blocks += blocks
        for block in blocks:
            self.rows += block.rows
            self.size += len(block.keys) + len(block.values)

    def take(self) -> Iterator[Any]:
        """Yield the record batch, if there is a row, and begin the next one."""
        blocks, rows = self._blocks, self.rows
        self._blocks, self.rows, self.size = [], 0, 0
        if rows:
            yield record_batch(ChangeBatch(blocks, []))


class _Pinned:
    def __init__(self, pins: Mapping[int, Pin]) -> None:
        self.pins = pins


def _position(bucket_version: int, one: Range) -> Position:
    if one.from_seqno == 0:
        return Position.fresh(bucket_version)
    # Up to an earlier pin everything was read, and as of it.
    held = one.from_seqno
    return Position(bucket_version, one.end_id, one.end_id, held, held, (held,), None)
