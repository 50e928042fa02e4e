"""Tasks of reading: their control rows, then their ranges, each followed over the SDK exactly to its end.

When the server's history turns out to be another one in the middle, what to do depends on who comes next. The next
batch of a stream begins from the planned end, so it finds out by itself and takes back what was delivered: here the
partition just ends. A batch read has no next one, and "fail" does not want one.
"""

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from upr_client import ChangeBatch, MemoryPositions, Only, Position, Rollback, Tuning
from upr_client.admin import Pin
from upr_client.arrow import record_batch
from upr_protocol.block import Block
from upr_protocol.errors import SnapshotGoneError, UprError
from upr_protocol.handshake import BUCKET_GONE_RULE, Rule
from upr_spark.errors import UprSparkError
from upr_spark.source.offsets import Entry
from upr_spark.source.options import Rules, Settings
from upr_spark.source.plan import Control, Range, data_loss, rollback_required
from upr_spark.source.server import LOAD, UNUSED_SECONDS, Answer, CutPoint, Server, bucket_mismatch

_GONE_HINT: Final = (
    "the end of this batch was not pinned any more: let leaseTtl be longer than a query is away or a batch takes. "
    "Restart with onRollback=reset, or with a new checkpoint and an empty target"
)
_BATCH_HINT: Final = "load() again: a new DataFrame shows what is there now"


@dataclass(frozen=True, slots=True)
class Rows:
    """Mutations, in whatever form the follower gives them.

    Args:
        cut_off: whether rows above the ends may be among them, which are not to be shown.
    """

    content: Any
    cut_off: bool = False


class Followed(Protocol):
    """Follows the ranges of a task; it remembers how far each partition was read."""

    def follow(self, partitions: Sequence[int], *, exact: bool) -> Generator[Any]:
        """Yield what ``Rows`` holds, and rollbacks, until every partition has ended.

        A partition that is rolled back because of its purge seqno goes on from 0 when more is asked for.

        Args:
            exact: whether each partition is shown as of its end; else as it is now, and further.

        Raises:
            SnapshotGoneError: one cannot be shown as of its end.
        """

    def reached(self, partition: int) -> int:
        """Return up to which seqno a partition was read."""

    def ask(self, ids: Mapping[int, int | None]) -> dict[int, Answer]:
        """Say hello."""


class Reading:
    """Reads the ranges of one task.

    Args:
        ranges: at most one a partition.
        rules: about changed histories.
        in_batch: whether this is a batch read, after which nothing comes that could mend it.
    """

    def __init__(self, ranges: Sequence[Range], rules: Rules, in_batch: bool) -> None:
        self._ranges = {one.partition: one for one in ranges}
        self._rules = rules
        self._in_batch = in_batch

    def read(self, followed: Followed) -> Iterator[Rows | list[Control]]:
        """Yield control rows and mutations; control rows of the plan come first.

        Raises:
            UprSparkError: UPR_ROLLBACK_REQUIRED, UPR_DATA_LOSS, UPR_SNAPSHOT_GONE, UPR_HISTORY_CHANGED or
                UPR_BUCKET_MISMATCH.
        """
        planned = [
            Control(one.partition, one.rollback)
            for one in self._ranges.values()
            if one.rollback is not None
        ]
        if planned:
            yield planned
        left = [p for p, one in self._ranges.items() if one.end_seqno > one.from_seqno]
        exact = True
        while left:
            stopped: set[int] = set()
            try:
                yield from self._follow(followed, left, exact, stopped)
                if not stopped:
                    return
            except SnapshotGoneError as error:
                asked, left = left, self._unfinished(left, followed)
                stopped = self._left_behind(followed, left)
                # One that had arrived, without a sign of it, may be the one that the error is about.
                if not stopped and len(left) == len(asked):
                    # Which partition it was does not matter: all of them had the same lease.
                    self._check_lapsed(error, exact)
                    exact = False
            left = [p for p in self._unfinished(left, followed) if p not in stopped]

    def _unfinished(self, partitions: Sequence[int], followed: Followed) -> list[int]:
        return [p for p in partitions if followed.reached(p) < self._ranges[p].end_seqno]

    def _follow(
        self, followed: Followed, partitions: Sequence[int], exact: bool, stopped: set[int]
    ) -> Iterator[Rows | list[Control]]:
        # Closed, so that what was reached is known before the next look at it.
        with closing(followed.follow(partitions, exact=exact)) as items:
            for item in items:
                if not isinstance(item, Rollback):
                    yield Rows(item, cut_off=not exact)
                elif self._begins_anew(followed, item, exact):
                    yield [Control(item.partition, 0)]
                else:
                    stopped.add(item.partition)
                    return

    def _begins_anew(self, followed: Followed, told: Rollback, exact: bool) -> bool:
        """Return whether a partition is read from 0 after all; False when it ends here."""
        one, rules = self._ranges[told.partition], self._rules
        if told.rule == BUCKET_GONE_RULE:
            raise bucket_mismatch(told.words)
        if told.rule == Rule.BELOW_PURGE:
            # Every point below the purge seqno is void from now on, so nothing later goes back behind this.
            if rules.fail_on_data_loss and rules.mode != "reset":
                raise data_loss(one.partition, one.from_seqno, one.end_id, told.rule, told.words)
            return True
        answer = followed.ask({one.partition: one.end_id})[one.partition]
        if exact and not _is_left(one, answer):
            # The next batch would take the end for reached.
            raise _history_changed(one.partition, told.words)
        self._check_may_stop(one, answer, told.words)
        return False

    def _left_behind(self, followed: Followed, partitions: Sequence[int]) -> set[int]:
        """Return the partitions whose planned ends are not part of the server's history any more."""
        answers = followed.ask({p: self._ranges[p].end_id for p in partitions})
        found = {p for p in partitions if _is_left(self._ranges[p], answers[p])}
        for partition in sorted(found):
            self._check_may_stop(
                self._ranges[partition], answers[partition], answers[partition].words
            )
        return found

    def _check_may_stop(self, one: Range, answer: Answer, words: str) -> None:
        back_to = answer.newest_record if answer.rollback is None else answer.rollback
        entry = Entry(one.end_id, one.end_seqno)
        if self._in_batch:
            raise _history_changed(one.partition, words)
        if self._rules.mode == "fail" and not (back_to == 0 and not self._rules.fail_on_data_loss):
            raise rollback_required(
                one.partition, entry, answer, back_to, min(one.from_seqno, back_to)
            )

    def _check_lapsed(self, error: SnapshotGoneError, exact: bool) -> None:
        if self._in_batch or self._rules.mode != "reset" or not exact:
            raise UprSparkError(
                "SNAPSHOT_GONE",
                error.message,
                hint=_BATCH_HINT if self._in_batch else _GONE_HINT,
            ) from None


def _is_left(one: Range, answer: Answer) -> bool:
    """Whether the end of a range is not part of the server's history any more."""
    if answer.newest_id == one.end_id:
        return answer.active and answer.high < one.end_seqno
    return answer.rollback is not None and answer.rollback < one.end_seqno


def _history_changed(partition: int, words: str) -> UprSparkError:
    return UprSparkError(
        "HISTORY_CHANGED",
        f"the server's history of partition {partition} changed while it was read: {words}",
        hint="begin the read again; of a batch, load() again: a new DataFrame shows what is there now",
        retriable=True,
        details={"partition": partition},
    )


class RangeReader:
    """Follows ranges and gives their rows as record batches of about the size that the settings say.

    Args:
        server: of this process.
        settings: of the query.
        bucket_version: the one that the ranges are of.
        ranges: at most one a partition.
    """

    def __init__(
        self, server: Server, settings: Settings, bucket_version: int, ranges: Sequence[Range]
    ) -> None:
        self._server = server
        self._settings = settings
        self._version = bucket_version
        self._pins = {one.partition: Pin(one.end_id, one.end_seqno) for one in ranges}
        self._positions = {one.partition: _position(bucket_version, one) for one in ranges}

    def reached(self, partition: int) -> int:
        return self._positions[partition].seqno

    def ask(self, ids: Mapping[int, int | None]) -> dict[int, Answer]:
        """Say hello.

        Raises:
            UprSparkError: UPR_BUCKET_MISMATCH, or as the server refused.
        """
        answers = self._server.ask(ids, whole=True)
        if self._server.bucket_version != self._version:
            raise bucket_mismatch("the bucket was dropped and created again while it was read")
        return answers

    def follow(self, partitions: Sequence[int], *, exact: bool) -> Generator[Any]:
        """Yield record batches of ``upr_client.arrow``'s schema, and rollbacks; see ``Followed``."""
        settings = self._settings
        changes = self._server.bucket.changes(
            resume=MemoryPositions({p: self._positions[p] for p in partitions}),
            until=CutPoint("", {p: self._pins[p] for p in partitions}) if exact else "now",
            only=Only(
                partitions, keys_only=not settings.include_values, key_prefix=settings.key_prefix
            ),
            tuning=Tuning(
                markers_at_record=True,
                recent_key_bytes=0,
                credit_bytes=settings.credit_bytes,
                retry_seconds=settings.connection.retry_timeout,
            ),
            on_rollback="event",
        )
        try:
            with changes:
                try:
                    yield from self._items(changes.batches())
                finally:
                    self._positions.update(changes.positions())
        except (SnapshotGoneError, UprSparkError):
            raise
        except UprError as error:
            raise UprSparkError.of(error) from None

    def _items(self, batches: Any) -> Iterator[Any]:
        gathered = _Gathered()
        try:
            for batch in batches:
                if isinstance(batch, Rollback):
                    yield from gathered.take()
                    yield batch
                    continue
                gathered.add(batch.blocks)
                if (
                    gathered.rows >= self._settings.batch_rows
                    or gathered.size >= self._settings.batch_bytes
                ):
                    yield from gathered.take()
        except SnapshotGoneError:
            # What was gathered counts as read by now, and reading may go on behind it.
            yield from gathered.take()
            raise
        yield from gathered.take()


@contextmanager
def renewed(server: Server, cut: str | None, lease: float) -> Iterator[None]:
    """Renew a cut meanwhile, also while nobody asks for rows.

    Args:
        cut: its name; None for none.
    """
    if cut is None:
        yield
        return
    client, bucket, ended = server.client, server.bucket, threading.Event()
    pause = min(lease, UNUSED_SECONDS if cut.endswith(LOAD) else lease) / 3

    def renew() -> None:
        while not ended.wait(pause):
            # One that is gone shows when the rest cannot be served as of its end; ValueError is gRPC's at the close.
            with suppress(UprError, ValueError):
                client.admin.renew_cut(bucket, cut, lease)

    thread = threading.Thread(target=renew, name="upr-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
            yield record_batch(ChangeBatch(blocks))


def _position(bucket_version: int, one: Range) -> Position:
    if one.from_seqno == 0:
        return Position.fresh(bucket_version)
    # Up to an earlier pin everything was read, and as of it.
    held = one.from_seqno
    return Position(bucket_version, one.end_id, one.end_id, held, held, (held,), None)
