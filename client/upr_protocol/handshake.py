"""The handshake: the server's answers to Hello and Start, the client's decision on them, and where it resumes.

Source: specification, "Handshakes". All functions are pure.
"""

import enum
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from upr_protocol.errors import ProtocolError, SnapshotGoneError
from upr_protocol.failover import (
    FailoverLog,
    check_failover_id,
    check_seqno,
    format_failover_id,
)
from upr_protocol.position import Position


class Rule(enum.StrEnum):
    """Rule that decided. The first block is of the server, the second of the client."""

    NEW_CLIENT = "new_client"
    """No failover id: nothing is known of the client's history."""
    NEWEST_ID = "newest_id"
    """The failover id is the newest of the log."""
    UNKNOWN_ID = "unknown_id"
    """The failover id is not in the log."""
    NEXT_RECORD = "next_record"
    """The failover id is in the log and not the newest: back to the record right after it."""
    DATA_ID_UNKNOWN = "data_id_unknown"
    """The id under which the data was received is not in the log."""
    DATA_ABOVE_NEXT_RECORD = "data_above_next_record"
    """The data reaches above the record right after the id under which it was received."""
    BELOW_PURGE = "below_purge"
    """Tombstones that the client has not seen were purged."""
    ABOVE_HIGH = "above_high"
    """The client has more than the active under the same id: a failover record is missing."""
    BEHIND = "behind"
    """The client has more than the replica, which has not caught up yet."""

    NOTHING_TO_UNDO = "nothing_to_undo"
    """Seqno and horizon are at or below the seqno of the rollback, or there is no data."""
    MARKER_BEFORE = "marker_before"
    """The newest marker before the seqno of the rollback."""
    NO_MARKER = "no_marker"
    """No marker before the seqno of the rollback: from 0."""
    LOST_ID = "lost_id"
    """There is data but no failover id: from 0."""


@dataclass(frozen=True, slots=True)
class HandshakeAnswer:
    """The answer to Hello or Start for one partition.

    Args:
        rollback_seqno: the client rolls back to before it, 0 for a start from scratch; None to resume, or to retry
            later with nothing undone.
        newest_id: the failover id to remember from now on.
        rule: which rule decided.
        words: one sentence for people, with the numbers and ids.
    """

    rollback_seqno: int | None
    newest_id: int
    rule: Rule
    words: str

    @property
    def kind(self) -> Literal["started", "rollback", "behind"]:
        """What it is as the answer to a Start."""
        if self.rollback_seqno is not None:
            return "rollback"
        return "behind" if self.rule is Rule.BEHIND else "started"

    @property
    def alarm(self) -> bool:
        """Whether an operator must act, because a failover record is missing."""
        return self.rule is Rule.ABOVE_HIGH


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a client resumes.

    Args:
        seqno: its Start names this one.
        undo: whether data above it must be undone first.
        rule: which rule decided.
        words: one sentence for people, with the numbers.
    """

    seqno: int
    undo: bool
    rule: Rule
    words: str


def answer_hello(log: FailoverLog, failover_id: int | None) -> HandshakeAnswer:
    """Answer a Hello that names ``failover_id``, None for a new client.

    Source: specification, "Handshakes", step 2.

    Raises:
        InvalidArgumentError: the id is 0 or out of range.
    """
    newest_id = log.newest.failover_id
    if failover_id is None:
        words = f"no failover id was sent, start from 0 with {format_failover_id(newest_id)}"
        return HandshakeAnswer(None, newest_id, Rule.NEW_CLIENT, words)
    sent = format_failover_id(failover_id)
    if failover_id == newest_id:
        words = f"failover id {sent} is the newest, go on"
        return HandshakeAnswer(None, newest_id, Rule.NEWEST_ID, words)
    if failover_id not in log:
        words = f"failover id {sent} is not in the log of {len(log)}, roll back to 0"
        return HandshakeAnswer(0, newest_id, Rule.UNKNOWN_ID, words)
    following = log.records[log.index(failover_id) + 1]
    words = (
        f"failover id {sent} was followed by {following}, roll back to {following.seqno} or before"
    )
    return HandshakeAnswer(following.seqno, newest_id, Rule.NEXT_RECORD, words)


def answer_start(
    log: FailoverLog,
    *,
    failover_id: int | None,
    seqno: int,
    data_id: int | None,
    high_seqno: int,
    purge_seqno: int = 0,
    active: bool = True,
    horizon: int | None = None,
) -> HandshakeAnswer:
    """Answer a Start for what is above ``seqno``. The caller opens the cursor in the same step.

    Source: specification, "Handshakes", step 3.

    Args:
        log: the partition's failover log.
        failover_id: the id the client was last given, None if it never was.
        seqno: the client has everything up to it, 0 to 2^48 - 1.
        data_id: the id under which the client's newest row was received, None when it says nothing about it.
        high_seqno: the partition's newest seqno, 0 to 2^48 - 1.
        purge_seqno: tombstones at or below it may be gone, 0 to 2^48 - 1.
        active: whether the partition is active here, else replica.
        horizon: what the client has may lack rows that newer ones up to it superseded, 0 to 2^48 - 1; None when that is
            not known, and then it proves nothing.

    Raises:
        InvalidArgumentError: an id or a seqno is out of range. Never a rollback: that would destroy data.
    """
    check_seqno(seqno)
    check_seqno(high_seqno, "high seqno")
    check_seqno(purge_seqno, "purge seqno")
    if data_id is not None:
        check_failover_id(data_id)
    # The client knows of rows up to the horizon: they existed in the history that sent it.
    seen = seqno if horizon is None else max(seqno, check_seqno(horizon, "horizon"))
    what = f"seqno {seqno}" if seen == seqno else f"horizon {seen}"
    hello = answer_hello(log, failover_id)
    newest = log.newest

    def answer(to: int | None, rule: Rule, words: str) -> HandshakeAnswer:
        return HandshakeAnswer(to, newest.failover_id, rule, words)

    if failover_id is None and seqno > 0:
        # Hello may say OK, because it makes no claim about data. Here data is claimed and nothing verifies it.
        return answer(
            0,
            Rule.NEW_CLIENT,
            f"no failover id was sent with seqno {seqno}, so its history is not known, roll back to 0",
        )
    if hello.rollback_seqno is not None:
        return hello
    # At 0 nothing is held, so no data can be of a wrong history, and nothing can have been missed.
    if seqno > 0:
        if data_id is not None and data_id != newest.failover_id:
            held = format_failover_id(data_id)
            if data_id not in log:
                return answer(
                    0,
                    Rule.DATA_ID_UNKNOWN,
                    f"the data up to {seqno} was received under {held}, which is not in the log of "
                    f"{len(log)}, roll back to 0",
                )
            following = log.records[log.index(data_id) + 1]
            if seen > following.seqno:
                return answer(
                    following.seqno,
                    Rule.DATA_ABOVE_NEXT_RECORD,
                    f"the data up to {what} was received under {held}, which was followed by {following}, "
                    f"roll back to {following.seqno} or before",
                )
        if seen > high_seqno:
            if not active:
                return answer(
                    None,
                    Rule.BEHIND,
                    f"{what} is above this replica's high seqno {high_seqno}, ask again when it has "
                    "caught up",
                )
            return answer(
                newest.seqno,
                Rule.ABOVE_HIGH,
                f"{what} is above the active's high seqno {high_seqno} under its newest record {newest}, "
                f"so a failover record is missing, roll back to {newest.seqno} or before",
            )
        if seqno < purge_seqno:
            return answer(
                0,
                Rule.BELOW_PURGE,
                f"seqno {seqno} is below the purge seqno {purge_seqno}: deletes may be missed; roll back to 0",
            )
    return answer(None, hello.rule, f"{hello.words} above {seqno}")


def resume_after_rollback(
    position: Position, rollback_seqno: int, *, inclusive: bool = False
) -> ResumePoint:
    """Return where a client resumes after the answer "roll back to ``rollback_seqno``".

    Source: specification, "Handshakes", step 2 (a marker before that seqno, else from scratch). Data without a verifiable
    history is undone.

    Args:
        position: its position.
        rollback_seqno: the server's answer, or where an older id that it knows parts; 0 to 2^48 - 1.
        inclusive: also take a marker at ``rollback_seqno`` itself, which is as true because a failover record
            carries a complete marker. The default is the specification's word, before.

    Raises:
        InvalidArgumentError: ``rollback_seqno`` is out of range.
    """
    check_seqno(rollback_seqno, "seqno to roll back to")
    seqno, horizon = position.seqno, position.horizon
    if seqno == 0:
        return ResumePoint(0, False, Rule.NOTHING_TO_UNDO, "nothing was received yet, start from 0")
    if position.failover_id is None:
        words = f"the failover id of the data up to {seqno} was lost, start from 0"
        return ResumePoint(0, True, Rule.LOST_ID, words)
    # The seqno alone is not enough: below it, an older version may be missing that was superseded between the rollback
    # seqno and the horizon, on the abandoned branch.
    if horizon is not None and max(seqno, horizon) <= rollback_seqno:
        return ResumePoint(
            seqno,
            False,
            Rule.NOTHING_TO_UNDO,
            f"seqno {seqno} and horizon {horizon} are not above {rollback_seqno}, resume from {seqno}",
        )
    limit = rollback_seqno if inclusive else rollback_seqno - 1
    marker = max((marker for marker in position.markers if marker <= limit), default=None)
    if marker is None:
        words = f"no marker before {rollback_seqno} is known, start from 0"
        return ResumePoint(0, True, Rule.NO_MARKER, words)
    words = f"the newest marker {'at or ' if inclusive else ''}before {rollback_seqno} is {marker}"
    return ResumePoint(marker, marker < seqno, Rule.MARKER_BEFORE, words)


def older_ids_to_try(position: Position) -> list[tuple[int, int]]:
    """The older failover ids of a client whose newest id the server does not know, newest first.

    Each comes with the seqno of the record right after it in the client's own log: what the client received above
    that was received under a later id, of which the server may know nothing. So the smaller of that seqno and the
    server's answer to the first of these ids that it knows is where to roll back to. Empty when the own log cannot
    tell: there is none, or it lacks the position's id, so that it is older than the data.

    Source: specification, "Additional notes on handshakes" (try different ids).
    """
    log = position.log
    if log is None or position.failover_id is None or position.failover_id not in log:
        return []
    records = log.records[: log.index(position.failover_id) + 1]
    return [
        (older.failover_id, following.seqno)
        for older, following in zip(records[-2::-1], records[:0:-1], strict=True)
    ]


BUCKET_GONE_RULE: Final = "bucket_gone"
"""Rule of a rollback because the bucket was dropped and created again."""


@dataclass(frozen=True, slots=True)
class RollbackAnswer:
    """Server's answer "roll back".

    Args:
        seqno: the target of the rollback.
        newest_id: its newest failover id.
        rule, words: which of its rules decided, as a token and for people.
        log: its failover log, None when it gave none.
    """

    seqno: int
    newest_id: int
    rule: str
    words: str
    log: FailoverLog | None


@dataclass(frozen=True, slots=True)
class PendingRollback:
    """Data that must be undone before the partition is started again.

    Args:
        partition: 0 to 1023.
        from_seqno: the position's seqno; everything above ``seqno`` must be undone.
        seqno: the marker to go back to, or 0.
        old_id: the id that the server was asked with; None when it was lost.
        new_id: the server's newest id.
        rule: which rule of the server decided, as a token.
        words: both sides' decisions in words.
        after: the position to store once the data is undone.
    """

    partition: int
    from_seqno: int
    seqno: int
    old_id: int | None
    new_id: int
    rule: str
    words: str
    after: Position


def decide_rollback(
    partition: int,
    position: Position,
    bucket_version: int,
    told: RollbackAnswer,
    *,
    inclusive: bool,
    restart: bool,
) -> tuple[PendingRollback, bool]:
    """Return the position after a rollback, and whether data must be undone first.

    Args:
        bucket_version: of the bucket that answered; a position of another one goes to 0.
        inclusive: whether a marker at the answered seqno itself may be the target.
        restart: whether a rollback undoes everything.

    Raises:
        InvalidArgumentError: the answer contradicts itself.
    """
    seqno, rule, words = told.seqno, told.rule, told.words
    if position.bucket_version != bucket_version:
        seqno, rule = 0, BUCKET_GONE_RULE
        words = (
            f"the bucket was dropped and created again: the data is of version {position.bucket_version:016x}, "
            f"the bucket of version {bucket_version:016x}"
        )
        position = replace(position, log=None)
    target, tried = _older(position, seqno, told.log)
    resume = resume_after_rollback(position, target, inclusive=inclusive)
    to, why = resume.seqno, resume.words
    if restart and resume.undo and to:
        to, why = 0, f"{why}, and this consumer begins anew"
    after = position.rolled_back(to, told.newest_id, told.log)
    pending = PendingRollback(
        partition,
        position.seqno,
        to,
        position.failover_id,
        told.newest_id,
        rule,
        f"{words}{tried}; {why}",
        replace(after, bucket_version=bucket_version),
    )
    return pending, resume.undo


def boundary_of(position: Position, told: RollbackAnswer) -> int:
    """Return the seqno at or below which a position is true in the history of a server that answered "roll back".

    It is the answer's, or a higher one where the server knows an older id of the position's own log.
    """
    return _older(position, told.seqno, told.log)[0]


def _older(position: Position, rollback_seqno: int, log: FailoverLog | None) -> tuple[int, str]:
    """Return where to roll back to if the server knows an older id but not the newest one.

    The answer carries the server's complete log, so the answer of Hello to an older id is computed here.
    """
    # Where the server knows the position's id, 0 has another reason (purged, say), and holds.
    if rollback_seqno or log is None or position.failover_id in log:
        return rollback_seqno, ""
    for older_id, own_next in older_ids_to_try(position):
        if older_id in log:
            told = answer_hello(log, older_id).rollback_seqno
            # Where it is the server's newest, only the own record says where the histories part.
            target = own_next if told is None else min(told, own_next)
            return (
                target,
                f"; the older id {format_failover_id(older_id)} is known: back to {target}",
            )
    return rollback_seqno, ""


class Pin(NamedTuple):
    """Exact end of a partition.

    Args:
        failover_id: the id that was newest when the seqno was the last complete marker; None: not known.
        seqno: that marker; 0 for an empty partition.
    """

    failover_id: int | None
    seqno: int


def check_pin(
    partition: int, pin: Pin, failover_id: int, until_seqno: int | None, log: FailoverLog | None
) -> None:
    """Check the answer to a Start that asked for an exact end.

    Args:
        failover_id, until_seqno: as answered.
        log: the partition's failover log, as far as it is known.

    Raises:
        ProtocolError: the server ignored the end.
        SnapshotGoneError: the pin is on an abandoned branch of the history.
    """
    if until_seqno != pin.seqno:
        raise ProtocolError(
            f"partition {partition} must end exactly at {pin.seqno}; the server ends it at {until_seqno}",
            hint="the server may be too old for cuts",
        )
    if log is None or pin.failover_id is None or pin.failover_id == failover_id:
        return
    left_at = answer_hello(log, pin.failover_id).rollback_seqno
    if left_at is not None and left_at < pin.seqno:
        raise SnapshotGoneError(
            f"partition {partition}: seqno {pin.seqno} was pinned under id "
            f"{format_failover_id(pin.failover_id)}, whose history was left at {left_at}",
            hint="make a new cut and follow to that one",
        )


def check_complete(partition: int, seqno: int, horizon: int | None) -> None:
    """Check that a stream that finished at its exact end has missed nothing on the way there.

    Args:
        seqno, horizon: the position; None for a horizon that is not known.

    Raises:
        SnapshotGoneError: it may have missed rows, because parts of it came from another view of the history.
    """
    if horizon is not None and horizon <= seqno:
        return
    where = "later" if horizon is None else f"at {horizon}"
    raise SnapshotGoneError(
        f"partition {partition}: the position at seqno {seqno} is in a range that is complete only {where}",
        hint="follow to a newer cut, or begin the partition again at 0",
    )
