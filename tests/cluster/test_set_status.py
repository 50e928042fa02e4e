"""What operators are told of a cluster: its servers, grants and keys, and what is wrong while it is."""

import json
from collections.abc import Iterator

import pytest

from tests.conftest import StartServer
from tests.etcd import NAME, RunningEtcd, running_etcd
from tests.harness import RunningServer, wait_until
from tests.replica.sets import run, topology, wait_until_counted
from tests.service.pages import http_of, numbers
from upr_client import Client, UprError
from upr_client.admin import SetPart, Topology
from upr_protocol.ownership import GRANTED_SECONDS

pytestmark = [pytest.mark.etcd, pytest.mark.long]
SOON = {
    "upr.replica.set_status.PATIENCE_SECONDS": 0.2,
    "upr.replica.fencing.LAST_SECONDS": 1.0,
}


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEtcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


def known(server: RunningServer) -> Topology:
    found = topology(server.target)
    assert found is not None
    return found


def part(server: RunningServer) -> SetPart:
    found = known(server).part
    assert found is not None
    return found


REASONS = {"etcd": "CLUSTER_FAILS", "counted": "NOBODY_COUNTED", "copies": "TOO_FEW_REPLICAS"}


def troubles(server: RunningServer) -> set[str]:
    """Return what is wrong with a server's part, as its metrics say; nothing fits while its status says something else."""
    found = numbers(http_of(server))
    kinds = {kind for kind in REASONS if found["upr_set_trouble", kind]}
    with Client(server.target) as client:
        told = {one.reason for one in client.admin.status().problems}
    return kinds if told == {REASONS[kind] for kind in kinds} else {"they differ"}


def begun_and_ended(server: RunningServer, what: str) -> list[str]:
    lines = [json.loads(line) for line in server.log_text().splitlines() if '"set trouble' in line]
    return [line["event"] for line in lines if line["trouble"] == what]


def test_a_cluster_is_told_with_its_states_grants_and_keys(
    server_process: StartServer, etcd: RunningEtcd
) -> None:
    options = ("--cluster", etcd.cluster, "--http", "127.0.0.1:0", "--min-copies", "1")
    owner = server_process(*options, constants=SOON)
    with Client(owner.target) as client:
        client.admin.promote()
    wait_until(lambda: part(owner).state == "owner", owner.log_text)
    # Alone it has nobody who could follow it, and takes no write.
    wait_until(lambda: troubles(owner) == {"counted", "copies"}, owner.log_text)
    with Client(owner.target, retry_seconds=0) as client, pytest.raises(UprError) as refused:
        client.bucket().set(b"k", b"v")
    assert refused.value.reason == "TOO_FEW_REPLICAS"
    replica = server_process(*options, constants=SOON)
    wait_until_counted([owner, replica], owner)
    wait_until(lambda: not troubles(owner) | troubles(replica), owner.log_text)
    for what in ("counted", "copies"):
        assert begun_and_ended(owner, what) == ["set trouble", "set trouble is over"]
    wait_until(lambda: all(one.has_key for one in known(owner).members), "both keys")
    found = known(owner)
    (own,) = (one for one in found.members if one.active)
    (other,) = (one for one in found.members if not one.active)
    assert (own.address, own.state, own.epoch) == (owner.target, "owner", found.epoch)
    assert (other.address, other.state, other.epoch) == (replica.target, "replica", found.epoch)
    assert 0 < other.grant_seconds <= GRANTED_SECONDS
    mine = part(owner)
    assert (mine.cluster, mine.state, mine.counted, mine.owner_changes) == (NAME, "owner", 1, 0)
    assert 0 < mine.grant_seconds <= GRANTED_SECONDS
    assert mine.etcd_seconds < 60
    theirs = part(replica)
    assert (theirs.state, theirs.grant_seconds) == ("replica", 0.0)

    done = run("topology", "--target", owner.target)
    assert done.exit_code == 0
    _, about, titles, *rows = done.stdout.splitlines()
    assert about.startswith(f"this server: owner in cluster {NAME}, 1 counted, ")
    assert titles.split("  ")[-1].strip() == "in etcd"
    assert {tuple(row.split()[i] for i in (0, 2, 3, -1)) for row in rows} == {
        (owner.target, "owner", "no", "yes"),
        (replica.target, "replica", "yes", "yes"),
    }
    done = run("status", "--target", owner.target)
    assert f"set               owner in cluster {NAME}" in done.stdout

    # Without etcd all goes on, and both say that it is away; then without the replica.
    etcd.kill()
    for server in (owner, replica):
        wait_until(lambda server=server: troubles(server) == {"etcd"}, server.log_text)  # type: ignore[misc]
    assert part(owner).state == "owner"
    etcd.start()
    wait_until(lambda: not troubles(owner) | troubles(replica), owner.log_text)
    replica.kill()
    wait_until(lambda: troubles(owner) == {"counted", "copies"}, owner.log_text)
    found = known(owner)
    assert {one.state for one in found.members} == {"owner", "away"}
    assert "part of the cluster goes on" in owner.log_text()
