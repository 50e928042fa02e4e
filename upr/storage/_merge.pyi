"""Types of the compiled module, which need not be there: see ``upr.storage.blocks.MERGE``."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

def merge(
    blocks: tuple[bytes, ...],
    check: bool,
    first: int,
    last: int,
    most: int,
    stored: npt.NDArray[np.uint64],
    limits: tuple[npt.NDArray[np.uint64], int, npt.NDArray[np.uint64], int] | None,
    /,
) -> list[tuple[int, int, int, int, bytes, bytes]] | None: ...
def opened(block: bytes, /) -> dict[int, tuple[int, int]] | None: ...
def candidate(
    rows: Iterator[tuple[memoryview, memoryview]],
    partition: int,
    end: int,
    above: int,
    most: int,
    blocks: int,
    hash: int,
    /,
) -> tuple[tuple[int, int, int, list[int]] | None, int]: ...
