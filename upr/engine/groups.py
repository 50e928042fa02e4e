"""Consumer groups: members share the partitions, and a partition has one owner at most.

A member keeps its partitions while its lease runs, even when its call ends. A partition that must move is first asked
back. It is granted to another member once it was released, or the lease or the time for the release has ended, and once
no save of it is pending. Times are microseconds of one clock that never goes back.

``Owners`` holds the owners of all consumers of a bucket: one call under the name, or the members of a group. A
generation identifies each ownership. It never repeats, so a former owner cannot pass for the current one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from upr.engine.streams import LEASE_ENDED, POSITIONS_RESET, SUPERSEDED, EndReason, FollowOptions
from upr_protocol.block import I64, U64, Mask
from upr_protocol.errors import FencedError, InvalidArgumentError, TooManyError, UprError, shown
from upr_protocol.limits import MEMBERS_MAX, OWNERS_REMEMBERED, PARTITIONS

NEVER: Final = np.iinfo(np.int64).max
NOBODY: Final = -1
Counts = npt.NDArray[np.uint16]


class OpenFollower(Protocol):
    """Open Follow call as bucket, groups, purges and operators see it: a ``follower.Follower``."""

    options: FollowOptions
    generation: int
    seat: "Seat | None"
    has_tables: bool

    def wake(self) -> None:
        """Tell the call that a frame may be ready."""

    def passed(self) -> U64:
        """Return up to where each partition's tombstones are passed, shape (1024,)."""

    def stream_counts(self) -> tuple[int, int]:
        """Return how many streams are open, and how many of them read the store."""

    def end_streams(self, partitions: Sequence[int], why: EndReason) -> None:
        """End the streams of partitions, in this step."""

    def end_call(self, why: EndReason) -> None:
        """End all streams and the call."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Partitions that a member owns; ``to_release`` is a subset of ``owned``. Both ascend."""

    generation: int
    owned: list[int]
    to_release: list[int]


@dataclass(eq=False, slots=True)
class Member:
    """A member of a group.

    Attributes:
        slot: its number in the table of owners.
        lease: its length, microseconds.
        expires: when the lease ends.
        live: whether the lease runs. A member without a lease owns nothing.
        seat: its newest call; None when that was lost.
        news: whether its partitions changed since the last Assignment was sent.
        saved: the number of the newest save of its newest call.
        untold: partitions that were taken from it since the last Assignment was sent; not those that nobody else got.
    """

    name: str
    slot: int
    lease: int
    expires: int
    live: bool = True
    seat: "Seat | None" = None
    news: bool = True
    saved: int = 0
    untold: Mask = field(default_factory=lambda: np.zeros(PARTITIONS, bool))


class Group:
    """Members of one consumer.

    Args:
        raise_generation: returns a generation that was never given before.
        saving: pending saves of each partition, shape (1024,). The caller keeps it, and calls ``settle`` when a count
            reaches 0.
    """

    def __init__(self, raise_generation: Callable[[], int], saving: Counts) -> None:
        self._raise_generation = raise_generation
        self._saving = saving
        self._members: dict[str, Member] = {}
        self._owner = np.full(PARTITIONS, NOBODY, np.int16)
        # The slot that each was granted to last.
        self._last = self._owner.copy()
        self._granted_at: U64 = np.zeros(PARTITIONS, np.uint64)
        self._releasing: Mask = np.zeros(PARTITIONS, bool)
        self._release_by: I64 = np.full(PARTITIONS, NEVER, np.int64)
        self._granted: Mask = np.zeros(PARTITIONS, bool)
        self.deadline = NEVER
        """When to call ``tick`` next; NEVER if no lease or release is pending."""
        self.generation = raise_generation()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda member: member.name))

    @property
    def has_calls(self) -> bool:
        return any(member.seat is not None for member in self._members.values())

    def owner_names(self) -> dict[int, str]:
        names = {member.slot: member.name for member in self._members.values()}
        owned = np.flatnonzero(self._owner != NOBODY)
        slots = self._owner[owned].tolist()
        return {p: names[slot] for p, slot in zip(owned.tolist(), slots, strict=True)}

    def owned(self, member: Member) -> Mask:
        """Return which partitions a member owns, shape (1024,)."""
        return np.asarray(self._owner == member.slot)

    def releasing(self, member: Member) -> Mask:
        """Return which of its partitions a member was asked to release, shape (1024,)."""
        return np.asarray((self._owner == member.slot) & self._releasing)

    def member(self, name: str) -> Member | None:
        return self._members.get(name)

    def may_save(self, name: str, generation: int, partitions: I64) -> Mask:
        """Return the partitions whose positions a member with this generation may save."""
        member = self._members.get(name)
        if member is None:
            return np.zeros(len(partitions), bool)
        # One above all that were given here is of another server.
        granted = (self._granted_at[partitions] <= generation) & (generation <= self.generation)
        return np.asarray((self._owner[partitions] == member.slot) & granted)

    # Coming and going

    def join(self, name: str, lease: int, now: int, call: OpenFollower) -> "Seat":
        """Add a call of a member; an older one of the same name ends with SUPERSEDED.

        The member keeps its partitions under a new generation, which fences saves of the process before it.

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
                    f"members of the group are {len(self._members)}; must be below {MEMBERS_MAX}",
                    hint="have each member follow more partitions",
                )
            taken = {other.slot for other in self._members.values()}
            slot = next(slot for slot in range(MEMBERS_MAX) if slot not in taken)
            member = self._members[name] = Member(name, slot, lease, now + lease)
        old = member.seat
        member.seat = Seat(self, member, call)
        member.lease, member.saved = lease, 0
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
        self.deadline = min(self.deadline, member.expires)

    def heard(self, member: Member, now: int) -> None:
        """Renew a member's lease; an expired member rejoins."""
        self.tick(now)
        if member.live:
            member.expires = now + member.lease
        else:
            self._begin_lease(member, now)
            self._finish(now, changed=True)

    def release(self, member: Member, partitions: Iterable[int], now: int) -> list[int]:
        """Free partitions that a member releases; return those that it owned."""
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
        """Remove a member that leaves; its partitions are free at once."""
        self.tick(now)
        self._free(self._owner == member.slot)
        self._members.pop(member.name, None)
        member.seat = None
        self._finish(now, changed=True)

    def lost(self, member: Member, now: int) -> None:
        """Record that a member's call was lost; it keeps its partitions until the lease ends."""
        self.tick(now)
        member.seat = None
        if not member.live:
            self._members.pop(member.name, None)
        self._finish(now, changed=False)

    def reset(self) -> None:
        """Fence all members: raise their generations and end their calls with POSITIONS_RESET."""
        self.generation = self._raise_generation()
        self._granted_at[:] = self.generation
        for member in self:
            if member.seat is not None:
                member.seat.call.end_call(POSITIONS_RESET)

    # Time

    def tick(self, now: int) -> None:
        """Take partitions from members whose lease or time for a release has ended."""
        if now < self.deadline:
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
        self.deadline = min([*ends, int(self._release_by.min())])

    def _take(self, member: Member, partitions: Mask) -> bool:
        """Take partitions from a member, and end their streams."""
        if not partitions.any():
            return False
        self._free(partitions)
        member.news = True
        member.untold |= partitions
        if member.seat is not None:
            member.seat.call.end_streams(np.flatnonzero(partitions).tolist(), LEASE_ENDED)
        return True

    def settle(self, now: int) -> None:
        """Grant partitions whose saves have ended."""
        if ((self._owner == NOBODY) & (self._saving == 0)).any():
            self._finish(now, changed=False)

    # Sharing

    def _free(self, partitions: Mask) -> None:
        self._owner[partitions] = NOBODY
        self._keep(partitions)

    def _keep(self, partitions: Mask | I64) -> None:
        """Cancel the request to release partitions."""
        self._releasing[partitions] = False
        self._release_by[partitions] = NEVER

    def _finish(self, now: int, *, changed: bool) -> None:
        """End a step: share, and wake the members whose share changed."""
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
        """Grant free partitions and ask back excess ones; return whether anything changed.

        Members whose call was lost keep their partitions and get no more; the others share the rest equally.
        """
        present = [m for m in self if m.live and m.seat is not None]
        if not present:
            return False
        owned = self._owner[self._owner != NOBODY]
        counts = np.bincount(owned, minlength=MEMBERS_MAX).tolist()
        away = len(owned) - sum(counts[m.slot] for m in present)
        base, more = divmod(PARTITIONS - away, len(present))
        # Members that already own most get the remainder, so that fewer partitions move.
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
                member.untold[given[self._last[given] == member.slot]] = False
                self._owner[given] = self._last[given] = member.slot
                self._granted[given] = True
                member.news = changed = True
        return changed

    def _ask_back(self, member: Member, excess: int, now: int) -> bool:
        """Ask a member for as many partitions as it has too many; return whether that changed anything."""
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
            self.deadline = min(self.deadline, now + member.lease)
        member.news = True
        return True


@dataclass(eq=False, slots=True)
class Seat:
    """Seat of a member's call in its group, until a newer call of that name takes it or the call ends."""

    group: Group
    member: Member
    call: OpenFollower

    @property
    def taken(self) -> bool:
        """Return whether this is still the member's call."""
        return self.member.seat is self

    def heard(self, now: int) -> None:
        if self.taken:
            self.group.heard(self.member, now)

    def release(self, partitions: Iterable[int], now: int) -> list[int]:
        return self.group.release(self.member, partitions, now) if self.taken else []

    def owns(self, partitions: I64) -> Mask:
        """Return which of the partitions the member owns, shape (n,)."""
        return self.group.owned(self.member)[partitions] & self.taken

    def owned_among(self, partitions: Iterable[int]) -> list[int]:
        """Return the partitions that the member owns; numbers out of range are skipped."""
        mine = self.group.owned(self.member) & self.taken
        return [p for p in partitions if 0 <= p < PARTITIONS and mine[p]]

    def may_start(self, partition: int) -> bool:
        """Return whether the member owns the partition and was not asked to release it."""
        here = np.array([partition])
        return bool(self.owns(here)[0]) and not self.group.releasing(self.member)[partition]

    @property
    def has_news(self) -> bool:
        """Whether the member has a new Assignment."""
        return self.taken and self.member.news

    def take_assignment(self) -> Assignment | None:
        """Return the member's new Assignment, once; None if nothing changed.

        What was taken from it is left out of one, also where it is its own again: others had it meanwhile.
        """
        if not self.has_news:
            return None
        group, member = self.group, self.member
        told = ~member.untold
        owned, releasing = group.owned(member), group.releasing(member)
        member.untold = np.zeros(PARTITIONS, bool)
        member.news = not told[owned].all()
        return Assignment(
            group.generation,
            np.flatnonzero(owned & told).tolist(),
            np.flatnonzero(releasing & told).tolist(),
        )


def fenced(what: str) -> FencedError:
    """Return the error for a save of partitions that the sender does not own."""
    return FencedError(f"{what}: nothing was stored", hint="connect again and load the positions")


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Hold on partitions during a save: until ``let_go`` they are granted to no other member.

    They are those of the requested ones that may be saved: ``allowed`` tells which, shape (n,).
    """

    name: str
    allowed: Mask
    partitions: I64


@dataclass(slots=True)
class Sole:
    """Owner of a consumer that is no group; ``saved`` as of a ``Member``."""

    generation: int
    saved: int = 0


class Owners:
    """Owners of a bucket's consumers. Times are as in ``Group``."""

    def __init__(self) -> None:
        self._newest = 0
        self._sole: dict[str, Sole] = {}
        self._groups: dict[str, Group] = {}
        self._saving: dict[str, Counts] = {}

    def begin_above(self, generation: int) -> None:
        """Keep every later generation above this one."""
        self._newest = max(self._newest, generation)

    def forget(self) -> None:
        """Forget all owners, whose calls end: another server has owners of its own from now on."""
        self._sole.clear()
        self._groups.clear()
        for name in list(self._saving):
            self._drop_counts(name)

    def raise_generation(self) -> int:
        """Return a generation that was never used before."""
        self._newest += 1
        return self._newest

    def generation(self, name: str) -> int:
        """Return the generation of a consumer's ownership; 0 without an owner since the start."""
        group = self._groups.get(name)
        if group is not None:
            return group.generation
        sole = self._sole.get(name)
        return 0 if sole is None else sole.generation

    def group(self, name: str) -> Group | None:
        """Return a consumer's group; None if it has no members."""
        return self._groups.get(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the groups, in order."""
        return iter(sorted(self._groups))

    # Opening

    def open_sole(self, name: str, open_names: Collection[str]) -> int:
        """Make a call without a member the owner of a consumer, and return its generation.

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
        # Moved to the end, because the oldest consumers are dropped first.
        self._sole.pop(name, None)
        generation = self.raise_generation()
        self._sole[name] = Sole(generation)
        if len(self._sole) > OWNERS_REMEMBERED:
            closed = (other for other in self._sole if other not in open_names and other != name)
            self._sole.pop(next(closed, name), None)
        return generation

    def join(
        self,
        name: str,
        member: str,
        lease: int,
        now: int,
        call: OpenFollower,
        *,
        sole_is_open: bool,
    ) -> Seat:
        """Add a member's call to a consumer's group; see ``Group.join``.

        Raises:
            InvalidArgumentError: a call of the consumer without a member is open.
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
            self._drop_oldest()
        return group.join(member, lease, now, call)

    def _drop_oldest(self) -> None:
        """Forget a group without calls, though leases may run, where there are too many: who comes back joins anew."""
        if len(self._groups) > OWNERS_REMEMBERED:
            *others, _ = self._groups.items()
            name = next((name for name, group in others if not group.has_calls), None)
            if name is not None:
                del self._groups[name]
                self._drop_counts(name)

    def close(self, seat: Seat, now: int, *, left: bool) -> None:
        if seat.taken and left:
            seat.group.leave(seat.member, now)
        elif seat.taken:
            seat.group.lost(seat.member, now)
        self._prune()

    def reset(self, name: str) -> int:
        """Fence the owners of a consumer, and return a new generation; calls of members end."""
        self._sole.pop(name, None)
        group = self._groups.get(name)
        if group is not None:
            group.reset()
            return group.generation
        return self.raise_generation()

    # Time

    @property
    def deadline(self) -> int:
        return min((group.deadline for group in self._groups.values()), default=NEVER)

    def tick(self, now: int) -> None:
        for group in list(self._groups.values()):
            group.tick(now)
        self._prune()

    def _prune(self) -> None:
        for name in [name for name, group in self._groups.items() if not len(group)]:
            del self._groups[name]
            self._drop_counts(name)

    # Saving

    def hold(
        self,
        name: str,
        member: str,
        generation: int,
        partitions: I64,
        now: int,
        number: int = 0,
    ) -> Hold:
        """Decide which partitions the sender may save, and hold those until ``let_go``.

        Args:
            member: empty for a consumer that is no group.
            generation: the newest that the sender received.
            partitions: each once.
            number: not below that of the save before, where both have one.

        Raises:
            FencedError: not a member, and not the owner.
            UprError: SAVE_OVERTAKEN, a later save of the sender was taken.
        """
        saver: Sole | Member | None = None
        if member:
            group = self._groups.get(name)
            if group is None:
                allowed = np.zeros(len(partitions), bool)
            else:
                group.tick(now)
                allowed = group.may_save(member, generation, partitions)
                saver = group.member(member)
                self._prune()
        else:
            saver = sole = self._sole.get(name)
            if sole is None or sole.generation != generation:
                raise fenced(
                    f"consumer {shown(name)} has another owner by now, or its positions were reset"
                    f" (generation {generation}, in force is {self.generation(name)})"
                )
            allowed = np.ones(len(partitions), bool)
        partitions = partitions[allowed]
        if saver is not None and len(partitions):
            # One that was on a connection that its sender gave up may arrive at any time.
            if 0 < number < saver.saved:
                raise UprError(
                    f"save {number} of consumer {shown(name)} comes behind save {saver.saved}",
                    reason="SAVE_OVERTAKEN",
                    retriable=True,
                )
            saver.saved = max(saver.saved, number)
            self._counts(name)[partitions] += np.uint16(1)
        return Hold(name, allowed, partitions)

    def let_go(self, hold: Hold, now: int) -> None:
        """End the hold of a save."""
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
        """Drop the counts of a consumer that has no pending saves and no group."""
        if name not in self._groups and name in self._saving and not self._saving[name].any():
            del self._saving[name]
