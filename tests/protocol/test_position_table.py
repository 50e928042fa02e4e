"""The table of positions: the same positions come back, and damage is found."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upr_client.testing.positions import positions_to_keep
from upr_protocol.consumer import Consumer
from upr_protocol.errors import InvalidArgumentError, PositionDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import FAILOVER_ID_MAX, SEQNO_MAX
from upr_protocol.position import Position
from upr_protocol.position_table import MAGIC, RECORD, ROW, UNKNOWN_HORIZON, PositionTable

SEQNOS = st.one_of(st.integers(0, 50), st.integers(0, SEQNO_MAX))
IDS = st.one_of(st.none(), st.integers(1, FAILOVER_ID_MAX))


@st.composite
def logs(draw: st.DrawFn) -> FailoverLog | None:
    ids = draw(st.lists(st.integers(1, FAILOVER_ID_MAX), unique=True, max_size=4))
    seqnos = sorted(draw(st.lists(SEQNOS, min_size=len(ids), max_size=len(ids))))
    return FailoverLog.from_pairs(zip(ids, seqnos, strict=True)) if ids else None


@st.composite
def positions(draw: st.DrawFn) -> Position:
    seqno = draw(SEQNOS)
    markers = draw(st.lists(st.integers(0, seqno), unique=True, max_size=5).map(sorted))
    horizon = draw(st.one_of(st.none(), st.integers(seqno, SEQNO_MAX)))
    version = draw(st.integers(0, 2**64 - 1))
    name = draw(st.sampled_from(["", "default", "ä\ud800𝄞"]))
    ids = draw(IDS), draw(IDS)
    return Position(version, *ids, seqno, horizon, tuple(markers), draw(logs()), name)


MANY = st.dictionaries(st.integers(0, 1023), positions(), max_size=6)


@settings(max_examples=40)
@given(MANY, MANY, st.sets(st.integers(0, 1023)))
def test_a_table_is_its_positions(
    older: dict[int, Position], newer: dict[int, Position], wanted: set[int]
) -> None:
    table = PositionTable.of(older)
    assert table == older
    assert list(table) == sorted(older)
    assert PositionTable.decode(table.encode()) == older
    both = table.updated(PositionTable.of(newer))
    assert both == {**older, **newer}
    assert list(both) == sorted({*older, *newer})
    assert PositionTable.decode(both.encode()) == both
    some = both.only(np.array(sorted(wanted | set(list(both)[:2])), np.int64))
    assert some == {p: at for p, at in both.items() if p in wanted or p in list(both)[:2]}
    assert PositionTable.decode(some.encode()) == some
    assert 1024 not in both


@settings(max_examples=40)
@given(MANY, st.lists(st.integers(0, 1023), unique=True, max_size=6))
def test_a_consumer_gives_back_the_positions_that_it_was_given(
    stored: dict[int, Position], more: list[int]
) -> None:
    given_some = {p: replace(at, bucket="default") for p, at in stored.items()}
    consumer = Consumer({*stored, *more}, given_some, bucket="default", lasting=True)
    fresh = Position.fresh(bucket="default")
    # A marker at 0 is none: starting from 0 needs none.
    kept = {
        p: replace(at, markers=tuple(m for m in at.markers if m)) for p, at in given_some.items()
    }
    everything = {**dict.fromkeys(more, fresh), **kept}
    assert consumer.positions(consumer.partitions) == everything
    assert {p: consumer.position(p) for p in everything} == everything
    # Anew, in the other order, and each from what the other had.
    consumer.unfollow(everything)
    turned = dict(zip(everything, reversed(everything.values()), strict=True))
    consumer.follow(turned)
    assert consumer.positions(consumer.partitions) == turned


def test_what_is_asked_for_is_of_the_types_that_were_given() -> None:
    kept = dict(enumerate(positions_to_keep().values()))
    table = PositionTable.decode(PositionTable.of(kept).encode())
    for partition, at in kept.items():
        found = table[partition]
        assert found.to_json() == at.to_json()
        assert [type(marker) for marker in found.markers] == [int] * len(at.markers)


def test_a_partition_that_does_not_exist_has_no_place_in_a_table() -> None:
    for partition in (-1, 1024):
        with pytest.raises(InvalidArgumentError, match="partition"):
            PositionTable.of({partition: Position.fresh()})


def test_each_byte_that_is_flipped_or_missing_is_found() -> None:
    kept = positions_to_keep()
    del kept["the largest of everything"]
    whole = PositionTable.of(dict(enumerate(kept.values()))).encode()
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1 << index % 8
        for data in (bytes(changed), whole[:index], whole + whole[:1]):
            with pytest.raises(PositionDamagedError):
                PositionTable.decode(data)


ROW_OF_5 = (5, 0, 2, 1, 1, 7, 7, 9, 9)


def damaged(name: str, value: int, row: int = 0) -> bytes:
    rows = np.array([ROW_OF_5, (8, 0, 0, 2, 1, 7, 0, 0, UNKNOWN_HORIZON)], ROW)
    markers = np.array([3, 9], np.uint64)
    records = np.array([(7, 0), (7, 0), (8, 4)], RECORD)
    if name == "marker":
        markers[row] = value
    elif name.startswith("record "):
        records[name.removeprefix("record ")][row] = value
    else:
        rows[name][row] = value
    return PositionTable(rows, ["b"], markers, records).encode()


@pytest.mark.parametrize(
    ("field", "value", "row", "words"),
    [
        ("partition", 1024, 1, "partition 1024 is a partition that does not exist"),
        ("partition", 5, 1, "partition 5 is out of order"),
        ("bucket", 1, 1, "partition 8 has a bucket without a name"),
        ("seqno", 2**48, 0, "partition 5 has a seqno out of range"),
        ("horizon", 8, 0, "partition 5 has a horizon out of range, or below its seqno"),
        ("horizon", 2**48, 0, "partition 5 has a horizon out of range"),
        ("markers", 3, 0, "it has 2 markers, not as many as its rows say"),
        ("records", 2**31, 1, "it has 3 records, not as many as its rows say"),
        ("marker", 10, 1, "partition 5 has markers that are not ascending, or above its seqno"),
        ("marker", 9, 0, "partition 5 has markers that are not ascending"),
        ("record failover_id", 0, 0, "partition 5 has a failover log that is none"),
        ("record seqno", 2**48, 2, "partition 8 has a failover log that is none"),
        ("record seqno", 5, 1, "partition 8 has a failover log that is none"),
        ("record failover_id", 7, 2, "partition 8 has a failover log with an id twice"),
    ],
)
def test_a_position_that_contradicts_itself_is_named(
    field: str, value: int, row: int, words: str
) -> None:
    with pytest.raises(PositionDamagedError, match=words) as caught:
        PositionTable.decode(damaged(field, value, row))
    assert "start from zero" in caught.value.hint


def test_the_table_that_the_others_are_made_of_is_a_good_one() -> None:
    assert list(PositionTable.decode(damaged("seqno", 9))) == [5, 8]


@pytest.mark.parametrize(
    "names", [b"[1]", b'{"b": 1}', b"nope", b"[" * 100_000, b'["%s"]' % (b"b" * 201)]
)
def test_names_that_are_none_are_told(names: bytes) -> None:
    rest = struct.pack("<IIII", len(names), 0, 0, 0) + names
    with pytest.raises(PositionDamagedError, match="names of buckets"):
        PositionTable.decode(MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest)
