"""Callers: bounds on each peer's open calls, and on the event loop time of its expensive calls.

A peer is a host: the address that a call comes from, without the port; of an IPv6 address the first 64 bits. All
clients behind one proxy, or one NAT, are one peer, so the limits are generous: no peer has more than PEER_CALLS of the
calls of a kind, and the rest is for others.

The time of an expensive call is charged to its peer's account. When the account is empty, the peer's calls wait in the
order of arrival, and are refused if that would take long. Messages of an open call are never refused: the next one is
not read before its turn. Then the call waits for one of the Turns of all peers.

*Turns* run expensive requests one after the other, within a share of the event loop's time. The loop has one thread and
serves callers in the order of arrival: fifty clients that start all partitions in a loop would leave a write one step
in fifty. Of cheap messages so many of one peer are taken in a round of the loop.
"""

import asyncio
import ipaddress
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Final
from urllib.parse import unquote
from weakref import WeakValueDictionary

from upr_protocol.block import POSITION
from upr_protocol.errors import TooManyError
from upr_protocol.limits import (
    FOLLOW_CALLS_MAX,
    OTHER_CALLS_MAX,
    PARTITIONS,
    PEER_CALLS,
    TEXT_CONNECTIONS_MAX,
    WRITE_CALLS_MAX,
)
from upr_protocol.position_table import START
from upr_protocol.wire.v1 import admin_service_pb2 as admin
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import key_value_service_pb2 as kv

SHARE = 0.5
"""Part of the loop's time for all expensive requests together."""


class Turns:
    """Queue in which each caller waits until the callers before it have had their share of time.

    A caller waits for its turn, works, and the work's CPU time is charged: the next turn comes when SHARE of the time
    since then covers it. A request with an empty queue and no debt begins at once.
    """

    def __init__(self) -> None:
        self._first = asyncio.Lock()
        self._free_at = 0.0

    async def turn(self) -> None:
        """Wait for a turn. Callers are served in the order in which they came."""
        loop = asyncio.get_running_loop()
        async with self._first:
            while True:
                left = self._free_at - loop.time()
                if left <= 0:
                    return
                # Look again: another charge may have come meanwhile. uvloop waits for whole milliseconds, and not at all for less
                # than half of one.
                await asyncio.sleep(max(left, 0.001))

    def charge(self, seconds: float) -> None:
        """Charge loop time that a request has used."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + seconds * (1 / SHARE - 1)


ROUND_MESSAGES: Final = 16
"""Messages of one peer that are taken in a round of the event loop; they take some milliseconds."""


class LoopRounds:
    """Rounds of the event loop, in each of which ROUND_MESSAGES messages of one peer are taken; the others wait in order.

    A call has some ten steps, each in a round of its own. With a thousand busy calls, and a message of each in every
    round, a new call of another peer would take seconds.
    """

    def __init__(self) -> None:
        self._left = ROUND_MESSAGES
        self._waiting = deque[asyncio.Future[None]]()

    async def turn(self) -> None:
        """Wait for a round with room."""
        if self._left:
            self._take()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _take(self) -> None:
        """Count a message; the first of a round has the next one begin."""
        if self._left == ROUND_MESSAGES:
            # Before it is counted: where there is no memory for it, the next message has it begin.
            asyncio.get_running_loop().call_soon(self._next)
        self._left -= 1

    def _next(self) -> None:
        self._left = ROUND_MESSAGES
        while self._waiting and self._left:
            # Its call may have ended meanwhile.
            if not self._waiting[0].done():
                self._take()
                self._waiting[0].set_result(None)
            self._waiting.popleft()


PEER_SHARE: Final = 0.4
PEER_BURST_SECONDS: Final = 5.0
"""Part of a CPU for a peer's expensive calls in the long run, and the seconds before that applies."""
KEPT_UP_BURST_SECONDS: Final = 0.5
"""As PEER_BURST_SECONDS, of messages that keep calls going: acknowledgements, renewals, releases."""
WAIT_SECONDS: Final = 10.0
"""Longest wait for a turn; a call that would wait longer is refused."""
WAIT_SHARE: Final = 0.8
"""Longest wait for a turn, as a part of the time that the call may take: who is refused learns why, and when to come back."""
REFUSED_SECONDS: Final = 1.0
"""Delay of a refusal, because a client that retries at once costs as much with each refusal."""
WAIT_BYTES: Final = 2**20
"""Largest request that is kept while it waits; a larger one is refused."""
ACCOUNTS_MAX: Final = 4096
LARGE_BYTES_A_SECOND: Final = 50e6
LARGE_BURST_BYTES: Final = 256 * 2**20
"""Bytes of a peer's large writes, by rate and burst, above which its next Write call waits: receiving a write is work
even if it is refused."""
OPEN_BYTES: Final = 2 * 2**20
"""Bytes charged for such a call until it has sent more."""
CALL_SECONDS: Final = 0.0005
"""Seconds charged for any call; a streaming call costs twice that."""
BYTES_A_SECOND: Final = 200e6
CHEAP_SECONDS: Final = 0.002
"""Smallest cost in seconds that is charged and needs a turn; that of a call's cheap messages is added up."""
MESSAGE_SECONDS: Final = 50e-6
"""Cost of any message about streams."""
_DEAR, _KEPT_UP, _LARGE = "dear", "kept up", "large"
_RATES: Final = {
    _DEAR: (PEER_SHARE, PEER_BURST_SECONDS),
    _KEPT_UP: (PEER_SHARE, KEPT_UP_BURST_SECONDS),
    _LARGE: (LARGE_BYTES_A_SECOND, LARGE_BURST_BYTES),
}
"""Rate and burst of each account of a peer, in seconds of a CPU and in bytes."""
_KINDS: Final = {
    "Follow": ("Follow", FOLLOW_CALLS_MAX, "one call carries any number of partitions"),
    "Write": ("Write", WRITE_CALLS_MAX, "one call carries any number of writes"),
    "Text": ("Text", TEXT_CONNECTIONS_MAX, "one connection carries any number of partitions"),
}
_OTHER: Final = ("other", OTHER_CALLS_MAX, "wait for the answers of some")


@lru_cache(ACCOUNTS_MAX)
def peer_of(address: str) -> str:
    """Return the peer of an address as gRPC has it, such as ``ipv4:127.0.0.1:7711``."""
    kind, _, rest = unquote(address).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return address
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return host


def seconds_of(request: object) -> float:
    """Return the approximate CPU seconds of a unary request."""
    match request:
        case kv.GetRequest():
            items, each = len(request.keys) + len(request.at_least) // 8, 9e-6
        case changes.HelloRequest():
            items, each = len(request.partitions), 8e-6
        case changes.GetFailoverLogRequest():
            items, each = len(request.partitions) or PARTITIONS, 4e-6
        case changes.LoadPositionsRequest():
            items, each = len(request.partitions) or PARTITIONS, 10e-6
        case changes.SavePositionsRequest():
            items, each = len(request.positions), 20e-6
        case changes.CreateCutRequest() | changes.RenewCutRequest() | changes.ReleaseCutRequest():
            items, each = 1, 4e-3
        case changes.ListCutsRequest():
            items, each = 1, 80e-3 if request.with_partitions else 1e-3
        case admin.CreateBucketRequest():
            items, each = 1, 30e-3
        case admin.DropBucketRequest():
            items, each = 1, 6e-3
        case admin.GetStorageRequest():
            items, each = 1, 20e-3
        case admin.GetPartitionsRequest():
            items, each = len(request.partitions) or PARTITIONS, 3e-6
        case admin.ListConsumersRequest():
            items, each = 1, 0.1 if request.with_positions else 10e-3
        case admin.PurgeRequest() | admin.ResetConsumerRequest():
            items, each = len(request.partitions) or PARTITIONS, 50e-6
        case _:
            items, each = 0, 0.0
    return items * each


def seconds_of_streams(request: changes.FollowRequest) -> float:
    """Return the approximate CPU seconds of a message about streams."""
    start = request.start
    return (
        MESSAGE_SECONDS
        + 30e-6 * len(start.partitions)
        + len(start.table) / START.itemsize * 3e-6
        + 4e-6 * len(request.stop.partitions)
        + len(request.ack.positions) / POSITION.itemsize * 1e-6
    )


class _Account:
    """Account of CPU seconds, or bytes, filled at a rate up to a burst."""

    __slots__ = ("_burst", "_paid", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._paid = now - burst / rate

    def wait(self, now: float) -> float:
        """Return the seconds until the account is positive again."""
        return self._paid - now

    def take(self, amount: float, now: float) -> None:
        """Take out an amount; the balance may become negative."""
        self._paid = max(self._paid, now - self._burst / self._rate) + amount / self._rate

    def is_full(self, now: float) -> bool:
        return self._paid <= now - self._burst / self._rate


class Callers:
    """Calls of one server.

    Attributes:
        turns: of the expensive requests of all peers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turns = Turns()
        self._clock = clock
        self._open = defaultdict[tuple[str, str], int](int)
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._rounds = WeakValueDictionary[str, LoopRounds]()

    def rounds(self, peer: str) -> LoopRounds:
        """Return the rounds that a peer's calls share, for as long as one has them."""
        return self._rounds.get(peer) or self._rounds.setdefault(peer, LoopRounds())

    def open(self, kind: str, peer: str) -> Callable[[], None]:
        """Count a call from its arrival on, until what this returns is called.

        Args:
            kind: ``Follow``, ``Write`` or ``Text``, a connection of the text port; all others are counted together.

        Raises:
            TooManyError: the limit of open calls of the kind is reached, in total or for this peer.
        """
        kind, limit, hint = _KINDS.get(kind, _OTHER)
        count = self._open
        every, mine = (kind, ""), (kind, peer)
        for key, most in ((every, limit), (mine, int(limit * PEER_CALLS))):
            if count[key] >= most:
                whose = f" of {peer}" if key[1] else ""
                raise TooManyError(
                    f"open {kind} calls{whose} are {count[key]}; must be below {most}", hint=hint
                )
        count[every] += 1
        count[mine] += 1
        return partial(self._close, every, mine)

    def _close(self, *keys: tuple[str, str]) -> None:
        for key in keys:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    async def pay(
        self, peer: str, seconds: float, size: int = 0, within: float | None = None
    ) -> None:
        """Charge an arriving request of ``size`` bytes its approximate cost, and wait for its turn.

        Args:
            within: seconds that the call may take; None without end.

        Raises:
            TooManyError: that would take WAIT_SECONDS, or WAIT_SHARE of what the call may take, or longer; nothing is
                charged.
        """
        if seconds < CHEAP_SECONDS:
            # Cheap requests are free: many clients behind one address that read a key each are no attack.
            return
        left = self._account(peer).wait(self._clock())
        longest = WAIT_SECONDS if within is None else min(WAIT_SECONDS, WAIT_SHARE * within)
        if left > 0 and (left >= longest or size > WAIT_BYTES):
            # Not beyond its deadline: it would not learn why.
            await asyncio.sleep(min(REFUSED_SECONDS, longest))
            raise TooManyError(
                f"the calls of {peer} take more than their share of the server's time",
                hint=f"wait {left:.1f} s, and ask for less at a time",
            )
        try:
            # What those before it will have used by then nobody knows.
            async with asyncio.timeout(longest):
                await self.turn(peer, seconds)
        except TimeoutError:
            raise TooManyError(
                "expensive calls, of all peers together, take more than their share of the server's time",
                hint=f"wait {longest:.1f} s, and ask for less at a time",
            ) from None
        self.turns.charge(seconds)

    async def turn(self, peer: str, seconds: float) -> None:
        """Charge a peer, and wait for its turn, however long that takes.

        Args:
            seconds: the expected cost; ``charged`` corrects it to the real one.
        """
        account = self._account(peer)
        try:
            await self._pay(account, seconds)
            if seconds >= CHEAP_SECONDS:
                await self.turns.turn()
        except asyncio.CancelledError:
            # Refund the charge: clients that give up before their turn would otherwise block each other.
            account.take(-seconds, self._clock())
            raise

    @contextmanager
    def charged(self, peer: str, seconds: float) -> Iterator[None]:
        """Correct what ``turn`` has charged by the CPU time of the body, which must not await."""
        began = time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - began
            self.turns.charge(took)
            self._account(peer).take(took - seconds, self._clock())

    async def keep_up(self, peer: str, seconds: float) -> None:
        """Charge a peer messages that keep its calls going, apart from all else that it asks; wait until it may go on."""
        await self._pay(self._account(peer, _KEPT_UP), seconds)

    async def _pay(self, account: _Account, seconds: float) -> None:
        """Charge an account, and wait until it was positive before that."""
        now = self._clock()
        left = account.wait(now)
        # Charged on arrival, so that the next request waits behind this one.
        account.take(seconds, now)
        if left > 0:
            await asyncio.sleep(left)

    def large_write(self, peer: str, size: int) -> None:
        """Charge the bytes of a peer's large write."""
        self._account(peer, _LARGE).take(size, self._clock())

    async def open_write(self, peer: str) -> None:
        """Wait until a peer may open another Write call; TooManyError if that would take WAIT_SECONDS or longer."""
        account, waited = self._account(peer, _LARGE), 0.0
        while (left := account.wait(self._clock())) > 0:
            if waited + left >= WAIT_SECONDS:
                await asyncio.sleep(REFUSED_SECONDS)
                raise TooManyError(
                    f"the large writes of {peer} take more than their share of the server's time",
                    hint=f"wait {left:.0f} s, and keep Write calls open",
                )
            await asyncio.sleep(left)
            waited += left
        if waited:
            account.take(OPEN_BYTES, self._clock())

    def _account(self, peer: str, kind: str = _DEAR) -> _Account:
        """Return one of a peer's accounts."""
        account = self._accounts.get((peer, kind))
        if account is None:
            now = self._clock()
            if len(self._accounts) >= ACCOUNTS_MAX:
                self._accounts = {
                    key: one for key, one in self._accounts.items() if not one.is_full(now)
                }
            account = self._accounts[peer, kind] = _Account(*_RATES[kind], now)
        return account
