"""The calls of a replica without a network: when it stops to be in step, and what it does after an error."""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engine.test_replication import entry
from tests.harness import pass_turns, until
from tests.replica.members import never
from tests.storage.closed import Closed
from upr.config import ServerConfig
from upr.engine.partitions import DEAD
from upr.engine.recovery import Undo
from upr.replica import replication
from upr.replica.inventory import held_of
from upr.replica.links import Links
from upr.replica.replication import Replication
from upr.replica.upstream_stream import UndoNeededError, UpstreamStream
from upr.replica.upstream_tables import take_tables
from upr.service.buckets.bucket_service import BucketService
from upr.service.replica_tables import TableFeed
from upr.service.storage_trouble import Failing
from upr_protocol.block import POSITION
from upr_protocol.errors import (
    PermissionDeniedError,
    StorageFailedError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.limits import PARTITIONS
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

ME = wire.Open(directory="d", replica_set="s", address="a")
OPENED = wire.FollowResponse(opened=wire.Opened(credit_bytes=1000, heartbeat_seconds=1000))


def started(token: int) -> wire.FollowResponse:
    """Return that the stream of partition 3 begins."""
    record = types.FailoverRecord(failover_id=9, seqno=0, epoch=1)
    told = wire.Started(token=token, failover_id=9, high_seqno=5, epoch=1, failover_log=[record])
    answer = wire.StartAnswer(partition=3, started=told)
    return wire.FollowResponse(start_answers=wire.StartAnswers(answers=[answer]))


class Upstream:
    """A stub of an upstream that says some messages and is gone then."""

    def __init__(self, *messages: wire.FollowResponse) -> None:
        self._messages = list(messages)
        self.said: list[wire.FollowRequest] = []

    def Follow(self) -> "Upstream":
        return self

    async def write(self, message: wire.FollowRequest) -> None:
        self.said.append(message)

    async def read(self) -> wire.FollowResponse:
        if not self._messages:
            raise UnavailableError("gone")
        return self._messages.pop(0)

    def cancel(self) -> None: ...


@pytest.fixture
def host(tmp_path: Path) -> Iterator[BucketService]:
    closed = Closed(tmp_path / "data")
    host = BucketService(closed.bucket, ServerConfig(data=closed.path), replica=True)
    yield host
    host.disk.store.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("answers", [False, True])
async def test_a_new_call_is_in_step_when_the_tables_were_told_in_it(
    host: BucketService, answers: bool
) -> None:
    assert host.upstream_state is not None
    host.upstream_state.tables = True
    upstream = Upstream(OPENED) if answers else Upstream()
    with pytest.raises(UnavailableError):
        await UpstreamStream(host, upstream, ME).run()
    # While nobody answers it has what it had. Else it does not after a crash either.
    assert host.upstream_state.in_step == (not answers)
    assert (host.disk.store.joining() is not None) == answers


@pytest.mark.asyncio
async def test_of_parts_those_that_are_dead_here_are_not_asked_for(host: BucketService) -> None:
    host.bucket.partitions.state[5] = DEAD
    upstream = Upstream(OPENED)
    with pytest.raises(UnavailableError):
        await UpstreamStream(host, upstream, ME, {5: 0, 6: 0}).run()
    (start,) = [message.start for message in upstream.said if message.HasField("start")]
    assert [one.partition for one in start.partitions] == [6]


@pytest.mark.asyncio
async def test_with_the_answer_to_a_heartbeat_all_credit_goes_back(host: BucketService) -> None:
    """The upstream knows by that what is not on its way any more, and what silence means."""
    frame = wire.FollowResponse(frame=wire.Frame(credit_bytes=100))
    beat = wire.FollowResponse(heartbeat=wire.Heartbeat())
    upstream = Upstream(OPENED, frame, beat, beat)
    with pytest.raises(UnavailableError):
        await UpstreamStream(host, upstream, ME).run()
    answers = [one for one in upstream.said if one.WhichOneof("message") in ("pong", "credit")]
    assert [one.credit.bytes for one in answers] == [0, 100, 0]


@pytest.mark.asyncio
async def test_a_lag_is_as_old_as_what_is_missing_however_seldom_it_is_asked_for(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under steady writing something is on its way whenever somebody asks, and all that was named before has come."""
    assert host.upstream_state is not None
    upstream_state, table, now = host.upstream_state, host.bucket.partitions, 1e6
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("upr.service.buckets.upstream_state.time", clock)
    stream, upstream_state.connected = UpstreamStream(host, Upstream(), ME), True

    async def named(seqno: int) -> None:
        told = np.array([(5, seqno)], POSITION).tobytes()
        await stream._take(wire.FollowResponse(heartbeat=wire.Heartbeat(high_seqnos=told)))

    for seqno in range(1, 100):
        await named(seqno)
        now += 1.0
        table.durable[5] = seqno
    await named(100)
    now += 0.25
    assert (upstream_state.lag(), upstream_state.lag_seconds()) == (1, 0.25)
    await named(101)
    now += 60.0
    assert (upstream_state.lag(), upstream_state.lag_seconds()) == (2, 60.25)


@pytest.mark.asyncio
async def test_a_join_is_complete_when_what_the_tables_name_is_here(host: BucketService) -> None:
    assert host.upstream_state is not None
    upstream_state, table = host.upstream_state, host.bucket.partitions
    stream = UpstreamStream(host, Upstream(), ME)
    await host.upstream_state.set_joining(True)
    row = wire.ConsumerRow(
        consumer="c", partition=5, failover_id=int(table.newest_id[5]), seqno=3, time=1
    )
    acknowledging = asyncio.create_task(stream._acknowledge())
    await take_tables(host, wire.Tables(consumers=[row], complete=True))
    assert host.disk.store.joining() is not None
    table.durable[5] = 3
    host.disk.changed()
    while upstream_state.joining is not False:
        await host.disk.next_change()
    assert host.disk.store.joining() is None
    # The upstream reads from its store again, and those rows come without numbers.
    await take_tables(host, wire.Tables(begins=True))
    assert upstream_state.joining
    assert host.disk.store.joining() is not None
    acknowledging.cancel()


@pytest.mark.asyncio
async def test_what_was_whole_when_a_join_began_is_all_that_is_relied_on_also_after_a_restart(
    tmp_path: Path,
) -> None:
    closed = Closed(tmp_path / "data")

    async def opened() -> BucketService:
        host = BucketService(closed.bucket, ServerConfig(data=closed.path), replica=True)
        host.start(anything)
        return host

    async def anything() -> None: ...

    def marked(host: BucketService) -> tuple[int, int]:
        return tuple(int(held_of(host, as_copy=one)["marker"][3]) for one in (True, False))  # type: ignore[return-value]

    host = await opened()
    logs = {3: FailoverLog((FailoverRecord(9, 0, 1),))}
    await host.adopt(logs, {3: 1})
    for one in [entry((3, 0, 2, 2)), entry((3, 2, 5, 5))]:
        await host.receive(one.block(), one.data, [])
        if not host.upstream_state.joining:  # type: ignore[union-attr]
            await host.journalled(host.bucket.tail.end - 1)
            assert marked(host) == (2, 2)
            await host.upstream_state.set_joining(True)  # type: ignore[union-attr]
    await host.journalled(host.bucket.tail.end - 1)
    assert marked(host) == (2, 5)
    while host.bucket.tail.first < host.bucket.tail.end:
        await host.flusher.flush(wanted=True)
    await host.close()
    host = await opened()
    assert marked(host) == (2, 5)
    # It can give that state, and nothing above.
    assert [head.end for head in host.disk.store.heads(3)] == [2, 5]
    assert host.upstream_state is not None
    await host.upstream_state.set_joining(False)
    assert (marked(host), host.bucket.cuts.pinned(3)) == ((5, 5), ())
    await host.close()


def test_what_went_of_what_was_whole_is_of_the_join_when_it_comes_again(tmp_path: Path) -> None:
    """It was undone, or was not durable."""
    closed = Closed(tmp_path / "data")
    store = closed.store()
    store.put_joining(np.full(PARTITIONS, 5, np.uint64))
    store.close()
    host = BucketService(closed.bucket, ServerConfig(data=closed.path), replica=True)
    stored = host.disk.store.joining()
    assert stored is not None
    assert not stored.any()
    host.disk.store.close()


@pytest.mark.asyncio
async def test_a_call_that_ends_while_the_join_is_stored_leaves_nothing_believed(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.upstream_state is not None
    await host.upstream_state.set_joining(True)
    with monkeypatch.context() as patched:
        entered = asyncio.Event()
        run = host.disk.in_store_thread

        async def slow(call: Callable[[], None]) -> None:
            await run(call)
            entered.set()
            await asyncio.Event().wait()

        patched.setattr(host.disk, "in_store_thread", slow)
        ending = asyncio.create_task(host.upstream_state.set_joining(False))
        await entered.wait()
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
    assert host.disk.store.joining() is None
    # The join had come to its end, and what it kept beside is gone: the next one begins with all that is here.
    host.bucket.partitions.complete[3] = 5
    await host.upstream_state.set_joining(True)
    stored = host.disk.store.joining()
    assert stored is not None
    assert stored[3] == host.upstream_state.whole[3] == 5


@pytest.mark.asyncio
async def test_a_bucket_that_could_not_be_opened_anew_says_so_and_is_tried_again(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, asked = [], asyncio.Event()

    async def run(_: UpstreamStream) -> None:
        calls.append(host.upstream_state.problem if host.upstream_state else None)
        if len(calls) == 2:
            asked.set()
            await asyncio.Event().wait()
        raise UndoNeededError({})

    async def reopen(*_: Any) -> BucketService:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(UpstreamStream, "run", run)
    monkeypatch.setattr(replication, "delay", lambda *_, **__: 0)
    catalog: Any = SimpleNamespace(
        directory_id="d", incarnation="i", replica_set="s", reopen=reopen
    )
    upstream_state = Replication(catalog, ["127.0.0.1:1"], True, lambda: "a", Links())
    task = asyncio.create_task(upstream_state._receive(host, "127.0.0.1:1", Upstream()))
    done, _ = await asyncio.wait(
        {task, waiting := asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED
    )
    assert done == {waiting}
    task.cancel()
    assert calls[0] is None
    assert "no room" in str(calls[1])


@pytest.mark.asyncio
async def test_a_change_that_could_not_be_read_is_told_later(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[wire.FollowResponse] = []

    async def drained() -> None: ...

    follower: Any = SimpleNamespace(reads=1, is_past_store=True)
    feed = TableFeed(host, follower, said.append, drained, lambda: None)

    async def work() -> None:
        told = feed.next_work()
        assert told is not None
        await told

    def failing(*_: Any) -> None:
        raise OSError("not now")

    await work()
    assert said.pop().tables.complete
    for tell in host.on_consumers:
        tell({(b"reader", 5)})
    with monkeypatch.context() as patched:
        patched.setattr(host.disk.store, "consumer_rows", failing)
        await work()
    assert said == []
    await work()
    assert [(c.consumer, c.partition) for m in said for c in m.tables.consumers] == [("reader", 5)]
    feed.close()


class Listening(Upstream):
    """An upstream that says some messages when it is asked to, and notes what it is told."""

    def __init__(self, *messages: wire.FollowResponse) -> None:
        super().__init__(*messages)
        self.told: list[wire.FollowRequest] = []
        self._more = asyncio.Event()

    def say(self, *messages: wire.FollowResponse) -> None:
        self._messages += messages
        self._more.set()

    async def write(self, message: wire.FollowRequest) -> None:
        self.told.append(message)

    async def read(self) -> wire.FollowResponse:
        while not self._messages:
            self._more.clear()
            await self._more.wait()
        return await super().read()


@pytest.mark.asyncio
async def test_what_is_acknowledged_is_a_complete_marker(host: BucketService) -> None:
    async def failed() -> None: ...

    host.start(failed)
    # Two rows, and then a part of three more.
    entries = [entry((3, 0, 2, 2)), entry((3, 2, 3, 5))]
    frame = wire.Frame(
        blocks=[types.Block.FromString(one.data) for one in entries],
        tokens=np.array([7, 7], "<u4").tobytes(),
    )
    upstream = Listening(OPENED, started(7), wire.FollowResponse(frame=frame))
    # One partition is followed.
    host.bucket.partitions.state[np.arange(PARTITIONS) != 3] = DEAD
    stream = UpstreamStream(host, upstream, ME)
    assert host.bucket.may_undo
    task = asyncio.create_task(stream.run())

    def acknowledged(*, joining: bool = False) -> list[tuple[int, int]]:
        acks = [one.ack for one in upstream.told if one.HasField("ack")]
        told = [one.positions for one in acks if one.joining == joining]
        return [(int(p), int(s)) for ack in told for p, s in np.frombuffer(ack, POSITION)]

    await until(lambda: host.bucket.partitions.durable[3] >= 3)
    await pass_turns()
    # It is not in step: what it has is no copy to rely on, and holds up purging.
    assert (acknowledged(), acknowledged(joining=True)) == ([], [(3, 2)])
    upstream.say(wire.FollowResponse(tables=wire.Tables(complete=True)))
    await until(acknowledged)
    assert acknowledged() == [(3, 2)]
    # Nothing is to be undone, so that it flushes as everybody.
    assert not host.bucket.may_undo
    # The upstream became active: it has forgotten that.
    ended = wire.Ended(
        streams=[wire.EndedStream(partition=3, token=7)],
        problem=types.Problem(reason="HISTORY_CHANGED", retriable=True),
    )
    upstream.say(wire.FollowResponse(ended=ended), started(8))
    await pass_turns()
    assert acknowledged() == [(3, 2), (3, 2)]
    assert sum(one.HasField("start") for one in upstream.told) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert host.bucket.may_undo
    await host.close()


@pytest.mark.asyncio
async def test_a_server_that_cannot_store_asks_less_and_less_often_and_says_so_once(
    host: BucketService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[tuple[int, bool]] = []
    block = types.Block.FromString(entry((3, 0, 2, 2)).data)
    frame = wire.Frame(blocks=[block], tokens=np.array([7], "<u4").tobytes())

    class Gives(Upstream):
        def Follow(self) -> Upstream:
            return Upstream(OPENED, started(7), wire.FollowResponse(frame=frame))

    def delay(tries: int, *_: Any, away: bool) -> float:
        pauses.append((tries, away))
        if len(pauses) == 4:
            host.disk.troubles.ends(Failing.JOURNAL)
        return 0 if len(pauses) < 7 else 1000

    async def received(*_: Any) -> None:
        if Failing.JOURNAL in host.disk.troubles:
            raise host.disk.troubles.problem_of(Failing.JOURNAL)

    monkeypatch.setattr(replication, "delay", delay)
    monkeypatch.setattr(host, "receive", received)
    catalog: Any = SimpleNamespace(directory_id="d", incarnation="i", replica_set="s")
    upstream_state = Replication(catalog, ["127.0.0.1:1"], True, lambda: "a", Links())
    caplog.set_level(logging.INFO, "upr.replica")
    host.disk.troubles.begins(Failing.JOURNAL, OSError(errno.EIO, "broken"))
    task = asyncio.create_task(upstream_state._receive(host, "127.0.0.1:1", Gives()))
    await until(lambda: len(pauses) >= 7)
    task.cancel()
    # From the fifth on it is the upstream that ends each call, behind a block.
    assert pauses == [(0, False), (1, False), (2, False), (3, False), *[(0, True)] * 3]
    words = [one.message for one in caplog.records if one.name == replication.__name__]
    ended, again = "a call to the upstream ended", "the upstream is followed again"
    assert words[:3] == [ended, again, ended]
    assert host.upstream_state is not None
    assert "gone" in str(host.upstream_state.problem)


@pytest.mark.asyncio
async def test_who_follows_nobody_while_its_disk_hangs_is_back_soon(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    aways: list[bool] = []

    def delay(*_: Any, away: bool) -> float:
        aways.append(away)
        return 0 if len(aways) < 4 else 1000

    monkeypatch.setattr(replication, "delay", delay)
    catalog: Any = SimpleNamespace(directory_id="d", incarnation="i", replica_set="s")
    following = Replication(catalog, ["127.0.0.1:1"], True, lambda: "a", Links())
    host.bucket.hangs = StorageFailedError("a write has not ended")
    upstream = Upstream(OPENED)
    task = asyncio.create_task(
        following._receive(host, "127.0.0.1:1", SimpleNamespace(Follow=lambda: upstream))
    )
    await until(lambda: len(aways) >= 4)
    task.cancel()
    assert aways == [True] * 4
    assert host.upstream_state is not None
    assert host.upstream_state.problem is host.bucket.hangs


@pytest.mark.asyncio
async def test_calls_that_another_one_ends_pause_longer_and_longer(
    host: BucketService, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    ended = wire.Ended(problem=types.Problem(reason="SUPERSEDED"))

    class Supersedes(Upstream):
        def Follow(self) -> Upstream:
            return Upstream(OPENED, started(7), wire.FollowResponse(ended=ended))

    def delay(count: int, *_: Any, away: bool) -> float:
        tries.append(count)
        return 0 if len(tries) < 4 else 1000

    monkeypatch.setattr(replication, "delay", delay)
    catalog: Any = SimpleNamespace(directory_id="d", incarnation="i", replica_set="s")
    upstream_state = Replication(catalog, ["127.0.0.1:1"], True, lambda: "a", Links())
    task = asyncio.create_task(upstream_state._receive(host, "127.0.0.1:1", Supersedes()))
    await until(lambda: len(tries) >= 4)
    task.cancel()
    # Each of them was followed for a moment.
    assert tries == [1, 2, 3, 4]


class Channel:
    """A channel to an upstream whose lists are ``answers``, one after the other."""

    def __init__(self, answers: "list[Answer]") -> None:
        self._answers = answers

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def stream_stream(self, *_: Any, **__: Any) -> None: ...

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        async def ask(*_: Any, **__: Any) -> admin.ListBucketsResponse:
            answer = self._answers.pop(0) or UnavailableError("gone")
            if isinstance(answer, UprError):
                raise answer
            return answer

        return ask


Answer = admin.ListBucketsResponse | UprError | None


def replicating(directory: str, *answers: Answer, upstreams: int = 1) -> Replication:
    """Return the replication of a server without a bucket, whose upstreams answer in turn."""
    identity = {"directory_id": "d", "incarnation": "i", "replica_set": "s"}
    catalog: Any = SimpleNamespace(**identity, hosts=[], listed=frozenset(), gone=[])
    channel = Channel(list(answers))
    links: Any = SimpleNamespace(open=lambda _: channel)
    addresses = [f"127.0.0.1:{1 + n}" for n in range(upstreams)]
    return Replication(catalog, addresses, True, lambda: "a", links, directory)


@pytest.mark.asyncio
async def test_an_upstream_that_was_followed_is_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = admin.ListBucketsResponse(replica_set="s", directory="e")
    upstream_state = replicating("", None, None, there, None, None)
    monkeypatch.setattr(replication, "LIST_SECONDS", 0)
    tries: list[int] = []

    def delay(failures: int, *_: Any, **__: Any) -> float:
        tries.append(failures)
        return 0

    monkeypatch.setattr(replication, "delay", delay)
    with pytest.raises(IndexError):
        await upstream_state.run()
    assert tries == [1, 2, 0, 1]


@pytest.mark.asyncio
async def test_why_no_upstream_is_followed_is_said_once_for_each_and_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, replication.__name__)
    there = admin.ListBucketsResponse(replica_set="s", directory="e")
    # gRPC tells the same trouble in several words, in turns.
    failing = [UnavailableError(words) for words in ("gone", "no answer") * 4]
    refused = PermissionDeniedError("who are you")
    one = replicating("", *failing, refused, None, there, there, None, refused, upstreams=2)
    monkeypatch.setattr(replication, "LIST_SECONDS", 0)
    problems: list[UprError | None] = []

    def delay(*_: Any, **__: Any) -> float:
        problems.append(one.problem)
        return 0

    monkeypatch.setattr(replication, "delay", delay)
    match = one._match

    async def matched(answer: admin.ListBucketsResponse) -> None:
        await match(answer)
        problems.append(one.problem)

    monkeypatch.setattr(one, "_match", matched)
    with pytest.raises(IndexError):
        await one.run()
    first, second = "127.0.0.1:1", "127.0.0.1:2"
    told = [(r.message, r.upstream, getattr(r, "error", "")) for r in caplog.records]  # type: ignore[attr-defined]
    fails = "the upstream cannot be followed"
    assert told == [
        (fails, first, "gone"),
        (fails, second, "no answer"),
        (fails, first, "who are you"),
        ("the upstream is followed", first, ""),
        (fails, first, "gone"),
        (fails, second, "who are you"),
    ]
    assert problems[:8] == failing
    # The last list but one was asked for while it was followed.
    assert [one and str(one) for one in problems[8:12]] == ["who are you", "gone", "gone", None]


@pytest.mark.asyncio
async def test_nothing_is_kept_of_buckets_that_are_gone() -> None:
    async def end() -> None: ...

    one = replicating("")
    for version in (1, 2, 3):
        one._calls[version] = asyncio.create_task(end())
        one._failures[version], one._troubles[version] = "no", replication._Trouble()
    # One that could never be made here has no call, nor has one that another upstream had.
    one._failures[4], one._troubles[5] = "no", replication._Trouble()
    await asyncio.gather(*one._calls.values())
    # The call of one that is gone may not have ended yet.
    one._calls[3] = asyncio.create_task(never())
    there = [admin.BucketInfo(version=1, problem=types.Problem(reason="DATA_DAMAGED"))]
    answer = admin.ListBucketsResponse(replica_set="s", directory="e", buckets=there)
    await one._match(answer)
    assert [{*one._calls}, {*one._troubles}] == [{1, 3}, {1, 3}]
    one._calls[3].cancel()
    await asyncio.wait({one._calls[3]})
    await one._match(answer)
    assert [{*one._calls}, {*one._troubles}] == [{1}, {1}]
    assert one._failures.keys() <= {1}


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [(False, False), (False, True)])
async def test_what_is_only_received_anew_is_not_said_to_be_undone(
    lost: tuple[bool, ...], caplog: pytest.LogCaptureFixture
) -> None:
    one = replicating("")

    async def reopen(*_: Any) -> None: ...

    one._catalog.reopen = reopen  # type: ignore[method-assign, assignment]
    log = FailoverLog((FailoverRecord(9, 0),))
    undo = {partition: Undo(0, log, 1, lost=gone) for partition, gone in enumerate(lost)}
    host: Any = SimpleNamespace(bucket=SimpleNamespace(identity=SimpleNamespace(name="default")))
    await one._undo(host, undo, is_news=True)
    (told,) = caplog.records
    assert (told.partitions, told.undone) == (2, sum(lost))  # type: ignore[attr-defined]


def test_a_server_that_has_the_address_of_another_is_not_followed_for_it() -> None:
    there = admin.ListBucketsResponse(replica_set="s", directory="e")
    replicating("e")._check(there)
    replicating("")._check(there)
    with pytest.raises(UprError, match="has directory 'e'; must be f") as refused:
        replicating("f")._check(there)
    assert "upr-admin topology" in refused.value.hint


def test_an_upstream_that_names_no_set_may_lack_a_role_of_the_token() -> None:
    with pytest.raises(UprError, match="names no set of servers") as refused:
        replicating("")._check(admin.ListBucketsResponse(directory="e"))
    assert "role replicate" in refused.value.hint
