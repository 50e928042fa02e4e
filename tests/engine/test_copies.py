"""What is stable at replicas: who counts, what a write waits for, what followers see, what a flush takes."""

import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.buckets import bucket, commit, flush
from tests.engine.test_replication import entry, write
from tests.raw import all_rows
from upr.engine.bucket import Bucket, Written
from upr.engine.follower import Follower
from upr.engine.partitions import ACTIVE, REPLICA, Copies, DurableMarkers
from upr.engine.streams import (
    NOT_ACTIVE,
    EndReason,
    FollowOptions,
    PlainStarts,
    Refused,
    Started,
    StartRequest,
)
from upr.storage.blocks import Encoded
from upr.storage.keyspace import ProducerRow
from upr.storage.read import ReadResult
from upr_protocol.block import I64, U64, Block, build_block, make_runs, sealed, slice_runs
from upr_protocol.errors import PartitionNotActiveError, TooFewReplicasError
from upr_protocol.flow import CreditWindow
from upr_protocol.limits import PARTITIONS
from upr_protocol.position_table import START
from upr_protocol.wire.codec import decode_block, encode_block

A, B = 3, 4
ONE, TWO, THREE = (f"{number:016x}" for number in (1, 2, 3))


def told(**seqnos: int) -> tuple[I64, U64]:
    """An acknowledgement: ``p3=7`` is seqno 7 of partition 3."""
    partitions = [int(name[1:]) for name in seqnos]
    return np.array(partitions, np.int64), np.array(list(seqnos.values()), np.uint64)


@given(st.integers(0, 2**32))
def test_stable_is_what_a_model_says(seed: int) -> None:
    rng = random.Random(seed)
    nothing = np.zeros(PARTITIONS, np.uint64)
    markers = DurableMarkers(nothing, nothing)
    copies = Copies(markers)
    durable = dict.fromkeys((A, B), 0)
    known: dict[str, dict[int, int]] = {}
    counted: set[str] = set()
    connected: set[str] = set()
    for _ in range(60):
        partition, one = rng.choice((A, B)), rng.choice((ONE, TWO, THREE))
        events = ("durable", "told", "told", "count", "started", "connected", "left", "term")
        match rng.choice(events):
            case "durable":
                start = durable[partition]
                durable[partition] += rng.randrange(1, 5)
                end = durable[partition]
                runs = make_runs([partition], [end - start], start, end, end)
                markers.became_durable([runs], nothing.copy())
            case "told":
                seqno = rng.randrange(20)
                copies.acknowledged(one, *told(**{f"p{partition}": seqno}))
                mine = known.setdefault(one, {})
                mine[partition] = max(mine.get(partition, 0), seqno)
            case "count":
                counted = {d for d in (ONE, TWO, THREE) if rng.random() < 0.7}
                before = copies.counted
                copies.count(frozenset(counted), counted)
                if before != counted:
                    # Who is neither counted nor connected is forgotten.
                    known = {d: seqnos for d, seqnos in known.items() if d in counted | connected}
            case "connected" if one not in connected:
                copies.connected[one] += 1
                connected.add(one)
            case "left" if one in connected:
                copies.left(one)
                connected.discard(one)
                if one not in counted:
                    known.pop(one, None)
            case "started":
                seqno = rng.randrange(20)
                copies.started(one, partition, seqno)
                if partition in known.get(one, {}):
                    known[one][partition] = min(known[one][partition], seqno)
            case "term" if rng.random() < 0.2:
                copies.begin_term()
                known, counted = {}, set()
        for k in (1, 2, 3):
            for p in (A, B):
                have = sorted((known.get(d, {}).get(p, 0) for d in counted), reverse=True)
                expected = min(durable[p], have[k - 1]) if len(have) >= k else 0
                assert copies.stable(k)[p] == expected


def replica(of: Bucket, directory: str, *partitions: int, seqno: int = 0) -> Follower:
    """A registered replica that follows some partitions."""
    options = FollowOptions(
        f"replica:{directory}", memory=True, directory=directory, address="127.0.0.1:1"
    )
    follower = Follower(of, options, CreditWindow(), lambda: None)
    of.add_follower(follower)
    start(follower, *partitions, seqno=seqno)
    return follower


def start(follower: Follower, *partitions: int, seqno: int = 0) -> None:
    ids = follower._table.newest_id
    for p in partitions:
        request = StartRequest(p, int(ids[p]), seqno, int(ids[p]) if seqno else None)
        assert isinstance(follower.start([request])[0], Started)


def put(to: Bucket, *partitions: int, copies: int = 0) -> Written:
    """Write a row to each partition, as an entry of its own."""
    rows = build_block([b"k%d" % p for p in partitions], [b"v"] * len(partitions))
    block = sealed(replace(rows, runs=make_runs(list(partitions), 1)))
    written = to.write(block, b"", None, 0, 1, copies=copies)
    to.tail.close_open()
    return written


def sent(follower: Follower) -> list[Block]:
    """All frames that there are now, without the store."""
    found: list[Block] = []
    while (frame := follower.next_frame()) is not None:
        found += map(decode_block, frame.blocks)
    return found


def test_with_too_few_replicas_nothing_is_numbered() -> None:
    b = bucket()
    first = replica(b, ONE, A)
    with pytest.raises(TooFewReplicasError) as refused:
        put(b, A, copies=1)
    assert (refused.value.reason, refused.value.retriable) == ("TOO_FEW_REPLICAS", True)
    # Counted, but not in step, and then in step, but not connected.
    b.count(frozenset({ONE, TWO}), ())
    with pytest.raises(TooFewReplicasError):
        put(b, A, copies=1)
    b.count(frozenset({ONE, TWO}), {ONE, TWO})
    with pytest.raises(TooFewReplicasError, match="are 1; must be at least 2"):
        put(b, A, copies=2)
    assert not b.partitions.high.any()
    assert put(b, A, copies=1).runs["end_seqno"].tolist() == [1]
    b.remove_follower(first)
    with pytest.raises(TooFewReplicasError):
        put(b, A, copies=1)
    # Where it is not active it says so, so that the client goes where it is.
    b.partitions.state[:] = REPLICA
    assert put(b, A, copies=1).refused.keys() == {A}


def test_what_was_applied_before_waits_and_is_not_refused() -> None:
    b = bucket()
    write(b, 1, A)
    call = b.open_producer(b"writer", None)
    rows = sealed(replace(build_block([b"k"], [b"1"]), runs=make_runs([A], 1)))
    again = b.write(rows, b"writer", call, 1, 2, {}, copies=1)
    assert again.duplicate
    assert not b.is_stable(again, 1)
    commit(b)
    replica(b, ONE, A, seqno=1)
    b.count(frozenset({ONE}), {ONE})
    b.acknowledged(ONE, *told(p3=1))
    assert b.is_stable(again, 1)
    # Only the active server knows what replicas have.
    b.partitions.state[:] = REPLICA
    with pytest.raises(PartitionNotActiveError):
        b.write(rows, b"writer", call, 1, 2, {}, copies=1)


def test_at_a_promoted_server_an_older_number_waits_for_all_that_is_there() -> None:
    b = bucket()
    # As it followed the owner: the rows without their numbers, and of these the newest.
    b.recovered([entry((A, 0, 9, 9))])
    call = b.open_producer(b"writer", 9)
    stored = {A: ProducerRow(9, int(b.partitions.newest_id[A]), 8, 9)}
    rows = sealed(replace(build_block([b"k"], [b"1"]), runs=make_runs([A], 1)))
    again = b.write(rows, b"writer", call, 5, 2, stored, copies=1)
    assert again.duplicate
    assert again.runs["end_seqno"].tolist() == [0]
    assert not b.is_stable(again, 1)
    other = replica(b, ONE, A)
    b.count(frozenset({ONE}), {ONE})
    sent(other)
    other.acknowledge(*told(p3=9), now=1)
    # What is written later is nothing to it.
    put(b, A)
    commit(b)
    flush(b)
    assert b.is_stable(again, 1)


def test_the_rest_of_a_write_that_was_applied_in_part_is_not_numbered_with_too_few_replicas() -> (
    None
):
    b = bucket()
    write(b, 1, A)
    call = b.open_producer(b"writer", None)
    rows = build_block([b"k", b"l"], [b"1", b"1"])
    both = sealed(replace(rows, runs=make_runs([A, B], 1)))
    again = b.write(both, b"writer", call, 1, 2, {}, copies=1)
    assert again.runs["partition"].tolist() == [A]
    assert {p: why.reason for p, why in again.refused.items()} == {B: "TOO_FEW_REPLICAS"}
    assert not b.partitions.high[B]
    replica(b, ONE)
    b.count(frozenset({ONE}), {ONE})
    other = b.open_producer(b"writer", None)
    assert not b.write(both, b"writer", other, 1, 2, {}, copies=1).refused
    assert b.partitions.high[B] == 1


def counted(b: Bucket) -> Follower:
    """A replica that is counted, and has all that there is: a row."""
    follower = replica(b, ONE, A)
    b.count(frozenset({ONE}), {ONE})
    put(b, A)
    commit(b)
    sent(follower)
    follower.acknowledge(*told(p3=1), now=1)
    return follower


def test_what_is_left_of_a_call_that_was_replaced_does_not_count() -> None:
    b = bucket()
    old = counted(b)
    assert (b.copies.stable(1)[A], b.copies.fallen) == (1, set())
    # It lost what it had.
    replica(b, ONE, A)
    assert (b.copies.stable(1)[A], b.copies.fallen) == (0, {ONE})
    old.acknowledge(*told(p3=1), now=1)
    assert b.copies.stable(1)[A] == 0


def test_a_call_that_is_not_registered_says_nothing_of_what_the_replica_has() -> None:
    b = bucket()
    counted(b)
    options = FollowOptions("", memory=True, directory=ONE, address="127.0.0.1:1")
    anonymous = Follower(b, options, CreditWindow(), lambda: None)
    b.add_follower(anonymous)
    start(anonymous, A)
    assert b.copies.stable(1)[A] == 1


def test_a_stream_of_a_replica_counts_however_it_is_begun() -> None:
    b = bucket()
    b.begin_term()
    follower = replica(b, ONE)
    b.count(frozenset({ONE}), {ONE})
    table = np.zeros(1, START)
    table["partition"], table["failover_id"] = A, b.partitions.newest_id[A]
    _, others = follower.start_plain(PlainStarts.read(table.tobytes(), until_now=False))
    follower.start(others)
    put(b, A)
    commit(b)
    sent(follower)
    follower.acknowledge(*told(p3=1), now=1)
    assert b.copies.stable(1)[A] == 1


def test_only_writes_that_wait_for_replicas_are_woken_by_them() -> None:
    b = bucket()
    woken: list[None] = []
    b.on_stable = lambda: woken.append(None)
    b.count(frozenset({ONE}), {ONE})
    b.acknowledged(ONE, *told(p3=1))
    assert not woken
    b.waiting_for_copies += 1
    b.acknowledged(ONE, *told(p3=2))
    assert len(woken) == 1


def test_an_acknowledgement_of_an_older_term_does_not_count() -> None:
    b = bucket()
    follower = counted(b)
    assert b.copies.stable(1)[A] == 1
    b.begin_term()
    b.count(frozenset({ONE}), {ONE})
    assert b.copies.stable(1)[A] == 0
    # Its stream has ended; what is still on its way is of before.
    assert [ended.streams for ended in follower.take_ended()] == [[(A, 1, 1)]]
    follower.acknowledge(*told(p3=1), now=1)
    assert b.copies.stable(1)[A] == 0
    start(follower, A, seqno=1)
    follower.acknowledge(*told(p3=1), now=1)
    assert b.copies.stable(1)[A] == 1
    # It begins again lower: it may have undone what it had.
    start(follower, A)
    assert b.copies.stable(1)[A] == 0


def test_a_write_of_an_older_term_is_never_stable() -> None:
    b = bucket()
    follower = replica(b, ONE, A)
    b.count(frozenset({ONE}), {ONE})
    written = put(b, A, copies=1)
    commit(b)
    sent(follower)
    assert not b.is_stable(written, 1)
    b.begin_term()
    b.count(frozenset({ONE}), {ONE})
    start(follower, A, seqno=1)
    follower.acknowledge(*told(p3=1), now=1)
    assert b.copies.stable(1)[A] == 1
    assert not b.is_stable(written, 1)


def test_only_what_is_durable_here_too_is_stable() -> None:
    b = bucket()
    follower = replica(b, ONE, A)
    b.count(frozenset({ONE}), {ONE})
    written = put(b, A, copies=1)
    sent(follower)
    follower.acknowledge(*told(p3=1), now=1)
    assert not b.is_stable(written, 1)
    commit(b)
    assert b.is_stable(written, 1)


class Reader:
    """A follower at replicated(1) of some partitions, with a store to read."""

    def __init__(self, of: Bucket, partitions: Iterable[int], stored: list[bytes]) -> None:
        self.bucket, self.stored = of, stored
        self.rows: list[tuple[int, int, bytes, bytes | None]] = []
        self.woken = 0
        self.follower = Follower(of, FollowOptions(copies=1), CreditWindow(1 << 28), self.wake)
        of.add_follower(self.follower)
        for answer in self.follower.start([StartRequest(p, None, 0, None) for p in partitions]):
            assert isinstance(answer, Started)

    def wake(self) -> None:
        self.woken += 1

    def read(self) -> None:
        """Do what the send loop does until it would go idle; nothing that is not stable is shown."""
        stable = self.bucket.copies.stable(1)
        while True:
            self.woken = 0
            frame = self.follower.next_frame()
            if frame is not None:
                for block in map(decode_block, frame.blocks):
                    assert (block.runs["horizon"] <= stable[block.runs["partition"]]).all()
                    self.rows += all_rows([block])
            elif (wanted := self.follower.next_read()) is not None:
                self.follower.feed([self.found(one.partition, one.above, one) for one in wanted[0]])
            elif not self.woken:
                return

    def found(self, partition: int, above: int, request: object) -> ReadResult:
        blocks = []
        for block in map(decode_block, self.stored):
            run = block.runs[0]
            if run["partition"] == partition and run["end_seqno"] > above:
                cut = slice_runs(block, np.array([above], np.uint64))
                blocks.append(Encoded(cut.runs, encode_block(cut)))
        return ReadResult(request, blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_followers_see_what_is_stable_and_all_of_it(seed: int) -> None:
    rng = random.Random(seed)
    b, partitions = bucket(), (A, B, 5, 6)
    replica(b, ONE)
    counted = frozenset({ONE})
    b.count(counted, counted)
    stored: list[bytes] = []
    readers = [Reader(b, partitions, stored)]
    for step in range(120):
        match rng.choice(("write", "write", "commit", "told", "told", "flush", "read", "count")):
            case "write":
                put(b, *sorted(rng.sample(partitions, rng.randrange(1, 4))))
            case "commit":
                commit(b)
            case "told":
                chosen = rng.sample(partitions, rng.randrange(1, 4))
                high = b.partitions.high
                at = {f"p{p}": rng.randrange(int(high[p]) + 1) for p in chosen}
                # Each row is a run, so that each seqno is a marker.
                b.acknowledged(ONE, *told(**at))
            case "flush" if b.tail.durable > b.tail.first:
                stored += [data for _, _, data in flush(b)]
            case "count" if rng.random() < 0.3:
                now = counted if rng.random() < 0.6 else frozenset()
                b.count(now, now)
        if rng.random() < 0.5:
            rng.choice(readers).read()
        if step % 40 == 20:
            readers.append(Reader(b, partitions, stored))
    commit(b)
    b.count(counted, counted)
    # All but one partition: it holds up nobody else.
    for left in ({A}, set()):
        highs = {f"p{p}": int(b.partitions.high[p]) for p in partitions if p not in left}
        b.acknowledged(ONE, *told(**highs))
        for reader in readers:
            reader.read()
            for p in partitions:
                seen = [seqno for partition, seqno, _, _ in reader.rows if partition == p]
                assert seen == sorted(set(seen))
                if p not in left and b.partitions.high[p]:
                    assert seen[-1] == b.partitions.high[p]


def test_a_stream_from_now_begins_at_what_is_stable() -> None:
    b = bucket()
    other = replica(b, ONE, A)
    follower = Follower(b, FollowOptions(copies=1), CreditWindow(), lambda: None)
    b.add_follower(follower)
    now = StartRequest(A, None, 0, None, from_now=True)
    (answer,) = follower.start([now])
    assert isinstance(answer, Started)
    put(b, A)
    put(b, A)
    commit(b)
    # It would have to begin at 0, or at what may be undone.
    (refused,) = follower.start([now])
    assert isinstance(refused, Refused)
    assert refused.error.reason == "TOO_FEW_REPLICAS"
    b.count(frozenset({ONE}), {ONE})
    sent(other)
    other.acknowledge(*told(p3=1), now=1)
    (answer,) = follower.start([now])
    assert isinstance(answer, Started)
    assert answer.start_seqno == 1


def test_who_is_shown_what_is_stable_goes_to_the_active_server() -> None:
    b = bucket()
    ends: list[EndReason] = []
    follower = Follower(b, FollowOptions(copies=1), CreditWindow(), lambda: None)
    follower.on_end = ends.append
    b.add_follower(follower)
    b.partitions.state[:] = REPLICA
    b.begin_term()
    assert ends == [NOT_ACTIVE]
    with pytest.raises(PartitionNotActiveError):
        b.add_follower(Follower(b, FollowOptions(copies=1), CreditWindow(), lambda: None))
    b.partitions.state[:] = ACTIVE
    b.add_follower(Follower(b, FollowOptions(copies=1), CreditWindow(), lambda: None))


def test_a_flush_takes_what_a_replica_has_and_the_rest_when_room_is_needed() -> None:
    b = bucket()
    other = replica(b, ONE, A, B)
    for _ in range(3):
        put(b, A)
        put(b, A, B)
    commit(b)
    # As after its start, or stepping down: nobody is counted yet.
    b.may_undo = True
    assert b.begin_flush(wanted=False) is None
    b.count(frozenset({ONE}), {ONE})
    assert b.begin_flush(wanted=False) is None
    sent(other)
    # Of the fourth entry the replica has one of two partitions.
    other.acknowledge(*told(p3=4, p4=1), now=1)
    plan = b.begin_flush(wanted=False)
    assert plan is not None
    assert len(plan.entries) == 3
    b.end_flush(complete=False)
    # A replica that is slow holds up nobody: all that is there, not what it has.
    flush(b)
    assert (b.partitions.stored[A], b.partitions.stored[B]) == (6, 3)


def test_a_stretch_that_is_not_complete_is_not_shown() -> None:
    b = bucket()
    b.recovered([entry((A, 0, 2, 2)), entry((A, 2, 3, 5))])
    reader = Reader(b, [A], [])
    other = replica(b, ONE, A)
    b.count(frozenset({ONE}), {ONE})
    sent(other)
    other.acknowledge(*told(p3=3), now=1)
    reader.read()
    assert [row[1] for row in reader.rows] == [1, 2]
