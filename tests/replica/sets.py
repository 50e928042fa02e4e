"""Sets of real servers, for tests of who is active."""

from collections.abc import Callable

from click.testing import CliRunner, Result

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, wait_until
from upr.cli import admin
from upr_client import Client, UprError
from upr_client.admin import Topology

SOON = {
    "upr.replica.peers.MEET_SECONDS": 0.1,
    "upr.replica.ownership.MEET_SECONDS": 0.1,
    "upr.replica.ownership.RESUME_SECONDS": 1.0,
    "upr.replica.peers.PROMISE_SECONDS": 3.0,
    "upr.replica.replication.LIST_SECONDS": 0.2,
    "upr_client.backoff.FIRST_SECONDS": 0.02,
    "upr_client.backoff.LONGEST_SECONDS": 0.5,
    "upr_client.backoff.RECONNECT_SECONDS": 0.2,
}
"""Times of servers, shorter than they are: what tests of sets wait for comes at the end of one."""


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(admin.main, arguments)
    assert "Traceback" not in result.output
    return result


def wait_for(ask: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Ask until it is so; the servers are other processes."""
    wait_until(ask, f"in vain for {what}", seconds)


def topology(target: str) -> Topology | None:
    """Return what a server knows; None while it does not answer."""
    try:
        with Client(target) as client:
            return client.admin.topology()
    except UprError:
        return None


def counted(target: str) -> set[str]:
    """Return the addresses that a server takes for counted."""
    known = topology(target)
    return set() if known is None else {one.address for one in known.members if one.counted}


def start_set(start: StartServer, replicas: int = 1) -> list[RunningServer]:
    """Start an active server and replicas of it, and wait until all know that the replicas are counted."""
    servers = [start("--flush-seconds", "600")]
    for _ in range(replicas):
        servers.append(start("--replicate-from", servers[0].target))
    wait_until_counted(servers, servers[0])
    return servers


def wait_until_counted(servers: list[RunningServer], owner: RunningServer) -> None:
    """Wait until each server knows that all but the owner are counted."""
    others = {one.target for one in servers if one is not owner}
    for server in servers:
        wait_for(
            lambda server=server: counted(server.target) == others,  # type: ignore[misc]
            f"{others} to be counted at {server.target}: {topology(server.target)}",
        )


def is_active(server: RunningServer) -> bool:
    known = topology(server.target)
    return known is not None and known.active


def state_of(target: str) -> list[tuple[int, int, int]]:
    """Return each partition's newest id, high and durable seqno at a server."""
    with Client(target) as client:
        found = client.admin.partitions("default")
    return [(one.failover_id, one.high_seqno, one.durable_seqno) for one in found]


def wait_until_equal(servers: list[RunningServer]) -> None:
    """Wait until all servers have the same history up to the same seqnos."""
    wait_for(lambda: len({tuple(state_of(one.target)) for one in servers}) == 1, "one history")
