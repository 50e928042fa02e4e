"""Types of the compiled module, which need not be there: see ``upr_client.changes.events.block_changes``."""

from typing import TypeVar

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
