"""SIGKILL at every named failpoint."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.conftest import StartServer
from tests.crash.loading import Load, Row, state_of, writing
from tests.harness import RunningServer
from tests.raw import RawClient, seqnos_of
from tests.service import test_positions as positions
from upr import failpoints
from upr_client import Client
from upr_protocol.limits import GET_KEYS_MAX

pytestmark = pytest.mark.crash

ROOT = Path(__file__).resolve().parent.parent.parent

UNDER_WRITES = {
    "journal.before_append": 3,
    "journal.half_append": 3,
    "journal.before_sync": 3,
    "journal.after_sync": 3,
    "flush.before_commit": 2,
    "flush.after_commit": 2,
    "flush.between_slices": 3,
    "journal.before_drop": 1,
    "journal.before_rotate": 2,
    "proof.before_clear": 1,
    "proof.after_clear": 1,
}
"""At which time each place is reached the server is killed."""
IN_RECOVERY = ["recovery.before_truncate", "recovery.before_records", "recovery.after_records"]
IN_SHUTDOWN = {
    "shutdown.before_flush": 2,
    "shutdown.before_proof": 2,
    "shutdown.after_proof": 1,
}
"""How many records the logs have afterwards."""
IN_A_SAVE = ["positions.before_commit"]
IN_RESTORE = ["restore.before_forget", "restore.before_records", "restore.after_records"]
ELSEWHERE = {
    "bucket.before_create": "service/test_buckets.py::test_killed_while_a_bucket_is_created",
    "bucket.after_create": "service/test_buckets.py::test_killed_while_a_bucket_is_created",
    "bucket.before_drop": "service/test_buckets.py::test_killed_while_a_bucket_is_dropped",
    "bucket.after_drop": "service/test_buckets.py::test_killed_while_a_bucket_is_dropped",
    "merge.before_commit": "service/test_merging.py::test_killed_while_merging",
    "merge.after_commit": "service/test_merging.py::test_killed_while_merging",
    "recovery.before_aside": "service/test_dead_partitions.py::test_killed_in_the_recovery_of_a_dead_partition",
    "accept.before_commit": "service/test_dead_partitions.py::test_killed_while_a_loss_is_accepted",
    "accept.after_commit": "service/test_dead_partitions.py::test_killed_while_a_loss_is_accepted",
    "cuts.before_commit": "service/test_cuts.py::test_sigkill_before_the_answer_leaves_a_whole_cut_or_none",
    "cuts.after_commit": "service/test_cuts.py::test_sigkill_before_the_answer_leaves_a_whole_cut_or_none",
    "promote.after_claim": "replica/test_ownership.py::test_killed_while_it_is_promoted",
    "promote.after_promises": "replica/test_ownership.py::test_killed_while_it_is_promoted",
    "promote.after_row": "replica/test_ownership.py::test_killed_while_it_is_promoted",
    "promote.before_partitions": "replica/test_ownership.py::test_killed_while_it_is_promoted",
    "promote.after_partitions": "replica/test_ownership.py::test_killed_while_it_is_promoted",
}
"""Killed there by a test of what they belong to; purging is stored by a merge."""


def places_in_the_source() -> set[str]:
    """Every name that is hit, as the source has it."""
    found: set[str] = set()
    for path in (ROOT / "upr").rglob("*.py"):
        text = path.read_text()
        names = re.findall(r'failpoints\.hit\(\s*"([^"]+)"\s*\)', text)
        assert len(names) == text.count("failpoints.hit("), f"{path}: a name that is computed"
        found |= set(names)
    return found


def source_of(test: str) -> str:
    """The source of a test function with its parameters."""
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"there is no {test}")


def test_every_failpoint_has_a_kill() -> None:
    places = places_in_the_source()
    assert places == failpoints.NAMES
    here = {*UNDER_WRITES, *IN_RECOVERY, *IN_SHUTDOWN, *IN_A_SAVE, *IN_RESTORE}
    assert here | ELSEWHERE.keys() == places
    for name, test in ELSEWHERE.items():
        source = source_of(test)
        kind, _, where = name.partition(".")
        when, _, what = where.partition("_")
        assert name in source or (f"{kind}.{{where}}" in source and f'"{when}' in source), test
        assert what in source, test
        assert "kill" in source, test


@pytest.mark.asyncio
@pytest.mark.parametrize("failpoint", UNDER_WRITES)
async def test_killed_under_writes(server_process: StartServer, failpoint: str) -> None:
    armed = {"UPR_FAILPOINTS": f"{failpoint}=kill:{UNDER_WRITES[failpoint]}"}
    server = server_process("--tail-bytes", "100000", environment=armed)
    load = Load(1)
    await load.run(server.target, -1, server)
    assert server.wait() == -signal.SIGKILL, "the failpoint was not reached"
    server.environment = {}
    server.start()
    await check_load(server, load)
    async with RawClient(server.target) as client:
        logs = await client.logs()
    numbered = 0 if failpoint.startswith("proof.before") else 1
    assert {len(log) for log in logs} == {1 + numbered}


async def check_load(server: RunningServer, load: Load) -> None:
    """What was acknowledged is there, and nothing that nobody wrote."""
    state = await state_of(server.target)
    assert all(state.get(key) == value for key, value in load.acknowledged.items())
    assert set(state) <= set(load.acknowledged) | set(load.unknown)
    keys = sorted(set(load.acknowledged) | set(load.unknown))
    async with RawClient(server.target) as client:
        for first in range(0, len(keys), GET_KEYS_MAX):
            asked = keys[first : first + GET_KEYS_MAX]
            for key, answer in zip(asked, await client.get(*asked), strict=True):
                got = answer.value if answer.HasField("value") else None
                assert got == state.get(key), key


@pytest.mark.asyncio
async def test_killed_in_recovery(server_process: StartServer) -> None:
    # So that there is a torn record to be cut off.
    armed = {"UPR_FAILPOINTS": "journal.half_append=kill:9"}
    server = server_process(environment=armed)
    async with writing(server.target, "") as writer:
        seqnos_of(await writer.write([(b"first", b"1")]))
    load = Load(2)
    await load.run(server.target, -1, server)
    assert server.wait() == -signal.SIGKILL
    # On a busy machine no answer to the load may have come before.
    load.acknowledged[b"first"] = b"1"
    server.environment = {}
    for failpoint in IN_RECOVERY:
        server.launch(environment={"UPR_FAILPOINTS": f"{failpoint}=kill"})
        assert server.wait() == -signal.SIGKILL, failpoint
    server.start()
    await check_load(server, load)
    async with RawClient(server.target) as client:
        # One crash after writes, one record, however often recovery itself was cut short.
        assert {len(log) for log in await client.logs()} == {2}
    # What is written behind the place where something was cut off can be read.
    async with writing(server.target, "") as writer:
        seqnos_of(await writer.write([(b"behind", b"1")]))
    load.acknowledged[b"behind"] = b"1"
    server.kill()
    server.start()
    await check_load(server, load)


@pytest.mark.asyncio
@pytest.mark.parametrize("failpoint", IN_SHUTDOWN)
async def test_killed_in_shutdown(server_process: StartServer, failpoint: str) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": f"{failpoint}=kill"})
    async with writing(server.target, "") as writer:
        rows: list[Row] = [(b"key %d" % i, b"value") for i in range(500)]
        seqnos_of(await writer.write(rows))
    assert server.terminate() == -signal.SIGKILL
    server.environment = {}
    server.start()
    assert await state_of(server.target) == dict(rows)
    async with RawClient(server.target) as client:
        assert {len(log) for log in await client.logs()} == {IN_SHUTDOWN[failpoint]}


@pytest.mark.asyncio
@pytest.mark.parametrize("failpoint", IN_A_SAVE)
async def test_killed_in_a_save(server_process: StartServer, failpoint: str) -> None:
    server = server_process()
    async with RawClient(server.target) as client:
        await positions.fill(client, 10)
        saved = positions.position(5)
        assert await positions.save(client, await positions.own(client), saved) == []
    assert server.terminate() == 0
    server.start(environment={"UPR_FAILPOINTS": f"{failpoint}=kill"})
    async with RawClient(server.target) as client:
        with pytest.raises(grpc.aio.AioRpcError):
            await positions.save(client, await positions.own(client), positions.position(8))
    assert server.wait() == -signal.SIGKILL
    server.start()
    async with RawClient(server.target) as client:
        # What was answered is there, whole, and nothing of what was not.
        assert await positions.load(client) == {positions.PARTITION: saved}
        assert (
            await positions.save(client, await positions.own(client), positions.position(8)) == []
        )


def restore(server: RunningServer, failpoint: str = "") -> int:
    """Run ``upr-admin restore-copy``; its exit status."""
    command = [sys.executable, "-m", "upr.cli", "admin", "restore-copy", "--yes", str(server.data)]
    environment = {**os.environ, "UPR_FAILPOINTS": f"{failpoint}=kill" if failpoint else ""}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.mark.long
@pytest.mark.asyncio
async def test_killed_while_a_copy_is_restored(server_process: StartServer) -> None:
    server = server_process()
    rows = {b"key %d" % i: b"value" for i in range(500)}
    with Client(server.target) as client:
        bucket = client.bucket()
        bucket.write_many(list(rows.items()))
        client.admin.create_cut(bucket, "cut")
    server.kill()
    for failpoint in IN_RESTORE:
        assert restore(server, failpoint) == -signal.SIGKILL, failpoint
    assert restore(server) == 0
    server.start()
    assert await state_of(server.target) == rows
    with Client(server.target) as client:
        assert client.admin.cuts("default") == []
    async with RawClient(server.target) as raw:
        # One of the run that was killed behind its last step, and one of the run after it; none of the kill before.
        logs = await raw.logs()
        highs = [info.high_seqno for info in await raw.partitions()]
    assert {len(log) for log in logs} == {3}
    assert [log[-1][1] for log in logs] == highs
