"""Keys of a chosen partition."""

from collections.abc import Iterator
from itertools import count, islice

from tests.model import partition_of


def keys_of(partition: int) -> Iterator[bytes]:
    """Yield different keys that belong to a partition."""
    return (key for key in (b"key-%d" % i for i in count()) if partition_of(key) == partition)


def some_keys(partition: int, how_many: int) -> list[bytes]:
    """Return the first keys that belong to a partition."""
    return list(islice(keys_of(partition), how_many))
