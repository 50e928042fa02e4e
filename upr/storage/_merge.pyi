"""Types of the compiled module, which need not be there: see ``upr.storage.blocks.MERGE``."""

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
