"""What a consumer does about an answer "roll back": decided from its position alone; see ``consumer``."""

from dataclasses import dataclass, replace
from typing import Final

from upr_protocol.consumer_types import PendingRollback
from upr_protocol.failover import FailoverLog, format_failover_id
from upr_protocol.handshake import answer_hello, boundary, older_ids_to_try, resume_after_rollback
from upr_protocol.position import Position

BUCKET_GONE_RULE: Final = "bucket_gone"
"""The rule of a rollback whose reason is that the bucket was dropped and created anew."""


@dataclass(frozen=True, slots=True)
class Told:
    """A server's answer "roll back".

    Args:
        seqno: to where.
        newest_id: its newest failover id.
        rule, words: which of its rules decided, as a token and for people.
        log: its failover log, None when it gave none.
    """

    seqno: int
    newest_id: int
    rule: str
    words: str
    log: FailoverLog | None


def decide_rollback(
    partition: int,
    position: Position,
    bucket_version: int,
    told: Told,
    *,
    inclusive: bool,
    restart: bool,
) -> tuple[PendingRollback, bool]:
    """Return what becomes of a position, and whether anything has to be undone for it.

    Args:
        bucket_version: of the bucket that answered; a position of another one goes to 0.
        inclusive: whether a marker at the seqno told may be gone back to.
        restart: whether all is to be undone whenever something is.

    Raises:
        InvalidArgumentError: the answer contradicts itself.
    """
    seqno, rule, words = told.seqno, told.rule, told.words
    if position.bucket_version != bucket_version:
        seqno, rule = 0, BUCKET_GONE_RULE
        words = (
            f"the bucket was dropped and created anew: the data is of version {position.bucket_version:016x}, "
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


def _older(position: Position, rollback_seqno: int, log: FailoverLog | None) -> tuple[int, str]:
    """Where to roll back to when the newest id is not known to the server but an older one may be.

    The answer carries the whole log that decided, so what Hello would say to an older id is known here.
    """
    if rollback_seqno or log is None or position.failover_id in log:
        return rollback_seqno, ""
    for older_id, own_next in older_ids_to_try(position):
        if older_id in log:
            target = boundary(answer_hello(log, older_id).rollback_seqno, own_next)
            return (
                target,
                f"; the older id {format_failover_id(older_id)} is known: back to {target}",
            )
    return rollback_seqno, ""
