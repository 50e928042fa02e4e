"""Explanation of what the handshake answers to a client in a given place, and why.

Nothing is decided here: the functions of the protocol core that server and SDK use are asked with the numbers given.
``upr-admin explain`` and the page of the HTTP port show the same. The module imports nothing of the server, because the
commands are installed without what that needs.
"""

from dataclasses import dataclass
from typing import Any

from upr_protocol.failover import FailoverLog, FailoverRecord, format_failover_id
from upr_protocol.handshake import (
    HandshakeAnswer,
    ResumePoint,
    Rule,
    answer_hello,
    answer_start,
    resume_after_rollback,
)
from upr_protocol.limits import SEQNO_MAX
from upr_protocol.position import Position


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What is known of the server's partition.

    Args:
        high_seqno: None when it is not known; then nothing counts as above it.
        purge_seqno: 0 when nothing was purged, or it is not known.
    """

    log: FailoverLog
    high_seqno: int | None
    purge_seqno: int = 0
    active: bool = True


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole handshake of one client.

    Args:
        start: the answer to the Start it would send at once; None when Hello said to roll back.
        resume, restart: where it resumes, and the answer to the Start there; None when nothing has to be rolled back.
    """

    partition: int
    position: Position
    server: ServerSide
    hello: HandshakeAnswer
    start: HandshakeAnswer | None
    resume: ResumePoint | None
    restart: HandshakeAnswer | None


def position_of(
    failover_id: int | None,
    data_id: int | None,
    seqno: int,
    horizon: int | None,
    markers: tuple[int, ...],
) -> Position:
    """Return the position of a client, with what follows from the numbers given.

    Data was received under the client's id unless another is named. A client that stands at a marker has that
    marker as its horizon; elsewhere a horizon that is not named is not known.
    """
    if horizon is None and seqno in (0, *markers[-1:]):
        horizon = seqno
    if data_id is None and seqno:
        data_id = failover_id
    return Position(0, failover_id, data_id, seqno, horizon, markers, None)


def explain(
    partition: int, position: Position, server: ServerSide, *, at_record: bool = False
) -> Explanation:
    """Return what server and client would say and do.

    Args:
        at_record: the client also goes back to a marker at the seqno it was told, not only before it.
    """

    def start_from(where: Position) -> HandshakeAnswer:
        return answer_start(
            server.log,
            failover_id=where.failover_id,
            seqno=where.seqno,
            data_id=where.data_id,
            high_seqno=SEQNO_MAX if server.high_seqno is None else server.high_seqno,
            purge_seqno=server.purge_seqno,
            active=server.active,
            horizon=where.horizon,
        )

    hello = answer_hello(server.log, position.failover_id)
    start: HandshakeAnswer | None = None
    rollback_seqno = hello.rollback_seqno
    if rollback_seqno is None:
        start = start_from(position)
        rollback_seqno = start.rollback_seqno
        if rollback_seqno is None:
            return Explanation(partition, position, server, hello, start, None, None)
    assert rollback_seqno is not None
    resume = resume_after_rollback(position, rollback_seqno, inclusive=at_record)
    after = position.rolled_back(resume.seqno, hello.newest_id, server.log)
    return Explanation(partition, position, server, hello, start, resume, start_from(after))


def records_of(explanation: Explanation) -> tuple[FailoverRecord, ...]:
    """Return the failover records that decided, oldest first."""
    start, log = explanation.start, explanation.server.log
    if start is not None and start.rule is Rule.ABOVE_HIGH:
        return (log.newest,)
    decisive = explanation.position.failover_id
    if start is not None and start.rule is Rule.DATA_ABOVE_NEXT_RECORD:
        decisive = explanation.position.data_id
    if decisive is None or decisive not in log:
        return ()
    index = log.index(decisive)
    return log.records[index : index + 2]


def id_text(failover_id: int | None) -> str | None:
    return None if failover_id is None else format_failover_id(failover_id)


def record_to_json(record: FailoverRecord) -> dict[str, Any]:
    """Return a record as the JSON of ``failover-log --json`` has it."""
    return {"failover_id": format_failover_id(record.failover_id), "seqno": int(record.seqno)}


def _start_to_json(start: HandshakeAnswer | None) -> dict[str, Any] | None:
    if start is None:
        return None
    return {
        "answer": start.kind,
        "rollback_seqno": start.rollback_seqno,
        "failover_id": id_text(start.newest_id),
        "rule": str(start.rule),
        "words": start.words,
        "alarm": start.alarm,
    }


def to_json(explanation: Explanation) -> dict[str, Any]:
    position, server = explanation.position, explanation.server
    hello, resume = explanation.hello, explanation.resume
    return {
        "partition": explanation.partition,
        "client": {
            "failover_id": id_text(position.failover_id),
            "data_id": id_text(position.data_id),
            "seqno": position.seqno,
            "horizon": position.horizon,
            "markers": list(position.markers),
        },
        "server": {
            "failover_log": [record_to_json(record) for record in server.log],
            "high_seqno": server.high_seqno,
            "purge_seqno": server.purge_seqno,
        },
        "hello": {
            "answer": "ok" if hello.rollback_seqno is None else "rollback",
            "rollback_seqno": hello.rollback_seqno,
            "failover_id": id_text(hello.newest_id),
            "rule": str(hello.rule),
            "words": hello.words,
        },
        "start": _start_to_json(explanation.start),
        "records": [record_to_json(record) for record in records_of(explanation)],
        "resume": None
        if resume is None
        else {
            "seqno": resume.seqno,
            "undo": resume.undo,
            "rule": str(resume.rule),
            "words": resume.words,
        },
        "restart": _start_to_json(explanation.restart),
    }
