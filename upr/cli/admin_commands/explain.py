"""``upr-admin explain``: what the handshake answers to a client in a given place, and why.

Nothing is decided here: the functions of the protocol core that server and SDK use are asked with the numbers
given, and their answers are shown.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upr_cli_kit.output import columns
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, FailoverRecord, format_failover_id, parse_failover_id
from upr_protocol.handshake import (
    HelloAnswer,
    ResumePoint,
    Rule,
    StartAnswer,
    answer_hello,
    answer_start,
    resume_after_rollback,
    resume_new,
)
from upr_protocol.limits import SEQNO_MAX
from upr_protocol.position import Position


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What is known of the server's partition.

    Args:
        log: its failover log.
        high_seqno: None when it is not known; then nothing counts as above it.
        purge_seqno: 0 when nothing was purged, or it is not known.
        active: whether it takes writes.
    """

    log: FailoverLog
    high_seqno: int | None
    purge_seqno: int = 0
    active: bool = True


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole handshake of one client.

    Args:
        partition: 0 to 1023.
        position: the client's.
        server: what was asked.
        hello: the answer to its Hello.
        start: the answer to the Start it would send at once; None when Hello said to roll back.
        resume: where it resumes, None when nothing has to be rolled back.
        restart: the answer to the Start after that, None when there is none.
    """

    partition: int
    position: Position
    server: ServerSide
    hello: HelloAnswer
    start: StartAnswer | None
    resume: ResumePoint | None
    restart: StartAnswer | None


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
        partition: only named in the result.
        position: the client's.
        server: the server's partition.
        at_record: the client also goes back to a marker at the seqno it was told, not only before it.
    """

    def start_from(where: Position) -> StartAnswer:
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
    start: StartAnswer | None = None
    rollback_seqno = hello.rollback_seqno
    if hello.ok:
        start = start_from(position)
        rollback_seqno = start.rollback_seqno
        if rollback_seqno is None:
            return Explanation(partition, position, server, hello, start, None, None)
    assert rollback_seqno is not None
    if position.failover_id is None:
        resume = resume_new(position)
    else:
        resume = resume_after_rollback(position, rollback_seqno, inclusive=at_record)
    after = position.rolled_back(resume.seqno, hello.newest_id, server.log)
    return Explanation(partition, position, server, hello, start, resume, start_from(after))


def records_of(explanation: Explanation) -> tuple[FailoverRecord, ...]:
    """Return the failover records that decided, oldest first."""
    start, log = explanation.start, explanation.server.log
    if start is not None and start.rule is Rule.DATA_ABOVE_NEXT_RECORD:
        assert explanation.position.data_id is not None
        index = log.index(explanation.position.data_id)
        return log.records[index : index + 2]
    if start is not None and start.rule is Rule.ABOVE_HIGH:
        return (log.newest,)
    return explanation.hello.records


def _id(failover_id: int | None) -> str | None:
    return None if failover_id is None else format_failover_id(failover_id)


def record_to_json(record: FailoverRecord) -> dict[str, Any]:
    """Return a record as the JSON of ``failover-log --json`` has it."""
    return {"failover_id": format_failover_id(record.failover_id), "seqno": int(record.seqno)}


def _start_to_json(start: StartAnswer | None) -> dict[str, Any] | None:
    if start is None:
        return None
    return {
        "answer": start.kind,
        "rollback_seqno": start.rollback_seqno,
        "failover_id": _id(start.newest_id),
        "rule": str(start.rule),
        "words": start.words,
        "alarm": start.alarm,
    }


def to_json(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as a JSON document."""
    position, server = explanation.position, explanation.server
    hello, resume = explanation.hello, explanation.resume
    return {
        "partition": explanation.partition,
        "client": {
            "failover_id": _id(position.failover_id),
            "data_id": _id(position.data_id),
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
            "answer": "ok" if hello.ok else "rollback",
            "rollback_seqno": hello.rollback_seqno,
            "failover_id": _id(hello.newest_id),
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


def _answer(rollback_seqno: int | None, otherwise: str) -> str:
    return otherwise if rollback_seqno is None else f"roll back to {rollback_seqno}"


def to_text(explanation: Explanation) -> str:
    """Return the explanation for people."""
    position, server = explanation.position, explanation.server
    hello, start, resume = explanation.hello, explanation.start, explanation.resume
    horizon = "not known" if position.horizon is None else str(position.horizon)
    lines = [
        f"partition {explanation.partition}",
        f"client    id {_id(position.failover_id) or 'none'}, seqno {position.seqno}, horizon {horizon}, "
        f"data id {_id(position.data_id) or 'none'}, "
        f"markers {', '.join(map(str, position.markers)) or 'none'}",
        f"server    newest record {server.log.newest}, high seqno "
        f"{'not known' if server.high_seqno is None else server.high_seqno}",
        f"hello     {_answer(hello.rollback_seqno, 'go on')}",
        f"  rule    {hello.rule}: {hello.words}",
    ]
    if start is not None:
        lines.append(f"start     {_answer(start.rollback_seqno, start.kind)}")
        lines.append(f"  rule    {start.rule}: {start.words}")
        if start.alarm:
            lines.append(
                "  alarm   a failover record is missing: an operator has to look at this server"
            )
    for number, record in enumerate(records_of(explanation)):
        lines.append(f"{'records' if not number else '':10}{record}")
    if resume is not None:
        undo = f"undo what is above {resume.seqno}" if resume.undo else "undo nothing"
        lines.append(
            f"client    {undo}, remember {_id(hello.newest_id)}, resume from {resume.seqno}"
        )
        lines.append(f"  rule    {resume.rule}: {resume.words}")
        if hello.rule is Rule.UNKNOWN_ID:
            lines.append(
                "  note    a client that kept its failover log first asks with an older id of it"
            )
    elif start is not None and start.kind == "behind":
        lines.append("client    keep everything and ask again later")
    else:
        lines.append(f"client    undo nothing, resume from {position.seqno}")
    if explanation.restart is not None:
        lines.append(f"start     {explanation.restart.kind}: {explanation.restart.words}")
    if server.high_seqno is None:
        lines.append("note      the high seqno is not known, so nothing was checked against it")
    return "\n".join(lines)


def logs_to_json(logs: dict[int, FailoverLog]) -> list[dict[str, Any]]:
    """Return failover logs as the document of ``failover-log --json``."""
    return [
        {"partition": partition, "failover_log": [record_to_json(record) for record in log]}
        for partition, log in sorted(logs.items())
    ]


def logs_to_text(logs: dict[int, FailoverLog]) -> str:
    """Return failover logs as columns, oldest record first."""
    rows = [
        (partition, int(record.seqno), format_failover_id(record.failover_id))
        for partition, log in sorted(logs.items())
        for record in log
    ]
    return columns(("partition", "seqno", "failover_id"), rows)


def read_log(file: Path, partition: int) -> FailoverLog:
    """Return a partition's log out of a file that ``failover-log --json`` printed.

    Raises:
        InvalidArgumentError: the file is something else.
        UprError: it does not have the partition.
    """

    def malformed(what: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{file} is not what 'upr-admin failover-log --json' prints: {what}"
        )

    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise malformed(f"not JSON ({error})") from error
    if not isinstance(document, list):
        raise malformed("not a list")
    for entry in document:
        if not isinstance(entry, dict) or not isinstance(entry.get("failover_log"), list):
            raise malformed("an entry has no failover_log")
        if entry.get("partition") != partition:
            continue
        try:
            return FailoverLog.from_pairs(
                (parse_failover_id(record["failover_id"]), record["seqno"])
                for record in entry["failover_log"]
            )
        except (KeyError, TypeError) as error:
            raise malformed(f"a record of partition {partition} is malformed ({error})") from error
    raise UprError(f"{file} has no partition {partition}", reason="NOT_FOUND")
