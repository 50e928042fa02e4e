"""A cluster goes on by itself: its owner is killed, stopped and cut off, disks are emptied and full, and etcd is away.

``tools/dev.py soak --cluster`` does all of it often, with the times of the product and writers that never write less.
"""

from pathlib import Path

import pytest

from tests.cluster.rounds import ETCD, ClusterRounds
from tests.conftest import StartServer
from tests.etcd import running_etcd

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
