"""A member's own count of its lease, and what an assignment changes."""

import pytest

from upr_client.changes.groups import Membership
from upr_protocol.errors import InvalidArgumentError, ProtocolError
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream_pb2


def assignment(
    generation: int, *owned: int, release: tuple[int, ...] = ()
) -> stream_pb2.Assignment:
    return stream_pb2.Assignment(generation=generation, owned=owned, to_release=release)


def renewal(membership: Membership, now: float) -> int:
    (message,) = membership.due(now)
    return message.renew.number


def member(lease: float = 30.0, at: float = 100.0) -> Membership:
    membership = Membership()
    assert membership.opened(1, lease, at) == []
    return membership


def test_what_an_assignment_changes() -> None:
    membership = member()
    assert membership.assigned(assignment(5, 1, 2, 3), 100) == ([1, 2, 3], [], [], [])
    assert membership.assigned(assignment(6, 2, 3, 4, release=(3,)), 101) == ([4], [1], [3], [])
    assert membership.releasing == {3: 101}
    share = membership.assigned(assignment(7, 2, 3, 4, release=(3, 4)), 105)
    assert share is not None
    assert share.release == [3, 4]
    assert membership.releasing == {3: 101, 4: 105}
    message = membership.released([4, 3])
    assert list(message.release.partitions) == [3, 4]
    assert membership.owned == {2}
    assert membership.assigned(assignment(8, 2), 106) == ([], [], [], [])
    assert membership.generation == 8


def test_what_comes_only_to_be_released_is_not_begun_unless_it_stays() -> None:
    membership = member()
    assert membership.assigned(assignment(5, 1, 2, 3, release=(2, 3)), 100) == ([1], [], [2, 3], [])
    membership.released([2])
    # Sent before the Release was read.
    late = assignment(6, 1, 2, 3, release=(2, 3))
    assert membership.assigned(late, 101) == ([], [], [2, 3], [])
    assert membership.assigned(assignment(7, 1, 3), 102) == ([3], [2], [], [])
    # What was begun goes on.
    assert membership.assigned(assignment(8, 1, 3, release=(3,)), 103) == ([], [], [3], [])
    assert membership.assigned(assignment(9, 1, 3), 104) == ([], [], [], [3])


def test_what_was_released_is_begun_again_once_the_server_has_read_that() -> None:
    membership = member()
    membership.assigned(assignment(5, 1, 2, release=(2,)), 100)
    membership.assigned(assignment(6, 1, 2), 100)
    number = renewal(membership, 110)
    membership.released([2])
    # The server kept it here before it read the Release.
    assert membership.assigned(assignment(7, 1, 2), 111) == ([], [], [], [])
    assert membership.renewed(number, 111) is None
    assert membership.next_due(111) == 0
    number = renewal(membership, 111)
    assert membership.next_due(111) > 0
    assert membership.renewed(number, 112) == ([2], [], [], [])
    assert membership.owned == {1, 2}
    # Another one has it.
    membership.released([2])
    assert membership.assigned(assignment(8, 1, 2), 113) == ([], [], [], [])
    assert membership.assigned(assignment(9, 1), 114) == ([], [2], [], [])
    assert membership.renewed(renewal(membership, 114), 115) is None


def test_what_was_another_ones_while_assignments_waited_is_lost_and_begun_anew() -> None:
    """What waits is taken where the other thread heard an answer a moment before the end."""
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2, 3), 100)
    number = renewal(membership, 120)
    assert membership.assigned(assignment(6, 1, 2), 130) is None
    assert membership.assigned(assignment(7, 1, 2, 3, 4), 130) is None
    membership.heard(number, 129)
    assert membership.renewed(number, 130) == ([3, 4], [3], [], [])
    assert membership.assigned(assignment(8, 1, 2, 3, 4), 131) == ([], [], [], [])


def test_an_answer_behind_the_end_of_the_lease_waits_until_nothing_is_owned() -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    late, later = renewal(membership, 119), renewal(membership, 129)
    assert membership.renewed(late, 131) is None
    assert membership.expired(131), "what others got is told behind the answer"
    assert membership.expire(131) == [1, 2]
    assert membership.renewed(later, 132) is None
    assert not membership.expired(158)


def test_an_assignment_that_cannot_be() -> None:
    membership = member()
    membership.assigned(assignment(5, 1), 100)
    with pytest.raises(ProtocolError, match="generation 4"):
        membership.assigned(assignment(4, 1), 100)
    with pytest.raises(ProtocolError, match="not owned"):
        membership.assigned(assignment(6, 1, release=(2,)), 100)
    with pytest.raises(InvalidArgumentError):
        membership.assigned(assignment(6, 1024), 100)
    assert membership.owned == {1}
    with pytest.raises(ProtocolError, match="lease"):
        Membership().opened(1, 0.0, 100)


def test_the_lease_counts_from_when_what_was_answered_was_sent() -> None:
    membership = member(lease=30, at=100)
    assert not membership.expired(129.9)
    assert membership.expired(130)
    assert membership.due(109) == []
    first = renewal(membership, 110)
    assert membership.due(119) == []
    second = renewal(membership, 121)
    assert membership.expired(131), "what was sent and not answered extends nothing"
    membership.renewed(second, 125)
    assert not membership.expired(150.9)
    assert membership.expired(151)
    membership.renewed(first, 122)
    assert membership.expired(151), "an answer that was overtaken takes nothing back"
    membership.renewed(77, 122)
    assert membership.expired(151)


def test_an_assignment_that_waited_gives_way_to_a_later_one() -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    number = renewal(membership, 120)
    assert membership.assigned(assignment(6, 1), 135) is None
    # On another thread, which saw the lease before its end.
    membership.heard(number, 129)
    assert membership.assigned(assignment(7, 1, 2), 135) == ([2], [2], [], [])
    assert membership.renewed(number, 135) is None
    assert membership.generation == 7


def test_there_is_always_something_to_do_before_the_lease_ends() -> None:
    membership = member(lease=30, at=100)
    assert membership.next_due(100) == 10
    renewal(membership, 110)
    assert membership.next_due(110) == 10
    renewal(membership, 120)
    assert membership.next_due(129) == 1
    assert membership.next_due(131) == 0
    renewal(membership, 131)
    assert membership.next_due(131) == 10, "nothing more can be done about a lease that has ended"


def test_a_call_after_a_lost_one_keeps_the_share_unless_the_server_is_another() -> None:
    membership = member()
    membership.assigned(assignment(5, 1, 2), 100)
    assert membership.opened(1, 30, 110) == []
    assert membership.owned == {1, 2}
    assert membership.opened(2, 30, 120) == [1, 2]
    assert membership.owned == set()
    assert membership.assigned(assignment(1, 3), 121) == ([3], [], [], [])


def test_partitions_that_were_fenced_are_owned_no_more() -> None:
    membership = member()
    membership.assigned(assignment(5, 1, 2, 3, release=(2,)), 100)
    assert membership.forget([2, 9]) == [2]
    assert membership.releasing == {}
    assert membership.forget() == [1, 3]


def test_what_the_lease_took_is_given_up_and_given_anew() -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    assert membership.expire(129) == []
    assert membership.expire(130) == [1, 2]
    assert membership.expire(130) == []
    release, renew = membership.due(140)
    assert list(release.release.partitions) == [1, 2], (
        "by the server's count they may still be owned"
    )
    assert membership.assigned(assignment(6, 3), 141) is None, "how old that is cannot be known"
    assert membership.owned == set()
    assert membership.renewed(renew.renew.number, 142) == ([3], [], [], [])
    assert not membership.expired(169)


def test_what_was_given_up_is_not_begun_because_of_what_was_said_before() -> None:
    """The server sent the Assignment before it read the Release, and the answer behind that."""
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    membership.expire(130)
    _, renew = membership.due(131)
    assert membership.assigned(assignment(6, 1, 2, 3), 132) is None
    assert membership.renewed(renew.renew.number, 132) == ([3], [], [], [])
    assert membership.next_due(132) == 0
    number = renewal(membership, 132)
    # Another one has the first.
    assert membership.assigned(assignment(7, 2, 3), 133) == ([], [1], [], [])
    assert membership.renewed(number, 134) == ([2], [], [], [])


def test_what_was_handed_out_holds_a_partition_for_half_a_lease() -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2, release=(1, 2)), 101)
    assert membership.releasable(101, busy={1}) == [2]
    assert membership.releasable(115, busy={1}) == [2]
    assert membership.releasable(116, busy={1, 2}) == [1, 2]
    membership.released([1, 2])
    assert membership.releasable(116, busy=()) == []


def test_what_was_asked_for_ends_the_lease_until_it_is_handed_over() -> None:
    """Of an application that is busy for long: another thread hears the answers, and nobody takes the Assignment."""
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    for now in (110, 120):
        membership.renewed(renewal(membership, now), now)
    asked = assignment(6, 1, 2, release=(2,))
    membership.arrived(asked)
    for now in (130, 140, 150):
        membership.heard(renewal(membership, now), now)
    # By the server's clock it is another's from 30 after it was asked for: at or behind 120.
    assert [membership.expired(now) for now in (149.9, 150)] == [False, True]
    assert membership.assigned(asked, 151) is None
    assert membership.expired(151)
    assert membership.expire(151) == [1, 2]
    renew, *_ = [one for one in membership.due(151) if one.HasField("renew")]
    assert membership.renewed(renew.renew.number, 152) == ([], [], [2], [])


@pytest.mark.parametrize("taken", [125, 140])
def test_what_was_asked_for_and_taken_in_time_ends_nothing_once_it_is_handed_over(
    taken: int,
) -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1, 2), 100)
    membership.renewed(renewal(membership, 120), 120)
    asked = assignment(6, 1, 2, release=(2,))
    membership.arrived(asked)
    share = membership.assigned(asked, taken)
    assert share is not None
    assert share.release == [2]
    membership.renewed(renewal(membership, 140), 140)
    assert [membership.expired(now) for now in (149.9, 150)] == [False, True]
    assert membership.next_due(145) <= 5
    membership.released([2])
    assert not membership.expired(150)


def test_an_assignment_that_takes_nothing_ends_no_lease() -> None:
    membership = member(lease=30, at=100)
    membership.assigned(assignment(5, 1), 100)
    membership.arrived(assignment(6, 1, 2))
    membership.heard(renewal(membership, 120), 121)
    assert not membership.expired(140)
    assert membership.assigned(assignment(6, 1, 2), 140) == ([2], [], [], [])
    membership.arrived(assignment(7, 2))
    membership.opening()
    assert not membership.expired(149)
