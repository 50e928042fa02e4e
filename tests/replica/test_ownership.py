"""Who is active: promotion, takeover, and the former active one that comes back, with real servers."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.replica.sets import (
    counted,
    is_active,
    run,
    start_set,
    state_of,
    topology,
    wait_for,
    wait_until_counted,
    wait_until_equal,
)
from upr_cli_kit.exit_codes import REFUSED
from upr_client import Client, UprError

ONE_OWNER_SECONDS = 10.0
"""Time after one command until there is one owner, whoever was killed in a takeover."""


class Writing:
    """A writer on a thread: it writes one key after the other, each acknowledged, over all endpoints."""

    def __init__(self, endpoints: list[str]) -> None:
        self.acknowledged: dict[bytes, bytes] = {}
        self.longest = 0.0
        self.error: UprError | None = None
        self._endpoints = endpoints
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Writing":
        self._thread.start()
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with Client(self._endpoints, retry_seconds=60) as client:
                bucket = client.bucket()
                while not self._stop.is_set():
                    key = b"%d" % len(self.acknowledged)
                    began = time.monotonic()
                    bucket.set(key, b"v")
                    self.longest = max(self.longest, time.monotonic() - began)
                    self.acknowledged[key] = b"v"
        except UprError as error:
            self.error = error

    def go_on(self) -> None:
        """Wait until more is acknowledged than was."""
        before = len(self.acknowledged)
        wait_for(lambda: len(self.acknowledged) > before or self.error is not None, "a write")


@pytest.mark.long
def test_a_replica_is_promoted_after_sigkill_and_the_old_one_comes_back(
    server_process: StartServer,
) -> None:
    old, new = start_set(server_process)
    with Writing([old.target, new.target]) as writing:
        for _ in range(20):
            writing.go_on()
        old.kill()
        before = len(writing.acknowledged)
        done = run("promote", "--target", new.target, "--json")
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        assert (document["epoch"], document["records"], document["without"]) == (2, 1024, [])
        for _ in range(20):
            writing.go_on()
        old.start()
        wait_until_counted([old, new], new)
        writing.go_on()
    wait_until_equal([old, new])
    after = dict(list(writing.acknowledged.items())[before:])
    for server in (old, new):
        with Client(server.target) as client:
            assert client.bucket().get_many(list(after), read_from="any") == after
    known = topology(old.target)
    assert known is not None
    assert known.owner is not None
    assert known.owner.address == new.target


@pytest.mark.long
def test_a_former_owner_that_was_only_stopped_undoes_and_follows_without_a_restart(
    server_process: StartServer,
) -> None:
    old, new = start_set(server_process)
    with Client(old.target) as client:
        for number in range(20):
            client.bucket().set(b"%d" % number, b"v")
    wait_until_equal([old, new])
    os.kill(new.pid, signal.SIGSTOP)
    with Client(old.target) as client:
        client.bucket().set(b"only here", bytes(2**20))
    os.kill(old.pid, signal.SIGSTOP)
    os.kill(new.pid, signal.SIGCONT)
    done = run("promote", "--force", "--yes", "--target", new.target)
    assert done.exit_code == 0, done.output
    with Client(new.target) as client:
        client.bucket().set(b"0", b"new")
    os.kill(old.pid, signal.SIGCONT)
    wait_until_counted([old, new], new)
    wait_until_equal([old, new])


def test_takeovers_under_load_lose_nothing_and_make_no_record(server_process: StartServer) -> None:
    take_over(server_process, 2)


def take_over(start: StartServer, times: int) -> float:
    """Have two servers hand over to each other under a writer; return its longest pause, in seconds."""
    servers = start_set(start)
    ids = [row[0] for row in state_of(servers[0].target)]
    with Writing([servers[0].target, servers[1].target]) as writing:
        for turn in range(times):
            source, target = servers[turn % 2], servers[(turn + 1) % 2]
            writing.go_on()
            done = run("takeover", "--to", target.target, "--json")
            assert done.exit_code == 0, done.output
            assert json.loads(done.stdout)["records"] == 0
            wait_until_counted(servers, target)
            assert not is_active(source)
            writing.go_on()
    wait_until_equal(servers)
    state = state_of(servers[0].target)
    assert [row[0] for row in state] == ids
    # Each write once: no key was written twice.
    assert sum(row[1] for row in state) == len(writing.acknowledged)
    return writing.longest


def is_in_step(server: RunningServer, at: RunningServer) -> bool:
    known = topology(at.target)
    return known is None or any(m.in_step for m in known.members if m.address == server.target)


@pytest.mark.crash
@pytest.mark.parametrize("order", ["takeover --to", "promote --target"])
def test_writers_go_on_elsewhere_when_nothing_more_can_be_stored(
    server_process: StartServer, tmp_path: Path, order: str
) -> None:
    fails = tmp_path / "fails"
    armed = f"journal.before_sync=error-while:EIO:{fails}"
    old = server_process("--flush-seconds", "600", environment={"UPR_FAILPOINTS": armed})
    new = server_process("--replicate-from", old.target)
    wait_until_counted([old, new], old)
    with Writing([old.target, new.target]) as writing:
        fails.touch()
        wait_for(lambda: "storage failed" in old.log_text(), "the failure")
        wait_for(lambda: not is_in_step(old, at=new), "the next one to hear of it")
        done = run(*order.split(), new.target, "--json")
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        # What was numbered and not stored is undone.
        assert (document["epoch"], document["records"]) == (2, 1024)
        writing.go_on()
        refused = run("promote", "--force", "--yes", "--target", old.target)
        assert "fsync" in refused.output
        fails.unlink()
        assert old.terminate() == 1
        old.start()
        wait_until_counted([old, new], new)
    wait_until_equal([old, new])
    with Client(new.target) as client:
        assert client.bucket().get_many(list(writing.acknowledged)) == writing.acknowledged


@pytest.mark.long
def test_a_promotion_that_may_lose_something_needs_force(server_process: StartServer) -> None:
    owner, first, second = start_set(server_process, replicas=2)
    with Client(owner.target) as client:
        for number in range(50):
            client.bucket().set(b"%d" % number, b"v")
    wait_until_equal([owner, first, second])
    owner.kill()
    second.kill()
    refused = run("promote", "--target", first.target)
    assert refused.exit_code == REFUSED, refused.output
    assert second.target in refused.stderr
    assert "--force" in refused.stderr
    assert (is_active(first), topology(first.target).promised) == (False, 1)  # type: ignore[union-attr]

    done = run("promote", "--force", "--yes", "--target", first.target)
    assert done.exit_code == 0, done.output
    assert f"without {second.target}" in done.stderr
    assert is_active(first)
    assert counted(first.target) == {first.target}
    # Those that were away follow, and are counted again.
    owner.start()
    second.start()
    wait_until_counted([owner, first, second], first)
    wait_until_equal([owner, first, second])


def test_a_replica_that_has_joined_nobody_is_not_promoted(server_process: StartServer) -> None:
    owner = server_process()
    replica = server_process("--replicate-from", "127.0.0.1:1")
    refused = run("promote", "--target", replica.target)
    assert refused.exit_code == REFUSED
    assert "joined no set" in refused.stderr
    assert is_active(owner)


@pytest.mark.parametrize("end", [RunningServer.kill, RunningServer.terminate])
def test_a_replica_that_was_in_step_is_promoted_after_a_restart_too(
    server_process: StartServer, end: Callable[[RunningServer], object]
) -> None:
    owner, replica = start_set(server_process)
    with Client(owner.target) as client:
        client.bucket().set(b"k", b"v")
    wait_until_equal([owner, replica])
    owner.kill()
    end(replica)
    replica.start()
    done = run("promote", "--target", replica.target)
    assert done.exit_code == 0, done.output
    with Client(replica.target) as client:
        assert client.bucket().get(b"k") == b"v"
        client.bucket().set(b"k", b"w")


def test_a_server_on_every_address_is_replicated_when_it_says_where_it_is(
    server_process: StartServer,
) -> None:
    upstream = server_process()
    port = upstream.target.rpartition(":")[2]
    upstream.terminate()
    # Alone it needs nothing.
    upstream.target, upstream.options = f"0.0.0.0:{port}", ["--insecure"]
    upstream.start()
    replica = server_process("--replicate-from", f"127.0.0.1:{port}")

    def problem() -> str:
        with Client(replica.target) as client:
            found = client.admin.status().buckets
        return str(found[0].upstream.problem) if found and found[0].upstream else ""

    wait_for(lambda: "start the upstream with --advertise" in problem(), "a reason")
    upstream.terminate()
    upstream.options += ["--advertise", f"127.0.0.1:{port}"]
    upstream.start()
    wait_for(lambda: counted(replica.target) == {replica.target}, "the replica to be counted")
    known = topology(replica.target)
    assert known is not None
    assert known.owner is not None
    assert known.owner.address == f"127.0.0.1:{port}"
    # It is one of a set now.
    upstream.terminate()
    upstream.options = ["--insecure"]
    upstream.launch()
    upstream.wait()
    assert "give --advertise HOST:PORT" in upstream.log_text()


@pytest.mark.parametrize("end", [RunningServer.kill, RunningServer.terminate])
def test_an_active_server_asks_before_it_serves_again(
    server_process: StartServer, end: Callable[[RunningServer], object]
) -> None:
    owner, replica = start_set(server_process)
    with Client(owner.target) as client:
        given = client.bucket().set(b"k", b"v")
    wait_until_equal([owner, replica])
    end(owner)
    end(replica)
    owner.start()
    wait_for(lambda: "cannot be reached" in (topology(owner.target).waiting), "a reason")  # type: ignore[union-attr]
    assert not is_active(owner)
    with (
        Client(owner.target, retry_seconds=0) as client,
        pytest.raises(UprError, match="not the active one"),
    ):
        client.bucket().set(b"k", b"w")
    with Client(owner.target, retry_seconds=0) as client, pytest.raises(UprError) as refused:
        client.admin.forget_server(replica.target)
    assert "promote --force" in refused.value.hint
    replica.start()
    wait_for(lambda: is_active(owner), "the owner to serve")
    with Client(owner.target) as client:
        assert client.bucket().get(b"k") == b"v"
        # A clean stop needs no record.
        same = client.bucket().set(b"k", b"w").failover_id == given.failover_id
    assert same == (end is RunningServer.terminate)
    wait_until_equal([owner, replica])


def test_a_refused_write_names_the_active_server(server_process: StartServer) -> None:
    owner, replica = start_set(server_process)
    # Only the replica is known: it says where to go.
    with Client(replica.target) as client:
        client.bucket().set(b"k", b"v")
        assert client.target == owner.target
    with (
        Client(replica.target, token="secret", retry_seconds=0) as client,
        pytest.raises(UprError) as refused,
    ):
        client.bucket().set(b"k", b"v")
    assert (refused.value.owner, refused.value.retriable) == (owner.target, True)


def test_a_split_brain_heals(server_process: StartServer) -> None:
    owner, replica = start_set(server_process)
    owner.kill()
    forced = run("promote", "--force", "--yes", "--target", replica.target, "--json")
    assert forced.exit_code == 0, forced.output
    replica.kill()
    # The old one is forced too: neither hears of the other.
    owner.start()
    forced = run("promote", "--force", "--yes", "--target", owner.target, "--json")
    assert forced.exit_code == 0, forced.output
    with Client(owner.target) as client:
        client.bucket().set(b"k", b"here")
    replica.start()
    # Both were forced in one epoch, so both step down, and one takes the ownership back in a newer one.
    both = (owner, replica)

    def ended() -> bool:
        known = [topology(one.target) for one in both]
        newer = all(one is not None and one.epoch > 2 for one in known)
        return newer and sum(map(is_active, both)) == 1

    wait_for(ended, "one owner")

    def same() -> bool:
        # One that undoes its rows opens its bucket anew, and answers for none meanwhile.
        with contextlib.suppress(UprError):
            return len({tuple(state_of(one.target)) for one in both}) == 1
        return False

    wait_for(same, "one history")


@pytest.mark.crash
@pytest.mark.parametrize("place", ["promote.after_row", "promote.before_partitions"])
def test_one_that_is_left_alone_ends_its_promotion_at_the_next_start(
    server_process: StartServer, place: str
) -> None:
    old, new, third = start_set(server_process, replicas=2)
    with Client(old.target) as client:
        client.bucket().set(b"k", b"v")
    wait_until_equal([old, new, third])
    new.terminate()
    new.start(environment={"UPR_FAILPOINTS": f"{place}=kill"})
    wait_until_counted([old, new, third], old)
    wait_for(lambda: all(m.in_step for m in topology(new.target).members), "in step")  # type: ignore[union-attr]
    old.kill()
    third.kill()
    assert run("promote", "--force", "--yes", "--target", new.target).exit_code != 0
    new.wait()
    new.start(environment={"UPR_FAILPOINTS": ""})
    wait_for(lambda: is_active(new), "the one that is left")
    with Client(new.target) as client:
        assert client.bucket().get(b"k", read_from="any") == b"v"
        client.bucket().set(b"k", b"w")


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize(
    ("place", "lost"),
    [
        pytest.param("promote.after_claim", "source stays", marks=pytest.mark.long),
        ("promote.after_promises", "source stays"),
        pytest.param("promote.after_promises", "source is killed", marks=pytest.mark.long),
        pytest.param("promote.after_row", "source is killed", marks=pytest.mark.long),
        pytest.param("promote.before_partitions", "source stays", marks=pytest.mark.long),
        ("promote.after_partitions", "source is killed"),
    ],
)
def test_killed_while_it_is_promoted(server_process: StartServer, place: str, lost: str) -> None:
    old = server_process("--flush-seconds", "600")
    killed = {"UPR_FAILPOINTS": f"{place}=kill"}
    new = server_process("--replicate-from", old.target, environment=killed)
    wait_until_counted([old, new], old)
    with Client(old.target) as client:
        for number in range(50):
            client.bucket().set(b"%d" % number, b"v")
    wait_until_equal([old, new])
    if lost == "source is killed":
        old.kill()
    assert run("promote", "--target", new.target).exit_code != 0
    new.wait()
    new.start(environment={"UPR_FAILPOINTS": ""})
    if lost == "source is killed":
        old.start()

    alone = lost == "source stays" and place in ("promote.after_claim", "promote.after_promises")

    def settled() -> bool:
        """Promote the old one whenever nobody is active; it may step down when it hears of the claim.

        One that stepped down for a promise, or a claim, becomes active again without a command.
        """
        active = [one for one in (old, new) if is_active(one)]
        if not active and not alone:
            run("promote", "--target", old.target)
        others = {one.target for one in (old, new)} - {one.target for one in active}
        return len(active) == 1 and all(counted(one.target) == others for one in (old, new))

    wait_for(settled, "one active server")
    wait_until_equal([old, new])
    # Who was active first may have heard of the claim since.
    wait_for(settled, "one active server still")
    with Client(old.target) as client:
        keys = [b"%d" % number for number in range(50)]
        assert client.bucket().get_many(keys, read_from="any") == dict.fromkeys(keys, b"v")
    for server in (old, new):
        server.terminate()
        assert run("check", str(server.data)).exit_code == 0


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "killed"),
    [
        ("after_promises", "source"),
        ("after_row", "target"),
        ("before_partitions", "source"),
    ],
)
def test_one_command_after_a_takeover_with_a_kill_makes_one_owner(
    server_process: StartServer, tmp_path: Path, place: str, killed: str
) -> None:
    hold, times = tmp_path / "hold", dict[str, float]()
    points = f"promote.{place}={f'hold:{hold}' if killed == 'source' else 'kill'}"
    # The times are those of the command: how long it takes is what is promised.
    old = server_process("--flush-seconds", "600", constants=times)
    new = server_process(
        *("--replicate-from", old.target), environment={"UPR_FAILPOINTS": points}, constants=times
    )
    wait_until_counted([old, new], old)
    rows = {b"%d" % number: b"v" for number in range(50)}
    with Client(old.target) as client:
        client.bucket().write_many(list(rows.items()), "replicated(1)")

    def take_over() -> None:
        with Client(new.target, retry_seconds=0) as client, contextlib.suppress(UprError):
            client.admin.promote(takeover=True)

    hold.touch()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(take_over)
        if killed == "source":
            wait_for(lambda: bool(hold.read_text()), "the target to be there")
            old.kill()
            hold.unlink()
        else:
            new.wait()
    if killed == "target":
        new.start(environment={"UPR_FAILPOINTS": ""})
    alive = [one for one in (old, new) if one.running]
    began = time.monotonic()
    run("promote", "--target", new.target)
    wait_for(lambda: sum(map(is_active, alive)) == 1, "one owner", ONE_OWNER_SECONDS)
    assert time.monotonic() < began + ONE_OWNER_SECONDS
    (owner,) = filter(is_active, alive)
    if killed == "source":
        old.start()
    wait_until_counted([old, new], owner)
    wait_until_equal([old, new])
    assert [*filter(is_active, (old, new))] == [owner]
    with Client(owner.target) as client:
        assert client.bucket().get_many(list(rows), read_from="any") == rows
    for server in (old, new):
        server.terminate()
        assert run("check", str(server.data)).exit_code == 0
