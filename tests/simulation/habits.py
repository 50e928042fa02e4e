"""The kinds of clients that the simulated network has."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from upr_client import Only, Tuning
from upr_client.admin import CutInfo
from upr_client.changes.options import ChangesOptions, Until
from upr_client.positions import MemoryPositions
from upr_protocol.handshake import Pin


@dataclass(frozen=True)
class Habits:
    """What kind of client it is.

    Args:
        consumer: its name at the server, "" for none.
        atomic: data and positions are stored in one step; else the data first.
        one_by_one: it iterates over changes, and not over batches.
        callback: it undoes in a callback, and not when an event says so.
    """

    consumer: str = ""
    stability: str = "disk"
    keys_only: bool = False
    until_now: bool = False
    atomic: bool = True
    one_by_one: bool = True
    callback: bool = True
    inclusive: bool = False

    def options(
        self, rng: random.Random, pins: Mapping[int, Pin] | None, endless: bool
    ) -> ChangesOptions:
        """Return the options of one process; ``endless``: without an end that is there now."""
        ends: Until = None
        if pins is not None:
            ends = CutInfo("", 0, 0, 0.0, pins)
        elif self.until_now and not endless:
            ends = "now"
        return ChangesOptions(
            # Only that there is one counts: the simulated client stores by itself, a step at a time.
            resume=MemoryPositions(),
            until=ends,
            only=Only(stability=self.stability, keys_only=self.keys_only),
            tuning=Tuning(
                markers_at_record=self.inclusive,
                credit_bytes=rng.choice([1, 60, 400, 1 << 20]),
                heartbeat_seconds=rng.choice([0.5, 2.0, 5.0]),
                save_seconds=rng.choice([0.0, 1.0, 3.0]),
            ),
            consumer=self.consumer,
            on_rollback=(lambda _: None) if self.callback else "event",
        )
