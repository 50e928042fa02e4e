"""Frames at a follower: large ones are read from their bytes, as protobuf's parser would copy each column once more, and
small ones become one.

What is read here has the attributes of protobuf's messages that a follower looks at, and what anything else is made of
is not looked at: protobuf reads it, or says what is wrong.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from upr_protocol.wire.codec import varint_at
from upr_protocol.wire.v1.change_stream_service_pb2 import FollowRequest, FollowResponse
from upr_protocol.wire.v1.change_stream_service_pb2_grpc import ChangeStreamServiceStub

LARGE_BYTES: Final = 128 * 1024
"""Frames whose blocks have fewer bytes on average are read by protobuf: what it does for each field is faster."""

_FRAME_TAG, _BLOCK_TAG, _TOKENS_TAG, _PURGE_SEQNOS_TAG, _CREDIT_TAG = 0x1A, 0x0A, 0x12, 0x1A, 0x28
_BLOCK_TAGS: Final = bytes([*range(0x0A, 0x4A, 8), 0x4D, 0x55, 0x5A, 0x65])
"""Of the fields of a ``FrameBlock``, in their order; 0x4D, 0x55 and 0x65 are fixed32."""


class FrameBlock(NamedTuple):
    """As ``types_pb2.Block``, without further columns."""

    runs: bytes
    seqnos: bytes
    ops: bytes
    key_offsets: bytes
    keys: bytes
    value_offsets: bytes
    values: bytes
    times: bytes
    columns_crc: int
    table_crc: int
    zstd: bytes
    zstd_crc: int
    further: tuple[()] = ()


class Frame(NamedTuple):
    """As ``Frame`` of the wire, as far as a follower needs it."""

    blocks: list[FrameBlock]
    tokens: bytes
    credit_bytes: int


class FrameResponse(NamedTuple):
    """As a ``FollowResponse`` that holds a frame.

    Attributes:
        frame: a ``Frame``, or protobuf's, which has the same attributes.
        size: of the message, in bytes.
    """

    frame: Any
    size: int

    def WhichOneof(self, _: str) -> str:
        """Return what it holds."""
        return "frame"


def response_of(data: bytes) -> Any:
    """Return a ``FollowResponse``, or a ``FrameResponse`` where that holds a frame.

    Raises:
        DecodeError: the bytes are none.
    """
    if len(data) >= LARGE_BYTES and data[0] == _FRAME_TAG:
        try:
            return FrameResponse(_frame(data), len(data))
        except IndexError:
            # Further columns, fields in another order, or damage.
            pass
    response = FollowResponse.FromString(data)
    return FrameResponse(response.frame, len(data)) if response.HasField("frame") else response


def may_join(message: Any, room: int) -> bool:
    """Return whether a message holds a frame that may become one with others, and is at most ``room`` bytes.

    No compressed one: blocks are much more than their compressed bytes, and a frame has a limit for that.
    """
    if not isinstance(message, FrameResponse) or message.size > room:
        return False
    return not any([block.zstd for block in message.frame.blocks])


def one_frame(messages: Sequence[FrameResponse]) -> FrameResponse:
    """Return responses that hold frames, in their order, as one."""
    frames = [message.frame for message in messages]
    blocks = [block for frame in frames for block in frame.blocks]
    tokens = b"".join([frame.tokens for frame in frames])
    credit = sum([frame.credit_bytes for frame in frames])
    return FrameResponse(Frame(blocks, tokens, credit), sum([one.size for one in messages]))


def follower_stub(channel: Any) -> Any:
    """Return the generated stub of a channel, but that its ``Follow`` gives what ``response_of`` returns."""
    stub: Any = ChangeStreamServiceStub(channel)
    stub.Follow = channel.stream_stream(
        "/upr.v1.ChangeStreamService/Follow",
        request_serializer=FollowRequest.SerializeToString,
        response_deserializer=response_of,
    )
    return stub


# All raise IndexError where a message is not what encode_frame and protobuf write: each field once, in ascending order.
# A field that goes beyond its end is found there: the next one does not begin at the end.


def _frame(data: bytes) -> Frame:
    end = len(data)
    length, at = varint_at(data, 1)
    if at + length != end:
        raise IndexError
    blocks: list[FrameBlock] = []
    while at < end and data[at] == _BLOCK_TAG:
        length, at = varint_at(data, at + 1)
        blocks.append(_block(data, at, at + length))
        at += length
        if len(blocks) * LARGE_BYTES > end:
            raise IndexError
    tokens, at = _bytes(data, at, end, _TOKENS_TAG)
    _, at = _bytes(data, at, end, _PURGE_SEQNOS_TAG)
    credit = 0
    if at < end and data[at] == _CREDIT_TAG:
        credit, at = varint_at(data, at + 1)
    if at != end or credit >> 32:
        raise IndexError
    return Frame(blocks, tokens, credit)


def _block(data: bytes, at: int, end: int) -> FrameBlock:
    fields: list[Any] = []
    for tag in _BLOCK_TAGS:
        read = _fixed if tag & 7 == 5 else _bytes
        field, at = read(data, at, end, tag)
        fields.append(field)
    if at != end:
        raise IndexError
    return FrameBlock(*fields)


def _bytes(data: bytes, at: int, end: int, tag: int) -> tuple[bytes, int]:
    """Return the bytes of a field, none where another one is there, and where the next one begins."""
    if at >= end or data[at] != tag:
        return b"", at
    length, at = varint_at(data, at + 1)
    return data[at : at + length], at + length


def _fixed(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    if at >= end or data[at] != tag:
        return 0, at
    return int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
