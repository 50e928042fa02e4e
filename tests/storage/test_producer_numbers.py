"""Numbers of producers in a store while a replica joins: what the join replaces is kept until it ends."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.storage.stored_blocks import numbers_of, store_of
from upr.engine.partitions import ACTIVE, REPLICA
from upr.storage import keyspace
from upr.storage.keyspace import PRODUCER_GRAIN, PartitionRow, ProducerRow
from upr.storage.producer_numbers import counts_on
from upr.storage.store import Store
from upr_protocol.block import U64
from upr_protocol.failover import FailoverLog
from upr_protocol.limits import PARTITIONS
from upr_protocol.write_places import place_number

P, Q, ID = 3, 4, 77
NAME = b"w"
LOG = FailoverLog.born(ID)
COUNTS = counts_on(dict.fromkeys(range(PARTITIONS), LOG))


@pytest.fixture
def joining(store: Store) -> Store:
    """A store of a replica that was whole up to 100 when it began to join."""
    put(store, 5, 100)
    store.put_joining(up_to(100))
    return store


def up_to(seqno: int) -> U64:
    return np.full(PARTITIONS, seqno, np.uint64)


def put(store: Store, number: int, end: int, *partitions: int) -> None:
    """Store a producer's number, by default in two partitions."""
    rows = {p: ProducerRow(number, ID, end - 1, end) for p in partitions or (P, Q)}
    store.put_producers([(NAME, numbers_of(rows, 1))], COUNTS)


def undo(store: Store, seqno: int, log: FailoverLog = LOG) -> None:
    """Undo in one partition what is above a seqno."""
    row = PartitionRow(REPLICA, 1, 0, seqno, 0, log, seqno, seqno)
    store.write_recovery({P: row}, [], {}, up_to(seqno), undone={P})


def now(store: Store) -> dict[int, int]:
    return {p: row.number for p, row in store.producer_rows(NAME).items()}


def kept(store: Store) -> dict[int, int]:
    tables = [numbers.table for _, numbers in store.producers_after(b"", 2**20, replaced=True)]
    return {p: number for table in tables for p, number, *_ in table.tolist()}


def test_what_a_join_replaced_is_there_again_when_the_join_is_undone(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    put(store, 5, 100)
    store.put_joining(up_to(100))
    store.close()
    store = Store(tmp_path / "store")
    put(store, 9, 140)
    assert (now(store), kept(store)) == ({P: 9, Q: 9}, {P: 5, Q: 5})
    store.close()
    store = Store(tmp_path / "store")
    # By the log as it was: what was given under its id above is not there any more.
    undo(store, 100)
    assert (now(store), kept(store)) == ({P: 5, Q: 9}, {Q: 5})
    store.close()


def test_an_older_number_that_is_stored_behind_a_newer_one_of_the_join_is_kept(
    store: Store,
) -> None:
    """The tables told the newer one before the tail was flushed."""
    store.put_joining(up_to(100))
    put(store, 9, 140)
    put(store, 5, 100)
    assert (now(store), kept(store)) == ({P: 9, Q: 9}, {P: 5, Q: 5})


def test_the_largest_number_is_kept(joining: Store) -> None:
    for number, end in ((9, 140), (4, 90), (12, 160)):
        put(joining, number, end)
        assert kept(joining) == {P: 5, Q: 5}
    put(joining, 6, 95, P)
    assert kept(joining) == {P: 6, Q: 5}


def test_what_replaced_it_stays_where_it_is_not_undone(joining: Store) -> None:
    put(joining, 9, 140)
    undo(joining, 140)
    assert (now(joining), kept(joining)) == ({P: 9, Q: 9}, {P: 5, Q: 5})
    # The upstream never had what is kept.
    undo(joining, 80, FailoverLog.born(ID + 1))
    assert (now(joining), kept(joining)) == ({Q: 9}, {Q: 5})


def test_a_number_of_rows_that_never_came_gives_way_when_the_server_serves(joining: Store) -> None:
    """Nothing is cut off, because nothing is there: only the new failover record says that the number does not count."""
    put(joining, 9, 140)
    logs = {P: LOG.with_record(ID + 1, 100), Q: LOG}
    joining.put_logs({p: (ACTIVE, 2, 0, log) for p, log in logs.items()}, served=2)
    assert (now(joining), kept(joining)) == ({P: 5, Q: 9}, {})


def ends(store: Store) -> None:
    store.put_joining(None)


def serves(store: Store) -> None:
    store.put_logs({P: (ACTIVE, 2, 0, LOG), Q: (ACTIVE, 2, 0, LOG)}, served=2)


@pytest.mark.parametrize("end", [ends, serves])
def test_nothing_is_kept_when_the_join_is_over(
    joining: Store, end: Callable[[Store], None]
) -> None:
    put(joining, 9, 140)
    end(joining)
    assert (now(joining), kept(joining)) == ({P: 9, Q: 9}, {})
    put(joining, 10, 150)
    joining.put_joining(up_to(150))
    assert kept(joining) == {}
    # Both are of the join, or both were there before.
    for partition, seqno in ((5, 151), (6, 90)):
        put(joining, 9, seqno, partition)
        put(joining, 10, seqno + 1, partition)
    assert kept(joining) == {}


def test_a_new_join_begins_without_what_an_older_program_left(joining: Store) -> None:
    """One that does not know the table ended the join."""
    put(joining, 9, 140)
    joining._whole = None
    joining.put_joining(up_to(140))
    assert kept(joining) == {}


def test_a_join_that_goes_on_keeps_what_it_replaced(joining: Store) -> None:
    put(joining, 9, 140)
    joining.put_joining(up_to(100))
    assert kept(joining) == {P: 5, Q: 5}


def test_what_is_kept_of_a_producer_expires_with_it(joining: Store) -> None:
    put(joining, 9, 140)
    assert joining.forget_producers(3 * PRODUCER_GRAIN, 10).names == 1
    assert (now(joining), kept(joining)) == ({}, {})
    with joining._env.begin() as txn:
        assert txn.stat(joining._replaced)["entries"] == 0


def test_a_place_is_not_kept(joining: Store) -> None:
    """It has no seqnos, and stays when what was applied is undone."""
    for content in (b"a", b"b"):
        row = ProducerRow(place_number(7, content), 0, 0, 0)
        joining.put_producers([(NAME, numbers_of({PARTITIONS + 7: row}, 1))], lambda *_: True)
    assert kept(joining) == {}


def test_a_damaged_row_is_passed_over(joining: Store, caplog: pytest.LogCaptureFixture) -> None:
    put(joining, 9, 140)
    with joining._env.begin(write=True) as txn:
        txn.put(keyspace.producer_key(NAME, 0), b"x" * 38, db=joining._replaced)
    undo(joining, 100)
    assert (now(joining), kept(joining)) == ({P: 9, Q: 9}, {})
    assert "what is known of a producer is lost" in caplog.text
    # What is kept from now on takes its place.
    put(joining, 6, 100)
    assert kept(joining) == {P: 6, Q: 6}
