"""Room for what is on its way to followers: the bytes that calls have read or encoded, and gRPC has not sent.

gRPC keeps a message until the client takes it. One that reads nothing would cost a frame, or a value of 20 MiB, for as
long as its call lasts. So a call takes more only while less than SENDING_BYTES is on its way; the others wait for their
turn. A call whose message is not taken while others wait is ended after some seconds. Calls that have shown that they
read have a room of their own, which those that have not cannot fill.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from upr_protocol.limits import SENDING_BYTES, SENDING_BYTES_A_SECOND, SENDING_SECONDS

STANDSTILL_SECONDS = 1.0
"""Delay of a timer of the event loop from which on the process, or the machine, stood still."""


@dataclass(slots=True, eq=False)
class Sender:
    """One call.

    Attributes:
        wake: called when it is its turn.
        end: called when the call is to end, because it takes too long while others wait.
        held: bytes on their way.
        is_busy: whether it sends something else now; others have their turn before it.
        deadline: when the message that gRPC has must be sent if others wait, by the event loop's clock; None: it has none.
    """

    wake: Callable[[], None]
    end: Callable[[], None]
    held: int = 0
    is_busy: bool = False
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class SendingRoom:
    """The senders that share SENDING_BYTES; one message may exceed it. ``held`` is what all of them have on their way."""

    held: int = 0
    _holding: set[Sender] = field(default_factory=set)
    _waiting: dict[Sender, None] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None
    _due: float = 0.0

    def join(self, sender: Sender) -> bool:
        """Return whether a sender may take more now. If not, it is woken when it is its turn."""
        is_its_turn = not self._waiting or self._first() in (None, sender)
        if sender.held or (is_its_turn and self.held < SENDING_BYTES):
            if self._waiting:
                self._waiting.pop(sender, None)
            return True
        self._waiting[sender] = None
        self._look_again()
        return False

    def exceeds(self, sender: Sender) -> bool:
        """Return whether the room is full without what a sender holds."""
        return self.held - sender.held >= SENDING_BYTES

    def hold(self, sender: Sender, size: int, *, sending: bool = False) -> None:
        """Record how many bytes a sender has on their way now, and whether gRPC has them."""
        self.held += size - sender.held
        sender.held = size
        if size:
            self._holding.add(sender)
        else:
            self._holding.discard(sender)
        if not sending:
            sender.deadline = None
        elif sender.deadline is None:
            patience = SENDING_SECONDS + size / SENDING_BYTES_A_SECOND
            sender.deadline = asyncio.get_running_loop().time() + patience
            if self._waiting:
                self._look_again()
        if self._waiting:
            self.pass_on()

    def leave(self, sender: Sender) -> None:
        self._waiting.pop(sender, None)
        self.hold(sender, 0)

    def pass_on(self) -> None:
        """Wake the sender whose turn it is, if there is room. One that joined and took nothing must call this."""
        if self.held < SENDING_BYTES and (first := self._first()) is not None:
            first.wake()

    def _first(self) -> Sender | None:
        return next((one for one in self._waiting if not one.is_busy), None)

    def _look_again(self) -> None:
        """Have the slow ones ended in time, as long as somebody waits."""
        deadlines = [one.deadline for one in self._holding if one.deadline is not None]
        if not self._waiting or not deadlines:
            return
        loop = asyncio.get_running_loop()
        due = max(min(deadlines), loop.time())
        if self._timer is not None:
            # Not asked of the timer: uvloop's has no time if it is due at once.
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_at(due, self._end_slow, due)

    def _end_slow(self, due: float) -> None:
        self._timer = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        # A loop that stood still could not see what was taken meanwhile.
        stood_still = now - due > STANDSTILL_SECONDS
        for sender in list(self._holding):
            if sender.deadline is None:
                continue
            if stood_still:
                sender.deadline = max(sender.deadline, now + SENDING_SECONDS)
            elif sender.deadline <= now:
                sender.deadline = None
                sender.end()
        self._look_again()
