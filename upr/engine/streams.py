"""Stream values: start requests, their answers, frames, end reasons.

A stream with ``until_exact`` is served only what is complete at or below that seqno. A run that reaches beyond it, or
lacks rows superseded beyond it, cannot be split: the stream ends instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from upr.engine.partitions import ACTIVE, REPLICA, Partitions
from upr.storage.journal import NumberedWrite
from upr.storage.read import Showing
from upr.storage.search import StoredBeginning
from upr_protocol.block import I64, U64, Mask
from upr_protocol.errors import (
    DataDamagedError,
    InvalidArgumentError,
    NotOwnerError,
    PartitionNotActiveError,
    SnapshotGoneError,
    TooFewReplicasError,
    UprError,
    shown,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import HandshakeAnswer
from upr_protocol.limits import PARTITIONS
from upr_protocol.position_table import START


def no_such_end(partition: int, exact: int, seqno: int, high: int) -> SnapshotGoneError | None:
    """Return why a stream from ``seqno`` to ``exact`` cannot be opened, None when it can."""
    if exact > high:
        return _snapshot_gone(partition, exact, f"its high seqno is {high}")
    if exact < seqno:
        return _snapshot_gone(partition, exact, f"the client is at {seqno} already")
    return None


def beyond_end(partition: int, exact: int, at: int, end: int, horizon: int) -> SnapshotGoneError:
    """Return why a run cannot be sent to a stream that stands at ``at``; its horizon is above ``exact``."""
    if end > exact:
        why = f"what is above seqno {at} is merged up to {end}"
    else:
        why = f"what ends at seqno {end} is complete at {horizon} only"
    return _snapshot_gone(partition, exact, why)


def _snapshot_gone(partition: int, exact: int, why: str) -> SnapshotGoneError:
    return SnapshotGoneError(
        f"partition {partition} cannot be served as of seqno {exact}: {why}",
        hint="make a new cut and follow to that one",
    )


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """Options of a Follow call, shared by its streams."""

    consumer: str = ""
    memory: bool = False
    keys_only: bool = False
    peer: str = ""
    accept_zstd: bool = False
    member: str = ""
    lease: int = 0
    """Of the member, in microseconds."""
    key_prefix: bytes = b""
    plain_rows: bool = False
    copies: int = 0
    """Replicas that must have what is shown; 0 for none."""
    directory: str = ""
    """Of a replica: the id of its data directory; empty for a consumer."""
    address: str = ""
    """Of a replica: where it can be reached."""
    any_server: bool = False
    """Whether it is served where the partitions are not active, too."""

    @property
    def is_replica(self) -> bool:
        """Whether a replica follows: it is sent producers, epochs and the small tables as well."""
        return bool(self.directory)

    @property
    def showing(self) -> Showing:
        """Return the part of a block that its streams are shown."""
        return Showing(self.keys_only, self.key_prefix, writes=self.is_replica)


@dataclass(slots=True)
class StartRequest:
    """One partition of a Start; at most one of the ends, of which the last one given here counts.

    Attributes:
        from_now, from_time: where a client that has nothing begins, if not at the beginning; microseconds since the epoch.
        horizon: the largest one that the client has received and no marker has reached, None where it is not known.
        epoch: that a replica has stored; 0 of a consumer.
        stored: for ``from_time``, what the search of the store came to; None while it ``needs_search``.
    """

    partition: int
    failover_id: int | None
    seqno: int
    data_id: int | None
    until_seqno: int | None = None
    until_now: bool = False
    until_exact: int | None = None
    from_now: bool = False
    from_time: int | None = None
    stored: StoredBeginning | DataDamagedError | None = None
    horizon: int | None = None
    epoch: int = 0

    @property
    def chooses_beginning(self) -> bool:
        """Whether the seqno at which it begins is found when it is answered."""
        return self.from_now or self.from_time is not None

    @property
    def needs_search(self) -> bool:
        """Whether the store must be searched before it can be answered."""
        return (
            self.from_time is not None
            and self.stored is None
            and 0 <= self.partition < PARTITIONS
            and not self._has_something
        )

    @property
    def _has_something(self) -> bool:
        return bool(self.seqno) or self.failover_id is not None or self.data_id is not None

    def check_beginning(self) -> None:
        """Raise unless the beginning that it chooses can be given to it.

        Raises:
            InvalidArgumentError: the client has something already.
            DataDamagedError: the search of the store came upon damage.
        """
        if isinstance(self.stored, DataDamagedError):
            raise self.stored
        if self.chooses_beginning and self._has_something:
            raise InvalidArgumentError(
                f"partition {self.partition}: Start from now or from a time has seqno {self.seqno} or an id; must have neither",
                hint="resume from the position that the client has, or leave out seqno and id",
            )


@dataclass(slots=True)
class Started:
    """An open stream; ``start_seqno`` is where it begins, for one that left this to the server."""

    partition: int
    token: int
    failover_id: int
    high_seqno: int
    purge_seqno: int
    until_seqno: int | None
    log: FailoverLog | None
    start_seqno: int | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Answer to a Start: the client must roll back first."""

    partition: int
    answer: HandshakeAnswer
    log: FailoverLog
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a Start: no stream, and nothing to undo."""

    partition: int
    error: UprError


@dataclass(frozen=True, slots=True)
class EndReason:
    """End reason of a stream: a stable token, whether a restart may help, words and a hint.

    Attributes:
        owner: HOST:PORT of the server that serves it from now on, if it is known.
    """

    reason: str
    retriable: bool
    words: str
    hint: str = ""
    owner: str = ""

    @classmethod
    def of(cls, error: UprError) -> "EndReason":
        return cls(error.reason, error.retriable, error.message, error.hint, error.owner)

    def error(self) -> UprError:
        return UprError(
            self.words,
            reason=self.reason,
            retriable=self.retriable,
            hint=self.hint,
            owner=self.owner,
        )


FINISHED: Final = EndReason("FINISHED", False, "the stream reached its end")
STOPPED: Final = EndReason("STOPPED", False, "the consumer stopped the stream")
SUPERSEDED: Final = EndReason(
    "SUPERSEDED",
    False,
    "another call took over this consumer name",
    "give each consumer its own name",
)
LEASE_ENDED: Final = EndReason(
    "LEASE_ENDED",
    True,
    "the lease of this member ended, or it did not release the partition in time",
    "wait for the next Assignment",
)
POSITIONS_RESET: Final = EndReason(
    "POSITIONS_RESET",
    True,
    "the positions of this consumer were reset",
    "connect again and load the positions",
)
BUCKET_GONE: Final = EndReason(
    "BUCKET_GONE",
    False,
    "the bucket was dropped",
    "if it is created again, begin from 0 with its new version",
)
HISTORY_CHANGED: Final = EndReason(
    "HISTORY_CHANGED",
    True,
    "the failover log changed: this server took over another history",
    "start the partition again: the answer says whether something is to be undone",
)
NOT_ACTIVE: Final = EndReason(
    "PARTITION_NOT_ACTIVE",
    True,
    "this server is not active any more, so it cannot tell what is stable at replicas",
    "connect to the one that is active",
)
SHUTTING_DOWN: Final = EndReason("SHUTTING_DOWN", True, "the server is stopping", "connect again")


def moved(owner: str) -> EndReason:
    """Return the end reason for a consumer that only an active server serves, where this one is none any more."""
    return EndReason(
        PartitionNotActiveError.default_reason,
        True,
        "this server is not the active one of its set any more",
        "connect to the active one",
        owner,
    )


TOO_SLOW: Final = "TOO_SLOW"


def too_slow(seconds: float) -> EndReason:
    return EndReason(
        TOO_SLOW,
        True,
        f"the consumer's connection accepted no data for {seconds:g} s while data waited",
        "receive while the application works, or ask for a smaller credit; connect again to resume",
    )


def purged(partition: int, at: int, seqno: int) -> EndReason:
    """Return the end reason for a stream below the purge seqno; its restart rolls back to 0."""
    return EndReason(
        "PURGED",
        True,
        f"partition {partition} is at {at}; tombstones up to {seqno} are purged",
        "begin the partition again at 0",
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """Streams that ended, as (partition, token, seqno up to which frames hold everything)."""

    streams: list[tuple[int, int, int]]
    why: EndReason


Messages = dict[bool, tuple[bytes, int, Any]]
"""Encoded frames of some blocks, by whether they are plain rows, each with its tokens and its cost."""


@dataclass(slots=True)
class FrameOut:
    """Encoded blocks, the token of each run in them, and their bytes.

    Attributes:
        cost: what it takes of the credit.
        rows: of all blocks together.
        messages: frames of the same blocks that other followers were sent; a new one may be added.
        writes: for a replica: producers' writes in the blocks, each with the number of its block, from 0.
    """

    blocks: list[bytes]
    tokens: bytes
    size: int
    rows: int
    messages: Messages = field(default_factory=dict)
    writes: Sequence[tuple[int, NumberedWrite]] = ()
    cost: int = 0


Answer = Started | RolledBack | Refused


def not_stable(partition: int, copies: int) -> TooFewReplicasError:
    return TooFewReplicasError(
        f"fewer than {copies} counted replicas have said what they have of partition {partition}, so that it is not known"
        " where a stream from now or from a time begins",
        hint="retry later; 'upr-admin topology' shows the replicas",
    )


def not_owner(partition: int, member: str) -> NotOwnerError:
    return NotOwnerError(
        f"member {shown(member)} does not own partition {partition}",
        hint="wait for an Assignment",
    )


@dataclass(slots=True)
class PlainStarts:
    """Start table: requests without special options as columns, one item a request.

    Attributes:
        partitions: 0 to 1023, each once.
        failover_ids, seqnos, data_ids, horizons: as in ``StartRequest``, 0 for an id or a horizon that is not named.
        until_now: whether the streams end at the current seqnos.
        needs_log: whether the answer must carry the failover log: the request names no id, or has no data.
    """

    partitions: I64
    failover_ids: U64
    seqnos: U64
    data_ids: U64
    horizons: U64
    until_now: bool
    needs_log: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.needs_log = (self.seqnos == 0) | (self.failover_ids == 0)

    @classmethod
    def read(cls, data: bytes, until_now: bool) -> "PlainStarts":
        """Return the table of a Start.

        Raises:
            InvalidArgumentError: its size is none that records add up to, or a partition is out of range or there
                twice.
        """
        if len(data) % START.itemsize or len(data) > PARTITIONS * START.itemsize:
            raise InvalidArgumentError(
                f"Start table is {len(data)} bytes; must be a multiple of {START.itemsize}, for at most {PARTITIONS} records"
            )
        table = np.frombuffer(data, START)
        partitions = table["partition"].astype(np.int64)
        if len(partitions) and int(partitions.max()) >= PARTITIONS:
            raise InvalidArgumentError(
                f"partition of a Start is {int(partitions.max())}; must be 0 to {PARTITIONS - 1}"
            )
        if len(partitions) and int(np.bincount(partitions).max()) > 1:
            raise InvalidArgumentError("a Start table names a partition twice")
        ids, seqnos, data_ids, horizons = (
            table[name].astype(np.uint64) for name in ("failover_id", "seqno", "data_id", "horizon")
        )
        return cls(partitions, ids, seqnos, data_ids, horizons, until_now)

    def plain(self, table: Partitions) -> Mask:
        """Return where ``answer_start`` would say "started" with an answer that fits a record.

        Doubtful requests are left to it.
        """
        p = self.partitions
        newest = table.newest_id[p]
        serves = (table.state[p] == ACTIVE) | (table.state[p] == REPLICA)
        is_new = (self.failover_ids == 0) & (self.seqnos == 0) & (self.data_ids == 0)
        is_new &= self.horizons == 0
        held = (self.data_ids == newest) & (self.seqnos > 0)
        held &= (self.seqnos <= table.high[p]) & (self.seqnos >= table.purge[p])
        held &= self.horizons <= table.high[p]
        nothing_held = (
            (self.seqnos == 0)
            & (self.horizons == 0)
            & ((self.data_ids == 0) | (self.data_ids == newest))
        )
        goes_on = (self.failover_ids == newest) & (held | nothing_held)
        plain: Mask = serves & (is_new | goes_on)
        told = np.flatnonzero(plain & self.needs_log)
        plain[told] = [len(table.logs[i]) == 1 for i in p[told].tolist()]
        return plain

    def requests(self, chosen: Mask) -> list[StartRequest]:
        """Return the chosen records as single requests."""
        columns = (self.partitions, self.failover_ids, self.seqnos, self.data_ids, self.horizons)
        return [
            StartRequest(
                partition,
                failover_id or None,
                seqno,
                data_id or None,
                until_now=self.until_now,
                horizon=horizon or None,
            )
            for partition, failover_id, seqno, data_id, horizon in zip(
                *(column[chosen].tolist() for column in columns), strict=True
            )
        ]
