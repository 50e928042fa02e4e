"""Writes and followers at ``replicated(k)``, with real servers: what is acknowledged or shown is on the replicas' disks."""

import functools
import os
import shutil
import signal
import threading

import pytest
from click.testing import Result

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.replica.rounds import Reading
from tests.replica.sets import (
    SOON,
    counted,
    run,
    start_set,
    state_of,
    wait_for,
    wait_until_counted,
    wait_until_equal,
)
from upr_cli_kit.exit_codes import REFUSED
from upr_client import Client
from upr_client.errors import TooFewReplicasError, UnknownOutcomeError

pytestmark = pytest.mark.crash


def test_with_too_few_replicas_nothing_is_numbered(server_process: StartServer) -> None:
    alone = server_process()
    with Client(alone.target, retry_seconds=0) as client:
        with pytest.raises(TooFewReplicasError) as refused:
            client.bucket().set(b"k", b"v", durability="replicated(1)")
        assert refused.value.retriable
        assert "upr-admin topology" in refused.value.hint
    assert {high for _, high, _ in state_of(alone.target)} == {0}
    replica = server_process("--replicate-from", alone.target)
    wait_until_counted([alone, replica], alone)
    with Client(alone.target) as client:
        assert client.bucket().set(b"k", b"v", durability="replicated(1)").seqno == 1
    with Client(alone.target, retry_seconds=0) as client, pytest.raises(TooFewReplicasError):
        client.bucket().set(b"k", b"v", durability="replicated(2)")


def test_what_is_acknowledged_is_on_the_disks_of_so_many_replicas(
    server_process: StartServer,
) -> None:
    active, *replicas = start_set(server_process, replicas=2)
    with Client(active.target) as client:
        bucket = client.bucket()
        for copies in (1, 2):
            for number in range(30):
                key, value = b"%d at %d" % (number, copies), b"%d" % number
                bucket.set(key, value, durability=f"replicated({copies})")
        rows = [(b"row %d" % n, b"v") for n in range(3000)]
        bucket.write_many(rows, durability="replicated(2)")
        with bucket.writer(durability="replicated(1)") as writer:
            for key, _ in rows:
                writer.set(key, b"w")
    for server in (active, *replicas):
        os.kill(server.pid, signal.SIGSTOP)
    for server in (active, *replicas):
        server.kill()
    found: list[dict[bytes, bytes]] = []
    for replica in replicas:
        replica.start()
        with Client(replica.target) as client:
            bucket = client.bucket()
            keys = [b"%d at %d" % (n, copies) for n in range(30) for copies in (1, 2)]
            keys += [key for key, _ in rows]
            found.append(bucket.get_many(keys, read_from="any"))
            for n in range(30):
                assert found[-1][b"%d at 2" % n] == b"%d" % n
    for n in range(30):
        assert any(one.get(b"%d at 1" % n) == b"%d" % n for one in found)
    assert all(any(one.get(key) == b"w" for one in found) for key, _ in rows)
    assert all(one.get(key) in (b"v", b"w") for one in found for key, _ in rows)


def test_a_follower_is_shown_what_was_there_before_the_replica(server_process: StartServer) -> None:
    old = server_process("--flush-seconds", "0.2")
    rows = [(b"key %d" % n, b"v") for n in range(2000)]
    with Client(old.target) as client:
        client.bucket().write_many(rows)
    new = server_process("--replicate-from", old.target)
    wait_until_counted([old, new], old)

    def shown() -> dict[bytes, bytes | None]:
        with Reading([old.target, new.target], "replicated(1)") as reading:
            wait_for(lambda: len(reading.seen) == len(rows), "all of it, though nobody writes")
            return reading.state()

    assert shown() == dict(rows)
    done = run("takeover", "--to", new.target)
    assert done.exit_code == 0, done.output
    wait_until_counted([old, new], new)
    assert shown() == dict(rows)
    old.kill()
    old.start()
    assert shown() == dict(rows)


@pytest.mark.long
def test_a_replica_that_is_stopped_has_the_write_wait_and_its_outcome_be_unknown(
    server_process: StartServer,
) -> None:
    soon = {**SOON, "upr.service.key_value.REPLICATED_SECONDS": 3.0}
    active, replica = start_set(functools.partial(server_process, constants=soon))
    with Client(active.target, retry_seconds=0) as client:
        bucket = client.bucket()
        bucket.set(b"before", b"v", durability="replicated(1)")
        os.kill(replica.pid, signal.SIGSTOP)
        outcomes: list[object] = []

        def write() -> None:
            try:
                outcomes.append(bucket.set(b"late", b"v", durability="replicated(1)"))
            except UnknownOutcomeError as error:
                outcomes.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        with Client(active.target) as other:
            wait_for(lambda: other.bucket().get(b"late") == b"v", "the write to be numbered")
            # Others do not wait for it.
            other.bucket().set(b"meanwhile", b"v")
        assert not outcomes
        thread.join()
        assert isinstance(outcomes[0], UnknownOutcomeError)
        os.kill(replica.pid, signal.SIGCONT)
    with Client(active.target) as client:
        # It was numbered, and is where it was to be as soon as this one is.
        client.bucket().set(b"after", b"v", durability="replicated(1)")
        with Client(replica.target) as copy:
            found = copy.bucket().get_many([b"late", b"after"], read_from="any")
            assert found == {b"late": b"v", b"after": b"v"}


def test_a_replica_counts_when_all_counted_ones_have_stored_that_it_does(
    server_process: StartServer,
) -> None:
    active, first = start_set(server_process)
    first.kill()
    second = server_process("--replicate-from", active.target)
    both = {first.target, second.target}
    wait_for(lambda: counted(active.target) == both, "the second one to be counted")
    wait_until_equal([active, second])
    # The first one could be promoted without asking the second, which it does not know.
    with Client(active.target, retry_seconds=0) as client:
        for _ in range(20):
            with pytest.raises(TooFewReplicasError):
                client.bucket().set(b"k", b"v", durability="replicated(1)")
    first.start()
    with Client(active.target) as client:
        client.bucket().set(b"k", b"v", durability="replicated(2)")
    active.kill()
    done = run("promote", "--target", first.target)
    assert done.exit_code == 0, done.output
    with Client(first.target) as client:
        assert client.bucket().get(b"k") == b"v"


def test_a_server_that_is_gone_for_good_is_forgotten(server_process: StartServer) -> None:
    active, gone, left = start_set(server_process, replicas=2)

    def forget(server: RunningServer) -> Result:
        return run("topology", "forget", server.target, "--target", active.target)

    there = forget(left)
    assert there.exit_code == REFUSED
    assert "must be one that will not come back" in there.stderr
    gone.kill()
    late = server_process("--replicate-from", active.target)
    wait_for(lambda: late.target in counted(active.target), "the late one to be counted")
    # The one that is gone could be promoted without the late one.
    with Client(active.target, retry_seconds=0) as client, pytest.raises(TooFewReplicasError):
        client.bucket().set(b"k", b"v", durability="replicated(2)")
    wait_for(lambda: forget(gone).exit_code == 0, "nobody to be met there")
    with Client(active.target) as client:
        client.bucket().set(b"k", b"v", durability="replicated(2)")
        assert len(list(client.admin.consumers("default"))) == 2
    # The active one counts in its place, until another has all that is there.
    wait_until_counted([active, left, late], active)
    unknown = run("topology", "forget", "nobody:1", "--target", active.target)
    assert "must be the directory, or HOST:PORT, of a server of the set" in unknown.stderr


def test_an_owner_that_was_restarted_knows_who_counts_while_another_one_is_away(
    server_process: StartServer,
) -> None:
    active, first, second = start_set(server_process, replicas=2)
    with Client(active.target) as client:
        client.bucket().set(b"k", b"v", durability="replicated(2)")
    second.kill()
    active.terminate()
    active.start()
    with Client(active.target) as client:
        client.bucket().set(b"k", b"w", durability="replicated(1)")
    active.kill()
    second.start()
    # It is reached as soon as the first one tries that again.
    wait_for(lambda: run("promote", "--target", first.target).exit_code == 0, "a promotion")
    with Client(first.target) as client:
        assert client.bucket().get(b"k") == b"w"


def test_a_follower_sees_only_what_no_promotion_undoes(server_process: StartServer) -> None:
    old, new = start_set(server_process)
    both = [old.target, new.target]
    with (
        Reading(both, "replicated(1)") as safe,
        Reading(both, "disk") as early,
        Client(both, retry_seconds=60) as client,
    ):
        bucket = client.bucket()
        bucket.write_many([(b"key %d" % n, b"v") for n in range(500)])
        bucket.set(b"before", b"v", durability="replicated(1)")
        safe.until(b"before")
        os.kill(new.pid, signal.SIGSTOP)
        lost = [(b"lost %d" % n, b"v") for n in range(50)]
        # More than what lies between the two processes, so that the rest never arrives.
        bucket.set(b"large", bytes(12 * 2**20))
        bucket.write_many(lost)
        for key, _ in lost:
            early.until(key)
        old.kill()
        os.kill(new.pid, signal.SIGCONT)
        done = run("promote", "--force", "--yes", "--target", new.target)
        assert done.exit_code == 0, done.output
        old.start()
        wait_until_counted([old, new], new)
        bucket.write_many([(b"key %d" % n, b"w") for n in range(500)], durability="replicated(1)")
        bucket.set(b"after", b"v", durability="replicated(1)")
        safe.until(b"after")
        early.until(b"after")
        wait_for(lambda: set(safe.state().values()) == {b"v", b"w"}, "what was written again")
        assert not safe.seen & {key for key, _ in lost}
        assert (safe.rollbacks, early.rollbacks > 0) == (0, True)


def test_an_owner_counts_itself_again_when_a_replica_has_lost_what_it_acknowledged(
    server_process: StartServer,
) -> None:
    active, replica = start_set(server_process)
    with Client(active.target) as client:
        client.bucket().set(b"k", b"v", durability="replicated(1)")
        replica.kill()
        shutil.rmtree(replica.data / "buckets")
        replica.start()
        words = "a counted server has less than it acknowledged"
        wait_for(lambda: words in active.log_text(), "the owner to see it")
        # And no more when that one has all of it again.
        wait_until_counted([active, replica], active)
        client.bucket().set(b"after", b"v", durability="replicated(1)")
    active.kill()
    done = run("promote", "--target", replica.target)
    assert done.exit_code == 0, done.output
    with Client(replica.target) as client:
        assert client.bucket().get_many([b"k", b"after"]) == {b"k": b"v", b"after": b"v"}
