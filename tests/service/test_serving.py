"""What an owner does while it does not know whether another server is the active one."""

import asyncio
from typing import Any

import pytest

from tests.harness import WAIT_SECONDS, pass_turns
from tests.service.bucket_state import started
from tests.service.test_host import Script, opening, rows
from upr.service import key_value
from upr.service.buckets import bucket_service
from upr.service.buckets.catalog import Catalog
from upr.service.key_value import KeyValueMethods
from upr.service.overload.intake import Intake
from upr_protocol.block import Block
from upr_protocol.errors import PartitionNotActiveError, StorageFailedError, UnknownOutcomeError
from upr_protocol.wire.v1 import types_pb2 as types


@pytest.mark.asyncio
@pytest.mark.parametrize("durability", [types.DURABILITY_MEMORY, types.DURABILITY_DISK])
async def test_a_write_is_neither_numbered_nor_answered_while_another_may_serve(
    catalog: Catalog, durability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started(catalog.find("default"))
    may, high = True, host.bucket.partitions.high
    catalog.may_serve = lambda: may
    context: Any = Script(opening("p"))
    call = asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context))
    assert (await context.said.get()).HasField("opened")

    async def rest() -> None:
        await pass_turns()

    # It is numbered, and then it is not known any more who serves.
    take, numbered = host._wake_committer, asyncio.Event()

    def taken(block: Block) -> None:
        nonlocal may
        may = False
        take(block)
        numbered.set()

    monkeypatch.setattr(host, "_wake_committer", taken)
    context.send(1, rows(b"a"), durability=durability)
    async with asyncio.timeout(WAIT_SECONDS):
        await numbered.wait()
        await host.durable(0)
    await rest()
    early = not context.said.empty()
    # The next one is not even numbered.
    context.send(2, rows(b"b"), durability=durability)
    await rest()
    given = int(high.sum())
    monkeypatch.setattr(host, "_wake_committer", take)
    may = True
    host.disk.changed()
    async with asyncio.timeout(WAIT_SECONDS):
        told = [(await context.said.get()).result for _ in range(2)]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()
    assert not early, "it was answered while another server may have been the active one"
    assert given == 1
    assert [bool(result.runs) for result in told] == [True, True]


@pytest.mark.asyncio
async def test_an_answer_is_not_handed_over_once_another_may_serve(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stood still after it had looked, and while it made the answer."""
    host = started(catalog.find("default"))
    made, may = asyncio.Event(), True
    catalog.may_serve = lambda: may
    context: Any = Script(opening("p"))
    call = asyncio.create_task(KeyValueMethods(catalog, Intake()).Write(None, context))
    assert (await context.said.get()).HasField("opened")
    result = key_value._result

    def slowly(pending: Any) -> Any:
        nonlocal may
        may = made.is_set()
        made.set()
        return result(pending)

    monkeypatch.setattr(key_value, "_result", slowly)
    context.send(1, rows(b"a"))
    async with asyncio.timeout(WAIT_SECONDS):
        await made.wait()
        await pass_turns()
        early = not context.said.empty()
        may = True
        host.disk.changed()
        told = (await context.said.get()).result
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await host.close()
    assert not early
    assert told.runs


@pytest.mark.asyncio
async def test_what_lasts_is_refused_and_what_was_numbered_is_unknown_after_a_step_down(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_service, "MAY_SECONDS", 0.05)
    host = started(catalog.find("default"))
    written = await host.write(rows(b"a"), b"", None, 0)
    catalog.may_serve = lambda: False
    with pytest.raises(PartitionNotActiveError):
        await host.write(rows(b"b"), b"", None, 0)
    with pytest.raises(PartitionNotActiveError):
        catalog.check_active()
    waiting = asyncio.create_task(host.until_answered(written))
    monkeypatch.setattr(bucket_service, "MAY_SECONDS", 10 * WAIT_SECONDS)
    late = asyncio.create_task(host.write(rows(b"c"), b"", None, 0))
    await asyncio.sleep(0)
    await host.step_down(fenced=False)
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(UnknownOutcomeError, match="stepped down"):
            await waiting
        # At once, and not as a refusal that would wait until this server may answer again.
        with pytest.raises(PartitionNotActiveError):
            await late
    await host.close()


@pytest.mark.asyncio
async def test_a_repetition_is_not_answered_by_one_that_stepped_down(catalog: Catalog) -> None:
    host = started(catalog.find("default"))
    call = host.bucket.open_producer(b"p", 0)
    await host.write(rows(b"a"), b"p", call, 1)
    assert (await host.write(rows(b"a"), b"p", call, 1)).duplicate
    await host.step_down(fenced=False)
    with pytest.raises(PartitionNotActiveError):
        await host.write(rows(b"a"), b"p", call, 1)
    await host.close()


@pytest.mark.asyncio
async def test_what_was_durable_before_another_became_active_is_acknowledged_no_more(
    catalog: Catalog,
) -> None:
    host = started(catalog.find("default"))
    call: Any = object.__new__(key_value._WriteCall)
    call._host = host
    until = asyncio.get_running_loop().time() + WAIT_SECONDS
    written = await host.write(rows(b"a"), b"", None, 0)
    pending = key_value._Pending(1, 0, until, written)
    await asyncio.wait_for(host.durable(written.entry), WAIT_SECONDS)
    assert call._is_durable(pending)
    host.fence(on=True)
    assert not call._is_durable(pending)
    await call._until_durable(pending, written)
    assert isinstance(pending.error, UnknownOutcomeError)
    with pytest.raises(PartitionNotActiveError):
        await host.write(rows(b"b"), b"", None, 0)
    assert await asyncio.wait_for(host.close(), WAIT_SECONDS)


@pytest.mark.asyncio
@pytest.mark.parametrize("others", [[], ["127.0.0.1:9"]])
async def test_in_a_set_a_failed_storage_is_waited_for_whoever_is_counted(
    catalog: Catalog, others: list[str]
) -> None:
    catalog.servers = lambda: others
    host = started(catalog.find("default"))
    assert not host.bucket.may_undo
    host.fail(StorageFailedError("the disk fails"))
    assert host.bucket.failure is not None
    assert host.bucket.failure.retriable == bool(others)
    await host.close()
