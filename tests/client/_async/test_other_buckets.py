# ruff: noqa: SIM117
"""Following a bucket that was dropped, or created again, against a scripted server."""

import pytest

from tests.client._async.adapter import serve
from tests.client.scripted import (
    BEGIN,
    END,
    ID_A,
    ID_B,
    VERSION,
    Abort,
    Expect,
    Hold,
    answers,
    at,
    ended,
    opened,
    rollback,
    started,
)
from upr_client import AsyncClient, MemoryPositions, Only, Position, Rollback
from upr_client.errors import BucketGoneError, BucketNotFoundError, RollbackError
from upr_protocol.failover import FailoverLog


@pytest.mark.asyncio
@pytest.mark.parametrize("asked_again", [False, True])
async def test_another_bucket_of_the_name_is_a_rollback_to_0(asked_again: bool) -> None:
    gone = [Expect("open"), Abort(BucketGoneError("it was created again"))]
    script = [
        Expect("open"),
        opened(version=1),
        Expect("start"),
        answers(rollback(1, 0, ID_B, (ID_B, 0))),
        Expect("start"),
        answers(started(1, 7, ID_B)),
        *END,
    ]
    scripts = [gone, script] if asked_again else [script]
    store = MemoryPositions({1: at(3, 2, 3)})
    async with serve(scripts) as server, AsyncClient(server.target) as client:
        changes = client.bucket().changes(resume=store, only=Only([1]), on_rollback="event")
        async with changes:
            event = await anext(changes)
            assert isinstance(event, Rollback)
            assert (event.from_seqno, event.seqno, event.rule) == (3, 0, "bucket_gone")
            assert (event.old_id, event.new_id) == (ID_A, ID_B)
            assert "version 0000000000b0c4e7" in event.words
            # Not undone yet: a kill now finds the old version with the old data.
            assert store.load([1])[1] == at(3, 2, 3)
            assert [event async for event in changes] == []
        calls = server.calls["follow"]
        opens = [call.of("open")[0] for call in calls]
        assert opens[0].bucket_version == VERSION
        assert [o.HasField("bucket_version") for o in opens] == [True, False][: len(opens)]
        first, second = (start.partitions[0] for start in calls[-1].of("start"))
        assert (first.seqno, first.HasField("failover_id"), first.HasField("data_id")) == (
            3,
            False,
            False,
        )
        assert (second.seqno, second.failover_id) == (0, ID_B)
    assert store.load([1])[1] == Position(
        1, ID_B, None, 0, 0, (), FailoverLog.born(ID_B), bucket="default"
    )


@pytest.mark.asyncio
async def test_without_a_policy_another_bucket_of_the_name_is_an_error() -> None:
    script = [
        Expect("open"),
        opened(version=1),
        Expect("start"),
        answers(rollback(1, 0, ID_B, (ID_B, 0))),
        Hold(),
    ]
    store = MemoryPositions({1: at(3)})
    async with serve([script]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(resume=store, only=Only([1])) as changes:
            with pytest.raises(RollbackError, match="created again"):
                await anext(changes)
    assert store.load([1])[1] == at(3)


@pytest.mark.asyncio
async def test_a_bucket_that_is_gone_and_not_there_again_is_an_error() -> None:
    first = [*BEGIN, answers(started(1, 7)), ended("BUCKET_GONE", (1, 7)), ended("BUCKET_GONE")]
    second = [Expect("open"), Abort(BucketNotFoundError("there is no bucket default"))]
    async with serve([first, second]) as server, AsyncClient(server.target) as client:
        async with client.bucket().changes(only=Only([1])) as changes:
            with pytest.raises(BucketNotFoundError, match="no bucket default"):
                await anext(changes)
