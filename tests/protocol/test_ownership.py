"""Ownership: each rule of a change of owner in a scenario of its own; under faults in tests/simulation/test_owning."""

from dataclasses import replace

import numpy as np
import pytest

from upr_protocol.errors import UprError
from upr_protocol.ownership import (
    HELD,
    Ask,
    Claim,
    Follow,
    Held,
    Outdated,
    Promise,
    Row,
    Serve,
    Served,
    Standing,
    first_row,
)

A, B, C = "a", "b", "c"
SERVED = Row(3, 2, A, True, frozenset({B, C}))


def held(*rows: tuple[int, int, int, int]) -> Held:
    """What a server holds: (epoch, id, marker, high) of each partition."""
    return np.array(list(rows), HELD)


def seqnos(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return np.array(values, np.uint64)


def claim_of_b(basis: Row = SERVED) -> tuple[Claim, Row]:
    row = Standing(B, basis).claim()
    return Claim(basis, row), row


def served(claim: Claim, mine: Held, *others: tuple[str, Held, bool]) -> Serve:
    """Let all promise, and return how the claim ends."""
    claim.promised(Promise(B, SERVED, mine, False))
    for directory, theirs, confirmed in others:
        claim.promised(Promise(directory, SERVED, theirs, confirmed))
    claim.asked({A})
    step = claim.next(mine)
    assert isinstance(step, Serve)
    return step


def test_a_claim_takes_the_next_epoch_and_names_who_served_last() -> None:
    row = Standing(B, SERVED, promised=7, candidate=C).claim()
    assert (row.epoch, row.owner, row.serving, row.counted) == (8, B, False, SERVED.counted)
    assert row.previous == Served(A, 3)
    assert Standing(B, SERVED).claim(above=20).epoch == 21
    # One that never served does not come in between.
    assert row.claimed(C, 9).previous == Served(A, 3)


def test_only_a_counted_server_or_the_owner_itself_claims() -> None:
    assert Standing(A, SERVED).claim().owner == A
    with pytest.raises(UprError, match="not counted") as refused:
        Standing("new disk of a", SERVED).claim()
    assert refused.value.reason == "NOT_COUNTED"
    assert Standing("d", SERVED).claim(force=True).owner == "d"


def test_an_epoch_is_promised_once_and_never_below_another() -> None:
    standing = Standing(C, SERVED)
    after = standing.promise(5, B)
    assert after is not None
    assert (after.promised, after.candidate) == (5, B)
    assert after.promise(5, B) == after
    assert after.promise(5, A) is None
    assert after.promise(4, A) is None
    assert standing.promise(2, B) is None
    assert standing.promise(3, B) is None, "the owner of that epoch is another one"
    assert standing.promise(3, A) is not None


def test_an_owner_that_promised_or_met_a_higher_epoch_owns_no_more() -> None:
    owner = Standing(A, SERVED, promised=3, candidate=A)
    assert owner.owns
    promised = owner.promise(4, B)
    assert promised is not None
    assert not promised.owns
    assert not owner.met(4).owns
    assert owner.met(3).owns
    assert not owner.learned(SERVED.claimed(B, 4).serves()).owns
    assert not Standing(B, SERVED).owns


def test_of_two_owners_of_one_epoch_neither_owns() -> None:
    other = replace(SERVED, owner=B)
    for one, two in ((SERVED, other), (other, SERVED)):
        standing = Standing(one.owner, one)
        assert standing.owns
        contested = standing.learned(two)
        assert not contested.owns
        assert contested.row == one
        assert contested.claim().epoch > contested.promised
        assert contested.learned(two) == contested


def test_an_older_row_changes_nothing_and_a_promise_stays() -> None:
    newer = SERVED.counting("d")
    standing = Standing(B, newer)
    assert standing.learned(SERVED) == standing
    promised = Standing(B, SERVED, promised=9, candidate=C)
    assert promised.learned(newer) == replace(promised, row=newer)


def test_data_is_taken_from_who_serves_in_an_epoch_not_below_ones_own() -> None:
    standing = Standing(C, SERVED, promised=5, candidate=B)
    assert standing.may_follow(5, serves=True)
    assert not standing.may_follow(4, serves=True)
    assert not standing.may_follow(5, serves=False)


def test_who_served_last_confirms_only_for_the_epoch_that_it_served() -> None:
    _, row = claim_of_b()
    assert Standing(A, SERVED).confirms(row, 3)
    assert not Standing(A, SERVED).confirms(row, 2)
    assert not Standing(A, SERVED).confirms(row, 0)
    assert not Standing("new disk of a", SERVED).confirms(row, 3)


def test_all_counted_are_heard_and_who_served_last_is_asked_too() -> None:
    claim, _ = claim_of_b()
    mine = held((3, 1, 5, 5))
    assert claim.next(mine) == Ask(frozenset({A, B, C}))
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(A, SERVED, mine, True))
    assert claim.missing == {C}
    assert claim.next(mine) == Ask(frozenset({C}))
    claim.promised(Promise(C, SERVED, mine, False))
    assert isinstance(claim.next(mine), Serve)


def test_who_served_last_is_asked_once_though_it_is_not_counted() -> None:
    basis = replace(SERVED, counted=frozenset({B}))
    claim, _ = claim_of_b(basis)
    mine = held((3, 1, 5, 5))
    claim.promised(Promise(B, basis, mine, False))
    assert claim.next(mine) == Ask(frozenset({A}))
    claim.asked({A})
    assert isinstance(claim.next(mine), Serve)


def test_force_goes_on_without_those_given_up_and_counts_them_no_more() -> None:
    claim, _ = claim_of_b()
    claim.give_up({A, B, C})
    claim.asked({A, C})
    mine = held((3, 1, 5, 5))
    claim.promised(Promise(B, SERVED, mine, False))
    step = claim.next(mine)
    assert isinstance(step, Serve)
    assert step.row.counted == {B}


def test_no_record_where_the_last_owner_confirms_that_nothing_is_missing() -> None:
    mine = held((3, 1, 5, 5), (3, 1, 5, 5), (3, 1, 4, 5), (2, 1, 5, 5))
    theirs = mine.copy()
    for confirmed, record in ((True, [False, False, True, False]), (False, [True] * 4)):
        step = served(claim_of_b()[0], mine, (A, theirs, confirmed), (C, mine, False))
        assert step.record.tolist() == record
        assert step.marker.tolist() == [5, 5, 4, 5]
        assert step.cut_off(mine).tolist() == [False, False, True, False]


def test_the_new_owner_counts_itself() -> None:
    basis = replace(SERVED, counted=frozenset({C}))
    row = Standing(A, basis).claim().serves()
    assert row.serving
    assert row.counted == {A, C}
    assert row.served == Served(A, 4)


def test_the_epoch_of_the_row_decides_before_the_marker() -> None:
    claim, _ = claim_of_b()
    mine = held((2, 1, 90, 90), (3, 2, 5, 5))
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(C, SERVED, held((3, 2, 7, 9), (3, 2, 4, 4)), False))
    claim.asked({A})
    step = claim.next(mine)
    assert isinstance(step, Follow)
    assert (step.directory, step.partitions.tolist(), step.seqnos.tolist()) == (C, [0], [7])


def test_a_log_is_taken_over_also_where_no_data_is_lacking() -> None:
    claim, _ = claim_of_b()
    mine = held((3, 1, 5, 5))
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(C, SERVED, mine, False))
    claim.promised(Promise(A, SERVED, held((3, 2, 5, 5)), True))
    step = claim.next(mine)
    assert isinstance(step, Follow)
    assert step.directory == A
    assert isinstance(claim.next(held((3, 2, 5, 5))), Serve)


def test_of_a_confirming_owner_all_rows_are_gathered() -> None:
    claim, _ = claim_of_b()
    mine = held((3, 1, 5, 5))
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(C, SERVED, held((3, 1, 8, 8)), False))
    claim.promised(Promise(A, SERVED, held((3, 1, 5, 7)), True))
    step = claim.next(mine)
    assert isinstance(step, Follow)
    assert (step.directory, step.seqnos.tolist()) == (A, [7])
    # Inside a stretch: what is above the marker never was a state, so there is a record.
    end = claim.next(held((3, 1, 5, 7)))
    assert isinstance(end, Serve)
    assert end.record.all()


def test_what_a_server_cannot_give_is_taken_from_the_next_best_under_a_record() -> None:
    claim, _ = claim_of_b()
    mine, nothing = held((3, 1, 5, 5), (3, 1, 5, 5)), (0, 0, 0, 0)
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(C, SERVED, held((3, 1, 8, 8), (3, 1, 5, 5)), False))
    # It confirms, and one of its partitions is dead.
    claim.promised(Promise(A, SERVED, held(nothing, (3, 1, 5, 5)), True))
    step = claim.next(mine)
    assert isinstance(step, Follow)
    assert (step.directory, step.partitions.tolist(), step.seqnos.tolist()) == (C, [0], [8])
    end = claim.next(held((3, 1, 8, 8), (3, 1, 5, 5)))
    assert isinstance(end, Serve)
    assert end.record.tolist() == [True, False]


def test_a_newer_row_or_a_higher_promise_ends_the_claim() -> None:
    claim, row = claim_of_b()
    newer = SERVED.counting("d")
    claim.promised(Promise(C, newer, held((3, 1, 5, 5)), False))
    assert claim.next(held((3, 1, 5, 5))) == Outdated(newer, row.epoch)
    other, _ = claim_of_b()
    other.refused(SERVED, 12)
    assert other.next(held((3, 1, 5, 5))) == Outdated(SERVED, 12)


def test_one_is_counted_no_more_when_another_holds_what_was_acknowledged() -> None:
    row = replace(SERVED, counted=frozenset({A, B, C}))
    holding = {B: seqnos(5, 9), C: seqnos(9, 5)}
    assert row.without(A, seqnos(5, 5), holding, {B, C}) == replace(
        row, revision=3, counted=frozenset({B, C})
    )
    # Each lacks something.
    assert row.without(A, seqnos(6, 6), holding, {B, C}) is None
    # C may not know of B.
    assert row.without(A, seqnos(5, 5), holding, {B}) is None
    # The owner holds everything itself.
    assert row.without(C, seqnos(99, 99), holding, {B}) is not None
    assert first_row(A).without(A, seqnos(0), {}, set()) is None


def test_the_owner_counts_in_the_place_of_one_that_is_gone_for_good() -> None:
    row = replace(SERVED, counted=frozenset({B, C}))
    assert row.owner == A
    forgot = row.forgetting(C)
    assert (forgot.counted, forgot.age > row.age) == (frozenset({A, B}), True)
