"""Storage of positions: in the application's store, or in the server, one save after the other."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from upr_client._async.call import BucketHandle
from upr_client._async.io import Semaphore, now, run_blocking
from upr_client.changes.options import ChangesOptions
from upr_client.changes.session import UNSAVED, Following
from upr_client.endpoints import took_too_long
from upr_client.positions import save_positions
from upr_protocol.errors import BucketGoneError, FencedError, UprError
from upr_protocol.position import Position
from upr_protocol.position_table import Found

_logger = logging.getLogger("upr_client")

STOP_SECONDS: Final = 1.0
"""Time that is left to a server which did not store positions in its time, or owes nothing but the end of a call."""

_SLOW_HINT: Final = "on a slow link a smaller credit_bytes of Tuning has answers come sooner"


class PositionStorage:
    """Storage of the positions of one ``AsyncChanges``; ``mutex`` guards ``following``.

    Args:
        tell: takes what the server is to know once positions are stored.
    """

    def __init__(
        self,
        bucket: BucketHandle,
        options: ChangesOptions,
        following: Following,
        mutex: AbstractContextManager[Any],
        say: Callable[[str], None],
        tell: Callable[[Any], None],
    ) -> None:
        self._bucket = bucket
        self._store = options.store
        self._following = following
        self._mutex = mutex
        self._say = say
        self._tell = tell
        self._turn = Semaphore(1)
        # Whether the server did not store what it was asked to last.
        self._is_late = False

    def patience(self, seconds: float) -> float:
        """Return how long the server may take for what comes next, at most ``seconds``."""
        return min(seconds, STOP_SECONDS) if self._is_late else seconds

    async def save_last(self, seconds: float) -> None:
        """Store what changed before a call ends that hands over; of what the server does not take a warning is left."""
        seconds = self.patience(seconds)
        try:
            await self.save(seconds)
        except FencedError as error:
            # The new owner resumes from the positions stored before.
            self._say(str(error))
        if self._following.is_unsaved:
            _logger.warning("%s: %s", self._bucket.name, UNSAVED)

    async def save(self, seconds: float | None = None) -> None:
        """Store what changed.

        Args:
            seconds: how long the server may take; None for the client's ``request_timeout``.

        Raises:
            UprError: it could not be stored; what the server may take later is said and not raised.
        """
        self._bucket.connection.check_process()
        until = None if seconds is None else now() + seconds
        if not await self._turn.take(seconds):
            # The save before stands still.
            self._is_late = True
            return
        try:
            await self._save(until)
        finally:
            self._turn.give_back()

    async def _save(self, until: float | None) -> None:
        with self._mutex:
            positions = self._following.begin_save()
        in_server = self._following.ownership is not None
        refused: list[int] = []
        if positions:
            try:
                if self._store is not None:
                    await run_blocking(save_positions, self._store, positions)
                else:
                    refused = await self._save_in_server(positions, until)
                    self._is_late = False
            except BaseException as error:
                with self._mutex:
                    self._following.not_saved(positions, wait=in_server)
                if in_server and isinstance(error, UprError) and error.retriable:
                    is_first = took_too_long(error) and not self._is_late
                    hint = f" ({_SLOW_HINT})" if is_first else ""
                    self._is_late = True
                    self._say(f"positions were not stored: {error}; trying again{hint}")
                    return
                raise
        with self._mutex:
            message = self._following.saved(positions, refused)
        if message is not None:
            self._tell(message)

    async def _save_in_server(
        self, positions: Mapping[int, Position], until: float | None
    ) -> list[int]:
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.save_request(self._bucket.name, version, positions)
        seconds = None if until is None else max(until - now(), 0.0)
        answer = await self._ask("SavePositions", request, seconds)
        return [refused.partition for refused in answer.refused_partitions]

    async def load(self) -> Found:
        """Load from the server what is to be loaded; return those that begin where it says.

        Raises:
            UprError: the server did not answer.
        """
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.load_request(self._bucket.name, version)
        answer = await self._ask("LoadPositions", request)
        with self._mutex:
            return ownership.found(answer)

    async def _ask(self, name: str, request: Any, seconds: float | None = None) -> Any:
        connection = self._bucket.connection
        try:
            method = getattr(connection.stubs().streams, name)
            return await connection.ask(method, request, seconds)
        except BucketGoneError as error:
            # Of a bucket that was created anew the call's own end, or the next call, tells, and a rollback.
            error.retriable = True
            raise
