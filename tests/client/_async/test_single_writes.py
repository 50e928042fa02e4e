"""Single writes of many tasks or threads: each has its own outcome, whatever becomes of those beside it."""

import random
from collections import Counter
from functools import partial

import pytest

from tests.client._async.adapter import at_once, running
from tests.client.key_values import Faults, KeyValueServer
from tests.conftest import StartServer
from upr_client import AsyncClient, Change
from upr_client.errors import (
    InvalidArgumentError,
    NoRoomError,
    PartitionNotActiveError,
    UnknownOutcomeError,
    UprError,
)
from upr_client.types import WriteResult
from upr_protocol.partitioning import partition_of

WRITERS = 24
ROWS = 6
LARGE = 100
Outcome = WriteResult | UprError


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(6))
async def test_each_write_has_its_own_outcome_whatever_goes_wrong(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upr_client.backoff.FIRST_SECONDS", 0.005)
    draw = random.Random(seed)
    keys = [b"%d" % writer for writer in range(WRITERS)]
    replica = {partition_of(key): PartitionNotActiveError("a replica") for key in keys[:3]}
    faults = Faults(
        lost=[draw.randrange(4) for _ in range(3)],
        refused={draw.randrange(1, 12): NoRoomError("full") for _ in range(2)},
        refused_partitions=dict(replica),
        large=LARGE,
    )
    server = KeyValueServer(faults)
    values = {
        key: [
            b"%d %d" % (writer, number) + b"." * (LARGE if draw.random() < 0.1 else 0)
            for number in range(ROWS)
        ]
        for writer, key in enumerate(keys)
    }
    outcomes: dict[bytes, Outcome] = {}

    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket()

        async def write(key: bytes) -> None:
            for value in values[key]:
                try:
                    outcomes[value] = await bucket.set(key, value)
                except UprError as error:
                    outcomes[value] = error

        await at_once(*[partial(write, key) for key in keys])
    applied: dict[bytes, int] = {}
    highs = Counter[int]()
    for key, value in server.applied:
        assert value is not None
        assert value not in applied, "a row was applied twice"
        highs[partition_of(key)] += 1
        applied[value] = highs[partition_of(key)]
    for key in keys:
        assert [value for value in values[key] if value in applied] == [
            value for row, value in server.applied if row == key
        ]
        for value in values[key]:
            outcome = outcomes[value]
            if isinstance(outcome, WriteResult):
                assert (outcome.partition, outcome.seqno) == (partition_of(key), applied[value])
            elif isinstance(outcome, InvalidArgumentError):
                assert len(value) >= LARGE
                assert value not in applied
            elif isinstance(outcome, PartitionNotActiveError):
                assert partition_of(key) in replica
                assert value not in applied
            else:
                # Asked for again after its answer was lost, and then refused.
                assert isinstance(outcome, UnknownOutcomeError)
    assert {type(outcome) for outcome in outcomes.values()} >= {
        WriteResult,
        PartitionNotActiveError,
    }


@pytest.mark.asyncio
async def test_what_was_acknowledged_survives_a_kill_and_nothing_is_there_twice(
    server_process: StartServer,
) -> None:
    server = server_process()
    acknowledged: dict[bytes, WriteResult] = {}
    rows = 40

    async with AsyncClient(server.target) as client:
        bucket = client.bucket()

        async def write(writer: int) -> None:
            for number in range(rows):
                if writer == 0 and number == rows // 2:
                    server.kill()
                    server.start()
                key = b"%d %d" % (writer, number)
                acknowledged[key] = await bucket.set(key, key)

        await at_once(*[partial(write, writer) for writer in range(WRITERS)])
    followed: dict[bytes, tuple[int, int]] = {}
    highs = Counter[int]()
    async with AsyncClient(server.target) as client, client.bucket().changes(until="now") as seen:
        async for event in seen:
            if isinstance(event, Change):
                assert event.key not in followed
                followed[event.key] = (event.partition, event.seqno)
                highs[event.partition] = max(event.seqno, highs[event.partition])
    assert len(acknowledged) == WRITERS * rows
    # A row that was applied twice would have taken two seqnos.
    assert sum(highs.values()) == len(followed) == len(acknowledged)
    # Of a write that had been applied before the kill the seqno may be forgotten.
    told = {key: result[:2] for key, result in acknowledged.items() if result.seqno}
    assert told.items() <= followed.items()
