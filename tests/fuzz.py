"""Bytes that nobody meant, for everything that reads bytes: a value comes out, or the declared error.

A target is a reader, samples of what it should read, and the errors that it declares. ``fuzz`` damages samples in
the ways in which files and wires are damaged, and now and then mends the checksum, so that what lies behind it is
reached as well. Nothing else may be raised, nothing may take long, and nothing may need much memory.
"""

import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import grpc

from tests.raw import with_cells
from tests.storage.stored_blocks import numbers_of
from upr.cli.cat_commands.row_formats import parse_line
from upr.engine.consumers import read_positions
from upr.storage import keyspace
from upr.storage.blocks import HEAD_BYTES, head_of
from upr.storage.journal import Commit, JournalEntry, NumberedWrite, encode_record
from upr.storage.keyspace import (
    ConsumerRow,
    CutRow,
    PartitionRow,
    Pin,
    ProducerRow,
)
from upr_client.changes.events import decode_frame
from upr_client.changes.link import high_seqnos
from upr_protocol.block import FurtherColumn, build_block, crc_of_columns
from upr_protocol.errors import UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.partitioning import partition_of
from upr_protocol.position import Position
from upr_protocol.wire import codec
from upr_protocol.wire import grpc as status
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire
from upr_protocol.wire.v1 import types_pb2

SECONDS_MAX = 2.0
"""CPU for one read: a machine that is busy with other things, or stands still, takes longer for it."""
GROWTH_BYTES_MAX = 512 * 2**20
"""Above it the process may not grow, whatever was read."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes.

    Args:
        read: takes any bytes.
        samples: what it reads without an error.
        errors: what it may raise.
        mend: makes the checksums of damaged bytes fit again.
    """

    name: str
    read: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (UprError,)
    mend: Callable[[bytes], bytes] | None = None


def blocks() -> tuple[bytes, ...]:
    """Encoded blocks of several shapes: numbered, sparse, with deletes, with further columns, compressed."""
    found = []
    for count, value in ((1, b"v"), (40, b"value" * 30), (3, None)):
        block = build_block([b"key%d" % i for i in range(count)], [value] * count)
        runs = block.runs.copy()
        runs["start_seqno"] = 7
        runs["end_seqno"] = runs["horizon"] = runs["start_seqno"] + runs["count"]
        block.runs = runs
        found.append(codec.encode_block(block))
    found.append(codec.compress_block(found[1]))
    further = codec.encode_block(with_cells(codec.decode_block(found[1])))
    return (*found, further, codec.compress_block(further))


def mend_block(data: bytes) -> bytes:
    """Return the bytes with fitting CRCs, if they are a Block at all."""
    try:
        message = types_pb2.Block.FromString(data)
    except Exception:
        return data
    columns = codec._columns_of(message)
    message.table_crc = google_crc32c.value(message.runs)
    told = message.further
    further = tuple(FurtherColumn(one.id, one.offsets, one.data) for one in told)
    message.columns_crc = crc_of_columns(columns, further)
    if message.zstd:
        message.zstd_crc = codec._zstd_crc(message.columns_crc, message.zstd)
    return message.SerializeToString()


def frames() -> tuple[bytes, ...]:
    """Frames of one block, and of small blocks that are joined."""
    some = [types_pb2.Block.FromString(data) for data in blocks()]
    apart = []
    for partition in (3, 7, 9):
        message = types_pb2.Block.FromString(some[0].SerializeToString())
        message.runs = partition.to_bytes(4, "little") + message.runs[4:]
        message.table_crc = google_crc32c.value(message.runs)
        apart.append(message)
    return tuple(
        wire.Frame(blocks=found, tokens=bytes(4 * 64)).SerializeToString()
        for found in ([some[0]], [some[3]], apart)
    )


def _open(data: bytes) -> None:
    codec.check_encoded(data)
    codec.open_columns(data)


def _frame(data: bytes) -> None:
    try:
        frame = wire.Frame.FromString(data)
    except Exception:
        # gRPC refuses what is no message before anybody here sees it.
        return
    decode_frame(frame)


def _heartbeat(data: bytes) -> None:
    high_seqnos(wire.Heartbeat(high_seqnos=data))


def _position(data: bytes) -> None:
    Position.from_json(data)


class _Call(grpc.RpcError):
    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def trailing_metadata(self) -> Any:
        return ((status.PROBLEM_KEY, self._data),)


def _row(name: str, key: bytes, read: Callable[[bytes], object], sample: bytes) -> Target:
    def mend(data: bytes) -> bytes:
        return keyspace.seal(data[:-4], key)

    return Target(name, read, (sample,), mend=mend)


def rows() -> list[Target]:
    """The small values of the store."""
    log = FailoverLog.from_pairs([(1, 0), (2, 5)])
    partition = PartitionRow(4, 1, 3, 9, 2, log, 8, 12, 1, "damaged", 7)
    named = keyspace.producer_key(b"name", 1)
    cut = CutRow(1, 2, 3, {1: Pin(4, 5), 9: Pin(6, 7)})
    return [
        _row(
            "a partition's row",
            keyspace.partition_key(5),
            lambda data: keyspace.unpack_partition(data, 5),
            keyspace.pack_partition(5, partition),
        ),
        _row(
            "a producer's row",
            named,
            lambda data: keyspace.unpack_producer(named, data),
            keyspace.pack_producer(named, numbers_of({17: ProducerRow(1, 2, 3, 4)}, 5).table),
        ),
        _row(
            "a consumer's row",
            named,
            lambda data: keyspace.unpack_consumer(named, data),
            keyspace.pack_consumer(named, ConsumerRow(1, 2, 3, 4)),
        ),
        _row(
            "a cut's row",
            b"cut",
            lambda data: keyspace.unpack_cut(b"cut", data),
            keyspace.pack_cut(b"cut", cut),
        ),
    ]


def targets() -> list[Target]:
    """Everything that reads bytes from a peer or a disk, and needs no file for it."""
    samples = blocks()
    position = Position(3, 4, 4, 9, 9, (2, 9), FailoverLog.from_pairs([(4, 0)]))
    runs = types_pb2.Block.FromString(samples[1]).runs
    problem = types_pb2.Problem(reason="NO_ROOM", retriable=True, message="m", hint="h")
    record = b"".join(
        encode_record(Commit(7, (JournalEntry(samples[0], (NumberedWrite(b"p", 1),)),)))
    )
    return [
        Target("a block", codec.decode_block, samples, mend=mend_block),
        Target("a stored block", _open, samples, mend=mend_block),
        Target("a compressed block", codec.decompress_block, samples, mend=mend_block),
        Target("the size of a block", lambda data: codec.plain_bytes(data, len(data)), samples),
        Target("a run table", codec.decode_runs, (runs,)),
        Target(
            "the head of a block",
            lambda data: head_of(data[:HEAD_BYTES], len(data), partition_of(b"key0"), 8),
            samples[:1],
        ),
        Target(
            "a frame",
            _frame,
            frames(),
        ),
        Target("a heartbeat", _heartbeat, (b"\5\0\0\0\7\0\0\0\0\0\0\0",)),
        Target("an Ack", read_positions, (b"\5\0\0\0\7\0\0\0\0\0\0\0" * 3,)),
        Target(
            "a problem",
            lambda data: status.error_from_call(_Call(data)),
            (problem.SerializeToString(),),
        ),
        Target("a position", _position, (position.to_json().encode(),)),
        Target(
            "a line of JSON",
            parse_line,
            (b'{"key": "k", "value": null}', b'{"key_base64": "AA==", "value_base64": "AA=="}'),
        ),
        Target("a journal record", _journal_record, (record,)),
        *rows(),
    ]


def _journal_record(data: bytes) -> None:
    from upr.storage import journal

    journal._record_at(data, 0)
    journal._find_record(data, 1)


def damaged(sample: bytes, rng: random.Random) -> bytes:
    """Return a sample after one to four accidents."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 4:
            del data[at : at + rng.randint(1, 9)]
        elif kind == 5:
            data[at : at + 4] = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(
                4, "little"
            )
        else:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[other : other + rng.randint(1, 40)]
    return bytes(data)


def cases(target: Target, rng: random.Random) -> Iterator[bytes]:
    """Yield inputs for ever: damaged samples, mended ones, and pure noise."""
    while True:
        data = damaged(rng.choice(target.samples), rng)
        yield data
        if target.mend is not None:
            yield target.mend(data)
        if rng.random() < 0.05:
            yield rng.randbytes(rng.randint(0, 200))


def fuzz(target: Target, seed: int, count: int) -> None:
    """Read so many inputs.

    Raises:
        AssertionError: naming the input; something was raised that is not declared, or took too much.
    """
    rng = random.Random(seed)
    for sample in target.samples:
        target.read(sample)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, _ in zip(cases(target, rng), range(count), strict=False):
        started = time.thread_time()
        try:
            target.read(data)
        except target.errors:
            pass
        except Exception as error:
            raise AssertionError(f"{target.name}: {error!r} for {data.hex()}") from error
        seconds = time.thread_time() - started
        assert seconds < SECONDS_MAX, f"{target.name}: {seconds:.1f} s for {data.hex()}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GROWTH_BYTES_MAX, f"{target.name}: {grown} bytes more, seed {seed}"


def describe(found: Any) -> str:
    """Return a target's name, for pytest."""
    return str(found.name)
