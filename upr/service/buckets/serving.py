"""Serving: whether a bucket's server may take and answer writes at this very moment.

Alone, or where an operator says who is active, it always may. In a cluster it may while nobody else can be the active one,
which is looked at after the last wait: before a write is numbered, and before it is answered.
"""

import asyncio
from collections.abc import Callable

from upr.engine.bucket import Bucket, Written
from upr.service.buckets.disk_threads import Disk
from upr_protocol.errors import PartitionNotActiveError, UnknownOutcomeError

WAIT_SECONDS = 2.0
"""Longest wait of a write that is not numbered while it is not known whether another server is the active one."""


def not_active(owner: str) -> PartitionNotActiveError:
    """Return the refusal of what only the active server does; ``owner`` is its HOST:PORT, empty if it is not known."""
    return PartitionNotActiveError(
        "this server is not the active one of its set",
        hint="ask the active one, which 'upr-admin topology' shows, or read with read_from=\"any\"",
        retriable=True,
        owner=owner,
    )


class Serving:
    """Whether one bucket may be written.

    Attributes:
        may: returns whether nobody else can be the active one at this moment.
    """

    def __init__(self, bucket: Bucket, disk: Disk) -> None:
        self.may: Callable[[], bool] = lambda: True
        self._bucket = bucket
        self._disk = disk

    async def until_may(self) -> None:
        """Wait while another server may be the active one.

        Raises:
            PartitionNotActiveError: that lasts for WAIT_SECONDS, or this one stepped down.
        """
        term = self._bucket.copies.term
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not (self.may() or self._disk.stopping):
                    await self._disk.next_change()
                    if term != self._bucket.copies.term:
                        return
        except TimeoutError:
            raise not_active("") from None

    async def until_answered(self, written: Written) -> None:
        """Wait until a write may be answered: nobody else can be the active one when this returns.

        Raises:
            StorageFailedError, BucketGoneError: the bucket failed, or was dropped.
            UnknownOutcomeError: this server stepped down.
        """
        while not self.may():
            if self._disk.gone is not None:
                raise self._disk.gone
            if self._bucket.failure is not None:
                raise self._bucket.failure.with_traceback(None)
            if written.term != self._bucket.copies.term:
                raise UnknownOutcomeError(
                    "this server stepped down before the write was acknowledged",
                    hint="send it again, to the server that is active, with its number to learn the outcome",
                )
            await self._disk.next_change()
