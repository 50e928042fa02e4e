"""The state at a restore point as a table for analysts: Parquet files, or a Delta table."""

import glob
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upr_backup.errors import NotEmptyError
from upr_backup.repository import LocalStorage, Storage, open_storage
from upr_backup.repository.object_store import interruptible, of_object_store
from upr_backup.rows import Point, data_bytes, each_group, in_order, live, shown
from upr_protocol.errors import InvalidArgumentError, MissingPackageError, UprError

_ROW_GROUP_ROWS: Final = 131_072
_BATCH_ROWS: Final = 65_536
_UNFINISHED: Final = "_unfinished"
_DONE: Final = "_SUCCESS"
_PART: Final = re.compile(r"part-[0-9]{5,}\.parquet")
_LITTER_SECONDS: Final = 3600.0
_WORDS: Final = 300
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class ExportFailedError(UprError):
    """The table could not be written."""

    default_reason = "EXPORT_FAILED"


def schema(utf8: bool) -> Any:
    """Return the columns of a table, keys and values as strings or as binary; a deleted key has no value."""
    kind = pa.string() if utf8 else pa.binary()
    return pa.schema(
        [
            pa.field("key", kind, nullable=False),
            pa.field("value", kind),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("seqno", pa.int64(), nullable=False),
            pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    )


@dataclass(slots=True)
class Export:
    """One export. One group of partitions is in memory at a time.

    Args:
        with_deletes: whether deleted keys are in the table, without a value.
        utf8: whether keys and values are strings.
        progress: called with partitions done and in all.

    Attributes:
        rows, data_bytes: how many rows, and bytes of keys and values, were written so far.
    """

    point: Point
    key_prefix: bytes = b""
    with_deletes: bool = False
    utf8: bool = False
    progress: Callable[[int, int], Any] = lambda done, total: None
    rows: int = field(default=0, init=False)
    data_bytes: int = field(default=0, init=False)

    def tables(self) -> Iterator[Any]:
        """Yield the state of each group, sorted by partition and key, as a table of ``schema``.

        Raises:
            RepositoryDamagedError: a file cannot be read.
            InvalidArgumentError: a key or value is not UTF-8, although strings were asked for.
        """
        for group in each_group(self.point.groups(), self.progress):
            table = self.point.state(group, self.key_prefix)
            table = table if self.with_deletes else live(table)
            order = pc.sort_indices(table, [("partition", "ascending"), ("key", "ascending")])
            for part in in_order(table, order, max(table.num_rows, 1)):
                yield self._shaped(part)

    def _shaped(self, table: Any) -> Any:
        self.rows += table.num_rows
        self.data_bytes += data_bytes(table)
        wanted = schema(self.utf8)
        columns = [table.column(name) for name in wanted.names]
        if self.utf8:
            columns[:2] = [_strings(table, "key"), _strings(table, "value")]
        return pa.Table.from_arrays(columns, schema=wanted)


def _strings(table: Any, name: str) -> Any:
    column = table.column(name)
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        for key, data in zip(table.column("key"), column, strict=True):
            try:
                (data.as_py() or b"").decode()
            except UnicodeDecodeError:
                raise InvalidArgumentError(
                    f"{'the key' if name == 'key' else 'the value of key'} {shown(key.as_py())} is not UTF-8",
                    hint="export without --utf8: then keys and values are binary",
                ) from None
        raise


# Parquet.


def to_parquet(export: Export, to: str) -> int:
    """Write a folder of Parquet files, and return how many; it appears whole on a local disk, and ends in _SUCCESS in
    an object store.

    Args:
        to: a location as ``open_storage`` takes it; empty, or not there yet.

    Raises:
        NotEmptyError: there is something.
        OSError: it cannot be written.
        UprError: as ``Export.tables`` raises.
    """
    storage = open_storage(to)
    if isinstance(storage, LocalStorage):
        return _to_folder(export, storage.root)
    return _to_store(export, storage)


def _to_folder(export: Export, target: Path) -> int:
    target = Path(os.path.realpath(target))
    _check_empty_folder(target)
    if target.is_mount():
        raise InvalidArgumentError(
            f"{target} is where a disk is mounted, and a folder cannot be put in its place whole",
            hint="export to a folder in it",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.unfinished")
    beside.mkdir()
    try:
        files = _parts(export, LocalStorage(beside))
        try:
            beside.rename(target)
        except OSError:
            _check_empty_folder(target)
            raise
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return files


def _check_empty_folder(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise _not_empty(str(target))


def _not_empty(where: str) -> NotEmptyError:
    return NotEmptyError(f"{where} is there already", hint="export to a place that is empty")


def _sweep(target: Path) -> None:
    """Remove what killed exports to the same place left an hour ago or more."""
    for litter in target.parent.glob(f".{glob.escape(target.name)}.*.unfinished"):
        with suppress(OSError):
            if time.time() - litter.stat().st_mtime > _LITTER_SECONDS:
                shutil.rmtree(litter, ignore_errors=True)


def _to_store(export: Export, storage: Storage) -> int:
    names = storage.names("")
    if names and not _is_litter(names):
        raise _not_empty(storage.location)
    mark = f"{_UNFINISHED}-{secrets.token_hex(8)}"
    storage.put_if_absent(mark, b"")
    try:
        for name in names:
            storage.delete(name)
        if storage.names("") != [mark]:
            # The rest is the other one's, and may be what it goes on with.
            storage.delete(mark)
            raise _not_alone(storage)
        files = _parts(export, storage)
        if mark not in storage.names(""):
            raise _not_alone(storage)
        storage.put_if_absent(_DONE, b"")
    except BaseException:
        with suppress(OSError, UprError):
            _remove_own(storage, mark)
        raise
    storage.delete(mark)
    return files


def _not_alone(storage: Storage) -> ExportFailedError:
    return ExportFailedError(
        f"another export to {storage.location} began meanwhile", hint="give each a place"
    )


def _is_litter(names: list[str]) -> bool:
    """Whether all there is was left by an export that was killed."""
    marks = [name for name in names if name.startswith(_UNFINISHED)]
    return bool(marks) and all(name in marks or _PART.fullmatch(name) for name in names)


def _remove_own(storage: Storage, mark: str) -> None:
    names = storage.names("")
    if mark in names:
        # The mark last: without it the rest would be somebody's data.
        for name in [*(name for name in names if _PART.fullmatch(name)), mark]:
            storage.delete(name)


def _parts(export: Export, storage: Storage) -> int:
    files = 0
    for files, table in enumerate(export.tables(), 1):
        _write_part(storage, f"part-{files - 1:05d}.parquet", table)
    if not files:
        # So that whoever reads it finds the columns.
        _write_part(storage, "part-00000.parquet", schema(export.utf8).empty_table())
    return max(files, 1)


def _write_part(storage: Storage, name: str, table: Any) -> None:
    sink = storage.create(name)
    try:
        pq.write_table(
            table,
            pa.PythonFile(sink, mode="w"),
            compression="zstd",
            row_group_size=_ROW_GROUP_ROWS,
            use_dictionary=["partition"],
        )
        sink.finish()
    finally:
        sink.close()


# Delta.


def to_delta(export: Export, to: str, overwrite: bool) -> None:
    """Write a Delta table in one commit.

    Args:
        to: a path or URL as the package deltalake takes it.
        overwrite: whether a table that is there is replaced; its older versions stay readable.

    Raises:
        MissingPackageError: deltalake is not installed.
        NotEmptyError: there is a table that is not to be replaced, or a repository.
        ExportFailedError: it cannot be written.
        OSError, UprError: an object store refuses or cannot be reached, as ``Storage`` raises.
        UprError: as ``Export.tables`` raises.
    """
    if not to:
        raise InvalidArgumentError("the location of the table is empty")
    if (Path(to) / "repository.json").exists():
        raise NotEmptyError(f"{to} is a repository", hint="give the table a place of its own")
    # Its log of how it looks for credentials goes to stderr, beside the error that says the same.
    os.environ.setdefault("RUST_LOG", "off")
    try:
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise MissingPackageError(
            f"a Delta table needs the package deltalake: {error}",
            hint="pip install 'upr-stream[delta]'",
        ) from error
    failures: list[Exception] = []
    halted = threading.Event()
    rows = pa.RecordBatchReader.from_batches(
        schema(export.utf8), _batches(export, failures, halted)
    )

    def write() -> None:
        if not overwrite and DeltaTable.is_deltatable(to):
            raise NotEmptyError(
                f"there is a Delta table in {to} already",
                hint="--overwrite replaces it in one commit",
            )
        write_deltalake(
            to,
            rows,
            mode="overwrite" if overwrite else "error",
            schema_mode="overwrite" if overwrite else None,
        )

    try:
        # Left alone, its threads would abort the interpreter that ends, or commit behind the user's back.
        interruptible(write, halted.set)
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        # What ended the rows comes back as text only.
        if failures:
            raise failures[0] from error
        raise _delta_failure(error, to) from error


def _delta_failure(error: Exception, to: str) -> Exception:
    text = _COLOURS.sub("", str(error)).replace(" ↳", ":")
    known = of_object_store(text, to) if "://" in to else None
    if known is not None:
        return known
    words = " ".join(text.split())[:_WORDS]
    return ExportFailedError(f"the Delta table {to} cannot be written: {words}")


def _batches(export: Export, failures: list[Exception], halted: threading.Event) -> Iterator[Any]:
    try:
        for table in export.tables():
            for batch in table.to_batches(_BATCH_ROWS):
                if halted.is_set():
                    raise ExportFailedError("interrupted")
                yield batch
    except Exception as error:
        failures.append(error)
        raise
