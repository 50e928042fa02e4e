"""What tests with real server processes write into a history: see ``tests/history.py``."""

import asyncio
from itertools import islice
from typing import Any

import grpc

from tests.harness import WAIT_SECONDS
from tests.history import History
from tests.model import State, partition_of
from tests.raw import RawClient, all_rows, start_at
from upr_protocol.wire.codec import block_from_message, decode_runs
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import key_value_service_pb2 as kv

PARTITIONS = 1024
RECORDED = frozenset(range(0, PARTITIONS, 8))
"""The partitions that the history tells of: it takes seconds to validate one of all of them."""
ENTRY_BYTES = 1000
RUN_BYTES = 80
"""What the tail counts for a write besides its block: once, and for each row at most."""
Log = list[tuple[int, int]]


class Recorder:
    """Writes events down as a client learns of them.

    Attributes:
        history: the events.
    """

    def __init__(self) -> None:
        self.history: History = []
        self._logs: list[Log] = []
        self._told: dict[int, tuple[int, int]] = {}
        self._open: dict[bytes, tuple[str, int]] = {}
        self._largest = 0
        self._readers = 0

    def add(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        self.history.append({"event": kind, **fields})

    async def opened(self, target: str) -> None:
        """The first start."""
        async with RawClient(target) as client:
            self._logs = await client.logs()
        self.add("opened", logs={p: self._logs[p] for p in sorted(RECORDED)})

    async def look(self, target: str) -> None:
        """Ask for high and durable seqnos before the process ends."""
        async with RawClient(target) as client:
            infos = await client.partitions()
        self._told = {p: (one.high_seqno, one.durable_seqno) for p, one in enumerate(infos)}

    async def restarted(self, target: str, *, clean: bool) -> None:
        """The server answers again."""
        before, told, self._told = self._logs, self._told, {}
        async with RawClient(target) as client:
            self._logs = await client.logs()
            infos = await client.partitions()
        partitions = {}
        for p in sorted(RECORDED):
            info = infos[p]
            high, durable = told.get(p, (None, None))
            partitions[p] = {
                "before": before[p],
                "after": self._logs[p],
                "high": high,
                "durable": durable,
                "high_after": info.high_seqno,
                "purge": info.purge_seqno,
            }
        self.add("restart", clean=clean, partitions=partitions)

    # Writing

    def sent(
        self, producer: str, number: int, rows: list[tuple[bytes, bytes | None]], size: int
    ) -> None:
        """A write with unique keys is on its way; ``size`` is that of its block in bytes."""
        placed = [(partition_of(key), key, value) for key, value in rows]
        placed = [row for row in placed if row[0] in RECORDED]
        self._open.update((key, (producer, number)) for _, key, _ in placed)
        self._largest = max(self._largest, size + ENTRY_BYTES + RUN_BYTES * len(rows))
        self.add("sent", producer=producer, number=number, rows=placed)

    def answered(self, producer: str, number: int, result: kv.WriteResult) -> None:
        """A write was acknowledged at ``disk``."""
        runs = [
            (int(run["partition"]), failover_id, int(run["start_seqno"]), int(run["end_seqno"]))
            for run, failover_id in zip(decode_runs(result.runs), result.failover_ids, strict=True)
            if int(run["partition"]) in RECORDED
        ]
        self.add(
            "acknowledged",
            producer=producer,
            number=number,
            durability="disk",
            duplicate=result.duplicate,
            runs=runs,
        )

    def known(self, keys: list[bytes]) -> None:
        """The writes of these keys are not open any more."""
        for key in keys:
            self._open.pop(key, None)

    async def watch_tail(self, target: str) -> None:
        """Ask for the size of the tail until the server is gone."""
        async with RawClient(target) as client:
            while True:
                try:
                    status = await client.admin.GetStatus(
                        admin.GetStatusRequest(), timeout=WAIT_SECONDS
                    )
                except grpc.aio.AioRpcError:
                    return
                bucket = status.buckets[0]
                self.add(
                    "tail",
                    bytes=bucket.tail_bytes,
                    limit=bucket.tail_limit_bytes,
                    largest=self._largest,
                )
                await asyncio.sleep(0.01)

    # Reading

    async def read_all(self, target: str) -> State:
        """Have a new reader follow everything from 0 to now; the state that it ends with."""
        self._readers += 1
        reader = f"reader {self._readers}"
        high: dict[int, int] = {}
        rows: list[tuple[int, int, bytes, bytes | None]] = []
        async with RawClient(target) as client:
            follow = await client.follow()
            for answer in await follow.start(
                *(start_at(p, until_now=True) for p in range(PARTITIONS))
            ):
                if answer.partition not in RECORDED:
                    continue
                started = answer.started
                high[answer.partition] = started.high_seqno
                self.add(
                    "start",
                    reader=reader,
                    partition=answer.partition,
                    id=None,
                    seqno=0,
                    data_id=None,
                    answer=answer.WhichOneof("answer"),
                    newest=started.failover_id,
                    high=started.high_seqno,
                    purge=started.purge_seqno,
                    token=started.token,
                    until=started.until_seqno,
                )
            ended = 0
            while ended < PARTITIONS:
                message = await follow.read()
                if message.HasField("frame"):
                    rows += self._frame(reader, message.frame)
                for stream in message.ended.streams:
                    ended += 1
                    if stream.partition in RECORDED:
                        self.add(
                            "ended",
                            reader=reader,
                            partition=stream.partition,
                            token=stream.token,
                            reason=message.ended.problem.reason,
                        )
            await follow.close()
        self._find_open(rows)
        self.add("settled", readers=[reader], high=high)
        state: State = {key: value for _, _, key, value in rows if value is not None}
        return state

    def _frame(self, reader: str, frame: Any) -> list[tuple[int, int, bytes, bytes | None]]:
        tokens = iter(memoryview(frame.tokens).cast("I"))
        taken: list[tuple[int, int, bytes, bytes | None]] = []
        for message in frame.blocks:
            block = block_from_message(message)
            rows = all_rows([block])
            taken += rows
            # Rows lie in the order of the runs.
            left = iter(rows)
            for run in block.runs:
                p, start, end, horizon = (
                    int(run[name]) for name in ("partition", "start_seqno", "end_seqno", "horizon")
                )
                token = next(tokens)
                here = [row[1:] for row in islice(left, int(run["count"]))]
                if p not in RECORDED:
                    continue
                self.add(
                    "run",
                    reader=reader,
                    partition=p,
                    token=token,
                    start=start,
                    end=end,
                    horizon=horizon,
                    rows=here,
                )
                if horizon == end:
                    self.add("marker", reader=reader, partition=p, seqno=end)
        return taken

    def _find_open(self, rows: list[tuple[int, int, bytes, bytes | None]]) -> None:
        """Note which writes of unknown outcome are there."""
        found: dict[tuple[str, int], dict[int, list[int]]] = {}
        for p, seqno, key, _ in rows:
            if key in self._open:
                found.setdefault(self._open[key], {}).setdefault(p, []).append(seqno)
        for (producer, number), seqnos in found.items():
            runs = [(p, self._id_at(p, max(at)), min(at) - 1, max(at)) for p, at in seqnos.items()]
            self.add("survived", producer=producer, number=number, runs=runs)
        self._open = {}

    def _id_at(self, p: int, seqno: int) -> int:
        return next(i for i, record in reversed(self._logs[p]) if record < seqno)
