"""Who owns what of the consumers of a bucket: one call under the name, or the members of a group.

Ownership is known by its generation. It never repeats, so that whoever owned something before cannot pass for who
owns it now.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from upr.engine.members import NEVER, Counts, Group, Mask, MemberCall, Seat
from upr_protocol.block import I64
from upr_protocol.errors import FencedError, InvalidArgumentError
from upr_protocol.limits import OWNERS_REMEMBERED, PARTITIONS

FENCED_HINT = "connect again and load the positions"


def fenced(what: str) -> FencedError:
    """Return the error of a save by one who does not own what it saves."""
    return FencedError(f"{what}: nothing was stored", hint=FENCED_HINT)


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A save under way: until it is let go of, no other member is granted its partitions.

    Attributes:
        allowed: which of the partitions asked for may be saved, shape (n,).
        partitions: those.
    """

    name: str
    allowed: Mask
    partitions: I64


class Owners:
    """The owners of a bucket's consumers. Times are as in ``Group``."""

    def __init__(self) -> None:
        self._newest = 0
        self._sole: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self._saving: dict[str, Counts] = {}

    def begin_above(self, generation: int) -> None:
        """Have every generation from now on be above this one."""
        self._newest = max(self._newest, generation)

    def raise_generation(self) -> int:
        """Return a generation that was never given before."""
        self._newest += 1
        return self._newest

    def generation(self, name: str) -> int:
        """Return the generation of a consumer's ownership; 0 when nobody owned it since the start."""
        group = self._groups.get(name)
        return self._sole.get(name, 0) if group is None else group.generation

    def group(self, name: str) -> Group | None:
        """Return a consumer's group; None when it is none, or has no member left."""
        return self._groups.get(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the groups, in order."""
        return iter(sorted(self._groups))

    # Opening

    def open_sole(self, name: str, open_names: Collection[str]) -> int:
        """Have a call without a member own a consumer, and return its generation.

        Args:
            open_names: of the consumers that have such a call open.

        Raises:
            InvalidArgumentError: members of the consumer have calls open.
        """
        group = self._groups.get(name)
        if group is not None and group.has_calls:
            raise InvalidArgumentError(
                f"consumer {name!r} is a group with {len(group)} members",
                hint="name a member too, or use another consumer name",
            )
        self._groups.pop(name, None)
        self._drop_counts(name)
        # Behind those that were opened before it, of which the first are forgotten first.
        self._sole.pop(name, None)
        self._sole[name] = self.raise_generation()
        if len(self._sole) > OWNERS_REMEMBERED:
            closed = (other for other in self._sole if other not in open_names and other != name)
            self._sole.pop(next(closed, name), None)
        return self._sole[name]

    def join(
        self, name: str, member: str, lease: int, now: int, call: MemberCall, *, sole_is_open: bool
    ) -> Seat:
        """Take a call of a member into a consumer's group; see ``Group.join``.

        Raises:
            InvalidArgumentError: a call of the consumer without a member is open.
            TooManyError: the group has MEMBERS_MAX members.
        """
        if sole_is_open:
            raise InvalidArgumentError(
                f"consumer {name!r} is followed by a call that names no member",
                hint="end that call first, or use another consumer name for the group",
            )
        self._sole.pop(name, None)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(self.raise_generation, self._counts(name))
        return group.join(member, lease, now, call)

    def close(self, seat: Seat, now: int, *, left: bool) -> None:
        """The call of a member has ended; see ``Seat.close``."""
        seat.close(now, left=left)
        self._prune()

    def reset(self, name: str) -> int:
        """Fence whoever owns a consumer, and return a new generation; calls of members end."""
        self._sole.pop(name, None)
        group = self._groups.get(name)
        if group is not None:
            group.reset()
            return group.generation
        return self.raise_generation()

    # Time

    @property
    def deadline(self) -> int:
        """When ``tick`` may have something to do, NEVER when it has not."""
        return min((group.deadline for group in self._groups.values()), default=NEVER)

    def tick(self, now: int) -> None:
        """Have leases end whose time has come."""
        for group in list(self._groups.values()):
            group.tick(now)
        self._prune()

    def _prune(self) -> None:
        for name in [name for name, group in self._groups.items() if not len(group)]:
            del self._groups[name]
            self._drop_counts(name)

    # Saving

    def hold(self, name: str, member: str, generation: int, partitions: I64, now: int) -> Hold:
        """Decide who may save, and keep what may be saved from being granted to another until ``let_go``.

        Args:
            member: empty for a consumer that is no group.
            generation: the newest that the sender was told.
            partitions: each once.

        Raises:
            FencedError: not a member, and not the owner.
        """
        if member:
            group = self._groups.get(name)
            if group is None:
                allowed = np.zeros(len(partitions), bool)
            else:
                group.tick(now)
                allowed = group.may_save(member, generation, partitions)
                self._prune()
        elif self._sole.get(name) == generation:
            allowed = np.ones(len(partitions), bool)
        else:
            raise fenced(
                f"consumer {name!r} has another owner by now, or its positions were reset"
                f" (generation {generation}, in force is {self.generation(name)})"
            )
        partitions = partitions[allowed]
        if len(partitions):
            self._counts(name)[partitions] += np.uint16(1)
        return Hold(name, allowed, partitions)

    def let_go(self, hold: Hold, now: int) -> None:
        """A save has ended."""
        if not len(hold.partitions):
            return
        self._saving[hold.name][hold.partitions] -= np.uint16(1)
        group = self._groups.get(hold.name)
        if group is not None:
            group.settle(now)
        self._drop_counts(hold.name)

    def _counts(self, name: str) -> Counts:
        return self._saving.setdefault(name, np.zeros(PARTITIONS, np.uint16))

    def _drop_counts(self, name: str) -> None:
        """Forget the numbers of a consumer when nobody uses them."""
        if name not in self._groups and name in self._saving and not self._saving[name].any():
            del self._saving[name]
