"""Followers that share frames: each gets exactly its rows, whatever the others were sent."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.engine.buckets import bucket, commit
from tests.raw import all_rows
from upr.engine.bucket import Bucket
from upr.engine.streams import FollowOptions
from upr.engine.tail import Shared
from upr.service.conversation import Conversation
from upr_protocol.block import build_block
from upr_protocol.flow import CreditWindow, Liveness
from upr_protocol.limits import CREDIT_FRAMES, PARTITIONS, SHARED_BYTES
from upr_protocol.position_table import START
from upr_protocol.wire.codec import block_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

Rows = list[tuple[int, int, bytes, bytes | None]]


@dataclass
class Reader:
    """A conversation without its call: what it was told."""

    bucket: Bucket
    options: FollowOptions
    partitions: list[int] = field(default_factory=lambda: list(range(PARTITIONS)))
    tokens: int = 0
    credit: int = 1 << 26
    messages: list[Any] = field(default_factory=list)
    rows: Rows = field(default_factory=list)

    def __post_init__(self) -> None:
        window, liveness = CreditWindow(self.credit), Liveness(3600, 0)
        self.talk = Conversation(self.bucket, self.options, window, liveness, lambda: None)
        for _ in range(self.tokens):
            # Each start gives its stream a new token.
            self.start(self.partitions[:1])
        if self.partitions:
            self.start(self.partitions)
        self.read()

    def start(self, partitions: list[int]) -> None:
        table = np.zeros(len(partitions), START)
        table["partition"] = partitions
        self.talk.take(wire.FollowRequest(start=wire.Start(table=table.tobytes())), 0, 0)

    def read(self) -> None:
        while (saying := self.talk.next_message(0)) is not None:
            if saying.frame is None:
                continue
            encoded = list(saying.message) if self.options.plain_rows else [saying.message]
            self.messages += encoded
            frames = [wire.FollowResponse.FromString(data).frame for data in encoded]
            cost = max(saying.frame.size, self.credit // CREDIT_FRAMES)
            assert sum(frame.credit_bytes for frame in frames) == cost
            for frame in frames:
                self._check_tokens(frame)
                self.rows += all_rows(map(block_from_message, frame.blocks))
                self.rows += [
                    (
                        run.partition,
                        row.seqno,
                        row.key,
                        row.value if row.HasField("value") else None,
                    )
                    for run in frame.plain_runs
                    for row in run.rows
                ]

    def _check_tokens(self, frame: wire.Frame) -> None:
        told = np.frombuffer(frame.tokens, "<u4").tolist()
        told += [run.token for run in frame.plain_runs]
        runs = [run for data in frame.blocks for run in block_from_message(data).runs]
        partitions = [int(run["partition"]) for run in runs]
        partitions += [run.partition for run in frame.plain_runs]
        assert told == self.talk.follower._token[partitions].tolist()

    def expected(self, written: Rows) -> Rows:
        shown = [row for row in written if row[0] in self.partitions]
        shown = [row for row in shown if row[2].startswith(self.options.key_prefix)]
        values = not self.options.keys_only
        return sorted((p, seqno, key, value if values else None) for p, seqno, key, value in shown)


def write(to: Bucket, rng: random.Random) -> Rows:
    """Write a few blocks of a few rows; return their rows."""
    first = to.tail.end
    for _ in range(rng.randint(1, 6)):
        keys = [b"%s%d" % (rng.choice([b"a", b"b"]), rng.randint(0, 30)) for _ in range(3)]
        values = [rng.choice([None, b"", b"value"]) for _ in keys]
        to.write(build_block(keys, values), b"", None, 0, rng.randint(1, 3))
    commit(to)
    return all_rows(to.tail[number].block() for number in range(first, to.tail.end))


OPTIONS = [
    FollowOptions(),
    FollowOptions(memory=True),
    FollowOptions(keys_only=True),
    FollowOptions(key_prefix=b"a"),
    FollowOptions(key_prefix=b"b", keys_only=True),
    FollowOptions(plain_rows=True),
    FollowOptions(plain_rows=True, key_prefix=b"b"),
]


@pytest.mark.parametrize("seed", range(6))
def test_everybody_gets_exactly_its_rows(seed: int) -> None:
    rng = random.Random(seed)
    of = bucket()
    written: Rows = []
    readers: list[Reader] = []
    for _ in range(8):
        for _ in range(rng.randint(0, 6)):
            chosen = list(range(PARTITIONS))
            if rng.random() < 0.3:
                chosen = sorted(rng.sample(chosen, 600))
            readers.append(
                Reader(
                    of,
                    rng.choice(OPTIONS),
                    chosen,
                    rng.choice([0, 0, 2]),
                    rng.choice([1 << 26, 1 << 26, 1 << 25]),
                )
            )
        written += write(of, rng)
        for reader in rng.sample(readers, len(readers) * 3 // 4):
            reader.read()
    for reader in readers:
        reader.read()
        assert sorted(reader.rows) == reader.expected(written)


def test_followers_at_the_same_place_are_sent_the_same_bytes() -> None:
    of = bucket()
    readers = [Reader(of, option) for option in OPTIONS for _ in range(4)]
    write(of, random.Random(1))
    write(of, random.Random(2))
    for reader in readers:
        reader.read()
    for first, option in zip(range(0, len(readers), 4), OPTIONS, strict=True):
        _, second, *others = readers[first : first + 4]
        assert len(second.messages) == 1
        assert all(other.messages[0] is second.messages[0] for other in others)
        frame = wire.FollowResponse.FromString(second.messages[0]).frame
        assert option.key_prefix or len(frame.blocks) <= 1, "many small blocks become one"


def test_a_position_inside_a_run_shares_nothing() -> None:
    of = bucket()
    of.write(build_block([b"a", b"b", b"c"], [b"v"] * 3, np.array([5, 5, 5])), b"", None, 0, 1)
    # Nobody wants partition 7: an entry that all want as it is is not looked at run by run.
    of.write(build_block([b"d", b"e"], [b"v"] * 2, np.array([6, 7])), b"", None, 0, 2)
    commit(of)
    for at in (0, 0, 0, 2, 0, 1):
        reader = Reader(of, FollowOptions(), [])
        table = np.zeros(2, START)
        table["partition"] = 5, 6
        table["seqno"][0] = at
        table["failover_id"] = table["data_id"] = of.partitions.newest_id[[5, 6]]
        reader.talk.take(wire.FollowRequest(start=wire.Start(table=table.tobytes())), 0, 0)
        reader.read()
        above = [(5, 1, b"a", b"v"), (5, 2, b"b", b"v"), (5, 3, b"c", b"v")][at:]
        assert sorted(reader.rows) == [*above, (6, 1, b"d", b"v")]


def test_what_is_shared_is_bounded_and_the_newest() -> None:
    shared = Shared()
    for number in range(1000):
        shared.put(number, str(number), 10_000)
        assert shared.get(number) == str(number)
        assert shared.bytes <= SHARED_BYTES
    assert shared.get(0) is None
    held = shared.bytes
    shared.put(999, "again", 10_000)
    assert (shared.get(999), shared.bytes) == ("again", held)
    shared.put("large", "value", SHARED_BYTES)
    assert shared.get("large") is None


def test_what_is_shared_goes_with_the_entries() -> None:
    of = bucket()
    readers = [Reader(of, FollowOptions()) for _ in range(3)]
    write(of, random.Random(1))
    for reader in readers:
        reader.read()
    assert of.tail.shared.bytes
    of.tail.drop_before(of.tail.durable)
    assert not of.tail.shared.bytes
