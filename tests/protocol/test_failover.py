"""Failover ids, records and logs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model import ModelPartition
from upr_protocol.errors import InvalidArgumentError
from upr_protocol.failover import (
    FailoverLog,
    FailoverRecord,
    check_failover_id,
    check_partition,
    check_seqno,
    format_failover_id,
    parse_failover_id,
)
from upr_protocol.limits import FAILOVER_LOG_RECORDS, SEQNO_MAX

A, B, C = 0xA, 0xB, 0xC


def log(*pairs: tuple[int, int]) -> FailoverLog:
    return FailoverLog.from_pairs(pairs)


@given(st.integers(1, 2**64 - 1))
def test_an_id_survives_as_text(failover_id: int) -> None:
    text = format_failover_id(failover_id)
    assert len(text) == 16
    assert text == text.lower()
    assert parse_failover_id(text) == parse_failover_id("0x" + text.upper()) == failover_id


def test_short_ids_are_read() -> None:
    assert parse_failover_id("1") == 1
    assert parse_failover_id("0Xff") == 255


@pytest.mark.parametrize(
    "text",
    ["", "0x", "0", "0000000000000000", "x1", "1 ", "-1", "1_0", "g", "1" * 17, "0x0x1", "\u0661"],
)
def test_other_text_is_no_id(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_failover_id(text)


@pytest.mark.parametrize("number", [0, -1, 2**64])
def test_ids_have_a_range(number: int) -> None:
    for check in (check_failover_id, format_failover_id):
        with pytest.raises(InvalidArgumentError, match=f"{number}.*{2**64 - 1}"):
            check(number)
    assert check_failover_id(1) == 1
    assert check_failover_id(2**64 - 1) == 2**64 - 1


@pytest.mark.parametrize("number", [-1, 2**48, 2**64])
def test_seqnos_have_a_range(number: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"horizon is {number}.*{SEQNO_MAX}") as caught:
        check_seqno(number, "horizon")
    assert "never a rollback" in str(caught.value)
    assert check_seqno(0) == 0
    assert check_seqno(2**48 - 1) == 2**48 - 1


@pytest.mark.parametrize("number", [-1, 1024])
def test_partitions_have_a_range(number: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{number}.*1023"):
        check_partition(number)
    assert (check_partition(0), check_partition(1023)) == (0, 1023)


def test_only_integers_are_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match="integer"):
        check_seqno(1.0)  # type: ignore[arg-type]


def test_a_partition_is_born_with_one_record_at_0() -> None:
    born = FailoverLog.born(A)
    assert born.to_pairs() == [(A, 0)]
    assert born.newest == FailoverRecord(A, 0)
    assert len(born) == 1
    assert A in born
    assert B not in born
    assert born.next_after(A) is None
    with pytest.raises(KeyError):
        born.next_after(B)


def test_a_log_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        FailoverLog(())
    with pytest.raises(InvalidArgumentError, match="must not be below"):
        log((A, 0), (B, 2), (C, 1))
    with pytest.raises(InvalidArgumentError, match="repeats"):
        log((A, 0), (B, 2), (A, 3))
    with pytest.raises(InvalidArgumentError):
        log((0, 0))
    with pytest.raises(InvalidArgumentError):
        log((A, 2**48))
    assert log((A, 7), (B, 7)).to_pairs() == [(A, 7), (B, 7)]


def test_records_above_a_new_one_go_and_equal_ones_stay() -> None:
    before = log((A, 0), (B, 100), (C, 200))
    assert before.with_record(9, 200).to_pairs() == [(A, 0), (B, 100), (C, 200), (9, 200)]
    assert before.with_record(9, 199).to_pairs() == [(A, 0), (B, 100), (9, 199)]
    assert before.with_record(9, 100).to_pairs() == [(A, 0), (B, 100), (9, 100)]
    assert before.with_record(9, 99).to_pairs() == [(A, 0), (9, 99)]
    assert before.with_record(9, 0).to_pairs() == [(A, 0), (9, 0)]
    assert before.to_pairs() == [(A, 0), (B, 100), (C, 200)]


def test_a_new_record_needs_a_new_id() -> None:
    with pytest.raises(InvalidArgumentError, match="repeats"):
        log((A, 0), (B, 5)).with_record(A, 9)
    # The id of a record that goes in the same step is free again.
    assert log((A, 0), (B, 5)).with_record(B, 4).to_pairs() == [(A, 0), (B, 4)]


def test_the_oldest_records_leave_first() -> None:
    grown = FailoverLog.born(1)
    for number in range(2, FAILOVER_LOG_RECORDS + 4):
        grown = grown.with_record(number, number)
    assert len(grown) == FAILOVER_LOG_RECORDS == 25
    assert grown.to_pairs()[0] == (4, 4)
    assert grown.newest == FailoverRecord(28, 28)
    assert grown.with_record(99, 99, limit=2).to_pairs() == [(28, 28), (99, 99)]
    assert grown.with_record(99, 99, limit=1).to_pairs() == [(99, 99)]


def test_next_after_is_the_record_right_after() -> None:
    three = log((A, 0), (B, 7), (C, 7))
    assert three.next_after(A) == FailoverRecord(B, 7)
    assert three.next_after(B) == FailoverRecord(C, 7)
    assert three.next_after(C) is None
    assert [record.seqno for record in three] == [0, 7, 7]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 5))
def test_logs_grow_as_in_the_model(seqnos: list[int], limit: int) -> None:
    model = ModelPartition(1, log_limit=limit)
    ours = FailoverLog.born(1)
    for number, seqno in enumerate(seqnos, start=2):
        while model.high < 40:
            model.write(b"k", b"v")
        model.restart_unclean(seqno, number)
        ours = ours.with_record(number, seqno, limit)
        assert ours.to_pairs() == model.log


def test_a_seqno_was_given_under_the_newest_record_below_it() -> None:
    known = log((A, 0), (B, 5), (C, 5))
    assert [known.id_at(seqno) for seqno in (1, 5, 6, SEQNO_MAX)] == [A, A, C, C]
    assert log((B, 5), (C, 8)).id_at(2) == B
