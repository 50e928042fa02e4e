"""Health of the server as a whole, of its services, and of each bucket, by the gRPC health protocol."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from grpc_health.v1 import health, health_pb2

BUCKET: Final = "bucket/"
"""Prefix of a bucket's name in health checks."""
REQUEST_BYTES: Final = 1024
"""Largest request of a health check: a name, which a Watch keeps for its whole life."""
_TOLD_SECONDS: Final = 0.5


class Health:
    """Answers to health checks; ``servicer`` is registered with gRPC.

    Args:
        services: full names of all services.
        writing: those that accept writes.
    """

    def __init__(self, services: Iterable[str], writing: Iterable[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._writing = ("", *writing)
        self._services = tuple(services)
        self._buckets: set[str] = set()

    async def serving(self) -> None:
        await self._tell(dict.fromkeys(("", *self._services), _answer(True)))

    async def tell(self, *, writes: bool, buckets: Mapping[str, bool]) -> None:
        """Report the state of the storage.

        Args:
            writes: whether any bucket's storage works.
            buckets: by name, whether the storage has no problem; all other buckets are unknown.
        """
        if self.servicer._gracefully_shutting_down:
            return
        gone = self._buckets - buckets.keys()
        self._buckets = set(buckets)
        answers = health_pb2.HealthCheckResponse
        told = {name: _answer(writes) for name in self._writing}
        told |= {BUCKET + name: _answer(fine) for name, fine in buckets.items()}
        told |= {BUCKET + name: answers.SERVICE_UNKNOWN for name in gone}
        await self._tell(told)
        for name in gone - self._buckets:
            # Watchers were told; names of dropped buckets must not accumulate.
            self.servicer._server_status.pop(BUCKET + name, None)

    async def _tell(self, answers: Mapping[str, int]) -> None:
        # Set here without waiting: a watcher that does not read blocks the servicer's own ``set``.
        self.servicer._server_status.update(answers)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_SECONDS):
                await asyncio.gather(*map(self._wake, answers))

    async def _wake(self, name: str) -> None:
        watched = self.servicer._server_watchers.get(name)
        if watched is not None:
            async with watched:
                watched.notify_all()

    async def shut_down(self) -> None:
        self.servicer._gracefully_shutting_down = True
        await self._tell(dict.fromkeys(self.servicer._server_status, _answer(False)))


def _answer(serving: bool) -> int:
    answers = health_pb2.HealthCheckResponse
    return int(answers.SERVING if serving else answers.NOT_SERVING)
