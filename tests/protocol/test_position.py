"""Positions: what they allow, how they roll back, how they are stored."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.errors import InvalidArgumentError, PositionDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import SEQNO_MAX
from upr_protocol.position import Position

A, B, C = 0xA, 0xB, 0xFFFF_FFFF_FFFF_FFFF
LOG = FailoverLog.from_pairs([(A, 0), (B, 426)])
AT_434 = Position(7, A, A, 434, 440, (350, 418, 430), FailoverLog.born(A))

IDS = st.integers(1, 2**64 - 1)


@st.composite
def positions(draw: st.DrawFn) -> Position:
    seqno = draw(st.integers(0, SEQNO_MAX))
    records = sorted(draw(st.lists(st.integers(0, SEQNO_MAX), max_size=4)))
    ids = draw(st.lists(IDS, min_size=len(records), max_size=len(records), unique=True))
    return Position(
        draw(st.integers(0, 2**64 - 1)),
        draw(st.none() | IDS),
        draw(st.none() | IDS),
        seqno,
        draw(st.none() | st.integers(seqno, SEQNO_MAX)),
        tuple(sorted(draw(st.sets(st.integers(0, seqno), max_size=5)))),
        FailoverLog.from_pairs(zip(ids, records, strict=True)) if records else None,
    )


def test_a_fresh_position_has_nothing() -> None:
    assert Position.fresh() == Position(0, None, None, 0, 0, (), None)
    assert Position.fresh(9).bucket_version == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket_version", -1),
        ("bucket_version", 2**64),
        ("failover_id", 0),
        ("data_id", 2**64),
        ("seqno", -1),
        ("seqno", 2**48),
        ("horizon", 433),
        ("horizon", 2**48),
        ("markers", (418, 350)),
        ("markers", (418, 418)),
        ("markers", (435,)),
    ],
)
def test_a_position_is_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        replace(AT_434, **{field: value})


def test_a_position_may_have_lost_what_it_knew() -> None:
    lost = replace(AT_434, failover_id=None, data_id=None, horizon=None, log=None, markers=())
    assert lost.seqno == 434


def test_rolling_back_to_a_marker() -> None:
    assert AT_434.rolled_back(418, B, LOG) == Position(7, B, B, 418, 418, (350, 418), LOG)
    assert AT_434.rolled_back(350, B, LOG) == Position(7, B, B, 350, 350, (350,), LOG)


def test_rolling_back_to_0_leaves_nothing() -> None:
    assert AT_434.rolled_back(0, B, LOG) == Position(7, B, None, 0, 0, (), LOG)


def test_nothing_to_undo_keeps_the_horizon() -> None:
    kept = AT_434.rolled_back(434, B, LOG)
    assert kept == replace(AT_434, failover_id=B, data_id=B, log=LOG)
    assert kept.horizon == 440
    assert replace(AT_434, horizon=None).rolled_back(434, B, LOG).horizon is None
    at_marker = replace(AT_434, seqno=430, horizon=None).rolled_back(430, B, LOG)
    assert (at_marker.horizon, at_marker.markers) == (430, (350, 418, 430))
    assert Position.fresh().rolled_back(0, B, LOG) == Position(0, B, None, 0, 0, (), LOG)


@pytest.mark.parametrize("seqno", [417, 435, 1, -1])
def test_no_other_seqno_is_a_place_to_resume_from(seqno: int) -> None:
    with pytest.raises(InvalidArgumentError):
        AT_434.rolled_back(seqno, B, LOG)


def test_the_log_of_a_rollback_fits_its_newest_id() -> None:
    with pytest.raises(InvalidArgumentError, match="newest"):
        AT_434.rolled_back(418, A, LOG)
    with pytest.raises(InvalidArgumentError):
        AT_434.rolled_back(418, 0, None)


def test_without_a_log_only_what_is_still_true_of_the_old_one_stays() -> None:
    position = replace(AT_434, failover_id=B, log=LOG)
    assert position.rolled_back(418, B, None).log == LOG
    assert position.rolled_back(418, A, None).log == FailoverLog.born(A)
    assert position.rolled_back(418, C, None).log is None
    assert replace(position, log=None).rolled_back(418, B, None).log is None


@given(positions())
def test_a_position_survives_its_storing(position: Position) -> None:
    assert Position.from_json(position.to_json()) == position
    assert Position.from_document(position.to_document()) == position


def test_ids_are_stored_as_hex_and_seqnos_as_numbers() -> None:
    assert replace(AT_434, bucket_version=C, bucket="kö").to_document() == {
        "format": 1,
        "bucket": "kö",
        "bucket_version": "ffffffffffffffff",
        "failover_id": "000000000000000a",
        "data_id": "000000000000000a",
        "seqno": 434,
        "horizon": 440,
        "markers": [350, 418, 430],
        "log": [["000000000000000a", 0]],
    }


@pytest.mark.parametrize("field", list(AT_434.to_document()))
@pytest.mark.parametrize(
    "value",
    [1.5, True, "g" * 16, "0" * 17, -1, 2**64, [-1], [1, 0], [[]], [["a", "b"]], [["0", 0]], {}],
    ids=repr,
)
def test_a_malformed_field_is_named(field: str, value: object) -> None:
    document = AT_434.to_document()
    # A name of a bucket may be any text, only not so long.
    document[field] = value * 20 if field == "bucket" and isinstance(value, str) else value
    with pytest.raises(PositionDamagedError, match=field):
        Position.from_document(document)


def test_a_position_that_was_stored_without_the_name_of_its_bucket_is_read() -> None:
    document = replace(AT_434, bucket="orders").to_document()
    del document["bucket"]
    assert Position.from_document(document) == AT_434


@pytest.mark.parametrize("field", sorted(AT_434.to_document().keys() - {"bucket"}))
def test_a_missing_field_is_named(field: str) -> None:
    document = AT_434.to_document()
    del document[field]
    with pytest.raises(PositionDamagedError, match=f"{field} is missing"):
        Position.from_document(document)


def test_contradicting_fields_are_named() -> None:
    for field, value in (("horizon", 433), ("markers", [435]), ("log", [["b", 2], ["a", 1]])):
        with pytest.raises(PositionDamagedError, match=field) as caught:
            Position.from_document(AT_434.to_document() | {field: value})
        assert "start from zero" in caught.value.hint


def test_what_is_not_known_is_ignored_and_a_newer_format_is_not() -> None:
    assert Position.from_document(AT_434.to_document() | {"note": 1}) == AT_434
    with pytest.raises(PositionDamagedError, match="must be 1"):
        Position.from_document(AT_434.to_document() | {"format": 2})
    with pytest.raises(PositionDamagedError, match="object"):
        Position.from_document([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "{", b"\xff", b"\0" * 40, "[" * 100_000, "1" * 9999, "[]", "7"],
    ids=lambda t: repr(t[:3]),
)
def test_a_text_that_is_no_position_is_damaged(text: str | bytes) -> None:
    with pytest.raises(PositionDamagedError, match="position"):
        Position.from_json(text)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(PositionDamagedError):
        Position.from_json(data)
