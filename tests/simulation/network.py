"""A network between the simulated server and its clients: everything that a real one does to a call.

A connection carries encoded messages, in order, each way. It may be slow; it may be cut, which both ends learn at
different times; it may lose everything of one direction from some moment on (a black hole), which no end learns but
by silence; and a client's end may go away without the server learning of it (a ghost).
"""

import random
from collections import deque
from typing import NamedTuple

SLOWEST_SECONDS = 4.0


class Parcel(NamedTuple):
    """A message on its way.

    Args:
        due: when it arrives, unless others before it are late.
        data: the encoded message; None: the end of this direction.
        note: for whoever records what happens; no part of the message.
    """

    due: float
    data: bytes | None
    note: object


class Direction:
    """The messages from one end to the other.

    Attributes:
        black: what is sent vanishes.
    """

    def __init__(self) -> None:
        self.black = False
        self._parcels: deque[Parcel] = deque()

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel) -> None:
        """Send a message."""
        if not self.black:
            self._parcels.append(parcel)

    def lose(self) -> None:
        """Lose what is on its way, and everything from now on."""
        self.black = True
        self._parcels.clear()

    def take(self, now: float) -> Parcel | None:
        """Return the next message that has arrived."""
        if self._parcels and self._parcels[0].due <= now:
            return self._parcels.popleft()
        return None


class Connection:
    """One call's connection.

    Attributes:
        client_open, server_open: whether that end still uses it.
        harmed: something was done to it, so that silence is no wonder.
        client_learns, server_learns: when that end learns that the connection broke; None: not yet decided, or never.
    """

    def __init__(self, network: "Network") -> None:
        self.to_server = Direction()
        self.to_client = Direction()
        self.client_open = self.server_open = True
        self.client_learns: float | None = None
        self.server_learns: float | None = None
        self.lazy = network.rng.choice([0.0, 0.0, 0.3, SLOWEST_SECONDS])
        self.harmed = self.lazy > 1
        self._network = network

    def send_to_server(self, data: bytes | None) -> None:
        """Send a message of the client; None: its half-close."""
        self.to_server.put(Parcel(self._due(), data, None))

    def send_to_client(self, data: bytes | None, note: object = None) -> None:
        """Send a message of the server; None: the end of the call."""
        self.to_client.put(Parcel(self._due(), data, note))

    def _due(self) -> float:
        network = self._network
        return network.now + network.rng.random() * self.lazy

    def cut(self) -> None:
        """Break it: what is on its way is lost, and each end learns of it some time later."""
        self.harmed = True
        self.to_server.lose()
        self.to_client.lose()
        self.client_learns = self._due_late(self.client_learns)
        self.server_learns = self._due_late(self.server_learns)

    def client_leaves(self) -> bool:
        """Have the client drop the call. Return whether it becomes a ghost: the server does not learn of it."""
        self.client_open = False
        self.harmed = True
        self.to_client.lose()
        ghost = self.to_server.black or self._network.rng.random() < self._network.ghosts
        if not ghost:
            self.server_learns = self._due_late(self.server_learns)
        return ghost

    def server_dies(self) -> None:
        """Have the server's process end. What it sent last may arrive yet."""
        self.server_open = False
        self.harmed = True
        self.to_server.lose()
        if self._network.rng.random() < 0.5:
            self.to_client.lose()
        elif not self.to_client.black:
            # The end of the connection comes behind what was sent.
            self.send_to_client(None)
            return
        self.client_learns = self._due_late(self.client_learns)

    def _due_late(self, known: float | None) -> float:
        network = self._network
        late = network.now + network.rng.random() * SLOWEST_SECONDS
        return late if known is None else min(known, late)

    def client_knows(self) -> bool:
        """Whether the client's end has learned that it broke."""
        return self.client_learns is not None and self.client_learns <= self._network.now

    def server_knows(self) -> bool:
        """Whether the server's end has learned that it broke."""
        return self.server_learns is not None and self.server_learns <= self._network.now


class Network:
    """All connections, and the clock of everybody.

    Attributes:
        now: seconds.
        ghosts: how likely a client that leaves is not heard of.
        counts: how often what was done.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1.0
        self.ghosts = 0.4
        self.connections: list[Connection] = []
        self.accepted: list[Connection] = []
        self.counts: dict[str, int] = {}
        self._healed = False

    def count(self, what: str) -> None:
        """Count something."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def connect(self) -> Connection:
        """Open a connection; the server finds it in ``accepted``."""
        connection = Connection(self)
        self.connections.append(connection)
        self.accepted.append(connection)
        self.count("connections")
        return connection

    def pass_time(self) -> None:
        """Let a moment pass, now and then a long one."""
        if self.rng.random() < 0.003:
            self.now += self.rng.uniform(5, 40)
            for connection in self.connections:
                connection.harmed = True
            self.count("clock jumps")
        else:
            self.now += self.rng.random() * 0.3

    def harm(self) -> None:
        """Do something to a connection now and then."""
        self.connections = [c for c in self.connections if c.client_open or c.server_open]
        if self._healed or not self.connections or self.rng.random() > 0.04:
            return
        connection = self.rng.choice(self.connections)
        chance = self.rng.random()
        if chance < 0.5:
            connection.cut()
            self.count("cuts of connections")
        elif chance < 0.75:
            connection.to_server.black = connection.harmed = True
            self.count("black holes to the server")
        else:
            connection.to_client.black = connection.harmed = True
            self.count("black holes to the client")

    def heal(self) -> None:
        """Harm nothing any more. What has vanished stays away: such connections end by silence."""
        self._healed = True
        self.ghosts = 0.0
