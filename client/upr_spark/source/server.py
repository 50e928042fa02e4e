"""The server as planning sees it, over the SDK; questions are repeated for as long as ``retryTimeout`` says."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from upr_protocol.errors import (
    AlreadyExistsError,
    BucketGoneError,
    CutNotFoundError,
    TooManyError,
    UnavailableError,
    UprError,
)
from upr_protocol.handshake import Pin
from upr_spark.errors import UprSparkError
from upr_spark.options import Connection

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.types import Bucket


T = TypeVar("T")

LOAD: Final = "-load"
"""Ending of the names of cuts that loads make; no other cut of this package has it."""
UNUSED_SECONDS: Final = 15.0
"""Time after which a load's cut may be given up for another one: three renewals of a task."""
_TOO_MANY_HINT: Final = (
    "release cuts that are not needed with upr-admin cut release; loads give up their own once they are not read for a "
    "while"
)
_PAUSES: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says of one partition, asked with the failover id of an entry.

    Args:
        newest_id: its newest failover id.
        high: its newest seqno.
        rollback: to where data of the id that was asked about goes back; None for nowhere.
        rule, words: which rule of the handshake decided.
        newest_record: the seqno of its newest failover record.
        purge: deletes at or below this seqno may be gone.
        active: False on a replica, which may only be late.
    """

    newest_id: int
    high: int
    rollback: int | None = None
    rule: str = ""
    words: str = ""
    newest_record: int = 0
    purge: int = 0
    active: bool = True


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A cut: its name, and the pin of each partition."""

    name: str
    pins: Mapping[int, Pin]


class Server:
    """One bucket of a server. The client is opened when it is needed; ``close`` it.

    Args:
        connection: how to reach it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client: Client | None = None
        self._bucket: Bucket | None = None

    @property
    def client(self) -> "Client":
        if self._client is None:
            self._client = self._connection.open()
        return self._client

    @property
    def bucket(self) -> "Bucket":
        if self._bucket is None:
            self._bucket = self.client.bucket(self._connection.bucket)
        return self._bucket

    @property
    def bucket_version(self) -> int:
        """The version of the bucket that answered last; 0 before."""
        return self.bucket.version

    def close(self) -> None:
        """Disconnect; what is asked later connects anew."""
        client, self._client, self._bucket = self._client, None, None
        if client is not None:
            client.close()

    def now(self) -> float:
        """Return seconds of a clock that only goes on."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def ask(self, ids: Mapping[int, int | None], *, whole: bool) -> dict[int, Answer]:
        """Say hello for partitions, each with the failover id of what was read.

        Args:
            whole: also ask what only planning needs: newest records, purge seqnos, states.

        Raises:
            UprSparkError: UPR_BUCKET_MISMATCH, the bucket is another one than before; or as the server refused.
        """
        from upr_client.lowlevel import hello

        answers = self._retried(lambda: hello(self.bucket, ids, with_log=whole))
        for answer in answers:
            if answer.HasField("problem"):
                problem = answer.problem
                raise UprSparkError(
                    problem.reason or "UNAVAILABLE",
                    f"partition {answer.partition}: {problem.message}",
                    hint=problem.hint,
                    retriable=problem.retriable,
                )
        if not whole:
            return {a.partition: _answer(a) for a in answers}
        infos = self._retried(lambda: self.client.admin.partitions(self.bucket, list(ids)))
        told = {info.partition: info for info in infos}
        return {
            a.partition: _answer(
                a, told[a.partition].purge_seqno, told[a.partition].state == "active"
            )
            for a in answers
        }

    def begin_at(self, times: Mapping[int, int]) -> dict[int, Pin]:
        """Return the seqno of each partition right below its first mutation committed at or after a time.

        Args:
            times: by partition, microseconds since the epoch. Each different one is a call of its own.

        Raises:
            UprSparkError: as the server refused.
        """
        begun: dict[int, Pin] = {}
        for time_ in sorted(set(times.values())):
            chosen = [partition for partition, one in times.items() if one == time_]
            begun |= self._retried(partial(self._begin_at, chosen, time_))
        return begun

    def _begin_at(self, partitions: Sequence[int], moment: int) -> dict[int, Pin]:
        from upr_client import Only, Tuning

        patience = self._connection.retry_timeout
        following = self.bucket.changes(
            # Half a microsecond more, so that it is not rounded down to the one before.
            start=(moment + 0.5) / 1e6,
            only=Only(partitions, keys_only=True),
            tuning=Tuning(credit_bytes=1, retry_seconds=patience),
            on_rollback="event",
        )
        with following:
            if not following.ready(patience):
                raise UnavailableError(f"the server did not answer within {patience:g} s")
            positions = following.positions()
        return {p: Pin(one.failover_id, one.seqno) for p, one in positions.items()}

    def make_cut(self, name: str, partitions: Sequence[int], lease: float) -> CutPoint:
        """Pin partitions, waiting for room.

        Where the server takes no further cut, the one goes that was not used for the longest time, of the loads whose
        cuts are named alike. A task that reads it later may find that it is gone.

        Args:
            name: one that ends with a part of its own, and of a load with LOAD; what is before these is alike.

        Raises:
            UprSparkError: UPR_TOO_MANY, after ``retryTimeout``; or as the server refused.
        """
        began = self.now()
        alike = name.removesuffix(LOAD).rpartition("-")[0] + "-"
        ahead = -math.inf
        while True:
            try:
                return self._make_cut(name, partitions, lease)
            except UprSparkError as error:
                too_late = self.now() - began > self._connection.retry_timeout
                if error.code != TooManyError.default_reason or too_late:
                    raise
            cuts = self._retried(lambda: self.client.admin.cuts(self.bucket))
            waited = self.now() - began
            used = {cut.name: cut.expires_time / 1e6 - cut.lease_seconds for cut in cuts}
            # Only the server's clock dates them. It is past each use, and past one seen earlier by what was waited since.
            ahead = max([ahead, *(one - waited for one in used.values())])
            mine = [name for name in used if name.startswith(alike) and name.endswith(LOAD)]
            oldest = min(mine, key=used.__getitem__, default=None)
            if oldest is not None and ahead + waited - used[oldest] >= UNUSED_SECONDS:
                self.release(oldest)
                self.pause(0.05)
            else:
                self.pause(1.0)

    def _make_cut(self, name: str, partitions: Sequence[int], lease: float) -> CutPoint:

        def make() -> Any:
            try:
                return self.client.admin.create_cut(
                    self.bucket, name, partitions=partitions, lease=lease
                )
            except AlreadyExistsError:
                # The answer to the attempt before this one was lost.
                self.client.admin.release_cut(self.bucket, name)
                raise UprError(f"cut {name} was made twice", retriable=True) from None
            except TooManyError as error:
                raise UprSparkError(
                    "TOO_MANY", error.message, hint=_TOO_MANY_HINT, retriable=True
                ) from None

        cut = self._retried(make)
        return CutPoint(cut.name, cut.pins)

    def find_cut(self, name: str, lease: float) -> CutPoint | None:
        """Return a cut that still holds, renewed; None when there is none of that name."""
        if not self.renew(name, lease):
            return None
        for cut in self._retried(lambda: self.client.admin.cuts(self.bucket, with_pins=True)):
            if cut.name == name:
                return CutPoint(cut.name, cut.pins)
        return None

    def renew(self, name: str, lease: float) -> bool:
        """Have a cut's lease begin anew; False when there is none of that name any more."""
        try:
            self._retried(lambda: self.client.admin.renew_cut(self.bucket, name, lease))
        except UprSparkError as error:
            if error.code == CutNotFoundError.default_reason:
                return False
            raise
        return True

    def release(self, name: str) -> None:
        """Give a cut up; where that fails its lease ends it."""
        try:
            self.client.admin.release_cut(self.bucket, name)
        except UprError:
            return

    def _retried(self, ask: Callable[[], T]) -> T:
        began = time.monotonic()
        attempt = 0
        while True:
            try:
                return ask()
            except BucketGoneError as error:
                raise bucket_mismatch(error.message) from None
            except UprError as error:
                waited = time.monotonic() - began
                if (
                    not error.retriable
                    or isinstance(error, UprSparkError)
                    or waited > self._connection.retry_timeout
                ):
                    raise UprSparkError.of(error) from None
            time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
            attempt += 1


def bucket_mismatch(words: str) -> UprSparkError:
    """Return the error for a bucket that is not the one that was read before."""
    return UprSparkError(
        "BUCKET_MISMATCH",
        words,
        hint="a bucket that was dropped and created anew, or another one of the same name, needs a new checkpoint",
    )


def _answer(answer: Any, purge: int = 0, active: bool = True) -> Answer:
    records = answer.failover_log
    return Answer(
        answer.failover_id,
        answer.high_seqno,
        answer.rollback_seqno if answer.HasField("rollback_seqno") else None,
        answer.rule,
        answer.words,
        records[-1].seqno if records else 0,
        purge,
        active,
    )
