"""What an owner does about what it finds stored in the server."""

from dataclasses import replace

from upr_client.changes.groups import Ownership
from upr_protocol.failover import FailoverLog
from upr_protocol.position import Position
from upr_protocol.position_table import PositionTable
from upr_protocol.wire.codec import positions_to_messages
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

A = 0xA
LOG = FailoverLog.born(A)


def at(seqno: int) -> Position:
    return Position(7, A, A, seqno, seqno, (seqno,), LOG)


def found(*stored: tuple[int, int, int]) -> wire.LoadPositionsResponse:
    """What is stored: (partition, seqno, generation)."""
    response = wire.LoadPositionsResponse(bucket_version=7)
    for partition, seqno, generation in stored:
        (message,) = positions_to_messages(PositionTable.of({partition: at(seqno)}))
        message.generation = generation
        response.positions.append(message)
    return response


def owner(generation: int = 5) -> Ownership:
    ownership = Ownership("indexer", "")
    ownership.opened(wire.Opened(generation=generation), [1, 2], 0.0)
    return ownership


def test_what_is_found_first_holds() -> None:
    ownership = owner()
    assert ownership.to_load == {1, 2}
    assert ownership.found(found((1, 4, 3))) == {1: at(4), 2: None}
    assert ownership.to_load == set()


def test_what_it_stored_itself_is_nothing_new() -> None:
    ownership = owner()
    ownership.found(found())
    ownership.save_request("default", 7, {1: at(9)})
    ownership.stored({1: at(9)})
    ownership.opened(wire.Opened(generation=6), [1, 2], 0.0)
    assert ownership.found(found((1, 9, 5))) == {}


def test_what_another_or_an_operator_stored_holds() -> None:
    ownership = owner()
    ownership.found(found())
    ownership.save_request("default", 7, {1: at(9), 2: at(9)})
    ownership.stored({1: at(9), 2: at(9)})
    ownership.opened(wire.Opened(generation=8), [1, 2], 0.0)
    assert ownership.found(found((1, 3, 6))) == {1: at(3), 2: None}


def test_an_old_copy_of_the_servers_data_takes_nothing_back() -> None:
    ownership = owner()
    ownership.found(found((1, 4, 3)))
    ownership.save_request("default", 7, {1: at(9)})
    ownership.stored({1: at(9)})
    ownership.opened(wire.Opened(generation=6), [1, 2], 0.0)
    assert ownership.found(found((1, 4, 3))) == {}


def test_what_is_owned_no_more_is_not_known_any_more() -> None:
    ownership = owner()
    ownership.found(found((1, 4, 3)))
    ownership.lost([1])
    ownership.to_load.add(1)
    assert ownership.found(found((1, 4, 3))) == {1: at(4)}


def test_a_save_whose_answer_was_lost_is_nothing_new_when_it_is_found() -> None:
    ownership = owner()
    ownership.found(found((1, 4, 3)))
    ownership.save_request("default", 7, {1: at(9)})
    ownership.opened(wire.Opened(generation=6), [1, 2], 0.0)
    assert ownership.found(found((1, 9, 5))) == {}
    ownership.opened(wire.Opened(generation=8), [1, 2], 0.0)
    assert ownership.found(found((1, 8, 7))) == {1: at(8)}


def test_a_server_that_was_started_anew_and_has_nothing_takes_nothing_back() -> None:
    ownership = owner()
    ownership.found(found())
    ownership.save_request("default", 7, {1: at(9), 2: at(9)})
    ownership.stored({1: at(9), 2: at(9)})
    ownership.opened(wire.Opened(generation=6, server_id=2), [1, 2], 0.0)
    assert ownership.found(found((2, 3, 1))) == {}


def test_nothing_in_a_bucket_that_was_made_anew_is_no_new_beginning() -> None:
    ownership = owner()
    ownership.found(found())
    ownership.save_request("default", 7, {1: at(9)})
    ownership.stored({1: at(9)})
    ownership.opened(wire.Opened(generation=6), [1, 2], 0.0)
    nothing = wire.LoadPositionsResponse(bucket_version=8)
    assert ownership.found(nothing) == {}, "what is held of the old one is still to be undone"


def test_each_save_has_a_number_above_the_one_before() -> None:
    ownership = owner()
    numbers = [ownership.save_request("default", 7, {1: at(9)}).number for _ in range(3)]
    assert 0 < numbers[0] < numbers[1] < numbers[2]


def test_a_member_tells_of_the_bucket_before_for_what_it_begins_first_in_a_new_one() -> None:
    member = Ownership("indexer", "a")
    member.to_load.update((1, 2))
    assert member.found(found()) == {1: None, 2: None}
    member.lost([1, 2])
    anew = found((3, 4, 1))
    anew.bucket_version = 8
    member.to_load.update((1, 3, 4))
    given = member.found(anew)
    assert given[3] == replace(at(4), bucket_version=8)
    for partition in (1, 4):
        position = given[partition]
        assert position is not None
        assert position.bucket_version == 7
        assert position.seqno > 0
    # Once: what has been begun since is of the new one.
    member.lost([1, 3])
    member.to_load.update((1, 3))
    anew = wire.LoadPositionsResponse(bucket_version=8)
    assert member.found(anew) == {1: None, 3: None}
