"""A few rounds of failovers under load; ``tools/dev.py soak --replicas`` does twenty, again and again."""

import pytest

from tests.conftest import StartServer
from tests.replica.rounds import Rounds


@pytest.mark.crash
def test_what_is_replicated_survives_promotions(server_process: StartServer) -> None:
    with Rounds(server_process, seed=7) as rounds:
        for _ in range(2):
            rounds.run()
        rounds.check()
        assert rounds.counts["rounds"] == 2
        # It was hard: something was lost that was promised to nobody.
        assert rounds.counts["undone at disk"] > 0
        assert rounds.counts["rollbacks at disk"] > 0
