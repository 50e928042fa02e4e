"""The specification's three worked handshakes over real gRPC, on a log made by a real SIGKILL.

The ids are random; the specification's DRF394 is the partition's first id here, QER053 the one after the
unclean restart. A failpoint holds the committer, so that 427 to 434 are in memory only and seen by a follower
with stability ``memory`` when the process is killed.
"""

from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.raw import RawClient, RawWriter, all_rows, seqnos_of, start_at
from tests.service.keys import some_keys
from upr_protocol.block import build_block
from upr_protocol.handshake import resume_after_rollback
from upr_protocol.position import Position
from upr_protocol.wire.codec import block_from_message, block_to_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2 as types

PARTITION = 5


async def write_up_to(writer: RawWriter, first: int, last: int, *, memory: bool = False) -> None:
    keys = some_keys(PARTITION, 40)
    rows = [(keys[seqno % 40], b"value %d" % seqno) for seqno in range(first, last + 1)]
    block = build_block([k for k, _ in rows], [v for _, v in rows])
    durability = types.DURABILITY_MEMORY if memory else types.DURABILITY_DISK
    await writer.send_block(block_to_message(block), durability=durability)
    assert seqnos_of(await writer.result()) == {PARTITION: (first - 1, last)}


@pytest.mark.asyncio
async def test_worked_handshakes(server_process: StartServer, tmp_path: Path) -> None:
    hold = tmp_path / "hold the committer"
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{hold}"})
    async with RawClient(server.target) as client:
        writer = await client.writer("")
        await write_up_to(writer, 1, 418)
        await write_up_to(writer, 419, 426)

        # 1: a brand new client.
        (hello,) = (await client.hello({PARTITION: None})).answers
        assert not hello.HasField("rollback_seqno")
        drf394 = hello.failover_id
        follow = await client.follow(stability=types.STABILITY_MEMORY)
        (answer,) = await follow.start(start_at(PARTITION, 0, drf394))
        assert answer.started.failover_id == drf394
        seen: list[int] = []
        markers: list[int] = []

        async def read_to(seqno: int) -> None:
            while not seen or seen[-1] < seqno:
                frame = await follow.until("frame")
                for block in map(block_from_message, frame.frame.blocks):
                    seen.extend(row[1] for row in all_rows([block]))
                    run = block.runs[0]
                    if run["end_seqno"] == run["horizon"]:
                        markers.append(int(run["end_seqno"]))

        await read_to(426)
        hold.touch()
        await write_up_to(writer, 427, 434, memory=True)
        await read_to(434)
        assert seen == list(range(1, 435))
        assert markers == [418, 426, 434]

        # 2: a resuming client, no failovers.
        (hello,) = (await client.hello({PARTITION: drf394})).answers
        assert not hello.HasField("rollback_seqno")
        assert (hello.failover_id, hello.high_seqno, hello.durable_seqno) == (drf394, 434, 426)
        again = await client.follow(stability=types.STABILITY_MEMORY)
        (answer,) = await again.start(start_at(PARTITION, 434, drf394, data_id=drf394))
        assert answer.HasField("started")

    server.kill()
    hold.unlink()
    server.start()

    # 3: a resuming client, across a failover.
    async with RawClient(server.target) as client:
        (hello,) = (await client.hello({PARTITION: drf394}, with_log=True)).answers
        qer053 = hello.failover_id
        assert qer053 not in (drf394, 0)
        assert hello.rollback_seqno == 426
        assert [(r.failover_id, r.seqno) for r in hello.failover_log] == [
            (drf394, 0),
            (qer053, 426),
        ]
        assert hello.high_seqno == hello.durable_seqno == 426
        position = Position(1, drf394, drf394, 434, 434, tuple(markers), None)
        resume = resume_after_rollback(position, hello.rollback_seqno)
        assert (resume.seqno, resume.undo) == (418, True)

        follow = await client.follow()
        # A client that stores the new id before it undid its data is told again.
        (answer,) = await follow.start(start_at(PARTITION, 434, qer053, data_id=drf394))
        assert answer.rollback.rollback_seqno == 426
        # A client that starts under the old id is answered as by Hello.
        (answer,) = await follow.start(start_at(PARTITION, 418, drf394, data_id=drf394))
        assert answer.rollback.rollback_seqno == 426

        (answer,) = await follow.start(
            start_at(PARTITION, 418, qer053, data_id=qer053, until_now=True)
        )
        assert answer.started.until_seqno == 426
        blocks, _ = await follow.blocks_until_ended(1)
        assert [row[1] for row in all_rows(blocks)] == list(range(419, 427))
        assert int(blocks[-1].runs["horizon"][0]) == 426
        await follow.close()

        # The new branch goes on at 427.
        writer = await client.writer("")
        await write_up_to(writer, 427, 427)
        assert isinstance(hello, wire.HelloAnswer)
