# ruff: noqa: SIM117
"""Following, against a scripted server."""

import logging
import time
from collections.abc import Iterator

import pytest

from tests.client._async.adapter import arrived, serve
from tests.client.scripted import (
    BEGIN,
    END,
    ID_A,
    ID_B,
    VERSION,
    Abort,
    Expect,
    HalfClosed,
    Hold,
    answers,
    at,
    ended,
    frame,
    heartbeat,
    key_of,
    opened,
    refused,
    rollback,
    run_block,
    started,
)
from upr_client import (
    AsyncClient,
    Change,
    Marker,
    MemoryPositions,
    Only,
    Position,
    Rollback,
    Tuning,
    UprError,
    WriteToken,
)
from upr_client.errors import (
    BehindError,
    ClosedError,
    PartitionNotActiveError,
    ProtocolError,
    RollbackError,
    UnavailableError,
)
from upr_client.testing import memory
from upr_protocol.errors import ShuttingDownError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FRAME_BYTES
from upr_protocol.wire.codec import encode_block


@pytest.mark.asyncio
async def test_changes_one_by_one_until_now() -> None:
    script = [
        *BEGIN,
        answers(started(1, 7, high=6, until=6, log=[(ID_A, 0)])),
        frame((7, run_block(1, 0, 2, 4)), (7, run_block(1, 2, 4))),
        frame((7, run_block(1, 4, 6))),
        *END,
    ]
    async with serve([script]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket("default")
            changes = bucket.changes(until="now", only=Only([1]))
            events = []
            async with changes:
                async for event in changes:
                    events.append(event)
                assert changes.position(1) == Position(
                    VERSION, ID_A, ID_A, 6, 6, (4, 6), FailoverLog.born(ID_A), bucket="default"
                )
                assert changes.lag() == {1: 0}
            assert bucket.version == VERSION
        rows = [
            Change(
                1, s, "delete" if s == 5 else "set", key_of(1, s), None if s == 5 else b"v%d" % s
            )
            for s in range(1, 7)
        ]
        assert events == [*rows[:4], Marker(1, 4), *rows[4:], Marker(1, 6)]
        heard = server.calls["follow"][0]
        assert heard.half_closed
        [start] = heard.of("start")
        assert [(p.partition, p.HasField("failover_id"), p.seqno) for p in start.partitions] == [
            (1, False, 0)
        ]
        assert start.partitions[0].until_now


TWO_BLOCKS = [
    *BEGIN,
    answers(started(1, 7, high=9)),
    frame((7, run_block(1, 0, 3))),
    # Behind it a frame is a batch of its own.
    heartbeat(),
    frame((7, run_block(1, 3, 6))),
    Hold(),
]


@pytest.mark.asyncio
async def test_the_position_moves_when_the_next_item_is_asked_for() -> None:
    store = MemoryPositions()
    async with serve([TWO_BLOCKS]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(resume=store, only=Only([1])) as changes:
            seqnos = []
            async for event in changes:
                seqnos.append((event.seqno, changes.position(1).seqno, changes.position(1).horizon))
                if len(seqnos) == 6:
                    break
            # The fourth is the marker at 3.
            assert seqnos == [(1, 0, 0), (2, 1, 3), (3, 2, 3), (3, 3, 3), (4, 3, 3), (5, 4, 6)]
            assert changes.lag()[1] == 9 - 4
        assert store.load([1])[1].seqno == 4
        assert store.load([1])[1].markers == (3,)


@pytest.mark.asyncio
async def test_batches_are_acknowledged_whole_and_resumed() -> None:
    second = [*BEGIN, answers(started(1, 3, high=9)), frame((3, run_block(1, 3, 6))), Hold()]
    store = MemoryPositions()
    async with serve([TWO_BLOCKS, second]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        for expected in ([[1, 2, 3], [4, 5, 6]], [[4, 5, 6]]):
            got = []
            async with bucket.changes(resume=store, only=Only([1])) as changes:
                async for batch in changes.batches():
                    got.append([change.seqno for change in batch.changes])
                    if got == expected:
                        break
            assert got == expected
        start = server.calls["follow"][1].of("start")[0].partitions[0]
        assert (start.failover_id, start.seqno, start.data_id) == (ID_A, 3, ID_A)


@pytest.mark.asyncio
async def test_a_lost_connection_is_resumed_where_it_broke(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = [
        *BEGIN,
        answers(started(1, 7, log=[(ID_A, 0)])),
        frame((7, run_block(1, 0, 3))),
        Abort(ShuttingDownError("going down")),
    ]
    second = [*BEGIN, answers(started(1, 7, until=5)), frame((7, run_block(1, 3, 5))), *END]
    status: list[str] = []
    caplog.set_level(logging.INFO, "upr_client")
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1]), on_status=status.append) as changes:
            seqnos = [event.seqno async for event in changes if isinstance(event, Change)]
    assert seqnos == [1, 2, 3, 4, 5]
    assert len(status) == 1
    assert "SHUTTING_DOWN" in status[0]
    assert status[0] in caplog.text


@pytest.mark.asyncio
async def test_a_rollback_without_a_policy_is_an_error_and_changes_nothing() -> None:
    script = [*BEGIN, answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5))), Hold()]
    position = at(8, 3, 5, 8)
    store = MemoryPositions({1: position})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(resume=store, only=Only([1])) as changes:
            with pytest.raises(RollbackError, match="from seqno 8 to 3"):
                await anext(changes)
            assert changes.position(1) == position
            assert list(changes.handshakes) == [(1, "next_record", "roll back to 5")]
    assert store.load([1]) == {1: position}


@pytest.mark.asyncio
async def test_a_rollback_callback_runs_before_the_new_start() -> None:
    script = [
        *BEGIN,
        answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5))),
        Expect("start"),
        answers(started(1, 7, ID_B)),
        frame((7, run_block(1, 3, 6))),
        *END,
    ]
    store = MemoryPositions({1: at(8, 3, 5, 8)})
    undone: list[Rollback] = []
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store, only=Only([1]), on_rollback=undone.append
        ) as changes:
            seqnos = [event.seqno async for event in changes if isinstance(event, Change)]
    assert seqnos == [4, 5, 6]
    assert [(r.partition, r.from_seqno, r.seqno, r.old_id, r.new_id) for r in undone] == [
        (1, 8, 3, ID_A, ID_B)
    ]
    again = server.calls["follow"][0].of("start")[1].partitions[0]
    assert (again.failover_id, again.seqno, again.data_id) == (ID_B, 3, ID_B)
    assert store.load([1])[1].seqno == 6
    assert store.load([1])[1].log == FailoverLog.from_pairs([(ID_A, 0), (ID_B, 5)])


class StoreOfOneRow:
    """A store of the application's own whose first save asks an iterator for what it does not have."""

    def __init__(self) -> None:
        self._rows: Iterator[None] = iter(())

    def load(self, _: object) -> dict[int, Position]:
        return {1: at(8, 3, 5, 8)}

    def save(self, _: object) -> None:
        rows, self._rows = self._rows, iter([None])
        next(rows)


@pytest.mark.asyncio
async def test_what_would_end_an_iteration_is_an_error_when_the_application_raises_it() -> None:
    told = [*BEGIN, answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5))), Hold()]

    def undo(_: Rollback) -> None:
        raise StopAsyncIteration

    async with serve([told, told]) as server, AsyncClient(server.target) as client:
        bucket = client.bucket()
        for on_rollback in (undo, lambda _: None):
            with pytest.raises(RuntimeError, match="raised"):
                async with bucket.changes(
                    resume=StoreOfOneRow(), only=Only([1]), on_rollback=on_rollback
                ) as changes:
                    _ = [event async for event in changes]


@pytest.mark.asyncio
async def test_a_rollback_event_is_confirmed_by_asking_for_the_next() -> None:
    script = [
        *BEGIN,
        answers(rollback(1, 5, ID_B, (ID_A, 0), (ID_B, 5))),
        Expect("start"),
        answers(started(1, 7, ID_B)),
        frame((7, run_block(1, 5, 6))),
        *END,
    ]
    store = MemoryPositions({1: at(8, 3, 5, 8)})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        changes = client.bucket().changes(
            resume=store, only=Only([1]), tuning=Tuning(markers_at_record=True), on_rollback="event"
        )
        async with changes:
            batches = changes.batches()
            batch = await anext(batches)
            assert isinstance(batch, Rollback)
            assert (batch.seqno, batch.new_id) == (5, ID_B)
            assert store.load([1])[1].seqno == 8
            assert len(server.calls["follow"][0].of("start")) == 1
            batch = await anext(batches)
            assert [change.seqno for change in batch.changes] == [6]
            assert store.load([1])[1] == at(8, 3, 5, 8).rolled_back(
                5, ID_B, FailoverLog.from_pairs([(ID_A, 0), (ID_B, 5)])
            )


@pytest.mark.asyncio
async def test_a_rollback_with_nothing_to_undo_keeps_the_place() -> None:
    script = [
        *BEGIN,
        answers(rollback(1, 8, ID_B, (ID_A, 0), (ID_B, 8))),
        Expect("start"),
        answers(started(1, 7, ID_B)),
        *END,
    ]
    store = MemoryPositions({1: at(8, 3, 8)})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(resume=store, only=Only([1])) as changes:
            assert [event async for event in changes] == []
    again = server.calls["follow"][0].of("start")[1].partitions[0]
    assert (again.failover_id, again.seqno, again.data_id) == (ID_B, 8, ID_B)
    assert store.load([1])[1].failover_id == ID_B


@pytest.mark.asyncio
@pytest.mark.parametrize(("rollback_seqno", "kept"), [(5, 3), (8, 8)])
async def test_a_position_with_a_new_id_is_stored_before_the_new_start(
    rollback_seqno: int, kept: int
) -> None:
    script = [
        *BEGIN,
        answers(rollback(1, rollback_seqno, ID_B, (ID_A, 0), (ID_B, rollback_seqno))),
        Expect("start"),
        answers(started(1, 7, ID_B)),
        frame((7, run_block(1, kept, 9))),
        *END,
    ]
    store = MemoryPositions({1: at(8, 3, 8)})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store,
            only=Only([1]),
            tuning=Tuning(save_seconds=3600),
            on_rollback=lambda _: None,
        ) as changes:
            event = await anext(changes)
            stored = store.load([1])[1]
    assert event.seqno == kept + 1
    assert (stored.failover_id, stored.seqno) == (ID_B, kept)


@pytest.mark.asyncio
async def test_a_refused_partition_is_asked_for_again_while_others_go_on() -> None:
    behind = UprError("ask again", reason="BEHIND", retriable=True)
    script = [
        *BEGIN,
        answers(refused(2, behind), started(1, 7)),
        frame((7, run_block(1, 0, 2))),
        ended("FINISHED", (1, 7)),
        Expect("start"),
        answers(started(2, 8)),
        frame((8, run_block(2, 0, 1))),
        ended("FINISHED", (2, 8)),
        HalfClosed(),
    ]
    status: list[str] = []
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1, 2]), on_status=status.append) as changes:
            got = [(e.partition, e.seqno) async for e in changes if isinstance(e, Change)]
    assert got == [(1, 1), (1, 2), (2, 1)]
    assert [p.partition for p in server.calls["follow"][0].of("start")[1].partitions] == [2]
    assert "BEHIND" in status[0]


@pytest.mark.asyncio
async def test_a_refusal_for_good_is_raised() -> None:
    script = [*BEGIN, answers(refused(1, PartitionNotActiveError("partition 1 is dead"))), Hold()]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1])) as changes:
            with pytest.raises(PartitionNotActiveError, match="is dead"):
                await anext(changes)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "reason", ["STATE_CHANGED", "HISTORY_CHANGED", "TOO_SLOW", "STORAGE_ERROR"]
)
async def test_an_end_that_is_not_for_good_is_started_again(reason: str) -> None:
    script = [
        *BEGIN,
        answers(started(1, 6)),
        frame((6, run_block(1, 0, 2))),
        ended(reason, (1, 6)),
        Expect("start"),
        # A late run of the old token counts for nothing.
        frame((6, run_block(1, 2, 3))),
        answers(started(1, 7)),
        frame((6, run_block(1, 2, 3)), (7, run_block(1, 2, 4))),
        *END,
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1])) as changes:
            assert [e.seqno async for e in changes if isinstance(e, Change)] == [1, 2, 3, 4]


@pytest.mark.asyncio
@pytest.mark.parametrize("of_call", [False, True])
async def test_another_consumer_with_the_name_took_over(of_call: bool) -> None:
    streams = () if of_call else ((1, 7),)
    script = [*BEGIN, answers(started(1, 7)), ended("SUPERSEDED", *streams), HalfClosed()]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1]), consumer="indexer") as changes:
            with pytest.raises(UprError, match="superseded") as caught:
                await anext(changes)
    assert caught.value.reason == "SUPERSEDED"
    assert server.calls["follow"][0].of("open")[0].consumer == "indexer"


@pytest.mark.asyncio
async def test_the_end_of_a_call_is_answered_with_the_half_close_alone() -> None:
    first = [
        *BEGIN,
        answers(started(1, 7)),
        frame((7, run_block(1, 0, 3))),
        ended("SHUTTING_DOWN"),
        HalfClosed(),
    ]
    second = [*BEGIN, answers(started(1, 7)), *END]
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        # With so little credit, each frame's is given back at once, unless the call has ended.
        async with client.bucket().changes(
            only=Only([1]), tuning=Tuning(credit_bytes=4)
        ) as changes:
            assert [e.seqno async for e in changes if isinstance(e, Change)] == [1, 2, 3]
    assert server.calls["follow"][0].half_closed


@pytest.mark.asyncio
async def test_a_gap_ends_the_call_and_is_never_delivered() -> None:
    first = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 1, 3))), Hold()]
    second = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 0, 3))), *END]
    status: list[str] = []
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1]), on_status=status.append) as changes:
            assert [e.seqno async for e in changes if isinstance(e, Change)] == [1, 2, 3]
    assert "at seqno 0, but the frame continues at 1" in status[0]


@pytest.mark.asyncio
async def test_a_server_that_breaks_the_protocol_all_the_time_is_an_error() -> None:
    script = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 1, 3))), Hold()]
    async with serve([script] * 5) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1])) as changes:
            with pytest.raises(ProtocolError):
                await anext(changes)


@pytest.mark.asyncio
async def test_heartbeats_are_answered_and_tell_the_lag() -> None:
    script = [
        *BEGIN,
        answers(started(1, 7, high=3)),
        heartbeat((1, 9)),
        Expect("pong"),
        heartbeat(),
        Expect("pong"),
        frame((7, run_block(1, 0, 3))),
        Hold(),
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1])) as changes:
            await anext(changes.batches())
            assert changes.lag() == {1: 9}


@pytest.mark.asyncio
async def test_credit_is_given_back_when_a_quarter_was_taken_and_with_a_heartbeat() -> None:
    blocks = [run_block(1, start, start + 3) for start in (0, 3, 6)]
    sizes = [len(encode_block(block)) for block in blocks]
    script = [
        *BEGIN,
        answers(started(1, 7)),
        frame((7, blocks[0])),
        frame((7, blocks[1])),
        Expect("credit"),
        frame((7, blocks[2])),
        heartbeat(),
        Expect("credit"),
        *END,
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            only=Only([1]), tuning=Tuning(credit_bytes=4 * (sizes[0] + 1))
        ) as changes:
            assert [e.seqno async for e in changes if isinstance(e, Marker)] == [3, 6, 9]
    # To the byte what the server counts: more would be an error, less would close the window bit by bit.
    credits = [credit.bytes for credit in server.calls["follow"][0].of("credit")]
    assert credits == [sizes[0] + sizes[1], sizes[2]]


@pytest.mark.asyncio
async def test_small_frames_that_wait_are_one_batch() -> None:
    blocks = [run_block(1, start, start + 3) for start in range(0, 30, 3)]
    sizes = [len(encode_block(block)) for block in blocks]
    tuning = Tuning(credit_bytes=4 * sum(sizes[1:]))
    large = memory.run_block(1, [(31, b"key", bytes(FRAME_BYTES))], 30, 31, 31)
    sizes.append(len(encode_block(large)))
    script = [
        *BEGIN,
        answers(started(1, 7)),
        frame((7, blocks[0])),
        heartbeat(),
        Expect("pong"),
        *(frame((7, block)) for block in blocks[1:]),
        frame((7, large)),
        frame((7, run_block(1, 31, 34))),
        *END,
    ]
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1]), tuning=tuning) as changes:
            batches = changes.batches()
            first = await anext(batches)
            await arrived(changes, 12)
            rest = [batch async for batch in batches]
    taken = [credit.bytes for credit in server.calls["follow"][0].of("credit")]
    assert taken == [sizes[0], sum(sizes[1:10]), sizes[10]]
    seqnos = [[change.seqno for change in batch.changes] for batch in (first, *rest)]
    assert seqnos == [[1, 2, 3], list(range(4, 31)), [31], [32, 33, 34]]
    assert [len(batch.markers) for batch in (first, *rest)] == [1, 9, 1, 1]


@pytest.mark.asyncio
async def test_silence_for_three_heartbeats_is_a_lost_connection() -> None:
    first = [Expect("open"), opened(heartbeat_seconds=0.1), Expect("start"), Hold()]
    second = [*BEGIN, answers(started(1, 7)), *END]
    status: list[str] = []
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        # Nor does it answer anything else.
        server.state = None
        async with client.bucket().changes(only=Only([1]), on_status=status.append) as changes:
            assert [event async for event in changes] == []
    assert "silent for three heartbeat intervals" in status[0]


@pytest.mark.asyncio
async def test_a_call_is_silent_for_long_while_its_server_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow link nothing comes before a large message is through; for ever is no message on its way."""
    monkeypatch.setattr("upr_client.changes.link.MESSAGE_SECONDS", 1.5)
    first = [Expect("open"), opened(heartbeat_seconds=0.1), Expect("start"), Hold()]
    second = [*BEGIN, answers(started(1, 7)), *END]
    status: list[str] = []
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        begun = time.monotonic()
        async with client.bucket().changes(only=Only([1]), on_status=status.append) as changes:
            assert [event async for event in changes] == []
    assert "silent for three heartbeat intervals" in status[0]
    assert time.monotonic() - begun > 1.5


@pytest.mark.asyncio
async def test_trying_again_ends_after_retry_seconds() -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            only=Only([1]), tuning=Tuning(retry_seconds=0.05)
        ) as changes:
            with pytest.raises(UnavailableError, match="no script"):
                await anext(changes)


@pytest.mark.asyncio
async def test_after_close_there_is_one_clear_error() -> None:
    script = [*BEGIN, answers(started(1, 7)), frame((7, run_block(1, 0, 3))), Hold()]
    async with serve([script]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket()
            changes = bucket.changes(only=Only([1]))
            with pytest.raises(ClosedError, match="not open"):
                await anext(changes)
            async with changes:
                assert (await anext(changes)).seqno == 1
            with pytest.raises(ClosedError, match="were closed"):
                await anext(changes)
            async with bucket.changes(only=Only([1])) as other:
                pass
            await other.close()
        with pytest.raises(ClosedError, match="client was closed"):
            bucket.changes(only=Only([1]))
        with pytest.raises(ClosedError, match="client was closed"):
            await bucket.set(b"k", b"v")


@pytest.mark.asyncio
async def test_a_stream_that_finished_between_markers_is_started_again_to_its_horizon() -> None:
    position = at(4, 2, 4, horizon=6)
    script = [
        *BEGIN,
        answers(started(1, 7, until=5)),
        # A marker there, but not for this reader, whose horizon is 6.
        frame((7, run_block(1, 4, 5))),
        ended("FINISHED", (1, 7)),
        Expect("start"),
        answers(started(1, 8, until=6)),
        frame((8, run_block(1, 5, 6))),
        ended("FINISHED", (1, 8)),
        HalfClosed(),
    ]
    store = MemoryPositions({1: position})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(resume=store, until="now", only=Only([1])) as changes:
            markers = [e.seqno async for e in changes if isinstance(e, Marker)]
    assert markers == [6]
    assert server.calls["follow"][0].of("start")[1].partitions[0].until_seqno == 6


@pytest.mark.asyncio
async def test_who_waits_for_a_write_is_told_why_it_will_not_come() -> None:
    written = WriteToken.of(VERSION, [(1, ID_A, 9)])
    held = [*BEGIN, answers(started(1, 7)), Hold()]
    refusal = PartitionNotActiveError("dead", retriable=False)
    ending = [*BEGIN, answers(started(1, 8)), ended("FINISHED", (1, 8)), HalfClosed()]
    async with serve([held, [*BEGIN, answers(refused(1, refusal)), Hold()], ending]) as server:
        async with AsyncClient(server.target) as client:
            bucket = client.bucket()
            async with bucket.changes(only=Only([1])) as changes:
                assert await changes.ready(30)
                # That bucket may be the newer one.
                with pytest.raises(BehindError):
                    await changes.reached(WriteToken.of(VERSION + 1, [(1, ID_A, 9)]), 0.01)
                with pytest.raises(BehindError):
                    await changes.reached(written, 0.01)
                changes.stop()
                with pytest.raises(ClosedError, match="stopped"):
                    await changes.reached(written, 60)
            async with bucket.changes(only=Only([1])) as changes:
                with pytest.raises(PartitionNotActiveError):
                    _ = [event async for event in changes]
                with pytest.raises(PartitionNotActiveError):
                    await changes.reached(written, 60)
            async with bucket.changes(only=Only([1]), until="now") as changes:
                assert [event async for event in changes] == []
                with pytest.raises(ClosedError, match="came to their end"):
                    await changes.reached(written, 60)
