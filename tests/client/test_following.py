"""What is to be done next, and what a message comes to, decided without I/O: cases that a real server rarely makes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.client.scripted import (
    ID_A,
    ID_B,
    VERSION,
    answers,
    ended,
    frame,
    heartbeat,
    refused,
    rollback,
    run_block,
    started,
)
from upr_client import Group, MemoryPositions, Only, Position, ServerPositions, Tuning, WriteToken
from upr_client.changes.events import Change, ChangeBatch
from upr_client.changes.link import Clock
from upr_client.changes.options import ChangesOptions
from upr_client.changes.session import Following, Step
from upr_client.errors import NoRoomError
from upr_protocol.errors import (
    BehindError,
    FencedError,
    InvalidArgumentError,
    PartitionNotActiveError,
    RollbackError,
    TooManyError,
    UnavailableError,
    UprError,
)
from upr_protocol.failover import FailoverLog
from upr_protocol.position_table import START, PositionTable
from upr_protocol.wire.codec import positions_to_messages
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

NO_HIGHS = np.zeros(1024, np.uint64)
LEASE = 30.0
LOG = FailoverLog.from_pairs([(ID_A, 0)])


class World:
    """Something that follows, and its clock."""

    def __init__(self, options: ChangesOptions) -> None:
        self.now = 100.0
        self.said: list[str] = []
        clock = Clock(lambda: self.now, lambda: self.now, lambda: 1.0)
        self.following = Following(options, say=self.said.append, clock=clock)
        self.following.load({})

    def open(self, server_id: int = 1, version: int = VERSION, generation: int = 0) -> None:
        self.following.open_message("default")
        self.opened(server_id, version, generation)

    def opened(self, server_id: int = 1, version: int = VERSION, generation: int = 0) -> None:
        opened = wire.Opened(
            server_id=server_id,
            bucket_version=version,
            generation=generation,
            lease_seconds=LEASE if self.following.ownership is not None else 0.0,
        )
        self.following.opened(opened)

    def take(self, *sends: object) -> None:
        for send in sends:
            outcome = self.following.take(send.message, NO_HIGHS)  # type: ignore[attr-defined]
            assert outcome.lost is None, outcome

    def take_batch(self, send: Any) -> ChangeBatch:
        """Take a frame and hand it out, to be acknowledged by itself."""
        batch = self.following.take(send.message, NO_HIGHS).batch
        assert batch is not None
        self.following.hand_out()
        self.following.acknowledge()
        return batch

    def heard(self, number: int) -> wire.FollowResponse:
        answer = wire.FollowResponse(renewed=wire.Renewed(number=number))
        self.following.heard(answer)
        return answer

    def renewed(self, number: int) -> None:
        self.following.take(self.heard(number), NO_HIGHS)

    def arrived(
        self, generation: int, *owned: int, release: tuple[int, ...] = ()
    ) -> wire.FollowResponse:
        message = wire.Assignment(generation=generation, owned=owned, to_release=release)
        told = wire.FollowResponse(assignment=message)
        self.following.heard(told)
        return told

    def assign(self, generation: int, *owned: int, release: tuple[int, ...] = ()) -> None:
        told = self.arrived(generation, *owned, release=release)
        outcome = self.following.take(told, NO_HIGHS)
        assert outcome.lost is None, outcome

    def found(self, *stored: tuple[int, Position, int], version: int = VERSION) -> None:
        response = wire.LoadPositionsResponse(bucket_version=version)
        for partition, position, generation in stored:
            (message,) = positions_to_messages(PositionTable.of({partition: position}))
            message.generation = generation
            response.positions.append(message)
        assert self.following.ownership is not None
        self.following.begin(self.following.ownership.found(response))

    def starts(self) -> list[tuple[int, int]]:
        """The (partition, seqno) pairs of the Starts that are due."""
        messages, _ = self.following.due()
        starts = [m.start for m in messages if m.WhichOneof("message") == "start"]
        found = [(p.partition, p.seqno) for start in starts for p in start.partitions]
        for start in starts:
            records = np.frombuffer(start.table, START)
            found += zip(records["partition"].tolist(), records["seqno"].tolist(), strict=True)
        return found

    def save(self) -> dict[int, int]:
        """Store, with the server's consent; the seqnos."""
        positions = self.following.begin_save()
        ownership = self.following.ownership
        if ownership is not None:
            ownership.save_request("default", VERSION, positions)
        self.following.saved(positions)
        return {partition: position.seqno for partition, position in positions.items()}

    def iterate(self, count: int) -> list[tuple[int, int]]:
        """Take as many events one by one, as an application; the (partition, seqno) pairs of the changes."""
        events = []
        for _ in range(count):
            assert self.following.taken is not None
            event = self.following.taken.next_event()
            assert event is not None
            if isinstance(event, Change):
                events.append((event.partition, event.seqno))
        return events


def member(**options: Any) -> World:
    """A member that owns partitions 1 and 2 and follows both."""
    made = World(ChangesOptions(resume=Group("g", member="m"), on_rollback="event", **options))
    made.open()
    made.assign(5, 1, 2)
    assert made.following.next_step(True) is Step.LOAD
    made.found()
    assert made.starts() == [(1, 0), (2, 0)]
    made.take(answers(started(1, 11), started(2, 12)))
    assert made.save() == {1: 0, 2: 0}
    return made


def owner(**options: Any) -> World:
    """A sole owner whose positions are in the server, of partitions 1 and 2."""
    made = World(
        ChangesOptions(
            resume=ServerPositions("c"), only=Only([1, 2]), on_rollback="event", **options
        )
    )
    made.open(generation=5)
    made.found()
    assert made.starts() == [(1, 0), (2, 0)]
    made.take(answers(started(1, 11), started(2, 12)))
    made.save()
    return made


# Shares of a group.


def test_a_partition_that_is_not_to_be_handed_over_after_all_goes_on() -> None:
    made = member(acknowledge="manual")
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.hand_out()
    made.following.acknowledge()
    made.assign(6, 1, 2, release=(1,))
    assert made.following.next_step(True) is not Step.RELEASE, "it waits for acknowledgements"
    made.assign(7, 1, 2)
    assert made.starts() == [(1, 2)]
    assert made.following.ledger is not None
    assert made.following.ledger.outstanding == 2


def test_what_was_consumed_before_the_lease_ended_is_stored_if_the_server_agrees() -> None:
    made = member()
    made.take(frame((11, run_block(1, 0, 4))))
    assert made.iterate(3) == [(1, 1), (1, 2), (1, 3)]
    made.now += LEASE
    assert not made.following.may_hand_out(1)
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 2}
    made.following.next_step(True)
    assert made.following.session.partitions == []
    assert any("the lease has ended" in words for words in made.said)


def test_a_whole_batch_that_took_longer_than_the_lease_is_not_repeated() -> None:
    made = member()
    made.take(frame((11, run_block(1, 0, 4))))
    made.now += LEASE
    made.following.acknowledge()
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 4}


def test_a_lease_that_ended_ends_although_nothing_can_be_stored() -> None:
    made = member()
    made.take(frame((11, run_block(1, 0, 4))))
    made.following.acknowledge()
    made.now += LEASE
    assert made.following.next_step(True) is Step.SAVE
    made.following.not_saved(made.following.begin_save(), wait=True)
    made.following.next_step(True)
    assert made.following.session.partitions == []


def test_what_is_passed_over_as_the_lease_has_ended_comes_again_although_an_answer_comes_late() -> (
    None
):
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.now += LEASE / 2
    assert not made.following.may_handle(batch.changes[0])
    made.renewed(renew.renew.number)
    assert made.following.next_step(True) is Step.SAVE
    made.save()
    assert made.following.next_step(True) is Step.RECEIVE
    assert made.following.session.partitions == []
    (release, _), _ = made.following.due()
    assert list(release.release.partitions) == [1, 2]


def test_what_is_passed_over_as_a_part_was_not_handed_over_comes_again_once_it_is() -> None:
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.assign(6, 1, 2, release=(2,))
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.renewed(renew.renew.number)
    made.now += LEASE / 2
    assert not made.following.may_handle(batch.changes[0])
    assert made.following.let_go_of_share() == [2]
    made.following.release([2])
    assert not made.following.may_handle(batch.changes[0])
    assert made.following.next_step(True) is Step.SAVE
    made.save()
    made.following.next_step(True)
    assert made.following.session.partitions == []


def test_a_call_that_is_opened_behind_the_end_of_the_lease_begins_all_anew() -> None:
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.following.session.disconnected()
    made.now += LEASE / 2
    made.following.open_message("default")
    made.now += LEASE / 2
    assert not made.following.may_handle(batch.changes[0])
    made.opened()
    assert made.following.session.partitions == []
    made.assign(6, 1, 2)
    assert made.following.next_step(True) is Step.LOAD


def test_a_call_that_is_accepted_behind_the_end_of_the_lease_begins_all_anew() -> None:
    """The server may have given all to others before it read the Open."""
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.following.session.disconnected()
    made.now += LEASE / 2
    made.following.open_message("default")
    made.now += LEASE / 2
    made.opened()
    assert not made.following.may_handle(batch.changes[0])
    assert made.following.session.partitions == []
    made.assign(6, 1, 2)
    assert made.following.next_step(True) is Step.LOAD


def test_an_answer_that_nobody_has_taken_yet_renews_a_lease() -> None:
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.heard(renew.renew.number)
    made.now += LEASE / 2
    assert made.following.may_handle(batch.changes[0])
    made.now += LEASE / 2
    assert not made.following.may_handle(batch.changes[0])


def test_nothing_more_begins_a_lease_after_a_part_was_asked_for_and_not_handed_over() -> None:
    """The application is busy and takes no message; its handlers work, and answers renew the lease."""
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    asked = made.arrived(6, 1, 2, release=(2,))
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.heard(renew.renew.number)
    assert made.following.may_handle(batch.changes[0])
    made.now += LEASE / 2
    assert not made.following.may_handle(batch.changes[0])
    assert made.following.take(asked, NO_HIGHS).lost is None
    assert not made.following.may_handle(batch.changes[0])
    # The server decides whether what was acknowledged in time counts.
    assert made.following.next_step(True) is Step.SAVE
    made.save()
    made.following.next_step(True)
    assert made.following.take_revoked(False) == [1, 2]


def test_an_answer_that_comes_behind_the_end_of_the_lease_has_nothing_handled() -> None:
    """The server may have given all to others before it read the Renew; what it says of that comes behind the answer."""
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.now += LEASE / 2
    made.heard(renew.renew.number)
    assert not made.following.may_handle(batch.changes[0])


def test_an_answer_that_is_taken_behind_the_end_of_the_lease_renews_nothing() -> None:
    """Until the Assignment behind it is taken, nobody knows what others have by then."""
    made = member()
    made.take(frame((11, run_block(1, 0, 4))))
    assert made.iterate(3) == [(1, 1), (1, 2), (1, 3)]
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.now += LEASE / 2
    made.renewed(renew.renew.number)
    assert not made.following.may_hand_out(1)
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 2}
    assert made.following.next_step(True) is Step.RECEIVE
    assert made.following.session.partitions == []
    (release, again), _ = made.following.due()
    assert list(release.release.partitions) == [1, 2]
    made.renewed(again.renew.number)
    made.assign(6, 2)
    assert made.following.next_step(True) is Step.LOAD


def test_an_answer_behind_the_end_of_the_lease_lets_no_handler_begin() -> None:
    made = member(acknowledge="manual")
    batch = made.take_batch(frame((11, run_block(1, 0, 4))))
    assert made.following.ledger is not None
    assert made.following.ledger.acknowledge(batch.changes[0])
    made.now += LEASE / 2
    (renew,), _ = made.following.renewals()
    made.now += LEASE / 2
    made.renewed(renew.renew.number)
    assert not made.following.may_handle(batch.changes[1])
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 1}


def test_rollbacks_that_were_not_all_told_when_the_lease_ended_are_not_undone() -> None:
    made = World(ChangesOptions(resume=Group("g", member="m"), on_rollback="event"))
    made.open()
    made.assign(5, 1, 2)
    stored = Position(VERSION, ID_A, ID_A, 8, 8, (8,), LOG)
    made.found((1, stored, 1), (2, stored, 1))
    made.starts()
    undo = [rollback(p, 3, ID_B, (ID_A, 0), (ID_B, 3)) for p in (1, 2)]
    made.take(answers(*undo))
    made.following.offer(made.following.rollback())
    made.iterate(1)
    made.now += LEASE
    assert not made.following.may_hand_out(1)
    made.following.acknowledge()
    assert made.following.session.position(2).failover_id == ID_A
    assert made.following.session.position(1).failover_id == ID_A


def test_nothing_is_handed_out_of_a_partition_that_was_lost_meanwhile() -> None:
    made = member()
    made.take(frame((11, run_block(1, 0, 2)), (12, run_block(2, 0, 2))))
    assert made.iterate(1) == [(1, 1)]
    made.assign(6, 2)
    assert not made.following.may_hand_out(1)
    assert made.following.may_hand_out(2)
    made.iterate(5)
    made.following.acknowledge()
    assert made.save() == {2: 2}, "what was lost has no position any more"


def test_a_lease_is_renewed_in_the_middle_of_a_batch() -> None:
    made = member()
    made.take(frame((11, run_block(1, 0, 4))))
    for _ in range(4):
        made.iterate(1)
        made.now += LEASE / 2
        (renew,), awaiting = made.following.renewals()
        assert awaiting
        made.renewed(renew.renew.number)
        assert made.following.may_hand_out(1)


def test_a_member_stores_nothing_before_a_new_call_said_under_which_generation() -> None:
    made = member(tuning=Tuning(save_seconds=0))
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.acknowledge()
    made.following.session.disconnected()
    made.open()
    assert made.following.next_step(True) is Step.LOAD
    stored = Position(VERSION, ID_A, None, 0, 0, (), None)
    made.found((1, stored, 5), (2, stored, 5))
    assert made.starts() == [(1, 2), (2, 0)]
    made.take(answers(started(1, 11), started(2, 12)))
    assert made.following.next_step(True) is Step.RECEIVE
    made.assign(6, 1, 2)
    assert made.following.next_step(True) is Step.SAVE
    assert made.save()[1] == 2


def test_what_is_asked_back_before_it_was_started_again_is_stored_first() -> None:
    """As where another member joined while this one's connection was broken."""
    made = member()
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.acknowledge()
    made.following.session.disconnected()
    made.open()
    stored = Position(VERSION, ID_A, None, 0, 0, (), None)
    made.found((1, stored, 5), (2, stored, 5))
    assert made.starts() == [(1, 2), (2, 0)]
    made.assign(6, 1, 2, release=(1,))
    assert made.following.next_step(True) is Step.SAVE
    assert made.save()[1] == 2
    assert made.following.next_step(True) is Step.RELEASE


# Ends.


ONE_UNACKNOWLEDGED = ChangesOptions(
    only=Only([1]), tuning=Tuning(unacknowledged_max=1), acknowledge="manual"
)


def with_a_frame_that_waits(options: ChangesOptions = ONE_UNACKNOWLEDGED) -> World:
    """A consumer with a frame behind what the application has not acknowledged."""
    made = World(options)
    made.open()
    made.starts()
    made.take(answers(started(1, 11)), frame((11, run_block(1, 0, 1))))
    made.following.hand_out()
    made.following.acknowledge()
    made.take(frame((11, run_block(1, 1, 2))))
    return made


def test_nothing_is_stored_before_it_is_known_what_an_operator_has_set() -> None:
    """As by ``save`` of another task, or ``close``, while the positions are loaded."""
    for made in (member(), owner()):
        made.take(frame((11, run_block(1, 0, 2))))
        made.following.acknowledge()
        made.following.session.disconnected()
        made.open(generation=7)
        if made.following.ownership and made.following.ownership.membership:
            made.assign(7, 1, 2)
        assert made.following.next_step(True) is Step.LOAD
        assert made.save() == {}
        made.found((1, Position(VERSION, ID_A, ID_A, 0, 0, (), LOG), 6))
        assert made.following.session.position(1).seqno == 0


def test_what_an_operator_has_not_touched_is_stored_behind_the_loading() -> None:
    made = owner(tuning=Tuning(save_seconds=0))
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.acknowledge()
    made.following.session.disconnected()
    made.open(generation=7)
    assert made.save() == {}
    stored = made.following.ownership
    assert stored is not None
    made.found(*((p, stored._stored[p], 5) for p in (1, 2)))
    assert made.starts() == [(1, 2), (2, 0)]
    # It is not known before that the server has as much.
    assert made.following.next_step(True) is Step.RECEIVE
    made.take(answers(started(1, 11), started(2, 12)))
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 2}


def test_what_waits_for_acknowledgements_is_bounded_in_bytes_too() -> None:
    def held(limit: int) -> bool:
        tuning = Tuning(unacknowledged_bytes=limit)
        options = replace(ONE_UNACKNOWLEDGED, tuning=tuning)
        return with_a_frame_that_waits(options).following.waits_for_acknowledgements

    assert [held(limit) for limit in (1, 2**20)] == [True, False]


def test_the_end_of_the_call_does_not_wait_for_acknowledgements() -> None:
    made = with_a_frame_that_waits()
    outcome = made.following.take(ended("SUPERSEDED").message, NO_HIGHS)
    assert outcome.lost is not None
    assert (outcome.lost.reason, outcome.lost.retriable) == ("SUPERSEDED", False)


def test_a_call_after_one_of_whose_end_nobody_heard_starts_everything() -> None:
    made = World(ChangesOptions(only=Only([1, 2])))
    made.open()
    made.starts()
    made.take(answers(started(1, 11)))
    made.open()
    assert made.starts() == [(1, 0), (2, 0)]
    made.take(answers(started(1, 11), started(2, 12)))


def test_heartbeats_do_not_pile_up_behind_what_waits_for_acknowledgements() -> None:
    made = with_a_frame_that_waits()
    highs = NO_HIGHS.copy()
    highs[1] = 9
    for _ in range(3):
        made.following.take(heartbeat((1, 9)).message, highs)
    assert len(made.following._held) == 1
    assert made.following.session.lag() == {1: 8}, "how far it is behind is known all the same"


def test_a_frame_that_waits_for_acknowledgements_gives_no_credit_back() -> None:
    made = World(ONE_UNACKNOWLEDGED)
    made.open()
    made.starts()
    made.take(answers(started(1, 11)))
    first, second = (frame((11, run_block(1, at, at + 1))).message for at in (0, 1))
    taken = made.following.take(first, NO_HIGHS)
    assert taken.consumed is first
    made.following.hand_out()
    made.following.acknowledge()
    assert made.following.take(second, NO_HIGHS).consumed is None
    assert made.following.take_held(NO_HIGHS) is None
    assert taken.batch is not None
    made.following.ledger.acknowledge_batch(taken.batch)  # type: ignore[union-attr]
    later = made.following.take_held(NO_HIGHS)
    assert later is not None
    assert later.consumed is second


def test_a_batch_that_is_not_at_its_end_is_not_taken_for_consumed() -> None:
    made = World(ChangesOptions(only=Only([1])))
    made.open()
    made.starts()
    made.take(answers(started(1, 11)), frame((11, run_block(1, 0, 4))))
    made.iterate(2)
    with pytest.raises(InvalidArgumentError, match="middle of a batch"):
        made.following.acknowledge()
    made.iterate(3)
    made.following.acknowledge()
    assert made.following.position(1).seqno == 4


# Storing.


def test_where_it_begins_is_stored_before_anything_is_handed_out() -> None:
    made = World(
        ChangesOptions(
            resume=MemoryPositions(),
            start="now",
            only=Only([1]),
            tuning=Tuning(save_seconds=3600),
        )
    )
    made.open()
    made.starts()
    begun = started(1, 11)
    begun.started.start_seqno = 7
    made.take(answers(begun))
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 7}
    assert made.following.next_step(True) is Step.RECEIVE


def test_what_the_server_could_not_store_is_tried_again_after_a_pause() -> None:
    made = owner(tuning=Tuning(save_seconds=0))
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.acknowledge()
    for seconds in (0.1, 0.2, 0.4):
        assert made.following.next_step(True) is Step.SAVE
        made.following.not_saved(made.following.begin_save(), wait=True)
        assert made.following.next_step(True) is Step.RECEIVE, (
            "the call may have ended, and that is heard by receiving only"
        )
        _, wait = made.following.due()
        assert wait == pytest.approx(seconds)
        made.now += seconds
    assert made.following.next_step(True) is Step.SAVE
    assert made.save() == {1: 2}


def moved() -> World:
    """A sole owner whose position in partition 1 the server moved to a new history, which is not stored yet."""
    made = owner()
    stored = Position(VERSION, ID_A, ID_A, 8, 8, (8,), LOG)
    made.following.lost(FencedError("gone", retriable=True))
    made.open(generation=6)
    made.found((1, stored, 6), (2, stored, 6))
    assert made.starts() == [(1, 8), (2, 8)]
    made.take(answers(rollback(1, 8, ID_B, (ID_A, 0), (ID_B, 8)), started(2, 13)))
    return made


def test_nothing_is_started_while_what_must_be_stored_could_not_be() -> None:
    made = moved()
    assert made.following.next_step(True) is Step.SAVE
    made.following.not_saved(made.following.begin_save(), wait=True)
    assert made.following.next_step(True) is Step.RECEIVE
    assert made.starts() == []
    made.now += 1
    assert made.following.next_step(True) is Step.SAVE
    made.save()
    assert made.starts() == [(1, 8)]


def test_what_a_server_moved_is_not_stored_over_what_an_operator_has_set() -> None:
    made = moved()
    made.following.session.disconnected()
    made.open(generation=7)
    assert made.following.next_step(True) is Step.LOAD
    assert made.save() == {}
    made.found((1, Position(VERSION, ID_A, ID_A, 0, 0, (), LOG), 7))
    assert made.following.session.position(1).seqno == 0


def test_a_refusal_is_an_error_only_when_the_call_goes_on() -> None:
    made = owner()
    error = FencedError("another owner")
    made.following.fenced(error)
    made.now += 0.5
    made.following.fenced(error)
    made.open(generation=7)
    made.now += 0.9
    made.following.fenced(error)
    made.now += 1.0
    with pytest.raises(FencedError):
        made.following.fenced(error)


def test_a_bucket_that_was_made_anew_is_told_although_its_positions_are_gone() -> None:
    made = owner()
    made.take(frame((11, run_block(1, 0, 2))))
    made.following.acknowledge()
    assert made.save() == {1: 2}
    made.following.session.disconnected()
    made.open(generation=9, version=VERSION + 1)
    made.found(version=VERSION + 1)
    assert made.starts() == [(1, 2), (2, 0)]
    made.take(answers(rollback(1, 0, ID_B, (ID_B, 0)), started(2, 14, ID_B)))
    assert made.following.next_step(True) is Step.UNDO
    undo = made.following.rollback()
    assert (undo.from_seqno, undo.seqno, undo.rule) == (2, 0, "bucket_gone")


def test_a_rollback_that_nobody_wants_to_hear_of_is_an_error_again_and_again() -> None:
    made = World(ChangesOptions(only=Only([1]), resume=MemoryPositions(), on_rollback="fail"))
    made.following.load({1: Position(VERSION, ID_A, ID_A, 8, 8, (8,), LOG)})
    made.open()
    made.starts()
    made.take(answers(rollback(1, 3, ID_B, (ID_A, 0), (ID_B, 3))))
    for _ in range(2):
        assert made.following.next_step(True) is Step.UNDO
        with pytest.raises(RollbackError):
            made.following.rollback()
    assert made.following.position(1).failover_id == ID_A


def test_a_server_that_is_away_is_asked_for_soon_and_one_that_refuses_calls_seldom() -> None:
    made = World(ChangesOptions(only=Only([1])))
    pauses = [made.following.lost(UnavailableError("refused")) for _ in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    assert made.following.lost(TooManyError("too many calls")) == 30.0
    made.open()
    made.starts()
    waits = []
    for _ in range(8):
        made.take(answers(refused(1, NoRoomError("full"))))
        _, seconds = made.following.due()
        assert seconds is not None
        waits.append(seconds)
        made.now += seconds
        assert made.starts() == [(1, 0)]
    assert waits[-1] == pytest.approx(12.8)


def test_a_partition_that_began_now_at_0_goes_on_from_there() -> None:
    made = World(ChangesOptions(start="now", only=Only([1])))
    made.open()

    def starts() -> list[tuple[int, bool]]:
        messages, _ = made.following.due()
        return [(one.seqno, one.from_now) for m in messages for one in m.start.partitions]

    assert starts() == [(0, True)]
    assert not made.following.is_started
    made.take(answers(started(1, 7, ID_A)))
    assert made.following.is_started
    made.following.session.disconnected()
    made.open()
    assert starts() == [(0, False)]


def test_a_stored_position_tells_that_its_partition_began_now_at_0() -> None:
    options = ChangesOptions(start="now", only=Only([1]))
    made = World(options)
    made.open()
    made.following.due()
    answer = started(1, 7, ID_A)
    answer.started.start_seqno = 0
    made.take(answers(answer))
    stored = Position.from_json(made.following.position(1).to_json())
    again = World(options)
    again.following.load({1: stored})
    again.open()
    messages, _ = again.following.due()
    (start,) = (one for message in messages for one in message.start.partitions)
    assert (start.seqno, start.from_now) == (0, False)
    assert not any(start.HasField(name) for name in ("failover_id", "data_id"))


# What can be asked.


def test_a_partition_that_goes_on_is_no_problem_any_more() -> None:
    made = World(ChangesOptions(only=Only([1])))
    made.open()
    made.starts()
    made.take(answers(refused(1, NoRoomError("full", retriable=True))))
    assert set(made.following.status(True).problems) == {1}
    made.now += 60
    assert made.starts() == [(1, 0)]
    made.take(answers(started(1, 11, log=[(ID_A, 0)])))
    assert made.following.status(True).problems == {}


# What somebody has to mend.

DEAD = PartitionNotActiveError("partition 1 is dead")


def test_a_dead_partition_is_a_problem_and_the_others_go_on() -> None:
    made = World(ChangesOptions(only=Only([1, 2])))
    made.open()
    made.starts()
    made.take(answers(refused(1, DEAD), started(2, 12, log=[(ID_A, 0)])))
    made.take(frame((12, run_block(2, 0, 2))))
    made.following.acknowledge()
    problem = made.following.status(True).problems[1]
    assert (problem.reason, problem.words) == ("PARTITION_NOT_ACTIVE", "partition 1 is dead")


@pytest.mark.parametrize("how", ["refused", "ended"])
def test_it_is_asked_for_again_at_a_growing_interval_and_said_once(how: str) -> None:
    made = World(ChangesOptions(only=Only([1, 2])))
    made.open()
    made.starts()
    made.take(answers(started(2, 12, log=[(ID_A, 0)]), started(1, 11, log=[(ID_A, 0)])))
    waits = []
    made.take(ended("STORAGE_ERROR", (1, 11)))
    for _ in range(12):
        began = made.now
        _, seconds = made.following.due()
        assert seconds is not None
        made.now += seconds
        assert made.starts() == [(1, 0)]
        waits.append(made.now - began)
        if how == "refused":
            made.take(answers(refused(1, DEAD)))
        else:
            made.take(answers(started(1, 11, log=[(ID_A, 0)])), ended("STORAGE_ERROR", (1, 11)))
    assert waits == pytest.approx([2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300])
    reasons = ["STORAGE_ERROR"] + ["PARTITION_NOT_ACTIVE"] * (how == "refused")
    assert [words.split(": ")[1].split(" ")[0] for words in made.said] == reasons
    assert made.following.status(True).problems[1].attempts == 13


def test_what_is_mended_goes_on() -> None:
    made = World(ChangesOptions(only=Only([1, 2]), until="now"))
    made.open()
    made.starts()
    made.take(answers(refused(1, DEAD), started(2, 12, log=[(ID_A, 0)], until=2)))
    made.now += 2
    assert made.starts() == [(1, 0)]
    made.take(answers(started(1, 11, log=[(ID_A, 0)], until=2)))
    made.take(ended("FINISHED", (2, 12)), ended("FINISHED", (1, 11)))
    assert made.following.next_step(True) is Step.FINISH
    assert made.following.status(True).problems == {}


def test_an_end_is_an_error_when_only_what_cannot_be_read_is_left() -> None:
    made = World(ChangesOptions(only=Only([1, 2, 3]), until="now"))
    made.open()
    made.starts()
    made.take(answers(refused(1, DEAD), started(2, 12, log=[(ID_A, 0)], until=2)))
    made.take(answers(started(3, 13, log=[(ID_A, 0)], until=2)))
    made.take(frame((12, run_block(2, 0, 2))))
    made.following.acknowledge()
    made.take(ended("FINISHED", (2, 12)))
    with pytest.raises(
        PartitionNotActiveError, match="partition 1 cannot be read: partition 1 is dead; the others"
    ):
        made.take(ended("FINISHED", (3, 13)))


def test_a_stream_that_ends_twice_at_the_same_damage_has_come_to_its_end() -> None:
    made = World(ChangesOptions(only=Only([1]), until="now"))
    made.open()
    made.starts()
    made.take(answers(started(1, 11, log=[(ID_A, 0)], until=9)), ended("STORAGE_ERROR", (1, 11)))
    made.now += 2
    assert made.starts() == [(1, 0)]
    made.take(answers(started(1, 12, log=[(ID_A, 0)], until=9)))
    with pytest.raises(UprError, match="partition 1 cannot be read: storage_error"):
        made.take(ended("STORAGE_ERROR", (1, 12)))


def test_a_member_of_a_group_keeps_its_share_when_all_of_it_is_dead() -> None:
    made = member()
    made.take(ended("STORAGE_ERROR", (1, 11), (2, 12)))
    assert set(made.following.status(True).problems) == {1, 2}


def written(partition: int, seqno: int, version: int = VERSION) -> WriteToken:
    return WriteToken.of(version, [(partition, ID_A, seqno)])


def test_a_member_has_what_is_not_its_own_once_it_knows_what_is() -> None:
    made = World(ChangesOptions(resume=Group("g", member="m"), on_rollback="event"))
    made.open()
    assert not made.following.has(written(1, 3))
    made.assign(5, 1, 2)
    # It is this member's, and is not followed yet.
    assert not made.following.has(written(1, 3))
    assert made.following.has(written(9, 3))
    made.found((1, Position(VERSION, ID_A, ID_A, 3, 3, (3,), LOG), 4))
    assert made.following.has(written(1, 3))
    assert not made.following.has(written(1, 4))
    made.assign(6, 2)
    assert made.following.has(written(1, 4))


def test_what_was_written_to_another_bucket_is_never_there() -> None:
    # Older than its log, so that any seqno counts as part of it.
    log = FailoverLog.from_pairs([(ID_B, 5)])
    made = World(ChangesOptions(resume=MemoryPositions(), only=Only([1])))
    made.following.load({1: Position(VERSION, ID_B, ID_B, 8, 8, (8,), log)})
    made.open()
    assert made.following.has(written(1, 3))
    assert not made.following.has(written(1, 3, VERSION + 1))


def test_a_partition_that_is_behind_waits_alone_once_each_server_was_asked() -> None:
    made = World(ChangesOptions(only=Only([1, 2]), read_from="any"))
    behind = answers(started(1, 11), refused(2, BehindError("later"))).message
    left = []
    # Of three servers one is away.
    for endpoint in ("a:1", "b:1", "a:1", "b:1"):
        made.following.opened(wire.Opened(bucket_version=VERSION), endpoint, servers=3)
        assert made.starts() == [(1, 0), (2, 0)]
        outcome = made.following.take(behind, NO_HIGHS)
        left.append(outcome.lost is not None)
        if outcome.lost is None:
            break
        made.following.lost(outcome.lost)
    assert left == [True, True, False]
    made.take(frame((11, run_block(1, 0, 1))))
    made.now += 0.1
    assert made.starts() == [(2, 0)]
    made.take(answers(started(2, 12)))
    # All are started: the next one that is behind may be left at once.
    made.take(ended("BEHIND", (2, 12)))
    made.now += 100
    assert made.starts() == [(2, 0)]
    outcome = made.following.take(answers(refused(2, BehindError("later"))).message, NO_HIGHS)
    assert outcome.lost is not None
