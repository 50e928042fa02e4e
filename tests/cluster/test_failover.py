"""A cluster goes on by itself: its owner is killed, stopped, and etcd is away; ``tools/dev.py soak --cluster`` does it often."""

import functools
from pathlib import Path

import pytest

from tests.cluster.clusters import running_etcd
from tests.cluster.rounds import ClusterRounds
from tests.conftest import StartServer
from tests.replica.sets import SOON

pytestmark = [pytest.mark.crash, pytest.mark.etcd, pytest.mark.long]
SOONER = SOON | {
    "upr.cluster.keeper.LEASE_SECONDS": 3,
    "upr.cluster.keeper.RESUME_SECONDS": 1.0,
    "upr.cluster.keeper.GRANT_SECONDS": 2.0,
    "upr.replica.agreeing.GRANT_SECONDS": 2.0,
    "upr_protocol.ownership.GRANT_SECONDS": 2.0,
    "upr.replica.agreeing.GRANTED_SECONDS": 1.6,
    "upr_protocol.ownership.GRANTED_SECONDS": 1.6,
    "upr.replica.agreeing.ASK_SECONDS": 0.3,
    "upr.replica.agreeing.SILENT_SECONDS": 3.0,
    "upr.replica.agreeing.LAST_SECONDS": 6.0,
}
"""Times of a cluster in the order that they have, shorter; the soak has them as they are."""


def test_a_cluster_survives_its_owner_and_etcd(server_process: StartServer, tmp_path: Path) -> None:
    start = functools.partial(server_process, constants=SOONER)
    with (
        running_etcd(tmp_path / "etcd") as etcd,
        ClusterRounds(start, etcd, tmp_path / "stamps", seed=1) as rounds,
    ):
        rounds.kill(emptied=True)
        rounds.pause(6.0)
        rounds.without_etcd(2.0)
        rounds.check()
        # What comes at most ten seconds later on an idle machine, and the rounds of the soak look at that.
        assert len(rounds.takes) == 2
