"""A follower on a bucket without a disk: frames are never lost, and never late."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine.buckets import (
    MINE,
    OTHER,
    bucket,
    commit,
    flush,
    stretch_block,
    with_stored,
    write,
)
from tests.raw import all_rows
from upr.engine.bucket import Bucket
from upr.engine.follower import FRAMES_UNTIL_JOINED, READ_PARTITIONS, Follower
from upr.engine.partitions import REPLICA
from upr.engine.streams import (
    STOPPED,
    FollowOptions,
    FrameOut,
    Refused,
    RolledBack,
    Started,
    StartRequest,
)
from upr.engine.tail import MARK_EVERY
from upr.engine.tail_readers import ENTRIES_AT_ONCE
from upr.storage.blocks import Encoded
from upr.storage.read import ReadResult
from upr_protocol.block import Block, block_values, build_block, make_runs, sealed
from upr_protocol.errors import CorruptBlockError, DataDamagedError, StorageFailedError
from upr_protocol.flow import CreditWindow
from upr_protocol.limits import CREDIT_FRAMES, FRAME_BYTES, READ_BYTES
from upr_protocol.wire.codec import decode_block


class Wake:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def following(of: Bucket, *partitions: int, window: int = 1 << 20) -> tuple[Follower, Wake]:
    wake = Wake()
    follower = Follower(of, FollowOptions(memory=True), CreditWindow(window), wake)
    of.add_follower(follower)
    for answer in follower.start([StartRequest(p, None, 0, None) for p in partitions]):
        assert isinstance(answer, Started)
    return follower, wake


def sent_while_awake(follower: Follower, wake: Wake) -> list[Block]:
    """Do what the send loop does until it would go idle."""
    blocks: list[Block] = []
    while True:
        wake.count = 0
        frame = follower.next_frame()
        if frame is not None:
            blocks += map(decode_block, frame.blocks)
            continue
        assert follower.next_read() is None
        if not wake.count:
            return blocks


def test_a_frame_found_at_the_last_look_is_sent() -> None:
    for passed_over in range(0, 8):
        b = bucket()
        follower, wake = following(b, MINE)
        for _ in range(passed_over * ENTRIES_AT_ONCE):
            write(b, OTHER)
            b.tail.close_open()
        write(b, MINE)
        assert [r[1] for r in all_rows(sent_while_awake(follower, wake))] == [1], passed_over


def test_a_frame_that_held_all_is_followed_by_nothing_unless_storage_failed() -> None:
    b = bucket()
    follower = Follower(b, FollowOptions(), CreditWindow(), Wake())
    b.add_follower(follower)
    follower.start([StartRequest(MINE, None, 0, None)])
    for failure in (None, StorageFailedError("the disk is gone")):
        write(b, MINE)
        commit(b)
        write(b, MINE)
        b.failure = failure
        assert follower.next_frame() is not None
        assert follower.has_sent_all == (failure is None)
        assert follower.next_frame() is None
        assert [ended.why.reason for ended in follower.take_ended()] == ["STORAGE_ERROR"] * (
            failure is not None
        )
        commit(b)


def test_a_stream_whose_place_was_flushed_goes_on_at_once() -> None:
    b = bucket()
    follower, wake = following(b, MINE, window=50)
    write(b, MINE)
    assert follower.next_frame() is not None
    # Credit is out, others write, and a flush drops the place where the stream stands.
    assert follower.next_frame() is None
    write(b, OTHER)
    commit(b)
    flush(b)
    write(b, MINE)
    follower.credit.give_back(follower.credit.outstanding)
    assert [r[1] for r in all_rows(sent_while_awake(follower, wake))] == [2]


@pytest.mark.parametrize("size", [900, FRAME_BYTES + 1])
def test_a_value_larger_than_the_credit_left_is_not_overtaken_for_ever(size: int) -> None:
    b = bucket()
    write(b, MINE, b"x" * size)
    commit(b)
    stored = flush(b)
    follower, _ = following(b, MINE, OTHER, window=1000)
    # More than the quarter of the window that a receiver may hold back.
    write(b, OTHER, b"x" * 300)
    small = follower.next_frame()
    assert small is not None
    data = next(d for p, _, d in stored if p == MINE)

    def read() -> None:
        wanted = follower.next_read()
        assert wanted is not None
        (request,) = wanted[0]
        follower.feed([ReadResult(request, [Encoded(decode_block(data).runs, data)])])

    read()
    # The consumer gives back everything but the newest frame each time, as one with live traffic does.
    last = small.size
    for _ in range(50):
        write(b, OTHER, b"x" * 300)
        frame = follower.next_frame()
        if frame is not None:
            if MINE in decode_block(frame.blocks[0]).runs["partition"]:
                return
            follower.credit.give_back(last)
            last = frame.size
        else:
            # Nothing came: what is held goes back.
            assert not follower.ready_bytes
            follower.credit.give_back(last)
            last = 0
            read()
    raise AssertionError("the large value was overtaken 50 times")


def test_a_partition_named_twice_in_a_stop_ends_once() -> None:
    b = bucket()
    follower, _ = following(b, MINE)
    follower.stop([MINE, MINE])
    (ended,) = follower.take_ended()
    assert ended.streams == [(MINE, 1, 0)]


def test_until_inside_a_stretch_ends_at_its_marker() -> None:
    b = with_stored(9)
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(MINE, None, 0, None, until_seqno=4)])
    wanted = follower.next_read()
    assert wanted is not None
    # The horizon of the second run covers less than that of the first.
    blocks = [stretch_block(0, 5, 9), stretch_block(5, 7, 7), stretch_block(7, 9, 9)]
    follower.feed([ReadResult(wanted[0][0], blocks)])
    frame = follower.next_frame()
    assert frame is not None
    assert [r[1] for r in all_rows(map(decode_block, frame.blocks))] == list(range(1, 10))
    assert [ended.why.reason for ended in follower.take_ended()] == ["FINISHED"]


def test_what_was_read_for_a_stream_that_began_anew_elsewhere_is_dropped() -> None:
    b = with_stored(9)
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(MINE, MINE + 1, 0, MINE + 1)])
    wanted = follower.next_read()
    assert wanted is not None
    follower.start([StartRequest(MINE, MINE + 1, 5, MINE + 1)])
    follower.feed([ReadResult(wanted[0][0], [stretch_block(0, 9, 9)])])
    assert follower.next_frame() is None
    again = follower.next_read()
    assert again is not None
    assert again[0][0].above == 5


@pytest.mark.parametrize("at", ["values", "table"])
def test_bytes_that_changed_in_memory_are_not_stored(at: str) -> None:
    b = bucket()
    write(b, MINE, b"needle")
    commit(b)
    entry = b.tail[0]
    data = bytearray(entry.data)
    data[data.find(b"needle") if at == "values" else 4] ^= 1
    entry.data = bytes(data)
    plan = b.begin_flush()
    assert plan is not None
    with pytest.raises(CorruptBlockError, match="columns" if at == "values" else "table"):
        plan.prepare()


def test_a_start_below_the_purge_seqno_rolls_back_to_0() -> None:
    b = with_stored(9)
    b.partitions.purge[MINE] = 7
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    answers = follower.start([StartRequest(MINE, MINE + 1, 6, MINE + 1)])
    assert isinstance(answers[0], RolledBack)
    assert answers[0].answer.rollback_seqno == 0


def test_a_stream_that_starts_anywhere_in_a_long_tail_gets_all_above() -> None:
    b = bucket()
    # Every entry around the marks of the tail is of interest: all are of this partition.
    for _ in range(3 * MARK_EVERY + 2):
        write(b, MINE)
        commit(b)
    for seqno in (0, 1, *range(MARK_EVERY - 2, MARK_EVERY + 3), 2 * MARK_EVERY, 3 * MARK_EVERY):
        wake = Wake()
        follower = Follower(b, FollowOptions(memory=True), CreditWindow(1 << 20), wake)
        follower.start([StartRequest(MINE, MINE + 1, seqno, MINE + 1)])
        got = [r[1] for r in all_rows(sent_while_awake(follower, wake))]
        assert got == list(range(seqno + 1, 3 * MARK_EVERY + 3))


def test_a_disk_follower_and_its_credit_end_where_they_must() -> None:
    b = bucket()
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(MINE, None, 0, None)])
    write(b, MINE)
    assert follower.next_frame() is None
    commit(b)
    frame = follower.next_frame()
    assert frame is not None
    assert frame.size == len(frame.blocks[0]) < (1 << 20) // CREDIT_FRAMES
    assert follower.credit.outstanding == frame.cost == (1 << 20) // CREDIT_FRAMES


def test_what_comes_while_small_frames_wait_to_be_consumed_goes_together() -> None:
    b = bucket()
    follower = Follower(b, FollowOptions(), CreditWindow(), lambda: None)
    follower.start([StartRequest(MINE, None, 0, None)])
    sent: list[FrameOut] = []
    for _ in range(CREDIT_FRAMES + 200):
        write(b, MINE)
        commit(b)
        if (frame := follower.next_frame()) is not None:
            sent.append(frame)
    assert [frame.rows for frame in sent] == [1] * CREDIT_FRAMES
    follower.credit.give_back(sent[0].cost)
    rest = follower.next_frame()
    assert rest is not None
    assert (rest.rows, follower.next_frame()) == (200, None)


def test_until_in_the_tail_sends_nothing_above_its_end() -> None:
    b = bucket()
    for _ in range(5):
        write(b, MINE)
        b.tail.close_open()
    follower = Follower(b, FollowOptions(memory=True), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(MINE, None, 0, None, until_seqno=3)])
    frame = follower.next_frame()
    assert frame is not None
    assert [r[1] for r in all_rows(map(decode_block, frame.blocks))] == [1, 2, 3]
    assert [ended.why.reason for ended in follower.take_ended()] == ["FINISHED"]


def test_streams_that_end_one_after_the_other_are_told_together() -> None:
    b = bucket()
    write(b, MINE)
    commit(b)
    follower = Follower(b, FollowOptions(memory=True), CreditWindow(1 << 20), lambda: None)
    asks = [StartRequest(p, None, 0, None, from_now=True, until_now=True) for p in range(MINE, 12)]
    follower.start(asks)
    follower.start([StartRequest(OTHER, None, 0, None)])
    follower.end_streams([OTHER], STOPPED)
    follower.start(asks[:2])
    first, stopped, again = follower.take_ended()
    assert [partition for partition, _, _ in first.streams] == [ask.partition for ask in asks]
    assert [seqno for _, _, seqno in first.streams] == [1] + [0] * (len(asks) - 1)
    assert (stopped.why, [stream[0] for stream in stopped.streams]) == (STOPPED, [OTHER])
    assert [partition for partition, _, _ in again.streams] == [ask.partition for ask in asks[:2]]


def test_reads_of_the_store_take_turns() -> None:
    b = with_stored(9)
    for column in (b.partitions.stored, b.partitions.high, b.partitions.durable):
        column[OTHER] = 9
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(p, None, 0, None) for p in (MINE, OTHER)])
    turns = []
    for start, end in ((0, 4), (4, 9)):
        wanted = follower.next_read()
        assert wanted is not None
        turns.append([request.partition for request in wanted[0]])
        # The byte limit was reached with the first partition asked for, which has more.
        first, *others = wanted[0]
        blocks = [stretch_block(start, end, end)] if first.partition == MINE else []
        follower.feed([ReadResult(first, blocks), *(ReadResult(other) for other in others)])
        follower.next_frame()
    assert turns == [[MINE, OTHER], [OTHER, MINE]]


def test_a_start_names_the_id_under_which_its_data_was_received() -> None:
    b = with_stored(9)
    log = b.partitions.logs[MINE]
    b.partitions.set_log(MINE, log.with_record(77, 4))
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    # It was given the new id, and has not undone what it had under the old one.
    (above,) = follower.start([StartRequest(MINE, 77, 5, MINE + 1)])
    assert isinstance(above, RolledBack)
    assert above.answer.rollback_seqno == 4
    (at,) = follower.start([StartRequest(MINE, 77, 4, MINE + 1)])
    assert isinstance(at, Started)


def test_a_damaged_partition_ends_its_own_stream_only() -> None:
    b = with_stored(9)
    b.partitions.stored[OTHER] = b.partitions.high[OTHER] = 3
    follower = Follower(b, FollowOptions(), CreditWindow(1 << 20), lambda: None)
    follower.start([StartRequest(p, None, 0, None) for p in (MINE, OTHER)])
    wanted = follower.next_read()
    assert wanted is not None
    results = [ReadResult(request) for request in wanted[0]]
    assert [one.request.partition for one in results] == [MINE, OTHER]
    results[1].error = DataDamagedError("a bit has flipped")
    results[0].blocks = [stretch_block(0, 9, 9)]
    follower.feed(results)
    (ended,) = follower.take_ended()
    assert [partition for partition, _, _ in ended.streams] == [OTHER]
    assert (ended.why.reason, ended.why.retriable) == ("STORAGE_ERROR", False)
    frame = follower.next_frame()
    assert frame is not None
    assert [r[1] for r in all_rows(map(decode_block, frame.blocks))] == list(range(1, 10))


def test_who_may_read_anywhere_leaves_a_replica_that_stores_nothing_more() -> None:
    def started(options: FollowOptions, *requests: StartRequest) -> tuple[Follower, list[str]]:
        follower = Follower(b, options, CreditWindow(1 << 20), Wake())
        answers = follower.start(requests)
        kinds = [a.error.reason if isinstance(a, Refused) else type(a).__name__ for a in answers]
        return follower, kinds

    def ends(follower: Follower) -> list[str]:
        while follower.next_frame() is not None:
            pass
        return [one.why.reason for one in follower.take_ended()]

    b = bucket()
    write(b, MINE)
    commit(b)
    anywhere, replica = (
        FollowOptions(any_server=True),
        FollowOptions(memory=True, directory="0" * 16),
    )
    at = StartRequest(MINE, MINE + 1, 1, MINE + 1)
    here, _ = started(anywhere, StartRequest(MINE, None, 0, None))
    sole, _ = started(FollowOptions(), StartRequest(MINE, None, 0, None))
    chain, _ = started(replace(replica, any_server=True), StartRequest(MINE, None, 0, None))
    b.fail(StorageFailedError("the journal failed"))
    # As long as it is the active one nobody else has more.
    assert (ends(here), ends(sole), ends(chain)) == ([], [], [])
    assert started(anywhere, at)[1] == ["Started"]
    b.partitions.state[:] = REPLICA
    assert (ends(here), ends(sole), ends(chain)) == (["STORAGE_ERROR"], [], [])
    assert started(anywhere, at)[1] == ["BEHIND"]
    # What it has it gives, and what is to end here ends.
    late, kinds = started(anywhere, StartRequest(MINE, None, 0, None))
    assert (kinds, ends(late)) == (["Started"], ["STORAGE_ERROR"])
    assert started(anywhere, replace(at, until_now=True))[1] == ["Started"]
    assert started(anywhere, replace(at, until_seqno=1))[1] == ["Started"]
    assert started(anywhere, replace(at, until_seqno=2))[1] == ["BEHIND"]
    assert started(replace(replica, any_server=True), at)[1] == ["Started"]


def test_a_stream_that_begins_inside_a_run_of_the_tail_gets_what_is_above() -> None:
    b = bucket()
    rows = build_block([b"k%d" % i for i in range(6)], [b"%d" % i for i in range(6)])
    values = block_values(rows)
    # One write: three rows each of two partitions.
    b.write(sealed(replace(rows, runs=make_runs([MINE, OTHER], [3, 3]))), b"", None, 0, 1)
    newest_id = int(b.partitions.newest_id[MINE])
    follower, wake = following(b, OTHER)
    (answer,) = follower.start([StartRequest(MINE, newest_id, 2, newest_id)])
    assert isinstance(answer, Started)
    blocks = sent_while_awake(follower, wake)
    assert [(p, seqno, value) for p, seqno, _, value in all_rows(blocks)] == [
        (MINE, 3, values[2]),
        *((OTHER, seqno, values[2 + seqno]) for seqno in (1, 2, 3)),
    ]
    starts = {int(r["partition"]): int(r["start_seqno"]) for block in blocks for r in block.runs}
    assert starts == {MINE: 2, OTHER: 0}


def stored_and_tail(count: int, size: int) -> tuple[Bucket, dict[int, bytes]]:
    """Return a bucket with a stored block in each of so many partitions, and three entries in the tail with one row of each."""
    b = bucket()
    for partition in range(count):
        write(b, partition, b"v" * size)
    commit(b)
    blocks = {partition: data for partition, _, data in flush(b)}
    for _ in range(3):
        rows = build_block([b"k"] * count, [b"w"] * count, np.arange(count, dtype=np.uint32))
        b.write(rows, b"", None, 0, 1)
        commit(b)
    return b, blocks


def frames_of(follower: Follower, blocks: dict[int, bytes]) -> str:
    """Send all, with reads of the store as long as one is wanted; return a letter a frame: from the store, or the tail."""
    frames = ""
    while True:
        while (frame := follower.next_frame()) is not None:
            first = decode_block(frame.blocks[0]).runs[0]
            frames += "s" if first["start_seqno"] == 0 else "t"
        wanted = follower.next_read()
        if wanted is None and (frame := follower.next_frame()) is None:
            return frames
        if wanted is None:
            frames += "t"
            continue
        results, left = [], wanted[1]
        for request in wanted[0]:
            data = [blocks[request.partition]] if left > 0 else []
            results.append(ReadResult(request, [Encoded(decode_block(d).runs, d) for d in data]))
            left -= sum(map(len, data))
        follower.feed(results)


def test_streams_that_come_from_the_store_go_on_in_the_tail_together() -> None:
    count = 5 * READ_PARTITIONS
    b, blocks = stored_and_tail(count, 1)
    follower, _ = following(b, *range(count), window=1 << 26)
    assert frames_of(follower, blocks) == "ssssst"


def test_what_one_read_brings_goes_in_one_frame() -> None:
    # A read ends with the block that reaches READ_BYTES: the second one here.
    b, blocks = stored_and_tail(4, READ_BYTES * 3 // 5)
    follower, _ = following(b, *range(4), window=1 << 26)
    assert frames_of(follower, blocks) == "sst"


def test_a_stream_waits_for_so_many_others_to_come_from_the_store_and_no_longer() -> None:
    count = FRAMES_UNTIL_JOINED + 4
    b, blocks = stored_and_tail(count, READ_BYTES)
    follower, _ = following(b, *range(count), window=1 << 26)
    assert frames_of(follower, blocks) == "s" * FRAMES_UNTIL_JOINED + "t" + "ssss" + "t"


def test_ends_that_reads_of_the_store_bring_are_told_together_and_wait_for_no_credit() -> None:
    count = FRAMES_UNTIL_JOINED + 4
    b, blocks = stored_and_tail(count, READ_BYTES)
    follower, wake = following(b, window=4 * READ_BYTES)
    follower.start([StartRequest(p, None, 0, None, until_seqno=1) for p in range(count)])
    told: list[list[int]] = []
    sent = 0
    while sum(map(len, told)) < count:
        if follower.has_ended:
            told += [[p for p, _, _ in ended.streams] for ended in follower.take_ended()]
        wake.count = 0
        if (frame := follower.next_frame()) is not None:
            sent += len(frame.blocks)
        elif (wanted := follower.next_read()) is not None:
            (first, *_), _ = wanted
            data = blocks[first.partition]
            follower.feed([ReadResult(first, [Encoded(decode_block(data).runs, data)])])
        elif not wake.count:
            # All that was sent is told of before the receiver gives credit.
            assert sum(map(len, told)) == sent
            if sent == 3:
                # From here on there is credit for all.
                follower.credit.window = 1 << 30
            follower.credit.give_back(0)
    assert [len(one) for one in told] == [3, FRAMES_UNTIL_JOINED, 1]


def test_a_stream_waits_for_none_that_cannot_be_read() -> None:
    b, blocks = stored_and_tail(2, 1)
    follower, wake = following(b, 0, 1)
    b.purging[1] = 9
    assert frames_of(follower, blocks) == "st"
    assert follower._seqno[:2].tolist() == [4, 0]
    # Nor for one that goes.
    b.purging[1] = 0
    assert follower.next_read() is not None
    follower.stop([1])
    follower.feed([])
    wake.count = 0
    assert frames_of(follower, blocks) == ""


def test_a_stream_that_ended_while_it_came_from_the_store_does_not_come_back() -> None:
    b, blocks = stored_and_tail(2, READ_BYTES)
    follower, _ = following(b, 0, 1, window=1 << 26)
    wanted = follower.next_read()
    assert wanted is not None
    first = Encoded(decode_block(blocks[0]).runs, blocks[0])
    follower.feed([ReadResult(wanted[0][0], [first])])
    assert follower.next_frame() is not None
    follower.stop([0])
    assert frames_of(follower, blocks) == "st"
    assert follower._seqno[:2].tolist() == [1, 4]
