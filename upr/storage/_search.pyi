"""Types of the compiled module, which need not be there: see ``upr.storage.blocks.OPENED``."""

from collections.abc import Iterator

from upr_protocol.block import U32

def opened(block: bytes, /) -> dict[int, tuple[int, int]] | None: ...
def wanted_rows(hashes: U32, wanted: bytes, /) -> bytes: ...
def candidate(
    rows: Iterator[tuple[memoryview, memoryview]],
    partition: int,
    end: int,
    above: int,
    most: int,
    blocks: int,
    hashes: bytes,
    /,
) -> tuple[tuple[int, int, int, list[int]] | None, int]: ...
def rows_at(
    block: bytes, rows: list[int], check: bool, /
) -> list[tuple[int, int, bytes, bytes | None]] | None: ...
