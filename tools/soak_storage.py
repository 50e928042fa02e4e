"""Write, delete, merge, purge and cut for a long time, and compare every reader with a model at every marker.

Run by ``tools/dev.py soak --storage``. A real server with a small tail and short ages is written to by one writer,
so that the order within each partition is known: the model is simply the list of a partition's rows. Each reader
applies what it receives, and at every snapshot marker its state must be what the rows up to there make:

* one that keeps up, one with a tiny credit that dawdles, one whose calls end all the time,
* newcomers that begin at 0, read what is there now, and leave,
* a registered consumer that stays away for longer and longer, so that it holds purging up, and is overtaken at last,
* readers of cuts: from 0 to exactly the cut, while everything is overwritten.

The server's anonymous memory is looked at all along, and must not grow.
"""

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.harness import RunningServer
from tools.demo import say, soak_parser
from upr_client import AsyncClient, ChangeBatch, MemoryPositions, Only, Rollback, Tuning
from upr_client.errors import SnapshotGoneError
from upr_client.types import AsyncBucket
from upr_protocol.partitioning import partition_of

KEYS = 3_000
DELETES = 0.3
BATCH_ROWS = 400
SERVER_OPTIONS = (
    *("--tail-bytes", str(2**20)),
    *("--flush-seconds", "1"),
    *("--tombstone-age", "4s"),
    *("--purge-hold", "12s"),
)
REPORT_SECONDS = 30.0
GROWTH_BYTES = 40 * 2**20
"""By how much the highest anonymous memory of the last third may exceed that of the second third."""

Row = tuple[bytes, bytes | None]
State = dict[bytes, bytes]


class Violation(Exception):
    """Something that must never be was seen."""


def apply(state: State, row: Row) -> None:
    """Change a state as a row says."""
    key, value = row
    if value is None:
        state.pop(key, None)
    else:
        state[key] = value


class Model:
    """Every row of every partition, in the order of its seqnos: row i has seqno i + 1."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}
        self._grown = asyncio.Event()

    def wrote(self, partition: int, start: int, rows: list[Row]) -> None:
        """Take note of acknowledged rows."""
        known = self.rows.setdefault(partition, [])
        if len(known) != start:
            raise Violation(f"partition {partition}: rows from {start}, the last was {len(known)}")
        known += rows
        self._grown.set()
        self._grown = asyncio.Event()

    async def reached(self, partition: int, seqno: int) -> None:
        """Wait until the writer was told of a seqno: a reader may see a row sooner."""
        while len(self.rows.get(partition, ())) < seqno:
            async with asyncio.timeout(30):
                await self._grown.wait()

    def seqnos(self) -> dict[int, int]:
        """Return how far each partition is."""
        return {partition: len(rows) for partition, rows in self.rows.items()}


class Reader:
    """A follower's state, and beside it what the model says."""

    def __init__(self, name: str, model: Model, counts: Counter[str]) -> None:
        self.name = name
        self._model = model
        self._counts = counts
        self._state: dict[int, State] = {}
        self._truth: dict[int, tuple[int, State]] = {}
        self._seqno: dict[int, int] = {}

    async def take(self, batch: ChangeBatch | Rollback) -> None:
        """Apply a batch row by row, and compare at its markers."""
        if isinstance(batch, Rollback):
            self._undo(batch)
            return
        markers: dict[int, list[int]] = {}
        for partition, seqno in batch.markers:
            markers.setdefault(partition, []).append(seqno)
        for change in batch.changes:
            waiting = markers.get(change.partition, [])
            while waiting and waiting[0] < change.seqno:
                await self._compare(change.partition, waiting.pop(0))
            last = self._seqno.get(change.partition, 0)
            if change.seqno <= last:
                raise Violation(f"{self.name}: {change.partition}/{change.seqno} after {last}")
            self._seqno[change.partition] = change.seqno
            apply(self._state.setdefault(change.partition, {}), (change.key, change.value))
        for partition, seqnos in markers.items():
            for seqno in seqnos:
                await self._compare(partition, seqno)
        self._counts["rows received"] += len(batch.changes)

    def _undo(self, rollback: Rollback) -> None:
        if rollback.seqno:
            raise Violation(f"{self.name}: {rollback}: only purging rolls anybody back here")
        self._counts["rolled back to 0"] += 1
        for known in (self._state, self._truth, self._seqno):
            known.pop(rollback.partition, None)

    async def _compare(self, partition: int, seqno: int) -> None:
        await self._model.reached(partition, seqno)
        at, truth = self._truth.get(partition, (0, {}))
        if seqno < at:
            raise Violation(f"{self.name}: marker {seqno} of partition {partition} after {at}")
        for row in self._model.rows[partition][at:seqno]:
            apply(truth, row)
        self._truth[partition] = (seqno, truth)
        state = self._state.get(partition, {})
        self._counts["markers compared"] += 1
        if state != truth:
            wrong = {k for k in state.keys() | truth.keys() if state.get(k) != truth.get(k)}
            raise Violation(
                f"{self.name}: partition {partition} is wrong at marker {seqno}: {sorted(wrong)[:5]}"
            )

    def check_at(self, seqnos: dict[int, int]) -> None:
        """Raise unless the last marker of each partition was there."""
        for partition, seqno in seqnos.items():
            at = self._truth.get(partition, (0, {}))[0]
            if at < seqno:
                raise Violation(f"{self.name}: partition {partition} ended at {at}, not at {seqno}")


class Soak:
    """One run."""

    def __init__(self, client: AsyncClient, seed: int, seconds: float) -> None:
        self._client = client
        self._bucket: AsyncBucket = client.bucket("default")
        self._rng = random.Random(seed)
        self._ends = time.monotonic() + seconds
        self._seconds = seconds
        self.model = Model()
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[float, int]] = []

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._ends

    async def run(self) -> None:
        """Run everything until the time is up, or until somebody sees a violation."""
        jobs: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._write,
            self._keep_up,
            self._dawdle,
            self._come_and_go,
            self._newcomers,
            self._stay_away,
            self._cuts,
            self._watch,
        ]
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job())
        reader = self._reader("last reader")
        async with self._bucket.changes(until="now") as changes:
            async for batch in changes.batches():
                await reader.take(batch)
        reader.check_at(self.model.seqnos())

    def _until_over(self) -> asyncio.Timeout:
        """Cancel what waits for changes when no more are written."""
        return asyncio.timeout(max(self._ends - time.monotonic(), 0))

    def _reader(self, name: str) -> Reader:
        return Reader(name, self.model, self.counts)

    async def _write(self) -> None:
        rng = self._rng
        keys = [b"key%d" % i for i in range(KEYS)]
        weights = list(itertools.accumulate(1 / (i + 1) ** 0.8 for i in range(KEYS)))
        while not self.over:
            rows: list[Row] = [
                (key, None if rng.random() < DELETES else rng.randbytes(rng.choice((8, 100, 900))))
                for key in rng.choices(keys, cum_weights=weights, k=rng.randint(1, BATCH_ROWS))
            ]
            results = await self._bucket.write_many(rows)
            by_partition: dict[int, list[Row]] = {}
            for row in rows:
                by_partition.setdefault(partition_of(row[0]), []).append(row)
            for partition, start, _, _ in results.runs:
                self.model.wrote(partition, start, by_partition.pop(partition))
            self.counts["rows written"] += len(rows)
            await asyncio.sleep(rng.choice((0, 0.02, 0.2)))

    async def _keep_up(self) -> None:
        reader = self._reader("fast reader")
        with suppress(TimeoutError):
            async with (
                self._until_over(),
                self._bucket.changes(only=Only(stability="memory")) as changes,
            ):
                async for batch in changes.batches():
                    await reader.take(batch)

    async def _dawdle(self) -> None:
        reader = self._reader("slow reader")
        following = self._bucket.changes(tuning=Tuning(credit_bytes=20_000), on_rollback="event")
        with suppress(TimeoutError):
            async with self._until_over(), following as changes:
                async for batch in changes.batches():
                    await reader.take(batch)
                    await asyncio.sleep(self._rng.choice((0, 0.01, 0.1)))

    async def _come_and_go(self) -> None:
        reader = self._reader("reader that comes and goes")
        positions = MemoryPositions()
        while not self.over:
            with suppress(TimeoutError):
                await self._visit(reader, positions)
            self.counts["resumed"] += 1
            await asyncio.sleep(self._rng.random() / 2)

    async def _visit(self, reader: Reader, positions: MemoryPositions) -> None:
        left = self._rng.randint(1, 40)
        following = self._bucket.changes(
            resume=positions,
            tuning=Tuning(credit_bytes=100_000, save_seconds=0),
            on_rollback="event",
        )
        async with self._until_over(), following as changes:
            async for batch in changes.batches():
                # What was yielded last counts as not taken, and comes again.
                if not left or self.over:
                    return
                await reader.take(batch)
                left -= 1

    async def _newcomers(self) -> None:
        for number in itertools.count():
            reader = self._reader(f"newcomer {number}")
            there = self.model.seqnos()
            async with self._bucket.changes(until="now", on_rollback="event") as changes:
                async for batch in changes.batches():
                    await reader.take(batch)
            reader.check_at(there)
            self.counts["newcomers"] += 1
            if self.over:
                return
            await asyncio.sleep(self._rng.random() * 2)

    async def _stay_away(self) -> None:
        reader = self._reader("registered consumer")
        positions = MemoryPositions()
        away = 1.0
        while not self.over:
            async with self._bucket.changes(
                resume=positions,
                until="now",
                tuning=Tuning(save_seconds=0),
                consumer="truant",
                on_rollback="event",
            ) as changes:
                async for batch in changes.batches():
                    await reader.take(batch)
            self.counts["truant came back"] += 1
            await asyncio.sleep(min(away, max(self._ends - time.monotonic(), 0)))
            away = away * 1.5 if away < 20 else 1.0

    async def _cuts(self) -> None:
        for number in itertools.count():
            cut = await self._client.admin.create_cut(self._bucket, f"cut {number}", lease=60)
            # Made at one instant on the server; what the writer was not told of yet may be in it.
            await asyncio.sleep(self._rng.random() * 3)
            for attempt in range(2):
                reader = self._reader(f"reader {attempt} of cut {number}")
                async with self._bucket.changes(until=cut) as changes:
                    async for batch in changes.batches():
                        await reader.take(batch)
                reader.check_at(cut.seqnos)
                self.counts["cuts read"] += 1
            await cut.release()
            await self._read_released(cut.seqnos, number)
            if self.over:
                return

    async def _read_released(self, seqnos: dict[int, int], number: int) -> None:
        """After the release it is as of the cut, or an error, never something else."""
        await asyncio.sleep(self._rng.random() * 3)
        reader = self._reader(f"reader of the released cut {number}")
        try:
            async with self._bucket.changes(until=seqnos) as changes:
                async for batch in changes.batches():
                    await reader.take(batch)
            reader.check_at(seqnos)
            self.counts["released cuts read"] += 1
        except SnapshotGoneError:
            self.counts["released cuts gone"] += 1

    async def _watch(self) -> None:
        began = said = time.monotonic()
        while not self.over:
            status = await self._client.admin.status()
            self.memory.append((time.monotonic() - began, status.anonymous_bytes))
            if time.monotonic() - said >= REPORT_SECONDS:
                said = time.monotonic()
                await self.report()
            await asyncio.sleep(1)

    async def report(self) -> None:
        """Print how far everything is."""
        storage = await self._client.admin.storage(self._bucket)
        purged = max(info.purge_seqno for info in await self._client.admin.partitions(self._bucket))
        say(
            f"{self.counts['rows written']} rows written, {self.counts['markers compared']} markers compared, "
            f"{storage.merge_input_rows} rows merged, {storage.purged_tombstones} tombstones purged "
            f"(up to {purged}), {self.memory[-1][1] / 2**20:.0f} MiB anonymous"
        )

    def check_counts(self) -> None:
        """Raise when something that the run is about did not happen, or memory grew."""
        for what in ("cuts read", "newcomers", "resumed", "truant came back"):
            if not self.counts[what]:
                raise Violation(f"nothing to show for {what!r}")
        third = self._seconds / 3
        second = [size for at, size in self.memory if third <= at < 2 * third]
        last = [size for at, size in self.memory if at >= 2 * third]
        if second and last and max(last) > max(second) + GROWTH_BYTES:
            raise Violation(
                f"anonymous memory grew from {max(second) >> 20} to {max(last) >> 20} MiB"
            )


async def soak(seconds: float, seed: int, folder: Path) -> None:
    """Run one soak on a server of its own; Violation for what is not as it must be."""
    server = RunningServer(folder, *SERVER_OPTIONS, syncs=True).start()
    try:
        async with AsyncClient(server.target) as client:
            run = Soak(client, seed, seconds)
            await run.run()
            await run.report()
            run.check_counts()
            for what, count in sorted(run.counts.items()):
                say(f"{what}: {count}")
        status = server.terminate()
        if status:
            raise Violation(f"the server ended with status {status}:\n{server.log_text()}")
    finally:
        server.close()


def main() -> int:
    """Return 0 when nothing was wrong."""
    options = soak_parser("storage", __doc__).parse_args()
    seed = options.seed
    say(f"storage soak of {options.minutes} minutes, seed {seed}")
    with tempfile.TemporaryDirectory(prefix="upr-soak-") as folder:
        violations: list[BaseException] = []
        try:
            asyncio.run(soak(options.minutes * 60, seed, Path(folder)))
        except* Violation as group:
            violations += group.exceptions
    for violation in violations:
        print(f"VIOLATION (seed {seed}): {violation}", file=sys.stderr)
    if violations:
        return 1
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
