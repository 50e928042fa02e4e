"""Recovery with a stretch in the journal, as replicas will write it: the record's seqno is not the high one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.buckets import partition_rows, write
from tests.engine.test_follower_steps import following, sent_while_awake
from tests.raw import all_rows
from upr.engine.bucket import Bucket
from upr.engine.partitions import ACTIVE, DEAD
from upr.engine.recovery import Recovered, accept_loss, recover
from upr.engine.tail import TailEntry
from upr.storage.blocks import Head
from upr.storage.journal import Commit, JournalEntry
from upr.storage.keyspace import PartitionRow, pack_partition, unpack_partition
from upr.storage.store import Identity
from upr_protocol.block import U64, Block, build_block, make_runs, sealed
from upr_protocol.errors import DataDamagedError
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import answer_start
from upr_protocol.wire.codec import decode_block, encode_block

CUT, WHOLE = 5, 6


def run(partition: int, start: int, end: int, horizon: int) -> Block:
    rows = range(start + 1, end + 1)
    block = build_block([b"%d" % i for i in rows], [b"v"] * len(rows))
    return sealed(replace(block, runs=make_runs([partition], len(rows), start, end, horizon, 1)))


def commits(*blocks: Block) -> list[Commit]:
    return [
        Commit(number, (JournalEntry(encode_block(block)),))
        for number, block in enumerate(blocks, start=1)
    ]


IDS = iter(range(10_000, 100_000))


def proof_of(
    rows: Mapping[int, PartitionRow | DataDamagedError],
    heads: Callable[[int], Sequence[Head]],
    journal: list[Commit],
) -> U64:
    """What a proof says that was written over just this."""
    everything = np.full(1024, np.iinfo(np.uint64).max, np.uint64)
    return recover(rows, heads, journal, proven=everything, new_id=lambda: next(IDS)).highs


def recovered(
    rows: dict[int, PartitionRow], journal: list[Commit], *, proven: bool = False
) -> Recovered:
    told = proof_of(rows, lambda _: (), journal) if proven else None
    return recover(rows, lambda _: (), journal, proven=told, new_id=lambda: next(IDS))


# Up to 3 is whole; 4 to 9 are two of the three runs of a stretch that ends at 12.
JOURNAL = commits(run(CUT, 0, 3, 3), run(WHOLE, 0, 2, 2), run(CUT, 3, 6, 12), run(CUT, 6, 9, 12))


def test_a_record_is_at_the_last_complete_marker_and_what_is_above_goes() -> None:
    found = recovered(partition_rows(), JOURNAL)
    table = found.partitions
    assert [record.seqno for record in table.logs[CUT]] == [0, 3]
    assert [record.seqno for record in table.logs[WHOLE]] == [0, 2]
    assert int(table.high[CUT]) == int(table.stored[CUT]) == found.rows[CUT].stored_high == 3
    assert [(p, end) for p, end, _ in found.blocks] == [(CUT, 3)]
    kept = [decode_block(data) for _, _, data in found.blocks]
    assert [row[1] for row in all_rows(kept)] == [1, 2, 3]
    assert [entry.runs["partition"].tolist() for entry in found.entries] == [[WHOLE]]


def test_a_record_without_a_durable_row_stays_for_who_holds_lost_rows_of_it() -> None:
    first = recovered(partition_rows(), JOURNAL)
    served = Bucket(Identity("b", 7), first.partitions, first.next_commit, proven=False)
    served.recovered(first.entries)
    held_id = first.partitions.logs[WHOLE].newest.failover_id
    follower, wake = following(served, WHOLE)
    # Stability memory: the follower takes seqno 3, which no commit ever holds.
    write(served, WHOLE)
    held = sent_while_awake(follower, wake)[-1].runs
    assert (held["start_seqno"].tolist(), held["end_seqno"].tolist()) == ([2], [3])

    # On the disk the next start finds what it would find if nothing had been numbered.
    again = recovered(first.rows, JOURNAL).partitions
    log = again.logs[WHOLE]
    assert [record.seqno for record in log] == [0, 2, 2]
    assert log.records[1].failover_id == held_id

    def told(log: FailoverLog, seqno: int) -> int | None:
        return answer_start(
            log, failover_id=held_id, seqno=seqno, data_id=held_id, high_seqno=2
        ).rollback_seqno

    replaced = FailoverLog((log.records[0], log.newest))
    assert (told(log, 3), told(replaced, 3)) == (2, 0), "all of its data instead of one row"
    # Nor need a row be lost: who was told the id loses everything as well.
    assert told(replaced, 2) == 0


def test_what_was_cut_off_stays_away_at_the_next_start() -> None:
    first = recovered(partition_rows(), JOURNAL)
    # Written under the new record, in the next commit; the journal still has the old ones.
    later = Commit(first.next_commit, (JournalEntry(encode_block(run(CUT, 3, 4, 4))),))
    again = recovered(first.rows, [*JOURNAL, later])
    assert not again.partitions.problems
    assert [record.seqno for record in again.partitions.logs[CUT]] == [0, 3, 4]
    assert [int(entry.runs["end_seqno"][0]) for entry in again.entries] == [2, 4]


def test_a_proven_start_cuts_nothing_off() -> None:
    found = recovered(partition_rows(), JOURNAL, proven=True)
    assert len(found.entries) == 4
    assert not found.rows


def test_a_marker_below_an_earlier_horizon_is_not_complete() -> None:
    journal = commits(run(CUT, 0, 3, 3), run(CUT, 3, 6, 12), run(CUT, 6, 9, 9))
    found = recovered(partition_rows(), journal)
    assert [record.seqno for record in found.partitions.logs[CUT]] == [0, 3]


def test_a_journal_that_does_not_go_on_where_the_store_ends_is_no_history() -> None:
    journal = commits(run(CUT, 0, 3, 3), run(WHOLE, 0, 2, 2), run(CUT, 5, 6, 6))
    found = recovered(partition_rows(), journal)
    assert list(found.partitions.problems) == [CUT]
    assert "goes on at seqno 5" in found.partitions.problems[CUT].message
    assert not found.partitions.serves(CUT)
    assert found.partitions.serves(WHOLE)


# The store holds up to 6: the newest complete marker is 3, the rest is part of the stretch that ends at 12.
IN_STRETCH = replace(partition_rows()[CUT], stored_high=6, complete=3, horizon=12)


def test_the_stored_high_is_no_marker_within_a_stretch() -> None:
    found = recovered({**partition_rows(), CUT: IN_STRETCH}, [], proven=True)
    table = found.partitions
    assert (table.high[CUT], table.complete[CUT], table.horizon[CUT]) == (6, 3, 12)
    bucket = Bucket(Identity("b", 1), table, found.next_commit, proven=True)
    assert bucket.markers.seqno[CUT] == 3
    # The rest of the stretch: only its end is a marker.
    for number, block in enumerate((run(CUT, 6, 9, 12), run(CUT, 9, 12, 12)), start=1):
        bucket.recovered([TailEntry(block.runs, encode_block(block), (), 1, number)])
        assert (table.complete[CUT], bucket.markers.seqno[CUT]) == ((3, 3), (12, 12))[number - 1]


def test_stored_blocks_of_a_stretch_are_cut_off_with_it() -> None:
    found = recovered({**partition_rows(), CUT: IN_STRETCH}, commits(run(CUT, 6, 9, 12)))
    row = found.rows[CUT]
    assert found.cut_off == {CUT: 3}
    assert not found.entries
    assert (row.stored_high, row.complete, row.horizon, row.log.newest.seqno) == (3, 3, 3, 3)
    # And the journal, whose commit does not count any more, brings nothing back.
    again = recovered(found.rows, commits(run(CUT, 6, 9, 12)), proven=True)
    assert int(again.partitions.high[CUT]) == 3


def test_a_lost_row_is_made_anew_from_what_the_blocks_say() -> None:
    heads = [Head(0, 3, 3, 3, 1, 1), Head(3, 6, 12, 3, 1, 1)]
    rows: dict[int, PartitionRow | DataDamagedError] = {
        **partition_rows(),
        CUT: DataDamagedError("lost"),
    }
    found = recover(
        rows,
        lambda _: heads,
        [],
        proven=proof_of(rows, lambda _: heads, []),
        new_id=lambda: next(IDS),
    )
    row = found.rows[CUT]
    assert (row.stored_high, row.complete, row.horizon) == (6, 3, 12)
    assert [record.seqno for record in row.log] == [0]


def unreadable(journal: list[Commit]) -> Recovered:
    """A bucket with a partition of which neither the row nor a block can be read."""

    def heads(_: int) -> list[Head]:
        raise DataDamagedError("no block")

    rows: dict[int, PartitionRow | DataDamagedError] = {
        **partition_rows(),
        CUT: DataDamagedError("lost"),
    }
    return recover(
        rows, heads, journal, proven=proof_of(rows, heads, journal), new_id=lambda: next(IDS)
    )


def test_a_lost_row_over_blocks_that_cannot_be_read_is_a_dead_partition() -> None:
    found = unreadable([])
    assert found.rows[CUT].state == DEAD
    assert found.notes == ["no block"]


@pytest.mark.parametrize("journal", [JOURNAL[:3], JOURNAL[:1], []])
def test_less_than_the_proof_says_is_damage_of_the_partition(journal: list[Commit]) -> None:
    highs = recovered(partition_rows(), JOURNAL).highs
    highs[CUT], highs[WHOLE] = 9, 2 if len(journal) > 1 else 0
    found = recover(partition_rows(), lambda _: (), journal, proven=highs, new_id=lambda: next(IDS))
    assert list(found.partitions.problems) == [CUT]
    end = int(found.highs[CUT])
    assert f"it ends at seqno {end}, the clean-shutdown proof says 9" in found.notes[0]
    assert found.rows[CUT].state == DEAD
    assert list(found.rows) == [CUT]
    # It stays dead, and the proof that is written with it asks for no more than there is.
    again = recover(
        {**partition_rows(), **found.rows},
        lambda _: (),
        journal,
        proven=found.highs,
        new_id=lambda: 1,
    )
    assert not again.partitions.serves(CUT)


def test_what_the_proof_says_may_lie_in_the_store_or_in_the_journal() -> None:
    highs = np.zeros(1024, np.uint64)
    highs[CUT], highs[WHOLE] = 9, 7
    rows = {
        **partition_rows(),
        WHOLE: replace(partition_rows()[WHOLE], stored_high=7, complete=7, horizon=7),
    }
    found = recover(rows, lambda _: (), JOURNAL, proven=highs, new_id=lambda: next(IDS))
    assert not found.partitions.problems
    assert not found.rows
    assert (found.highs[CUT], found.highs[WHOLE]) == (9, 7)


def test_the_proof_of_recovery_asks_for_what_was_kept() -> None:
    found = recovered(partition_rows(), JOURNAL)
    assert (found.highs[CUT], found.highs[WHOLE]) == (3, 2)


# Dead partitions.

GONE = commits(run(CUT, 0, 3, 3), run(WHOLE, 0, 2, 2), run(CUT, 5, 6, 6), run(CUT, 6, 9, 9))


def test_what_lies_behind_a_gap_is_kept_aside_and_what_lies_before_it_is_not() -> None:
    found = recovered(partition_rows(), GONE, proven=True)
    assert list(found.aside) == [(CUT, 3, 0), (CUT, 4, 0)]
    kept = [decode_block(data) for data in found.aside.values()]
    assert [row[1] for row in all_rows(kept)] == [6, 7, 8, 9]
    assert [int(e.runs["end_seqno"][0]) for e in found.entries] == [3, 2]
    # Also under a proof: a flush may drop the journal before the next start.
    assert list(found.rows) == [CUT]


def test_reason_time_and_highest_seqno_survive_further_starts() -> None:
    first = recover(
        partition_rows(),
        lambda _: (),
        GONE,
        proven=proof_of(partition_rows(), lambda _: (), GONE),
        new_id=lambda: next(IDS),
        now=1_000_000,
    )
    row = unpack_partition(pack_partition(CUT, first.rows[CUT]), CUT)
    assert (row.state, row.since, row.known_high) == (DEAD, 1_000_000, 9)
    assert row.reason == f"partition {CUT}: the journal goes on at seqno 5, the store ends at 3"
    again = recover(
        {**partition_rows(), CUT: row},
        lambda _: (),
        [],
        proven=proof_of({**partition_rows(), CUT: row}, lambda _: (), []),
        new_id=lambda: next(IDS),
        now=2,
    )
    assert again.partitions.problems[CUT].message == row.reason
    assert not again.rows
    assert int(again.partitions.since[CUT]) == 1_000_000


def test_a_second_start_before_a_flush_loses_nothing_either() -> None:
    first = recovered(partition_rows(), GONE)
    again = recovered({**partition_rows(), **first.rows}, GONE, proven=True)
    assert again.aside == first.aside
    assert [int(e.runs["end_seqno"][0]) for e in again.entries] == [3, 2]


def test_nothing_of_the_journal_goes_on_where_blocks_cannot_be_read() -> None:
    found = unreadable(GONE)
    assert [key[1] for key in found.aside] == [1, 3, 4]
    again = recovered({**partition_rows(), CUT: found.rows[CUT]}, GONE, proven=True)
    assert not again.aside
    assert [e.runs["partition"].tolist() for e in again.entries] == [[WHOLE]]


def accepted(found: Recovered, *, stored_end: int = 0) -> PartitionRow:
    accept_loss(found, {CUT: (stored_end, stored_end)}, lambda: next(IDS))
    return found.rows[CUT]


def test_an_accepted_loss_is_a_record_at_the_last_marker_before_the_gap() -> None:
    found = recovered(partition_rows(), GONE, proven=True)
    row = accepted(found)
    assert (row.state, row.stored_high, row.complete, row.horizon) == (ACTIVE, 3, 3, 3)
    assert [record.seqno for record in row.log] == [0, 3]
    assert (row.reason, row.since, row.known_high) == ("", 0, 0)
    assert [(p, end) for p, end, _ in found.blocks] == [(CUT, 3)]
    assert found.cut_off == {CUT: 3}
    # What is numbered next lies behind the old journal, which does not count any more.
    later = Commit(found.next_commit, (JournalEntry(encode_block(run(CUT, 3, 4, 4))),))
    again = recovered({**partition_rows(), CUT: row}, [*GONE, later], proven=True)
    assert not again.aside
    assert not again.partitions.problems
    assert [int(e.runs["end_seqno"][0]) for e in again.entries] == [2, 4]


def test_a_gap_in_the_middle_of_a_stretch_is_cut_off_at_its_beginning() -> None:
    journal = commits(run(CUT, 0, 3, 3), run(CUT, 3, 6, 12), run(CUT, 9, 12, 12))
    found = recovered(partition_rows(), journal, proven=True)
    row = accepted(found)
    assert (row.stored_high, row.log.newest.seqno) == (3, 3)
    assert not found.entries


def test_what_goes_on_where_the_blocks_do_not_end_is_given_up() -> None:
    # The row says 6, of which the blocks can be read up to 3.
    dead = replace(
        partition_rows()[CUT], state=DEAD, stored_high=6, complete=6, horizon=6, purge_seqno=5
    )
    journal = commits(run(CUT, 6, 9, 9), run(WHOLE, 0, 2, 2))
    found = recovered({**partition_rows(), CUT: dead}, journal, proven=True)
    row = accepted(found, stored_end=3)
    assert (row.stored_high, row.log.newest.seqno, row.purge_seqno) == (3, 3, 3)
    assert not found.blocks
    assert [e.runs["partition"].tolist() for e in found.entries] == [[WHOLE]]


def test_a_partition_that_lost_its_end_never_gives_those_seqnos_again_under_the_same_id() -> None:
    highs = np.zeros(1024, np.uint64)
    highs[CUT] = 9
    journal = commits(run(CUT, 0, 3, 3))
    found = recover(partition_rows(), lambda _: (), journal, proven=highs, new_id=lambda: next(IDS))
    assert (found.rows[CUT].state, found.rows[CUT].known_high) == (DEAD, 9)
    row = accepted(found)
    # The proof that is written with it asks for what is there.
    assert found.highs[CUT] == 3
    assert [record.seqno for record in row.log] == [0, 3]
    assert len({record.failover_id for record in row.log}) == 2


def test_a_proof_that_the_journal_contradicts_proves_nothing() -> None:
    """Something was numbered since: it may have been lost and seen as well."""
    highs = proof_of(partition_rows(), lambda _: (), JOURNAL[:2])
    found = recover(partition_rows(), lambda _: (), JOURNAL, proven=highs, new_id=lambda: next(IDS))
    assert [record.seqno for record in found.partitions.logs[CUT]] == [0, 3]
    assert any("contradict" in note for note in found.notes)
