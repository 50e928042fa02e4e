"""What the simulated world writes into its history: see ``tests/history.py``."""

from collections.abc import Iterable, Sequence
from typing import Any

from tests.history import History
from tests.model import Row, State, partition_of
from upr.engine.bucket import Bucket, Written
from upr.engine.streams import Answer, Refused, RolledBack, Started, StartRequest
from upr_protocol.position import Position

PRODUCER = "writer"
UNKNOWN = 2**48
"""A horizon that is not known counts as above every seqno."""
Batch = Sequence[tuple[bytes, bytes | None]]
Saved = tuple[int | None, int, int, State, dict[int, State]]


class Recorder:
    """Writes events down in the order in which they happen.

    Attributes:
        history: the events.
    """

    def __init__(self, partitions: Iterable[int]) -> None:
        self.history: History = []
        self._partitions = list(partitions)
        self._awaiting: list[tuple[int, Written]] = []
        self._before: dict[int, dict[str, Any]] = {}

    def add(self, kind: str, **fields: Any) -> None:
        """Append one event; nothing of partitions that are never written."""
        if fields.get("partition", self._partitions[0]) not in self._partitions:
            return
        self.history.append({"event": kind, **fields})

    def leave_out(self, partitions: Iterable[int]) -> None:
        """Partitions are dead: the newest restart says nothing of them."""
        for partition in partitions:
            self._before.pop(partition, None)

    # The process

    def opened(self, bucket: Bucket) -> None:
        """A bucket was created."""
        logs = {p: list(bucket.partitions.logs[p].to_pairs()) for p in self._partitions}
        self.add("opened", logs=logs)

    def ending(self, bucket: Bucket) -> None:
        """The process is about to end: what it would have told last."""
        table = bucket.partitions
        self._before = {
            p: {
                "before": list(table.logs[p].to_pairs()),
                "high": int(table.high[p]),
                "durable": int(table.durable[p]),
            }
            for p in self._partitions
        }
        self._awaiting = []

    def restarted(self, bucket: Bucket, *, clean: bool) -> None:
        """It is there again."""
        table = bucket.partitions
        for p, told in self._before.items():
            told["after"] = list(table.logs[p].to_pairs())
            told["high_after"] = int(table.high[p])
            told["purge"] = int(table.purge[p])
        self.add("restart", clean=clean, partitions=self._before)

    # Writing

    def sent(self, number: int, batch: Batch) -> None:
        """A write is on its way."""
        rows = [(partition_of(key), key, value) for key, value in batch]
        self.add("sent", producer=PRODUCER, number=number, rows=rows)

    def written(self, number: int, written: Written, durable: int) -> None:
        """A write was numbered; it is acknowledged at ``disk`` when it is durable."""
        self._acknowledge("memory", number, written)
        self._awaiting.append((number, written))
        self.committed(durable)

    def committed(self, durable: int) -> None:
        """Acknowledge what lies below that entry of the tail at ``disk``."""
        for number, written in self._awaiting:
            if written.entry < durable:
                self._acknowledge("disk", number, written)
        self._awaiting = [one for one in self._awaiting if one[1].entry >= durable]

    def _acknowledge(self, durability: str, number: int, written: Written) -> None:
        runs = [
            (
                int(run["partition"]),
                int(failover_id),
                int(run["start_seqno"]),
                int(run["end_seqno"]),
            )
            for run, failover_id in zip(written.runs, written.failover_ids, strict=True)
        ]
        self.add(
            "acknowledged",
            producer=PRODUCER,
            number=number,
            durability=durability,
            duplicate=written.duplicate,
            runs=runs,
        )

    # Readers

    def start(
        self,
        reader: str,
        request: StartRequest,
        answer: Answer,
        bucket: Bucket,
        *,
        remote: bool = False,
    ) -> None:
        """A Start and its answer; ``remote``: the reader hears of it over the network."""
        p = request.partition
        fields: dict[str, Any] = {
            "reader": reader,
            "partition": p,
            "id": request.failover_id,
            "seqno": request.seqno,
            "data_id": request.data_id,
            "high": int(bucket.partitions.high[p]),
            "purge": int(bucket.partitions.purge[p]),
        }
        if isinstance(answer, Started):
            fields |= {"answer": "started", "newest": answer.failover_id, "token": answer.token}
            fields["until"] = answer.until_seqno
        elif isinstance(answer, RolledBack):
            told = answer.answer
            fields |= {"answer": "rollback", "newest": told.newest_id, "told": told.rollback_seqno}
        else:
            assert isinstance(answer, Refused)
            fields |= {"answer": "refused", "newest": None, "reason": answer.error.reason}
        if remote:
            fields["remote"] = True
        self.add("start", **fields)

    def run(
        self, reader: str, token: int, run: tuple[int, int, int, int], rows: Sequence[Row]
    ) -> None:
        """A run, as (partition, start, end, horizon)."""
        p, start, end, horizon = run
        self.add(
            "run",
            reader=reader,
            partition=p,
            token=token,
            start=start,
            end=end,
            horizon=horizon,
            rows=[tuple(row) for row in rows],
        )

    def position(self, kind: str, reader: str, partition: int, saved: Saved) -> None:
        """A position is stored or loaded, together with the data that belongs to it."""
        failover_id, seqno, horizon, _, marked = saved
        self.add(
            kind,
            reader=reader,
            partition=partition,
            id=failover_id,
            data_id=failover_id,
            seqno=seqno,
            horizon=horizon,
            markers=sorted(m for m in marked if m),
        )

    def whole_position(self, kind: str, reader: str, partition: int, position: Position) -> None:
        """A position of the SDK is stored or loaded."""
        self.add(
            kind,
            reader=reader,
            partition=partition,
            id=position.failover_id,
            data_id=position.data_id,
            seqno=position.seqno,
            horizon=UNKNOWN if position.horizon is None else position.horizon,
            markers=list(position.markers),
        )
