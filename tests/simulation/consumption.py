"""What a simulated client consumed of a batch, written into the history no sooner than it counts as consumed."""

from tests.model import Row, apply
from tests.raw import check_cells
from tests.simulation.recording import Recorder
from tests.simulation.serving import Sent
from upr_client.changes.events import Change, ChangeBatch
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

EVERYTHING = 2**48
Data = dict[int, list[Row]]
"""The rows that an application has, by partition, oldest first."""


class Received:
    """A run as it came over the wire, and from where on it was not recorded."""

    def __init__(self, token: int, start: int, end: int, horizon: int) -> None:
        self.token = token
        self.start = start
        self.end = end
        self.horizon = horizon


class Consumption:
    """One batch after another of one client.

    Args:
        data: what the application has, for the state at a marker.

    Attributes:
        events: how many changes and markers of the batch were consumed; ``EVERYTHING`` for all.
        passed_over: partitions of the batch that were lost since it came: what is left of them is not consumed.
    """

    def __init__(self, recorder: Recorder, reader: str, data: Data) -> None:
        self._recorder = recorder
        self._reader = reader
        self._data = data
        self._sent = Sent(0, {})
        self._left: list[tuple[int, Received, list[Row], bool]] = []
        self._recorded = 0
        self.events = 0
        self.passed_over: set[int] = set()

    def begin(self, frame: wire.Frame, sent: Sent, batch: ChangeBatch, keys_only: bool) -> None:
        """Take note of what a batch consists of, by what came over the wire."""
        self._sent = sent
        received = _received(frame)
        rows: Data = {}
        for change in batch.changes:
            rows.setdefault(change.partition, []).append(self.row(change, keys_only))
        markers = {(marker.partition, marker.seqno) for marker in batch.markers}
        self.forget()
        for block in batch.blocks:
            assert not block.further if keys_only else check_cells(block) >= 0
            for run in block.runs:
                p, start, end = (
                    int(run[name]) for name in ("partition", "start_seqno", "end_seqno")
                )
                mine = [row for row in rows.get(p, []) if start < row.seqno <= end]
                assert len(mine) == int(run["count"])
                self._left.append((p, received[p, start, end], mine, (p, end) in markers))

    def row(self, change: Change, keys_only: bool) -> Row:
        """Return a change as a row; with the value that keys-only left out, so that states can be compared."""
        if not keys_only:
            return Row(change.seqno, change.key, change.value)
        assert change.value is None
        value = self._sent.values.get((change.partition, change.seqno), b"?")
        assert (value is None) == (change.op == "delete")
        return Row(change.seqno, change.key, value)

    def record(self) -> None:
        """Record what was consumed and not recorded: whole runs with their markers, and of one the first rows."""
        left = self.events - self._recorded
        while self._left and left >= 0:
            p, run, rows, marker = self._left[0]
            taken = rows[:left]
            whole = left >= len(rows) + marker
            left -= len(taken)
            self._recorded += len(taken)
            if whole or taken:
                self._record_run(p, run, run.end if whole else taken[-1].seqno, taken)
            if not whole:
                self._left[0] = p, run, rows[len(taken) :], marker
                return
            if marker:
                self._recorded += 1
                left -= 1
                self._record_marker(p, run)
            self._left.pop(0)

    def finish(self) -> None:
        """Record the rest: all of it was consumed."""
        self.events = EVERYTHING
        self.record()
        self.forget()

    def forget(self) -> None:
        """There is no batch."""
        self._left, self._recorded, self.events = [], 0, 0
        self.passed_over = set()

    def _record_run(self, p: int, run: Received, end: int, rows: list[Row]) -> None:
        if end == run.start or p in self.passed_over:
            return
        where = p, run.start, end, run.horizon
        self._recorder.run(self._reader, run.token, where, rows)
        self._recorder.history[-1]["restarts"] = self._sent.restarts
        run.start = end

    def _record_marker(self, p: int, run: Received) -> None:
        if p in self.passed_over:
            return
        state = apply({}, [row for row in self._data.get(p, []) if row.seqno <= run.end])
        self._recorder.add(
            "marker",
            reader=self._reader,
            partition=p,
            seqno=run.end,
            restarts=self._sent.restarts,
            state=state,
        )


def _received(frame: wire.Frame) -> dict[tuple[int, int, int], Received]:
    """Return the runs of a frame by partition, start and end."""
    received: dict[tuple[int, int, int], Received] = {}
    tokens = iter(memoryview(frame.tokens).cast("I"))
    for message in frame.blocks:
        for run in block_from_message(message).runs:
            p, start, end, horizon = (
                int(run[name]) for name in ("partition", "start_seqno", "end_seqno", "horizon")
            )
            received[p, start, end] = Received(next(tokens), start, end, horizon)
    return received
