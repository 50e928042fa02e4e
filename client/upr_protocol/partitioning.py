"""Which partition a key belongs to: the one that Couchbase's clients would choose."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from upr_protocol.limits import PARTITIONS


def partition_of(key: bytes) -> int:
    """Return the partition, 0 to 1023, of a key: ``((crc32(key) >> 16) & 0x7fff) % 1024``."""
    return ((crc32(key) >> 16) & 0x7FFF) % PARTITIONS


def partitions_of(keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the partitions of many keys as uint32, shape ``(len(keys),)``."""
    crcs = np.fromiter(map(crc32, keys), np.uint32, len(keys))
    partitions: npt.NDArray[np.uint32] = ((crcs >> np.uint32(16)) & np.uint32(0x7FFF)) % np.uint32(
        PARTITIONS
    )
    return partitions
