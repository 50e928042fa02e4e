"""Types of the compiled module, which need not be there: see ``upr_protocol.block.COMPILED``."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Columns = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
Table = npt.NDArray[np.uint64]

def admitted(runs: bytes, active: int, states: npt.NDArray[np.uint8], highs: Table, /) -> bool: ...
def columns(
    keys: Sequence[bytes], values: Sequence[bytes | None], partitions: bytes | None, /
) -> Columns | None: ...
def items(
    runs: bytes,
    seqnos: bytes,
    op_codes: bytes,
    key_offsets: bytes,
    keys: bytes,
    value_offsets: bytes,
    values: bytes,
    /,
) -> list[tuple[bytes, bytes | None]] | None: ...
def joined(blocks: list[Columns], dated: bool, /) -> Columns | None: ...
def numbered(runs: bytes, time: int, highs: Table, /) -> bytes | None: ...
def packed(rows: list[tuple[bytes, bytes | None]], first: int, most: int, /) -> Columns | None: ...
def put_ends(runs: bytes, /, *tables: Table) -> bool: ...
def summary(runs: bytes, /) -> tuple[int, bool] | None: ...

T = TypeVar("T", bound=tuple[object, ...])

def rows(
    kind: type[T],
    ops: tuple[str, str],
    runs: bytes,
    seqnos: bytes,
    op_codes: bytes,
    key_offsets: bytes,
    keys: bytes,
    value_offsets: bytes,
    values: bytes,
    /,
) -> list[T] | None: ...
def size(rows: list[tuple[bytes, bytes | None]], /) -> int | None: ...
def sound(
    numbered: bool,
    runs: bytes,
    seqnos: bytes,
    op_codes: bytes,
    key_offsets: bytes,
    keys: bytes,
    value_offsets: bytes,
    values: bytes,
    times: bytes,
    /,
) -> bool: ...
