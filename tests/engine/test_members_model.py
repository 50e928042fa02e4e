"""Groups under random steps, against a model that knows only what was said to whom."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.group_calls import LEASE, NAME, Call, join, owner_of, settle
from upr.engine.groups import Hold, Owners
from upr.engine.streams import SUPERSEDED
from upr_protocol.limits import PARTITIONS


class Model(RuleBasedStateMachine):
    """Members come, pause, get lost, leave and save; the model knows who may believe to own what."""

    NAMES = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.owners = Owners()
        self.now = 0
        self.calls: dict[str, Call] = {}
        self.heard: dict[str, int] = {}
        self.saves: list[tuple[str, Hold]] = []
        self.generations = [0]
        self.before: dict[int, str] = {}
        self.free_to_go: set[int] = set()

    def teardown(self) -> None:
        for call in self.calls.values():
            call.seat.heard(self.now)
        for _, hold in self.saves:
            self.owners.let_go(hold, self.now)
        calls = [call for call in self.calls.values() if call.seat.taken]
        # Leases of those whose call was lost end; the others go on.
        for _ in range(8):
            self.now += LEASE // 4
            for call in calls:
                call.seat.heard(self.now)
            self.owners.tick(self.now)
            settle(self.owners, calls, self.now)
        if calls:
            assert len(owner_of(self.owners)) == PARTITIONS
            sizes = [len(call.owned) for call in calls]
            assert max(sizes) - min(sizes) <= 1
        else:
            assert self.owners.group(NAME) is None

    def _call(self, data: st.DataObject) -> tuple[str, Call]:
        name = data.draw(st.sampled_from(sorted(self.calls)))
        return name, self.calls[name]

    def _free(self, name: str) -> None:
        """What a member owns may go to others in this step."""
        self.free_to_go |= {p for p, owner in self.before.items() if owner == name}

    def _ended(self) -> None:
        """Leases whose end has come free what they held."""
        for name, heard in list(self.heard.items()):
            if self.now >= heard + LEASE:
                self._free(name)
                del self.heard[name]

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self._ended()
        call = join(self.owners, name, self.now)
        old = self.calls.get(name)
        if old is not None and old.seat.member is call.seat.member:
            assert old.ended is SUPERSEDED
        self.calls[name], self.heard[name] = call, self.now

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        name, call = self._call(data)
        self._ended()
        call.seat.heard(self.now)
        self.heard[name] = self.now

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), most=st.sampled_from((1, 300, PARTITIONS)))
    def release(self, data: st.DataObject, most: int) -> None:
        name, call = self._call(data)
        self._ended()
        call.read()
        released = call.seat.release(sorted(call.to_release)[:most], self.now)
        self.heard[name] = self.now
        self.free_to_go |= set(released)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), left=st.booleans())
    def close(self, data: st.DataObject, left: bool) -> None:
        name, call = self._call(data)
        self._ended()
        if left:
            self._free(name)
            self.heard.pop(name, None)
        self.owners.close(call.seat, self.now, left=left)
        del self.calls[name]

    @rule(part=st.sampled_from((1, 3, 4)))
    def wait(self, part: int) -> None:
        self.now += part * LEASE // 4
        self._ended()
        # A release that was not made in time is taken as well: whoever was asked lets go of it.
        late = group_releasing(self.owners, self.now)
        self.free_to_go |= late
        self.owners.tick(self.now)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def begin_save(self, name: str, data: st.DataObject) -> None:
        self._ended()
        generation = data.draw(
            st.sampled_from((2**62, self.generations[-1], *self.generations[-4:]))
        )
        partitions = np.array([0, 511, 512, 700, 1023])
        hold = self.owners.hold(NAME, name, generation, partitions, self.now)
        now_owned = owner_of(self.owners)
        for partition in hold.partitions.tolist():
            assert now_owned[partition] == name
            assert name in self.heard, "its lease has ended"
        self.saves.append((name, hold))

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def end_save(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.saves) - 1))
        _, hold = self.saves.pop(index)
        self.owners.let_go(hold, self.now)

    @invariant()
    def owners_change_only_when_they_may(self) -> None:
        after = owner_of(self.owners)
        under_way = {p: name for name, hold in self.saves for p in hold.partitions.tolist()}
        for partition, owner in after.items():
            former = self.before.get(partition)
            if former == owner:
                continue
            assert former is None or partition in self.free_to_go, f"{partition} was {former}'s"
            assert under_way.get(partition, owner) == owner, "a save of it is under way"
        found = self.owners.group(NAME)
        generation = self.owners.generation(NAME)
        if found is not None:
            assert (generation > self.generations[-1]) or (
                after == self.before and generation == self.generations[-1]
            )
            self.generations.append(generation)
        assert all(a <= b for a, b in pairwise(self.generations))
        self.before, self.free_to_go = after, set()

    @invariant()
    def nobody_believes_to_own_what_is_anothers(self) -> None:
        after = owner_of(self.owners)
        for name, call in self.calls.items():
            believed = call.owned - set(call.lost)
            # A client may believe less than it owns, and more only where its streams were ended.
            for partition in believed & after.keys():
                assert after[partition] == name or not call.seat.may_start(partition)
            call.read()
            call.lost.clear()
            assert call.owned == {p for p, owner in after.items() if owner == name}


def group_releasing(owners: Owners, now: int) -> set[int]:
    """Return the partitions whose release is due."""
    found = owners.group(NAME)
    return set() if found is None else set(np.flatnonzero(found._release_by <= now).tolist())


TestModel = pytest.mark.timeout(300)(Model.TestCase)
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
