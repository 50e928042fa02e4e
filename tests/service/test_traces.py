"""Spans of writes and of streams' starts, in the SDK's own memory; and none where nobody traces."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.harness import poll
from tests.raw import RawClient, RawFollow, RawWriter, start_at
from upr.config import ServerConfig
from upr.service.server import Server
from upr.service.sight import traces
from upr_protocol.wire.v1 import change_stream_service_pb2 as changes
from upr_protocol.wire.v1 import key_value_service_pb2 as kv

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What is traced, by a provider that somebody has set."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


async def finished(spans: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    async def found() -> list[ReadableSpan]:
        return list(spans.get_finished_spans())

    return await poll(found, lambda all_of_them: len(all_of_them) >= count)


@pytest_asyncio.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    """Where a server in this process listens."""
    config = ServerConfig(tmp_path / "data", "127.0.0.1:0", max_value_bytes=1000)
    server = Server(config)
    await server.start()
    yield server.address
    assert await server.stop()


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def check_traces(found: list[ReadableSpan]) -> None:
    """The first span of a call is in its client's trace; each later one is a trace of its own, and linked to it."""
    first, *later = found
    assert first.parent is not None
    assert first.links == ()
    assert (first.parent.trace_id, first.parent.span_id) == (int(TRACE, 16), int(PARENT[36:52], 16))
    for span in later:
        (link,) = span.links
        assert (span.parent, link.context.trace_id) == (None, int(TRACE, 16))
        assert link.context.span_id == first.parent.span_id
    assert len({span.context and span.context.trace_id for span in found}) == len(found)


@pytest.mark.asyncio
async def test_writes_go_on_with_the_trace_of_their_client(
    spans: InMemorySpanExporter, target: str
) -> None:
    async with RawClient(target) as raw:
        call = raw.kv.Write(
            metadata=(("traceparent", PARENT), ("authorization", "Bearer secret token"))
        )
        await call.write(kv.WriteRequest(open=kv.WriteOpen(bucket="default")))
        writer = RawWriter(call)
        await writer.read()
        for value in (b"secret value", b"x" * 1001, b"again"):
            await writer.write([(b"secret key", value)])
        found = await finished(spans, 3)
        await writer.close()
    assert [span.name for span in found] == ["upr.write"] * 3
    assert [said(span)["upr.number"] for span in found] == [1, 2, 3]
    assert [said(span)["upr.bytes"] > 1000 for span in found] == [False, True, False]
    assert [said(span).get("error.type") for span in found] == [None, "INVALID_ARGUMENT", None]
    assert [span.status.status_code is StatusCode.ERROR for span in found] == [False, True, False]
    check_traces(found)
    for span in found:
        assert said(span)["upr.bucket"] == "default"
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time < span.end_time
        assert "secret" not in span.to_json()


@pytest.mark.asyncio
async def test_the_start_of_streams_is_traced_until_it_is_answered(
    spans: InMemorySpanExporter, target: str
) -> None:
    async with RawClient(target) as raw:
        call = raw.changes.Follow(metadata=(("traceparent", PARENT),))
        await call.write(changes.FollowRequest(open=changes.Open(bucket="default")))
        follow = RawFollow(call)
        await follow.read()
        await follow.start(*(start_at(p) for p in range(100)))
        await follow.start(start_at(200, 5, 77))
        found = await finished(spans, 2)
        await follow.close()
    assert [span.name for span in found] == ["upr.start"] * 2
    assert [said(span)["upr.partitions"] for span in found] == [100, 1]
    assert [said(span)["upr.not_started"] for span in found] == [0, 1]
    check_traces(found)


@pytest.mark.asyncio
async def test_what_is_not_answered_is_traced_as_that(
    spans: InMemorySpanExporter, target: str
) -> None:
    async with RawClient(target) as raw:
        writer = await raw.writer()
        await writer.call.write(kv.WriteRequest())
        (span,) = await finished(spans, 1)
    assert (span.parent, said(span)["error.type"]) == (None, "UNANSWERED")


class Context:
    def invocation_metadata(self) -> None:
        raise AssertionError("it is not looked at")


@pytest.mark.parametrize("provider", [trace.ProxyTracerProvider(), trace.NoOpTracerProvider()])
def test_where_nobody_traces_nothing_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, provider: object
) -> None:
    traces.prepare()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert traces.of_call("upr.write", "default", Context()) is None
    for module in ("opentelemetry.trace", "opentelemetry.propagate"):
        with monkeypatch.context() as patch:
            patch.setattr(trace, "get_tracer_provider", TracerProvider)
            patch.delitem(sys.modules, module, raising=False)
            assert traces.of_call("upr.write", "default", Context()) is None


def test_open_spans_of_a_call_are_bounded(spans: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer_provider().get_tracer("test")
    call = traces.CallTrace(tracer, "upr.start", "default", None)
    for number in range(2 * traces.SPANS_MAX):
        call.begin(partitions=number)
    for _ in range(2 * traces.SPANS_MAX):
        call.end()
    found = [said(span)["upr.partitions"] for span in spans.get_finished_spans()]
    assert found == list(range(traces.SPANS_MAX))
