"""Reads of single keys beside a bare unary call: what ``get`` and ``get_many`` cost, by the number of a partition's blocks."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np

from tests.harness import RunningServer
from tools.bench.children import bare_calls, bare_server
from tools.bench.common import KEYS, VALUE_BYTES, Figure, Row, batches, server, zipfian_rows
from tools.bench.cpu import server_cpu
from upr.storage.keyspace import hashes_of, pack_hashes
from upr.storage.store import Store
from upr_client import AsyncClient
from upr_client.types import AsyncBucket
from upr_protocol.block import Block, make_runs, sealed
from upr_protocol.limits import PARTITIONS
from upr_protocol.partitioning import partitions_of
from upr_protocol.wire.codec import encode_block
from upr_protocol.wire.grpc import CLIENT_OPTIONS

BLOCKS: Final = (3, 30, 300)
"""Blocks of a partition."""
PARTITION_ROWS: Final = 3000
FILLED: Final = 128
"""Partitions that have rows."""
CALLS: Final = 600
MANY: Final = 1000
MANY_CALLS: Final = 20
_KEY_BYTES: Final = 16


def _value(key: bytes) -> bytes:
    return key * (VALUE_BYTES // _KEY_BYTES)


def _keys_of_partitions() -> list[list[bytes]]:
    """Return PARTITION_ROWS keys of each filled partition."""
    keys = [b"key-%012d" % number for number in range(PARTITION_ROWS * PARTITIONS * 5 // 4)]
    partitions = partitions_of(keys)
    return [
        [keys[at] for at in np.flatnonzero(partitions == partition)[:PARTITION_ROWS].tolist()]
        for partition in range(FILLED)
    ]


def _block(partition: int, start: int, keys: Sequence[bytes], horizon: int) -> tuple[bytes, bytes]:
    """Return a stored block, and the hashes of its keys."""
    end = start + len(keys)
    edges = np.arange(len(keys) + 1) * _KEY_BYTES
    runs = make_runs([partition], len(keys), start, end, horizon, 1)
    joined, values = b"".join(keys), b"".join(map(_value, keys))
    value_edges = (edges * (VALUE_BYTES // _KEY_BYTES)).astype("<i4").tobytes()
    block = Block(
        runs, b"", b"", edges.astype("<i4").tobytes(), joined, value_edges, values, b"", 0
    )
    hashes = pack_hashes(partition, start, end, hashes_of(edges, joined))
    return encode_block(sealed(block)), hashes


def _fill(data: Path, keys: Sequence[Sequence[bytes]], blocks: int) -> None:
    """Store the keys of each partition in so many blocks of one stretch, which no compaction touches."""
    (folder,) = data.glob("buckets/*")
    store = Store(folder / "store")
    highs = np.zeros(PARTITIONS, np.uint64)
    for partition, mine in enumerate(keys):
        end = len(mine)
        size = -(-end // blocks)
        made = [
            (min(at + size, end), *_block(partition, at, mine[at : at + size], end))
            for at in range(0, end, size)
        ]
        encoded = [(partition, last, data) for last, data, _ in made]
        store.put_flush(encoded, {partition: (end, end, end)}, {}, [h for *_, h in made])
        highs[partition] = end
    store.write_proof(highs)
    store.close()


async def _timed(ask: Callable[[Any], Any], asked: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Ask one after the other; return how long each took, in milliseconds, and the answers."""
    taken, answers = [], []
    for one in asked:
        began = time.perf_counter()
        answers.append(await ask(one))
        taken.append((time.perf_counter() - began) * 1e3)
    return taken, answers


async def _measure(
    running: RunningServer, bare: str, name: str, truth: dict[bytes, bytes | None]
) -> list[Figure]:
    draw = np.random.default_rng(1)
    present = list(truth)
    some = [present[at] for at in draw.integers(0, len(present), CALLS).tolist()]
    # Of the partitions that have rows.
    held = set(partitions_of(present).tolist())
    absent = [b"not-%012d" % number for number in range(CALLS * PARTITIONS // len(held) * 2)]
    absent = [
        key for key, p in zip(absent, partitions_of(absent).tolist(), strict=True) if p in held
    ]
    many = [
        [present[at] for at in draw.choice(len(present), MANY, replace=False).tolist()]
        for _ in range(MANY_CALLS)
    ]
    figures: list[Figure] = []
    async with (
        AsyncClient(running.target) as client,
        grpc.aio.insecure_channel(bare, options=CLIENT_OPTIONS) as channel,
    ):
        bucket: AsyncBucket = client.bucket()
        for what, ask, asked, check in (
            ("present", bucket.get, some, lambda key, got: got == truth[key]),
            ("absent", bucket.get, absent[:CALLS], lambda key, got: got is None),
            ("get_many(1000)", bucket.get_many, many, lambda keys, got: got == _found(truth, keys)),
        ):
            # The first searches of a tail make its index.
            await _timed(ask, asked[:3])
            bare_before = await bare_calls(channel, CALLS)
            before = server_cpu(running)
            taken, answers = await _timed(ask, asked)
            used = (server_cpu(running) - before) / len(asked) * 1e3
            bare_after = await bare_calls(channel, CALLS)
            wrong = sum(not check(key, got) for key, got in zip(asked, answers, strict=True))
            assert not wrong, f"{wrong} answers are wrong"
            p50, p99 = np.percentile(taken, (50, 99))
            floor = float(np.median(bare_before + bare_after))
            note = f"{p50 / floor:.1f} bare calls of {floor:.2f} ms; p99 {p99:.1f} ms, server CPU {used:.2f} ms"
            figures.append(Figure(f"{name}, {what}, p50", float(p50), "ms", note=note))
    return figures


def _found(truth: dict[bytes, bytes | None], keys: Sequence[bytes]) -> dict[bytes, bytes]:
    return {key: value for key in keys if (value := truth[key]) is not None}


async def _write(target: str, rows: Sequence[Row]) -> None:
    async with AsyncClient(target) as client:
        for batch in batches(list(rows), 2000):
            await client.bucket().write_many(batch)


def measure_gets() -> Iterator[Figure]:
    """From a tail of 200,000 rows, from the store after a restart, and from partitions of so many blocks."""
    rows = zipfian_rows()
    truth = dict(rows)
    assert len(truth) <= KEYS
    with bare_server() as bare:
        with server() as running:
            asyncio.run(_write(running.target, rows))
            yield from asyncio.run(_measure(running, bare, "get, tail", truth))
            assert running.terminate() == 0, running.log_text()
            running.start()
            yield from asyncio.run(_measure(running, bare, "get, store", truth))
        keys = _keys_of_partitions()
        whole: dict[bytes, bytes | None] = {key: _value(key) for mine in keys for key in mine}
        for blocks in BLOCKS:
            with server() as running:
                assert running.terminate() == 0, running.log_text()
                _fill(running.data, keys, blocks)
                running.start()
                name = f"get, {blocks} blocks"
                yield from asyncio.run(_measure(running, bare, name, whole))
