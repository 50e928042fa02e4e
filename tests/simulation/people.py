"""Those who use a simulated set of servers: writers, followers that hold data, and an operator. All run the SDK."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from tests.model import Row, State, apply
from tests.raw import check_cells, with_cells
from tests.simulation.calling import Channel, Net
from tests.simulation.looping import SimulatedLoop, Timeline
from tests.simulation.truth import KEYS, USED, Truth, Violation
from upr_client import AsyncClient, Only, Rollback, Tuning, UprError
from upr_client.lowlevel import build_block, write_blocks
from upr_client.types import AsyncBucket, WriteResults
from upr_protocol.wire.grpc import error_from_call
from upr_protocol.wire.v1.replica_service_pb2 import PromoteRequest
from upr_protocol.wire.v1.replica_service_pb2_grpc import ReplicaServiceStub

SAFE = "replicated(1)"
Acknowledged = tuple[int, int, int]
"""(partition, id, seqno)"""


class Follower:
    """A follower with its data.

    Attributes:
        rows: by partition, what it has.
        newest: the id under which it has it.
    """

    def __init__(
        self, truth: Truth, counts: Counter[str], name: str, stability: str, read_from: str
    ) -> None:
        self._truth, self._counts = truth, counts
        self.name, self.stability, self.read_from = name, stability, read_from
        self.rows: dict[int, list[Row]] = {p: [] for p in USED}
        self.newest: dict[int, int] = {}
        self._states: dict[int, tuple[int, int, State]] = {}
        self.until = "now" if name.startswith("reader") else None
        self.done = False

    async def run(self, endpoints: list[str]) -> None:
        """Follow for ever; a reader until it has what is there."""
        only = Only(USED, stability=self.stability)
        async with AsyncClient(endpoints, retry_seconds=None) as client:
            changes = client.bucket().changes(
                only=only,
                on_rollback="event",
                read_from=self.read_from,
                until=self.until,  # type: ignore[arg-type]
                tuning=Tuning(heartbeat_seconds=1.0),
            )
            async with changes:
                async for item in changes.batches():
                    if isinstance(item, Rollback):
                        self._undo(item)
                        continue
                    self._counts["cells"] += sum(map(check_cells, item.blocks))
                    for change in item.changes:
                        self._apply(Row(change.seqno, change.key, change.value), change.partition)
                    for marker in item.markers:
                        self._check(marker.partition, marker.seqno, changes)
        self.done = True

    def _apply(self, row: Row, p: int) -> None:
        rows = self.rows[p]
        if rows and rows[-1].seqno >= row.seqno:
            raise Violation(f"{self.name}, partition {p}: {row.seqno} after {rows[-1].seqno}")
        rows.append(row)

    def _check(self, p: int, seqno: int, changes: Any) -> None:
        newest = self.newest[p] = changes._following.session.position(p).failover_id
        truth = self._truth.state(p, newest, seqno)
        held = self.state(p, seqno)
        if held != truth:
            raise Violation(f"{self.name}, partition {p} at {seqno}: {held}, not {truth}")
        self._counts["markers"] += 1

    def _undo(self, told: Rollback) -> None:
        p = told.partition
        self._states.pop(p, None)
        gone = [row.seqno for row in self.rows[p] if row.seqno > told.seqno]
        had = self.rows[p][-1].seqno if self.rows[p] else 0
        self.rows[p] = [row for row in self.rows[p] if row.seqno <= told.seqno]
        self._counts[f"rollbacks at {self.stability}"] += 1
        # Who is away for longer than deletions are kept begins again, whoever is active.
        away = told.rule == "below_purge" and had < self._truth.purged.get(p, 0)
        if self.stability == SAFE and not away and not self._may_lose(p, gone):
            raise Violation(f"{self.name} was rolled back: {told}")
        if told.seqno and (p, told.new_id) in self._truth.logs:
            truth = self._truth.state(p, told.new_id, told.seqno)
            if self.state(p) != truth:
                raise Violation(f"{self.name}: what stays after {told} is {self.state(p)}")

    def _may_lose(self, p: int, seqnos: list[int]) -> bool:
        """Return whether a promotion that was forced may have lost one of its mutations."""
        if p not in self.newest or not seqnos:
            # It had passed rows that newer ones had replaced.
            return any(change.forced for change in self._truth.changes)
        log = self._truth.logs[p, self.newest[p]]
        given = {seqno: [id_ for id_, start in log if start < seqno][-1] for seqno in seqnos}
        return any(self._truth.may_be_lost(p, id_, seqno) for seqno, id_ in given.items())

    def state(self, p: int, seqno: int = 1 << 48) -> State:
        """Return what it has of a partition up to a seqno."""
        rows = self.rows[p]
        at, count, known = self._states.get(p, (0, 0, {}))
        if at > seqno or count > len(rows):
            at, count, known = 0, 0, {}
        new = [row for row in rows[count:] if row.seqno <= seqno]
        state = apply(dict(known), new)
        self._states[p] = seqno, count + len(new), state
        return dict(state)


async def write_rows(
    bucket: AsyncBucket, rows: Sequence[tuple[bytes, bytes | None]], durability: str
) -> WriteResults:
    """Write rows with the cells that they have in tests."""
    block = with_cells(build_block([k for k, _ in rows], [v for _, v in rows]))
    if block.further:
        return await write_blocks(bucket, [block], durability)
    return await bucket.write_many(rows, durability)


class Writer:
    """A writer at one durability, several writes at a time.

    Attributes:
        acknowledged: what was, in order.
    """

    def __init__(
        self, truth: Truth, counts: Counter[str], rng: random.Random, name: str, durability: str
    ) -> None:
        self._truth, self._counts, self._rng = truth, counts, rng
        self.name, self.durability = name, durability
        self.acknowledged: list[Acknowledged] = []
        self.stopping = self.done = False
        self._number = 0

    async def run(self, endpoints: list[str]) -> None:
        """Write until it is told to stop."""
        async with AsyncClient(endpoints, retry_seconds=20) as client:
            bucket = client.bucket(producer=self.name)
            while not self.stopping:
                await asyncio.gather(*(self._write(bucket) for _ in range(self._rng.randint(1, 3))))
                await asyncio.sleep(self._rng.choice((0.05, 0.3, 1.0)))
        self.done = True

    async def _write(self, bucket: Any) -> None:
        rows: list[tuple[bytes, bytes | None]] = []
        for _ in range(self._rng.randint(1, 4)):
            self._number += 1
            value = (
                None if self._rng.random() < 0.2 else b"%s %d" % (self.name.encode(), self._number)
            )
            rows.append((self._rng.choice(KEYS), value))
        try:
            results = await write_rows(bucket, rows, self.durability)
        except UprError as error:
            self._counts[f"{error.reason} at {self.durability}"] += 1
            return
        for p, start, end, given in results.runs:
            for seqno in range(start + 1, end + 1) if given and end else ():
                numbered = self._truth.rows.get((p, given, seqno))
                if numbered is None or numbered.row[1:] not in rows:
                    raise Violation(f"{self.name} was told {p, given, seqno}, which is {numbered}")
                self.acknowledged.append((p, given, seqno))
                self._counts[f"acknowledged at {self.durability}"] += 1


class People:
    """All of them, each a process of its own.

    Attributes:
        operating: whether the operator waits for an answer.
    """

    def __init__(self, timeline: Timeline, net: Net, truth: Truth, counts: Counter[str]) -> None:
        self._timeline, self._net, self._truth, self._counts = timeline, net, truth, counts
        self.writers: list[Writer] = []
        self.followers: list[Follower] = []
        self.operating = False
        self._operator = SimulatedLoop(timeline, "operator")

    def write(self, durability: str, endpoints: list[str]) -> None:
        """Have one more writer."""
        name = f"writer {len(self.writers)}"
        rng = self._timeline.drawn(name)
        writer = Writer(self._truth, self._counts, rng, name, durability)
        self.writers.append(writer)
        self._begin(name, writer.run(endpoints))

    def follow(self, name: str, stability: str, read_from: str, endpoints: list[str]) -> Follower:
        """Have one more follower."""
        follower = Follower(self._truth, self._counts, name, stability, read_from)
        self._begin(name, follower.run(endpoints))
        return follower

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        loop = SimulatedLoop(self._timeline, name)

        async def run() -> None:
            try:
                await work
            except Exception as error:
                loop.broken = loop.broken or error

        loop.create_task(run())

    def order(
        self,
        do: Callable[[AsyncClient], Coroutine[Any, Any, int]],
        endpoints: list[str],
        ended: Callable[[int | UprError], None],
    ) -> None:
        """Have the operator do something with the SDK, and tell its outcome."""

        async def run() -> None:
            try:
                async with AsyncClient(endpoints, retry_seconds=5.0) as client:
                    outcome: int | UprError = await do(client)
            except UprError as error:
                outcome = error
            ended(outcome)

        self._operator.create_task(run())

    def promote(
        self, address: str, *, force: bool, takeover: bool, ended: Callable[[str], None]
    ) -> None:
        """Order a promotion, and tell its outcome: "" or the reason of the refusal."""
        self.operating = True

        async def run() -> None:
            reason = ""
            channel: Any = Channel(self._net, address)
            async with channel:
                stub: Any = ReplicaServiceStub(channel)
                try:
                    request = PromoteRequest(force=force, takeover=takeover)
                    await stub.Promote(request, timeout=30.0)
                except grpc.RpcError as error:
                    reason = error_from_call(error).reason
            self.operating = False
            ended(reason)

        self._operator.create_task(run())
