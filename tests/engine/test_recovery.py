"""Recovery with a stretch in the journal, as replicas will write it: the record's seqno is not the high one."""

from dataclasses import replace

from tests.raw import all_rows
from upr.engine.partitions import ACTIVE
from upr.engine.recovery import Recovered, recover
from upr.storage.journal import Commit, JournalEntry
from upr.storage.keyspace import PartitionRow
from upr_protocol.block import Block, make_runs, sealed
from upr_protocol.failover import FailoverLog
from upr_protocol.rows import build_block
from upr_protocol.wire.codec import decode_block, encode_block

CUT, WHOLE = 5, 6


def run(partition: int, start: int, end: int, horizon: int) -> Block:
    rows = range(start + 1, end + 1)
    block = build_block([b"%d" % i for i in rows], [b"v"] * len(rows))
    return sealed(replace(block, runs=make_runs([partition], len(rows), start, end, horizon, 1)))


def commits(*blocks: Block) -> list[Commit]:
    return [
        Commit(number, (JournalEntry(b"", 0, encode_block(block)),))
        for number, block in enumerate(blocks, start=1)
    ]


def stored() -> dict[int, PartitionRow]:
    return {p: PartitionRow(ACTIVE, 1, 0, 0, 0, FailoverLog.born(p + 1)) for p in range(1024)}


IDS = iter(range(10_000, 100_000))


def recovered(
    rows: dict[int, PartitionRow], journal: list[Commit], *, proven: bool = False
) -> Recovered:
    return recover(rows, lambda _: 0, journal, proven=proven, new_id=lambda: next(IDS))


# Up to 3 is whole; 4 to 9 are two of the three runs of a stretch that ends at 12.
JOURNAL = commits(run(CUT, 0, 3, 3), run(WHOLE, 0, 2, 2), run(CUT, 3, 6, 12), run(CUT, 6, 9, 12))


def test_a_record_is_at_the_last_complete_marker_and_what_is_above_goes() -> None:
    found = recovered(stored(), JOURNAL)
    table = found.partitions
    assert [record.seqno for record in table.logs[CUT]] == [0, 3]
    assert [record.seqno for record in table.logs[WHOLE]] == [0, 2]
    assert int(table.high[CUT]) == int(table.stored[CUT]) == found.rows[CUT].stored_high == 3
    assert [(p, end) for p, end, _ in found.blocks] == [(CUT, 3)]
    kept = [decode_block(data) for _, _, data in found.blocks]
    assert [row[1] for row in all_rows(kept)] == [1, 2, 3]
    assert [entry.runs["partition"].tolist() for entry in found.entries] == [[WHOLE]]


def test_what_was_cut_off_stays_away_at_the_next_start() -> None:
    first = recovered(stored(), JOURNAL)
    # Written under the new record, in the next commit; the journal still has the old ones.
    later = Commit(first.next_commit, (JournalEntry(b"", 0, encode_block(run(CUT, 3, 4, 4))),))
    again = recovered(first.rows, [*JOURNAL, later])
    assert not again.partitions.problems
    assert [record.seqno for record in again.partitions.logs[CUT]] == [0, 3, 4]
    assert [int(entry.runs["end_seqno"][0]) for entry in again.entries] == [2, 4]


def test_a_proven_start_cuts_nothing_off() -> None:
    found = recovered(stored(), JOURNAL, proven=True)
    assert len(found.entries) == 4
    assert not found.rows


def test_a_marker_below_an_earlier_horizon_is_not_complete() -> None:
    journal = commits(run(CUT, 0, 3, 3), run(CUT, 3, 6, 12), run(CUT, 6, 9, 9))
    found = recovered(stored(), journal)
    assert [record.seqno for record in found.partitions.logs[CUT]] == [0, 3]


def test_a_journal_that_does_not_go_on_where_the_store_ends_is_no_history() -> None:
    journal = commits(run(CUT, 0, 3, 3), run(WHOLE, 0, 2, 2), run(CUT, 5, 6, 6))
    found = recovered(stored(), journal)
    assert list(found.partitions.problems) == [CUT]
    assert "goes on at seqno 5" in found.partitions.problems[CUT].message
    assert not found.partitions.serves(CUT)
    assert found.partitions.serves(WHOLE)
