"""The simulated world with a network: clients that run the SDK's state machine over connections that fail."""

import random
from pathlib import Path
from typing import Any

from tests.model import State
from tests.simulation.cutting import CutWorld
from tests.simulation.habits import Habits
from tests.simulation.network import Connection, Network
from tests.simulation.serving import ServedCall
from tests.simulation.session import SimulatedClient
from tests.simulation.world import USED, Batch
from upr.engine.streams import SHUTTING_DOWN
from upr.service.buckets.catalog import Catalog
from upr_protocol.handshake import Pin
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

SETTLE_STEPS = 20_000
HABITS = (
    Habits(stability="memory", consumer="first"),
    Habits(atomic=False, consumer="second", callback=False),
    Habits(stability="memory", atomic=False, one_by_one=False, keys_only=True),
    Habits(until_now=True, one_by_one=False, callback=False),
    Habits(stability="memory", inclusive=True),
)


def _catalog(hosts: dict[str, Any]) -> Catalog:
    catalog = Catalog.__new__(Catalog)
    catalog._hosts, catalog._damaged, catalog._reopening = hosts, {}, {}
    return catalog


class NetworkedWorld(CutWorld):
    """Its clients follow over a network, beside the readers that have none.

    Attributes:
        restarts: of the server so far.
        calls: those that the server knows.
        hosts: the buckets by name, as the catalog has them; a world does for the host of its one.
        catalog: finds them by name and version, as the service does.
        clients: each has one place to store.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.restarts = 0
        self.calls: list[ServedCall] = []
        self.clients: list[SimulatedClient] = []
        self.hosts: dict[str, NetworkedWorld] = {}
        self.catalog = _catalog(self.hosts)
        self._written: set[int] = set()
        self.network = Network(random.Random(seed))
        super().__init__(folder, seed)
        self.network.rng = self.rng
        self.clients = self.first_clients()

    def first_clients(self) -> list[SimulatedClient]:
        """Return the clients that it begins with."""
        clients = [
            SimulatedClient(self, f"client {number}", habits, USED)
            for number, habits in enumerate(HABITS)
        ]
        return [
            *clients,
            SimulatedClient(self, "client of some", Habits(stability="memory"), USED[::2]),
        ]

    # The server's process

    def open(self) -> None:
        """The bucket is served."""
        super().open()
        self.hosts["default"] = self

    def crash(self) -> None:
        """Also every connection ends."""
        self._lose_calls()
        super().crash()
        self.restarts += 1

    def restart_clean(self) -> None:
        """Every call is told, as far as there is time for it."""
        for call in list(self.calls):
            if call.talk is not None:
                call.talk.end(SHUTTING_DOWN)
                call.told_over()
            for _ in range(self.rng.randint(0, 6)):
                if call in self.calls:
                    call.step()
        self._lose_calls()
        super().restart_clean()
        self.restarts += 1

    def _lose_calls(self) -> None:
        for call in self.calls:
            call.connection.server_dies()
        for connection in self.network.accepted:
            connection.server_dies()
        self.calls = []
        self.network.accepted = []

    # Steps

    def apply_batch(self, number: int, batch: Batch) -> None:
        """Now and then one key is written several times: a run that positions may lie inside of."""
        if number not in self._written and self.rng.random() < 0.5:
            batch += [(batch[0][0], b"%d" % self.rng.randrange(10**6)) for _ in range(3)]
        self._written.add(number)
        super().apply_batch(number, batch)

    def step_reader(self) -> bool:
        """Also what concerns the network, so that nothing of the world must know of it."""
        if self.rng.random() < 0.2:
            return super().step_reader()
        self.step_network()
        return True

    def step_network(self) -> None:
        """Let a moment pass, and some of those who are there do something."""
        network, rng = self.network, self.rng
        network.pass_time()
        network.harm()
        while network.accepted:
            self.calls.append(ServedCall(self, network.accepted.pop(0)))
        for client in self.clients:
            client.pump()
        for _ in range(12):
            if rng.random() < 0.5 or not self.calls:
                rng.choice(self.clients).step()
            else:
                rng.choice(self.calls).step()
        if rng.random() < 0.05:
            self.save_consumers()
        if rng.random() < 0.002:
            self.intrude()

    def intrude(self) -> None:
        """Have another client take over a consumer name, and leave again."""
        connection = self.network.connect()
        opening = wire.Open(
            bucket="default",
            consumer=self.rng.choice(["first", "second"]),
            credit_bytes=100,
            heartbeat_seconds=1.0,
            stability=types.STABILITY_MEMORY,
        )
        request = wire.FollowRequest(open=opening)
        connection.send_to_server(request.SerializeToString())
        connection.send_to_server(None)
        self.count("intruders")

    def call_opened(self, call: ServedCall) -> None:
        """A call was accepted."""

    def said(self, call: ServedCall, message: wire.FollowResponse) -> None:
        """The server sends a message of a call, other than a frame."""

    def client_of(self, connection: Connection) -> SimulatedClient | None:
        """Return the client that uses a connection."""
        return next((c for c in self.clients if c.connection is connection), None)

    # Cuts

    def make_cut(self) -> None:
        """Now and then a client follows to it."""
        before = set(self.held)
        super().make_cut()
        for name in set(self.held) - before:
            if self.rng.random() < 0.5:
                row = self.held[name]
                pins = {p: Pin(pin.failover_id, pin.seqno) for p, pin in row.pins.items()}
                habits = Habits(stability="memory", atomic=self.rng.random() < 0.5)
                client = SimulatedClient(self, f"exact to {name}", habits, USED, pins)
                client.cut = name
                self.clients.append(client)

    def exact_ended(self, client: SimulatedClient, p: int, outcome: str, state: State) -> None:
        """A client of a cut has a partition as of it, or is told that it is gone."""
        self.recorder.add("cut_read", name=client.cut, partition=p, outcome=outcome, state=state)
        self.count(f"cut over the network {outcome}")
        if client.done and client in self.clients:
            self.clients.remove(client)

    # The end

    def drain(self) -> None:
        """The network heals, and every client comes to have what is true."""
        super().drain()
        self.network.heal()
        for client in self.clients:
            client.settling = True
        for step in range(SETTLE_STEPS):
            if step % 20 == 0 and all(self.settled(client) for client in self.clients):
                break
            self.step_network()
        for client in self.clients:
            assert self.settled(client), f"{client.name} stalled: {client.where()}"
        self.recorder.add(
            "settled",
            readers=self.whole_readers(),
            high={p: model.high for p, model in self.model.items()},
        )
        for what, count in self.network.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count

    def whole_readers(self) -> list[str]:
        """Return the clients that have everything in the end, by name."""
        return [c.name for c in self.clients if c.pins is None and c.partitions == USED]

    def settled(self, client: SimulatedClient) -> bool:
        """Whether a client has consumed everything, and it is what is true."""
        if client.done or client.pins is not None:
            return client.done
        for p in client.partitions:
            high = self.model[p].high
            if client.seqno(p) != high:
                return False
            truth = self.model[p].state_at(high)
            assert client.state_at(p, high) == truth, (client.name, p, truth)
        return True
