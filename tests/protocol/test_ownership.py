"""Ownership: each rule of a change of owner in a scenario of its own; under faults in tests/simulation/test_ownership."""

from dataclasses import replace

import numpy as np
import pytest

from upr_protocol.errors import UprError
from upr_protocol.ownership import (
    GRANT_SECONDS,
    GRANTED_SECONDS,
    HELD,
    Ask,
    Claim,
    Follow,
    Grants,
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
    # Nor does a claim that never served keep out who served last.
    assert A not in SERVED.counted
    failed = SERVED.claimed(C, 9)
    assert Standing(A, SERVED, promised=4).claim(basis=failed).previous == Served(A, 3)
    with pytest.raises(UprError, match="not counted"):
        Standing("d", SERVED).claim(basis=failed)


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


def test_nobody_confirms_for_a_counted_server_that_was_given_up() -> None:
    claim, _ = claim_of_b()
    mine = held((3, 1, 5, 5), (3, 1, 5, 5))
    # C may have been the owner in between, known to nobody that is left.
    claim.give_up({C})
    step = served(claim, mine, (A, mine, True))
    assert step.record.all()


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


def test_each_partition_is_taken_of_the_server_that_has_most_of_it() -> None:
    claim, _ = claim_of_b()
    mine = held((3, 1, 5, 5), (3, 1, 5, 5))
    claim.promised(Promise(B, SERVED, mine, False))
    claim.promised(Promise(A, SERVED, held((3, 1, 9, 9), (3, 1, 4, 4)), False))
    claim.promised(Promise(C, SERVED, held((3, 1, 4, 4), (3, 1, 8, 8)), False))
    for has, source in ((mine, (A, [0], [9])), (held((3, 1, 9, 9), (3, 1, 5, 5)), (C, [1], [8]))):
        step = claim.next(has)
        assert isinstance(step, Follow)
        assert (step.directory, step.partitions.tolist(), step.seqnos.tolist()) == source


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


def granted(*directories: str, counted: frozenset[str], at: float = 10.0) -> Grants:
    grants = Grants(A, 0.0)
    grants.begin(replace(SERVED, counted=counted))
    for directory in directories:
        grants.given(directory, SERVED.epoch, at)
    return grants


def test_one_grant_of_a_counted_server_lets_the_owner_serve_for_a_while() -> None:
    grants = granted(B, counted=frozenset({B, C}))
    assert grants.may_serve(10.0 + GRANTED_SECONDS - 0.01)
    assert not grants.may_serve(10.0 + GRANTED_SECONDS)
    # An older question answered later, a server that does not count, and another epoch change nothing.
    grants.given(B, SERVED.epoch, 9.0)
    assert grants.may_serve(12.0)
    assert not granted("d", counted=frozenset({B})).may_serve(10.0)
    for epoch in (SERVED.epoch - 1, SERVED.epoch + 1):
        other = granted(counted=frozenset({B}))
        other.given(B, epoch, 10.0)
        assert not other.may_serve(10.0)
    # One that counts itself cannot be replaced without it.
    assert granted(counted=frozenset({A, B})).may_serve(10.0)


def test_who_steps_down_or_owns_anew_has_no_grant() -> None:
    grants = granted(B, counted=frozenset({B}))
    grants.end()
    assert not grants.may_serve(10.0)
    assert not Grants(A, 0.0).may_serve(10.0)
    grants = granted(B, counted=frozenset({B}))
    grants.begin(replace(SERVED, epoch=9, counted=frozenset({B})))
    assert not grants.may_serve(10.0)


def test_while_a_change_of_the_counted_ones_is_in_doubt_grants_must_do_for_either() -> None:
    grants = granted(B, counted=frozenset({B, C}))
    grants.counted = (frozenset({B, C}), frozenset({C}))
    assert not grants.may_serve(10.0)
    grants.given(C, SERVED.epoch, 10.0)
    assert grants.may_serve(10.0)


def test_what_is_left_is_of_the_newest_grant_in_each_set_that_may_be_counted() -> None:
    grants = granted(B, counted=frozenset({B, C}))
    grants.given(C, SERVED.epoch, 11.0)
    assert (grants.holds(B, 11.0), grants.holds(C, 11.0)) == (GRANTED_SECONDS - 1, GRANTED_SECONDS)
    assert grants.serving(11.0) == GRANTED_SECONDS
    grants.counted = (frozenset({B, C}), frozenset({B}))
    assert grants.serving(11.0) == GRANTED_SECONDS - 1
    # Its own word always holds, and nobody's where none was given.
    grants.counted = (frozenset({A, B}),)
    assert grants.serving(99.0) == GRANTED_SECONDS
    grants.counted = (frozenset({"d"}),)
    assert grants.serving(11.0) < 0


@pytest.mark.parametrize(
    ("counted", "enough", "too_few"),
    [
        ({B, C}, {B, C}, {B}),
        ({A, B}, {B}, set()),
        ({A}, set(), None),
        ({B}, {B}, set()),
        ({B, C, "d"}, {B, C}, {"d"}),
    ],
)
def test_an_owner_that_resumes_may_not_have_stored_the_last_change(
    counted: set[str], enough: set[str], too_few: set[str] | None
) -> None:
    """One less may be counted than it knows."""
    for given, serves in ((enough, True), (too_few, False)):
        if given is not None:
            grants = Grants(A, 0.0)
            grants.resume(replace(SERVED, counted=frozenset(counted)))
            for directory in given:
                grants.given(directory, SERVED.epoch, 10.0)
            assert grants.may_serve(10.0) == serves


def test_a_grant_is_given_to_no_older_epoch_and_holds_for_its_time() -> None:
    standing = Standing(B, SERVED, promised=SERVED.epoch, candidate=A)
    grants = Grants(B, 5.0)
    assert grants.left(4.0) == 1.0
    assert not grants.give(SERVED.epoch - 1, A, standing, 10.0)
    assert not grants.give(SERVED.epoch, C, standing, 10.0)
    assert grants.left(10.0) < 0
    assert grants.give(SERVED.epoch, A, standing, 10.0)
    assert grants.left(10.0) == GRANT_SECONDS
    promised = standing.promise(SERVED.epoch + 1, C)
    assert promised is not None
    assert not grants.give(SERVED.epoch, A, promised, 10.0)
    grants.wanted = SERVED.epoch + 1
    assert not grants.give(SERVED.epoch, A, standing, 10.0)
    assert grants.give(SERVED.epoch + 1, C, promised, 10.0)
    # The margin is what clocks may differ.
    assert GRANTED_SECONDS * 1.1 < GRANT_SECONDS


def test_a_silent_server_is_counted_no_more_when_nothing_is_lost_by_that() -> None:
    row = replace(SERVED, counted=frozenset({B, C}))
    needed = seqnos(5, 7)
    whole, less = seqnos(5, 9), seqnos(5, 6)
    assert row.shrunk({B}, needed, {C: whole}).counted == {C}
    # The owner has everything.
    assert row.shrunk({B}, needed, {C: less}).counted == {A, C}
    assert row.shrunk({B}, needed, {}).counted == {A, C}
    assert replace(row, counted=frozenset({B})).shrunk({B}, needed, {}).counted == {A}
    # One at a time, and never the owner.
    assert len(row.shrunk({B, C}, needed, {C: whole, B: whole}).counted) == 1
    kept = replace(row, counted=frozenset({A, B}))
    assert kept.shrunk({A, "d"}, needed, {}) == kept


def test_a_claim_is_above_the_row_that_it_claims() -> None:
    begun = SERVED.claimed(C, 9)
    row = Standing(B, SERVED).claim(basis=begun)
    assert (row.epoch, row.previous, row.counted) == (10, Served(A, 3), SERVED.counted)
