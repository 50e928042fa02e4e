"""Text of ``upr-admin explain`` and ``upr-admin failover-log``."""

import json
from pathlib import Path
from typing import Any

from upr.service.sight.explanation import Explanation, id_text, record_to_json, records_of
from upr_cli_kit.output import columns
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.failover import FailoverLog, format_failover_id, parse_failover_id
from upr_protocol.handshake import Rule


def _answer(rollback_seqno: int | None, otherwise: str) -> str:
    return otherwise if rollback_seqno is None else f"roll back to {rollback_seqno}"


def to_text(explanation: Explanation) -> str:
    """Return the explanation for people."""
    position, server = explanation.position, explanation.server
    hello, start, resume = explanation.hello, explanation.start, explanation.resume
    horizon = "not known" if position.horizon is None else str(position.horizon)
    lines = [
        f"partition {explanation.partition}",
        f"client    id {id_text(position.failover_id) or 'none'}, seqno {position.seqno}, horizon {horizon}, "
        f"data id {id_text(position.data_id) or 'none'}, "
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
            f"client    {undo}, remember {id_text(hello.newest_id)}, resume from {resume.seqno}"
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
