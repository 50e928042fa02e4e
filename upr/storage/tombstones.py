"""Which rows are tombstones that may go.

A tombstone may go only where nothing older of its key is left: in a merge that begins at 0, which sees every
older row of the key and drops it as well.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from upr_protocol.block import I64, U64


@dataclass(frozen=True, slots=True)
class PurgeLimits:
    """What may be purged, by partition; seqnos of shape (1024,), times in microseconds since the epoch.

    Attributes:
        passed, old: tombstones at or below the seqno may go when they are of the time or older.
        never, very_old: the same for those whom streams and consumers hold up no longer. No tombstone above
            ``never`` may go at all.
    """

    passed: U64
    old: int
    never: U64
    very_old: int

    def held(self, partitions: I64, seqnos: U64, times: I64) -> npt.NDArray[np.bool_]:
        """Tell which tombstones may go because everybody has passed them; one flag a row."""
        return (seqnos <= self.passed[partitions]) & (times <= self.old)

    def free(self, partitions: I64, seqnos: U64, times: I64) -> npt.NDArray[np.bool_]:
        """Tell which may go whoever has not passed them."""
        return (seqnos <= self.never[partitions]) & (times <= self.very_old)


@dataclass(frozen=True, slots=True)
class Purge:
    """The tombstones that a merge of one partition drops.

    Attributes:
        seqno: the newest of them: the purge seqno to be.
        held_seqno: the newest of those that go only because everybody has passed them; 0 for none.
        count: how many there are.
    """

    seqno: int
    held_seqno: int
    count: int


def purge_of(seqnos: U64, free: npt.NDArray[np.bool_]) -> Purge:
    """Sum up the rows that go: their seqnos, at least one, and which of them go whoever has not passed them."""
    held = seqnos[~free]
    return Purge(int(seqnos.max()), int(held.max()) if len(held) else 0, len(seqnos))
