"""Consumer groups: members share the partitions, and a partition has one owner at most.

A member keeps its partitions for as long as its lease runs, whatever becomes of its call. What must go to another
member is asked back first; it is granted on only when it was released, or taken because the lease, or the time for
the release, has ended, and no save of it is under way. Times are microseconds of one clock that never goes back.

``Owners`` knows who owns what of all consumers of a bucket: one call under the name, or the members of a group. Ownership
is known by its generation. It never repeats, so that a former owner cannot pass for the present one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from upr.engine.streams import POSITIONS_RESET, SUPERSEDED, EndReason
from upr_protocol.block import I64, U64
from upr_protocol.errors import FencedError, InvalidArgumentError, TooManyError, shown
from upr_protocol.limits import MEMBERS_MAX, OWNERS_REMEMBERED, PARTITIONS

NEVER: Final = np.iinfo(np.int64).max
NOBODY: Final = -1
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.uint16]


class MemberCall(Protocol):
    """What a group does to the call of a member."""

    @property
    def peer(self) -> str:
        """Where it comes from."""

    def take_away(self, partitions: Sequence[int]) -> None:
        """End the streams of partitions, in this step: they are not the member's any more."""

    def end_call(self, why: EndReason) -> None:
        """End all streams and the call."""

    def wake(self) -> None:
        """There is a new Assignment."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a member owns; ``to_release`` is a part of ``owned``. Both ascend."""

    generation: int
    owned: list[int]
    to_release: list[int]


@dataclass(eq=False, slots=True)
class Member:
    """One member of a group.

    Attributes:
        slot: its number in the table of owners.
        lease: its length, microseconds.
        expires: when the lease ends.
        live: whether the lease runs. Without it, a member has its call only, and owns nothing.
        seat: its newest call; None when that was lost.
        news: whether what it owns has changed since it was told.
    """

    name: str
    slot: int
    lease: int
    expires: int
    live: bool = True
    seat: "Seat | None" = None
    news: bool = True


class Group:
    """The members of one consumer.

    Args:
        raise_generation: returns a generation that was never given before.
        saving: how many saves of each partition are under way, shape (1024,); kept by the caller, who calls
            ``settle`` when a number has come down to 0.
    """

    def __init__(self, raise_generation: Callable[[], int], saving: Counts) -> None:
        self._raise_generation = raise_generation
        self._saving = saving
        self._members: dict[str, Member] = {}
        self._owner = np.full(PARTITIONS, NOBODY, np.int16)
        self._granted_at: U64 = np.zeros(PARTITIONS, np.uint64)
        self._releasing: Mask = np.zeros(PARTITIONS, bool)
        self._release_by: I64 = np.full(PARTITIONS, NEVER, np.int64)
        self._granted: Mask = np.zeros(PARTITIONS, bool)
        self._deadline = NEVER
        self.generation = raise_generation()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """Yield the members by name."""
        return iter(sorted(self._members.values(), key=lambda member: member.name))

    @property
    def has_calls(self) -> bool:
        """Whether a call of any member is open."""
        return any(member.seat is not None for member in self._members.values())

    @property
    def deadline(self) -> int:
        """When ``tick`` may have something to do, NEVER when it has not."""
        return self._deadline

    def counts(self, member: Member) -> tuple[int, int]:
        """Return how many partitions a member owns, and how many of them it was asked to release."""
        mine = self._owner == member.slot
        return int(mine.sum()), int((mine & self._releasing).sum())

    def owner_names(self) -> dict[int, str]:
        """Return the owner of each partition that has one."""
        names = {member.slot: member.name for member in self._members.values()}
        owned = np.flatnonzero(self._owner != NOBODY)
        slots = self._owner[owned].tolist()
        return {p: names[slot] for p, slot in zip(owned.tolist(), slots, strict=True)}

    def owned(self, member: Member) -> Mask:
        """Return which partitions are a member's, shape (1024,)."""
        return np.asarray(self._owner == member.slot)

    def releasing(self, member: Member) -> Mask:
        """Return which of its partitions a member was asked to release, shape (1024,)."""
        return np.asarray((self._owner == member.slot) & self._releasing)

    def may_save(self, name: str, generation: int, partitions: I64) -> Mask:
        """Return of which partitions a member may store positions that knows of this generation."""
        member = self._members.get(name)
        if member is None:
            return np.zeros(len(partitions), bool)
        granted = self._granted_at[partitions] <= np.uint64(generation)
        return np.asarray((self._owner[partitions] == member.slot) & granted)

    # Coming and going

    def join(self, name: str, lease: int, now: int, call: MemberCall) -> "Seat":
        """Take a call of a member in; an older one of the same name ends with SUPERSEDED.

        The member keeps what it owns, granted anew: what a process before it saves is refused from now on.

        Args:
            lease: microseconds.

        Raises:
            TooManyError: the group has MEMBERS_MAX members.
        """
        self.tick(now)
        member = self._members.get(name)
        if member is None:
            if len(self._members) >= MEMBERS_MAX:
                raise TooManyError(
                    f"the group has {len(self._members)} members, the limit is {MEMBERS_MAX}",
                    hint="have each member follow more partitions",
                )
            taken = {other.slot for other in self._members.values()}
            slot = next(slot for slot in range(MEMBERS_MAX) if slot not in taken)
            member = self._members[name] = Member(name, slot, lease, now + lease)
        old = member.seat
        member.seat = Seat(self, member, call)
        member.lease = lease
        self._begin_lease(member, now)
        mine = self._owner == member.slot
        self._granted |= mine
        self._release_by[mine & self._releasing] = now + lease
        self._finish(now, changed=True)
        if old is not None:
            old.call.end_call(SUPERSEDED)
        return member.seat

    def _begin_lease(self, member: Member, now: int) -> None:
        member.live = True
        member.news = True
        member.expires = now + member.lease
        self._deadline = min(self._deadline, member.expires)

    def heard(self, member: Member, now: int) -> None:
        """Have a member's lease begin anew; one whose lease had ended joins again."""
        self.tick(now)
        if member.live:
            member.expires = now + member.lease
        else:
            self._begin_lease(member, now)
            self._finish(now, changed=True)

    def release(self, member: Member, partitions: Iterable[int], now: int) -> list[int]:
        """Take partitions back that a member hands over; returns those that were its own."""
        self.heard(member, now)
        wanted = np.zeros(PARTITIONS, bool)
        wanted[[p for p in partitions if 0 <= p < PARTITIONS]] = True
        wanted &= self._owner == member.slot
        if wanted.any():
            self._free(wanted)
            member.news = True
            self._finish(now, changed=True)
        released: list[int] = np.flatnonzero(wanted).tolist()
        return released

    def leave(self, member: Member, now: int) -> None:
        """A member goes by its own wish: everything that it has is free at once."""
        self.tick(now)
        self._free(self._owner == member.slot)
        self._members.pop(member.name, None)
        member.seat = None
        self._finish(now, changed=True)

    def lost(self, member: Member, now: int) -> None:
        """The call of a member is gone; what it owns stays its own until the lease ends."""
        self.tick(now)
        member.seat = None
        if not member.live:
            self._members.pop(member.name, None)
        self._finish(now, changed=False)

    def reset(self) -> None:
        """Fence all members: what they own is granted anew, and their calls end with POSITIONS_RESET."""
        self.generation = self._raise_generation()
        self._granted_at[:] = self.generation
        for member in self:
            if member.seat is not None:
                member.seat.call.end_call(POSITIONS_RESET)

    # Time

    def tick(self, now: int) -> None:
        """Take away what leases and releases that have ended leave behind."""
        if now < self._deadline:
            return
        changed = False
        for member in self:
            if member.live and member.expires <= now:
                member.live = False
                changed = self._take(member, self._owner == member.slot) or changed
                if member.seat is None:
                    del self._members[member.name]
            elif member.live:
                late = (self._owner == member.slot) & (self._release_by <= now)
                changed = self._take(member, late) or changed
        self._finish(now, changed=changed)
        ends = [member.expires for member in self._members.values() if member.live]
        self._deadline = min([*ends, int(self._release_by.min())])

    def _take(self, member: Member, partitions: Mask) -> bool:
        """Take partitions away from a member, with their streams."""
        if not partitions.any():
            return False
        self._free(partitions)
        member.news = True
        if member.seat is not None:
            member.seat.call.take_away(np.flatnonzero(partitions).tolist())
        return True

    def settle(self, now: int) -> None:
        """Saves have ended: grant what waited for them."""
        if ((self._owner == NOBODY) & (self._saving == 0)).any():
            self._finish(now, changed=False)

    # Sharing

    def _free(self, partitions: Mask) -> None:
        self._owner[partitions] = NOBODY
        self._keep(partitions)

    def _keep(self, partitions: Mask | I64) -> None:
        """Partitions are not asked back, or not any more."""
        self._releasing[partitions] = False
        self._release_by[partitions] = NEVER

    def _finish(self, now: int, *, changed: bool) -> None:
        """End a step: share, and tell whose share has changed."""
        changed = self._share(now) or changed
        if not changed:
            return
        self.generation = self._raise_generation()
        self._granted_at[self._granted] = self.generation
        self._granted[:] = False
        for member in self._members.values():
            if member.news and member.seat is not None:
                member.seat.call.wake()

    def _share(self, now: int) -> bool:
        """Grant what is free, and ask back what some have too much of; returns whether anything changed.

        Members whose call was lost keep what they own, and are given nothing; the others share the rest equally.
        """
        present = [m for m in self if m.live and m.seat is not None]
        if not present:
            return False
        owned = self._owner[self._owner != NOBODY]
        counts = np.bincount(owned, minlength=MEMBERS_MAX).tolist()
        away = len(owned) - sum(counts[m.slot] for m in present)
        base, more = divmod(PARTITIONS - away, len(present))
        # Those who have most get the one more that not all can have: so nothing moves for it.
        by_count = sorted(present, key=lambda m: (-counts[m.slot], m.name))
        targets = {m.slot: base + (i < more) for i, m in enumerate(by_count)}
        changed = False
        for member in present:
            changed = (
                self._ask_back(member, counts[member.slot] - targets[member.slot], now) or changed
            )
        free = np.flatnonzero((self._owner == NOBODY) & (self._saving == 0))
        for member in present:
            room = targets[member.slot] - counts[member.slot]
            if room > 0 and len(free):
                given, free = free[:room], free[room:]
                self._owner[given] = member.slot
                self._granted[given] = True
                member.news = changed = True
        return changed

    def _ask_back(self, member: Member, excess: int, now: int) -> bool:
        """Have as many of a member's partitions asked back as it has too many; returns whether that changes."""
        mine = self._owner == member.slot
        asked = np.flatnonzero(mine & self._releasing)
        difference = max(excess, 0) - len(asked)
        if difference == 0:
            return False
        if difference < 0:
            self._keep(asked[:-difference])
        else:
            more = np.flatnonzero(mine & ~self._releasing)[-difference:]
            self._releasing[more] = True
            self._release_by[more] = now + member.lease
            self._deadline = min(self._deadline, now + member.lease)
        member.news = True
        return True


@dataclass(eq=False, slots=True)
class Seat:
    """One call of a member, which counts until a newer one of the same name has come, or it has ended."""

    group: Group
    member: Member
    call: MemberCall

    @property
    def taken(self) -> bool:
        """Whether this is still the member's call."""
        return self.member.seat is self

    def heard(self, now: int) -> None:
        """The client said something; see ``Group.heard``."""
        if self.taken:
            self.group.heard(self.member, now)

    def release(self, partitions: Iterable[int], now: int) -> list[int]:
        """See ``Group.release``."""
        return self.group.release(self.member, partitions, now) if self.taken else []

    def close(self, now: int, *, left: bool) -> None:
        """The call has ended, by the member's own wish (``left``) or in another way."""
        if self.taken and left:
            self.group.leave(self.member, now)
        elif self.taken:
            self.group.lost(self.member, now)

    def owns(self, partitions: I64) -> Mask:
        """Return which of the partitions are the member's own, shape (n,)."""
        return self.group.owned(self.member)[partitions] & self.taken

    def owned_among(self, partitions: Iterable[int]) -> list[int]:
        """Return those of the partitions that are the member's own; what is out of range is passed over."""
        mine = self.group.owned(self.member) & self.taken
        return [p for p in partitions if 0 <= p < PARTITIONS and mine[p]]

    def may_start(self, partition: int) -> bool:
        """Whether a stream may be opened: the partition is the member's, and not asked back."""
        here = np.array([partition])
        return bool(self.owns(here)[0]) and not self.group.releasing(self.member)[partition]

    def take_assignment(self) -> Assignment | None:
        """Return what the member owns now, when it was not told; None when it was."""
        if not self.taken or not self.member.news:
            return None
        self.member.news = False
        return Assignment(
            self.group.generation,
            np.flatnonzero(self.group.owned(self.member)).tolist(),
            np.flatnonzero(self.group.releasing(self.member)).tolist(),
        )


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
                f"consumer {shown(name)} is a group with {len(group)} members",
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
                f"consumer {shown(name)} is followed by a call that names no member",
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
                f"consumer {shown(name)} has another owner by now, or its positions were reset"
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
