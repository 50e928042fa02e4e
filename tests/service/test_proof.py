"""The clean-shutdown proof: what it vouches for, and what it does not when data directory and proof do not fit."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.raw import RawClient, seqnos_of, start_at
from tests.service.keys import some_keys
from tests.storage.closed import Closed, block_of
from upr.config import ServerConfig
from upr.engine.partitions import DEAD
from upr.service.buckets.bucket_service import BucketService
from upr.storage.journal import Journal
from upr.storage.proof import birth_of, make_file
from upr_protocol.errors import DataDamagedError
from upr_protocol.position_table import START, STARTED
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes

LOST, OTHER = 7, 8
(KEY,), (OTHER_KEY,) = some_keys(LOST, 1), some_keys(OTHER, 1)


async def write(server: RunningServer, *values: bytes, key: bytes = KEY) -> None:
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        for value in values:
            await writer.write([(key, value)])


def proven_with_journal(server: RunningServer) -> list[tuple[int, int]]:
    """Have three acknowledged rows in the journal only, and a proof; returns the failover log of their partition."""

    async def log() -> list[tuple[int, int]]:
        async with RawClient(server.target) as client:
            (told,) = await client.logs(LOST)
            return told

    asyncio.run(write(server, b"other", key=OTHER_KEY))
    asyncio.run(write(server, b"1", b"2", b"3"))
    server.kill()
    # This start adds records and writes a proof with them; nothing is numbered in it.
    server.start()
    told = asyncio.run(log())
    server.kill()
    return told


def newest_segment(server: RunningServer) -> Path:
    return max(server.data.glob("buckets/*/journal/*.journal"))


def flipped(server: RunningServer) -> None:
    data = bytearray(newest_segment(server).read_bytes())
    data[-3] ^= 1
    newest_segment(server).write_bytes(data)


def cut_short(server: RunningServer) -> None:
    os.truncate(newest_segment(server), newest_segment(server).stat().st_size - 5)


def record_missing(server: RunningServer) -> None:
    segment = newest_segment(server)
    journal = Journal(segment.parent, int(segment.parent.parent.name, 16))
    *_, newest = journal.inspect()
    os.truncate(segment, newest.offset)


@pytest.mark.parametrize("damage", [flipped, cut_short, record_missing])
def test_a_damaged_end_of_the_journal_is_not_torn_where_there_is_a_proof(
    server_process: StartServer, damage: Callable[[RunningServer], None]
) -> None:
    server = server_process()
    log = proven_with_journal(server)
    damage(server)
    server.start()
    torn = "no whole record: cut off" in server.log_text()
    assert torn == (damage is not record_missing)
    assert "ends at seqno 2, the clean-shutdown proof says 3" in server.log_text()

    async def look() -> None:
        async with RawClient(server.target) as client:
            (info,) = await client.partitions(LOST)
            assert (info.state, info.problem.reason) == (DEAD, "DATA_DAMAGED")
            assert await client.logs(LOST) == [log]
            writer = await client.writer("")
            # Seqno 3 under that id was given to somebody else's row.
            refusal = (await writer.write([(KEY, b"another 3")])).refused
            assert refusal.reason == "DATA_DAMAGED"
            assert seqnos_of(await writer.write([(OTHER_KEY, b"fine")])) == {OTHER: (1, 2)}
            follow = await client.follow()
            lost, other = await follow.start(start_at(LOST), start_at(OTHER))
            assert lost.refused.reason == "DATA_DAMAGED"
            assert other.started.high_seqno == 2
            await follow.close()

    asyncio.run(look())
    server.kill()
    # Numbered since: now there is no proof, and the partition is still what it was.
    server.start()

    async def still() -> None:
        async with RawClient(server.target) as client:
            (info,) = await client.partitions(LOST)
            assert info.state == DEAD
            assert await client.logs(LOST) == [log]
            assert [len(told) for told in await client.logs(OTHER)] == [3]

    asyncio.run(still())


def test_a_proof_is_met_when_a_flush_under_it_has_emptied_the_journal(
    server_process: StartServer,
) -> None:
    server = server_process()
    log = proven_with_journal(server)
    # Only now: what is flushed before it is killed leaves this start nothing to flush.
    server.options += ["--flush-seconds", "0.05"]
    server.start()

    async def flushed() -> None:
        async with RawClient(server.target) as client, asyncio.timeout(60):
            # A flush of everything begins a new segment, and removes the one before it.
            while newest_segment(server).stat().st_size > 64:
                await client.partitions(LOST)

    asyncio.run(flushed())
    for _ in range(2):
        server.kill()
        server.start()

    async def same() -> None:
        async with RawClient(server.target) as client:
            assert await client.logs(LOST) == [log]
            (info,) = await client.partitions(LOST)
            assert info.high_seqno == 3
            writer = await client.writer("")
            assert seqnos_of(await writer.write([(KEY, b"4")])) == {LOST: (3, 4)}

    asyncio.run(same())


def opened(closed: Closed) -> BucketService:
    return BucketService(closed.bucket, ServerConfig(data=closed.path))


def test_a_new_bucket_has_a_segment(closed: Closed) -> None:
    assert [file.name for file in closed.journal_files] == [f"{1:016d}.journal"]


def test_without_a_proof_a_journal_without_segments_is_damage(closed: Closed) -> None:
    closed.put(block_of(3, 0, 10))
    closed.journal((1, [block_of(3, 10, 12)]))
    for file in closed.journal_files:
        file.unlink()
    with pytest.raises(DataDamagedError, match="no segment") as refused:
        opened(closed)
    assert "restore-copy" in str(refused.value.hint)
    # And it is the same the next time.
    with pytest.raises(DataDamagedError, match="no segment"):
        opened(closed)


def test_with_a_proof_that_is_met_a_start_makes_the_segment_that_is_missing(closed: Closed) -> None:
    for file in closed.journal_files:
        file.unlink()
    opened(closed).close_files()
    assert len(closed.journal_files) == 1
    store = closed.store()
    store.clear_proof()
    store.close()
    host = opened(closed)
    host.close_files()
    assert {len(log) for log in host.bucket.partitions.logs} == {2}


def copied(server: RunningServer, how: str) -> None:
    """Put a copy in the place of a stopped server's directory."""
    copy = server.folder / "copy"
    if how == "tar":
        copy.mkdir()
        archive = server.folder / "data.tar"
        subprocess.run(["tar", "-cpf", archive, "-C", server.data, "."], check=True)
        subprocess.run(["tar", "-xpf", archive, "-C", copy], check=True)
    else:
        subprocess.run(["cp", "-a", server.data, copy], check=True)
    shutil.rmtree(server.data)
    copy.rename(server.data)


async def logs_and_highs(server: RunningServer) -> tuple[list[list[tuple[int, int]]], int]:
    async with RawClient(server.target) as client:
        (info,) = await client.partitions(LOST)
        return await client.logs(LOST, OTHER), info.high_seqno


@pytest.mark.parametrize("how", ["cp", "tar"])
def test_a_copy_of_a_cleanly_stopped_directory_is_not_proven(
    server_process: StartServer, how: str
) -> None:
    server = server_process()
    asyncio.run(write(server, b"1", b"2"))
    before, high = asyncio.run(logs_and_highs(server))
    assert server.terminate() == 0
    copied(server, how)
    server.start()
    assert "the directory is a copy" in server.log_text()
    logs, now = asyncio.run(logs_and_highs(server))
    assert (now, [len(log) for log in logs]) == (high, [2, 2])
    assert [log[:1] for log in logs] == before
    assert logs[0][1][1] == high
    # The proof that is written with the records is one of this place.
    for stop in (server.kill, server.terminate):
        stop()
        server.start()
        assert asyncio.run(logs_and_highs(server)) == (logs, high)


def test_what_leaves_the_files_themselves_alone_leaves_the_proof(
    server_process: StartServer,
) -> None:
    server = server_process()
    asyncio.run(write(server, b"1", b"2"))
    before = asyncio.run(logs_and_highs(server))
    assert server.terminate() == 0
    elsewhere = server.folder / "elsewhere"
    server.data.rename(elsewhere)
    elsewhere.rename(server.data)
    for path in (server.data, *server.data.rglob("*")):
        path.chmod(path.stat().st_mode | 0o40)
        os.utime(path)
    server.start()
    assert asyncio.run(logs_and_highs(server)) == before


def test_data_moved_accepts_a_copy_once(server_process: StartServer) -> None:
    server = server_process()
    asyncio.run(write(server, b"1", b"2"))
    before = asyncio.run(logs_and_highs(server))
    assert server.terminate() == 0
    copied(server, "cp")
    server.options.append("--data-moved")
    server.start()
    assert "--data-moved was given, and a copied proof was accepted" in server.log_text()
    assert asyncio.run(logs_and_highs(server)) == before
    # Bound to this place, also when nothing was written: the option is not needed any more.
    server.kill()
    server.start()
    assert "and it was not needed" in server.log_text()
    server.options.remove("--data-moved")
    server.kill()
    server.start()
    assert asyncio.run(logs_and_highs(server)) == before


def test_without_birth_times_the_inode_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_file(tmp_path)
    assert file.is_there(tmp_path)
    assert file.birth == birth_of(file.path(tmp_path))
    assert not replace(file, birth=file.birth + 1).is_there(tmp_path) or not file.birth
    assert not replace(file, inode=file.inode + 1).is_there(tmp_path)
    monkeypatch.setattr("upr.storage.proof.birth_of", lambda _: 0)
    assert file.is_there(tmp_path)
    assert not replace(file, inode=file.inode + 1).is_there(tmp_path)
    file.path(tmp_path).unlink()
    assert not file.is_there(tmp_path)


def test_a_bucket_keeps_the_file_of_its_newest_proof_alone(closed: Closed) -> None:
    store = closed.store()
    for _ in range(3):
        store.write_proof(np.zeros(1024, np.uint64))
    with pytest.raises(AttributeError):
        store.write_recovery({1: None}, [], {}, np.zeros(1024, np.uint64))  # type: ignore[dict-item]
    assert store.proof() is not None
    store.close()
    assert len(list(closed.bucket.glob("store/proof-*"))) == 1


def test_a_horizon_above_the_high_seqno_tells_that_a_record_is_missing(
    server_process: StartServer,
) -> None:
    server = server_process()
    asyncio.run(write(server, b"1", b"2", b"3"))

    async def starts() -> None:
        async with RawClient(server.target) as client:
            (info,) = await client.partitions(LOST)
            newest = info.failover_id
            follow = await client.follow()
            for horizon in (None, 3):
                (fine,) = await follow.start(
                    start_at(LOST, 3, newest, data_id=newest, horizon=horizon)
                )
                assert fine.started.token
                await follow.close()
                follow = await client.follow()
            (above,) = await follow.start(start_at(LOST, 3, newest, data_id=newest, horizon=4))
            assert (above.rollback.rollback_seqno, above.rollback.rule) == (0, "above_high")
            assert "horizon 4" in above.rollback.words
            table = np.zeros(2, START)
            table["partition"], table["failover_id"] = (LOST, OTHER), (newest, 0)
            table["seqno"], table["data_id"], table["horizon"] = (3, 0), (newest, 0), (4, 0)
            await follow.send(start=changes.Start(table=table.tobytes()))
            answers = (await follow.until("start_answers")).start_answers
            assert [one.WhichOneof("answer") for one in answers.answers] == ["rollback"]
            assert len(answers.started) == STARTED.itemsize
            (wrong,) = await follow.start(start_at(LOST, 3, newest, horizon=2**48))
            assert wrong.refused.reason == "INVALID_ARGUMENT"
            await follow.close()

    asyncio.run(starts())
    assert "a consumer is ahead of this server" in server.log_text()
