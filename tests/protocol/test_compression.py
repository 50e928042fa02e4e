"""Compressed blocks: the same bytes come back, and nothing that a peer makes up costs more than the limits."""

import sys
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.test_block import numbered, rows_strategy, sparse
from tests.raw import is_compressed
from upr_protocol.errors import CorruptBlockError, InvalidArgumentError
from upr_protocol.limits import MESSAGE_BYTES_MAX
from upr_protocol.wire import codec
from upr_protocol.wire.codec import (
    block_from_message,
    check_encoded,
    column_spans,
    compress_block,
    decode_block,
    decompress_block,
    encode_block,
    joined_blocks,
    open_checked,
    open_columns,
    plain_bytes,
)
from upr_protocol.wire.compression import compress, zstd_available
from upr_protocol.wire.v1 import types_pb2

ROWS: list[tuple[bytes, bytes | None]] = [
    (b"key%d" % i, None if i % 7 == 3 else b'{"name": "same", "number": %d}' % (i % 5))
    for i in range(200)
]
PLAIN = encode_block(numbered(ROWS))
PACKED = compress_block(PLAIN)


def columns_of(data: bytes) -> list[bytes]:
    opened, spans = open_columns(data)
    return [opened[slice(*spans.get(field, (0, 0)))] for field in range(2, 9)]


def forged(zstd: bytes, block: bytes = PLAIN) -> bytes:
    """A block whose checksums hold and whose compressed columns are these bytes."""
    message = types_pb2.Block.FromString(block)
    crc = google_crc32c.value(message.columns_crc.to_bytes(4, "little"))
    return types_pb2.Block(
        runs=message.runs,
        columns_crc=message.columns_crc,
        table_crc=message.table_crc,
        zstd=zstd,
        zstd_crc=google_crc32c.extend(crc, zstd),
    ).SerializeToString()


def lengths(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def test_what_was_compressed_comes_back_byte_by_byte() -> None:
    assert is_compressed(PACKED)
    assert not is_compressed(PLAIN)
    assert len(PACKED) < 0.85 * len(PLAIN)
    check_encoded(PACKED)
    assert decompress_block(PACKED) == PLAIN
    assert decompress_block(PLAIN) is PLAIN
    assert compress_block(PACKED) is PACKED
    assert columns_of(PACKED) == columns_of(PLAIN)
    assert repr(decode_block(PACKED)) == repr(decode_block(PLAIN))
    assert decode_block(PACKED).columns_crc == decode_block(PLAIN).columns_crc
    # The consumer counts what protobuf makes of it, the server the bytes.
    assert types_pb2.Block.FromString(PACKED).ByteSize() == len(PACKED)


@given(rows_strategy, st.integers(0, 2**40), st.integers(1, 40))
def test_any_block_comes_back(
    rows: list[tuple[bytes, bytes | None]], start: int, copies: int
) -> None:
    data = encode_block(numbered(rows * copies, start))
    packed = compress_block(data)
    assert decompress_block(packed) == data
    assert decode_block(packed).columns_crc == decode_block(data).columns_crc
    if packed is not data:
        assert len(packed) <= 0.85 * len(data)
    assert (
        abs(plain_bytes(packed[:128], len(packed)) - len(data)) < 128
        or len(decode_block(data).runs) > 1
    )


def test_all_seven_columns_come_back() -> None:
    block = sparse(9, list(range(12, 400, 2)), 10, 500)
    data = encode_block(block)
    packed = compress_block(data)
    assert is_compressed(packed)
    assert all(columns_of(packed))
    assert decompress_block(packed) == data


def test_what_does_not_shrink_stays_as_it_is() -> None:
    rng = np.random.default_rng(1)
    noise = encode_block(numbered([(b"key%d" % i, rng.bytes(300)) for i in range(100)]))
    assert compress_block(noise) is noise
    small = encode_block(numbered([(b"a", b"v" * 400)]))
    assert compress_block(small) is small


def test_a_checksum_of_zero_is_left_out_as_protobuf_does(monkeypatch: pytest.MonkeyPatch) -> None:
    block = replace(numbered(ROWS), columns_crc=0)
    monkeypatch.setattr(codec, "crc_of_columns", lambda columns, further: 0)
    data = encode_block(block)
    packed = compress_block(data)
    assert is_compressed(packed)
    assert 9 not in column_spans(packed)
    assert types_pb2.Block.FromString(packed).ByteSize() == len(packed)
    assert decompress_block(packed) == data


def test_each_thread_compresses_for_itself() -> None:
    found: list[bool] = []

    def work() -> None:
        found.append(all(decompress_block(compress_block(PLAIN)) == PLAIN for _ in range(100)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_any_flipped_bit_is_noticed_without_decompressing() -> None:
    for place in range(len(PACKED)):
        for bit in range(8):
            damaged = bytearray(PACKED)
            damaged[place] ^= 1 << bit
            for read in (check_encoded, decode_block):
                with pytest.raises((CorruptBlockError, InvalidArgumentError)):
                    read(bytes(damaged))


def frame_of(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


COLUMNS = b"".join(columns_of(PLAIN))
LENGTHS = lengths(*map(len, columns_of(PLAIN)))


def lies() -> list[tuple[str, bytes]]:
    huge = MESSAGE_BYTES_MAX + 1
    more = bytearray(COLUMNS)
    more[-1] ^= 1
    stream = zstandard.ZstdCompressor().compressobj()
    unsized = stream.compress(COLUMNS + b"x") + stream.flush()
    window = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=window).compressobj()
    return [
        ("no frame", LENGTHS),
        ("no lengths", b"\1\2\3"),
        ("not zstd", LENGTHS + b"\0" * 100),
        ("cut short", LENGTHS + frame_of(COLUMNS)[:-5]),
        ("header only", LENGTHS + frame_of(COLUMNS)[:7]),
        ("something follows", LENGTHS + frame_of(COLUMNS) + b"x"),
        ("two frames", LENGTHS + frame_of(COLUMNS[:50]) + frame_of(COLUMNS[50:])),
        ("a skippable frame", LENGTHS + b"\x50\x2a\x4d\x18\x04\0\0\0abcd"),
        ("fewer bytes", LENGTHS + frame_of(COLUMNS[:-1])),
        ("more bytes", LENGTHS + frame_of(COLUMNS + b"x")),
        ("more bytes, no size told", LENGTHS + unsized),
        ("fewer bytes, no size told", LENGTHS + frame_of(COLUMNS[:-1], write_content_size=False)),
        ("other bytes", LENGTHS + frame_of(bytes(more))),
        ("a window of 128 MiB", LENGTHS + wide.compress(COLUMNS) + wide.flush()),
        ("a bomb", lengths(0, 0, 0, 0, 0, huge, 0) + frame_of(bytes(huge))),
        ("lengths beyond 32 bits", lengths(*[2**32 - 1] * 7) + frame_of(COLUMNS)),
        ("nothing", lengths(*[0] * 7) + frame_of(b"")),
    ]


@pytest.mark.parametrize(("name", "zstd"), lies(), ids=[name for name, _ in lies()])
def test_lying_frames(name: str, zstd: bytes) -> None:
    data = forged(zstd)
    check_encoded(data)
    for read in (decode_block, decompress_block, open_columns):
        with pytest.raises(CorruptBlockError):
            read(data)


def test_a_frame_that_does_not_tell_its_size_is_taken() -> None:
    data = forged(LENGTHS + frame_of(COLUMNS, write_content_size=False))
    assert decompress_block(data) == PLAIN


def test_a_told_size_is_not_allocated() -> None:
    frame = bytearray(frame_of(bytes(200 * 2**20)))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBlockError, match="209715200"):
            decode_block(forged(LENGTHS + bytes(frame)))
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


@given(
    st.lists(st.integers(0, 300) | st.integers(0, 2**32 - 1), min_size=7, max_size=7),
    st.binary(max_size=300),
    st.sampled_from(["as it is", "framed", "behind a header", "instead of the end"]),
)
def test_any_bytes_give_a_block_or_the_declared_error(
    numbers: list[int], noise: bytes, shape: str
) -> None:
    frame = {
        "as it is": noise,
        "framed": frame_of(noise),
        "behind a header": frame_of(COLUMNS)[:9] + noise,
        "instead of the end": frame_of(COLUMNS)[: -len(noise) or None] + noise,
    }[shape]
    for head in (lengths(*numbers), LENGTHS):
        data = forged(head + frame)
        for read in (decode_block, decompress_block, open_columns):
            try:
                read(data)
            except InvalidArgumentError:
                continue
    plain_bytes(frame, len(frame))


@given(st.binary(max_size=300))
def test_any_bytes_at_all(data: bytes) -> None:
    for read in (decode_block, decompress_block, check_encoded, compress_block):
        try:
            read(data)
        except InvalidArgumentError:
            continue
    assert plain_bytes(data, len(data)) >= 0


def test_a_length_without_end_is_refused_at_once() -> None:
    with pytest.raises(CorruptBlockError):
        column_spans(b"\x0a" + b"\xff" * 2**20)


def test_columns_beside_compressed_ones_are_refused() -> None:
    message = types_pb2.Block.FromString(PACKED)
    message.keys = b"k"
    with pytest.raises(CorruptBlockError, match="has columns"):
        block_from_message(message)


@pytest.mark.parametrize("field", [b"\x6a\x00", b"\x0a\x00", b"\x62\x00"])
def test_many_fields_are_refused_before_they_become_objects(field: bytes) -> None:
    junk = field * 2**20
    columns = [*columns_of(PLAIN), junk]
    lengths = np.array([len(column) for column in columns], "<u4").tobytes()
    data = forged(lengths + compress(b"".join(columns)))
    check_encoded(data)
    for read in (decode_block, decompress_block, open_columns, open_checked):
        tracemalloc.start()
        with pytest.raises(CorruptBlockError, match="bytes are not a block"):
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(junk)
    with pytest.raises(CorruptBlockError, match="bytes are not a block"):
        open_columns(PLAIN + junk)


def test_another_field_among_further_columns_is_refused() -> None:
    columns = [*columns_of(PLAIN), b"\x0a\x00"]
    lengths = np.array([len(column) for column in columns], "<u4").tobytes()
    with pytest.raises(CorruptBlockError, match="other fields"):
        open_columns(forged(lengths + compress(b"".join(columns))))


def test_a_write_is_never_compressed() -> None:
    message = types_pb2.Block.FromString(PACKED)
    with pytest.raises(InvalidArgumentError, match="compressed"):
        block_from_message(message, numbered=False)


def test_a_frame_does_not_decompress_to_more_than_a_message() -> None:
    big = numbered([(b"key%d" % i, bytes(2**20)) for i in range(9)])
    message = types_pb2.Block.FromString(compress_block(encode_block(big)))
    assert message.ByteSize() < 10_000
    tokens = np.zeros(3, np.uint32)
    assert [block.rows for block in joined_blocks([message] * 2, tokens[:2])[0]] == [9, 9]
    with pytest.raises(CorruptBlockError, match="a frame's"):
        joined_blocks([message] * 3, tokens)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert not zstd_available()
    check_encoded(PACKED)
    with pytest.raises(CorruptBlockError) as caught:
        decode_block(PACKED)
    assert "upr-stream[zstd]" in caught.value.hint
    monkeypatch.undo()
    assert zstd_available()


def test_a_checksum_that_is_too_long_is_damage() -> None:
    """One bit of a tag makes a field of four bytes one of any length."""
    at, end = column_spans(PACKED)[9]
    longer = PACKED[: at - 1] + bytes([9 << 3 | 2, 5]) + b"\xff" * 5 + PACKED[end:]
    for check in (check_encoded, open_checked):
        with pytest.raises(CorruptBlockError, match="checksum is 5 bytes"):
            check(longer)
