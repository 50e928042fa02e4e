"""A write that is sent again with its number: what it is told of what was refused before."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from upr.engine.bucket import Bucket, Written
from upr.engine.partitions import ACTIVE, DEAD, Partitions
from upr.engine.producers import ANSWERS_KEPT, Producer
from upr.storage.keyspace import PartitionRow
from upr.storage.store import Identity
from upr_protocol.block import make_runs, sealed
from upr_protocol.errors import PartitionNotActiveError
from upr_protocol.failover import FailoverLog
from upr_protocol.rows import build_block

P, Q = 5, 6


class World:
    """A bucket without a disk, and a producer that writes into it."""

    def __init__(self) -> None:
        rows = [PartitionRow(ACTIVE, 1, 0, 0, 0, FailoverLog.born(p + 1)) for p in range(1024)]
        self.bucket = Bucket(Identity("b", 1), Partitions.from_rows(rows), 1, proven=False)
        self.producer: Producer = self.bucket.open_producer(b"p", {})

    def state(self, partition: int, state: int) -> None:
        self.bucket.partitions.state[partition] = state

    def write(self, number: int, partitions: Sequence[int]) -> Written:
        rows = [b"%d" % partition for partition in partitions]
        block = replace(build_block(rows, rows), runs=make_runs(partitions, [1] * len(rows)))
        return self.bucket.write(sealed(block), b"p", self.producer, number, 1)

    def high(self, partition: int) -> int:
        return int(self.bucket.partitions.high[partition])


def told(written: Written) -> list[tuple[int, int]]:
    return [(int(run["partition"]), int(run["end_seqno"])) for run in written.runs]


def test_a_write_that_was_refused_does_not_count_as_applied_behind_a_later_one() -> None:
    world = World()
    world.state(P, DEAD)
    with pytest.raises(PartitionNotActiveError):
        world.write(1, [P])
    world.state(P, ACTIVE)
    world.write(2, [P])

    again = world.write(1, [P])

    assert (again.duplicate, told(again)) == (True, [])
    assert world.high(P) == 1


def test_a_part_that_was_refused_is_left_out_however_long_ago_it_was() -> None:
    world = World()
    world.state(P, DEAD)
    assert list(world.write(1, [P, Q]).refused) == [P]
    world.state(P, ACTIVE)
    for number in range(2, ANSWERS_KEPT + 3):
        world.write(number, [P, Q])
    high = world.high(P)

    assert told(world.write(1, [P, Q])) == [(Q, 0)]
    assert world.high(P) == high


def test_what_was_refused_is_applied_when_nothing_came_behind_it() -> None:
    world = World()
    world.state(P, DEAD)
    with pytest.raises(PartitionNotActiveError):
        world.write(1, [P])
    world.state(P, ACTIVE)
    world.write(2, [Q])

    assert told(world.write(1, [P])) == [(P, 1)]
    for number in range(3, ANSWERS_KEPT + 4):
        world.write(number, [P])
    # It was applied after all, so it is not said to have been refused.
    assert told(world.write(1, [P])) == [(P, 0)]
