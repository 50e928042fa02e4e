"""Storing positions and loading them from the server: one call at a time, and what was stored last is newest."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc

from upr_client._async.adapter import Places, run_blocking, unary
from upr_client.changes_options import ChangesOptions
from upr_client.following import Following
from upr_client.messages import call_error
from upr_protocol.errors import UprError
from upr_protocol.position import Position

if TYPE_CHECKING:
    from upr_client._async.bucket import AsyncBucket


class Storing:
    """Where the positions of one ``AsyncChanges`` go.

    Args:
        mutex: guards ``following``.
        say: takes words for people.
        tell: takes what the server is to know once positions are stored.
    """

    def __init__(
        self,
        bucket: "AsyncBucket",
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
        self._turn = Places(1)

    async def save(self) -> None:
        """Store what changed.

        Raises:
            UprError: it could not be stored; what the server may take later is said and not raised.
        """
        self._bucket._client._check_process()
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
        if self._store is None and not in_server:
            positions = {}
        elif positions:
            try:
                if self._store is not None:
                    await run_blocking(self._store.save, positions)
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

    async def _save_in_server(self, positions: dict[int, Position]) -> list[int]:
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.save_request(self._bucket.name, version, positions)
        client = self._bucket._client
        try:
            answer = await unary(
                client._stubs().streams.SavePositions, request, client.request_timeout
            )
        except grpc.RpcError as error:
            raise call_error(error) from error
        return [refused.partition for refused in answer.refused_partitions]

    async def load(self) -> None:
        """Load from the server what is to be loaded.

        Raises:
            UprError: the server did not answer.
        """
        ownership = self._following.ownership
        assert ownership is not None
        version = self._following.session.bucket_version
        request = ownership.load_request(self._bucket.name, version)
        client = self._bucket._client
        try:
            answer = await unary(
                client._stubs().streams.LoadPositions, request, client.request_timeout
            )
        except grpc.RpcError as error:
            raise call_error(error) from error
        with self._mutex:
            self._following.loaded(answer)
