"""Streams that end exactly at a seqno: FINISHED as of it, or SNAPSHOT_GONE; never as of something else."""

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
from tests.engine.test_cuts import entry
from tests.raw import all_rows
from upr.engine.bucket import Bucket
from upr.engine.follower import Follower
from upr.engine.streams import Answer, FollowOptions, Refused, RolledBack, Started, StartRequest
from upr.storage.blocks import Encoded
from upr.storage.read import ReadResult
from upr_protocol.flow import CreditWindow
from upr_protocol.wire.codec import decode_block

WINDOW = 1 << 20


def exact(
    of: Bucket, until: int, seqno: int = 0, *, memory: bool = True, window: int = WINDOW
) -> tuple[Follower, Answer]:
    follower = Follower(of, FollowOptions(memory=memory), CreditWindow(window), lambda: None)
    of.add_follower(follower)
    known = None if seqno == 0 else MINE + 1
    (answer,) = follower.start([StartRequest(MINE, known, seqno, known, until_exact=until)])
    return follower, answer


def sent(follower: Follower) -> list[int]:
    """The seqnos of every frame that there is now."""
    seqnos = []
    while (frame := follower.next_frame()) is not None:
        seqnos += [row[1] for row in all_rows(map(decode_block, frame.blocks))]
    return seqnos


def ends(follower: Follower) -> list[str]:
    return [ended.why.reason for ended in follower.take_ended()]


def stored(of: Bucket, follower: Follower, *blocks: Encoded) -> None:
    """Answer the read that the follower wants with these blocks."""
    wanted = follower.next_read()
    assert wanted is not None
    follower.feed([ReadResult(wanted[0][0], list(blocks))])


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("window", [WINDOW, 100])
def test_from_the_tail_it_ends_at_the_marker(memory: bool, window: int) -> None:
    b = bucket()
    for _ in range(5):
        write(b, MINE)
        write(b, OTHER)
        b.tail.close_open()
    follower, answer = exact(b, 3, memory=memory, window=window)
    assert isinstance(answer, Started)
    assert answer.until_seqno == 3
    got = [] if memory else sent(follower)
    assert got == []
    commit(b)
    while not follower.has_ended:
        got += sent(follower)
        follower.credit.give_back(follower.credit.outstanding)
    assert got == [1, 2, 3]
    assert ends(follower) == ["FINISHED"]


def test_a_disk_stream_waits_for_what_is_not_durable_and_then_ends() -> None:
    b = bucket()
    write(b, MINE)
    commit(b)
    write(b, MINE)
    follower, _ = exact(b, 2, memory=False)
    assert sent(follower) == [1]
    assert ends(follower) == []
    commit(b)
    assert sent(follower) == [2]
    assert ends(follower) == ["FINISHED"]


def test_a_run_of_the_tail_across_it_ends_the_stream_in_the_middle() -> None:
    b = bucket()
    b.recovered([entry((MINE, 0, 2, 2)), entry((MINE, 2, 6, 6), (OTHER, 0, 2, 2))])
    follower, answer = exact(b, 4)
    assert isinstance(answer, Started)
    (other,) = follower.start([StartRequest(OTHER, None, 0, None)])
    assert isinstance(other, Started)
    frame = follower.next_frame()
    assert frame is not None
    rows = all_rows(map(decode_block, frame.blocks))
    assert [(row[0], row[1]) for row in rows] == [(MINE, 1), (MINE, 2), (OTHER, 1), (OTHER, 2)]
    (ended,) = follower.take_ended()
    assert ended.streams == [(MINE, answer.token, 2)]
    assert (ended.why.reason, ended.why.retriable) == ("SNAPSHOT_GONE", False)
    assert f"partition {MINE}" in ended.why.words
    assert "seqno 4" in ended.why.words
    assert "seqno 2 is merged up to 6" in ended.why.words
    assert "new cut" in ended.why.hint
    assert follower.next_frame() is None


def test_a_run_of_the_tail_that_is_complete_above_it_is_not_sent() -> None:
    b = bucket()
    b.recovered([entry((MINE, 0, 2, 2)), entry((MINE, 2, 4, 6)), entry((MINE, 4, 6, 6))])
    for until in (4, 5):
        follower, _ = exact(b, until)
        assert sent(follower) == [1, 2]
        assert ends(follower) == ["SNAPSHOT_GONE"]
    follower, _ = exact(b, 6)
    assert sent(follower) == [1, 2, 3, 4, 5, 6]
    assert ends(follower) == ["FINISHED"]


def test_nothing_but_a_run_across_it_ends_the_stream_without_a_frame() -> None:
    b = bucket()
    b.recovered([entry((MINE, 0, 6, 6))])
    follower, _ = exact(b, 4)
    assert follower.next_frame() is None
    assert ends(follower) == ["SNAPSHOT_GONE"]


def test_from_the_store_it_ends_at_the_marker() -> None:
    b = with_stored(9)
    follower, _ = exact(b, 6)
    stored(b, follower, *(stretch_block(*run) for run in ((0, 3, 6), (3, 6, 6), (6, 9, 9))))
    assert sent(follower) == [1, 2, 3, 4, 5, 6]
    assert ends(follower) == ["FINISHED"]
    assert follower.next_read() is None


@pytest.mark.parametrize("run", [(2, 9, 9), (2, 6, 9), (2, 5, 7)])
def test_a_stored_run_beyond_it_ends_the_stream_in_the_middle(run: tuple[int, int, int]) -> None:
    b = with_stored(9)
    follower, _ = exact(b, 6)
    stored(b, follower, stretch_block(0, 2, 2), stretch_block(*run))
    assert sent(follower) == [1, 2]
    assert ends(follower) == ["SNAPSHOT_GONE"]
    # The stream that is gone reads nothing more, from nowhere.
    assert follower.next_read() is None
    write(b, MINE)
    assert sent(follower) == []


def test_a_pin_that_lapses_between_two_reads_ends_the_stream() -> None:
    b = with_stored(9)
    follower, _ = exact(b, 6)
    stored(b, follower, stretch_block(0, 3, 3))
    assert sent(follower) == [1, 2, 3]
    # Meanwhile what followed was merged across the seqno; the reader gets what is above its own.
    stored(b, follower, stretch_block(3, 9, 9))
    assert sent(follower) == []
    assert ends(follower) == ["SNAPSHOT_GONE"]


def test_a_flush_under_the_stream_sends_it_to_the_store_and_back_to_its_end() -> None:
    b = bucket()
    for _ in range(3):
        write(b, MINE)
        b.tail.close_open()
    follower, _ = exact(b, 3, window=50)
    assert sent(follower) == [1]
    commit(b)
    blocks = flush(b)
    write(b, MINE)
    follower.credit.give_back(follower.credit.outstanding)
    # The window takes one row only, and the stream is in the middle of the merged block.
    assert follower.next_frame() is None
    wanted = follower.next_read()
    assert wanted is not None
    assert wanted[0][0].above == 1
    whole = decode_block(blocks[0][2])
    assert int(whole.runs["end_seqno"][0]) == 3
    follower.feed([ReadResult(wanted[0][0], [stretch_block(1, 3, 3)])])
    assert sent(follower) == [2, 3]
    assert ends(follower) == ["FINISHED"]


def test_where_it_stands_already_it_is_finished_at_once() -> None:
    b = with_stored(9)
    follower, answer = exact(b, 4, seqno=4)
    assert isinstance(answer, Started)
    assert ends(follower) == ["FINISHED"]
    empty, answer = exact(bucket(), 0)
    assert isinstance(answer, Started)
    assert answer.until_seqno == 0
    assert ends(empty) == ["FINISHED"]


@pytest.mark.parametrize(("seqno", "until", "words"), [(0, 10, "high seqno is 9"), (5, 4, "at 5")])
def test_an_end_that_cannot_be_reached_is_refused(seqno: int, until: int, words: str) -> None:
    b = with_stored(9)
    follower, answer = exact(b, until, seqno=seqno)
    assert isinstance(answer, Refused)
    assert (answer.error.reason, answer.error.retriable) == ("SNAPSHOT_GONE", False)
    assert words in answer.error.message
    assert follower.next_read() is None


def test_a_rollback_comes_before_the_end_is_looked_at() -> None:
    b = with_stored(9)
    follower = Follower(b, FollowOptions(), CreditWindow(WINDOW), lambda: None)
    (answer,) = follower.start([StartRequest(MINE, 77, 5, 77, until_exact=100)])
    assert isinstance(answer, RolledBack)
    (bad,) = follower.start([StartRequest(MINE, None, 0, None, until_exact=2**48)])
    assert isinstance(bad, Refused)
    assert bad.error.reason == "INVALID_ARGUMENT"
    assert "until_exact" in bad.error.message


def test_a_stream_started_anew_without_it_goes_on_above() -> None:
    b = bucket()
    for _ in range(4):
        write(b, MINE)
        b.tail.close_open()
    follower, _ = exact(b, 2)
    assert sent(follower) == [1, 2]
    follower.start([StartRequest(MINE, MINE + 1, 2, MINE + 1)])
    assert sent(follower) == [3, 4]
    assert ends(follower) == ["FINISHED"]
