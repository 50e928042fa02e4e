"""The map of a store: its size, room in it before anything is numbered, and address space that is not there."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from tests.raw import RawClient, seqnos_of, start_at
from tests.service.bucket_state import serving
from upr.config import ServerConfig
from upr.storage import store as store_module
from upr.storage.lmdb_pages import MAP_BYTES, MAP_BYTES_USUAL, map_bytes
from upr.storage.store import Store
from upr_protocol.limits import BUCKETS_MAX

GIB, TIB = 2**30, 2**40
TINY = 24 * 2**20


@pytest.mark.parametrize(
    ("disk", "expected"),
    [
        (10 * GIB, 64 * GIB),
        (100 * GIB, 200 * GIB),
        (TIB, 2 * TIB),
        (2 * TIB, 3 * TIB),
        (10 * TIB, 10 * TIB),
        (40 * TIB, 16 * TIB),
    ],
)
def test_the_map_follows_the_size_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, expected: int
) -> None:
    told = SimpleNamespace(f_blocks=disk // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    assert map_bytes(tmp_path) == expected
    with (tmp_path / "data.mdb").open("wb") as file:
        # Sparse: it may be larger than the disk.
        file.truncate(3 * TIB + 5)
    assert map_bytes(tmp_path) == max(expected, 3 * TIB + 2**20)


def test_the_maps_of_all_buckets_fit_into_the_address_space() -> None:
    assert BUCKETS_MAX * MAP_BYTES_USUAL <= 100 * TIB
    assert MAP_BYTES_USUAL < MAP_BYTES


def test_room_in_the_map_is_counted_low(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", TINY)
    assert store.map_size == TINY
    filled, count = 0, 0
    while store.map_room() > 2**20:
        before = store.map_room()
        count += 1
        store.put_flush([(1, count, b"v" * 2**20)], {}, {})
        filled += 2**20
        assert store.map_room() < before
    assert filled > TINY // 2
    with pytest.raises(lmdb.MapFullError):
        store.put_flush([(1, count + 1, b"v" * 2**21)], {}, {})
    store.close()
    again = Store(tmp_path / "store", 2 * TINY)
    assert again.map_room() > TINY
    again.close()


@pytest.mark.asyncio
async def test_a_full_map_refuses_writes_before_numbering_and_a_restart_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size = TINY
    monkeypatch.setattr(store_module, "map_bytes", lambda _: size)
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", tail_bytes=2**20)
    written: dict[bytes, bytes] = {}
    refusal = None
    async with serving(config) as server, RawClient(server.address) as client:
        writer = await client.writer("p")
        for number in range(1, 400):
            rows = [(b"%d-%d" % (number, i), os.urandom(1000)) for i in range(100)]
            result = await writer.write(rows, number=number)
            if result.HasField("refused"):
                refusal = result.refused
                break
            written.update(rows)
        assert refusal is not None
        assert (refusal.reason, refusal.retriable) == ("NO_ROOM", True)
        assert f"map of {TINY} bytes" in refusal.message
        assert "restart" in refusal.hint
        numbered = sum(info.high_seqno for info in await client.partitions())
        assert numbered == len(written)
        assert len(written) > 2000
    assert "MAP_FULL" not in caplog.text
    size = 4 * TINY
    async with serving(config) as server, RawClient(server.address) as client:
        writer = await client.writer("p")
        assert len(seqnos_of(await writer.write(rows, number=number))) > 1
        follow = await client.follow()
        await follow.start(*(start_at(p, until_now=True) for p in range(1024)))
        blocks, _ = await follow.blocks_until_ended(1024)
        assert sum(block.rows for block in blocks) == len(written) + len(rows)
        await follow.close()


@pytest.mark.asyncio
async def test_a_map_that_is_found_full_all_the_same_is_no_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", tail_bytes=50_000)
    put = Store.put_flush
    full = True

    def put_flush(self: Store, *what: Any) -> None:
        if full:
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")
        put(self, *what)

    monkeypatch.setattr(Store, "put_flush", put_flush)
    async with serving(config) as server, RawClient(server.address) as client:
        writer = await client.writer("")
        rows = [(b"%d" % i, b"v" * 500) for i in range(50)]
        for _ in range(50):
            result = await writer.write(rows)
            if result.HasField("refused"):
                break
        assert result.refused.reason == "NO_ROOM"
        full = False
        while result.HasField("refused"):
            assert result.refused.reason == "NO_ROOM"
            result = await writer.write(rows)


def test_a_map_without_address_space_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "upr.cli", "server", "--data", str(tmp_path / "data")]
    limited = f'ulimit -v {16 * 2**20}; exec "$@"'
    run = subprocess.run(
        ["bash", "-c", limited, "bash", *command, "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.strip().splitlines()
    assert "address space" in line
    assert "ulimit -v" in line
