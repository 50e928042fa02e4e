"""Credit: how many bytes of frames may be on their way to a consumer that has not consumed them.

Source: the project's design, "Following" (the server pulls; one value larger than the whole credit still goes
through, alone) and its limits.
"""

from upr_protocol.errors import CreditExceededError, InvalidArgumentError
from upr_protocol.limits import CREDIT_BYTES, CREDIT_BYTES_MAX, CREDIT_RETURN_FRACTION


def check_window(window: int) -> int:
    """Return the window, in bytes, when it is 1 to ``CREDIT_BYTES_MAX``.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not 1 <= window <= CREDIT_BYTES_MAX:
        raise InvalidArgumentError(
            f"credit is {window} bytes, it must be from 1 to {CREDIT_BYTES_MAX}"
        )
    return window


class CreditWindow:
    """The sender's side of one call.

    Args:
        window: bytes that may be outstanding, 1 to ``CREDIT_BYTES_MAX``.

    Raises:
        InvalidArgumentError: the window is out of range.
    """

    __slots__ = ("_outstanding", "_window")

    def __init__(self, window: int = CREDIT_BYTES) -> None:
        self._window = check_window(window)
        self._outstanding = 0

    @property
    def window(self) -> int:
        """Bytes that may be outstanding."""
        return self._window

    @property
    def outstanding(self) -> int:
        """Bytes sent and not yet given back; above the window only while one larger message is out."""
        return self._outstanding

    def may_send(self, size: int) -> bool:
        """Whether ``size`` bytes (0 or more) may be sent now.

        They may if they fit into what is left, or if nothing is outstanding: else a value larger than the whole
        credit could never be sent.
        """
        return self._outstanding == 0 or size <= self._window - self._outstanding

    def spend(self, size: int) -> None:
        """Count ``size`` bytes (0 or more) as sent.

        Raises:
            InvalidArgumentError: it is negative or ``may_send`` says no; nothing was changed.
        """
        if size < 0 or not self.may_send(size):
            raise InvalidArgumentError(
                f"{size} bytes do not fit: {self._outstanding} of {self._window} are outstanding"
            )
        self._outstanding += size

    def give_back(self, size: int) -> None:
        """Count ``size`` bytes (1 to ``outstanding``) as consumed by the peer.

        Raises:
            CreditExceededError: it is 0, negative or more than is outstanding; nothing was changed.
        """
        if not 1 <= size <= self._outstanding:
            raise CreditExceededError(
                f"{size} bytes of credit were returned, it must be from 1 to {self._outstanding}",
                hint="return each received byte once, after it was consumed",
            )
        self._outstanding -= size


class CreditReturn:
    """The receiver's side of one call: gathers what was consumed until a quarter of the window is together.

    Args:
        window: bytes that the peer may have outstanding, 1 to ``CREDIT_BYTES_MAX``.

    Raises:
        InvalidArgumentError: the window is out of range.
    """

    __slots__ = ("_held", "_window")

    def __init__(self, window: int = CREDIT_BYTES) -> None:
        self._window = check_window(window)
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes consumed and not yet returned, always less than a quarter of the window."""
        return self._held

    def consumed(self, size: int) -> int:
        """Count ``size`` bytes (0 or more) as consumed and say how many to return now, 0 for none.

        Raises:
            InvalidArgumentError: it is negative; nothing was changed.
        """
        if size < 0:
            raise InvalidArgumentError(f"{size} bytes were consumed, it must be 0 or more")
        self._held += size
        return self.flush() if self._held * CREDIT_RETURN_FRACTION >= self._window else 0

    def flush(self) -> int:
        """Say how many bytes to return now although a quarter is not together; 0 for none.

        To be called when everything received is consumed and nothing comes, at the latest with the answer to a
        heartbeat: a value of more than three quarters of the window may be waiting for the held rest.
        """
        held, self._held = self._held, 0
        return held
