"""Members of a group as the engine sees them: calls that note what is done to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from upr.engine.groups import Group, Owners
from upr.engine.streams import LEASE_ENDED, EndReason

NAME = "indexer"
SECOND = 1_000_000
LEASE = 10 * SECOND


@dataclass(eq=False)
class Call:
    """One call of a member, and what its client knows.

    Attributes:
        lost: partitions whose streams the engine ended, newest last.
        owned, to_release, generation: of the newest Assignment.
    """

    seat: Any = None
    lost: list[int] = field(default_factory=list)
    ended: EndReason | None = None
    woken: int = 0
    owned: set[int] = field(default_factory=set)
    to_release: set[int] = field(default_factory=set)
    generation: int = 0

    def end_streams(self, partitions: Sequence[int], why: EndReason) -> None:
        assert why is LEASE_ENDED
        self.lost += partitions

    def end_call(self, why: EndReason) -> None:
        self.ended = why

    def wake(self) -> None:
        self.woken += 1

    def read(self) -> "Call":
        """Take the newest Assignment."""
        told = self.seat.take_assignment()
        if told is not None:
            assert told.generation >= self.generation
            assert told.owned == sorted(set(told.owned))
            assert set(told.to_release) <= set(told.owned)
            self.owned, self.to_release = set(told.owned), set(told.to_release)
            self.generation = told.generation
        return self


def join(owners: Owners, member: str, now: int, lease: int = LEASE) -> Call:
    call = Call()
    call.seat = owners.join(NAME, member, lease, now, cast(Any, call), sole_is_open=False)
    return call.read()


def group(owners: Owners) -> Group:
    found = owners.group(NAME)
    assert found is not None
    return found


def owner_of(owners: Owners) -> dict[int, str]:
    found = owners.group(NAME)
    return {} if found is None else found.owner_names()


def allowed(
    owners: Owners,
    member: str,
    generation: int,
    partitions: Sequence[int],
    now: int,
    number: int = 0,
) -> list[int]:
    """Save partitions and be done at once; return those that were accepted."""
    hold = owners.hold(NAME, member, generation, np.array(partitions, np.int64), now, number)
    owners.let_go(hold, now)
    return [int(p) for p in hold.partitions]


def settle(owners: Owners, calls: Sequence[Call], now: int) -> None:
    """Have every member release what it is asked for, until nothing moves any more."""
    for _ in range(len(calls) + 2):
        for call in calls:
            call.read()
            call.seat.release(sorted(call.to_release), now)
    for call in calls:
        call.read()
