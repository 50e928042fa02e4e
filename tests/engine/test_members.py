"""Groups: who owns what, and what a former owner can still do."""

from typing import Any, cast

import numpy as np
import pytest

from tests.engine.buckets import bucket
from tests.engine.group_calls import LEASE, NAME, Call, allowed, group, join, owner_of, settle
from upr.engine import groups as members_module
from upr.engine.groups import Owners, Seat
from upr.engine.streams import POSITIONS_RESET, SUPERSEDED, FollowOptions
from upr.service.conversation import Conversation
from upr_protocol.errors import FencedError, InvalidArgumentError, TooManyError, UprError
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.limits import OWNERS_REMEMBERED, PARTITIONS
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire


def test_a_single_member_owns_everything_and_a_second_one_half_after_the_release() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    assert (len(a.owned), a.to_release) == (PARTITIONS, set())
    b = join(owners, "b", 1)
    assert b.owned == set()
    a.read()
    assert (len(a.owned), len(a.to_release)) == (PARTITIONS, 512)
    asked = set(a.to_release)
    assert not a.seat.may_start(min(asked))
    assert a.seat.may_start(min(a.owned - asked))
    assert a.seat.release(sorted(asked), 2) == sorted(asked)
    assert (a.read().owned & asked, b.read().owned) == (set(), asked)
    assert b.generation > a.seat.group.generation - 2
    assert allowed(owners, "b", b.generation, sorted(asked)[:3], 3) == sorted(asked)[:3]
    assert allowed(owners, "a", b.generation, sorted(asked)[:3], 3) == []


def test_nothing_is_granted_before_it_was_released() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    a.seat.heard(2)
    assert (b.read().owned, set(owner_of(owners).values())) == (set(), {"a"})


def test_when_a_lease_ends_the_streams_end_and_the_partitions_go_on_in_the_same_step() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    settle(owners, [a, b], 2)
    b.seat.heard(LEASE)
    owned = set(a.owned)
    owners.tick(2 + LEASE - 1)
    assert (a.lost, set(owner_of(owners).values())) == ([], {"a", "b"})
    owners.tick(2 + LEASE)
    assert set(a.lost) == owned
    assert set(owner_of(owners).values()) == {"b"}
    assert len(b.read().owned) == PARTITIONS
    assert a.read().owned == set()
    # What it had received before may be finished, and nothing of it is stored.
    assert allowed(owners, "a", a.generation, sorted(owned)[:9], 3 + LEASE) == []


def test_a_paused_member_joins_again_with_what_it_says_next() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    owners.tick(LEASE)
    assert a.read().owned == set()
    assert owner_of(owners) == {}
    a.seat.heard(3 * LEASE)
    assert len(a.read().owned) == PARTITIONS
    assert a.ended is None


def test_the_lease_has_ended_for_a_message_that_comes_too_late() -> None:
    """Also when nobody looked at the clock in between."""
    owners = Owners()
    a = join(owners, "a", 0)
    old = a.generation
    a.seat.heard(LEASE)
    assert len(a.lost) == PARTITIONS
    assert allowed(owners, "a", old, [5], LEASE) == []
    assert allowed(owners, "a", a.read().generation, [5], LEASE) == [5]


def test_what_another_member_had_meanwhile_is_not_told_as_if_it_had_stayed() -> None:
    """Where nothing could be sent to a paused member in between."""
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", LEASE - 1)
    owners.tick(LEASE)
    assert len(b.read().owned) == PARTITIONS
    owners.close(b.seat, LEASE + 1, left=True)
    a.seat.heard(LEASE + 2)
    assert a.read().owned == set()
    assert a.seat.has_news
    assert len(a.read().owned) == PARTITIONS
    assert not a.seat.has_news


def test_a_save_that_comes_too_late_is_refused_when_nobody_looked_at_the_clock() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    assert allowed(owners, "a", a.generation, [5], LEASE) == []
    assert len(a.lost) == PARTITIONS


def test_a_lost_call_keeps_its_partitions_and_may_save_until_the_lease_ends() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    settle(owners, [a, b], 2)
    mine = sorted(a.owned)
    owners.close(a.seat, 3, left=False)
    assert sum(name == "a" for name in owner_of(owners).values()) == 512
    assert allowed(owners, "a", a.generation, mine, 4) == mine
    b.seat.heard(LEASE)
    owners.tick(LEASE + 2)
    assert set(owner_of(owners).values()) == {"b"}
    assert [member.name for member in group(owners)] == ["b"]
    assert allowed(owners, "a", a.generation, mine, LEASE + 3) == []


def test_a_member_that_leaves_gives_everything_up_at_once() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    settle(owners, [a, b], 2)
    owners.close(a.seat, 3, left=True)
    assert len(b.read().owned) == PARTITIONS
    assert allowed(owners, "a", a.generation, sorted(a.owned), 4) == []
    owners.close(b.seat, 5, left=True)
    assert owners.group(NAME) is None


def test_a_second_call_of_a_member_ends_the_first_and_fences_what_that_knew() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    again = join(owners, "a", 1)
    assert (a.ended, len(again.owned)) == (SUPERSEDED, PARTITIONS)
    assert again.generation > a.generation
    assert allowed(owners, "a", a.generation, [5], 2) == []
    assert allowed(owners, "a", again.generation, [5], 2) == [5]
    # The old call says and loses nothing any more.
    assert not a.seat.may_start(5)
    assert a.seat.release([5], 3) == []
    owners.close(a.seat, 3, left=True)
    assert len(owner_of(owners)) == PARTITIONS


def test_a_partition_with_a_save_under_way_is_not_granted_to_another() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    a.read()
    asked = sorted(a.to_release)
    hold = owners.hold(NAME, "a", a.generation, np.array(asked[:2]), 2)
    second = owners.hold(NAME, "a", a.generation, np.array(asked[:1]), 2)
    a.seat.release(asked, 3)
    assert sorted(b.read().owned) == asked[2:]
    owners.let_go(hold, 4)
    assert sorted(b.read().owned) == asked[1:]
    owners.let_go(second, 5)
    assert sorted(b.read().owned) == asked


def test_a_save_under_way_outlives_the_group_that_it_began_in() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    hold = owners.hold(NAME, "a", a.generation, np.array([5]), 1)
    owners.close(a.seat, 2, left=True)
    b = join(owners, "b", 3)
    assert sorted(set(range(PARTITIONS)) - b.owned) == [5]
    owners.let_go(hold, 4)
    assert 5 in b.read().owned


def test_what_is_not_released_in_time_is_taken_with_its_streams() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    asked = set(a.read().to_release)
    for now in range(2, LEASE, LEASE // 5):
        a.seat.heard(now)
        b.seat.heard(now)
    owners.tick(LEASE)
    assert a.lost == []
    owners.tick(LEASE + 1)
    assert (set(a.lost), b.read().owned) == (asked, asked)
    assert a.read().owned == set(range(PARTITIONS)) - asked


def test_what_is_asked_back_is_kept_again_when_the_other_goes() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    b = join(owners, "b", 1)
    assert a.read().to_release
    owners.close(b.seat, 2, left=True)
    assert (a.read().to_release, len(a.owned)) == (set(), PARTITIONS)
    owners.tick(LEASE + 1)
    assert len(a.lost) == PARTITIONS, "only the lease ends then"


@pytest.mark.parametrize("count", [1, 3, 60])
def test_a_join_and_a_leave_move_only_what_must_move(count: int) -> None:
    owners = Owners()
    calls = [join(owners, f"m{i:03}", 0) for i in range(count)]
    settle(owners, calls, 1)
    before = owner_of(owners)
    newcomer = join(owners, "zz", 2)
    settle(owners, [*calls, newcomer], 3)
    after = owner_of(owners)
    moved = [p for p in before if before[p] != after[p]]
    assert len(moved) <= -(-PARTITIONS // (count + 1))
    assert {after[p] for p in moved} == {"zz"}
    sizes = [len(call.owned) for call in (*calls, newcomer)]
    assert max(sizes) - min(sizes) <= 1
    leaver = calls[count // 2]
    owners.close(leaver.seat, 4, left=True)
    rest = [call for call in (*calls, newcomer) if call is not leaver]
    settle(owners, rest, 5)
    final = owner_of(owners)
    assert len(final) == PARTITIONS
    assert {after[p] for p in final if final[p] != after[p]} == {f"m{count // 2:03}"}


def test_a_member_that_comes_back_in_time_moves_nothing() -> None:
    owners = Owners()
    calls = [join(owners, name, 0) for name in "abc"]
    settle(owners, calls, 1)
    before = owner_of(owners)
    owners.close(calls[1].seat, 2, left=False)
    settle(owners, [calls[0], calls[2]], 3)
    calls[1] = join(owners, "b", 4)
    settle(owners, calls, 5)
    assert owner_of(owners) == before


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "MEMBERS_MAX", 2)
    owners = Owners()
    join(owners, "a", 0)
    join(owners, "b", 0)
    with pytest.raises(TooManyError, match="are 2; must be below 2"):
        join(owners, "c", 0)
    join(owners, "b", 1)


def test_the_two_kinds_of_calls_do_not_mix_while_one_is_open() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    with pytest.raises(InvalidArgumentError, match="is a group"):
        owners.open_sole(NAME, ())
    owners.close(a.seat, 1, left=False)
    generation = owners.open_sole(NAME, ())
    assert owners.group(NAME) is None
    assert allowed(owners, "a", a.generation, [5], 2) == []
    assert allowed(owners, "", generation, [5], 2) == [5]
    with pytest.raises(InvalidArgumentError, match="names no member"):
        owners.join(NAME, "a", LEASE, 3, cast(Any, Call()), sole_is_open=True)
    join(owners, "a", 4)
    with pytest.raises(FencedError):
        allowed(owners, "", generation, [5], 5)


def test_a_sole_owner_may_save_until_somebody_else_opens() -> None:
    owners = Owners()
    first = owners.open_sole(NAME, ())
    assert allowed(owners, "", first, [1, 5], 0) == [1, 5]
    second = owners.open_sole(NAME, (NAME,))
    assert second > first
    for generation in (first, second + 1, 0):
        with pytest.raises(FencedError, match="another owner by now"):
            allowed(owners, "", generation, [5], 1)
    assert allowed(owners, "", second, [5], 1) == [5]
    with pytest.raises(FencedError):
        owners.hold("nobody", "", second, np.array([5]), 1)


@pytest.mark.parametrize("member", ["", "a"])
def test_a_save_that_a_later_one_has_overtaken_is_refused(member: str) -> None:
    owners = Owners()

    def opened() -> int:
        return join(owners, member, 0).generation if member else owners.open_sole(NAME, ())

    def save(generation: int, number: int) -> list[int]:
        return allowed(owners, member, generation, [5], 1, number)

    first = opened()
    assert save(first, 7) == [5]
    # Sent again because its answer was lost.
    assert save(first, 7) == [5]
    with pytest.raises(UprError, match=r"save 6 .* comes behind save 7") as overtaken:
        save(first, 6)
    assert (overtaken.value.reason, overtaken.value.retriable) == ("SAVE_OVERTAKEN", True)
    # Whoever gives no numbers, and the next process, go on.
    assert save(first, 0) == [5]
    second = opened()
    assert save(second, 1) == [5]
    # That of the process before is its owner's no more, whatever its number is.
    if member:
        assert save(first, 8) == []
    else:
        with pytest.raises(FencedError):
            save(first, 8)
    assert save(second, 2) == [5]


def test_who_is_forgotten_may_save_nothing_more() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    sole = owners.open_sole("other", ())
    hold = owners.hold(NAME, "a", a.generation, np.array([5]), 1)
    owners.forget()
    assert allowed(owners, "a", a.generation, [5], 1) == []
    with pytest.raises(FencedError):
        owners.hold("other", "", sole, np.array([5]), 1)
    # Until the save that was under way is over, nobody else has its partition.
    b = join(owners, "b", 2)
    assert b.owned == set(range(PARTITIONS)) - {5}
    owners.let_go(hold, 3)
    assert b.read().owned == set(range(PARTITIONS))
    owners.close(a.seat, 4, left=False)
    assert set(owner_of(owners).values()) == {"b"}


def test_a_generation_that_another_server_gave_is_fenced() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    assert allowed(owners, "a", a.generation + 1, [5], 1) == []
    assert allowed(owners, "a", a.generation, [5], 1) == [5]


def test_of_too_many_groups_the_oldest_without_calls_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "OWNERS_REMEMBERED", 3)
    owners = Owners()

    def open_group(name: str) -> Seat:
        call = Call()
        seat = call.seat = owners.join(name, "a", LEASE, 0, cast(Any, call), sole_is_open=False)
        return seat

    seats = [open_group(name) for name in "12345"]
    assert list(owners) == ["1", "2", "3", "4", "5"], "all of them have calls"
    for seat in seats[1:3]:
        owners.close(seat, 1, left=False)
    open_group("6")
    assert list(owners) == ["1", "3", "4", "5", "6"]


def test_a_reset_fences_everybody_and_moves_nothing() -> None:
    owners = Owners()
    calls = [join(owners, name, 0) for name in "ab"]
    settle(owners, calls, 1)
    before = owner_of(owners)
    generation = owners.reset(NAME)
    assert all(call.ended is POSITIONS_RESET for call in calls)
    for call, name in zip(calls, "ab", strict=True):
        assert call.generation < generation
        assert allowed(owners, name, call.generation, sorted(call.owned), 2) == []
        owners.close(call.seat, 2, left=False)
    calls = [join(owners, name, 3) for name in "ab"]
    assert owner_of(owners) == before
    assert len(allowed(owners, "a", calls[0].generation, sorted(calls[0].owned), 4)) == 512

    sole = owners.open_sole("other", ())
    assert owners.reset("other") > sole
    with pytest.raises(FencedError):
        owners.hold("other", "", sole, np.array([5]), 1)


def test_generations_begin_above_what_was_given_before() -> None:
    owners = Owners()
    owners.begin_above(1000)
    owners.begin_above(10)
    assert owners.open_sole(NAME, ()) == 1001


def test_former_owners_are_forgotten_oldest_first_and_open_ones_never() -> None:
    owners = Owners()
    kept = owners.open_sole("kept", ())
    gone = owners.open_sole("gone", ())
    for i in range(OWNERS_REMEMBERED - 1):
        owners.open_sole(f"c{i}", ("kept",))
    assert owners.generation("kept") == kept
    assert owners.generation("gone") == 0 != gone


def test_a_seat_of_nobody_does_nothing() -> None:
    owners = Owners()
    a = join(owners, "a", 0)
    owners.close(a.seat, 1, left=True)
    seat: Seat = a.seat
    seat.heard(2)
    assert seat.release([1], 2) == []
    assert seat.take_assignment() is None
    assert not seat.owns(np.array([1])).any()
    owners.close(seat, 3, left=False)
    assert owners.group(NAME) is None


def test_a_call_that_a_reset_ends_is_not_told_the_generation_behind_it() -> None:
    """With it the member would store its positions of before over those that were set."""
    served = bucket()
    a, b = (
        Conversation(
            served,
            FollowOptions(consumer=NAME, member=name, lease=LEASE),
            CreditWindow(1 << 20),
            Liveness(3600, 0),
            lambda: None,
        )
        for name in "ab"
    )
    # The second one joined before the first was told anything: its share is news still.
    assert a.follower.seat is not None
    assert a.follower.seat.has_news
    served.owners.reset(NAME)
    for call in (a, b):
        kinds = []
        while (saying := call.next_message(0)) is not None:
            message = cast(wire.FollowResponse, saying.message)
            kinds.append(message.WhichOneof("message"))
        assert "assignment" not in kinds
        assert kinds[-1] == "ended"
