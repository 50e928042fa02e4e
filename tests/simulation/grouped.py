"""The simulated network with positions that are kept in the server: groups whose members come and go, and sole owners.

Members are killed, paused and cut off, leave ghosts behind, and hand in positions that arrive late; the server is
killed before and after a transaction, an operator resets and forgets consumers. The history says who was granted
what, and what was stored and told; ``tests/guarantees.py`` compares.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.model import Row
from tests.simulation.keeping import Asked, Keeper
from tests.simulation.networked import NetworkedWorld
from tests.simulation.owner import Owner, OwnerHabits
from tests.simulation.serving import ServedCall
from tests.simulation.session import SimulatedClient
from tests.simulation.world import USED
from upr.service.buckets.keepers import micros
from upr.storage.keyspace import ConsumerRow
from upr_protocol.errors import UnavailableError, UprError
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

GROUP, SOLE = "the group", "sole"
LATE_SECONDS = 9.0
"""Longer than a client waits for an answer: what it hands in then may arrive after what it hands in next."""
SLOW_SECONDS = 40


class GroupWorld(NetworkedWorld):
    """Members of one group, and two processes that take one consumer from each other.

    Attributes:
        handed_in: by consumer, partition and what a position says: its number in the history, and its data.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.handed_in: dict[tuple[str, int, tuple[Any, ...]], tuple[int, list[Row]]] = {}
        self._saves = self._opened_calls = 0
        self._asked: list[Asked] = []
        self._accepted: dict[tuple[str, int, bytes], list[int]] = {}
        self._in_store: dict[tuple[str, int], bytes] = {}
        self._kept: set[int] = set()
        super().__init__(folder, seed)

    def first_clients(self) -> list[SimulatedClient]:
        members = [
            OwnerHabits(stability="memory", consumer=GROUP, member=f"member {n}", lease=lease)
            for n, lease in enumerate((12.0, 16.0, 30.0))
        ]
        # These do not ask before each change, so they hand out whole batches.
        members[1] = OwnerHabits(
            consumer=GROUP, member="member 1", lease=16.0, one_by_one=False, callback=False
        )
        soles = [OwnerHabits(consumer=SOLE), OwnerHabits(stability="memory", consumer=SOLE)]
        return [
            *(Owner(self, habits.member, habits) for habits in members),
            *(Owner(self, f"sole {n}", habits) for n, habits in enumerate(soles)),
        ]

    @property
    def owners(self) -> list[Owner]:
        """The clients, all of which have their positions in the server."""
        return [client for client in self.clients if isinstance(client, Owner)]

    # The server's process.

    def open(self) -> None:
        super().open()
        positions = self.bucket.consumer_positions
        self.bucket.owners.begin_above(max(micros(self.network.now), positions.newest_generation))
        self.keeper = Keeper(self)

    def close(self) -> None:
        self.keeper.die()
        self._lose_requests()
        self.recorder.add("no_owner")
        super().close()

    def _lose_requests(self) -> None:
        """Those on their way meet the next process, or nobody."""
        for asked in list(self._asked):
            if self.rng.random() < 0.5:
                self._asked.remove(asked)
                asked.answered(UnavailableError("the connection was lost"), self.late())

    def late(self) -> float:
        """Return when a message sent now arrives."""
        far = self.rng.random() < 0.15 and not self.settling
        return self.network.now + self.rng.random() * (LATE_SECONDS if far else 0.5)

    @property
    def settling(self) -> bool:
        """Whether nothing goes wrong any more."""
        return any(client.settling for client in self.clients)

    # Steps.

    def make_cut(self) -> None:
        """No cuts here."""

    def intrude(self) -> None:
        """Have an operator reset or forget a consumer."""
        if self.settling:
            return
        name = self.rng.choice([GROUP, SOLE])
        if self.rng.random() < 0.5:
            partitions = sorted(self.rng.sample(USED, 3))
            request: Any = admin.ResetConsumerRequest(
                bucket="default", name=name, partitions=partitions, to_beginning=True
            )
            self.count("resets")
        else:
            request = admin.ForgetConsumerRequest(bucket="default", name=name)
            self.count("forgets")
        self.ask(request)

    def step_network(self) -> None:
        super().step_network()
        rng, now = self.rng, self.network.now
        for asked in [asked for asked in self._asked if asked.due <= now]:
            self._asked.remove(asked)
            self.keeper.take(asked)
        # Half of the time the store is slow, so that much happens while positions are on their way to it.
        slow = int(now) // SLOW_SECONDS % 2 == 1 and not self.settling
        if rng.random() < (0.02 if slow else 0.5):
            self.keeper.step()
        if rng.random() < 0.01:
            self.intrude()
        if rng.random() < 0.3:
            self.bucket.owners.tick(micros(now))

    def save_consumers(self) -> None:
        self.keeper.save_acknowledged()

    def ask(self, request: Any, owner: str = "", saves: dict[int, int] | None = None) -> Asked:
        """Send a request to the server."""
        asked = Asked(request, self.late(), owner, saves)
        if self.rng.random() > 0.03 or self.settling:
            self._asked.append(asked)
        return asked

    def next_save(self) -> int:
        """Return the next number for a position that is handed in."""
        self._saves += 1
        return self._saves

    # What the server does, for the history.

    def call_opened(self, call: ServedCall) -> None:
        client = call.client
        self._opened_calls += 1
        if isinstance(client, Owner):
            client.call = self._opened_calls
            if not call.options.member:
                self._granted(client, USED, shared=False)

    def said(self, call: ServedCall, message: wire.FollowResponse) -> None:
        if message.WhichOneof("message") != "assignment" or not call.heard_by_client():
            return
        assert isinstance(call.client, Owner)
        mine = [p for p in USED if p in set(message.assignment.owned)]
        self._granted(call.client, mine, shared=True)
        self.count("assignments")

    def _granted(self, client: Owner, partitions: list[int], *, shared: bool) -> None:
        self.recorder.add(
            "granted",
            reader=client.name,
            consumer=client.kept_as,
            owner=client.owner,
            partitions=partitions,
            shared=shared,
        )

    def accepted(self, asked: Asked, partitions: list[int]) -> None:
        """Positions are about to be stored; the others of the request are refused."""
        request = asked.request
        for message in request.positions:
            p = message.partition
            if p in partitions and p in asked.saves:
                text = message.SerializeToString()
                same = self._accepted.setdefault((request.consumer, p, text), [])
                same.append(asked.saves[p])
        mine = {p: asked.saves[p] for p in partitions if p in asked.saves}
        self.recorder.add("accepted", consumer=request.consumer, owner=asked.owner, saves=mine)
        self.count("saves accepted")

    def resetting(self, name: str, partitions: list[int]) -> None:
        """A consumer's positions are about to be removed; those accepted before may be in the same transaction."""
        self.recorder.add("resetting", consumer=name, partitions=partitions)

    def forgetting(self, name: str) -> None:
        """A consumer's positions are forgotten from this step on, and not yet in the store."""
        self.recorder.add("forgetting", consumer=name)

    def stored_rows(self, rows: Mapping[tuple[bytes, int], ConsumerRow | None]) -> None:
        """A transaction has stored rows of consumers."""
        for (key, p), row in rows.items():
            name = key.decode()
            if p not in USED:
                continue
            if row is None:
                self._in_store.pop((name, p), None)
                self.recorder.add("unkept", consumer=name, partition=p)
            elif row.position:
                # The same may have been handed in twice; and what was acknowledged since is stored with it anew.
                same = self._accepted[name, p, row.position]
                first = same if self._in_store.get((name, p)) != row.position else []
                for save in [save for save in same if save not in self._kept] or first[-1:]:
                    self._kept.add(save)
                    self.recorder.add("kept", consumer=name, partition=p, save=save)
                    self.count("positions kept")
                self._in_store[name, p] = row.position

    def answered(self, asked: Asked, answer: Any) -> None:
        """The server has an answer to a request; the network may lose it."""
        request = asked.request
        if isinstance(answer, UprError):
            self.count(f"answered {answer.reason}")
        elif isinstance(request, wire.SavePositionsRequest):
            refused = {one.partition for one in answer.refused_partitions}
            saved = {p: save for p, save in asked.saves.items() if p not in refused}
            self.recorder.add("saved", consumer=request.consumer, saves=saved)
        elif isinstance(request, wire.LoadPositionsRequest):
            found = {m.partition: m.SerializeToString() for m in answer.positions}
            told: dict[int, int | None] = {}
            for p in set(USED).intersection(request.partitions):
                same = self._accepted[request.consumer, p, found[p]] if p in found else []
                told[p] = next((save for save in reversed(same) if save in self._kept), None)
            self.recorder.add("told", consumer=request.consumer, owner=asked.owner, saves=told)
            self.count("positions loaded")
        elif isinstance(request, admin.ForgetConsumerRequest):
            self.recorder.add("forgotten", consumer=request.name)
        lost = self.rng.random() < 0.05 and not self.settling
        asked.answered(answer, None if lost else self.late())

    # The end.

    def drain(self) -> None:
        """Two that follow under one name take it from each other for ever, so one of them goes."""
        for owner in self.owners:
            owner.paused_until = 0.0
            if owner.name == "sole 1":
                owner.retire()
        super().drain()

    def settled(self, client: SimulatedClient) -> bool:
        """Whether each partition has been consumed by its owner, and what that has is true."""
        assert isinstance(client, Owner)
        same = [other for other in self.owners if other.kept_as == client.kept_as]
        return all(any(self._has_everything(other, p) for other in same) for p in USED)

    def whole_readers(self) -> list[str]:
        """None: of a partition that changes hands each owner has a part of the history."""
        return []

    def _has_everything(self, owner: Owner, p: int) -> bool:
        high = self.model[p].high
        if not owner.is_at(p) or owner.seqno(p) != high:
            return False
        truth = self.model[p].state_at(high)
        assert owner.state_at(p, high) == truth, (owner.name, p, truth)
        return True
