"""A cluster goes on by itself: its owner is killed, stopped, and etcd is away; ``tools/dev.py soak --cluster`` does it often."""

from pathlib import Path

import pytest

from tests.cluster.clusters import running_etcd
from tests.cluster.rounds import ClusterRounds
from tests.conftest import StartServer

pytestmark = [pytest.mark.crash, pytest.mark.etcd, pytest.mark.long]


def test_a_cluster_survives_its_owner_and_etcd(server_process: StartServer, tmp_path: Path) -> None:
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(server_process, etcd, tmp_path / "stamps", seed=1) as rounds,
    ):
        rounds.kill(emptied=True)
        rounds.pause(9.0)
        rounds.without_etcd(3.0)
        rounds.check()
        # What comes at most ten seconds later on an idle machine, and the rounds of the soak look at that.
        assert len(rounds.takes) == 2
