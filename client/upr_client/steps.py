"""What a shell of ``Following`` is to do, and what a message came to."""

import enum
from typing import NamedTuple

from upr_client.events import ChangeBatch
from upr_protocol.errors import UprError


class Step(enum.Enum):
    """What the shell is to do."""

    FINISH = "finish"
    """Every partition ended for good: store, and end the call."""
    UNDO = "undo"
    """Have the application undo; see ``rollbacks``."""
    CONNECT = "connect"
    """Open a call; see ``open_message``."""
    LOAD = "load"
    """Load positions from the server; see ``ownership`` and ``loaded``."""
    SAVE = "save"
    """Store the positions that changed; see ``begin_save``."""
    RELEASE = "release"
    """Send what ``release`` gives."""
    RECEIVE = "receive"
    """Send what ``due`` gives, and receive the next message; see ``take``."""


class Outcome(NamedTuple):
    """What a message came to.

    Args:
        batch: for the application, None for nothing.
        lost: why the call is of no use any more, None when it is; see ``lost``.
        finish_seconds: how long the server may take to end such a call; 0: it is ended at once.
        fatal: why a partition cannot be followed any more, None when each can.
    """

    batch: ChangeBatch | None = None
    lost: UprError | None = None
    finish_seconds: float = 0.0
    fatal: UprError | None = None
