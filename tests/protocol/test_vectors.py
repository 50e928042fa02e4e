"""The language-neutral cases for the handshake, each driven against both roles of the core."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import FailoverLog, check_partition
from upr_protocol.handshake import (
    HandshakeAnswer,
    ResumePoint,
    Rule,
    answer_hello,
    answer_start,
    older_ids_to_try,
    resume_after_rollback,
)
from upr_protocol.position import Position

Vector = dict[str, Any]

_FILE = Path(__file__).parent / "vectors" / "handshake.json"
VECTORS: list[Vector] = json.loads(_FILE.read_text())
ERRORS = [vector for vector in VECTORS if vector["expect"]["answer"] == "error"]
STARTS = [vector for vector in VECTORS if vector["kind"] == "start" and vector not in ERRORS]
HELLOS = [vector for vector in VECTORS if vector not in ERRORS and vector not in STARTS]


def failover_id(name: str) -> int:
    """The id behind a name in the style of a license plate; different for different names."""
    return int.from_bytes(name.encode())


def optional_id(name: str | None) -> int | None:
    return None if name is None else failover_id(name)


def log_of(records: list[dict[str, Any]]) -> FailoverLog:
    return FailoverLog.from_pairs(
        (failover_id(record["failover_id"]), record["seqno"]) for record in records
    )


class Server:
    """The partition of a vector, after its event."""

    def __init__(self, vector: Vector) -> None:
        state = vector["partition_state"]
        assert state["log_order"] == "oldest_first"
        self.log = log_of(state["failover_log"])
        self.high: int = state["high_seqno"]
        event = vector.get("event")
        if event is None:
            return
        assert event["op"] in {"restart", "takeover"}
        of = ("durable_last_marker", "durable_high_seqno")
        if event["op"] == "takeover":
            of = ("new_master_last_marker", "new_master_high_seqno")
        if event["clean"]:
            self.high = event[of[1]]
        else:
            self.high = event[of[0]]
            self.log = self.log.with_record(failover_id(event["new_failover_id"]), self.high)


def position_of(vector: Vector) -> Position:
    client = vector["client"]
    newest = client.get("first_try", client)["failover_id"]
    own_log = client.get("own_failover_log")
    return Position(
        bucket_version=0,
        failover_id=optional_id(newest),
        data_id=optional_id(client.get("data_failover_id", newest)),
        seqno=client["last_seqno"],
        horizon=client.get("horizon"),
        markers=tuple(client["snapshot_markers"]),
        log=log_of(own_log) if own_log else None,
    )


def shake(server: Server, position: Position, inclusive: bool) -> tuple[int | None, ResumePoint]:
    """Hello as a client does it: what was decided, and where it resumes."""
    answer = answer_hello(server.log, position.failover_id)
    assert answer.newest_id == server.log.newest.failover_id
    if position.failover_id is None:
        return answer.rollback_seqno, resume_after_rollback(position, 0)
    if answer.rollback_seqno is None:
        return None, ResumePoint(position.seqno, False, answer.rule, answer.words)
    decided = limit = answer.rollback_seqno
    if answer.rule == Rule.UNKNOWN_ID:
        for older, own_next in older_ids_to_try(position):
            again = answer_hello(server.log, older)
            if again.rollback_seqno != 0:
                assert again.rollback_seqno is not None
                decided = again.rollback_seqno
                limit = min(decided, own_next)
                break
    return decided, resume_after_rollback(position, limit, inclusive=inclusive)


def test_every_vector_is_driven() -> None:
    assert len(VECTORS) == 28
    assert len({vector["id"] for vector in VECTORS}) == 28
    assert (len(ERRORS), len(STARTS), len(HELLOS)) == (2, 2, 24)
    assert Counter(vector["kind"] for vector in VECTORS) == {
        "client-pick": 12,
        "hello": 9,
        "log": 4,
        "start": 3,
    }
    assert sum(vector["depends_on_reading"] for vector in VECTORS) == 2
    assert sum(vector.get("negative", False) for vector in VECTORS) == 1


@pytest.mark.parametrize("vector", ERRORS, ids=lambda vector: vector["id"])
def test_bad_input_is_an_error(vector: Vector) -> None:
    client = vector["client"]
    server = Server(vector)

    def ask() -> None:
        check_partition(client.get("partition", 5))
        answer_start(
            server.log,
            failover_id=failover_id(client["failover_id"]),
            seqno=client["last_seqno"],
            data_id=failover_id(client["failover_id"]),
            high_seqno=server.high,
        )

    with pytest.raises(InvalidArgumentError) as caught:
        ask()
    assert caught.value.reason.lower() == vector["expect"]["error_kind"]
    assert "never a rollback" in caught.value.hint


def started(server: Server, position: Position) -> HandshakeAnswer:
    return answer_start(
        server.log,
        failover_id=position.failover_id,
        seqno=position.seqno,
        data_id=position.data_id,
        high_seqno=server.high,
    )


@pytest.mark.parametrize("vector", STARTS, ids=lambda vector: vector["id"])
def test_start(vector: Vector) -> None:
    server, position, expect = Server(vector), position_of(vector), vector["expect"]
    answer = started(server, position)
    assert answer.kind == {"ok": "started", "rollback": "rollback"}[expect["answer"]]
    assert answer.rollback_seqno == expect.get("rollback_seqno")
    assert answer.newest_id == failover_id(expect["current_failover_id"])
    resumes_from = position.seqno
    if answer.rollback_seqno is not None:
        resumes_from = resume_after_rollback(position, answer.rollback_seqno).seqno
    assert resumes_from == expect["client_resumes_from"]


@pytest.mark.parametrize("inclusive", [False, True], ids=["before", "inclusive"])
@pytest.mark.parametrize("vector", HELLOS, ids=lambda vector: vector["id"])
def test_hello_and_resume(vector: Vector, inclusive: bool) -> None:
    server, position, expect = Server(vector), position_of(vector), dict(vector["expect"])
    if inclusive and vector["depends_on_reading"]:
        expect |= vector["expect_inclusive_reading"]
    if "first_try" in vector["client"]:
        first = answer_hello(server.log, position.failover_id)
        assert first.rollback_seqno == vector["client"]["first_try"]["rollback_seqno"]
        # The vector's id is the one that the client tries then.
        tried = failover_id(vector["client"]["failover_id"])
        assert [older for older, _ in older_ids_to_try(position)] == [tried]

    if "failover_log_after" in expect:
        assert server.log == log_of(expect["failover_log_after"])
    if "high_seqno_after" in expect:
        assert server.high == expect["high_seqno_after"]

    decided, point = shake(server, position, inclusive)
    assert ("ok" if decided is None else "rollback") == expect["answer"]
    assert decided == expect.get("rollback_seqno")
    assert server.log.newest.failover_id == failover_id(expect["current_failover_id"])
    assert point.seqno == expect["client_resumes_from"]
    assert point.undo == (point.seqno < position.seqno)

    stored = position
    if decided is not None or position.failover_id is None:
        stored = position.rolled_back(point.seqno, server.log.newest.failover_id, server.log)
        assert stored.seqno == point.seqno
    if "replica_log_after_rollback_and_start" in expect:
        assert stored.log == log_of(expect["replica_log_after_rollback_and_start"])

    answer = started(server, stored)
    assert (answer.kind, answer.alarm) == ("started", False)


def test_negative_vector_is_caught_once_the_data_id_is_sent() -> None:
    (vector,) = (vector for vector in VECTORS if vector.get("negative"))
    server, position = Server(vector), position_of(vector)
    assert position.data_id is None
    # Without a data id the server cannot know better: this is what the vector warns of.
    for data_id, kind in ((None, "started"), (failover_id("DRF394"), "rollback")):
        answer = answer_start(
            server.log,
            failover_id=position.failover_id,
            seqno=position.seqno,
            data_id=data_id,
            high_seqno=server.high,
        )
        assert answer.kind == kind
