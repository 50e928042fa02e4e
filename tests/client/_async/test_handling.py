"""Changes handed to a function, against a real server."""

from collections.abc import Callable

import pytest

from tests.harness import RunningServer
from upr_client import AsyncClient, Change, MemoryPositions
from upr_client.errors import HandlerError, InvalidArgumentError

StartServer = Callable[..., RunningServer]
KEYS = [b"key %d" % i for i in range(300)]


class Flaky(Exception):
    """What handlers raise."""


@pytest.mark.asyncio
@pytest.mark.parametrize("order", ["partition", "key"])
async def test_each_change_is_handled_once_and_in_order(target: str, order: str) -> None:
    positions = MemoryPositions()
    handled: dict[bytes, list[bytes | None]] = {key: [] for key in KEYS}
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        for value in (b"1", b"2", b"3"):
            await bucket.write_many((key, value) for key in KEYS)
        changes = bucket.changes(resume=positions, until="now", acknowledge="manual")
        async with changes:
            await changes.run(
                lambda change: handled[change.key].append(change.value),
                order=order,  # type: ignore[arg-type]
                concurrency=5,
            )
            assert changes.status().unacknowledged == 0
        assert all(values == [b"1", b"2", b"3"] for values in handled.values())
        high = {info.partition: info.high_seqno for info in await client.admin.partitions(bucket)}
    stored = positions.load(range(1024))
    assert {p: at.seqno for p, at in stored.items() if at.seqno} == {
        p: seqno for p, seqno in high.items() if seqno
    }


@pytest.mark.asyncio
async def test_a_change_that_fails_is_tried_again(target: str) -> None:
    tries: dict[bytes, int] = {}
    letters: list[tuple[bytes, str]] = []

    def handle(change: Change) -> None:
        tries[change.key] = tries.get(change.key, 0) + 1
        if change.key == KEYS[0] or (change.key == KEYS[1] and tries[change.key] < 3):
            raise Flaky("no")

    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"1") for key in KEYS)
        changes = bucket.changes(until="now", acknowledge="manual")
        async with changes:
            await changes.run(
                handle,
                retries=2,
                dead_letter=lambda change, error: letters.append((change.key, repr(error))),
            )
            assert changes.status().unacknowledged == 0
    assert tries[KEYS[0]] == tries[KEYS[1]] == 3
    assert letters == [(KEYS[0], "Flaky('no')")]


@pytest.mark.asyncio
async def test_without_anybody_to_take_it_a_failure_ends_all_and_comes_again(
    target: str,
) -> None:
    positions = MemoryPositions()
    handled: list[bytes] = []
    broken = [True]

    def handle(change: Change) -> None:
        if change.key == KEYS[7] and broken[0]:
            raise Flaky("no")
        handled.append(change.key)

    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((key, b"1") for key in KEYS)
        # It would go on for ever.
        changes = bucket.changes(resume=positions, acknowledge="manual")
        async with changes:
            with pytest.raises(HandlerError, match="key 7") as raised:
                await changes.run(handle, retries=0)
            assert isinstance(raised.value.__cause__, Flaky)
        assert KEYS[7] not in handled
        broken[0] = False
        changes = bucket.changes(resume=positions, until="now", acknowledge="manual")
        async with changes:
            await changes.run(handle)
    assert set(handled) == set(KEYS)


@pytest.mark.asyncio
async def test_what_it_needs_is_said(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        async with bucket.changes(until="now") as changes:
            assert changes.status().unacknowledged == 0
            with pytest.raises(InvalidArgumentError, match="automatic"):
                await changes.run(print)
        async with bucket.changes(until="now", acknowledge="manual") as changes:
            with pytest.raises(InvalidArgumentError, match="concurrency"):
                await changes.run(print, concurrency=0)
            with pytest.raises(InvalidArgumentError, match="order"):
                await changes.run(print, order="none")  # type: ignore[arg-type]
