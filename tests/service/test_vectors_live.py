"""The handshake vectors against a live server on a seeded data directory.

Each vector gets a partition of its own, whose log and seqnos are written into the store of a stopped server.
Events of a takeover need a second node and are run against the core only.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.raw import RawClient, error_of, start_at
from tests.storage.stored_blocks import put_rows
from upr.storage.journal import Commit, Journal, JournalEntry
from upr.storage.store import Store
from upr_protocol.block import build_block, make_runs, sealed
from upr_protocol.failover import FailoverLog, FailoverRecord
from upr_protocol.handshake import older_ids_to_try, resume_after_rollback
from upr_protocol.limits import PARTITIONS
from upr_protocol.position import Position
from upr_protocol.wire.codec import encode_block

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "protocol" / "vectors" / "handshake.json").read_text()
)
LIVE = [v for v in VECTORS if v.get("event", {}).get("op") != "takeover"]
UNCLEAN = [v for v in LIVE if v.get("event", {}).get("clean") is False]
CLEAN = [v for v in LIVE if v not in UNCLEAN]
FIRST_PARTITION = 100


def id_of(name: str) -> int:
    """The license-plate names as failover ids."""
    return int.from_bytes(name.encode().rjust(8, b"\0"), "big")


def log_of(records: list[dict[str, Any]]) -> FailoverLog:
    return FailoverLog(tuple(FailoverRecord(id_of(r["failover_id"]), r["seqno"]) for r in records))


def run_of(partition: int, start: int, end: int, horizon: int) -> bytes:
    """A block of one run in which every seqno is a row."""
    count = end - start
    block = build_block([b"key %d" % (i % 7) for i in range(count)], [b"v"] * count)
    return encode_block(
        sealed(replace(block, runs=make_runs([partition], [count], start, end, horizon, 1)))
    )


def seed(server: RunningServer, vectors: list[dict[str, Any]]) -> None:
    """Write what each vector assumes into the stopped server's store."""
    assert server.terminate() == 0
    (folder,) = server.data.glob("buckets/*")
    store = Store(folder / "store")
    identity = store.identity()
    assert identity is not None
    rows, blocks, tails = {}, [], []
    for partition, vector in enumerate(vectors, start=FIRST_PARTITION):
        state = vector["partition_state"]
        event = vector.get("event", {})
        old = store.partitions()[partition]
        assert not isinstance(old, Exception)
        high = (
            event.get("durable_last_marker", state["high_seqno"])
            if event.get("clean") is False
            else state["high_seqno"]
        )
        rows[partition] = replace(
            old, stored_high=high, complete=high, horizon=high, log=log_of(state["failover_log"])
        )
        blocks.append((partition, high, run_of(partition, 0, high, high)))
        if event.get("clean") is False:
            # Rows behind the marker whose own marker never came: part of a stretch.
            tails.append(run_of(partition, high, event["durable_high_seqno"], 434))
    store.put_flush(blocks, {}, {})
    put_rows(store, rows)
    if tails:
        store.clear_proof()
        journal = Journal(folder / "journal", identity.version)
        list(journal.replay())
        journal.append(Commit(1, tuple(JournalEntry(tail) for tail in tails)))
        journal.close()
    else:
        highs = np.zeros(PARTITIONS, np.uint64)
        for partition, row in rows.items():
            highs[partition] = row.stored_high
        store.write_proof(highs)
    store.close()
    server.start()


async def check_hello(client: RawClient, partition: int, vector: dict[str, Any]) -> None:
    """Hello, the client's pick, and the Start that follows it."""
    asked, expect = vector["client"], vector["expect"]
    newest_known = asked.get("first_try", asked)["failover_id"]
    failover_id = id_of(newest_known) if newest_known else None
    (answer,) = (await client.hello({partition: failover_id}, with_log=True)).answers
    log = FailoverLog(tuple(FailoverRecord(r.failover_id, r.seqno) for r in answer.failover_log))
    rollback = answer.rollback_seqno if answer.HasField("rollback_seqno") else None
    own = log_of(asked["own_failover_log"]) if asked.get("own_failover_log") else None
    horizon = asked.get("horizon", max([asked["last_seqno"], *asked["snapshot_markers"]]))
    position = Position(
        1,
        failover_id,
        failover_id,
        asked["last_seqno"],
        horizon,
        tuple(asked["snapshot_markers"]),
        own,
    )
    limit = rollback
    if rollback == 0 and own is not None:
        for older, own_next in older_ids_to_try(position):
            (again,) = (await client.hello({partition: older})).answers
            told = again.rollback_seqno if again.HasField("rollback_seqno") else None
            if told != 0:
                rollback, limit = told, min(own_next, told or own_next)
                break
    if failover_id is None:
        resume = resume_after_rollback(position, 0)
    elif limit is None:
        resume = None
    else:
        resume = resume_after_rollback(position, limit)
    assert ("ok" if rollback is None else "rollback") == expect["answer"]
    if rollback is not None:
        assert rollback == expect["rollback_seqno"]
    resumes_from = asked["last_seqno"] if resume is None else resume.seqno
    assert resumes_from == expect["client_resumes_from"]
    newest = log.newest.failover_id
    follow = await client.follow()
    data_id = newest if resumes_from else None
    (started,) = await follow.start(
        start_at(partition, resumes_from, newest, data_id=data_id, until_now=True)
    )
    assert started.HasField("started"), started
    _, ended = await follow.blocks_until_ended(1)
    assert ended[0].problem.reason == "FINISHED"
    await follow.close()


async def check_start(client: RawClient, partition: int, vector: dict[str, Any]) -> None:
    asked, expect = vector["client"], vector["expect"]
    data_name = asked.get("data_failover_id")
    request = start_at(
        partition,
        asked["last_seqno"],
        id_of(asked["failover_id"]),
        data_id=id_of(data_name) if data_name else None,
    )
    follow = await client.follow()
    (answer,) = await follow.start(request)
    kind = answer.WhichOneof("answer")
    assert kind == {"ok": "started", "rollback": "rollback", "error": "refused"}[expect["answer"]]
    if kind == "refused":
        assert answer.refused.reason == "INVALID_ARGUMENT"
    if kind == "rollback":
        assert answer.rollback.rollback_seqno == expect["rollback_seqno"]
        assert answer.rollback.failover_id == id_of(expect["current_failover_id"])
    await follow.close()


@pytest.mark.asyncio
async def test_vectors_on_a_seeded_directory(server_process: StartServer) -> None:
    server = server_process()
    seed(server, CLEAN)
    checked = 0
    async with RawClient(server.target) as client:
        for partition, vector in enumerate(CLEAN, start=FIRST_PARTITION):
            checked += 1
            if vector["client"].get("partition") == 1024:
                error = await error_of(client.hello({1024: id_of("DRF394")}))
                assert error.reason == "INVALID_ARGUMENT"
            elif vector["kind"] == "start":
                await check_start(client, partition, vector)
            elif vector.get("negative"):
                # Without the data id the server cannot notice.
                follow = await client.follow()
                asked = vector["client"]
                (answer,) = await follow.start(
                    start_at(partition, asked["last_seqno"], id_of(asked["failover_id"]))
                )
                assert answer.HasField("started")
                await follow.close()
            else:
                await check_hello(client, partition, vector)
    assert checked == len(CLEAN) == 24


@pytest.mark.asyncio
async def test_an_unclean_restart_cuts_off_what_has_no_marker(server_process: StartServer) -> None:
    assert [v["id"] for v in UNCLEAN] == ["upr-043"]
    server = server_process()
    seed(server, UNCLEAN)
    (vector,) = UNCLEAN
    for _ in range(2):
        async with RawClient(server.target) as client:
            (info,) = await client.partitions(FIRST_PARTITION)
            assert info.high_seqno == vector["expect"]["high_seqno_after"] == 426
            (log,) = await client.logs(FIRST_PARTITION)
            assert [seqno for _, seqno in log] == [
                r["seqno"] for r in vector["expect"]["failover_log_after"]
            ]
            assert log[0][0] == id_of("DRF394")
            asked = vector["client"]
            (answer,) = (await client.hello({FIRST_PARTITION: id_of("DRF394")})).answers
            assert answer.rollback_seqno == vector["expect"]["rollback_seqno"]
            position = Position(
                1, log[0][0], log[0][0], 434, 434, tuple(asked["snapshot_markers"]), None
            )
            resume = resume_after_rollback(position, answer.rollback_seqno)
            assert resume.seqno == vector["expect"]["client_resumes_from"]
            inclusive = resume_after_rollback(position, answer.rollback_seqno, inclusive=True)
            assert inclusive.seqno == vector["expect_inclusive_reading"]["client_resumes_from"]
        # What was cut off must not come back from the journal at the next start, and there is no second record.
        server.kill()
        server.start()


def test_every_vector_is_run_here_or_needs_a_second_node() -> None:
    rest = [v["id"] for v in VECTORS if v not in CLEAN and v not in UNCLEAN]
    assert rest == ["upr-042", "upr-047", "upr-047b"]
    assert np.unique([v["id"] for v in VECTORS]).size == len(VECTORS)
