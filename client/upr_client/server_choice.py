"""Choice of a server, without I/O: those that a client knows, which of them is called, and which one next.

Whoever calls these holds a lock.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from upr_client import backoff
from upr_client.endpoints import is_server_name, moves_on
from upr_protocol.errors import UprError
from upr_protocol.limits import SERVERS_MAX

STAYS_MAX: Final = 8
"""Times in a row for which a server that is about to be active is asked again before another one is."""


class Servers:
    """The endpoints of a client: what the application gave, and behind it what servers named.

    Args:
        given: at least one.
        only_given: whether servers that were named are not used.

    Attributes:
        all: in the order in which they are tried, each once.
    """

    def __init__(self, given: tuple[str, ...], *, only_given: bool = False) -> None:
        self.all = self.given = given
        self._only_given = only_given

    def learn(self, names: Iterable[str]) -> None:
        """Remember servers that another one named, SERVERS_MAX beside those given; new names push out those that were
        new first.

        What is no HOST:PORT is left out: a server must not lead a client to a Unix socket of its machine.
        """
        fresh = [name for name in names if name not in self.all and is_server_name(name)]
        if fresh and not self._only_given:
            learned = dict.fromkeys((*fresh, *self.all[len(self.given) :]))
            self.all = (*self.given, *list(learned)[:SERVERS_MAX])

    def behind(self, endpoint: str) -> Iterator[str]:
        """Iterate over all endpoints: those behind one, then from the first."""
        at = self.all.index(endpoint) + 1 if endpoint in self.all else 0
        yield from (*self.all[at:], *self.all[:at])


class Route:
    """Where the calls of one kind go.

    Args:
        servers: to choose from.
        current: where to begin; empty for the first one.

    Attributes:
        current: the endpoint of the next call.
    """

    def __init__(self, servers: Servers, current: str = "") -> None:
        self.current = current or servers.given[0]
        self._servers = servers
        self._tried: set[str] = set()
        self._stays = 0

    def worked(self, endpoint: str) -> None:
        """A call to an endpoint did what it was for."""
        if endpoint == self.current:
            self._tried.clear()
            self._stays = 0

    def failed(self, error: UprError, endpoint: str) -> float | None:
        """A call to an endpoint failed: go on to another one, if this is the current one and another may do better.

        That is the server that the error names as the active one, unless it was tried since a call worked last; else
        the next one that was not tried, so that a stale name keeps the client from none.

        Returns:
            The longest pause before the next call, seconds; None for one that grows with the attempts.
        """
        owner = error.owner
        if endpoint != self.current:
            return 0.0 if owner == self.current else None
        if not moves_on(error):
            return None
        if owner == endpoint and self._stays < STAYS_MAX:
            # It is becoming active, which takes a moment; but it may fail, or another one may be active meanwhile.
            self._stays += 1
            return backoff.FIRST_SECONDS
        self._stays = 0
        self._tried.add(endpoint)
        to = self.another(self._tried, owner)
        if to is None:
            # Each was tried: once more round.
            self._tried.clear()
            self.current = next(self._servers.behind(endpoint))
            return None
        self.current = to
        return 0.0 if to == owner else None

    def another(self, tried: Collection[str], named: str) -> str | None:
        """Return an endpoint that was not tried: the named one, the current one, the next; None where each was."""
        # A name that is not among the endpoints may not be followed.
        first = [named] if named in self._servers.all else []
        order = (*first, self.current, *self._servers.behind(self.current))
        return next((endpoint for endpoint in order if endpoint not in tried), None)
