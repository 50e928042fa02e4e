"""Sets of servers in one process, whose parts tests reach."""

from collections.abc import Awaitable, Callable

from tests.harness import poll
from upr.replica.methods import ReplicaMethods
from upr.replica.owning import Owning
from upr.service.server import Server

Start = Callable[..., Awaitable["Member"]]


class Member:
    """One server of a set."""

    def __init__(self, server: Server) -> None:
        self.server = server
        methods = server._sets
        assert isinstance(methods, ReplicaMethods)
        self.owning: Owning = methods._owning
        self.catalog = server._catalog
        self.target = server.address
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True
        await self.server.stop()

    @property
    def names(self) -> list[str]:
        return sorted(host.bucket.identity.name for host in self.catalog.hosts)


async def until(ask: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return ask()

    await poll(asked)


async def start_set(start: Start, replicas: int = 1) -> list[Member]:
    """Start an active server and replicas, and wait until all know that the replicas are counted."""
    first = await start()
    members = [first, *[await start(first) for _ in range(replicas)]]
    others = {one.owning.standing.directory for one in members[1:]}
    await until(lambda: all(one.owning.standing.row.counted == others for one in members))
    return members


async def leave_alone(member: Member) -> None:
    """Have a server follow nobody, and meet nobody by itself."""
    member.owning._paused = True
    await member.owning.follow_nobody()
