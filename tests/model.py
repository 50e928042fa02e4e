"""The reference model: what the specification says, in dictionaries and lists, without a thought for speed.

It shares no code with the project, so that one mistake is not made twice in the same way. A model partition keeps
every version of every key of its branch; what a server leaves out is then checked against what is true.
"""

import copy
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

State = dict[bytes, bytes]


class Row(NamedTuple):
    """One mutation; a value of None is a delete."""

    seqno: int
    key: bytes
    value: bytes | None


class Run(NamedTuple):
    """What a server sends of (start, end]; it ends in a snapshot marker when horizon is end."""

    start: int
    end: int
    horizon: int
    rows: list[Row]


def apply(state: State, rows: Iterable[Row]) -> State:
    """Change the state as the rows say, and return it."""
    for row in rows:
        if row.value is None:
            state.pop(row.key, None)
        else:
            state[row.key] = row.value
    return state


def partition_of(key: bytes) -> int:
    """The partition that the clients of Couchbase choose for the key."""
    return ((zlib.crc32(key) >> 16) & 0x7FFF) % 1024


class ModelPartition:
    """One branch of the history of a partition. ``log`` is a list of (id, seqno), oldest first."""

    def __init__(self, first_id: int = 1, log_limit: int = 25) -> None:
        self.rows: list[Row] = []
        self.log: list[tuple[int, int]] = [(first_id, 0)]
        self.log_limit = log_limit
        self.purged = 0

    @property
    def high(self) -> int:
        """The newest seqno; 0 when there is nothing."""
        return len(self.rows)

    @property
    def newest_id(self) -> int:
        """The id of the newest record."""
        return self.log[-1][0]

    def write(self, key: bytes, value: bytes | None) -> int:
        """Set the key, or delete it with None; the seqno it got."""
        self.rows.append(Row(self.high + 1, key, value))
        return self.high

    def state_at(self, seqno: int) -> State:
        """The live keys and their values at that seqno."""
        return apply({}, self.rows[:seqno])

    def replica(self) -> "ModelPartition":
        """A node that has the same data and log now, and goes its own way."""
        return copy.deepcopy(self)

    def restart_unclean(self, durable_seqno: int, new_id: int) -> None:
        """What an unclean restart or promotion does: cut above the last marker, then a record there."""
        assert 0 <= durable_seqno <= self.high
        del self.rows[durable_seqno:]
        while self.log and self.log[-1][1] > durable_seqno:
            self.log.pop()
        self.log.append((new_id, durable_seqno))
        while len(self.log) > self.log_limit:
            self.log.pop(0)

    def _branch(self, failover_id: int) -> int | None:
        """Where the history that the id names was left; None under the newest id, 0 for an unknown one."""
        if failover_id == self.newest_id:
            return None
        for position, (known, _) in enumerate(self.log):
            if known == failover_id:
                return self.log[position + 1][1]
        return 0

    def hello(self, failover_id: int | None) -> tuple[str, int | None, int]:
        """("ok", None, newest id) or ("rollback", seqno, newest id)."""
        left_at = None if failover_id is None else self._branch(failover_id)
        return ("ok" if left_at is None else "rollback", left_at, self.newest_id)

    def start(
        self,
        failover_id: int | None,
        seqno: int,
        data_id: int | None = None,
        active: bool = True,
    ) -> tuple[str, int | None]:
        """("started", None), ("rollback", seqno) or ("behind", None)."""
        if failover_id is None:
            return ("rollback", 0) if seqno else ("started", None)
        left_at = self._branch(failover_id)
        if left_at is not None:
            return ("rollback", left_at)
        if seqno == 0:
            return ("started", None)
        if data_id is not None:
            data_left_at = self._branch(data_id)
            known = any(data_id == known for known, _ in self.log)
            if not known or (data_left_at is not None and data_left_at < seqno):
                return ("rollback", data_left_at)
        if self.high < seqno:
            return ("rollback", self.log[-1][1]) if active else ("behind", None)
        return ("rollback", 0) if seqno < self.purged else ("started", None)

    def runs(self, above: int, ends: dict[int, int], keep: Callable[[Row], bool]) -> list[Run]:
        """A true presentation of what is above a seqno.

        ``ends`` gives the horizon of the run that ends at a seqno. Of the rows that were superseded at or below
        the horizon of their run those stay that ``keep`` wants.
        """
        result: list[Run] = []
        start = above
        for end, horizon in sorted(ends.items()):
            assert start < end <= horizon <= self.high
            rows = [row for row in self.rows[start:end] if not self._old(row, horizon) or keep(row)]
            result.append(Run(start, end, horizon, rows))
            start = end
        return result

    def _old(self, row: Row, horizon: int) -> bool:
        return any(later.key == row.key for later in self.rows[row.seqno : horizon])


class ModelBucket:
    """1024 partitions; the id of each one's first record is its number plus one."""

    def __init__(self) -> None:
        self.partitions = [ModelPartition(number + 1) for number in range(1024)]

    def write(self, key: bytes, value: bytes | None) -> tuple[int, int]:
        """The partition that the key belongs to, and the seqno it got there."""
        partition = partition_of(key)
        return partition, self.partitions[partition].write(key, value)

    def state(self) -> State:
        """The live keys and values of all partitions now."""
        return {
            key: value
            for partition in self.partitions
            for key, value in partition.state_at(partition.high).items()
        }


class ModelClient:
    """A follower that does what the specification says, and remembers its state at each marker."""

    def __init__(self) -> None:
        self.state: State = {}
        self.seqno = 0
        self.horizon = 0
        self.at_marker: dict[int, State] = {0: {}}

    def receive(self, run: Run, rows: int | None = None) -> None:
        """Take a run, or only its first ``rows`` rows."""
        taken = run.rows if rows is None else run.rows[:rows]
        whole = rows is None or rows >= len(run.rows)
        if not taken and not whole:
            return
        apply(self.state, taken)
        self.seqno = run.end if whole else taken[-1].seqno
        self.horizon = max(self.horizon, run.horizon)
        # A marker below a horizon received before is true for the server only: a row may be missing here.
        if whole and run.horizon == run.end and self.horizon == run.end:
            self.at_marker[run.end] = dict(self.state)

    def undo(self, seqno: int) -> None:
        """Go back to a marker, or to 0."""
        self.state = dict(self.at_marker[seqno])
        self.at_marker = {at: state for at, state in self.at_marker.items() if at <= seqno}
        self.seqno = self.horizon = seqno
