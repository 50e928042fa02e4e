"""The state machine of a consumer against the reference model: true at every marker, whatever happens."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import ModelPartition, Row, Run, State, apply
from upr_client.testing.memory import run_block
from upr_protocol.block import (
    Block,
    block_keys,
    block_seqnos,
    block_values,
    make_runs,
    row_bounds,
    sealed,
)
from upr_protocol.consumer import Consumer, Delivery
from upr_protocol.failover import FailoverLog
from upr_protocol.handshake import RollbackAnswer
from upr_protocol.position import Position

PARTITIONS = (3, 700)


def block_of(partition: int, run: Run) -> Block:
    """A block of one run of the model."""
    return run_block(partition, run.rows, run.start, run.end, run.horizon)


class World:
    """One server that fails over at any time, and one consumer that is cut off at any time."""

    def __init__(self, rng: random.Random, inclusive: bool) -> None:
        self.rng = rng
        self.inclusive = inclusive
        self.ids = 100
        self.token = 0
        self.server = {p: ModelPartition(self.new_id()) for p in PARTITIONS}
        self.copies: list[dict[int, ModelPartition]] = []
        self.session = Consumer(PARTITIONS, inclusive=inclusive)
        self.session.opened(77)
        self.state: dict[int, State] = {p: {} for p in PARTITIONS}
        self.at_marker: dict[int, dict[int, State]] = {p: {0: {}} for p in PARTITIONS}
        self.tokens: dict[int, int] = {}
        self.old: list[tuple[int, Block]] = []
        self.markers = 0
        self.rollbacks = 0

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    # What happens at the server.

    def write(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            key = b"k%d" % self.rng.randint(0, 5)
            value = None if self.rng.random() < 0.2 else b"%d" % self.rng.getrandbits(30)
            self.server[self.rng.choice(PARTITIONS)].write(key, value)

    def copy(self) -> None:
        self.copies.append({p: node.replica() for p, node in self.server.items()})

    def fail_over(self) -> None:
        """Onto a copy that may be old, or the same node after an unclean restart."""
        if self.copies and self.rng.random() < 0.6:
            self.server = {p: n.replica() for p, n in self.rng.choice(self.copies).items()}
        for node in self.server.values():
            node.log_limit = self.rng.choice([1, 2, 25])
            node.restart_unclean(self.rng.randint(0, node.high), self.new_id())
        self.disconnect()

    # What happens to the consumer.

    def disconnect(self) -> None:
        self.session.disconnected()

    def restart(self) -> None:
        """The consumer dies; it goes on from its positions as they would be stored."""
        positions = {p: self.session.position(p) for p in PARTITIONS}
        positions = {p: Position.from_json(at.to_json()) for p, at in positions.items()}
        for partition, position in positions.items():
            assert set(position.markers) <= self.at_marker[partition].keys()
        self.session = Consumer(PARTITIONS, positions, inclusive=self.inclusive)

    def start(self) -> None:
        for request in self.session.starts(self.session.ready().tolist()):
            partition, node = request.partition, self.server[request.partition]
            verdict, target = node.start(request.failover_id, request.seqno, request.data_id)
            log = FailoverLog.from_pairs(node.log)
            if verdict == "started":
                self.token += 1
                self.tokens[partition] = self.token
                known = request.failover_id is not None and request.seqno > 0
                self.session.started(
                    partition, self.token, node.newest_id, node.high, None, None if known else log
                )
                continue
            assert verdict == "rollback"
            assert target is not None
            before = self.session.position(partition)
            pending = self.session.rollback(
                partition, RollbackAnswer(target, node.newest_id, "rule", "words", log)
            )
            self.rollbacks += 1
            if pending is None:
                assert self.session.position(partition).seqno == before.seqno
                continue
            assert self.session.position(partition) == before
            self.state[partition] = dict(self.at_marker[partition][pending.seqno])
            self.session.undone(partition)
            self.at_marker[partition] = {
                at: state for at, state in self.at_marker[partition].items() if at <= pending.seqno
            }

    def deliver(self) -> None:
        runs: list[tuple[int, Block]] = []
        for partition in PARTITIONS:
            position, node = self.session.position(partition), self.server[partition]
            if position.seqno >= node.high:
                continue
            ends: dict[int, int] = {}
            for end in self.rng.sample(
                range(position.seqno + 1, node.high + 1), min(3, node.high - position.seqno)
            ):
                # What is merged at a node always lies between its markers.
                ends[end] = end if self.rng.random() < 0.5 else self.rng.randint(end, node.high)
            keep: Callable[[Row], bool] = lambda row: self.rng.random() < 0.3  # noqa: E731
            blocks = [block_of(partition, run) for run in node.runs(position.seqno, ends, keep)]
            runs += [(self.tokens[partition], block) for block in blocks[: self.rng.randint(1, 3)]]
        late = self.rng.sample(self.old, min(2, len(self.old)))
        runs = [item for item in late if item[0] not in self.tokens.values()] + runs
        if not runs:
            return
        delivery = self.session.frame(
            [block for _, block in runs], np.array([token for token, _ in runs], "<u4")
        )
        self.old += runs
        if delivery is None:
            return
        rows = self.consume(delivery, self.rng.randint(0, 9) if self.rng.random() < 0.3 else None)
        if rows:
            self.session.acknowledge(delivery)
        else:
            self.restart()

    def consume(self, delivery: Delivery, limit: int | None) -> bool:
        """Apply a delivery, or its first rows only; then the consumer dies."""
        for run_index, block in enumerate(delivery.blocks):
            assert len(block.runs) == 1
            partition = int(block.runs["partition"][0])
            rows = list(
                zip(block_seqnos(block), block_keys(block), block_values(block), strict=True)
            )
            if limit is not None and limit < len(rows):
                rows = rows[:limit]
                apply(self.state[partition], (Row(*row) for row in rows))
                self.session.acknowledge_part(delivery, run_index, rows[-1][0] if rows else None)
                return False
            limit = None if limit is None else limit - len(rows)
            apply(self.state[partition], (Row(*row) for row in rows))
            if delivery.is_marker[run_index]:
                self.reached(partition, int(delivery.ends[run_index]))
        return True

    def reached(self, partition: int, seqno: int) -> None:
        self.markers += 1
        assert self.state[partition] == self.server[partition].state_at(seqno)
        self.at_marker[partition][seqno] = dict(self.state[partition])

    def catch_up(self) -> None:
        """Everything arrives; the last run of each partition ends in a marker."""
        while self.session.ready().size:
            self.start()
        for partition in PARTITIONS:
            node, position = self.server[partition], self.session.position(partition)
            if position.seqno < node.high:
                [run] = node.runs(position.seqno, {node.high: node.high}, lambda row: False)
                delivery = self.session.frame(
                    [block_of(partition, run)], np.array([self.tokens[partition]], "<u4")
                )
                assert delivery is not None
                self.consume(delivery, None)
                self.session.acknowledge(delivery)
            assert self.session.position(partition).seqno == node.high
            assert self.state[partition] == node.state_at(node.high)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=True), st.booleans(), st.integers(5, 40))
def test_a_consumer_is_true_at_every_marker_and_in_the_end(
    rng: random.Random, inclusive: bool, steps: int
) -> None:
    world = World(rng, inclusive)
    world.write()
    for _ in range(steps):
        if world.session.ready().size:
            world.start()
        else:
            step = rng.choices(
                [
                    world.write,
                    world.deliver,
                    world.copy,
                    world.fail_over,
                    world.disconnect,
                    world.restart,
                ],
                [4, 6, 1, 1, 1, 1],
            )[0]
            step()
    world.catch_up()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=12))
def test_a_block_with_late_runs_is_cut_to_what_belongs_to_open_streams(
    shape: list[tuple[int, int]],
) -> None:
    # Each partition's run has so many rows; of every second token the stream was ended.
    counts = [rows + 1 for _, rows in shape]
    parts = list(range(len(shape)))
    total = sum(counts)
    keys = [b"%d" % n for n in range(total)]
    block = sealed(
        Block(
            make_runs(parts, counts, 0, counts, counts),
            b"",
            b"",
            np.cumsum([0, *map(len, keys)]).astype("<i4").tobytes(),
            b"".join(keys),
            np.zeros(total + 1, "<i4").tobytes(),
            b"",
            b"",
            0,
        )
    )
    session = Consumer(parts)
    session.starts(parts)
    for partition, (late, _) in zip(parts, shape, strict=True):
        session.started(partition, 50 + partition if late else partition, 9, 0, None, None)
    live = np.array([not late for late, _ in shape])
    delivery = session.frame([block], np.array(parts, "<u4"))
    if not live.any():
        assert delivery is None
        return
    assert delivery is not None
    bounds = row_bounds(block.runs)
    expected = [k for i, k in enumerate(keys) if live[np.searchsorted(bounds, i, side="right") - 1]]
    [cut] = delivery.blocks
    assert block_keys(cut) == expected
    assert cut.runs["partition"].tolist() == [p for p in parts if live[p]]
    session.acknowledge(delivery)
    for partition in parts:
        assert session.position(partition).seqno == (counts[partition] if live[partition] else 0)
