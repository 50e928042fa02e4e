"""A replica without a disk: what it takes, what it knows of producers, what it undoes at a start."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.buckets import bucket, commit, flush
from tests.engine.test_follower_steps import Wake
from tests.raw import all_rows
from upr.engine.bucket import Bucket
from upr.engine.compaction import PurgeAges, purge_limits, raise_purges
from upr.engine.follower import Follower
from upr.engine.partitions import ACTIVE, PENDING, REPLICA, Partitions
from upr.engine.recovery import Undo, recover
from upr.engine.streams import FollowOptions, Refused, RolledBack, Started, StartRequest
from upr.engine.tail import TailEntry
from upr.storage.blocks import Head
from upr.storage.journal import Commit, JournalEntry, NumberedWrite
from upr.storage.keyspace import CutRow, PartitionRow, Pin
from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.errors import ProtocolError, StorageFailedError
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.flow import CreditWindow
from upr_protocol.wire.codec import decode_block, encode_block, encode_frame, producer_writes
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

A, B = 3, 4
DIRECTORY = "00000000000000aa"


def entry(*runs: tuple[int, int, int, int]) -> TailEntry:
    """An entry of runs (partition, start, end, horizon), each with all its rows, of keys of their own."""
    rows = [(p, seqno) for p, start, end, _ in runs for seqno in range(start + 1, end + 1)]
    keys = [b"%d in %d" % (seqno, p) for p, seqno in rows]
    block = build_block(keys, [b"v"] * len(rows), np.array([p for p, _ in rows], np.uint32))
    partitions, starts, ends, horizons = (np.array(column) for column in zip(*runs, strict=True))
    block = sealed(
        replace(block, runs=make_runs(partitions, ends - starts, starts, ends, horizons, 1))
    )
    return TailEntry(block.runs, encode_block(block), (), 1)


def write(to: Bucket, number: int, *partitions: int) -> bool:
    """Write a row to each partition; returns whether that was a repetition."""
    rows = build_block([b"k"] * len(partitions), [b"%d" % number] * len(partitions))
    block = sealed(replace(rows, runs=make_runs(list(partitions), 1)))
    call = to.open_producer(b"writer", to.open_producer(b"writer", 0).producer.last_number)
    written = to.write(block, b"writer", call, number, number, {})
    return written.duplicate


def following(of: Bucket, *partitions: int, seqno: int = 0) -> Follower:
    options = FollowOptions("replica", memory=True, directory=DIRECTORY)
    follower = Follower(of, options, CreditWindow(), Wake())
    of.add_follower(follower)
    for partition in partitions:
        newest = of.partitions.logs[partition].newest.failover_id
        request = StartRequest(partition, newest, seqno, newest if seqno else None)
        assert isinstance(follower.start([request])[0], Started)
    return follower


def received(follower: Follower) -> list[tuple[Block, bytes, list[NumberedWrite]]]:
    """Frames as they cross the wire: each block with its bytes and its producers' writes."""
    found = []
    while (frame := follower.next_frame()) is not None:
        sent = wire.FollowResponse.FromString(
            encode_frame(frame.blocks, frame.tokens, frame.cost, b"", frame.writes)
        ).frame
        data = [block.SerializeToString() for block in sent.blocks]
        blocks = [decode_block(one) for one in data]
        writes = producer_writes(sent.producer_writes, blocks)
        numbered = [[NumberedWrite(*one) for one in several] for several in writes]
        found += list(zip(blocks, data, numbered, strict=True))
    return found


def test_a_promoted_replica_knows_the_numbers_that_came_with_the_blocks() -> None:
    upstream, replica = bucket(), bucket(REPLICA)
    follower = following(upstream, A, B)
    # Gathered in one entry; of another partition the replica is told nothing.
    for number, partitions in ((1, (A,)), (2, (A, B)), (3, (B, 9)), (4, (9,))):
        assert not write(upstream, number, *partitions)
    for block, data, writes in received(follower):
        replica.receive(block, data, writes)
    table = replica.partitions
    assert (table.high[A], table.high[B], table.high[9]) == (2, 2, 0)
    table.state[:] = ACTIVE
    assert write(replica, 2, A, B)
    assert write(replica, 3, B)
    assert not write(replica, 4, 9)


def test_a_lone_write_names_itself_to_a_replica_and_to_nobody_else() -> None:
    upstream = bucket()
    replica = following(upstream, A)
    consumer = Follower(upstream, FollowOptions(memory=True), CreditWindow(), Wake())
    upstream.add_follower(consumer)
    consumer.start([StartRequest(A, None, 0, None)])
    for number, order in ((1, (replica, consumer)), (2, (consumer, replica))):
        write(upstream, number, A)
        for follower in order:
            ((_, _, writes),) = received(follower)
            assert [one.number for one in writes] == [number] * (follower is replica)


def test_a_cut_out_names_the_writes_of_what_it_has() -> None:
    upstream = bucket()
    for number in range(1, 4):
        write(upstream, number, A)
    write(upstream, 4, B)
    (told,) = received(following(upstream, A, seqno=2))
    block, _, writes = told
    assert block.runs["start_seqno"].tolist() == [2]
    assert [one.number for one in writes] == [3]


@pytest.mark.parametrize(
    "runs", [[(A, 1, 2, 2)], [(A, 0, 1, 1), (B, 3, 4, 4)], [(9, 0, 1, 1)]], ids=str
)
def test_what_does_not_continue_a_replica_changes_nothing(
    runs: Sequence[tuple[int, int, int, int]],
) -> None:
    replica = bucket(REPLICA)
    replica.partitions.state[9] = PENDING
    wrong = entry(*runs)
    with pytest.raises(ProtocolError):
        replica.receive(wrong.block(), wrong.data, ())
    assert replica.tail.end == 0
    assert not replica.partitions.high.any()


def test_a_replica_takes_nothing_behind_what_it_kept_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be sent again, and be there twice."""
    replica, one = bucket(REPLICA), entry((A, 0, 2, 2))
    replica.on_failure = replica.fail

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(replica.partitions, "received", no_memory)
        with pytest.raises(MemoryError):
            replica.receive(one.block(), one.data, ())
    with pytest.raises(StorageFailedError, match="received and not kept"):
        replica.receive(one.block(), one.data, ())
    assert replica.tail.end == 1


def test_a_replica_keeps_what_it_is_told_and_serves_it() -> None:
    replica = bucket(REPLICA)
    for one in (entry((A, 0, 2, 2)), entry((A, 2, 4, 9), (B, 0, 1, 1))):
        replica.receive(one.block(), one.data, ())
    assert replica.markers.seqno[A] == 0
    commit(replica)
    assert (replica.markers.seqno[A], replica.markers.seqno[B]) == (2, 1)
    reader = Follower(replica, FollowOptions(), CreditWindow(), Wake())
    reader.start([StartRequest(A, None, 0, None)])
    frames = list(iter(reader.next_frame, None))
    assert [row[1] for f in frames for row in all_rows(map(decode_block, f.blocks))] == [1, 2, 3, 4]
    assert [(p, end) for p, end, _ in flush(replica)] == [(A, 2), (A, 4), (B, 1)]
    assert (replica.partitions.stored_complete[A], replica.partitions.stored_horizon[A]) == (2, 9)


def test_a_log_that_is_taken_over_ends_the_streams_of_readers() -> None:
    replica = bucket(REPLICA)
    reader = Follower(replica, FollowOptions(), CreditWindow(), Wake())
    replica.add_follower(reader)
    reader.start([StartRequest(p, None, 0, None) for p in (A, B)])
    longer = replica.partitions.logs[A].with_record(77, 0, epoch=5)
    same = replica.partitions.logs[B]
    replica.begin_adopting({A: longer, B: same}, {A: 5, B: 5})
    assert [(e.streams[0][0], e.why.reason) for e in reader.take_ended()] == [
        (A, "HISTORY_CHANGED")
    ]
    # It is not stored yet: nobody may be told of it.
    assert replica.partitions.state[A] == PENDING
    (refused,) = reader.start([StartRequest(A, None, 0, None)])
    assert isinstance(refused, Refused)
    assert refused.error.retriable
    replica.adopted([A, B])
    assert isinstance(reader.start([StartRequest(A, 77, 0, None)])[0], Started)
    assert replica.partitions.epoch[[A, B]].tolist() == [5, 5]


def test_a_replica_is_told_epoch_and_log_and_is_refused_by_one_that_was_replaced() -> None:
    upstream = bucket(epoch=7)
    write(upstream, 1, A)
    follower = Follower(
        upstream, FollowOptions(memory=True, directory=DIRECTORY), CreditWindow(), Wake()
    )
    (started,) = follower.start([StartRequest(A, A + 1, 1, A + 1, epoch=7)])
    assert isinstance(started, Started)
    assert (started.epoch, started.log) == (7, upstream.partitions.logs[A])
    (back,) = follower.start([StartRequest(A, 99, 1, 99, epoch=7)])
    assert isinstance(back, RolledBack)
    assert back.epoch == 7
    (refused,) = follower.start([StartRequest(A, A + 1, 1, A + 1, epoch=8)])
    assert isinstance(refused, Refused)
    assert refused.error.reason == "OLD_EPOCH"


def test_a_replica_purges_what_its_upstream_has_purged() -> None:
    replica = bucket(REPLICA)
    one = entry((A, 0, 9, 9), (B, 0, 9, 9))
    replica.receive(one.block(), one.data, ())
    commit(replica)
    ages = PurgeAges(0, 0)
    assert purge_limits(replica, ages, 10).never[A] == 0
    raise_purges(replica, {A: 6, B: 0})
    limits = purge_limits(replica, ages, 10)
    assert (limits.never[A], limits.passed[A], limits.never[B]) == (6, 6, 0)


def test_a_pin_above_what_was_received_is_no_flush_s_to_cross() -> None:
    replica = bucket(REPLICA)
    replica.cuts.replicated(
        CutRow(1, 2**60, 1, {A: Pin(A + 1, 2), B: Pin(B + 1, 1)}), "c", replica.tail
    )
    for one in (entry((A, 0, 2, 2), (B, 0, 1, 1)), entry((A, 2, 4, 4)), entry((B, 1, 2, 2))):
        replica.receive(one.block(), one.data, ())
    commit(replica)
    assert [(p, end) for p, end, _ in flush(replica)] == [(A, 2), (B, 1)]
    while replica.tail.first < replica.tail.durable:
        flush(replica)
    assert replica.partitions.stored[[A, B]].tolist() == [4, 2]


LOG = FailoverLog((FailoverRecord(1, 0, 1), FailoverRecord(2, 4, 2)))


def undone(
    undo: dict[int, Undo], heads: Sequence[Head] = (), proven: bool = False
) -> tuple[Partitions, list[tuple[int, int]], list[tuple[int, int]], dict[int, int]]:
    """Recover a replica; the table, the rows undone, those that stay as (partition, seqno), and what is cut off."""
    stored = max((head.end for head in heads), default=0)
    rows = {p: PartitionRow(ACTIVE, 1, 0, 0, 0, FailoverLog.born(p + 100)) for p in range(1024)}
    rows[A] = replace(rows[A], stored_high=stored, complete=stored, horizon=stored, purge_seqno=5)
    journal = [
        entry((A, stored, stored + 2, stored + 2), (B, 0, 1, 1)),
        entry((A, stored + 2, stored + 5, stored + 5)),
    ]
    commits = [Commit(n, (JournalEntry(e.data),)) for n, e in enumerate(journal, 1)]
    found = recover(
        rows,
        lambda p: heads if p == A else (),
        commits,
        proven=np.full(1024, 99, np.uint64) if proven else None,
        new_id=lambda: 7,
        replica=True,
        undo=undo,
    )
    gone = [(p, s) for p, s, *_ in all_rows(e.block() for e in found.undone[0])]
    left = [(p, s) for p, s, *_ in all_rows(e.block() for e in found.entries)]
    left += [(p, s) for p, s, *_ in all_rows(decode_block(d) for *_, d in found.blocks)]
    assert found.undone[1].keys() <= {A}
    assert set(found.rows) == set(range(1024))
    return found.partitions, gone, sorted(left), found.cut_off


def test_a_server_that_was_active_comes_back_as_a_replica_without_a_record() -> None:
    table, gone, left, _ = undone({})
    assert (table.state == REPLICA).all()
    assert {len(log) for log in table.logs} == {1}
    assert (gone, len(left)) == ([], 6)


@pytest.mark.parametrize(("seqno", "marker"), [(1, 0), (2, 2), (4, 2)])
def test_an_undo_goes_to_the_newest_marker_and_takes_over_the_log(seqno: int, marker: int) -> None:
    table, gone, left, _ = undone({A: Undo(seqno, LOG, 3)})
    assert gone == [(A, s) for s in range(marker + 1, 6)]
    assert left == [*((A, s) for s in range(1, marker + 1)), (B, 1)]
    assert (table.logs[A], int(table.epoch[A]), int(table.state[A])) == (LOG, 3, REPLICA)
    assert (table.stored[A], table.stored_complete[A], table.high[A]) == (marker,) * 3
    assert table.purge[A] == min(5, marker)


def test_an_undo_reaches_into_the_store() -> None:
    heads = [Head(0, 3, 3, 3, 10, 10), Head(3, 6, 6, 3, 10, 10)]
    table, gone, left, cut_off = undone({A: Undo(4, LOG, 3)}, heads)
    assert cut_off == {A: 3}
    assert gone == [(A, s) for s in range(7, 12)]
    assert left == [(B, 1)]
    assert (table.stored[A], table.high[A]) == (3, 3)


def test_what_is_only_received_anew_is_not_told_as_undone() -> None:
    table, gone, left, _ = undone({A: Undo(0, LOG, 3, lost=False)})
    assert (gone, left, int(table.high[A])) == ([], [(B, 1)], 0)


def test_the_end_of_a_part_of_a_stretch_is_no_marker() -> None:
    heads = [Head(0, 3, 3, 3, 10, 10), Head(3, 6, 19, 3, 10, 10)]
    table, _, left, cut_off = undone({A: Undo(9, LOG, 3)}, heads)
    assert (cut_off, left, int(table.high[A])) == ({A: 3}, [(B, 1)], 3)


def test_the_epoch_of_a_row_is_that_of_its_record() -> None:
    table = bucket().partitions
    # A log that lost its oldest records, and several records at one seqno.
    records = [FailoverRecord(90 + i, s, 2 + i) for i, s in enumerate((5, 5, 8))]
    table.set_log(A, FailoverLog(tuple(records)))
    table.set_log(B, FailoverLog((FailoverRecord(99, 0, 7),)))
    for seqno in range(12):
        found = table.epochs_at(np.full(1024, seqno, np.uint64))
        for partition in (A - 1, A, B, B + 1):
            log = table.logs[partition]
            given = log.records[log.index(log.id_at(seqno))].epoch if seqno else 0
            assert found[partition] == given, (partition, seqno)
    table.set_log(A, FailoverLog((FailoverRecord(1, 0, 11),)))
    assert table.epochs_at(np.full(1024, 1, np.uint64))[A] == 11
