"""Clients whose positions are kept in the server: members of a group, and owners of a consumer of their own.

What each has as data goes with the position that it hands in, as if it stored the one right before the other.
"""

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tests.simulation.habits import Habits
from tests.simulation.keeping import Asked
from tests.simulation.recording import UNKNOWN
from tests.simulation.session import Pause, SimulatedClient
from tests.simulation.world import USED
from upr_client.changes.events import Change, ChangeBatch, Rollback
from upr_client.changes.options import ChangesOptions, Group, ServerPositions
from upr_client.changes.session import Step
from upr_protocol.consumer import State as PartitionState
from upr_protocol.errors import FencedError, UnavailableError, UprError
from upr_protocol.handshake import Pin
from upr_protocol.position import Position
from upr_protocol.position_table import Found
from upr_protocol.wire.codec import position_from_message

if TYPE_CHECKING:
    from tests.simulation.grouped import GroupWorld

ANSWER_SECONDS = 6.0
"""Then a call that was not answered is given up; the network may bring it to the server later."""


@dataclass(frozen=True)
class OwnerHabits(Habits):
    """Those of a client whose positions are kept in the server; ``member`` of the group ``consumer``, if it is one."""

    member: str = ""
    lease: float = 12.0

    def options(
        self, rng: random.Random, pins: Mapping[int, Pin] | None, endless: bool
    ) -> ChangesOptions:
        options = super().options(rng, pins, endless)
        if not self.member:
            return replace(options, resume=ServerPositions(self.consumer), consumer="")
        group = Group(self.consumer, member=self.member, lease_seconds=self.lease)
        return replace(options, resume=group, consumer="")


class Owner(SimulatedClient):
    """One process after another.

    Attributes:
        call: the number of its newest call at the server.
        paused_until: its process does nothing before that.
        retired: it does nothing any more.
    """

    may_raise: ClassVar = {"SUPERSEDED", "FENCED"}
    world: "GroupWorld"

    def __init__(self, world: "GroupWorld", name: str, habits: OwnerHabits) -> None:
        super().__init__(world, name, habits, USED)
        self.kept_as = habits.consumer
        self.call = 0
        self.paused_until = 0.0
        self.retired = False
        self._followed: set[int] = set()

    @property
    def owner(self) -> str:
        """As whom it saves: not the same after another call was opened under its name."""
        return f"{self.name} in call {self.call}"

    # The process.

    def step(self) -> None:
        if self.world.network.now < self.paused_until or self.retired:
            return
        rng = self.world.rng
        if self._process is not None and not self.settling and rng.random() < 0.004:
            self.paused_until = self.world.network.now + rng.choice([1.0, 10.0, 40.0])
            if self.connection is not None:
                # Its silence is no wonder.
                self.connection.harmed = True
            self.world.count("owners paused")
            return
        super().step()
        self._note_lost()

    def retire(self) -> None:
        """End for good."""
        self.die()
        self.retired = True

    def pump(self) -> None:
        # Stopped like its application: it answers no heartbeat, and messages wait.
        if self.world.network.now >= self.paused_until:
            super().pump()

    def die(self) -> None:
        super().die()
        self._note_lost()

    def _close(self) -> None:
        """Leave in order: store, half-close, and wait for the end."""
        assert self._process is not None
        self._process.close()
        self._consumption.record()
        self._process = self._closing()
        self.world.count("clients closed")

    def _closing(self) -> Pause:
        try:
            yield from self._save()
        except FencedError:
            self.world.count("fenced at the end")
        yield from self._finish(2.0)
        self._begin_at = self.world.network.now + self.world.rng.random() * 5

    def _failed(self, error: UprError) -> None:
        self._leave()
        self.world.count(f"raised {error.reason}")
        assert error.reason in self.may_raise, error
        self._begin_at = self.world.network.now + self.world.rng.random() * 5

    def _note_lost(self) -> None:
        """Take note of partitions that are followed no longer."""
        alive = self._process is not None
        followed = {
            p for p in USED if alive and self.following.session.state(p) is not PartitionState.IDLE
        }
        lost = self._followed - followed
        if lost and alive:
            self._consumption.record()
            self._consumption.passed_over |= lost
        for p in sorted(lost):
            self._told.pop(p, None)
            self.unheard.discard(p)
            self.world.recorder.add("lost", reader=self.name, partition=p)
        self._followed = followed

    def is_at(self, p: int) -> bool:
        """Whether this one follows a partition now."""
        return self._process is not None and p in self._followed

    # What is stored.

    def _load(self) -> None:
        self._told = {}
        self._consumption.forget()
        self.rows.clear()
        self.following.load({})
        ownership = self.following.ownership
        assert ownership is not None
        found = ownership.found

        def noted(response: Any) -> Found:
            unknown = found(response)
            self._begin_at_stored(unknown)
            return unknown

        ownership.found = noted  # type: ignore[method-assign]

    def _begin_at_stored(self, positions: Mapping[int, Position | None]) -> None:
        for p, position in positions.items():
            fields = {"reader": self.name, "partition": p, "kept_as": self.kept_as}
            if position is None:
                self.rows[p] = []
                self.world.recorder.add("anew", **fields)
            elif p in USED:
                save, rows = self.world.handed_in[self.kept_as, p, _known_by(position)]
                self.rows[p] = list(rows)
                self.world.recorder.add("loaded", **fields, save=save, **_fields(position))
            self._told.pop(p, None)

    def _of_owner(self, step: Step) -> Pause:
        if step is Step.RELEASE:
            self._send(self.following.release(self.following.let_go_of_share()))
            self._note_lost()
            return
        assert step is Step.LOAD
        ownership, version = self.following.ownership, self.following.session.bucket_version
        assert ownership is not None
        asked = self.world.ask(ownership.load_request("default", version), self.owner)
        answer = yield from self._answer(asked)
        if isinstance(answer, UprError):
            yield from self._lost(answer)
            return
        self._note_lost()
        self.following.begin(ownership.found(answer))
        self._note_lost()

    def _answer(self, asked: Asked) -> Generator[None, None, Any]:
        network = self.world.network
        until = network.now + ANSWER_SECONDS
        while (answer := asked.arrived(network.now)) is None and network.now < until:
            yield
        return UnavailableError("no answer in time") if answer is None else answer

    def _save(self) -> Pause:
        self._consumption.record()
        positions = self.following.begin_save()
        refused: list[int] = []
        if positions:
            answer = yield from self._answer(self._hand_in(positions))
            if isinstance(answer, UprError):
                self.following.not_saved(positions, wait=True)
                self.world.count(f"saves ended with {answer.reason}")
                if answer.reason == "FENCED":
                    self.following.fenced(answer)
                elif not answer.retriable:
                    raise answer
                return
            refused = [one.partition for one in answer.refused_partitions]
            if refused:
                self.world.count("saves refused in part")
        self.following.saved(positions, refused)

    def _hand_in(self, positions: Mapping[int, Position]) -> Asked:
        ownership = self.following.ownership
        assert ownership is not None
        request = ownership.save_request(
            "default", self.following.session.bucket_version, positions
        )
        saves = {p: self.world.next_save() for p in positions if p in USED}
        for message in request.positions:
            p = message.partition
            if p not in saves:
                continue
            position = positions[p]
            stored = position_from_message(message, position.bucket_version)
            rows = [row for row in self.rows[p] if row.seqno <= position.seqno]
            self.world.handed_in[self.kept_as, p, _known_by(stored)] = saves[p], rows
            self.world.recorder.add(
                "handed_in",
                reader=self.name,
                partition=p,
                kept_as=self.kept_as,
                save=saves[p],
                **_fields(position),
            )
        return self.world.ask(request, self.owner, saves)

    # Iterating.

    def _consume(self, batch: ChangeBatch | Rollback) -> Pause:
        following = self.following
        if isinstance(batch, Rollback) or not self.habits.one_by_one:
            yield from super()._consume(batch)
            return
        yielded = 0
        while (taken := following.taken) is not None:
            event = taken.next_event()
            if event is None:
                break
            # Asking for this one says that those before it were dealt with.
            self._consumption.events = yielded
            yield from self._keep_share()
            if not following.may_hand_out(event.partition):
                # What was consumed before counts, and nothing after.
                self._consumption.record()
                if following.taken is None:
                    self._consumption.forget()
                    self.world.count("leases ended while handing out")
                    return
                self._consumption.passed_over.add(event.partition)
                self.world.count("changes of lost partitions passed over")
                yielded += 1
                continue
            yielded += 1
            if isinstance(event, Change):
                self._apply(event)
            if self.world.rng.random() < 0.2:
                yield
            if self.world.rng.random() < 0.05:
                yield from self._save()

    def _keep_share(self) -> Pause:
        state = self._state
        while self._shares and state is not None:
            outcome = self.following.take(self._shares.popleft(), state.highs)
            self._note_lost()
            if outcome.lost is not None:
                yield from self._lost(outcome.lost)
                return
        messages, awaiting = self.following.renewals()
        for message in messages:
            self._send(message)
        if awaiting:
            yield


def _known_by(position: Position) -> tuple[Any, ...]:
    return (
        position.failover_id,
        position.data_id,
        position.seqno,
        position.horizon,
        position.markers,
    )


def _fields(position: Position) -> dict[str, Any]:
    return {
        "id": position.failover_id,
        "data_id": position.data_id,
        "seqno": position.seqno,
        "horizon": UNKNOWN if position.horizon is None else position.horizon,
        "markers": list(position.markers),
    }
