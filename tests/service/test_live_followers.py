"""Live followers of one server: with equal options they share frames, and each gets exactly its rows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.raw import RawClient, all_rows
from tests.service.bucket_state import serving
from tests.service.test_showing import plain_value
from upr.config import ServerConfig
from upr.service import conversation
from upr_protocol.position_table import START
from upr_protocol.wire import codec
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

OPTIONS: list[dict[str, Any]] = [
    *({} for _ in range(6)),
    *({"stability": types.STABILITY_MEMORY} for _ in range(2)),
    *({"keys_only": True} for _ in range(2)),
    *({"key_prefix": b"a"} for _ in range(2)),
    *({"plain_rows": True} for _ in range(2)),
    {"key_prefix": b"b", "keys_only": True},
    {"plain_rows": True, "key_prefix": b"b"},
]
WRITES = 150
Rows = list[tuple[int, int, bytes, bytes | None]]


async def follow(
    client: RawClient, options: dict[str, Any], ready: asyncio.Queue[None], last: bytes
) -> tuple[Rows, int]:
    """Return all rows up to one with the last key, and the number of frames."""
    call = await client.follow(**options)
    table = b"".join(p.to_bytes(4, "little").ljust(START.itemsize, b"\0") for p in range(1024))
    await call.send(start=wire.Start(table=table))
    await call.until("start_answers")
    ready.put_nowait(None)
    rows: Rows = []
    frames = 0
    while not any(key.endswith(last) for _, _, key, _ in rows):
        message = await call.read()
        if message.HasField("frame"):
            frames += 1
            rows += all_rows(map(block_from_message, message.frame.blocks))
            rows += [
                (run.partition, row.seqno, row.key, plain_value(row))
                for run in message.frame.plain_runs
                for row in run.rows
            ]
    await call.close()
    return rows, frames


@pytest.mark.asyncio
async def test_sixteen_followers_with_different_options_get_exactly_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = 0

    def counted(*arguments: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return codec.encode_frame(*arguments)

    monkeypatch.setattr(conversation, "encode_frame", counted)
    async with (
        serving(ServerConfig(tmp_path / "data", "127.0.0.1:0")) as server,
        RawClient(server.address) as client,
    ):
        ready: asyncio.Queue[None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(follow(client, options, ready, b"-last")) for options in OPTIONS
        ]
        for _ in tasks:
            await ready.get()
        writer = await client.writer("")
        written: list[tuple[bytes, bytes | None]] = []
        for number in range(WRITES):
            last = b"w" if number % 9 else None
            written += [(b"a-%d" % number, b"v"), (b"b-%d" % (number % 40), last)]
            await writer.write(written[-2:])
        # One write, and so in the same frame for everybody: nothing comes behind it.
        await writer.write([(b"a-last", b"v"), (b"b-last", b"w")])
        written += [(b"a-last", b"v"), (b"b-last", b"w")]
        results = await asyncio.gather(*tasks)
        await writer.close()
    for options, (rows, _) in zip(OPTIONS, results, strict=True):
        shown = [row for row in written if row[0].startswith(options.get("key_prefix", b""))]
        if options.get("keys_only"):
            shown = [(key, None) for key, _ in shown]
        assert sorted((key, value or b"") for _, _, key, value in rows) == sorted(
            (key, value or b"") for key, value in shown
        )
        seqnos = [(partition, seqno) for partition, seqno, _, _ in rows]
        assert len(set(seqnos)) == len(seqnos)
    sent = sum(
        frames
        for options, (_, frames) in zip(OPTIONS, results, strict=True)
        if not options.get("plain_rows")
    )
    assert encoded < sent, "no frame was shared"
