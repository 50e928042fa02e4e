"""The server's side of the simulated network: the service's own conversation, driven by steps instead of tasks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.network import Connection
from tests.simulation.recording import Recorder
from upr.engine.streams import (
    Answer,
    FollowOptions,
    FrameOut,
    PlainStarts,
    Refused,
    RolledBack,
    Started,
    StartRequest,
)
from upr.service.buckets.keepers import micros
from upr.service.change_stream import hello_answer
from upr.service.conversation import Conversation, Outgoing
from upr.storage.read import ReadResult, Showing, read_blocks
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.wire.codec import decode_block
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

if TYPE_CHECKING:
    from tests.simulation.networked import NetworkedWorld
    from tests.simulation.session import SimulatedClient

HALF_CLOSE_SECONDS = 5.0
UNSENT_MAX = 3
"""Messages that the transport takes before a write to it waits."""


class Sent:
    """What is noted about a frame: how many restarts came before it, and what keys-only rows leave out."""

    def __init__(self, restarts: int, values: dict[tuple[int, int], bytes | None]) -> None:
        self.restarts = restarts
        self.values = values


class ServedCall:
    """One Follow call at the server, which may have a client that is gone.

    Attributes:
        talk: None before the Open.
        options: what its Open asked for.
    """

    def __init__(self, world: "NetworkedWorld", connection: Connection) -> None:
        self.world = world
        self.connection = connection
        self.talk: Conversation | None = None
        self.client: SimulatedClient | None = None
        self._read: list[ReadResult] | None = None
        self._half_closed = False
        self._said_end_at: float | None = None
        self.options = FollowOptions()
        self._interval = 0.0

    @property
    def recorder(self) -> Recorder:
        return self.world.recorder

    def heard_by_client(self) -> bool:
        """Whether the client still uses this call."""
        return self.client is not None and self.client.connection is self.connection

    def step(self) -> None:
        """Take what arrived, and send one message."""
        now = self.world.network.now
        if self.connection.server_knows():
            self.close()
            return
        for _ in range(self.world.rng.randint(1, 3)):
            parcel = self.connection.to_server.take(now)
            if parcel is None:
                break
            self._take(parcel.data, now)
        if self.talk is None:
            return
        before = self.talk.ending
        if self.talk.check_heard(now) and before is None:
            self.world.count("SILENT calls")
            # The streams are over at once; the call is closed later.
            self.told_over()
            assert self.connection.harmed or self._interval < 2, "a client that is there is silent"
        since = self._said_end_at
        if self._half_closed or (since is not None and now >= since + HALF_CLOSE_SECONDS):
            self.connection.send_to_client(None)
            self.close()
            return
        if len(self.connection.to_client) >= UNSENT_MAX:
            return
        outstanding = self.talk.follower.credit.outstanding
        saying = self.talk.next_message(now)
        if saying is None:
            assert not self.talk.over or since is not None, "the call is over and nobody was told"
            self._step_read()
        else:
            self._send(saying, outstanding, now)

    def close(self) -> None:
        """Have the server forget the call."""
        self.connection.server_open = False
        self.connection.to_server.lose()
        if self.talk is not None:
            self.talk.close(self.world.network.now, left=self._half_closed)
            self.told_over()
        self.world.calls.remove(self)

    def told_over(self) -> None:
        """Note that the server holds nothing for the streams of the call any more."""
        if self.heard_by_client():
            assert self.client is not None
            self.recorder.add("call_ended", reader=self.client.name)

    # What the client says

    def _take(self, data: bytes | None, now: float) -> None:
        if data is None:
            self._half_closed = True
            return
        request = wire.FollowRequest.FromString(data)
        if self.talk is None:
            self._open(request.open, now)
            return
        self.talk.take(request, now, self.world.now)

    def _open(self, opening: wire.Open, now: float) -> None:
        world = self.world
        try:
            world.catalog.of(opening)
        except UprError as error:
            self.connection.send_to_client(None, error)
            self.close()
            return
        known = opening.bucket_version if opening.HasField("bucket_version") else None
        assert known in (None, world.bucket.identity.version), "opened with another version"
        self.options = FollowOptions(
            opening.consumer,
            opening.stability == types.STABILITY_MEMORY,
            opening.keys_only,
            accept_zstd=False,
            member=opening.member,
            lease=micros(opening.lease_seconds),
        )
        self._interval = opening.heartbeat_seconds
        credit = CreditWindow(opening.credit_bytes)
        liveness = Liveness(opening.heartbeat_seconds, now)
        self.client = world.client_of(self.connection)
        older = [
            call
            for call in world.calls
            if call is not self and call.talk is not None and opening.consumer
            if (call.options.consumer, call.options.member) == (opening.consumer, opening.member)
        ]
        self.talk = Conversation(
            world.bucket, self.options, credit, liveness, wake=lambda: None, now=now
        )
        for call in older:
            assert call.talk is not None
            assert call.talk.ending, f"two calls of {opening.consumer}, and the older one goes on"
            if not call.heard_by_client():
                world.count("superseded ghosts")
            call.told_over()
        decide = self.talk.follower.start

        def start(requests: Sequence[StartRequest]) -> list[Answer]:
            answers = decide(requests)
            for request, answer in zip(requests, answers, strict=True):
                self._decided(request, answer)
            return answers

        decide_plain = self.talk.follower.start_plain

        def start_plain(asked: PlainStarts) -> tuple[Any, list[StartRequest]]:
            opened, others = decide_plain(asked)
            told = {int(record["partition"]): record for record in opened}
            for request in asked.requests(np.ones(len(asked.partitions), bool)):
                if request.partition in told:
                    self._decided(request, _started(told[request.partition], asked.until_now))
            if told:
                world.count("plain starts")
            return opened, others

        self.talk.follower.start = start  # type: ignore[method-assign]
        self.talk.follower.start_plain = start_plain  # type: ignore[method-assign]
        opened = wire.Opened(
            server_id=1 + world.restarts,
            bucket_version=world.bucket.identity.version,
            credit_bytes=credit.window,
            heartbeat_seconds=opening.heartbeat_seconds,
            generation=self.talk.follower.generation,
            lease_seconds=opening.lease_seconds,
        )
        world.call_opened(self)
        self.talk.say(wire.FollowResponse(opened=opened))

    def _decided(self, request: StartRequest, answer: Answer) -> None:
        """Compare the answer to a Start with the model, also one that nobody will hear."""
        p = request.partition
        if p not in self.world.model:
            return
        expected = self.world.model[p].start(request.failover_id, request.seqno, request.data_id)
        told: tuple[str, int | None] = ("started", None)
        if isinstance(answer, RolledBack):
            told = "rollback", answer.answer.rollback_seqno
            self.world.count("rollbacks told")
        if isinstance(answer, Refused):
            expected_reason = "NOT_OWNER" if self.options.member else "SNAPSHOT_GONE"
            assert answer.error.reason == expected_reason, answer.error
        else:
            assert told == expected, (told, expected, request)
        if self.heard_by_client():
            assert self.client is not None
            self.client.unheard.add(p)
            self.recorder.start(self.client.name, request, answer, self.world.bucket, remote=True)
        if isinstance(answer, Started):
            self.world.count("started over the network")

    # What the server says

    def _send(self, saying: Outgoing, outstanding: int, now: float) -> None:
        assert self.talk is not None
        message = saying.message
        if isinstance(message, bytes):
            data = message
        else:
            self.world.said(self, message)
            data = message.SerializeToString()
        note = None
        if saying.frame is not None:
            note = self._note(saying.frame, outstanding)
        self.connection.send_to_client(data, note)
        if self.talk.over and self._said_end_at is None:
            self._said_end_at = now

    def _note(self, frame: FrameOut, outstanding: int) -> Sent:
        assert self.talk is not None
        credit = self.talk.follower.credit
        reached: dict[int, int] = {}
        values: dict[tuple[int, int], bytes | None] = {}
        for data in frame.blocks:
            for run in decode_block(data).runs:
                p, end = int(run["partition"]), int(run["end_seqno"])
                reached[p] = end
                if self.options.keys_only:
                    for row in self.world.model[p].rows[int(run["start_seqno"]) : end]:
                        values[p, row.seqno] = row.value
        fields = {"reached": reached} if self.heard_by_client() else {}
        self.recorder.add(
            "frame",
            reader=self.client.name if self.client else "nobody",
            window=credit.window,
            outstanding=outstanding,
            bytes=sum(map(len, frame.blocks)),
            **fields,
        )
        assert credit.outstanding >= 0
        self.world.count("frames over the network")
        return Sent(self.world.restarts, values)

    def _step_read(self) -> None:
        assert self.talk is not None
        follower = self.talk.follower
        if self._read is not None:
            # What was read may be old by the time it arrives.
            if self.world.rng.random() < 0.7:
                follower.feed(self._read)
                self._read = None
        elif (wanted := follower.next_read()) is not None:
            showing = Showing(self.options.keys_only)
            self._read = read_blocks(self.world.store, *wanted, showing=showing)


def ask_hello(
    world: "NetworkedWorld", reader: str, partition: int, failover_id: int | None
) -> None:
    """Ask the server step 1 of the handshake, as the wire has it, and record the answer."""
    if not world.hosts:
        return
    asked = wire.HelloPartition(partition=partition, failover_id=failover_id)
    asked = wire.HelloPartition.FromString(asked.SerializeToString())
    encoded = hello_answer(world.bucket, asked, with_log=True).SerializeToString()
    answer = wire.HelloAnswer.FromString(encoded)
    rolled = answer.HasField("rollback_seqno")
    expected = world.model[partition].hello(failover_id)
    seqno = answer.rollback_seqno if rolled else None
    assert ("rollback" if rolled else "ok", seqno, answer.failover_id) == expected
    assert [(r.failover_id, r.seqno) for r in answer.failover_log] == world.model[partition].log
    world.recorder.add(
        "hello",
        reader=reader,
        partition=partition,
        id=failover_id,
        answer="rollback" if rolled else "ok",
        seqno=seqno,
        newest=answer.failover_id,
    )
    world.count("hellos")


def _started(record: Any, until_now: bool) -> Started:
    """What a record of dtype STARTED says."""
    failover_id, high = int(record["failover_id"]), int(record["high_seqno"])
    return Started(
        int(record["partition"]),
        int(record["token"]),
        failover_id,
        high,
        int(record["purge_seqno"]),
        high if until_now else None,
        FailoverLog.born(failover_id) if record["born"] else None,
    )
