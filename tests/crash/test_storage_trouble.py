"""Storage that fails under a running server: it is said once, shown while it lasts, and nobody waits for ever."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer, poll
from tests.raw import RawClient, start_at
from tests.service.keys import some_keys
from upr.cli.admin import main as admin

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("soon")]

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
BEGINS, ENDS = 'storage trouble"', 'storage trouble is over"'


async def health_of(server: RunningServer, name: str) -> int:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_SECONDS)
        status: int = answer.status
        return status


async def problem(server: RunningServer, command: str = "status") -> dict[str, Any] | None:
    """What ``upr-admin status`` or ``bucket list`` says of the bucket default."""
    words = ["bucket", "list"] if command == "bucket" else [command]
    arguments = [*words, "--json", "--target", server.target]
    result = await asyncio.to_thread(CliRunner().invoke, admin, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (bucket,) = document["buckets"] if command == "status" else document
    found: dict[str, Any] | None = bucket["problem"]
    return found


def lines(server: RunningServer, words: str) -> int:
    return sum(words in line for line in server.log_text().splitlines())


async def refusal(client: RawClient) -> Any:
    return (await (await client.writer("")).write([(b"key", b"value")])).refused


# Trouble that passes


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("failpoint", "what"),
    [
        ("flush.before_commit", "the tail cannot be stored"),
        ("journal.before_append", "the journal cannot be written"),
    ],
)
async def test_lasting_trouble_is_told_once_and_shown_until_it_ends(
    server_process: StartServer, tmp_path: Path, failpoint: str, what: str
) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    armed = f"{failpoint}=error-while:EIO:{fails}"
    server = server_process("--tail-bytes", "100000", environment={"UPR_FAILPOINTS": armed})
    assert await health_of(server, "bucket/default") == SERVING
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        rows = [(key, b"x" * 1000) for key in some_keys(7, 90)]
        write = asyncio.create_task(writer.write(rows))

        async def is_told() -> bool:
            return await health_of(server, "bucket/default") == NOT_SERVING

        await poll(is_told)
        for command in ("status", "bucket"):
            told = await problem(server, command)
            assert told is not None
            assert told["message"].startswith(f"{what}, since 20")
            assert "Input/output error" in told["message"]
            assert told["reason"] == "STORAGE_FAILED"
        # Streams and other buckets do not suffer; "now" is what is on disk.
        assert await health_of(server, "") == SERVING
        follow = await client.follow()
        await follow.start(start_at(7, until_now=True))
        _, ended = await follow.blocks_until_ended(1)
        assert [one.problem.reason for one in ended] == ["FINISHED"]
        # It was tried again a few times, at four times a second.
        await asyncio.sleep(1)
        assert (lines(server, BEGINS), lines(server, ENDS)) == (1, 0)
        fails.unlink()

        async def is_over() -> bool:
            return await health_of(server, "bucket/default") == SERVING

        await poll(is_over)
        assert not (await write).HasField("refused")
        assert await problem(server) is None
        assert (lines(server, BEGINS), lines(server, ENDS)) == (1, 1)
    assert await asyncio.to_thread(server.terminate) == 0


@pytest.mark.asyncio
async def test_a_full_tail_that_cannot_be_stored_refuses_writes(
    server_process: StartServer, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    armed = f"flush.before_commit=error-while:EIO:{fails}"
    server = server_process("--tail-bytes", "100000", environment={"UPR_FAILPOINTS": armed})
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        refused = None
        while refused is None:
            result = await writer.write([(key, b"x" * 1000) for key in some_keys(7, 40)])
            refused = result.refused if result.HasField("refused") else None
        assert (refused.reason, refused.retriable) == ("STORAGE_FAILED", True)
        assert "cannot be stored" in refused.message
        fails.unlink()

        # Writing resumes by itself.
        async def is_taken() -> bool:
            return not (await writer.write([(b"key", b"value")])).HasField("refused")

        await poll(is_taken)
    assert await asyncio.to_thread(server.terminate) == 0


# Failures for good


@pytest.mark.asyncio
async def test_streams_that_wait_for_what_cannot_become_durable_end(
    server_process: StartServer,
) -> None:
    server = server_process(environment={"UPR_FAILPOINTS": "journal.before_sync=error:EIO:2"})
    (key,) = some_keys(7, 1)
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(key, b"1")])
        follow, idle = await client.follow(), await client.follow()
        # Above what is there; without an end; and of a partition of which nothing is missing.
        await follow.start(start_at(7, until_seqno=2))
        await follow.until("frame")
        await idle.start(start_at(7), start_at(8))
        await idle.until("frame")
        assert (await writer.write([(key, b"2")])).refused.reason == "UNKNOWN_OUTCOME"
        for call in (follow, idle):
            ended = (await call.until("ended")).ended
            assert [stream.partition for stream in ended.streams] == [7]
            assert ended.problem.reason == "STORAGE_ERROR"
            assert "fsync" in ended.problem.message
        # Who comes later reads all that is durable, and is done; or learns that the rest cannot be had.
        await follow.start(start_at(7, until_now=True))
        assert (await follow.until("frame")).frame.blocks
        assert (await follow.until("ended")).ended.problem.reason == "FINISHED"
        await follow.start(start_at(7, until_seqno=2))
        await follow.until("frame")
        assert (await follow.until("ended")).ended.problem.reason == "STORAGE_ERROR"
    assert await health_of(server, "bucket/default") == NOT_SERVING
    assert await health_of(server, "") == NOT_SERVING
    assert await asyncio.to_thread(server.terminate) == 1


def delete(data: Path) -> None:
    shutil.rmtree(data)


def move(data: Path) -> None:
    data.rename(data.with_name("moved"))


def replace(data: Path) -> None:
    """As when a volume is unmounted: another directory is in its place."""
    move(data)
    data.mkdir()
    shutil.copy(data.with_name("moved") / "upr-stream.json", data)


@pytest.mark.asyncio
@pytest.mark.parametrize("lose", [delete, move, replace])
@pytest.mark.parametrize("writing", [True, False], ids=["writing", "idle"])
async def test_a_data_directory_that_is_gone(
    server_process: StartServer, lose: Callable[[Path], None], writing: bool
) -> None:
    server = server_process()
    try:
        await data_directory_gone(server, lose, writing)
    finally:
        shutil.rmtree(server.data, ignore_errors=True)


def says_so(words: str) -> bool:
    return "under the server" in words or "in the place of" in words


async def data_directory_gone(
    server: RunningServer, lose: Callable[[Path], None], writing: bool
) -> None:
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await writer.write([(b"key", b"value")])
        lose(server.data)
        if writing:

            async def is_refused() -> bool:
                result = await writer.write([(b"key", b"value")])
                return result.HasField("refused") and result.refused.reason == "STORAGE_FAILED"

            await poll(is_refused)

        async def is_known() -> bool:
            told = await problem(server)
            assert told is None or str(server.folder) not in told["message"]
            return told is not None and says_so(told["message"])

        await poll(is_known)
        assert await health_of(server, "bucket/default") == NOT_SERVING
        refused = await refusal(client)
        assert refused.reason == "STORAGE_FAILED"
        assert says_so(refused.message)
        assert str(server.folder) not in refused.message
        # No bucket is made where the old ones are not.
        create = ["bucket", "create", "new", "--target", server.target]
        result = await asyncio.to_thread(CliRunner().invoke, admin, create)
        assert result.exit_code == 4
        assert str(server.folder) not in result.output
    assert lines(server, "storage failed") == 1
    left = server.data / "buckets"
    assert not left.exists() or not os.listdir(left)
    assert await asyncio.to_thread(server.terminate) == 1


@pytest.mark.asyncio
async def test_a_bucket_that_is_replaced_right_before_the_stop_is_no_clean_stop(
    server_process: StartServer,
) -> None:
    server = server_process()
    (folder,) = (server.data / "buckets").iterdir()
    move(folder)
    shutil.copytree(folder.with_name("moved"), folder)
    assert await asyncio.to_thread(server.terminate) == 1


def run_to_its_end(server: RunningServer) -> tuple[int, str]:
    server.launch()
    try:
        return server.wait(), server.log_text()
    finally:
        server.close()


def test_data_that_is_required_and_not_there_is_not_made(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--require-data")
    status, words = run_to_its_end(server)
    assert status == 2
    assert "there is no data directory with a bucket" in words
    assert not server.data.exists()
    # A volume that is not mounted: an empty folder.
    server.data.mkdir()
    assert run_to_its_end(server)[0] == 2
    assert os.listdir(server.data) == []
    server.options = []
    server.start()
    assert server.terminate() == 0
    server.options = ["--require-data"]
    server.start()
    assert server.terminate() == 0


def test_an_empty_path_is_refused() -> None:
    for command in (["check", ""], ["restore-copy", "--yes", ""]):
        result = CliRunner().invoke(admin, command)
        assert result.exit_code == 2
        assert "the path is empty" in result.output
