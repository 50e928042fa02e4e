"""The Follow call of a replica for one bucket: what the upstream sends becomes durable here, under its numbers.

A history that must be undone cannot be undone in a living tail: the call ends with UndoNeededError, and the bucket is opened
anew.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from upr.engine.compaction import raise_purges
from upr.engine.partitions import DEAD, PENDING, REPLICA
from upr.engine.recovery import Undo
from upr.engine.streams import HISTORY_CHANGED
from upr.engine.tail import TailEntry
from upr.replica.links import next_message
from upr.replica.upstream_tables import take_tables
from upr.service.buckets.bucket_service import BucketService
from upr.storage.journal import NumberedWrite
from upr_protocol.block import POSITION, Block
from upr_protocol.errors import ProtocolError, UnavailableError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.flow import CreditReturn
from upr_protocol.handshake import RollbackAnswer, Rule, boundary_of
from upr_protocol.limits import MESSAGE_SECONDS, PARTITIONS, SILENT_INTERVALS
from upr_protocol.position import Position
from upr_protocol.wire.codec import encode_block, joined_blocks, log_from_messages, producer_writes
from upr_protocol.wire.compression import zstd_available
from upr_protocol.wire.grpc import error_from_call, error_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

HEARTBEAT_SECONDS = 1.0
"""Interval of heartbeats: what was refused is started again so often. That an upstream is gone is seen by who lists its
buckets (``replication``), sooner than by its silence."""
_NO_TOKEN = -1


class UndoNeededError(Exception):
    """The upstream has another history: partitions must undo a part of theirs first."""

    def __init__(self, undo: Mapping[int, Undo]) -> None:
        super().__init__(f"{len(undo)} partitions must undo a part of their history")
        self.undo = undo


class UpstreamStream:
    """One Follow call, from its Open to its end.

    Args:
        stub: ChangeStreamServiceStub of the upstream.
        introduction: what a replica says of itself: directory, set, address, and by its kind whether it is to be registered.
        only: the partitions that are followed, and the marker that is wanted of each: what is above it there may lack
            what the small tables say of it. None for all that the upstream has.
        on_followed: called when the upstream is followed: it answered, and what comes can be stored here.
    """

    def __init__(
        self,
        host: BucketService,
        stub: Any,
        introduction: wire.Open,
        only: Mapping[int, int] | None = None,
        on_followed: Callable[[], None] = lambda: None,
    ) -> None:
        self._only = only
        self._on_followed = on_followed
        self._followed = False
        assert host.upstream_state is not None
        self._host = host
        self._bucket = host.bucket
        self._table = host.bucket.partitions
        self._upstream_state = host.upstream_state
        self._introduction = introduction
        self._call = stub.Follow()
        self._writing = asyncio.Lock()
        self._token = np.full(PARTITIONS, _NO_TOKEN, np.int64)
        self._again: set[int] = set()
        self._unanswered: set[int] = set()
        self._acknowledged = np.zeros(PARTITIONS, np.uint64)
        self._returned = CreditReturn()

    async def run(self) -> None:
        """Follow until the call ends; it does not end well.

        Raises:
            UndoNeededError: partitions must undo something first.
            UprError: the upstream refused or ended the call, cannot be reached, or broke the protocol.
            OSError, lmdb.Error: something could not be stored here.
        """
        acknowledging: asyncio.Task[None] | None = None
        try:
            self._check_disk()
            opened = await self._open()
            # Stored blocks come without the numbers of their producers, until the tables are told.
            self._upstream_state.begin_tables()
            self._upstream_state.is_partial = self._only is not None
            self._upstream_state.refused.clear()
            await self._upstream_state.set_joining(True)
            self._returned = CreditReturn(opened.credit_bytes)
            silence = SILENT_INTERVALS * opened.heartbeat_seconds + MESSAGE_SECONDS
            partitions = np.flatnonzero(self._table.state != DEAD)
            chosen = (
                partitions if self._only is None else np.intersect1d(partitions, list(self._only))
            )
            self._unanswered = set(chosen.tolist())
            await self._start(chosen.tolist())
            self._upstream_state.connected = True
            acknowledging = asyncio.create_task(self._acknowledge())
            while True:
                # Who follows is counted, and the next owner would wait for its promise.
                self._check_disk()
                await self._take(await self._read(silence))
                if acknowledging.done():
                    acknowledging.result()
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            self._upstream_state.connected = False
            # Who is followed next may have another history.
            self._bucket.may_undo = True
            if acknowledging is not None:
                acknowledging.cancel()
                await asyncio.gather(acknowledging, return_exceptions=True)
            self._call.cancel()

    def _check_disk(self) -> None:
        if self._bucket.hangs is not None:
            raise self._bucket.hangs.with_traceback(None)

    async def _open(self) -> wire.Opened:
        identity = self._bucket.identity
        opening = wire.Open(
            bucket=identity.name,
            bucket_version=identity.version,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            stability=types.STABILITY_MEMORY,
            accept_zstd=zstd_available(),
        )
        opening.MergeFrom(self._introduction)
        await self._say(open=opening)
        first = await self._read(SILENT_INTERVALS * HEARTBEAT_SECONDS + MESSAGE_SECONDS)
        if first.WhichOneof("message") != "opened":
            raise ProtocolError("the upstream did not answer an Open with Opened")
        return first.opened

    async def _read(self, seconds: float) -> wire.FollowResponse:
        try:
            async with asyncio.timeout(seconds):
                message = await next_message(self._call)
        except TimeoutError:
            raise UnavailableError(f"the upstream said nothing for {seconds:g} s") from None
        assert isinstance(message, wire.FollowResponse)
        return message

    async def _say(self, **message: Any) -> None:
        # Why a call has ended is told where it is read.
        async with self._writing:
            with contextlib.suppress(asyncio.InvalidStateError):
                await self._call.write(wire.FollowRequest(**message))

    # Starting

    async def _start(self, partitions: Iterable[int]) -> None:
        requests = [self._request(partition) for partition in partitions]
        if requests:
            await self._say(start=wire.Start(partitions=requests))

    def _request(self, partition: int) -> wire.StartPartition:
        table = self._table
        high, log = int(table.high[partition]), table.logs[partition]
        request = wire.StartPartition(partition=partition, seqno=high)
        if self._only is not None and high <= self._only[partition]:
            request.until_exact = self._only[partition]
        if not high and table.state[partition] == PENDING:
            # Nothing was adopted yet: its own id was never told to anybody.
            return request
        request.failover_id, request.epoch = log.newest.failover_id, int(table.epoch[partition])
        if high:
            request.data_id, request.horizon = log.id_at(high), int(table.horizon[partition])
        return request

    async def _answered(self, answers: Sequence[wire.StartAnswer]) -> None:
        logs: dict[int, FailoverLog] = {}
        epochs: dict[int, int] = {}
        started: dict[int, wire.Started] = {}
        undo: dict[int, Undo] = {}
        again = []
        for answer in answers:
            partition = answer.partition
            if answer.HasField("refused"):
                self._again.add(partition)
                self._upstream_state.refused[partition] = error_of(answer.refused)
                continue
            self._upstream_state.refused.pop(partition, None)
            told = answer.started if answer.HasField("started") else answer.rollback
            log = log_from_messages(told.failover_log)
            if log is None:
                raise ProtocolError(f"the upstream sent no failover log of partition {partition}")
            self._check_epoch(partition, told.epoch)
            if answer.HasField("started"):
                started[partition] = answer.started
                self._upstream_state.highs[partition] = answer.started.high_seqno
            elif (one := self._undo(partition, answer.rollback, log)) is not None:
                undo[partition] = one
                continue
            else:
                again.append(partition)
            logs[partition], epochs[partition] = log, told.epoch
        await self._adopt(logs, epochs, {p: one.purge_seqno for p, one in started.items()})
        for partition, answered in started.items():
            self._token[partition] = answered.token
            # The upstream may have forgotten what was acknowledged to the stream before.
            self._acknowledged[partition] = 0
        self._host.disk.changed()
        if undo:
            raise UndoNeededError(undo)
        self._unanswered.difference_update(answer.partition for answer in answers)
        if not self._unanswered:
            self._bucket.may_undo = False
        # Of a server that cannot store anything now the first block decides.
        if self._host.serves:
            self._goes_on()
        await self._start(again)

    def _goes_on(self) -> None:
        if not self._followed:
            self._followed, self._upstream_state.problem = True, None
            self._on_followed()

    def _check_epoch(self, partition: int, epoch: int) -> None:
        own = int(self._table.epoch[partition])
        if self._table.state[partition] != PENDING and epoch < own:
            raise UprError(
                f"epoch of partition {partition} is {epoch} at the upstream; must be at least {own}, which is known here",
                hint="the upstream was replaced: give --replicate-from the server that is active now",
                reason="OLD_EPOCH",
                retriable=True,
            )

    def _undo(self, partition: int, told: wire.Rollback, log: FailoverLog) -> Undo | None:
        """Return what is to be undone after the answer "roll back"; None if nothing is."""
        table = self._table
        high, own = int(table.high[partition]), table.logs[partition]
        if not high:
            return None
        position = Position(
            self._bucket.identity.version,
            own.newest.failover_id,
            own.id_at(high),
            high,
            int(table.horizon[partition]),
            (),
            own,
        )
        answer = RollbackAnswer(told.rollback_seqno, told.failover_id, told.rule, told.words, log)
        seqno = boundary_of(position, answer)
        if max(high, int(table.horizon[partition])) <= seqno:
            return None
        return Undo(seqno, log, told.epoch, lost=told.rule != Rule.BELOW_PURGE)

    async def _adopt(
        self, logs: dict[int, FailoverLog], epochs: Mapping[int, int], purges: Mapping[int, int]
    ) -> None:
        """Store the logs, epochs and purge seqnos that are new, before anything is received under them."""
        table = self._table
        new = {
            p: log
            for p, log in logs.items()
            if table.state[p] != REPLICA
            or log != table.logs[p]
            or epochs[p] != table.epoch[p]
            or purges.get(p, 0) > table.purge[p]
        }
        if new:
            raise_purges(self._bucket, {p: purges.get(p, 0) for p in new})
            await self._host.adopt(new, epochs)

    # Messages of the upstream

    async def _take(self, message: wire.FollowResponse) -> None:
        match message.WhichOneof("message"):
            case "start_answers":
                await self._answered(message.start_answers.answers)
            case "frame":
                await self._receive(message.frame)
            case "heartbeat":
                moved = np.frombuffer(message.heartbeat.high_seqnos, POSITION)
                partitions = moved["partition"].astype(np.int64)
                self._upstream_state.named(partitions, moved["seqno"])
                await self._say(pong=wire.Pong())
                # All that came is consumed: the upstream knows by that what is not on its way any more.
                if back := self._returned.flush():
                    await self._say(credit=wire.Credit(bytes=back))
                again, self._again = sorted(self._again), set()
                await self._start(again)
            case "ended":
                self._ended(message.ended)
                if message.ended.problem.reason == HISTORY_CHANGED.reason:
                    # The upstream became active, and what it was acknowledged before counts no more.
                    again, self._again = sorted(self._again), set()
                    await self._start(again)
            case "tables":
                # Who is followed for parts may lack what the owner told here of consumers and cuts.
                await take_tables(self._host, message.tables, self._only)

    def _ended(self, ended: wire.Ended) -> None:
        if not ended.streams:
            raise error_of(ended.problem)
        for stream in ended.streams:
            if self._token[stream.partition] == stream.token:
                self._token[stream.partition] = _NO_TOKEN
                self._again.add(stream.partition)

    async def _receive(self, frame: wire.Frame) -> None:
        tokens = np.frombuffer(frame.tokens, "<u4")
        messages: Sequence[types.Block] = frame.blocks
        if frame.producer_writes or len(messages) == 1:
            # The very blocks: a write names its block by number.
            parsed = [_parsed(message) for message in messages]
            blocks, encoded = [block for block, _ in parsed], [data for _, data in parsed]
        else:
            blocks, tokens = joined_blocks(messages, tokens)
            encoded = [encode_block(block) for block in blocks]
        writes = producer_writes(frame.producer_writes, blocks)
        raised = np.frombuffer(frame.purge_seqnos, POSITION)
        if len(raised):
            purges = dict(zip(raised["partition"].tolist(), raised["seqno"].tolist(), strict=True))
            logs = {p: self._table.logs[p] for p in purges}
            epochs = {p: int(self._table.epoch[p]) for p in purges}
            await self._adopt(logs, epochs, purges)
        at = 0
        for block, data, written in zip(blocks, encoded, writes, strict=True):
            runs = block.runs
            told, at = tokens[at : at + len(runs)], at + len(runs)
            if len(told) != len(runs):
                raise ProtocolError(f"a frame has {len(tokens)} tokens, too few for its runs")
            live = self._token[runs["partition"].astype(np.int64)] == told
            if not live.any():
                continue
            numbered = [NumberedWrite(*write) for write in written]
            if not live.all():
                entry = TailEntry(runs, data, numbered, 0).only(live)
                block, data, numbered = entry.block(), entry.data, list(entry.writes)
            await self._host.receive(block, data, numbered)
            self._goes_on()
        back = self._returned.consumed(frame.credit_bytes)
        if back:
            await self._say(credit=wire.Credit(bytes=back))

    async def _acknowledge(self) -> None:
        """Acknowledge the last complete durable markers whenever they moved; store when the join is complete.

        One that is not in step is not promoted without force, so that what it has is no copy to rely on: it says so, and
        acknowledges all again when it is.
        """
        markers = self._bucket.markers
        upstream_state = self._upstream_state
        while True:
            if await upstream_state.end_join():
                self._acknowledged[:] = 0
                continue
            # Of what is followed only: an Ack above what was sent ends the call.
            moved = (markers.seqno > self._acknowledged) & (self._token != _NO_TOKEN)
            if moved.any():
                partitions = np.flatnonzero(moved)
                told = np.zeros(len(partitions), POSITION)
                told["partition"], told["seqno"] = partitions, markers.seqno[partitions]
                self._acknowledged[partitions] = markers.seqno[partitions]
                ack = wire.Ack(positions=told.tobytes(), joining=not upstream_state.in_step)
                await self._say(ack=ack)
            else:
                await self._host.disk.next_change()


def _parsed(message: types.Block) -> tuple[Block, bytes]:
    """Return a block, checked whole, and its bytes, not compressed: those that the upstream has."""
    blocks, _ = joined_blocks([message], np.zeros(0, np.uint32))
    return blocks[0], encode_block(blocks[0]) if message.zstd else message.SerializeToString()
