"""A few rounds of failovers under load, and a join; ``tools/dev.py soak --replicas`` does twenty rounds, again and again."""

import os
import signal

import pytest

from tests.conftest import StartServer
from tests.proxy import DIRECTIONS, Proxy
from tests.replica.joining import join
from tests.replica.rounds import GATHERED, SAFE, Rounds, shown, undone
from tests.replica.sets import start_set, wait_for, wait_until_counted, wait_until_equal
from tests.service.keys import some_keys
from upr_client import Client

pytestmark = pytest.mark.crash


@pytest.mark.long
def test_what_is_replicated_survives_promotions(server_process: StartServer) -> None:
    with Rounds(server_process, seed=3) as rounds:
        for _ in range(2):
            rounds.run()
        rounds.check()
        assert rounds.counts["rounds"] == 2
        # It was hard: something was lost that was promised to nobody.
        assert rounds.counts["undone at disk"] > 0
        assert rounds.counts["rollbacks at disk"] > 0
        # Nor had the new one all that was: some of it came from the other.
        assert rounds.counts[GATHERED] > 0


def test_a_replica_that_joins_under_writers_has_everything(server_process: StartServer) -> None:
    join(server_process, 24 * 2**20)


@pytest.mark.long
def test_back_and_forth_with_rows_that_nobody_else_had(server_process: StartServer) -> None:
    """A has rows that B lacks and dies; B is promoted; A comes back, undoes them, and is the active one again."""
    first, second = start_set(server_process)
    with Client(first.target) as client:
        client.bucket().write_many([(b"both %d" % n, b"v") for n in range(100)], SAFE)
        os.kill(second.pid, signal.SIGSTOP)
        # More than what lies between the two processes, so that the rest never arrives.
        unsent = [(b"large", bytes(12 * 2**20)), *((b"unsent %d" % n, b"v") for n in range(100))]
        for key, value in unsent:
            client.bucket().set(key, value)
    first.kill()
    os.kill(second.pid, signal.SIGCONT)
    with Client(second.target) as client:
        client.admin.promote()
        client.bucket().write_many([(b"second %d" % n, b"v") for n in range(100)])
    first.start()
    wait_until_counted([first, second], second)
    with Client(first.target) as client:
        assert client.admin.promote(takeover=True).records == 0
        client.bucket().set(b"first", b"again")
    wait_until_counted([first, second], first)
    wait_until_equal([first, second])
    kept = (
        {b"both %d" % n for n in range(100)} | {b"second %d" % n for n in range(100)} | {b"first"}
    )
    states = [shown(one) for one in (first, second)]
    assert states[0] == states[1]
    # One or the other of the first of them may have arrived.
    assert states[0].keys() - kept <= {key for key, _ in unsent[:2]}
    assert dict(unsent).items() <= {**states[0], **undone([first])}.items()
    assert len(undone([first])) >= len(unsent) - 2


@pytest.mark.long
def test_a_promotion_in_the_middle_of_a_snapshot_goes_back_to_the_marker_before_it(
    server_process: StartServer,
) -> None:
    keys = some_keys(3, 700)
    rows = [(key, b"old") for key in keys[:100]]
    rows += [(keys[n % 700], b"%d" % n + bytes(2000)) for n in range(2100)]
    with Proxy() as proxy:
        through = {"grpc_proxy": f"http://{proxy.target}", "no_grpc_proxy": ""}
        # What the replica lacks is flushed for room at once: a long stretch, in which each key is there once.
        active = server_process("--tail-bytes", "5000000", "--flush-seconds", "600")
        replica = server_process("--replicate-from", active.target, environment=through)
        wait_until_counted([active, replica], active)
        with Client(active.target) as client:
            client.bucket().write_many(rows[:100], SAFE)
            replica.kill()
            for first in range(100, len(rows), 100):
                client.bucket().write_many(rows[first : first + 100])
        proxy.limit(500_000)
        replica.start()
        with Client(replica.target) as client:
            high = 0

            def is_in_it() -> bool:
                nonlocal high
                high = client.admin.partitions("default")[3].high_seqno
                return high > 150

            wait_for(is_in_it, "the stretch to come")
            # What is still on its way is lost.
            proxy.black_hole(*DIRECTIONS)
            active.kill()
            client.admin.promote(force=True)
            (log,) = client.admin.failover_logs("default", [3]).values()
        # Above the marker it has a part of a stretch, which is no state that ever was.
        record = log.newest.seqno
        assert 100 <= record < high
        assert shown(replica) == dict(rows[:record])
        proxy.heal()
        active.start()
        wait_until_counted([active, replica], replica)
        wait_until_equal([active, replica])
    assert shown(active) == dict(rows[:record])
    assert undone([active]) == dict(rows[record:])
