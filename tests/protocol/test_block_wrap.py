"""Offsets that wrap around int32 lie about where values are."""

from dataclasses import replace

import numpy as np
import pytest

from upr_protocol.block import build_block, check_block, make_runs, sealed
from upr_protocol.errors import CorruptBlockError
from upr_protocol.limits import VALUE_BYTES_MAX


def test_offsets_that_wrap_around_are_refused() -> None:
    # Each length by itself is in its range; together they go once around 2^32.
    lengths = [VALUE_BYTES_MAX] * (2**32 // VALUE_BYTES_MAX)
    lengths += [2**32 - sum(lengths), 3]
    rows = len(lengths)
    offsets = np.cumsum(np.array([0, *lengths], np.int64)) % 2**32
    block = build_block([b"%06d" % i for i in range(rows)], [b""] * rows)
    block = sealed(
        replace(
            block,
            runs=make_runs([1], [rows]),
            value_offsets=offsets.astype("<u4").tobytes(),
            values=b"abc",
        )
    )
    with pytest.raises(CorruptBlockError, match="fall"):
        check_block(block, numbered=False)
