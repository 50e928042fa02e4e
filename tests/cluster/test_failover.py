"""A cluster goes on by itself: its owner is killed, stopped and cut off, disks are emptied and full, and etcd is away.

``tools/dev.py soak --cluster`` does all of it often, with the times of the product and writers that never write less.
"""

from pathlib import Path

import pytest

from tests.cluster.clusters import owner_of
from tests.cluster.rounds import ETCD, ClusterRounds
from tests.conftest import StartServer
from tests.etcd import running_etcd
from tests.replica.sets import counted, run, wait_for, wait_until_counted
from upr_client import Client

pytestmark = [pytest.mark.crash, pytest.mark.etcd, pytest.mark.long]

SOON = {
    "upr_protocol.ownership.GRANT_SECONDS": 1.2,
    "upr_protocol.ownership.GRANTED_SECONDS": 1.0,
    "upr.replica.fencing.GRANT_SECONDS": 1.2,
    "upr.replica.fencing.GRANTED_SECONDS": 1.0,
    "upr.replica.fencing.ASK_SECONDS": 0.2,
    "upr.replica.fencing.SILENT_SECONDS": 2.0,
    "upr.replica.fencing.LAST_SECONDS": 4.0,
    "upr.cluster.keeper.GRANT_SECONDS": 1.2,
    "upr.cluster.keeper.TURN_SECONDS": 0.4,
    "upr.cluster.keeper.LEASE_SECONDS": 2,
}
"""Times of a cluster that is sooner at everything."""


def test_a_cluster_survives_its_owner_and_etcd(server_process: StartServer, tmp_path: Path) -> None:
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(
            server_process, etcd, tmp_path / "stamps", 1, constants=SOON, sparing=True
        ) as rounds,
    ):
        rounds.kill()
        rounds.pause(4.0)
        rounds.without_etcd(1.0, 5.0)
        rounds.check()
        assert len(rounds.takes) == len(rounds.back) == 1


def test_a_cluster_survives_cut_links(server_process: StartServer, tmp_path: Path) -> None:
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(
            server_process, etcd, tmp_path / "stamps", 2, constants=SOON, linked=True, sparing=True
        ) as rounds,
    ):
        # The owner says nothing to one that hears nothing else of it, and another one does.
        rounds.cut([(0, 1), (0, ETCD)], 4.0)
        # Nobody of the others answers it, and etcd says that they count no more.
        rounds.cut([(1, 0), (2, 0)], 4.0)
        rounds.check()


def test_a_cluster_survives_emptied_and_failed_disks(
    server_process: StartServer, tmp_path: Path
) -> None:
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(
            server_process, etcd, tmp_path / "stamps", 3, constants=SOON, sparing=True
        ) as rounds,
    ):
        rounds.kill(emptied=True)
        rounds.empty_a_replica()
        rounds.need_a_command()
        rounds.fail_disk()
        rounds.check()


def test_a_cluster_is_upgraded_one_by_one_and_waits_for_room(
    server_process: StartServer, tmp_path: Path
) -> None:
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(
            server_process, etcd, tmp_path / "stamps", 4, constants=SOON, sparing=True
        ) as rounds,
    ):
        rounds.fill_disk(3.0)
        rounds.roll()
        rounds.check()
        assert not any("writes failed" in what for what in rounds.counts)


def test_a_replica_on_a_disk_that_hangs_keeps_nobody_from_following_the_owner(
    server_process: StartServer, tmp_path: Path
) -> None:
    """Nothing that it stores fails or ends, and all else goes on: it cannot promise, and who is counted must."""
    hold = tmp_path / "hold"
    points = {"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"}
    constants = SOON | {"upr.replica.inventory.HANGS_SECONDS": 1.5}
    with running_etcd(tmp_path / "etcd") as etcd:
        options = ("--cluster", etcd.cluster)
        first = server_process(*options, constants=constants)
        assert run("promote", "--target", first.target).exit_code == 0
        hung = server_process(*options, environment=points, constants=constants)
        third = server_process(*options, constants=constants)
        wait_until_counted([first, hung, third], first)
        hold.touch()
        try:
            with Client([first.target, third.target]) as client:
                client.bucket("default").set(b"a", b"1")
                wait_for(lambda: counted(first.target) == {third.target}, "one to be counted")
                waits = run("status", "--target", hung.target).output
                assert "a write to the disk of this server has not ended for" in waits
                told = run("takeover", "--to", hung.target)
                assert "a write to the disk of this server has not ended for" in told.output
                first.kill()
                assert owner_of([hung, third]) is third
                assert client.bucket("default").get(b"a") is not None
        finally:
            hold.unlink()
        wait_for(lambda: counted(third.target) == {hung.target}, "it to be counted again")
