"""How changes are handed to a function; the same in both flavours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from upr_client.events import Change, Rollback
from upr_protocol.errors import HandlerError, InvalidArgumentError

CONCURRENCY: Final = 8
CONCURRENCY_MAX: Final = 1024
RETRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlingOptions:
    """The meanings are those of ``AsyncChanges.run``.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    concurrency: int = CONCURRENCY
    order: Literal["partition", "key"] = "partition"
    retries: int = RETRIES
    dead_letter: Callable[[Change, Exception], Any] | None = None
    on_rollback_event: Callable[[Rollback], Any] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidArgumentError(
                f"concurrency is {self.concurrency}, it must be from 1 to {CONCURRENCY_MAX}"
            )
        if self.order not in ("partition", "key"):
            raise InvalidArgumentError(f'order is {self.order!r}, it must be "partition" or "key"')
        if self.retries < 0:
            raise InvalidArgumentError(f"retries is {self.retries}, it must be 0 or more")


def failed(change: Change, error: BaseException) -> HandlerError:
    """Return the error that ends the handling."""
    raised = HandlerError(
        f"the handler failed for key {change.key[:60]!r} of partition {change.partition} at seqno {change.seqno}: "
        f"{error!r}",
        hint="mend the handler and go on, the change comes again; or pass dead_letter= to take such changes",
    )
    raised.__cause__ = error
    return raised
