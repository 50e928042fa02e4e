"""What the tests of the sink write, and what they find in the server then."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from upr_client import Client, Only
from upr_client.types import Bucket
from upr_spark.errors import UprSparkError, find_error
from upr_spark.sink import writers

UPSERT = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
APPLY = StructType(
    [
        StructField("op", StringType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
    ]
)


def batches(rows: Sequence[tuple[Any, ...]], size: int = 1000) -> Iterator[pa.RecordBatch]:
    """Rows of (key, value), or of (op, key, value), as record batches of so many rows."""
    names = ["key", "value"] if len(rows[0]) == 2 else ["op", "key", "value"]
    kinds = [pa.string() if name == "op" else pa.binary() for name in names]
    for first in range(0, len(rows), size):
        columns = zip(*rows[first : first + size], strict=True)
        arrays = [
            pa.array(column, kind if column[0] is None or isinstance(column[0], bytes) else None)
            for column, kind in zip(columns, kinds, strict=True)
        ]
        yield pa.record_batch(arrays, names=names)


def some_rows(count: int, size: int = 100, keys: int = 1 << 30, tag: int = 0) -> list[Any]:
    """Rows of (key, value) that are all different; with few keys each one comes several times."""
    return [(b"%d" % (n % keys), b"%d of %d " % (n, tag) + bytes(size)) for n in range(count)]


@dataclass(frozen=True)
class Place:
    """A bucket of a server, to write into."""

    target: str
    bucket: str = "default"

    def options(self, **more: str) -> dict[str, str]:
        """What a writer needs to be told, and more."""
        return {"endpoint": self.target, "bucket": self.bucket, **more}

    @contextmanager
    def opened(self) -> Iterator[Bucket]:
        with Client(self.target) as client:
            yield client.bucket(self.bucket)

    def state(self) -> dict[bytes, bytes]:
        """The keys that are there, and their values."""
        kept: dict[bytes, bytes] = {}
        with (
            self.opened() as bucket,
            bucket.changes(until="now", only=Only(stability="memory")) as changes,
        ):
            for batch in changes.batches():
                for change in batch.changes:
                    kept.pop(change.key, None)
                    if change.value is not None:
                        kept[change.key] = change.value
        return kept

    def mutations(self) -> int:
        with Client(self.target) as client:
            return sum(info.high_seqno for info in client.admin.partitions(self.bucket))


@contextmanager
def new_place(target: str) -> Iterator[Place]:
    """A bucket of its own, which is dropped at the end."""
    place = Place(target, secrets.token_hex(8))
    with Client(target) as client:
        client.admin.create_bucket(place.bucket)
        yield place
        client.admin.drop_bucket(place.bucket)


def refusal(call: Any) -> UprSparkError:
    """The error that a call ends with, as it looks from the other side of Spark."""
    with pytest.raises(UprSparkError) as caught:
        call()
    found = find_error(f"PythonException: {caught.value}\n  at org.apache")
    assert found is not None
    assert found.message
    assert found.hint
    return found


def as_task(monkeypatch: pytest.MonkeyPatch, partition: int, **properties: str) -> None:
    """Have the writers find the context of a task of Spark."""
    context = SimpleNamespace(partitionId=lambda: partition, getLocalProperty=properties.get)
    monkeypatch.setattr(writers, "TaskContext", SimpleNamespace(get=lambda: context))
