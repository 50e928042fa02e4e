"""Registry: what a cluster keeps in etcd, and the four operations that it needs for that. Values; no I/O.

    /upr/NAME/map                 who owns the set; changed by compare-and-set
    /upr/NAME/nodes/DIRECTORY     a server that runs, and where; it lives with a lease

The map has one row, of the whole set, and the buckets that it has. What is in the row and what is not:
``upr_protocol.ownership.Row``.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol

from upr.storage.blocks import COMPRESSIONS
from upr.storage.directory import HEX_ID
from upr_protocol.errors import InvalidArgumentError, TooManyError, UprError, shown
from upr_protocol.limits import (
    BUCKETS_MAX,
    DROPPED_MAX,
    NAME_BYTES_MAX,
    SET_MEMBERS_MAX,
    check_name,
)
from upr_protocol.ownership import Row, Served

FORMAT: Final = 1
ENDPOINTS_MAX: Final = 16
_PORT: Final = 2379
_URL: Final = re.compile(r"etcd://([^/]+)/([A-Za-z0-9._-]{1,64})")
_HOST: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster is kept.

    Attributes:
        endpoints: HOST:PORT of each server of etcd.
    """

    endpoints: tuple[str, ...]
    name: str

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Return the place that etcd://HOST[:PORT][,HOST[:PORT]...]/NAME names; the port is 2379 where none is given.

        Raises:
            InvalidArgumentError: the text is not of this form.
        """
        found = _URL.fullmatch(text)
        hosts = [_HOST.fullmatch(one) for one in found[1].split(",")] if found else []
        ports = [int(one[2] or _PORT) for one in hosts if one]
        fits = found and len(ports) == len(hosts) <= ENDPOINTS_MAX
        if not found or not fits or not all(0 < port < 65536 for port in ports):
            raise InvalidArgumentError(
                f"cluster is {shown(text)}; must be etcd://HOST:PORT[,HOST:PORT...]/NAME",
                hint=f"with at most {ENDPOINTS_MAX} servers of etcd, and a name of letters, digits, '.', '_' and '-'",
            )
        endpoints = [f"{one[1]}:{port}" for one, port in zip(hosts, ports, strict=True) if one]
        return cls(tuple(dict.fromkeys(endpoints)), found[2])

    @property
    def prefix(self) -> bytes:
        """What all keys of the cluster begin with."""
        return f"/upr/{self.name}/".encode()

    @property
    def nodes(self) -> bytes:
        """What the keys of its servers begin with; their directories follow."""
        return self.prefix + b"nodes/"


@dataclass(frozen=True, slots=True)
class Entry:
    """Value of a key, and the revision of its newest change."""

    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Found:
    """All keys of a cluster at one revision."""

    entries: Mapping[bytes, Entry]
    revision: int


class Registry(Protocol):
    """The four operations, and its end. Each ends within some seconds, and raises UprError when its outcome is not known."""

    async def read(self, prefix: bytes) -> Found:
        """Return all keys with a prefix, as they are now and not as they were."""

    async def swap(self, key: bytes, value: bytes, revision: int) -> bool:
        """Set a key if its newest change is of this revision, 0 if it is not there; return whether it was set."""

    async def session(
        self, key: bytes, value: bytes, seconds: int, began: Callable[[], None]
    ) -> None:
        """Set a key that is gone when this process has not been heard for some seconds; return when it is lost.

        Args:
            began: called once the key is set.
        """

    async def changed(self, prefix: bytes, after: int) -> None:
        """Return when a key with a prefix was changed after a revision; perhaps without one."""

    async def close(self) -> None:
        """Close what it has open."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as it was created; its quota may have been changed since."""

    name: str
    version: int
    compression: str
    quota: int


@dataclass(frozen=True, slots=True)
class Map:
    """Who owns a set, and which buckets it has.

    Attributes:
        replica_set: the id of the set.
        row: its row, also one of an owner that does not serve yet.
        buckets: those that are there. The owner makes the ones that it has not.
        dropped: versions of those that were dropped last, the newest behind. The owner drops the ones that it has.
    """

    replica_set: str
    row: Row
    buckets: tuple[Bucket, ...] = ()
    dropped: tuple[int, ...] = ()

    def adding(self, *buckets: Bucket) -> "Map":
        """Return it with more buckets; raise TooManyError for more than BUCKETS_MAX."""
        more = (*self.buckets, *buckets)
        if len(more) > BUCKETS_MAX:
            raise TooManyError(
                f"buckets of the cluster are {len(self.buckets)}; must be below {BUCKETS_MAX}",
                hint="drop one; also those count that cannot be made at the active server",
                retriable=False,
            )
        return replace(self, buckets=more)

    def dropping(self, version: int) -> "Map":
        left = tuple(one for one in self.buckets if one.version != version)
        before = tuple(one for one in self.dropped if one != version)
        return replace(self, buckets=left, dropped=(*before, version)[-DROPPED_MAX:])

    def encode(self) -> bytes:
        row, previous = self.row, self.row.previous
        text = {
            "format": FORMAT,
            "replica_set": self.replica_set,
            "row": {
                "epoch": row.epoch,
                "revision": row.revision,
                "owner": row.owner,
                "serving": row.serving,
                "counted": sorted(row.counted),
                "previous": None if previous is None else [previous.directory, previous.epoch],
            },
            "buckets": [asdict(one) for one in self.buckets],
            "dropped": self.dropped,
        }
        return json.dumps(text).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Map":
        """Return what is kept.

        Raises:
            UprError: MAP_UNREADABLE, it is malformed or of another format.
        """
        try:
            text: Any = json.loads(data)
            if text["format"] != FORMAT:
                raise ValueError(f"format is {text['format']!r}; must be {FORMAT}")
            told = text["row"]
            previous = told["previous"]
            row = Row(
                _number(told["epoch"]),
                _number(told["revision"]),
                _directory(told["owner"]),
                bool(told["serving"]),
                frozenset(map(_directory, told["counted"])),
                None if previous is None else Served(_directory(previous[0]), _number(previous[1])),
            )
            if len(row.counted) > SET_MEMBERS_MAX:
                raise ValueError(f"counted servers are {len(row.counted)}")
            buckets = tuple(map(_bucket, text["buckets"]))
            if len(buckets) > BUCKETS_MAX:
                raise ValueError(f"buckets are {len(buckets)}")
            dropped = tuple(map(_number, text["dropped"]))
            return cls(_directory(text["replica_set"]), row, buckets, dropped)
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            RecursionError,
            InvalidArgumentError,
        ) as error:
            raise UprError(
                f"the map of the cluster cannot be read: {error}",
                reason="MAP_UNREADABLE",
                hint="another program wrote it, or a newer one: run the same version on all servers",
            ) from None


def _number(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"a number is {shown(str(value))}")
    return value


def _directory(value: object) -> str:
    if not isinstance(value, str) or not HEX_ID.fullmatch(value):
        raise ValueError(f"a directory is {shown(str(value))}")
    return value


def _bucket(value: Any) -> Bucket:
    name, compression = value["name"], value["compression"]
    if not isinstance(name, str) or compression not in COMPRESSIONS:
        raise ValueError(f"a bucket is {shown(str(value))}")
    version, quota = _number(value["version"]), _number(value["quota"])
    return Bucket(check_name(name, "bucket"), version, compression, quota)


def encode_node(address: str, version: str) -> bytes:
    """Return what a server tells of itself."""
    return json.dumps({"address": address, "version": version}).encode()


def decode_node(data: bytes) -> str:
    """Return HOST:PORT of a server; empty if that cannot be read."""
    try:
        address = json.loads(data)["address"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    is_address = isinstance(address, str) and address.isascii() and len(address) <= NAME_BYTES_MAX
    return address if is_address else ""
