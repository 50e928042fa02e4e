"""Writes that go together: what gathers, in which groups, and how an answer is told to its rows."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.client._async.adapter import serve
from tests.client.scripted import (
    ID_A,
    VERSION,
    Abort,
    Expect,
    HalfClosed,
    Send,
    Step,
    applied,
    write_opened,
    write_refused,
)
from tests.harness import pass_turns
from upr_client import AsyncClient, backoff, writes
from upr_client._async import block_writer as writer_module
from upr_client._async.block_writer import AsyncBlockWriter
from upr_client._async.io import Background
from upr_client.errors import (
    ClosedError,
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    PartlyWrittenError,
    PermissionDeniedError,
    ProtocolError,
    StorageFailedError,
    UnknownOutcomeError,
    UprError,
)
from upr_client.types import AsyncBucket, WriteResult, WriteResults
from upr_client.writes import Bundle, Gathering, Group, Kind, Row
from upr_protocol.block import block_keys, block_values, build_block, check_row, make_runs
from upr_protocol.limits import (
    BLOCK_COLUMN_BYTES,
    GATHERED_ROWS_MAX,
    GROUP_HALVES_ROWS,
    GROUP_ROWS_MAX,
    JOINED_BYTES_MAX,
    JOINED_SMALL_BYTES,
    PARTITIONS,
    WRITES_IN_FLIGHT_MAX,
)
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import block_from_message, problem_of
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2
from upr_protocol.wire.v1 import types_pb2

KEYS = [b"a", b"b", b"c", b"d", b"e"]
LARGE_ID = 2**64 - 1
A, B, C, D, E = map(partition_of, KEYS)
OPENED: list[Step] = [Expect("open"), write_opened(), Expect("write"), Expect("write")]
BEGIN = [*OPENED, applied(1, (A, 0, 1)), applied(2, (B, 0, 1)), Expect("write")]
TURNS = 3
"""Turns of the loop after which what was begun is on its way, or waits for its turn."""
DISK, MEMORY = types_pb2.DURABILITY_DISK, types_pb2.DURABILITY_MEMORY


async def begun(bucket: AsyncBucket, keys: list[bytes]) -> list[asyncio.Task[WriteResult]]:
    tasks = []
    for several, durability in ((keys[:1], "disk"), (keys[1:2], "memory"), (keys[2:], "disk")):
        tasks += [asyncio.create_task(bucket.set(key, b"v", durability)) for key in several]
        await pass_turns(TURNS)
    return tasks


async def outcomes(
    script: list[list[Step]],
    keys: list[bytes] = KEYS,
    retry_seconds: float = 60.0,
    beside: Callable[[list[asyncio.Task[WriteResult]]], object] = len,
) -> tuple[list[WriteResult | BaseException], list[list[int]]]:
    """Set two keys of different kinds, each in a write of its own, then the others at once, which gather.

    Return what became of each, and of each call the rows of its writes.
    """
    async with serve(write=script) as server:
        async with AsyncClient(server.target, retry_seconds=retry_seconds) as client:
            bucket = client.bucket()
            tasks = await begun(bucket, keys)
            beside(tasks)
            told = await asyncio.gather(*tasks, return_exceptions=True)
        rows = [
            [block_from_message(w.block, numbered=False).rows for w in heard.of("write")]
            for heard in server.calls["write"]
        ]
        return told, rows


async def free_room(writer: AsyncBlockWriter) -> tuple[int, int]:
    """Take what room there is: return of how many writes it was, and of how many single ones."""
    found = []
    for room in (writer._room, writer._row_room):
        taken = 0
        while await room.try_take():
            taken += 1
        found.append(taken)
    return found[0], found[1]


def row_of(key: bytes, value: bytes | None = b"v") -> Row:
    return Row(key, value, check_row(key, value), lambda: None)


def went(partition: int, seqno: int = 1) -> WriteResult:
    return WriteResult(partition, seqno, ID_A, VERSION)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_bundle", [False, True])
@pytest.mark.parametrize(
    ("partition", "more", "why"),
    [(A, b"x", UnknownOutcomeError), (PARTITIONS, b"", ProtocolError)],
)
async def test_an_answer_that_makes_no_sense_leaves_nobody_waiting(
    is_bundle: bool, partition: int, more: bytes, why: type[UprError]
) -> None:
    answer = applied(1, (partition, 0, 1))
    answer.message.result.runs += more
    script = [Expect("open"), write_opened(), Expect("write"), answer, HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        write = bucket.write_many([(b"a", b"v")]) if is_bundle else bucket.set(b"a", b"v")
        with pytest.raises(why):
            await asyncio.wait_for(write, 10)


@pytest.mark.asyncio
async def test_what_is_begun_while_one_of_its_kind_is_under_way_goes_together() -> None:
    keys = [*KEYS, KEYS[3]]
    parts = sorted([(C, 0, 1), (D, 0, 2), (E, 0, 1)])
    told, rows = await outcomes([[*BEGIN, applied(3, *parts), HalfClosed()]], keys)
    assert told == [went(A), went(B), went(C), went(D), went(E), went(D, 2)]
    assert rows == [[1, 1, 4]]


@pytest.mark.asyncio
async def test_what_is_begun_in_one_turn_of_the_loop_goes_together() -> None:
    parts = sorted([(A, 0, 1), (B, 0, 1), (C, 0, 1)])
    script = [Expect("open"), write_opened(), Expect("write"), applied(1, *parts), HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        told = await asyncio.gather(*(bucket.set(key, b"v") for key in KEYS[:3]))
    assert told == [went(A), went(B), went(C)]


@pytest.mark.asyncio
async def test_results_that_come_in_one_message_are_taken_one_by_one() -> None:
    both = [applied(1, (A, 0, 1)), applied(2, (B, 0, 1))]
    results = kv_pb2.WriteResults(results=[send.message.result for send in both])
    parts = sorted([(C, 0, 1), (D, 0, 1), (E, 0, 1)])
    script = [*OPENED, Send(kv_pb2.WriteResponse(results=results)), Expect("write")]
    told, rows = await outcomes([[*script, applied(3, *parts), HalfClosed()]])
    assert told == [went(A), went(B), went(C), went(D), went(E)]
    assert rows == [[1, 1, 3]]


@pytest.mark.asyncio
async def test_a_partition_that_refuses_fails_its_rows_alone() -> None:
    parts = sorted([(C, 0, 1), (E, 0, 1)])
    refused = (D, PartitionNotActiveError("a replica"))
    told, _ = await outcomes([[*BEGIN, applied(3, *parts, refused=refused), HalfClosed()]])
    assert [one for one in told if isinstance(one, WriteResult)] == [went(p) for p in (A, B, C, E)]
    assert isinstance(told[3], PartitionNotActiveError)
    assert str(told[3]) == "a replica"


@pytest.mark.asyncio
async def test_a_part_that_went_on_being_refused_fails_its_rows_alone() -> None:
    parts = sorted([(C, 0, 1), (E, 0, 1)])
    refused = (D, PartitionNotActiveError("for now", retriable=True))
    script: list[Step] = [*BEGIN, applied(3, *parts, refused=refused), HalfClosed()]
    told, _ = await outcomes([script], retry_seconds=0.0)
    assert [one for one in told if isinstance(one, WriteResult)] == [went(p) for p in (A, B, C, E)]
    assert isinstance(told[3], PartitionNotActiveError)


@pytest.mark.asyncio
async def test_each_row_of_a_lost_answer_has_an_unknown_outcome_of_its_own() -> None:
    told, _ = await outcomes([[*BEGIN, Abort(NoRoomError("gone"))]], retry_seconds=0.0)
    assert told[:2] == [went(A), went(B)]
    assert {type(one) for one in told[2:]} == {UnknownOutcomeError}
    assert len({id(one) for one in told[2:]}) == 3


@pytest.mark.asyncio
async def test_a_part_that_was_refused_and_then_lost_has_an_unknown_outcome() -> None:
    parts = sorted([(C, 0, 1), (E, 0, 1)])
    refused = (D, PartitionNotActiveError("for now", retriable=True))
    first: list[Step] = [*BEGIN, applied(3, *parts, refused=refused), HalfClosed()]
    second: list[Step] = [Expect("open"), write_opened(), Expect("write")]
    script = [first, [*second, Abort(InvalidArgumentError("gone"))]]
    told, rows = await outcomes(script)
    assert [one for one in told if isinstance(one, WriteResult)] == [went(p) for p in (A, B, C, E)]
    assert isinstance(told[3], UnknownOutcomeError)
    assert rows == [[1, 1, 3], [1]]


@pytest.mark.asyncio
async def test_a_row_for_which_its_group_is_refused_fails_alone() -> None:
    """Nothing was applied, and the server does not say which of them it was."""
    refusal = InvalidArgumentError("too large")
    two = [Expect("write"), Expect("write")]
    first = [*BEGIN, write_refused(3, refusal), *two, applied(4, (C, 0, 1))]
    first += [write_refused(5, refusal), *two, write_refused(6, refusal), HalfClosed()]
    # What was sent behind the last refusal is sent again.
    second: list[Step] = [Expect("open"), write_opened(), Expect("write"), applied(8, (E, 0, 1))]
    told, rows = await outcomes([first, [*second, HalfClosed()]])
    assert [one for one in told if isinstance(one, WriteResult)] == [went(p) for p in (A, B, C, E)]
    assert isinstance(told[3], InvalidArgumentError)
    assert rows == [[1, 1, 3, 1, 2, 1, 1], [1]]


@pytest.mark.asyncio
async def test_a_group_is_not_divided_when_no_row_can_be_the_reason() -> None:
    first = [*BEGIN, write_refused(3, StorageFailedError("no disk")), HalfClosed()]
    told, rows = await outcomes([first])
    assert told[:2] == [went(A), went(B)]
    assert {type(one) for one in told[2:]} == {StorageFailedError}
    assert len({id(one) for one in told[2:]}) == 3
    assert rows == [[1, 1, 3]]


@pytest.mark.asyncio
async def test_a_part_that_was_refused_for_now_and_then_for_good_is_told_the_latter() -> None:
    parts = sorted([(C, 0, 1), (E, 0, 1)])
    refused = (D, PartitionNotActiveError("for now", retriable=True))
    first: list[Step] = [*BEGIN, applied(3, *parts, refused=refused), HalfClosed()]
    second: list[Step] = [Expect("open"), write_opened(last_number=3), Expect("write")]
    second += [write_refused(4, StorageFailedError("no disk")), HalfClosed()]
    told, rows = await outcomes([first, second])
    assert [one for one in told if isinstance(one, WriteResult)] == [went(p) for p in (A, B, C, E)]
    assert isinstance(told[3], StorageFailedError)
    assert rows == [[1, 1, 3], [1]]


@pytest.mark.asyncio
async def test_rows_wait_for_room_and_whoever_is_cancelled_then_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled one that was taken keeps its room: else there is no bound while the server is slow."""
    monkeypatch.setattr(writer_module, "GATHERED_ROWS_MAX", 3)
    parts = sorted([(C, 0, 1), (E, 0, 1)])
    script: list[Step] = [*BEGIN, applied(3, *parts), HalfClosed()]

    def cancelled(tasks: list[asyncio.Task[WriteResult]]) -> None:
        tasks[2].cancel()
        tasks[3].cancel()

    told, rows = await outcomes([script], beside=cancelled)
    assert [type(one) for one in told[2:4]] == [asyncio.CancelledError] * 2
    assert [*told[:2], told[4]] == [went(A), went(B), went(E)]
    assert rows == [[1, 1, 2]]


@pytest.mark.asyncio
async def test_those_who_wait_for_room_are_told_of_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "GATHERED_ROWS_MAX", 2)
    async with serve(write=[[Expect("open"), write_opened(), HalfClosed()]]) as server:
        client = AsyncClient(server.target)
        tasks = await begun(client.bucket(), KEYS)
        await client.close()
        async with asyncio.timeout(10):
            told = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in told[2:]} == {ClosedError}


@pytest.mark.asyncio
async def test_what_was_not_sent_is_told_without_being_made_into_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0
    request = Group.request

    def counted(group: Group) -> kv_pb2.WriteRequest:
        nonlocal made
        made += 1
        return request(group)

    monkeypatch.setattr(Group, "request", counted)
    script = [*OPENED, Abort(StorageFailedError("no disk"))]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        tasks = await begun(bucket, KEYS)
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert await free_room(bucket._writer()) == (WRITES_IN_FLIGHT_MAX, GATHERED_ROWS_MAX)
    assert [type(one) for one in told] == [UnknownOutcomeError] * 2 + [StorageFailedError] * 3
    assert made == 2


@pytest.mark.asyncio
async def test_a_writer_whose_background_did_not_start_starts_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = 4

    def background(*arguments: Any) -> Background:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("can't start new thread")
        return Background(*arguments)

    monkeypatch.setattr(writer_module, "Background", background)
    script = [Expect("open"), write_opened(), Expect("write"), applied(1, (A, 0, 1)), HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                await bucket.set(b"b", b"v")
            with pytest.raises(RuntimeError, match="can't start"):
                await bucket.write_many([(b"b", b"v")])
        async with asyncio.timeout(10):
            assert await bucket.set(b"a", b"v") == went(A)
        assert await free_room(bucket._writer()) == (WRITES_IN_FLIGHT_MAX, GATHERED_ROWS_MAX)


@pytest.mark.asyncio
async def test_rows_of_which_no_write_can_be_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Group.request

    def scarce(group: Group) -> kv_pb2.WriteRequest:
        if len(group.callers) > 1:
            raise MemoryError("3 rows")
        return request(group)

    monkeypatch.setattr(Group, "request", scarce)
    script = [Expect("open"), write_opened(), Expect("write"), applied(1, (A, 0, 1)), HalfClosed()]
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
        async with asyncio.timeout(10):
            told = await asyncio.gather(
                *(bucket.set(key, b"v") for key in KEYS[1:4]), return_exceptions=True
            )
            assert await bucket.set(b"a", b"v") == went(A)
        assert await free_room(bucket._writer()) == (WRITES_IN_FLIGHT_MAX, GATHERED_ROWS_MAX)
    assert {(type(one), str(one)) for one in told} == {
        (UprError, "the write could not be made: MemoryError('3 rows')")
    }
    assert unhandled == []


@pytest.mark.asyncio
async def test_a_cancelled_write_leaves_the_others_alone() -> None:
    parts = sorted([(C, 0, 1), (D, 0, 1), (E, 0, 1)])
    told, rows = await outcomes(
        [[*BEGIN, applied(3, *parts), HalfClosed()]], beside=lambda tasks: tasks[3].cancel()
    )
    assert isinstance(told[3], asyncio.CancelledError)
    assert told[:3] + told[4:] == [went(A), went(B), went(C), went(E)]
    assert rows == [[1, 1, 3]]


async def closed_at_once(script: list[Step]) -> list[WriteResult | BaseException]:
    """Begin writes of KEYS, close the client, and return what came of them."""
    async with serve(write=[script]) as server:
        client = AsyncClient(server.target)
        bucket = client.bucket()
        tasks = await begun(bucket, KEYS)
        writer = bucket._writer()
        # Closing before the server took the call would end it at once.
        assert await writer._opened.wait() or writer._accepted
        await client.close()
        return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_closing_sends_what_was_begun() -> None:
    parts = sorted([(C, 0, 1), (D, 0, 1), (E, 0, 1)])
    script: list[Step] = [Expect("open"), write_opened(), *[Expect("write")] * 3, HalfClosed()]
    script += [applied(1, (A, 0, 1)), applied(2, (B, 0, 1)), applied(3, *parts)]
    assert await closed_at_once(script) == [went(p) for p in (A, B, C, D, E)]


@pytest.mark.asyncio
async def test_what_the_window_does_not_take_before_closing_is_not_told_as_unknown() -> None:
    script: list[Step] = [Expect("open"), write_opened(in_flight=1), Expect("write"), HalfClosed()]
    told = await closed_at_once([*script, applied(1, (A, 0, 1))])
    assert told[0] == went(A)
    assert {type(one) for one in told[1:]} == {ClosedError}


@pytest.mark.asyncio
async def test_the_second_half_does_not_wait_when_the_first_is_refused_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 30.0)
    monkeypatch.setattr("random.random", lambda: 1.0)
    keys = [b"%d" % number for number in range(GROUP_HALVES_ROWS)]
    half = GROUP_HALVES_ROWS // 2
    counts = Counter(map(partition_of, keys[half:]))
    done = applied(3, *((p, 0, count) for p, count in sorted(counts.items())))
    first = [*OPENED, write_refused(1, StorageFailedError("no disk")), HalfClosed()]
    second: list[Step] = [Expect("open"), write_opened(), Expect("write"), done, HalfClosed()]
    async with serve(write=[first, second]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        async with asyncio.timeout(10):
            writes = (bucket.set(key, b"v") for key in keys)
            told = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(one) for one in told] == [StorageFailedError] * half + [WriteResult] * half


@pytest.mark.asyncio
async def test_a_key_that_is_not_the_callers_fails_alone() -> None:
    refusal = PermissionDeniedError("another's")
    script = [Expect("open"), write_opened(), Expect("write"), write_refused(1, refusal)]
    script += [Expect("write"), Expect("write"), applied(2, (A, 0, 1)), write_refused(3, refusal)]
    script.append(HalfClosed())
    async with serve(write=[script]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        told = await asyncio.gather(
            *(bucket.set(key, b"v") for key in KEYS[:2]), return_exceptions=True
        )
    assert [type(one) for one in told] == [WriteResult, PermissionDeniedError]


@pytest.mark.parametrize("count", [3, GROUP_HALVES_ROWS])
def test_an_interrupt_while_a_group_is_taken_loses_no_row(count: int) -> None:
    """At one place at most, where it has been taken and not been handed over."""
    lost, at, whole = 0, 0, False
    while not whole:
        gathering, left, at = Gathering(), at + 1, at + 1
        for number in range(count):
            gathering.add(row_of(b"%d" % number), DISK)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename == writes.__file__ and event == "line":
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return trace

        taken, before = 0, sys.gettrace()
        sys.settrace(trace)
        try:
            group = gathering.take([])
            assert group is not None
            taken, whole = len(group.callers), True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        lost += taken + sum(len(group.callers) for group in gathering._groups) < count
    assert at > 10
    assert lost <= 1


KEY = st.sampled_from(KEYS)
SMALL = st.tuples(KEY, st.sampled_from([None, 1]))
ONE = SMALL | st.tuples(KEY, st.sampled_from([2**18, 2**20, 2**21]))
SEVERAL = st.lists(st.tuples(KEY, st.sampled_from([None, 1, 2**17])), min_size=1, max_size=4)
CALLS = st.lists(
    st.tuples(ONE | SMALL | SEVERAL, st.booleans(), st.sampled_from([0, 0, 0, 0, 1, 2])),
    max_size=40,
)
"""What is begun, whether to be durable, and of how many groups the answer has come before the next are taken."""
Sized = tuple[bytes, int | None]


def answer(*runs: tuple[int, int, int, int]) -> kv_pb2.WriteResult:
    """Return an answer that tells of runs: partition, start, end and failover id."""
    partitions, starts, ends, ids = np.array(runs, np.uint64).reshape(-1, 4).T
    known = np.trim_zeros(ids, "b").tolist()
    table = make_runs(partitions, 0, starts, ends)
    return kv_pb2.WriteResult(runs=table.tobytes(), failover_ids=known)


def bundle_of(rows: list[Sized]) -> Bundle:
    values = [None if size is None else bytes(size) for _, size in rows]
    return Bundle(build_block([key for key, _ in rows], values), lambda: None)


@given(CALLS)
# The third must not go along with the first, in front of the second.
@example([((b"a", None), False, 0), ((b"a", None), True, 0), ((b"a", None), False, 0)])
@example([((b"a", 1), False, 0), ([(b"a", 1)], False, 0), ((b"a", 1), False, 0)])
# A small one and a large one, one behind the other.
@example([([(b"a", 1)], False, 0), ([(b"a", 2**17)], False, 0)])
def test_groups_have_one_kind_and_their_bounds_and_keep_the_order_of_each_key(
    drawn: list[tuple[Sized | list[Sized], bool, int]],
) -> None:
    gathering = Gathering()
    begun: dict[bytes, list[int]] = defaultdict(list)
    sent: dict[bytes, list[int]] = defaultdict(list)
    calls: dict[int, tuple[int, Row | Bundle, bool]] = {}

    def took(group: Group) -> None:
        assert group.bytes <= BLOCK_COLUMN_BYTES or len(group.callers) == 1
        assert group.bytes == sum(call.size for call in group.callers)
        for call in group.callers:
            number, _, durable = calls[id(call)]
            if isinstance(call, Row):
                keys, deletes = [call.key], call.value is None
            else:
                keys = block_keys(call.block)
                deletes = not any(value is not None for value in block_values(call.block))
            assert group.kind[:2] == (DISK if durable else MEMORY, deletes)
            assert (group.kind.most > 0) == isinstance(call, Bundle)
            if isinstance(call, Bundle):
                # A small one is in no large message.
                assert (call.size < JOINED_SMALL_BYTES) == (group.bytes <= JOINED_SMALL_BYTES)
            for key in keys:
                sent[key].append(number)

    under_way: list[Group] = []
    with mock.patch.object(writes, "GROUP_HALVES_ROWS", 3):
        for number, (asked, durable, answers) in enumerate(drawn):
            durability = DISK if durable else MEMORY
            if isinstance(asked, list):
                bundle = bundle_of(asked)
                gathering.add_bundle(bundle, durability)
                calls[id(bundle)] = (number, bundle, durable)
            else:
                row = row_of(asked[0], None if asked[1] is None else bytes(asked[1]))
                gathering.add(row, durability)
                calls[id(row)] = (number, row, durable)
            for key, _ in asked if isinstance(asked, list) else [asked]:
                begun[key].append(number)
            del under_way[:answers]
            while answers and (group := gathering.take(under_way)) is not None:
                took(group)
                under_way.append(group)
    while (group := gathering.take()) is not None:
        took(group)
    assert sent == begun
    assert gathering._last == {}


@pytest.mark.parametrize("is_bundle", [False, True])
def test_many_go_in_two_halves_one_of_which_is_made_while_the_server_has_the_other(
    is_bundle: bool,
) -> None:
    gathering = Gathering()

    def begin(count: int) -> None:
        for _ in range(count):
            if is_bundle:
                gathering.add_bundle(bundle_of([(b"a", 1)]), DISK)
            else:
                gathering.add(row_of(b"a"), DISK)

    def take(under_way: list[Group]) -> Group:
        group = gathering.take(under_way)
        assert group is not None
        return group

    begin(GROUP_HALVES_ROWS)
    first = take([])
    second = take([first])
    assert gathering.take([first, second]) is None
    assert [len(group.callers) for group in (first, second)] == [GROUP_HALVES_ROWS // 2] * 2
    # Whoever of the first writes again, and others besides.
    begin(GROUP_HALVES_ROWS)
    third = take([second])
    assert len(third.callers) == GROUP_HALVES_ROWS * 3 // 4
    assert gathering.take([second, third]) is None


def test_the_rest_of_a_group_that_went_in_part_is_in_front_of_what_was_begun_behind_it() -> None:
    gathering = Gathering()
    rows = [row_of(b"a") for _ in range(GROUP_HALVES_ROWS)]
    rows.append(row_of(b"a", None))
    for row in rows:
        gathering.add(row, DISK)
    under_way: list[Group] = []
    while (group := gathering.take(under_way)) is not None:
        under_way.append(group)
    assert [row for group in under_way for row in group.callers] == rows
    assert len(under_way) == 3


FATES = st.sampled_from(["refused", "refused for now", "left out", "forgotten"])


@given(st.lists(SEVERAL, min_size=1, max_size=5), st.dictionaries(KEY, FATES))
def test_each_bundle_is_told_what_its_own_rows_were_given(
    drawn: list[list[Sized]], fates: dict[bytes, str]
) -> None:
    group = Group(1, Kind(DISK, False, 1), callers=[bundle_of(rows) for rows in drawn])
    of = {partition_of(key): fate for key, fate in fates.items()}
    seqnos = {partition_of(key): 7 for key in KEYS}
    expected: list[dict[int, tuple[int, int, int, int]]] = []
    for rows in drawn:
        given: dict[int, tuple[int, int, int, int]] = {}
        for p in (partition_of(key) for key, _ in rows):
            seqnos[p] += 1
            begin = given[p][1] if p in given else seqnos[p] - 1
            given[p] = (p, 0, 0, 0) if of.get(p) == "forgotten" else (p, begin, seqnos[p], LARGE_ID)
        expected.append(given)
    parts = [
        (p, 0, 0, 0) if of.get(p) == "forgotten" else (p, 7, end, LARGE_ID)
        for p, end in seqnos.items()
        if end > 7 and of.get(p) in (None, "forgotten")
    ]
    # The ids of the last ones may be left out where they are 0.
    parts.sort(key=lambda part: not part[3])
    refused = {
        p: problem_of(PartitionNotActiveError(fate, retriable=fate == "refused for now"))
        for p, fate in of.items()
        if fate.startswith("refused")
    }
    group.tell([answer(*parts)], refused, NoRoomError("full"))
    for bundle, given in zip(group.callers, expected, strict=True):
        found = {of.get(p) for p in given}
        outcome = bundle.outcome
        if "left out" in found:
            assert isinstance(outcome, NoRoomError)
        elif "refused" in found:
            assert isinstance(outcome, PartitionNotActiveError)
            assert not outcome.retriable
        elif found == {"refused for now"}:
            assert isinstance(outcome, PartitionNotActiveError)
            assert outcome.retriable
        elif "refused for now" in found:
            assert isinstance(outcome, PartlyWrittenError)
        else:
            assert isinstance(outcome, np.ndarray)
            assert WriteResults(0, outcome, 0).runs == sorted(given.values())


def test_a_group_that_nothing_can_join_any_more_does_not_wait() -> None:
    sets, deletes = (Kind(DISK, one, JOINED_SMALL_BYTES) for one in (False, True))
    gathering = Gathering()
    set_group, delete_group = (
        Group(0, sets, callers=[bundle_of([(b"a", 1)])]),
        Group(0, deletes, callers=[bundle_of([(b"a", None)])]),
    )
    for size in (1, None, None):
        gathering.add_bundle(bundle_of([(b"a", size)]), DISK)
    first = gathering.take([set_group, set_group, delete_group, delete_group])
    assert first is not None
    assert first.kind == sets
    assert gathering.take([delete_group, delete_group]) is None
    both = gathering.take([delete_group])
    assert both is not None
    assert len(both.callers) == 2


@pytest.mark.asyncio
async def test_of_writes_that_wait_for_room_the_first_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "WRITES_IN_FLIGHT_MAX", 2)
    sizes = [JOINED_BYTES_MAX, JOINED_BYTES_MAX, JOINED_BYTES_MAX, 2]
    script = [*BEGIN, applied(3, (C, 0, 1)), Expect("write"), applied(4, (C, 1, 2)), HalfClosed()]
    async with serve(write=[script]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket()
            tasks = []
            for key, size in zip([*KEYS[:3], KEYS[2]], sizes, strict=True):
                tasks.append(asyncio.create_task(bucket.write_many([(key, bytes(size))])))
                await pass_turns(TURNS)
            await asyncio.gather(*tasks)
        (heard,) = server.calls["write"]
    assert [len(write.block.values) for write in heard.of("write")] == sizes


async def many(
    script: list[list[Step]], calls: list[list[bytes]]
) -> tuple[list[Any], list[list[int]]]:
    """Begin a ``write_many`` in one turn after the other; return as ``outcomes``."""
    async with serve(write=script) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket()
            tasks = []
            for keys in calls:
                tasks.append(asyncio.create_task(bucket.write_many([(key, b"v") for key in keys])))
                await pass_turns(TURNS)
            told = await asyncio.gather(*tasks, return_exceptions=True)
        rows = [
            [block_from_message(w.block, numbered=False).rows for w in heard.of("write")]
            for heard in server.calls["write"]
        ]
        return [one.runs if isinstance(one, WriteResults) else one for one in told], rows


@pytest.mark.asyncio
async def test_many_rows_go_together_with_those_of_others_while_two_groups_are_under_way() -> None:
    parts = sorted([(C, 0, 2), (D, 0, 1), (E, 0, 1)])
    script: list[Step] = [*BEGIN, applied(3, *parts), HalfClosed()]
    told, rows = await many([script], [KEYS[:1], KEYS[1:2], KEYS[2:4], [KEYS[2], KEYS[4]]])
    assert told[:2] == [[(A, 0, 1, ID_A)], [(B, 0, 1, ID_A)]]
    assert sorted(told[2]) == sorted([(C, 0, 1, ID_A), (D, 0, 1, ID_A)])
    assert sorted(told[3]) == sorted([(C, 1, 2, ID_A), (E, 0, 1, ID_A)])
    assert rows == [[1, 1, 4]]


@pytest.mark.asyncio
async def test_many_rows_for_which_others_are_refused_with_them_are_written() -> None:
    refusal = InvalidArgumentError("too large")
    first = [*BEGIN, write_refused(3, refusal), Expect("write"), Expect("write")]
    # What was sent behind the last refusal is sent again.
    second: list[Step] = [Expect("open"), write_opened(), Expect("write"), applied(6, (E, 0, 1))]
    script = [[*first, write_refused(4, refusal), HalfClosed()], [*second, HalfClosed()]]
    told, rows = await many(script, [KEYS[:1], KEYS[1:2], KEYS[2:4], KEYS[4:]])
    assert isinstance(told[2], InvalidArgumentError)
    assert told[3] == [(E, 0, 1, ID_A)]
    assert rows == [[1, 1, 3, 2, 1], [1]]


def test_a_group_has_so_many_rows_at_most() -> None:
    gathering = Gathering()
    for number in range(GROUP_ROWS_MAX + 1):
        gathering.add(row_of(b"%d" % number), DISK)
    groups = [gathering.take(), gathering.take(), gathering.take()]
    assert [group and len(group.callers) for group in groups] == [GROUP_ROWS_MAX, 1, None]


def test_a_partition_that_an_answer_leaves_out_is_an_error_and_no_silence() -> None:
    gathering = Gathering()
    rows = [row_of(key) for key in KEYS[:2]]
    for row in rows:
        gathering.add(row, DISK)
    group = gathering.take()
    assert group is not None
    group.tell([answer((A, 6, 7, ID_A))], {}, None, VERSION)
    assert rows[0].outcome == went(A, 7)
    assert isinstance(rows[1].outcome, UprError)
    group.tell([answer((A, 0, 0, 0), (B, 3, 4, ID_A))], {}, None, VERSION)
    assert [row.outcome for row in rows] == [WriteResult(A, 0, 0, VERSION), went(B, 4)]
