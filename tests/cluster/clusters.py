"""Clusters of real servers, for tests of failover without an operator."""

import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from tests.conftest import StartServer
from tests.etcd import RunningEtcd
from tests.harness import WAIT_SECONDS, RunningServer, wait_until
from tests.replica.sets import is_active, run, wait_for, wait_until_counted
from upr_client import Client


def start_cluster(start: StartServer, etcd: RunningEtcd, count: int = 3) -> list[RunningServer]:
    """Start servers of a cluster; the first is active, and all know that the others are counted."""
    options = ("--cluster", etcd.cluster, "--flush-seconds", "600")
    servers = [start(*options)]
    with Client(servers[0].target) as client:
        client.admin.promote()
    wait_for(lambda: is_active(servers[0]), "the first server to be active")
    servers += [start(*options) for _ in range(count - 1)]
    wait_until_counted(servers, servers[0])
    return servers


def owner_of(servers: Sequence[RunningServer], seconds: float = WAIT_SECONDS) -> RunningServer:
    """Wait until one of the servers is active, and return it."""
    active: list[RunningServer] = []

    def is_there() -> bool:
        active.extend(one for one in servers if one.running and is_active(one))
        return bool(active)

    wait_for(is_there, "one to be active", seconds)
    return active[0]


def stop(server: RunningServer) -> None:
    """SIGSTOP."""
    os.kill(server.pid, signal.SIGSTOP)


def go_on(server: RunningServer) -> None:
    """SIGCONT."""
    os.kill(server.pid, signal.SIGCONT)


def drained(server: RunningServer) -> Any:
    """Drain a server, and return what is told; say it again while, on a busy machine, another one is a moment behind or late."""
    told: list[str] = []

    def is_done() -> bool:
        done = run("drain", "--json", "--target", server.target)
        told.append(done.output)
        return done.exit_code == 0

    wait_until(is_done, lambda: told[-1])
    return json.loads(told[-1])
