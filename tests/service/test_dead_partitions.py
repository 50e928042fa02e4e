"""Dead partitions, end to end: a journal that does not go on where the store ends, until somebody accepts the loss."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_check import run_admin
from tests.conftest import StartServer
from tests.crash.loading import state_of
from tests.harness import RunningServer
from upr.storage import keyspace
from upr.storage.journal import Journal
from upr.storage.keyspace import block_key, pack_partition, partition_key
from upr.storage.store import Store
from upr_client import Client
from upr_protocol.errors import DataDamagedError, UprError
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import decode_block

KEY, OTHER = b"k", b"other"
P, Q = partition_of(KEY), partition_of(OTHER)


def write(server: RunningServer, first: int, count: int) -> None:
    """Write both keys so many times, each time with one commit for both partitions."""
    with Client(server.target) as client:
        for i in range(first, first + count):
            client.bucket().write_many([(KEY, b"%d" % i), (OTHER, b"%d" % i)])


def folder_of(server: RunningServer) -> Path:
    return next((server.data / "buckets").iterdir())


def lose_what_is_stored(server: RunningServer) -> None:
    """Have partition P hold nothing in the store, as if its newest transaction had not come to the disk."""
    store = Store(folder_of(server) / "store")
    row = store.partitions()[P]
    assert isinstance(row, keyspace.PartitionRow)
    assert row.stored_high
    empty = dataclasses.replace(row, stored_high=0, complete=0, horizon=0)
    with store._env.begin(write=True) as txn:
        txn.delete(block_key(P, row.stored_high), db=store._blocks)
        txn.put(partition_key(P), pack_partition(P, empty), db=store._partitions)
    store.close()


def with_a_gap(start: StartServer, *options: str) -> RunningServer:
    """A server that was killed: of P seqnos 1 to 3 are lost, 4 and 5 are in the journal; Q is whole."""
    server = start("--flush-seconds", "3600", *options)
    write(server, 0, 3)
    assert server.terminate() == 0
    server.start()
    write(server, 3, 2)
    server.kill()
    lose_what_is_stored(server)
    return server


def in_journal(server: RunningServer) -> list[tuple[int, int]]:
    store = Store(folder_of(server) / "store")
    identity = store.identity()
    store.close()
    assert identity is not None
    found = []
    for one in Journal(folder_of(server) / "journal", identity.version).inspect():
        for entry in one.commit.entries if one.commit is not None else ():
            runs = decode_block(entry.block).runs
            runs = runs[runs["partition"] == P]
            found += list(
                zip(runs["start_seqno"].tolist(), runs["end_seqno"].tolist(), strict=True)
            )
    return found


def kept_aside(server: RunningServer) -> list[tuple[int, int]]:
    store = Store(folder_of(server) / "store")
    blocks = [decode_block(data) for data in store.aside(P)]
    store.close()
    return [(int(r["start_seqno"]), int(r["end_seqno"])) for b in blocks for r in b.runs]


def info_of(server: RunningServer) -> Any:
    with Client(server.target) as client:
        (info,) = client.admin.partitions("default", [P])
        assert client.admin.status().buckets[0].damaged_partitions == (info.state == "dead")
    return info


def test_rows_and_reason_of_a_dead_partition_survive_flushes_and_starts(
    server_process: StartServer,
) -> None:
    server = with_a_gap(server_process)
    assert in_journal(server) == [(3, 4), (4, 5)]
    began = time.time_ns() // 1000
    seen = []
    for _ in range(2):
        server.start()
        seen.append(info_of(server))
        assert server.terminate() == 0
        assert in_journal(server) == []
        assert kept_aside(server) == [(3, 4), (4, 5)]
    words = f"partition {P}: the journal goes on at seqno 3, the store ends at 0"
    assert [(i.state, i.problem.reason, i.problem.message) for i in seen] == [
        ("dead", "DATA_DAMAGED", words)
    ] * 2
    assert began <= seen[0].dead_since == seen[1].dead_since <= time.time_ns() // 1000
    checked = run_admin("check", server.data)
    assert checked.exit_code == 1
    assert f"partition {P}, seqnos 4 to 5: it is dead: {words}; 2 rows" in checked.stdout


@pytest.mark.long
def test_all_partitions_but_the_dead_one_are_followed_and_cut(server_process: StartServer) -> None:
    server = with_a_gap(server_process)
    server.start()
    seen = []
    with Client(server.target) as client, client.bucket().changes(until="now") as changes:
        with pytest.raises(DataDamagedError, match=f"partition {P} cannot be read"):  # noqa: PT012
            for change in changes:
                seen.append(change.seqno)
        assert set(changes.status().problems) == {P}
    # Changes and their markers.
    assert sorted(set(seen)) == [3, 4, 5]
    command = [sys.executable, "-m", "upr.cli", "cat", "follow", "--until-now"]
    done = subprocess.run(
        [*command, "--target", server.target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [
        line for line in done.stderr.splitlines() if f"partition {P} cannot be read" in line
    ]
    assert '"seqno": 5' in done.stdout
    with Client(server.target) as client:
        with client.bucket().cut("all") as cut:
            assert len(cut.pins) == 1023
            assert list(cut.left_out) == [P]
            assert "the store ends at 0" in cut.left_out[P].message
        with pytest.raises(UprError, match="the store ends at 0"):
            client.admin.create_cut("default", "dead", partitions=[P])
    made = run_admin("cut", "create", "named", "--target", server.target)
    assert (made.exit_code, "1023 partitions" in made.stdout) == (0, True)
    assert f"left out: partition {P}" in made.stderr
    document = json.loads(
        run_admin("cut", "create", "told", "--json", "--target", server.target).stdout
    )
    assert [one["partition"] for one in document["left_out"]] == [P]


def test_a_loss_that_is_accepted(server_process: StartServer) -> None:
    server = with_a_gap(server_process)
    server.start()
    busy = run_admin("accept-loss", server.data, P, "--yes")
    assert (busy.exit_code, "in use" in busy.stderr) == (2, True)
    assert server.terminate() == 0
    not_dead = run_admin("accept-loss", server.data, P, Q, "--yes")
    assert not_dead.exit_code == 2
    assert f"partition {Q} of bucket 'default' is active" in not_dead.stderr
    assert kept_aside(server) == [(3, 4), (4, 5)]
    nobody = run_admin("accept-loss", server.data, P)
    assert (nobody.exit_code, "--yes" in nobody.stderr) == (2, True)
    done = run_admin("accept-loss", server.data, P, "--yes", "--json")
    assert done.exit_code == 0
    (told,) = json.loads(done.stdout)["partitions"]
    assert (told["kept"], told["missing"], told["discarded"]) == (0, [[0, 3]], [[3, 5]])
    assert told["discarded_rows"] == 2
    assert told["since"]
    assert kept_aside(server) == []
    assert run_admin("check", server.data).exit_code == 0
    server.start()
    assert info_of(server).state == "active"
    write(server, 9, 1)
    with Client(server.target) as client:
        log = client.admin.failover_logs("default", [P])[P]
        assert [record.seqno for record in log] == [0, 0]
        assert f"{log.newest.failover_id:016x}" == told["failover_id"]
    # What is written under the new record is there after a crash: the old journal counts no more.
    server.kill()
    server.start()
    info = info_of(server)
    assert (info.state, info.high_seqno) == ("active", 1)
    assert run_state(server) == {KEY: b"9", OTHER: b"9"}


def run_state(server: RunningServer) -> dict[bytes, bytes | None]:
    return asyncio.run(state_of(server.target))


def accept(server: RunningServer, failpoint: str = "") -> int:
    command = [sys.executable, "-m", "upr.cli", "admin", "accept-loss", "--yes"]
    environment = {**os.environ, "UPR_FAILPOINTS": f"{failpoint}=kill" if failpoint else ""}
    return subprocess.run(
        [*command, str(server.data), str(P)], env=environment, capture_output=True, check=False
    ).returncode


def test_killed_in_the_recovery_of_a_dead_partition(server_process: StartServer) -> None:
    server = with_a_gap(server_process)
    for failpoint in (
        "recovery.before_aside",
        "recovery.before_records",
        "recovery.after_records",
        "recovery.before_aside",
    ):
        server.launch(environment={"UPR_FAILPOINTS": f"{failpoint}=kill"})
        assert server.wait() == -signal.SIGKILL, failpoint
    server.start()
    assert info_of(server).state == "dead"
    assert server.terminate() == 0
    assert kept_aside(server) == [(3, 4), (4, 5)]


@pytest.mark.long
def test_killed_while_a_loss_is_accepted(server_process: StartServer) -> None:
    server = with_a_gap(server_process)
    # Nobody started the server since: what is dead is found here.
    assert accept(server, "accept.before_commit") == -signal.SIGKILL
    assert kept_aside(server) == [(3, 4), (4, 5)]
    assert accept(server, "accept.after_commit") == -signal.SIGKILL
    assert kept_aside(server) == []
    assert accept(server) == 2
    server.start()
    assert info_of(server).state == "active"
    assert run_state(server) == {OTHER: b"4"}


def test_a_loss_at_the_end_is_told_by_the_proof(server_process: StartServer) -> None:
    server = with_a_gap(server_process)
    server.start()
    assert server.terminate() == 0
    assert accept(server) == 0
    server.start()
    write(server, 0, 7)
    assert server.terminate() == 0
    # The proof says 7 for P, of which nothing is left, in the store or in the journal.
    lose_what_is_stored(server)
    server.start()
    info = info_of(server)
    assert (info.state, info.high_seqno) == ("dead", 0)
    assert "the clean-shutdown proof says 7" in info.problem.message
    assert server.terminate() == 0
    done = run_admin("accept-loss", server.data, P, "--yes", "--json")
    (told,) = json.loads(done.stdout)["partitions"]
    assert (told["kept"], told["missing"], told["discarded_rows"]) == (0, [[0, 7]], 0)
    server.start()
    # Again under the same seqnos, and under another id than the lost ones had.
    write(server, 7, 1)
    assert (info_of(server).state, info_of(server).high_seqno) == ("active", 1)
    assert f"{info_of(server).failover_id:016x}" == told["failover_id"]
    assert server.terminate() == 0
    assert run_admin("check", server.data).exit_code == 0
