"""SDK clients that keep going whatever happens, and tell a ``World`` what they see."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from tests.crash.recording import PARTITIONS
from tests.harness import WAIT_SECONDS
from tests.model import Row, State, apply
from upr_client import ChangeBatch, MemoryPositions, Only, Position, Rollback, Tuning, backoff
from upr_client.changes.events import block_changes
from upr_client.types import AsyncBucket

if TYPE_CHECKING:
    from tests.crash.world import World

RECORDED = frozenset(range(0, PARTITIONS, 8))
HEARTBEAT_SECONDS = 0.25
KEYS = 3000
_RUN_FIELDS = ["partition", "count", "start_seqno", "end_seqno", "horizon"]


def reconnect_soon(monkeypatch: Any) -> None:
    """Have SDK clients wait for less between two attempts, so that a test is not mostly that."""
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(backoff, "LONGEST_SECONDS", 0.2)


class Moved:
    """Wakes whoever waits for something to happen in this process; may be told from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def tell(self) -> None:
        with suppress(RuntimeError):
            # The loop may be closed when a thread of a test that failed says its last.
            self._loop.call_soon_threadsafe(self._event.set)

    async def until(
        self, true: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until something is true.

        Raises:
            AssertionError: it is not after ``seconds``; with ``what``.
        """
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    self._event.clear()
                    await self._event.wait()
        except TimeoutError:
            raise AssertionError(f"not within {seconds:g} s: {what}") from None


class WatchedPositions(MemoryPositions):
    """Positions never go back within a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[int, Position] = {}
        self.wrong: list[tuple[Position, Position]] = []

    def save(self, positions: Any) -> None:
        for partition, new in positions.items():
            old = self.saved.get(partition)
            if (
                old is not None
                and old.failover_id == new.failover_id
                and old.data_id == new.data_id
                and old.seqno > new.seqno
            ):
                self.wrong.append((old, new))
            self.saved[partition] = new
        super().save(positions)


class Follower:
    """What one application has, from the batches that the SDK handed to it.

    Args:
        recorded: whether the history tells of it; one that reads what is not durable may see what nobody is told of.
    """

    def __init__(self, world: "World", name: str, recorded: bool = True) -> None:
        self.name = name
        self.statuses: list[str] = []
        self.positions = WatchedPositions()
        self.reached = [0] * PARTITIONS
        self.batches = 0
        self.failure: BaseException | None = None
        self.recorded = recorded
        self._world = world
        self._rows: list[list[Row]] = [[] for _ in range(PARTITIONS)]

    def say(self, words: str) -> None:
        """Take a status line of the SDK."""
        self.statuses.append(words)
        self._world.moved.tell()

    def said(self, words: str, since: int = 0) -> bool:
        """Whether one of the status lines after the first ``since`` had these words."""
        return any(words in status for status in self.statuses[since:])

    @property
    def done(self) -> int:
        """Batches so far."""
        return self.batches

    def _undo(self, rollback: Rollback) -> None:
        p, to = rollback.partition, rollback.seqno
        self._rows[p] = [row for row in self._rows[p] if row.seqno <= to]
        self.reached[p] = to
        self._event("rollback", p, told=None, newest=rollback.new_id, to=to)
        self._event("start", p, answer="started", newest=rollback.new_id, seqno=to, until=None)
        self._world.moved.tell()

    def take(self, batch: ChangeBatch | Rollback) -> None:
        """Apply a batch, or undo."""
        if isinstance(batch, Rollback):
            self._undo(batch)
            return
        markers = set(batch.markers)
        for block in batch.blocks:
            left = iter(block_changes(block))
            for p, count, start, end, horizon in block.runs[_RUN_FIELDS].tolist():
                rows = [Row(c.seqno, c.key, c.value) for c in islice(left, count)]
                assert start == self.reached[p], (self.name, p, start, self.reached[p])
                self.reached[p] = end
                self._rows[p] += rows
                self._event("run", p, token=0, start=start, end=end, horizon=horizon, rows=rows)
                if (p, end) in markers:
                    self._event("marker", p, seqno=end)
        self.batches += 1
        self._world.moved.tell()

    def _event(self, kind: str, partition: int, **fields: Any) -> None:
        if self.recorded and partition in RECORDED:
            event = {"event": kind, "reader": self.name, "partition": partition, **fields}
            self._world.history.append(event)

    def has(self, high: list[int]) -> bool:
        """Whether it has everything up to these seqnos."""
        return self.failure is None and self.reached == high

    def state(self) -> State:
        """The live keys and values."""
        state: State = {}
        for rows in self._rows:
            apply(state, rows)
        return state

    def options(self, stability: str = "disk", **tuning: Any) -> dict[str, Any]:
        """How it follows."""
        return {
            "consumer": self.name,
            "resume": self.positions,
            "only": Only(stability=stability),
            "tuning": Tuning(
                **{"heartbeat_seconds": HEARTBEAT_SECONDS, "save_seconds": 0.1, **tuning}
            ),
            "on_rollback": "event",
            "on_status": self.say,
        }


class Writer:
    """Writes batches over the SDK, one after the other, until it is told to stop.

    Attributes:
        answered: writes that were.
        rows_sent: of the newest write.
        value_bytes: values are up to so long.
    """

    def __init__(self, world: "World", name: str, seed: int) -> None:
        self.name = name
        self.answered = 0
        self.rows_sent = 0
        self.value_bytes = 100
        self._world = world
        self._rng = random.Random(seed)

    @property
    def done(self) -> int:
        """Writes that were answered so far."""
        return self.answered

    def batch(self) -> list[tuple[bytes, bytes | None]]:
        """Rows of keys that everybody writes; each value is unique."""
        rng, rows = self._rng, []
        for place in range(rng.randint(1, 60)):
            value = b"%s %d %d " % (self.name.encode(), self.answered, place)
            value += b"v" * rng.randint(0, self.value_bytes)
            rows.append((b"key %d" % rng.randrange(KEYS), None if rng.random() < 0.2 else value))
        return rows

    async def run(self, bucket: AsyncBucket) -> None:
        while not self._world.stopping:
            await self.write(bucket)

    async def write(self, bucket: AsyncBucket) -> None:
        """Write one batch and note where it went."""
        rows = self.batch()
        self.rows_sent = len(rows)
        number = self.answered + 1
        self._world.sent(self.name, number, rows)
        results = await bucket.write_many(rows)
        self._world.acknowledged(self.name, number, rows, results.runs)
        self.answered = number
        self._world.moved.tell()
