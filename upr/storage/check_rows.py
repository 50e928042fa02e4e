"""Checks of everything in a store but blocks: identity, partition rows, cuts, consumers, producers."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from upr.storage import keyspace
from upr.storage.check_findings import Finding, Report
from upr.storage.keyspace import CutRow, PartitionRow
from upr.storage.store import FORMAT, Identity
from upr_protocol.errors import DataDamagedError, DataDirectoryError, InvalidArgumentError
from upr_protocol.limits import NAME_BYTES_MAX, PARTITIONS, SEQNO_MAX
from upr_protocol.wire.positions import position_from_message
from upr_protocol.wire.v1 import change_stream_service_pb2 as wire

ACTIVE = 1
_STATES = range(1, 5)
_IDENTITY, _PROOF = b"identity", b"clean_shutdown_proof"
_FLUSHED = (b"clean", b"created")
Items = Callable[[bytes], Iterator[tuple[bytes, bytes]]]
"""Yields the keys and values of a table by its name."""


def check_identity(items: Items, version: str, report: Report) -> tuple[Identity | None, bool]:
    """Check the table ``meta``.

    Args:
        version: what the bucket's folder says, 16 hex digits.

    Returns the identity, None when it cannot be read, and whether there is a proof that the tail was flushed.

    Raises:
        DataDirectoryError: the store's format is not known here.
    """
    identity, flushed = None, False
    for key, value in items(b"meta"):
        try:
            body = keyspace.unseal(value, key, f"meta {key.decode(errors='replace')!r}")
            if key == _IDENTITY:
                identity = _identity(body)
            elif key == _PROOF:
                flushed = body in _FLUSHED
        except DataDamagedError as error:
            report(Finding(error.message))
    if identity is None:
        report(Finding("the bucket's identity is missing or cannot be read"))
    elif f"{identity.version:016x}" != version:
        report(Finding(f"the folder is {version}, the identity says {identity.version:016x}"))
    return identity, flushed


def _identity(body: bytes) -> Identity:
    try:
        text = json.loads(body)
        told = text["format"]
        identity = Identity(text["name"], int(text["version"], 16), text.get("compression", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataDamagedError(f"the bucket's identity is malformed: {error}") from error
    if told != FORMAT:
        raise DataDirectoryError(
            f"the store of bucket {identity.name!r} has format {told}, this program knows {FORMAT}",
            hint="use the program that wrote it, or a newer one",
        )
    return identity


def check_partition_rows(items: Items, report: Report) -> dict[int, PartitionRow]:
    """Check the table ``partitions``; returns the rows that can be read."""
    rows: dict[int, PartitionRow] = {}
    seen: set[int] = set()
    for key, value in items(b"partitions"):
        if len(key) != 2 or int.from_bytes(key, "big") >= PARTITIONS:
            report(Finding(f"a row of the partitions has the key {key.hex()}"))
            continue
        partition = int.from_bytes(key, "big")
        seen.add(partition)
        try:
            row = rows[partition] = keyspace.unpack_partition(value, partition)
        except DataDamagedError as error:
            report(Finding(error.message, partition=partition))
            continue
        if row.state not in _STATES:
            report(Finding(f"its state is {row.state}, known are 1 to 4", partition=partition))
        if max(row.stored_high, row.purge_seqno) > SEQNO_MAX:
            report(Finding("its row has a seqno of 2^48 or more", partition=partition))
    for partition in sorted(set(range(PARTITIONS)) - seen):
        report(Finding("its row is missing", partition=partition))
    return rows


def check_ends(rows: Mapping[int, PartitionRow], highs: Mapping[int, int], report: Report) -> None:
    """Check what rows say against where the data of store and journal end."""
    for partition, row in rows.items():
        high = highs.get(partition, 0)
        if row.purge_seqno > high:
            words = f"its purge seqno is {row.purge_seqno}, its data ends at {high}"
            report(Finding(words, partition=partition, above=high, end=row.purge_seqno))
        newest = row.log.newest.seqno
        if newest > high:
            words = f"its failover log has a record at {newest}, its data ends at {high}"
            report(Finding(words, partition=partition, above=high, end=newest))


def check_consumers(
    items: Items, rows: Mapping[int, PartitionRow], highs: Mapping[int, int], report: Report
) -> None:
    """Check the tables ``consumers`` and ``producers``."""
    for table, what in ((b"consumers", "consumer"), (b"producers", "producer")):
        for key, value in items(table):
            name, partition = key[:-3], int.from_bytes(key[-2:], "big")
            if not 4 <= len(key) <= NAME_BYTES_MAX + 3 or key[-3] or partition >= PARTITIONS:
                report(Finding(f"a row of the {what}s has the key {key.hex()}"))
                continue
            try:
                failover_id, seqno = _told(what, key, value)
            except (DataDamagedError, struct.error) as error:
                report(Finding(f"{what} {_name(name)}: {error}", partition=partition))
                continue
            row = rows.get(partition)
            # Under an older id, what lay above the next record was undone, and may have been acknowledged.
            known = row is not None and row.log.newest.failover_id == failover_id
            if (
                known
                and row is not None
                and row.state == ACTIVE
                and seqno > highs.get(partition, 0)
            ):
                words = f"{what} {_name(name)} is at {seqno}, the data ends at {highs.get(partition, 0)}"
                report(
                    Finding(words, partition=partition, above=highs.get(partition, 0), end=seqno)
                )


def _told(what: str, key: bytes, value: bytes) -> tuple[int, int]:
    if what == "consumer":
        consumer = keyspace.unpack_consumer(key, value)
        _check_saved(key, consumer.position)
        return consumer.failover_id, consumer.seqno
    producer = keyspace.unpack_producer(key, value)
    if producer.end_seqno < producer.start_seqno:
        raise DataDamagedError("its seqnos run backwards")
    return producer.failover_id, producer.end_seqno


def _check_saved(key: bytes, stored: bytes) -> None:
    if not stored:
        return
    try:
        position = wire.Position.FromString(stored)
        position_from_message(position, 0)
    except (DecodeError, InvalidArgumentError) as error:
        raise DataDamagedError(f"its saved position is damaged: {error}") from error
    if position.partition != keyspace.unpack_consumer_key(key)[1]:
        raise DataDamagedError(f"its saved position is one of partition {position.partition}")


def _name(name: bytes) -> str:
    return repr(name.decode(errors="replace"))


def check_cuts(items: Items, now: int, report: Report) -> dict[int, list[tuple[str, int, int]]]:
    """Check the table ``cuts``.

    Args:
        now: microseconds since the epoch; a cut whose lease has ended pins nothing any more.

    Returns by partition the pins of the others: (cut, failover id, seqno).
    """
    pins: dict[int, list[tuple[str, int, int]]] = {}
    for key, value in items(b"cuts"):
        try:
            row: CutRow = keyspace.unpack_cut(key, value)
        except DataDamagedError as error:
            report(Finding(error.message))
            continue
        for partition, pin in row.pins.items():
            if partition >= PARTITIONS or pin.seqno > SEQNO_MAX:
                report(Finding(f"cut {_name(key)} pins partition {partition} at {pin.seqno}"))
            elif row.expires > now:
                pins.setdefault(partition, []).append((_name(key), pin.failover_id, pin.seqno))
    return pins


def check_pin_ids(
    pins: Mapping[int, list[tuple[str, int, int]]],
    rows: Mapping[int, PartitionRow],
    highs: Mapping[int, int],
    report: Report,
) -> None:
    """Check that pins lie in the history that is there."""
    for partition, several in pins.items():
        row: Any = rows.get(partition)
        for name, failover_id, seqno in several:
            end = highs.get(partition, 0)
            if row is not None and failover_id in row.log:
                following = row.log.next_after(failover_id)
                end = end if following is None else min(end, following.seqno)
            if seqno > end:
                words = (
                    f"cut {name} pins {seqno}, its history ends at {end}: it is not exact any more"
                )
                report(Finding(words, partition=partition, above=end, end=seqno))
