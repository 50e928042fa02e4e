"""A client of the simulated network: the SDK's own state machine, and an application that stores data beside positions.

``_life`` is what ``AsyncChanges`` and an application do together, as a generator that pauses wherever anything else
may happen: the process may die at each pause, and goes on with what it has stored.
"""

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tests.model import Row, State, apply
from tests.simulation.consumption import Consumption
from tests.simulation.habits import Habits
from tests.simulation.network import Connection
from tests.simulation.serving import Sent, ask_hello
from upr_client.changes.events import Change, ChangeBatch, Rollback
from upr_client.changes.groups import is_of_group
from upr_client.changes.link import MOMENT_SECONDS, CallState, Clock
from upr_client.changes.session import Following, Step
from upr_protocol.consumer import State as PartitionState
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.handshake import Pin
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position
from upr_protocol.position_table import STARTED
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

if TYPE_CHECKING:
    from tests.simulation.networked import NetworkedWorld

CONNECT_SECONDS = 10.0
_NO_END = object()
Pause = Generator[None]


class SimulatedClient:
    """One client process after another, with one place to store data and positions.

    Attributes:
        connection: of the call that it uses.
        unheard: partitions whose Start was decided, and the answer has not arrived.
        rows: its data in memory, by partition, each row with its seqno so that it can be undone.
        stored_rows, stored_positions: what survives it.
        done: every partition ended for good, exactly at a cut.
        cut: the name of that.
    """

    may_raise: ClassVar = {"SUPERSEDED", "SNAPSHOT_GONE"}
    """Reasons with which an error may come up to the application."""

    def __init__(
        self,
        world: "NetworkedWorld",
        name: str,
        habits: Habits,
        partitions: list[int],
        pins: Mapping[int, Pin] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.habits = habits
        self.partitions = partitions
        self.pins = pins
        self.connection: Connection | None = None
        self.unheard: set[int] = set()
        self.rows: dict[int, list[Row]] = {}
        self.stored_rows: dict[int, list[Row]] = {}
        self.stored_positions: dict[int, str] = {}
        self.done = False
        self.cut = ""
        self.settling = False
        self._inbox: deque[object] = deque()
        self._shares: deque[wire.FollowResponse] = deque()
        """What concerns its share of a group, which waits for nothing else."""
        self._state: CallState | None = None
        self._half_closed = self._doomed = False
        self._interval = 0.0
        self._process: Pause | None = None
        self._begin_at = 0.0
        self.following: Following
        self._consumption = Consumption(world.recorder, name, self.rows)
        self._told: dict[int, tuple[int, int]] = {}
        self._notes: dict[int, Sent] = {}

    # The process.

    def step(self) -> None:
        """Let the process do one thing; begin another one when there is none."""
        world = self.world
        if self._process is None:
            if self.done or world.network.now < self._begin_at:
                return
            self._process = self._life()
        elif not self.settling and (
            self._doomed or world.rng.random() < (0.1 if self._told else 0.004)
        ):
            self.die()
            return
        elif not self.settling and world.rng.random() < (0.05 if self._told else 0.001):
            self._close()
            return
        try:
            next(self._process)
        except StopIteration:
            self._process = None
        except UprError as error:
            self._process = None
            self._failed(error)

    def die(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        self._process.close()
        self._process = None
        self._doomed = False
        self._leave()
        self._begin_at = self.world.network.now + self.world.rng.choice([0.0, 3.0])
        self.world.count("clients died")
        if self._told:
            self.world.count("clients died undoing")

    def _close(self) -> None:
        """The application leaves the iteration: the call is dropped, what was consumed is stored."""
        assert self._process is not None
        self._process.close()
        self._process = None
        self._consumption.record()
        self._leave()
        deque(self._save(), maxlen=0)
        self._begin_at = self.world.network.now + self.world.rng.random() * 5
        self.world.count("clients closed")

    def _failed(self, error: UprError) -> None:
        """An error came up to the application."""
        self._leave()
        deque(self._save(), maxlen=0)
        self.world.count(f"raised {error.reason}")
        assert error.reason in self.may_raise, error
        if error.reason == "SNAPSHOT_GONE":
            assert self.pins is not None
            gone = [
                p
                for p in self.partitions
                if self.following.session.state(p) is PartitionState.FAILED
            ]
            assert gone, error
            for p in gone:
                self.world.exact_ended(self, p, "SNAPSHOT_GONE", {})
            self.done = True
        self._begin_at = self.world.network.now + self.world.rng.random() * 5

    def pump(self) -> None:
        """What the reader of the call does, beside the application: take in what arrives, and answer heartbeats."""
        connection, state = self.connection, self._state
        if connection is None or state is None:
            return
        now = self.world.network.now
        while (parcel := connection.to_client.take(now)) is not None:
            if parcel.data is None:
                # With an error the call was refused.
                self._inbox.append(parcel.note or _NO_END)
                break
            message = wire.FollowResponse.FromString(parcel.data)
            if parcel.note is not None:
                assert isinstance(parcel.note, Sent)
                self._notes[id(message)] = parcel.note
            arrived = state.arrived(message, now)
            if arrived.answer is not None:
                self._send(arrived.answer)
            if arrived.half_close:
                self._half_close()
            if is_of_group(message):
                self.following.heard(message)
                self._shares.append(message)
            elif arrived.keep:
                self._inbox.append(message)
        if connection.client_knows() and (not self._inbox or self._inbox[-1] is not _NO_END):
            self._inbox.append(_NO_END)

    def _life(self) -> Pause:
        world, network = self.world, self.world.network
        options = self.habits.options(world.rng, self.pins, self.settling)
        if options.group is None:
            only = replace(options.only, partitions=self.partitions)
            options = replace(options, only=only)
        self.following = Following(
            options,
            say=lambda _: None,
            clock=Clock(lambda: network.now, lambda: world.now / 1e6, world.rng.random),
        )
        self._load()
        yield
        while True:
            self._consumed()
            batch: ChangeBatch | Rollback | None = None
            while batch is None:
                step = self.following.next_step(self.connection is not None)
                if step is Step.FINISH:
                    yield from self._save()
                    yield from self._finish()
                    return
                if step is Step.UNDO:
                    batch = yield from self._undo()
                elif step is Step.CONNECT:
                    yield from self._connect()
                elif step is Step.SAVE:
                    yield from self._save()
                elif step is Step.RECEIVE:
                    batch = yield from self._receive()
                else:
                    yield from self._of_owner(step)
                yield
            yield from self._consume(batch)

    def _of_owner(self, step: Step) -> Pause:
        """Do what only those do whose positions are kept in the server."""
        raise AssertionError(f"{step} of a client that stores by itself")

    # What is stored.

    def _load(self) -> None:
        """Begin with what is stored; data that is ahead of its position is not known to be true, and goes."""
        positions: dict[int, Position] = {}
        self._told = {}
        self._consumption.forget()
        for p in self.partitions:
            text = self.stored_positions.get(p)
            if text is None:
                self.stored_rows.pop(p, None)
                self.rows[p] = []
                self.world.recorder.add("anew", reader=self.name, partition=p)
                continue
            positions[p] = position = Position.from_json(text)
            self.rows[p] = [r for r in self.stored_rows.get(p, []) if r.seqno <= position.seqno]
            self.world.recorder.whole_position("loaded", self.name, p, position)
        self.following.load(positions)

    def _save(self) -> Pause:
        self._consumption.record()
        positions = self.following.begin_save()
        if positions and self.world.rng.random() < 0.02 and not self.settling:
            self.following.not_saved(positions)
            self.world.count("saves failed")
            return
        if positions and not self.habits.atomic:
            for p in positions:
                self.stored_rows[p] = list(self.rows[p])
            yield
        for p, position in positions.items():
            self.stored_positions[p] = position.to_json()
            kept = [row for row in self.rows[p] if row.seqno <= position.seqno]
            if self.habits.atomic:
                self.stored_rows[p] = kept
            self.world.recorder.whole_position("stored", self.name, p, position)
        message = self.following.saved(positions)
        if message is not None and self.connection is not None:
            self._send(message)

    def seqno(self, p: int) -> int:
        """Up to where it has consumed a partition; -1 when it does not run."""
        if self._process is None or self._begin_at > self.world.network.now:
            return -1
        return self.following.session.position(p).seqno

    def where(self) -> dict[int, tuple[str, int]]:
        """Where each partition stands."""
        return {p: (self.following.session.state(p).name, self.seqno(p)) for p in self.partitions}

    def state_at(self, p: int, seqno: int) -> State:
        """What its data says that the partition was at a seqno."""
        return apply({}, [row for row in self.rows.get(p, []) if row.seqno <= seqno])

    # Undoing.

    def _undo(self) -> Generator[None, None, Rollback | None]:
        rollback = self.following.rollback()
        if not self.habits.callback:
            return self.following.offer(rollback)
        yield from self._undo_one(rollback)
        self._record_rollback(rollback.partition, rollback.seqno)
        self.following.undone(rollback)
        yield
        return None

    def _undo_one(self, rollback: Rollback) -> Pause:
        p = rollback.partition
        yield
        self.rows[p] = [row for row in self.rows[p] if row.seqno <= rollback.seqno]
        if not self.habits.atomic:
            # The data first: until the position is stored too, the old one stands beside it.
            self.stored_rows[p] = list(self.rows[p])
        self.world.count("undone")
        yield

    def _record_rollback(self, p: int, to: int) -> None:
        told, newest = self._told.pop(p)
        undone = any(pending.partition == p for pending in self.following.session.undoing)
        if undone and not self.habits.inclusive:
            assert to < told or to == 0, f"{self.name}: told {told}, it stays at {to}"
        self.world.recorder.add(
            "rollback", reader=self.name, partition=p, told=told, newest=newest, to=to
        )

    # The application's part of iterating.

    def _consume(self, batch: ChangeBatch | Rollback) -> Pause:
        if isinstance(batch, Rollback):
            yield from self._undo_one(batch)
            return
        if not self.habits.one_by_one:
            deque(map(self._apply, batch.changes), maxlen=0)
            return
        taken, yielded = self.following.taken, 0
        assert taken is not None
        while (event := taken.next_event()) is not None:
            yielded += 1
            # Asking for this one says that those before it were dealt with.
            self._consumption.events = yielded - 1
            if isinstance(event, Change):
                self._apply(event)
            if self.world.rng.random() < 0.2:
                yield
            if self.world.rng.random() < 0.1:
                yield from self._save()
                self._doomed = self.world.rng.random() < 0.5

    def _apply(self, change: Change) -> None:
        row = self._consumption.row(change, self.habits.keys_only)
        self.rows[change.partition].append(row)

    def _consumed(self) -> None:
        """The application asks for the next batch."""
        taken = self.following.taken
        if taken is not None and isinstance(taken.item, Rollback):
            pending = (one.partition for one in self.following.session.undoing)
            if taken.item.partition in pending:
                self._record_rollback(taken.item.partition, taken.item.seqno)
        self.following.acknowledge()
        self._consumption.finish()

    # The call.

    def _send(self, request: wire.FollowRequest) -> None:
        if self.connection is not None and not self._half_closed:
            self.connection.send_to_server(request.SerializeToString())

    def _half_close(self) -> None:
        if self.connection is not None and not self._half_closed:
            self._half_closed = True
            self.connection.send_to_server(None)

    def _leave(self) -> None:
        """Drop the call; whether the server learns of it is the network's affair."""
        connection, self.connection, self._state = self.connection, None, None
        self._inbox.clear()
        self._shares.clear()
        self._notes.clear()
        if connection is None:
            return
        if connection.client_leaves():
            self.world.count("ghosts")
        self.world.recorder.add("left", reader=self.name)
        for p in sorted(self.unheard):
            self.world.recorder.add("unheard", reader=self.name, partition=p)
        self.unheard.clear()

    def _connect(self) -> Pause:
        network = self.world.network
        request = self.following.open_message("default")
        self._interval = request.heartbeat_seconds
        self._half_closed = False
        self.connection = network.connect()
        self._state = CallState(request, network.now)
        self._send(wire.FollowRequest(open=request))
        if network.rng.random() < 0.03 and not self.settling:
            self.connection.cut()
        until = network.now + CONNECT_SECONDS
        while not self._inbox and network.now < until:
            yield
        try:
            if not self._inbox:
                raise UnavailableError("the server did not accept the call")
            message = self._next()
            opened = self._state.accepted(message, network.now)
        except UprError as error:
            if self.following.not_opened(error):
                self.told_gone()
                self._leave()
                return
            yield from self._lost(error)
            return
        self.following.opened(opened)

    def told_gone(self) -> None:
        """Take note that the bucket is said to have another version."""
        raise AssertionError("no bucket is dropped here")

    def _next(self) -> wire.FollowResponse:
        message = self._inbox.popleft()
        if isinstance(message, UprError):
            raise message
        if not isinstance(message, wire.FollowResponse):
            raise UnavailableError("the connection was lost")
        return message

    def _finish(self, seconds: float = CONNECT_SECONDS) -> Pause:
        self._half_close()
        until = self.world.network.now + seconds
        while self.connection is not None and self.world.network.now < until:
            if _NO_END in self._inbox:
                break
            yield
        self._leave()
        if self.following.session.finished:
            self._all_ended()

    def _all_ended(self) -> None:
        self.world.count("clients finished")
        if self.pins is None:
            self._begin_at = self.world.network.now + self.world.rng.random() * 3
            return
        self.done = True
        for p in self.partitions:
            self.world.exact_ended(self, p, "FINISHED", apply({}, self.rows[p]))

    def _lost(self, error: UprError, finish_seconds: float = 0.0) -> Pause:
        if finish_seconds:
            yield from self._finish(finish_seconds)
        else:
            self._leave()
        begin_at = self.world.network.now + self.following.lost(error)
        while self.world.network.now < begin_at and not self.settling:
            yield

    def _receive(self) -> Generator[None, None, ChangeBatch | None]:
        network, state = self.world.network, self._state
        assert state is not None
        messages, seconds = self.following.due()
        for start in messages:
            self._send(start)
            if network.rng.random() < 0.1:
                p = network.rng.choice(self.partitions)
                if self.following.session.state(p) is not PartitionState.IDLE:
                    known = self.following.session.position(p).failover_id
                    ask_hello(self.world, self.name, p, known)
        waited = seconds is None or seconds >= MOMENT_SECONDS
        longest = state.patience(network.now)
        until = network.now + (longest if seconds is None else min(seconds, longest))
        yield
        while not self._inbox and not self._shares and network.now < until:
            yield
        try:
            if self._shares:
                return (yield from self._take(self._shares.popleft(), state))
            if not self._inbox:
                if waited:
                    state.check_heard(network.now, until)
                return None
            message = self._next()
        except UprError as error:
            if error.message.startswith("the server was silent"):
                self.world.count("silence noticed by clients")
                assert self.connection is not None
                assert self.connection.harmed or self._interval < 2, "a server that is there"
            yield from self._lost(error)
            return None
        credit = state.taken(message)
        if credit is not None:
            self._send(credit)
        return (yield from self._take(message, state))

    def _take(
        self, message: wire.FollowResponse, state: CallState
    ) -> Generator[None, None, ChangeBatch | None]:
        kind = message.WhichOneof("message")
        note = self._notes.pop(id(message), None)
        live = self._live(message.ended)
        stale = {a.partition for a in message.start_answers.answers if self._is_stale(a.partition)}
        try:
            outcome = self.following.take(message, state.highs)
        finally:
            still = self._live(message.ended)
            for p, token in (one for one in live if one not in still):
                why = message.ended.problem.reason
                self.world.count(f"{why} over the network")
                self.world.recorder.add(
                    "ended", reader=self.name, partition=p, token=token, reason=why
                )
            if kind == "start_answers":
                self._heard_answers(message.start_answers, stale)
        if outcome.batch is not None:
            assert note is not None
            keys_only = self.habits.keys_only
            self._consumption.begin(message.frame, note, outcome.batch, keys_only)
        if outcome.lost is not None:
            self.world.count(f"lost {outcome.lost.reason}")
            assert outcome.lost.reason not in ("PROTOCOL", "INVALID_ARGUMENT"), (
                self.name,
                outcome.lost,
            )
            yield from self._lost(outcome.lost, outcome.finish_seconds)
        return outcome.batch

    # What is recorded of a message.

    def _live(self, ended: wire.Ended) -> dict[tuple[int, int], None]:
        """Those of the streams, as (partition, token), whose partitions are live for the SDK."""
        state = self.following.session.state
        streams = ((s.partition, s.token) for s in ended.streams)
        return {(p, token): None for p, token in streams if state(p) is PartitionState.LIVE}

    def _is_stale(self, p: int) -> bool:
        """Whether an answer is to a Start of before the partition changed hands."""
        return p < PARTITIONS and bool(self.following.session._stale[p])

    def _heard_answers(self, answers: wire.StartAnswers, stale: set[int]) -> None:
        undoing = {pending.partition for pending in self.following.session.undoing}
        for record in np.frombuffer(answers.started, STARTED):
            self.unheard.discard(int(record["partition"]))
        for answer in answers.answers:
            p = answer.partition
            self.unheard.discard(p)
            if answer.WhichOneof("answer") == "rollback" and p not in stale:
                self._told[p] = answer.rollback.rollback_seqno, answer.rollback.failover_id
                if p not in undoing:
                    self.world.count("rollbacks with nothing to undo")
                    self._record_rollback(p, self.following.session.position(p).seqno)
