"""What storage did since the server was started; for ``upr-admin storage``."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Sums since the start; bytes are those of encoded blocks unless said otherwise.

    Attributes:
        ingested_bytes: columns of numbered blocks.
        journalled_bytes: journal records.
        flushed_bytes: blocks that flushes stored.
        merge_input_bytes, merge_output_bytes: blocks that merges read and stored.
        merge_input_rows, merge_output_rows: their rows.
        merge_seconds: time that merges worked.
        purged_tombstones: tombstones dropped.
    """

    ingested_bytes: int = 0
    journalled_bytes: int = 0
    flushed_bytes: int = 0
    merge_input_bytes: int = 0
    merge_output_bytes: int = 0
    merge_input_rows: int = 0
    merge_output_rows: int = 0
    merge_seconds: float = 0.0
    purged_tombstones: int = 0
