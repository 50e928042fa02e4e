"""Partition of a key: the one that Couchbase's clients would choose."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, repeat
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from upr_protocol.limits import KEY_BYTES_MAX, PARTITIONS

_AT_A_TIME: Final = 32768


def partition_of(key: bytes) -> int:
    """Return the partition, 0 to 1023, of a key: ``((crc32(key) >> 16) & 0x7fff) % 1024``."""
    return ((crc32(key) >> 16) & 0x7FFF) % PARTITIONS


def partitions_of(keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the partitions of many keys as uint32, shape ``(len(keys),)``."""
    return _partitions(np.fromiter(map(crc32, keys), np.uint32, len(keys)))


def _partitions(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    partitions: npt.NDArray[np.uint32] = ((crcs >> np.uint32(16)) & np.uint32(0x7FFF)) % np.uint32(
        PARTITIONS
    )
    return partitions


def partitions_of_column(
    offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint16]:
    """Return the partitions of keys that lie in one column as uint16, shape ``(len(offsets) - 1,)``.

    Args:
        offsets: int64, where each key begins in ``data``, and the last one's end; every key has 1 to 4096 bytes.
        data: the bytes of all keys, uint8.
    """
    lengths = np.diff(offsets)
    if not len(lengths):
        return np.zeros(0, np.uint16)
    longest = int(lengths.max())
    shares, nothing = _shares(1 << longest.bit_length())
    if longest == lengths.min():
        table = data[offsets[0] : offsets[-1]].reshape(len(lengths), longest)
        partitions = np.full(len(lengths), nothing[longest], np.uint16)
        for column in range(longest):
            partitions ^= np.take(shares[longest - 1 - column], table[:, column], mode="clip")
        return partitions
    # Longest first, so that at each distance from the end the keys that reach as far are the first ones.
    order = np.argsort((KEY_BYTES_MAX - lengths).astype(np.uint16), kind="stable")
    result = np.empty(len(lengths), np.uint16)
    # As many at a time as stay in the processor's cache.
    for first in range(0, len(order), _AT_A_TIME):
        rows = order[first : first + _AT_A_TIME]
        at = offsets[1:][rows]
        missing = -lengths[rows]
        reaching = np.searchsorted(missing, -np.arange(1, 1 - int(missing[0])), side="right")
        partitions = nothing[-missing]
        for distance, count in enumerate(reaching.tolist()):
            at -= 1
            ends = np.take(data, at[:count], mode="clip")
            partitions[:count] ^= np.take(shares[distance], ends, mode="clip")
        result[rows] = partitions
    return result


@cache
def _shares(longest: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Return what each byte adds to a key's partition, and the partitions of keys that are all zero.

    A CRC of keys of one length is linear: it is that of as many zeros, changed by each byte alone. The shares are
    uint16 of shape (longest, 256): the byte's distance from the key's end, its value. The others, shape
    (longest + 1,), go by length.
    """
    zero = crc32(b"\0")
    steps = np.array([crc32(bytes([byte])) ^ zero for byte in range(256)], np.uint32)
    shares = np.empty((longest, 256), np.uint16)
    crcs = steps
    for distance in range(longest):
        shares[distance] = _partitions(crcs)
        crcs = (crcs >> np.uint32(8)) ^ steps[crcs & np.uint32(0xFF)]
    zeros = accumulate(repeat(b"\0", longest), lambda crc, byte: crc32(byte, crc), initial=0)
    return shares, _partitions(np.fromiter(zeros, np.uint32, longest + 1)).astype(np.uint16)
