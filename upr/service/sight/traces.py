"""Traces: spans of writes and of the starts of streams, for OpenTelemetry.

There are none unless a provider of tracers is set in this process, by a program that has imported OpenTelemetry for that. It is
looked at when a call is opened; without it a write costs one comparison more. The first span of a call goes on with the trace that
the call's metadata name in ``traceparent``. A call may last for days, so each later span is a trace of its own, with a link
to that one. A span has sizes, numbers and the name of the bucket, and never keys, values or credentials.
"""

import importlib
import sys
from collections import deque
from typing import Any, Final

from upr import __version__
from upr_protocol.limits import WRITES_IN_FLIGHT_MAX

_API: Final = "opentelemetry.trace"
_CONTEXT: Final = "opentelemetry.context"
_PROPAGATE: Final = "opentelemetry.propagate"
_CARRIED: Final = ("traceparent", "tracestate")
SPANS_MAX: Final = 2 * WRITES_IN_FLIGHT_MAX
"""Spans of one call that are open at once."""


class CallTrace:
    """Spans of one call, begun in the order of its requests and ended in the order of their answers.

    Args:
        parent: the context that the first one goes on with; the others have a link to it.
    """

    def __init__(self, tracer: Any, name: str, bucket: str, parent: Any) -> None:
        self._tracer = tracer
        self._name = name
        self._bucket = bucket
        self._context = parent
        self._api: Any = sys.modules[_API]
        self._links: list[Any] = []
        self._open: deque[Any] = deque()

    def begin(self, **attributes: int) -> None:
        """Begin the span of a request; there is none while SPANS_MAX others of the call are open."""
        named: dict[str, Any] = {f"upr.{name}": value for name, value in attributes.items()}
        named["upr.bucket"] = self._bucket
        span = None
        if len(self._open) < SPANS_MAX:
            span = self._tracer.start_span(
                self._name, self._context, self._api.SpanKind.SERVER, named, self._links
            )
            if not self._links:
                opener = self._api.get_current_span(self._context).get_span_context()
                linked = opener if opener.is_valid else span.get_span_context()
                self._links = [self._api.Link(linked)]
                # An empty one: what is current here is of no request.
                self._context = sys.modules[_CONTEXT].Context()
        self._open.append(span)

    def end(self, refused: str = "", **attributes: int) -> None:
        """End the span of the oldest request, with the reason for which it was refused, if it was."""
        span = self._open.popleft() if self._open else None
        if span is None:
            return
        for name, value in attributes.items():
            span.set_attribute(f"upr.{name}", value)
        if refused:
            span.set_attribute("error.type", refused)
            span.set_status(self._api.StatusCode.ERROR, refused)
        span.end()

    def close(self) -> None:
        """End the spans of requests that were not answered."""
        while self._open:
            self.end("UNANSWERED")


def prepare() -> None:
    """Import what traces need where somebody may set a provider. Call once, while there are descriptors."""
    if _API in sys.modules:
        importlib.import_module(_PROPAGATE)


def of_call(name: str, bucket: str, context: Any) -> CallTrace | None:
    """Return the trace of a gRPC call; None where nobody traces."""
    trace: Any = sys.modules.get(_API)
    propagate: Any = sys.modules.get(_PROPAGATE)
    if trace is None or propagate is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    carrier = {
        key: value
        for key, value in context.invocation_metadata() or ()
        if key in _CARRIED and isinstance(value, str)
    }
    return CallTrace(
        provider.get_tracer("upr", __version__), name, bucket, propagate.extract(carrier)
    )
