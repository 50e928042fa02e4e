# ruff: noqa: SIM117
"""Following that is interrupted: cancelled, closed, forked, asked from other threads, told by callbacks that fail."""

import asyncio
import gc
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from tests.client._async.adapter import serve as serve_async
from tests.client._sync.adapter import serve
from tests.client.scripted import (
    ID_A,
    ID_B,
    VERSION,
    Expect,
    Hold,
    answers,
    frame,
    heartbeat,
    opened,
    refused,
    rollback,
    run_block,
    started,
)
from tests.harness import until, wait_until
from upr_client import (
    AsyncClient,
    Change,
    Client,
    Group,
    MemoryPositions,
    Only,
    Position,
    Rollback,
    Tuning,
)
from upr_client._async.io import Semaphore as AsyncSemaphore
from upr_client._async.waiters import Waiters
from upr_client._sync import writer as writer_module
from upr_client._sync.block_writer import Write
from upr_client._sync.call import Follow
from upr_client._sync.changes import Changes
from upr_client._sync.io import Background, Event, Queue, RequestQueue, Semaphore
from upr_client._sync.waiters import Waiters as SyncWaiters
from upr_client.errors import BehindError, ClosedError, HandlerError, NoRoomError
from upr_client.writes import WriterOptions
from upr_protocol.block import Block, block_keys
from upr_protocol.consumer import Consumer
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import RollbackAnswer
from upr_protocol.wire.v1 import key_value_service_pb2 as kv_pb2

FOLLOW = [
    Expect("open"),
    opened(),
    Expect("start"),
    answers(started(1, 7)),
    frame((7, run_block(1, 0, 4))),
    heartbeat(),
    Hold(),
]


@pytest.mark.asyncio
async def test_who_is_cancelled_while_connecting_connects_anew() -> None:
    said: list[str] = []
    async with serve_async([[Expect("open"), Hold()], FOLLOW]) as server:
        async with AsyncClient(server.target) as client:
            async with client.bucket().changes(only=Only([1]), on_status=said.append) as changes:
                task = asyncio.create_task(anext(changes))
                await until(lambda: server.calls["follow"] and server.calls["follow"][0].of("open"))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                event = await asyncio.wait_for(anext(changes), 10)
                assert (event.partition, event.seqno) == (1, 1)
    assert said == []


@pytest.mark.asyncio
async def test_a_handler_that_was_cancelled_holds_nothing_up() -> None:
    def handle(change: Change) -> None:
        raise asyncio.CancelledError

    async with serve_async([FOLLOW]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1]), acknowledge="manual") as changes:
            with pytest.raises(HandlerError, match="seqno 1") as raised:
                await asyncio.wait_for(changes.run(handle), 10)
            assert isinstance(raised.value.__cause__, asyncio.CancelledError)


@pytest.mark.asyncio
async def test_what_waits_for_a_handler_is_not_handled_once_running_was_cancelled() -> None:
    handled: list[int] = []
    entered, let = asyncio.Event(), asyncio.Event()

    async def handle(change: Change) -> None:
        handled.append(change.seqno)
        entered.set()
        await let.wait()

    positions = MemoryPositions()
    async with serve_async([FOLLOW]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=positions, only=Only([1]), acknowledge="manual"
        ) as changes:
            running = asyncio.create_task(changes.run(handle))
            await entered.wait()
            running.cancel()
            let.set()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert handled == [1]
    assert positions.load([1])[1].seqno == 1, "what was being handled was handled to its end"


def test_closing_from_another_thread_ends_running_at_once() -> None:
    handled: list[int] = []
    entered, closed = threading.Event(), threading.Event()

    def handle(change: Change) -> None:
        handled.append(change.seqno)
        entered.set()
        assert closed.wait(10)

    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1]), acknowledge="manual") as changes:

            def close() -> None:
                assert entered.wait(10)
                changes.close()
                closed.set()

            closer = threading.Thread(target=close)
            closer.start()
            with pytest.raises(ClosedError):
                changes.run(handle)
            closer.join()
    assert handled == [1]


def test_closing_in_a_forked_process_does_nothing() -> None:
    positions = MemoryPositions()
    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(
            resume=positions, only=Only([1]), tuning=Tuning(save_seconds=3600)
        ) as changes:
            assert [next(changes).seqno for _ in range(3)] == [1, 2, 3]
            child = os.fork()
            if not child:
                code = 1
                # What other tests left to be collected may be gRPC's, whose threads are not here.
                gc.disable()
                # One that hangs would outlive the test.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(8)
                try:
                    changes.close()
                    code = 2 if positions.load([1]) else 0
                    try:
                        changes.save()
                        code = 3
                    except ClosedError:
                        pass
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert next(changes).seqno == 4
    assert positions.load([1])[1].seqno == 3


REFUSED = [
    Expect("open"),
    opened(),
    Expect("start"),
    answers(refused(1, NoRoomError("full", retriable=True)), started(2, 8)),
    frame((8, run_block(2, 0, 1))),
    Expect("start"),
    answers(started(1, 7)),
    frame((7, run_block(1, 0, 4))),
    Hold(),
]


def test_who_is_told_may_wait_for_other_threads() -> None:
    asked: list[Any] = []

    def told(words: str) -> None:
        asker = threading.Thread(target=lambda: asked.append(changes.status()))
        asker.start()
        asker.join(5)
        assert not asker.is_alive()

    with serve([REFUSED]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1, 2]), on_status=told) as changes:
            assert next(changes).partition == 2
    assert [set(status.problems) for status in asked] == [{1}]


def test_a_callback_that_fails_leaves_nothing_half_done() -> None:
    def told(words: str) -> None:
        raise ValueError(words)

    with serve([REFUSED]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1, 2]), on_status=told) as changes:
            seen: list[tuple[int, int]] = []
            failed = 0
            while len(seen) < 5:
                try:
                    event = next(changes)
                except ValueError:
                    failed += 1
                    continue
                if isinstance(event, Change):
                    seen.append((event.partition, event.seqno))
            assert failed == 1
            assert sorted(seen) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1)]


@pytest.mark.asyncio
async def test_waiting_for_a_write_ends_in_time_whatever_else_moves() -> None:
    waiters = Waiters()

    async def move() -> None:
        while True:
            waiters.wake()
            await asyncio.sleep(0)

    mover = asyncio.create_task(move())
    async with asyncio.timeout(5):
        with pytest.raises(BehindError, match=r"not reached within 0\.2 s"):
            await waiters.until_reached(lambda: False, 0.2)
    mover.cancel()


def test_two_that_wait_for_a_write_are_both_woken() -> None:
    waiters = SyncWaiters()
    reached = threading.Event()
    threads = [
        threading.Thread(target=waiters.until_reached, args=(reached.is_set, 10)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while len(waiters._moved) < 2:
        pass
    reached.set()
    waiters.wake()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert len(waiters._moved) == 0


LOG = FailoverLog.from_pairs([(ID_A, 0)])
BOTH_BACK = answers(
    rollback(1, 3, ID_B, (ID_A, 0), (ID_B, 3)), rollback(2, 3, ID_B, (ID_A, 0), (ID_B, 3))
)


@pytest.mark.asyncio
async def test_a_rollback_whose_undoing_failed_is_told_again_and_the_others_are_not() -> None:
    store = MemoryPositions({p: Position(VERSION, ID_A, ID_A, 8, 8, (2, 8), LOG) for p in (1, 2)})
    told: list[int] = []
    stored: list[tuple[int, int | None]] = []

    def undo(rollback: Rollback) -> None:
        told.append(rollback.partition)
        if told == [1, 2]:
            raise ValueError("no")

    script = [
        Expect("open"),
        opened(),
        Expect("start"),
        BOTH_BACK,
        Expect("start"),
        answers(started(1, 7, ID_B), started(2, 8, ID_B)),
        frame((7, run_block(1, 2, 3))),
        Hold(),
    ]
    async with serve_async([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(
            resume=store, only=Only([1, 2]), on_rollback=undo
        ) as changes:
            with pytest.raises(ValueError, match="no"):
                await anext(changes)
            await changes.save()
            stored += [(p, at.failover_id) for p, at in store.load([1, 2]).items()]
            assert (await anext(changes)).seqno == 3
    assert told == [1, 2, 2]
    assert stored == [(1, ID_B), (2, ID_A)], "a new id is stored with what was undone for it only"
    (heard,) = server.calls["follow"]
    assert len(heard.of("start")) == 2, "nothing is started before all of it is undone"


def test_a_call_that_is_opened_while_the_changes_are_closed_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Follow] = []

    class Late(Follow):
        """A call that is made when another thread has looked for one to be ended, and found none."""

        def __init__(self, *arguments: Any) -> None:
            changes.close()
            super().__init__(*arguments)
            calls.append(self)

    monkeypatch.setattr("upr_client._sync.changes.Follow", Late)
    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1])) as changes:
            with pytest.raises(ClosedError):
                next(changes)
        assert [call._call._ended.is_set() for call in calls] == [True]


def test_acknowledging_while_connecting_disturbs_nothing() -> None:
    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(only=Only([1])) as changes:
            follow = Follow.__init__

            def woken(self: Follow, *arguments: Any) -> None:
                follow(self, *arguments)
                self.wake()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Follow, "__init__", woken)
                assert next(changes).seqno == 1


def interrupted(work: Callable[[], object], step: int, of: str = "opcode") -> bool:
    """Run ``work`` with a KeyboardInterrupt at its ``step``-th bytecode, or function call; False when it has fewer.

    It fails when the interrupt goes no further than the code that it meets. It has a thread of its own: where the
    interpreter lets go of an exception that it handled, an interrupt leaves that as the thread's for ever.
    """
    with ThreadPoolExecutor(1) as thread:
        # The collector would call what is to be told of things that went, and nothing can be raised out of that.
        gc.disable()
        try:
            return thread.submit(_interrupted, work, step, of).result()
        finally:
            gc.enable()


def _interrupted(work: Callable[[], object], step: int, of: str) -> bool:
    left = step

    def at_each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = of == "opcode"
        left -= event == of
        if left < 0:
            raise KeyboardInterrupt
        return at_each

    sys.settrace(at_each)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    assert left >= 0, f"the interrupt at {of} {step} was lost"
    return False


@pytest.mark.asyncio
async def test_a_place_goes_to_the_first_who_still_waits() -> None:
    places, order = AsyncSemaphore(1), list[str]()

    async def take(name: str) -> None:
        await places.take()
        order.append(name)

    await take("at once")
    assert not await places.try_take()
    waiting = {name: asyncio.create_task(take(name)) for name in ("gone", "late", "last")}
    await asyncio.sleep(0)
    waiting["gone"].cancel()
    await asyncio.sleep(0)
    places.give_back()
    # It has been given the place, and does not take it.
    waiting["late"].cancel()
    assert not await places.try_take(), "nobody overtakes those who wait"
    await waiting["last"]
    assert order == ["at once", "last"]
    places.give_back()
    assert await places.try_take()
    assert not await places.try_take()


@pytest.mark.asyncio
async def test_who_was_given_a_place_is_not_overtaken_before_it_goes_on() -> None:
    places, order = AsyncSemaphore(0), list[int]()

    async def take(number: int) -> None:
        await places.take()
        order.append(number)

    waiting = [asyncio.create_task(take(number)) for number in range(2)]
    await asyncio.sleep(0)
    for _ in range(4):
        places.give_back()
    # Before the turn in which the others go on. Two places are left: one of them goes to nobody.
    waiting[1].cancel()
    waiting.append(asyncio.create_task(take(2)))
    await take(3)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [0, 3, 2]
    assert await places.try_take()
    assert not await places.try_take()


@pytest.mark.asyncio
async def test_who_waits_no_more_for_a_place_leaves_nothing_behind() -> None:
    places = AsyncSemaphore(1)
    await places.take()
    for _ in range(3):
        waiting = asyncio.create_task(places.take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    closed = places.take()
    closed.send(None)
    closed.close()
    assert not places._waiting
    places.give_back()
    assert await places.try_take()


def of_events() -> tuple[Callable[[], object], Callable[[], object]]:
    event = Event()
    return lambda: event.wait(0), event.set


def of_waited_events() -> tuple[Callable[[], object], Callable[[], object]]:
    event = Event()
    return event.set, lambda: event.wait(0)


def of_places() -> tuple[Callable[[], object], Callable[[], object]]:
    places = Semaphore(1)

    def take_and_give_back() -> None:
        if places.try_take():
            places.give_back()

    return take_and_give_back, places.try_take


def of_queues() -> tuple[Callable[[], object], Callable[[], object]]:
    queue = Queue[int]()
    return lambda: queue.get(0), lambda: queue.put(1)


def of_filled_queues() -> tuple[Callable[[], object], Callable[[], object]]:
    queue = Queue[int]()
    return lambda: queue.put(1), lambda: queue.get(0)


def of_requests() -> tuple[Callable[[], object], Callable[[], object]]:
    requests = RequestQueue[int]()
    requests.put(1)
    return lambda: requests.put(2), lambda: next(requests)


def of_closed_requests() -> tuple[Callable[[], object], Callable[[], object]]:
    requests = RequestQueue[int]()
    return requests.close, requests.close


@pytest.mark.parametrize(
    "made",
    [
        of_events,
        of_waited_events,
        of_places,
        of_queues,
        of_filled_queues,
        of_requests,
        of_closed_requests,
    ],
)
def test_an_interrupt_anywhere_stops_no_other_thread(
    made: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> None:
    step, more = 0, True
    while more:
        work, of_another = made()
        more = interrupted(work, step)
        other = threading.Thread(target=of_another, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), f"interrupted before bytecode {step}"
        step += 1
    assert step > 5


class Submitted:
    """Stands for a block writer that writes at once, and for the bucket of a buffered one."""

    def __init__(self) -> None:
        self.connection = self
        self.name, self.version, self.request_timeout = "stub", 0, 10.0
        self.keys: list[bytes] = []

    def check_usable(self) -> None: ...

    def submit(self, block: Block, *_: object, **__: object) -> Write:
        self.keys += block_keys(block)
        write = Write(kv_pb2.WriteRequest())
        write.done.set()
        return write

    def waited_for(self) -> AbstractContextManager[None]:
        return nullcontext()


def interrupted_at_line(work: Callable[[], object], number: int) -> bool:
    """As ``interrupted``, at a line of the buffered writer; not where a lock is taken or given back, which is one step."""
    left = number

    def at_each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        code = frame.f_code.co_filename
        if code == writer_module.__file__ and event == "line":
            left -= not linecache.getline(code, frame.f_lineno).lstrip().startswith("with ")
            if left < 0:
                raise KeyboardInterrupt
        return at_each

    before = sys.gettrace()
    sys.settrace(at_each)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_interrupt_while_a_writer_takes_a_row_loses_and_doubles_none(count: int) -> None:
    """Of the row that is being taken nobody knows; a batch has two. Each line twice: with another row behind it, and without."""
    step, more, rows = 0, True, [b"%d" % number for number in range(count)]
    while more:
        stub: Any = Submitted()
        options = WriterOptions("disk", 2, 2**20, 60.0, 2**20, None)
        with writer_module.Writer(stub, partial(cast, Any, stub), [], options) as writer:
            for row in rows[:-1]:
                writer.set(row, b"")
            more = interrupted_at_line(partial(writer.set, rows[-1], b""), step // 2)
            if step % 2:
                writer.set(b"next", b"")
        taken = sorted(row for row in stub.keys if row != rows[-1])
        assert taken == [*rows[:-1], *[b"next"] * (step % 2)], f"interrupted before line {step}"
        assert stub.keys.count(rows[-1]) <= 1
        step += 1
    assert step > 20


def test_what_goes_on_has_not_ended_where_an_interrupt_meets_the_question() -> None:
    """Else a second one would send the same writes."""
    go_on, step = threading.Event(), 0
    background = Background(lambda: [go_on.wait()].clear(), "upr-test")
    while interrupted(lambda: background.has_ended, step):
        step += 1
        assert not background.has_ended, f"interrupted before bytecode {step}"
    go_on.set()
    background.join()
    assert background.has_ended


def test_what_an_interrupt_met_while_it_began_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever began it does not have it, and begins another one."""
    done, threads, start = list[int](), list[threading.Thread](), threading.Thread.start

    def interrupted_behind(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "upr-test":
            threads.append(thread)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_behind)
        with pytest.raises(KeyboardInterrupt):
            Background(partial(done.append, 1), "upr-test", partial(done.append, 2))
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert done == []


def test_a_flag_wakes_all_that_wait_and_only_once_it_is_set() -> None:
    flag, woken = Event(), Queue[bool]()
    assert not flag.wait(0.01)
    threads = [threading.Thread(target=lambda: woken.put(flag.wait(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert woken.get(0.05) is None
    flag.set()
    assert [woken.get(10) for _ in threads] == [True] * 8
    assert flag.wait()
    flag.clear()
    assert not flag.wait(-1)
    for thread in threads:
        thread.join()


def test_no_thread_of_a_call_is_left_when_it_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the end of the process stops inside gRPC may hold a lock that gRPC waits for in the end."""
    takers: list[threading.Thread] = []
    ends, waited = threading.Event(), threading.Event()

    class Slow(RequestQueue[Any]):
        def __next__(self) -> Any:
            takers.append(threading.current_thread())
            try:
                return super().__next__()
            except StopIteration:
                waited.set()
                ends.wait(0.2)
                raise

    monkeypatch.setattr("upr_client._sync.call.RequestQueue", Slow)
    with serve([FOLLOW] * 30) as server, Client(server.target) as client:
        # One that still sends something when the call is closed does not come here.
        for _ in range(30):
            with client.bucket().changes(only=Only([1])) as changes:
                assert next(changes).seqno == 1
            # At once: to close the client and the server takes time too.
            assert takers
            assert not any(taker.is_alive() for taker in takers)
            if waited.is_set():
                break
        assert waited.is_set()


@pytest.mark.parametrize("waits", [True, False])
def test_what_an_interrupt_met_half_done_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    def interrupted_here(*_: object) -> None:
        raise KeyboardInterrupt

    positions, tuning = MemoryPositions(), Tuning(save_seconds=3600)
    with serve([FOLLOW]) as server, Client(server.target) as client:
        with client.bucket().changes(resume=positions, only=Only([1]), tuning=tuning) as changes:
            assert [next(changes).seqno for _ in range(4)] == [1, 2, 3, 4]
            if waits:
                monkeypatch.setattr(Queue, "get", interrupted_here)
            else:
                monkeypatch.setattr(Changes, "_receive", interrupted_here)
            with pytest.raises(KeyboardInterrupt):
                list(changes)
    assert {p: at.seqno for p, at in positions.load([1]).items()} == ({1: 4} if waits else {})


def follow_for_a_while() -> None:
    """Do what a consumer does, in the core: start, receive, acknowledge, be rolled back, store, leave."""
    session = Consumer((), lasting=True)
    session.opened(VERSION)
    session.follow({1: None, 2: None, 3: None})
    session.starts([1, 2, 3])
    session.started(1, 7, ID_A, 9, None, LOG)
    session.started(2, 8, ID_A, 9, None, LOG)
    session.refused(3, True)
    delivery = session.frame([run_block(1, 0, 4)], np.array([7]))
    assert delivery is not None
    session.acknowledge(delivery)
    session.positions(session.take_changed())
    session.disconnected()
    session.starts([1])
    assert session.rollback(
        1, RollbackAnswer(3, ID_B, "RULE", "words", FailoverLog.from_pairs([(ID_A, 0), (ID_B, 3)]))
    )
    session.undone(1)
    session.ended([(2, 8, None)], "BUCKET_DROPPED")
    session.unfollow([1])
    session.finish([3])


@pytest.mark.parametrize("where", ["begun", "returned"])
def test_no_lease_is_renewed_behind_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What renews it while the application has its time ends with the call at the latest."""
    made: list[Background] = []

    def begin(*arguments: Any) -> Background:
        made.append(Background(*arguments))
        if where == "begun":
            raise KeyboardInterrupt
        return made[0]

    def interrupted_here(_: Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("upr_client._sync.changes.Background", begin)
    if where == "returned":
        monkeypatch.setattr("upr_client._sync.changes.Event.set", interrupted_here)
    with Client("127.0.0.1:1") as client:
        changes = client.bucket().changes(resume=Group("g"))
        changes._follow = cast(Any, object())
        with pytest.raises(KeyboardInterrupt):
            changes._call(int)
        monkeypatch.undo()
        changes._follow = None
    wait_until(lambda: made[0].has_ended, "the end of what renews", 10)


def test_an_interrupt_is_lost_nowhere_in_a_session() -> None:
    """Not in a callback of the interpreter or of numpy either, which nothing can be raised out of."""
    step = 0
    while interrupted(follow_for_a_while, step, of="call"):
        step += 1
    assert step > 100
