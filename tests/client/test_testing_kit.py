"""The scripted server of the testing kit as an honest server, and as one that fails over."""

import threading

import pytest

from tests.client.kit import (
    KEYS,
    Follow,
    P,
    changes_of,
    fold,
    markers_of,
    values,
    wait_for,
    write_keys,
)
from upr_client import Change, Client, Marker, Only, Rollback, Tuning, UprError
from upr_client.errors import BucketNotFoundError, DataDamagedError, RollbackError, UnavailableError
from upr_client.lowlevel import hello
from upr_client.testing import ScriptedServer
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.limits import PARTITIONS

# Being an honest server.


def test_what_is_written_is_followed(server: ScriptedServer, follow: Follow) -> None:
    results = server.write_many([(KEYS[0], b"a"), (KEYS[1], None)])
    assert [(r.partition, r.seqno) for r in results] == [(P, 1), (P, 2)]
    assert {r.failover_id for r in results} == {server.failover_log(P).newest.failover_id}
    follower = follow()
    assert follower.take(3) == [
        Change(P, 1, "set", KEYS[0], b"a"),
        Change(P, 2, "delete", KEYS[1], None),
        Marker(P, 2),
    ]
    server.delete(KEYS[0])
    assert follower.take(2) == [Change(P, 3, "delete", KEYS[0], None), Marker(P, 3)]
    assert server.state() == {}
    assert server.high_seqno(P) == 3


def test_large_values_go_through_a_small_window(server: ScriptedServer, follow: Follow) -> None:
    large = [(key, key * 20_000) for key in KEYS[:6]]
    server.write_many(large)
    events = follow(until="now", tuning=Tuning(credit_bytes=1000)).rest()
    assert [(e.key, e.value) for e in events if isinstance(e, Change)] == large
    assert markers_of(events) == [6]
    frames = server.calls_of("Follow")[0].responses_of("frame")
    # A part of a run that is not the last one ends in no marker.
    assert len(frames) > 1


def test_a_write_whose_answer_is_lost_is_applied_once(server: ScriptedServer) -> None:
    with Client(server.target) as client:
        bucket = client.bucket()
        for i in range(6):
            server.lose_answers(2 if i == 3 else 1)
            assert bucket.set(KEYS[0], b"%d" % i).seqno == i + 1
            assert server.state() == {KEYS[0]: b"%d" % i}
    assert server.high_seqno(P) == 6
    results = [r for call in server.calls_of("Write") for r in call.responses_of("result")]
    assert [result.duplicate for result in results] == [True] * 6


def test_a_write_that_was_heard_and_cut_off_is_applied(server: ScriptedServer) -> None:
    with Client(server.target) as client:
        bucket = client.bucket()
        bucket.set(KEYS[0], b"first")
        server.stall()
        writer = threading.Thread(target=bucket.set, args=(KEYS[0], b"second"))
        writer.start()
        wait_for(server, lambda: len(server.calls_of("Write")[0].requests_of("write")) == 2)
        server.disconnect()
        assert server.high_seqno(P) == 1
        server.resume()
        writer.join()
    assert server.high_seqno(P) == 2
    assert server.state() == {KEYS[0]: b"second"}


def test_unary_calls(server: ScriptedServer) -> None:
    write_keys(server, 4)
    old = server.failover_log(P).newest.failover_id
    new = server.roll_back(P, 2)
    with Client(server.target) as client, Client(server.target, request_timeout=0.3) as hasty:
        bucket = client.bucket()
        answer, fresh = hello(bucket, {P: old, P + 1: None}, with_log=True)
        assert (answer.rollback_seqno, answer.failover_id, answer.rule) == (2, new, "next_record")
        assert len(answer.failover_log) == 2
        assert not fresh.HasField("rollback_seqno")
        assert client.admin.failover_logs(bucket, [P]) == {P: server.failover_log(P)}
        assert len(client.admin.partitions(bucket)) == PARTITIONS
        server.refuse(P, DataDamagedError("bad block"))
        [info] = client.admin.partitions(bucket, [P])
        assert (info.state, info.high_seqno) == ("dead", 2)
        with pytest.raises(BucketNotFoundError):
            client.admin.partitions("other", [P])
        with pytest.raises(UprError, match="UNIMPLEMENTED"):
            client.admin.status()
        server.stall()
        with pytest.raises(UnavailableError):
            hasty.admin.partitions("default", [P])
        server.resume()
        with server.unreachable(), pytest.raises(UnavailableError):
            client.admin.partitions(bucket, [P])
        assert client.admin.partitions(bucket, [P])
    assert [c.method for c in server.calls[:2]] == ["Hello", "GetFailoverLog"]
    assert server.calls_of("Hello")[0].requests[0].with_log


# Markers.


def test_runs_without_markers(server: ScriptedServer, follow: Follow) -> None:
    follower = follow()
    with server.no_markers():
        write_keys(server, 3)
        assert changes_of(follower.take(3)) == [(i + 1, KEYS[i]) for i in range(3)]
        # Were there a marker, it would come before the next change.
        write_keys(server, 1, first=3)
        assert changes_of(follower.take(1)) == [(4, KEYS[3])]
    assert follower.take(1) == [Marker(P, 5)]
    write_keys(server, 1, first=4)
    assert follower.take(2) == [Change(P, 6, "set", KEYS[4], b"of " + KEYS[4]), Marker(P, 6)]


def test_a_marker_when_it_is_asked_for(server: ScriptedServer, follow: Follow) -> None:
    follower = follow()
    with server.no_markers():
        write_keys(server, 1)
        assert server.marker(P) == 2
        assert [type(e) for e in follower.take(2)] == [Change, Marker]
    server.marker(P)
    assert follower.take(1) == [Marker(P, 3)]


def test_until_now_waits_for_a_marker(server: ScriptedServer) -> None:
    with (
        Client(server.target) as client,
        client.bucket().changes(until="now", only=Only([P])) as changes,
    ):
        with server.no_markers():
            write_keys(server, 2)
            assert changes_of([next(changes), next(changes)]) == [(1, KEYS[0]), (2, KEYS[1])]
            follow_call = server.calls_of("Follow")[0]
            assert follow_call.responses_of("ended") == []
        assert list(changes) == [Marker(P, 3)]


# Failing over.


@pytest.mark.parametrize(("at_record", "kept"), [(False, 2), (True, 3)])
def test_a_forced_rollback(
    server: ScriptedServer, follow: Follow, at_record: bool, kept: int
) -> None:
    write_keys(server, 5)
    follower = follow(tuning=Tuning(markers_at_record=at_record))
    events = follower.take(10)
    old = server.failover_log(P).newest.failover_id
    new = server.roll_back(P, 3)
    assert new == server.failover_log(P).newest.failover_id != old
    [rollback] = follower.take(1)
    assert isinstance(rollback, Rollback)
    assert rollback[:6] == (P, 5, kept, old, new, "next_record")
    write_keys(server, 1, first=5)
    events += [rollback, *follower.take(2 * (4 - kept))]
    assert values(fold(events)) == server.state()
    assert set(server.state()) == {*KEYS[:3], KEYS[5]}


def test_a_rollback_that_nobody_undoes_is_an_error(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 2)
    follower = follow(on_rollback=None)
    follower.take(4)
    server.roll_back(P, 0)
    with pytest.raises(RollbackError):
        follower.take(1)


def test_a_rollback_above_what_was_received_undoes_nothing(
    server: ScriptedServer, follow: Follow
) -> None:
    write_keys(server, 2)
    follower = follow()
    follower.take(4)
    server.roll_back(P, 2)
    write_keys(server, 1, first=2)
    assert changes_of(follower.take(2)) == [(3, KEYS[2])]


def test_a_rollback_is_to_a_marker(server: ScriptedServer) -> None:
    server.write_many([(KEYS[0], b"a"), (KEYS[1], b"b")])
    with pytest.raises(InvalidArgumentError, match="no snapshot marker at 1"):
        server.roll_back(P, 1)
    with pytest.raises(InvalidArgumentError, match="the one before it is 2"):
        server.roll_back(P, 9)
    with pytest.raises(InvalidArgumentError):
        server.roll_back(PARTITIONS, 0)


def test_lost_logs(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 2)
    follower = follow()
    first = follower.take(4)
    server.lose()
    events = follower.take(5)
    assert isinstance(events[0], Rollback)
    assert (events[0].seqno, events[0].rule) == (0, "unknown_id")
    assert values(fold(first + events)) == server.state() != {}


def test_restarts(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 2)
    follower = follow()
    follower.take(4)
    ids = [call.responses_of("opened")[0].server_id for call in server.calls_of("Follow")]
    server.restart()
    with server.no_markers():
        write_keys(server, 1, first=2)
        assert changes_of(follower.take(1)) == [(3, KEYS[2])]
        server.restart(clean=False)
    [rollback] = follower.take(1)
    assert isinstance(rollback, Rollback)
    # It resumes at the marker before the record's seqno, which is 2.
    assert (rollback.from_seqno, rollback.seqno) == (3, 1)
    assert changes_of(follower.take(2)) == [(2, KEYS[1])]
    assert set(server.state()) == set(KEYS[:2])
    ids += [call.responses_of("opened")[0].server_id for call in server.calls_of("Follow")[1:]]
    assert len(set(ids)) == 3


def test_a_bucket_made_anew(server: ScriptedServer, follow: Follow) -> None:
    write_keys(server, 2)
    follower = follow()
    follower.take(4)
    server.renew_bucket()
    write_keys(server, 1, first=5)
    events = follower.take(3)
    assert isinstance(events[0], Rollback)
    assert (events[0].seqno, events[0].rule) == (0, "bucket_gone")
    assert changes_of(events) == [(1, KEYS[5])]
