"""Large frames are read as protobuf reads them, or by protobuf."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from upr_client.changes.events import decode_frame
from upr_client.testing.memory import run_block
from upr_protocol.wire import frames
from upr_protocol.wire.codec import compress_block, encode_block, encode_frame
from upr_protocol.wire.frames import Frame, FrameBlock, FrameResponse, response_of
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2

BYTES = st.binary(max_size=6) | st.binary(min_size=130, max_size=140)
CRC = st.sampled_from([0, 1, 0x4D4D4D4D, 2**32 - 1])
FIELDS = {
    field.name: CRC if field.name.endswith("crc") else BYTES
    for field in types_pb2.Block.DESCRIPTOR.fields
    if field.name != "further"
}
BLOCKS = st.builds(types_pb2.Block, **FIELDS)
FRAMES = st.builds(
    wire.Frame,
    blocks=st.lists(BLOCKS, max_size=3),
    tokens=BYTES,
    purge_seqnos=BYTES,
    credit_bytes=st.sampled_from([0, 1, 300, 2**28, 2**32 - 1]),
)
FURTHER = st.lists(st.builds(types_pb2.FurtherColumn, id=st.integers(0, 3), data=BYTES), max_size=2)
UNUSUAL = st.sampled_from(
    [
        wire.FollowResponse(heartbeat=wire.Heartbeat(high_seqnos=b"12")),
        wire.FollowResponse(frame=wire.Frame(plain_runs=[wire.PlainRun(partition=1)])),
        wire.FollowResponse(frame=wire.Frame(producer_writes=[wire.ProducerWrite(number=1)])),
    ]
)


@pytest.fixture(autouse=True, scope="module")
def small_ones_too() -> Iterator[None]:
    with mock.patch.object(frames, "LARGE_BYTES", 1):
        yield


def check_same(data: bytes) -> Any:
    """Check that both read the same; return what was read, None where neither could, or protobuf read the frame."""
    try:
        wanted = wire.FollowResponse.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            response_of(data)
        return None
    read = response_of(data)
    if not isinstance(read, FrameResponse):
        assert read == wanted
        return read
    assert read.size == len(data)
    if not isinstance(read.frame, Frame):
        assert read.frame == wanted.frame
        return None
    assert read.WhichOneof("message") == wanted.WhichOneof("message") == "frame"
    frame = wanted.frame
    assert (read.frame.tokens, read.frame.credit_bytes) == (frame.tokens, frame.credit_bytes)
    told = [[getattr(one, name) for name in FIELDS] for one in frame.blocks]
    assert [[getattr(one, name) for name in FIELDS] for one in read.frame.blocks] == told
    assert {type(one) for block in read.frame.blocks for one in block[:8]} <= {bytes}
    assert not frame.plain_runs
    assert not frame.producer_writes
    assert not any(one.further for one in frame.blocks)
    # Nothing that is known or unknown besides.
    frame.ClearField("purge_seqnos")
    known = [types_pb2.Block(**dict(zip(FIELDS, one, strict=True))) for one in told]
    rest = wire.Frame(blocks=known, tokens=frame.tokens, credit_bytes=frame.credit_bytes)
    assert wire.FollowResponse(frame=rest).SerializeToString() == wanted.SerializeToString()
    return read


@given(frame=FRAMES)
def test_a_frame_is_read_without_protobuf(frame: wire.Frame) -> None:
    data = wire.FollowResponse(frame=frame).SerializeToString()
    assert isinstance(check_same(data), FrameResponse)


@given(frame=FRAMES, further=FURTHER, more=st.none() | UNUSUAL, data=st.data())
def test_what_is_damaged_or_unusual_is_read_by_protobuf_or_the_same(
    frame: wire.Frame, further: Any, more: wire.FollowResponse | None, data: Any
) -> None:
    for block in frame.blocks[:1]:
        block.further.extend(further)
    message = wire.FollowResponse(frame=frame)
    encoded = bytearray(message.SerializeToString())
    if more is not None:
        # Protobuf joins two frames, and of two kinds takes the later.
        encoded += more.SerializeToString()
    for _ in range(data.draw(st.integers(0, 3))):
        at, to = sorted(data.draw(st.integers(0, len(encoded))) for _ in range(2))
        kind = data.draw(st.sampled_from(("changed", "cut", "gone", "moved", "added")))
        if kind == "changed" and at < len(encoded):
            encoded[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(encoded)))
        elif kind == "cut":
            del encoded[at:]
        elif kind == "gone":
            del encoded[at:to]
        elif kind == "moved":
            encoded = encoded[to:] + encoded[at:to] + encoded[:at]
        elif kind == "added":
            encoded[at:at] = data.draw(st.binary(max_size=3))
    check_same(bytes(encoded))


def field(tag: int, value: bytes, length: int | None = None) -> bytes:
    return bytes([tag, len(value) if length is None else length]) + value


@pytest.mark.parametrize(
    "block",
    [
        field(0x12, b"ab") + field(0x0A, b"c"),
        field(0x0A, b"a") + field(0x0A, b"c"),
        field(0x0A, b"a") + bytes([0x15]) + b"1234",
        field(0x4A, b"1234"),
        field(0x0A, b"a") + field(0x72, b"new"),
        b"\x8a\x00\x01a",
        bytes([0x4D]) + b"1234" + field(0x2A, b"keys"),
        bytes([0x4D]) + b"12",
    ],
    ids=["order", "twice", "type", "crc-as-bytes", "unknown", "long-tag", "behind", "short"],
)
def test_a_block_of_another_shape_is_left_to_protobuf(block: bytes) -> None:
    for behind in (b"", field(0x12, b"1234")):
        data = field(0x1A, field(0x0A, block) + behind)
        assert not isinstance(check_same(data), FrameResponse)


@pytest.mark.parametrize(
    "frame",
    [
        field(0x0A, b"", 5),
        field(0x0A, field(0x0A, b"runs", 9)) + field(0x12, b"tokens"),
        field(0x12, b"1234") + field(0x0A, b""),
        b"\x28\xff\xff\xff\xff\x1f",
        b"\x28\xff\xff\xff\xff\xff\x01",
        b"\x28",
    ],
    ids=["beyond", "into-the-next", "order", "credit", "long-credit", "no-credit"],
)
def test_a_frame_of_another_shape_is_left_to_protobuf(frame: bytes) -> None:
    assert not isinstance(check_same(field(0x1A, frame)), FrameResponse)
    for wrong in (-1, 1):
        read = check_same(field(0x1A, field(0x12, b"tokens"), 8 + wrong))
        assert not isinstance(read, FrameResponse)


@pytest.mark.parametrize("compressed", [False, True])
def test_blocks_are_those_of_protobuf(compressed: bool) -> None:
    encoded = []
    for partition in (3, 5):
        rows = [(seqno, b"key-%d" % seqno, b"value" * 40) for seqno in range(1, 40)]
        one = encode_block(run_block(partition, rows, 0, 39, 39, 7))
        encoded.append(compress_block(one) if compressed else one)
    data = encode_frame(encoded, np.array([1, 2], "<u4").tobytes(), 9, b"purged------")
    read = check_same(data)
    assert isinstance(read, FrameResponse)
    assert isinstance(read.frame.blocks[0], FrameBlock)
    blocks, tokens = decode_frame(read.frame)
    wanted, told = decode_frame(wire.FollowResponse.FromString(data).frame)
    assert list(map(encode_block, blocks)) == list(map(encode_block, wanted))
    assert tokens.tolist() == told.tolist()


def test_small_frames_and_those_of_small_blocks_are_left_to_protobuf() -> None:
    blocks = [types_pb2.Block(values=bytes(60)) for _ in range(40)]
    data = wire.FollowResponse(frame=wire.Frame(blocks=blocks)).SerializeToString()
    for least, is_read in ((60, True), (80, False), (10_000, False)):
        with mock.patch.object(frames, "LARGE_BYTES", least):
            assert isinstance(check_same(data), FrameResponse) == is_read
