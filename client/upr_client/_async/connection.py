"""One bidirectional call with a reader in the background."""

from collections.abc import Callable
from typing import Any

import grpc

from upr_client._async.adapter import Background, Cancelled, Event, RequestQueue
from upr_client.messages import call_error
from upr_protocol.errors import UprError


class Call:
    """A bidirectional call.

    The reader runs beside the application and hands over each message, then, exactly once, the end. With grpc.aio
    a write that meets the end of the call loses messages already received; so ``half_close`` is the last thing
    that is ever sent, and everything after it is dropped.

    Args:
        method: the stub's method.
        name: of the reader's task or thread.
        on_message: takes each message, on the reader; must not block.
        on_end: takes the error the call ended with, None for a good end.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        name: str,
        on_message: Callable[[Any], None],
        on_end: Callable[[UprError | None], None],
    ) -> None:
        self._method = method
        self._on_message = on_message
        self._on_end = on_end
        self._requests: RequestQueue[Any] = RequestQueue()
        self._ended = Event()
        self._call = method(self._requests)
        self._reader = Background(self._read, name)

    def send(self, request: Any) -> None:
        """Queue a request; dropped after ``half_close`` or the end."""
        self._requests.put(request)

    def half_close(self) -> None:
        """Send nothing more."""
        self._requests.close()

    async def finish(self, seconds: float) -> None:
        """Half-close and wait for the server's end of the call, at most so long; then cancel."""
        self._requests.close()
        try:
            await self._ended.wait(seconds)
        finally:
            # Does nothing after the end.
            self._call.cancel()
        await self._reader.join()

    async def cancel(self) -> None:
        """End the call at once and wait for the reader's end."""
        self._call.cancel()
        self._requests.close()
        await self._reader.join()

    async def _read(self) -> None:
        error: UprError | None = None
        try:
            async for message in self._call:
                self._on_message(message)
        except grpc.RpcError as failure:
            error = call_error(failure)
        except Cancelled:
            error = UprError("the call was cancelled", reason="CANCELLED", retriable=True)
        except Exception as failure:
            # Nothing reads after this; a bug or a message that cannot be read must not look like silence.
            error = UprError(f"reading the call failed: {failure!r}")
            self._call.cancel()
        finally:
            self._requests.close()
            self._ended.set()
            self._on_end(error)
