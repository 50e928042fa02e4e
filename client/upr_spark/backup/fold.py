"""Folding data files into one: the newest row of each key, with a bounded part of them in memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow.compute as pc

from upr_spark.backup.chain import Segment
from upr_spark.backup.manifest import FileRef
from upr_spark.backup.merge import Folded
from upr_spark.backup.point import grouped
from upr_spark.backup.storage import Storage
from upr_spark.backup.tables import RowsWriter, in_order, state
from upr_spark.backup.verify import check_files

_GROUP_BYTES: Final = 64 * 2**20
_TAKE_ROWS: Final = 65_536


class FileFold:
    """Folds the Parquet files of a repository.

    Each file is read once for its SHA-256 before anything of it is used, and so is what was written.

    Args:
        storage: where they are.
        keep: called every second or so.
    """

    def __init__(self, storage: Storage, keep: Callable[[], Any]) -> None:
        self._storage = storage
        self._keep = keep
        self._checked: set[FileRef] = set()

    def __call__(
        self, counted: Mapping[int, Sequence[Segment]], sizes: Mapping[int, int], path: str
    ) -> Folded:
        """Fold partitions into one new file."""
        self._check({part.file for parts in counted.values() for part in parts})
        writer = RowsWriter(self._storage, path)
        try:
            for group in grouped({p: sizes[p] for p in counted}, _GROUP_BYTES):
                self._keep()
                self._add(writer, state(self._storage, {p: counted[p] for p in group}))
            file = writer.finish()
        finally:
            writer.close()
        if file is not None:
            self._check({file})
        return Folded(file, {p: (int(writer.rows[p]), int(writer.data_bytes[p])) for p in counted})

    def _check(self, files: set[FileRef]) -> None:
        for file in sorted(files - self._checked, key=lambda file: file.path):
            self._keep()
            check_files(self._storage, {file})
        self._checked |= files

    def _add(self, writer: RowsWriter, table: Any) -> None:
        live = table.filter(pc.not_equal(table.column("op"), "delete"))
        order = pc.sort_indices(live, [("partition", "ascending"), ("seqno", "ascending")])
        for part in in_order(live, order, _TAKE_ROWS):
            for batch in part.to_batches():
                writer.add_rows(batch)
