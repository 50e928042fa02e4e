"""Lines of the text port, without a connection: commands, tokens, rows, and what markers become."""

import errno
import json
from base64 import b64decode
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.buckets import MINE, stretch_block, with_stored
from upr.service.buckets.bucket_service import BucketService
from upr.service.text import lines as text
from upr.service.text.feed import Feed
from upr.service.text.lines import LineSplitter, Replicate, Stretch, parse_command
from upr.service.text.port import Connection
from upr.storage.blocks import Encoded
from upr.storage.read import ReadResult
from upr_protocol.block import Block, build_block, make_runs, sealed
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.limits import (
    FAILOVER_ID_MAX,
    PARTITIONS,
    SEQNO_MAX,
    TEXT_LINE_BYTES_MAX,
    TEXT_PIECE_BYTES,
)
from upr_protocol.partitioning import partition_of
from upr_protocol.wire.codec import encode_block

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=50)
ROWS = st.lists(
    st.tuples(st.binary(min_size=1, max_size=20), st.none() | st.binary(max_size=20) | st.text()),
    min_size=1,
    max_size=30,
)


def read_line(line: str) -> tuple[str, list[str], Any]:
    """Read a server's line by the published grammar: the command, its words, and the row of an RDATA."""
    kind, _, rest = line.partition(" ")
    if kind == "RDATA":
        *words, row = rest.split(" ", 3)
        assert len(words) == 3
        assert words[2] == "batch" or words[2].isdigit()
        return kind, words, json.loads(row)
    if kind == "POSITION":
        words = rest.split(" ", 3)
        assert min(map(int, words[2:])) >= 0
        return kind, words, None
    assert kind in ("SERVER", "PING", "ERROR"), line
    return kind, [rest], None


def row_of(row: dict[str, Any]) -> tuple[int, bytes, bytes | None]:
    """Return seqno, key and value of a row."""

    def field(name: str) -> bytes:
        if name in row:
            return cast(str, row[name]).encode()
        return b64decode(row[f"{name}_base64"], validate=True)

    assert row["op"] in ("set", "delete")
    return row["seqno"], field("key"), field("value") if row["op"] == "set" else None


@given(st.integers(1, FAILOVER_ID_MAX), st.integers(0, SEQNO_MAX))
def test_a_token_is_one_number_and_says_both(failover_id: int, seqno: int) -> None:
    token = text.parse_token(str(text.token_of(failover_id, seqno)))
    assert text.split_token(token) == (failover_id, seqno)


@pytest.mark.parametrize(
    "word", ["", "-1", "1.5", "batch", "٣", "5", str(SEQNO_MAX), str(2**112), "9" * 5000]
)
def test_what_is_no_token_is_refused(word: str) -> None:
    with pytest.raises(InvalidArgumentError, match="token is"):
        text.parse_token(word)


@given(st.lists(st.binary(max_size=20)), st.binary(max_size=5))
def test_lines_are_the_same_in_whatever_pieces_they_come(pieces: list[bytes], end: bytes) -> None:
    splitter = LineSplitter()
    found = [line for piece in [*pieces, end, b"\n"] for line in splitter.feed(piece)]
    whole = (b"".join(pieces) + end + b"\n").split(b"\n")[:-1]
    assert found == [line.removesuffix(b"\r") for line in whole]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_long_line_is_refused_before_it_is_kept(end: bytes) -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * TEXT_LINE_BYTES_MAX + b"\n") == [b"x" * TEXT_LINE_BYTES_MAX]
    with pytest.raises(InvalidArgumentError, match=f"must be at most {TEXT_LINE_BYTES_MAX}"):
        splitter.feed(b"x" * (TEXT_LINE_BYTES_MAX + 1) + end)


@given(NAMES, st.integers(0, PARTITIONS - 1), st.integers(1, FAILOVER_ID_MAX))
def test_what_is_asked_for_is_read(name: str, partition: int, failover_id: int) -> None:
    word, token = text.shown_name(name), text.token_of(failover_id, 7)
    asked = {
        "REPLICATE": Replicate(),
        f"REPLICATE {word}": Replicate(name),
        f"REPLICATE {word} * 0": Replicate(name, None, 0),
        f"REPLICATE  {word} {partition}": Replicate(name, partition),
        f"REPLICATE {word} {partition} {token} ": Replicate(name, partition, token),
    }
    assert {line: parse_command(line.encode()) for line in asked} == asked


@given(st.binary(max_size=60) | st.builds(lambda a: b"REPLICATE " + a, st.binary(max_size=40)))
def test_any_line_is_a_command_or_an_error(line: bytes) -> None:
    answer = b"\n"
    try:
        parse_command(line)
    except UprError as error:
        answer = text.error_line(error)
    assert answer.count(b"\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"FEDERATION_ACK 5", "'FEDERATION_ACK'; must be one of PING"),
        (b"REPLICATE default 1024 0", "'1024'; must be 0 to 1023"),
        (b"REPLICATE default * 281474976710657", "must be 0"),
        (b"REPLICATE a b c d", "must be at most 3"),
        (b"REPLICATE %FF", "must be UTF-8"),
        (b"NAME ", "must be 1 to 200"),
        (b"\xff", "not UTF-8 at byte 0"),
    ],
)
def test_a_bad_line_is_told_value_and_limit(line: bytes, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words.replace("*", r"\*")):
        parse_command(line)


@given(ROWS, st.booleans())
def test_rows_come_back_out_of_their_lines(
    rows: list[tuple[bytes, bytes | str | None]], complete: bool
) -> None:
    # In the order of a block.
    rows = sorted(rows, key=lambda row: partition_of(row[0]))
    keys = [key for key, _ in rows]
    values = [value.encode() if isinstance(value, str) else value for _, value in rows]
    block = build_block(keys, values)
    block.runs = make_runs([5], [len(rows)], [0], [len(rows)], [len(rows)], [1])
    written = b"".join(
        text.rdata(block, [Stretch("RDATA a%20b 5 ", len(rows), 99 if complete else None)])
    )
    read = [read_line(line) for line in written.decode("ascii").splitlines()]
    assert written.endswith(b"\n")
    assert [row_of(row) for _, _, row in read] == [
        (number, key, value)
        for number, (key, value) in enumerate(zip(keys, values, strict=True), 1)
    ]
    tokens = ["batch"] * (len(rows) - 1) + ["99" if complete else "batch"]
    assert [words for _, words, _ in read] == [["a%20b", "5", token] for token in tokens]


def test_many_rows_are_made_in_pieces_and_a_large_one_alone() -> None:
    values = [b"x" * 1000] * 600 + [b"y" * TEXT_PIECE_BYTES * 2] + [b"z"]
    block = build_block([b"k%d" % i for i in range(len(values))], values)
    block.runs = make_runs([5], [len(values)], [0], [len(values)], [len(values)], [1])
    pieces = list(text.rdata(block, [Stretch("RDATA default 5 ", len(values), 1)]))
    assert sum(piece.count(b"\n") for piece in pieces) == len(values)
    assert sorted(len(piece) > TEXT_PIECE_BYTES * 2 for piece in pieces) == [False] * (
        len(pieces) - 1
    ) + [True]
    assert all(len(piece) < TEXT_PIECE_BYTES * 2 or piece.count(b"\n") == 1 for piece in pieces)


# Markers


class Host(SimpleNamespace):
    """As much of a bucket's service as a feed needs."""


def replicating(high: int) -> Feed:
    host = Host(bucket=with_stored(high), users=set())
    feed = Feed(cast(BucketService, host), "peer", lambda: None)
    feed.start([Replicate("b", MINE, 0)])
    return feed


def sent(feed: Feed, *blocks: Any) -> list[tuple[str, list[str], Any]]:
    """Hand the feed what a read of the store brought, and return its lines."""
    wanted = feed.follower.next_read()
    assert wanted is not None
    feed.follower.feed([ReadResult(wanted[0][0], list(blocks))])
    found = feed.next_lines()
    assert found is not None
    feed.sent(found)
    return [read_line(line) for line in b"".join(found.pieces).decode().splitlines()]


def empty_block(start: int, end: int, horizon: int) -> Encoded:
    runs = make_runs([MINE], 0, start, end, horizon, 1)
    block = Block(runs, b"", b"", b"", b"", b"", b"", b"", 0)
    return Encoded(runs, encode_block(sealed(block)))


def token(seqno: int) -> str:
    return str(text.token_of(MINE + 1, seqno))


def test_a_token_stands_at_complete_markers_only() -> None:
    feed = replicating(9)
    assert read_line(feed.take_said()[0].decode().strip())[1] == ["b", str(MINE), "0", token(0)]
    lines = sent(feed, stretch_block(0, 5, 9), stretch_block(5, 7, 7), stretch_block(7, 9, 9))
    assert [words[2] for _, words, _ in lines] == ["batch"] * 8 + [token(9)]


def test_a_marker_without_rows_ends_the_batch_or_is_a_position() -> None:
    feed = replicating(20)
    lines = sent(feed, stretch_block(0, 5, 9), empty_block(5, 9, 9), empty_block(9, 12, 12))
    assert lines[-2:] == [
        ("RDATA", ["b", str(MINE), token(9)], None),
        ("POSITION", ["b", str(MINE), token(9), token(12)], None),
    ]
    (line,) = sent(feed, stretch_block(12, 13, 13))
    assert line[1][2] == token(13)


@pytest.mark.asyncio
async def test_a_socket_that_gives_up_is_lost_and_not_silent() -> None:
    async def gives_up(_: int) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    port = SimpleNamespace(heartbeat_seconds=5, catalog=SimpleNamespace(directory_id="d"))
    writer = SimpleNamespace(transport=SimpleNamespace(set_write_buffer_limits=lambda _: None))
    reader = SimpleNamespace(read=gives_up)
    connection = Connection(cast(Any, port), cast(Any, reader), cast(Any, writer), "ipv4:[::1]:1")
    connection._has_spoken = True
    with pytest.raises(TimeoutError, match="Connection timed out"):
        await connection._received()
