"""Storage of positions: in the application's store, or in the server, one save after the other."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from upr_client._async.call import BucketHandle
from upr_client._async.io import Semaphore, run_blocking
from upr_client.changes.options import ChangesOptions
from upr_client.changes.session import Following
from upr_client.positions import save_positions
from upr_protocol.errors import UprError
from upr_protocol.position import Position
from upr_protocol.position_table import Found


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

    async def save(self) -> None:
        """Store what changed.

        Raises:
            UprError: it could not be stored; what the server may take later is said and not raised.
        """
        self._bucket.connection.check_process()
        await self._turn.take()
        try:
            await self._save()
        finally:
            self._turn.give_back()

    async def _save(self) -> None:
        with self._mutex:
            positions = self._following.begin_save()
        in_server = self._following.ownership is not None
        refused: list[int] = []
        if positions:
            try:
                if self._store is not None:
                    await run_blocking(save_positions, self._store, positions)
                else:
                    refused = await self._save_in_server(positions)
            except BaseException as error:
                with self._mutex:
                    self._following.not_saved(positions, wait=in_server)
                if in_server and isinstance(error, UprError) and error.retriable:
                    self._say(f"positions were not stored: {error}; trying again")
                    return
                raise
        with self._mutex:
            message = self._following.saved(positions, refused)
        if message is not None:
            self._tell(message)

    async def _save_in_server(self, positions: Mapping[int, Position]) -> list[int]:
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.save_request(self._bucket.name, version, positions)
        connection = self._bucket.connection
        answer = await connection.ask(connection.stubs().streams.SavePositions, request)
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
        connection = self._bucket.connection
        answer = await connection.ask(connection.stubs().streams.LoadPositions, request)
        with self._mutex:
            return ownership.found(answer)
