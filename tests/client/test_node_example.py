"""The follower in Node: what it keeps is what the server has, whatever happened meanwhile."""

import asyncio
import json
import shutil
import signal
from base64 import b64decode
from pathlib import Path

import pytest

from tests.client.test_examples import CLIENT, running, write
from tests.conftest import StartServer
from tests.raw import RawClient, start_at
from upr_client.testing import ScriptedServer, keys_in
from upr_protocol.limits import ADMIN_SOCKET

pytestmark = [pytest.mark.long, pytest.mark.node]
SCRIPT = CLIENT / "examples" / "node" / "follow.mjs"
UNTIL_NOW = "--until-now"


def command_of(target: str, *options: str) -> list[str]:
    """Its command line; tools/dev.py has installed what it needs."""
    return ["node", str(SCRIPT), "--target", target, "--state", "state.json", *options]


def kept(folder: Path) -> dict[bytes, bytes]:
    """Keys and values in its file; none before it is there."""
    file = folder / "state.json"
    partitions = json.loads(file.read_text())["partitions"] if file.exists() else []
    return {b64decode(key): b64decode(value) for one in partitions for key, value in one["rows"]}


def run_once(folder: Path, target: str, *options: str) -> str:
    """Run it up to what there is now, and return what it said."""
    with running(folder, command_of(target, UNTIL_NOW, *options)) as example:
        assert example.end() == 0, example.words
        return example.words


def test_it_goes_on_where_it_stood(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    rows: dict[bytes, bytes] = {b"key %d" % i: b"%d" % i * 50 for i in range(3000)}
    rows |= {b"\0\xff": b"\xfe\0", b"empty": b""}
    write(server, *rows.items(), (b"gone", b"soon"))
    write(server, (b"gone", None))
    # The window holds a small part of it.
    assert run_once(tmp_path, server.target, "--credit", "5000") == ""
    assert kept(tmp_path) == rows
    # A row that is lost here stays so: what it has is not sent again.
    file = tmp_path / "state.json"
    state = json.loads(file.read_text())
    owner = next(one for one in state["partitions"] if len(one["rows"]) > 1)
    lost = b64decode(owner["rows"].pop()[0])
    file.write_text(json.dumps(state))
    del rows[lost]
    rows |= {b"new": b"1", b"empty": b"no more"}
    del rows[b"\0\xff"]
    write(server, (b"new", b"1"), (b"empty", b"no more"), (b"\0\xff", None))
    assert run_once(tmp_path, server.target) == ""
    assert kept(tmp_path) == rows
    # It has everything that the server lost nothing of: nothing is to be undone.
    server.kill()
    server.start()
    assert run_once(tmp_path, server.target) == ""
    assert kept(tmp_path) == rows
    partitions = json.loads(file.read_text())["partitions"]
    assert all(one["dataId"] == one["failoverId"] for one in partitions if one["rows"])


async def heartbeats(target: str, count: int) -> None:
    """Wait until another call was sent as many."""
    async with RawClient(target) as client:
        follow = await client.follow(heartbeat_seconds=1)
        await follow.start(start_at(0))
        for _ in range(count):
            await follow.until("heartbeat")


def test_it_answers_heartbeats_and_connects_again(
    server_process: StartServer, tmp_path: Path
) -> None:
    server = server_process()
    write(server, (b"a", b"1"))
    with running(tmp_path, command_of(server.target, "--heartbeat", "1")) as example:
        example.wait_until(lambda: kept(tmp_path) == {b"a": b"1"})
        # Who is silent for three of them is ended.
        asyncio.run(heartbeats(server.target, 4))
        write(server, (b"a", b"2"))
        example.wait_until(lambda: kept(tmp_path) == {b"a": b"2"})
        assert example.words == ""
        server.kill()
        server.start()
        write(server, (b"b", b"3"))
        example.wait_until(lambda: kept(tmp_path) == {b"a": b"2", b"b": b"3"})
        assert "UNAVAILABLE" in example.words
        assert "rolled back" not in example.words
        assert example.end(signal.SIGTERM) == 0


def test_what_did_not_happen_is_undone(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    first, second, third = keys_in(7, 3)
    write(server, (first, b"1"), (second, b"1"), (b"other", b"1"))
    assert server.terminate() == 0
    shutil.copytree(server.data, tmp_path / "copy", ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    server.start()
    write(server, (first, b"2"), (third, b"2"))
    run_once(tmp_path / "client", server.target)
    assert kept(tmp_path / "client") == {first: b"2", second: b"1", third: b"2", b"other": b"1"}
    # The server comes back as an older copy of itself, and numbers something else.
    server.kill()
    shutil.rmtree(server.data)
    shutil.copytree(tmp_path / "copy", server.data, ignore=shutil.ignore_patterns(ADMIN_SOCKET))
    server.start()
    write(server, (second, b"3"))
    words = run_once(tmp_path / "client", server.target)
    assert words == "partition 7: rolled back to 0\n"
    assert kept(tmp_path / "client") == {first: b"1", second: b"3", b"other": b"1"}


def test_a_rollback_that_start_tells_is_one_too(tmp_path: Path) -> None:
    first, second = keys_in(7, 2)
    with ScriptedServer() as server:
        server.write(first, b"1")
        server.write(second, b"2")
        with running(tmp_path, command_of(server.target)) as example:
            example.wait_until(lambda: len(kept(tmp_path)) == 2)
            # The stream ends, and the Start that follows is told.
            server.roll_back(7, 1)
            example.wait_until(lambda: kept(tmp_path) == {first: b"1"})
            assert example.words.splitlines() == ["partition 7: rolled back to 0"]
            assert example.end(signal.SIGINT) == 0


def test_a_bucket_that_is_not_there_is_said(target: str, tmp_path: Path) -> None:
    command = command_of(target, "--bucket", "nowhere")
    with running(tmp_path, command) as example:
        assert example.end() == 1
        assert example.words.startswith("follow: NOT_FOUND: ")
        assert len(example.words.splitlines()) == 1
