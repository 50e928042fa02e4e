"""What a cluster keeps in etcd, and how it is named."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from upr.cluster.map import Buckets, MapRows
from upr.cluster.registry import Bucket, Entry, Found, Map, Place, decode_node, encode_node
from upr.service.buckets.bucket_service import not_active
from upr_protocol.errors import (
    InvalidArgumentError,
    PartitionNotActiveError,
    TooManyError,
    UnavailableError,
    UnknownOutcomeError,
    UprError,
)
from upr_protocol.limits import BUCKETS_MAX, DROPPED_MAX
from upr_protocol.ownership import Row, Served, Standing

A, B, C = "a" * 16, "b" * 16, "c" * 16
SOME = Bucket("some", 2**64 - 1, "zstd", 5)
KNOWN = Map(C, Row(3, 2, A, False, frozenset({A, B}), Served(B, 2)), (SOME,), (7, 8))


@pytest.mark.parametrize(
    ("text", "endpoints", "name"),
    [
        ("etcd://h1/x", ("h1:2379",), "x"),
        ("etcd://h1,h2:1,[::1],h1:2379/A.b-c_9", ("h1:2379", "h2:1", "[::1]:2379"), "A.b-c_9"),
    ],
)
def test_a_place_is_where_and_which(text: str, endpoints: tuple[str, ...], name: str) -> None:
    place = Place.parse(text)
    assert (place.endpoints, place.name) == (endpoints, name)
    assert place.prefix == f"/upr/{name}/".encode()


@pytest.mark.parametrize(
    "text",
    [
        "h1/x",
        "etcd://h1",
        "etcd://h1/",
        "etcd:///x",
        "etcd://h1,/x",
        "etcd://h1:0/x",
        "etcd://h1:65536/x",
        "etcd://h1/x/y",
        "etcd://h1/ü",
        "http://h1/x",
        "etcd://unix:a/x",
        f"etcd://{','.join(f'h{n}' for n in range(17))}/x",
    ],
)
def test_what_is_no_place_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cluster is .*; must be etcd://HOST:PORT"):
        Place.parse(text)


def test_a_map_is_read_as_it_was_written() -> None:
    assert Map.decode(KNOWN.encode()) == KNOWN
    begun = Map(C, Row(1, 0, A, True, frozenset({A})))
    assert Map.decode(begun.encode()) == begun


def test_a_map_forgets_those_that_were_dropped_long_ago() -> None:
    known = KNOWN.adding(Bucket("other", 9, "", 0))
    for version in (9, *range(10, 10 + DROPPED_MAX - 1), 9):
        known = known.dropping(version)
    assert known.buckets == (SOME,)
    assert known.dropped == (*range(10, 10 + DROPPED_MAX - 1), 9)
    assert known.dropping(7).dropped == (*range(11, 10 + DROPPED_MAX - 1), 9, 7)


def test_a_map_that_is_full_takes_no_bucket() -> None:
    full = KNOWN.adding(*(Bucket(f"b{n}", 100 + n, "", 0) for n in range(BUCKETS_MAX - 1)))
    assert Map.decode(full.encode()) == full
    with pytest.raises(TooManyError, match="buckets of the cluster are 32; must be below 32"):
        full.adding(Bucket("one more", 9, "", 0))


class Lossy:
    """A registry that makes changes, and loses the first answers to them."""

    def __init__(self, lost: int) -> None:
        self.lost, self.entry = lost, Entry(KNOWN.encode(), 1)

    async def read(self, prefix: bytes) -> Found:
        return Found({prefix + b"map": self.entry}, self.entry.revision)

    async def swap(self, key: bytes, value: bytes, revision: int) -> bool:
        is_lost = self.lost > 0
        self.lost -= 1
        # All but the first one are not made.
        if revision == self.entry.revision == 1 or not is_lost:
            self.entry = Entry(value, revision + 1)
        if is_lost:
            raise UnavailableError("no answer of etcd")
        return True


@pytest.mark.asyncio
async def test_a_lost_answer_is_looked_for_once() -> None:
    second = KNOWN.row.counting(C)
    registry: Any = Lossy(1)
    assert await MapRows(registry, Place((), "x"), lambda: "").swap(KNOWN.row, second)
    assert Map.decode(registry.entry.value).row == second
    registry = Lossy(3)
    rows = MapRows(registry, Place((), "x"), lambda: "")

    def again(known: Map) -> Map:
        return known.dropping(len(known.dropped))

    with pytest.raises(UnknownOutcomeError):
        await rows.change(again)
    assert registry.lost == 1


class Gone:
    """A registry whose owner is replaced behind the first change, whose answer may be lost besides."""

    def __init__(self, *, lost: bool) -> None:
        self.lost, self.entry = lost, Entry(KNOWN.encode(), 1)

    async def read(self, prefix: bytes) -> Found:
        return Found({prefix + b"map": self.entry}, self.entry.revision)

    async def swap(self, key: bytes, value: bytes, revision: int) -> bool:
        next_owner = KNOWN.row.claimed(B, 9)
        self.entry = Entry(replace(Map.decode(value), row=next_owner).encode(), 2)
        if self.lost:
            raise UnavailableError("no answer of etcd")
        return True


class Owner:
    """A catalog of the owner of KNOWN, which steps down before anything is made or dropped here."""

    def __init__(self) -> None:
        self.replica_set, self.replica = KNOWN.replica_set, False
        self.standing = SimpleNamespace(standing=Standing(A, KNOWN.row))
        self.versions = {SOME.version: SOME.name}

    def check_active(self) -> None:
        pass

    def check_new(self, name: str, compression: str) -> None:
        pass

    def version_of(self, name: str, version: int | None) -> int:
        return SOME.version

    async def create(self, *_: object, active: bool) -> None:
        raise not_active("")

    async def drop(self, *_: object) -> None:
        raise not_active("")


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [False, True])
async def test_what_may_have_been_done_is_not_refused_as_if_it_was_not(lost: bool) -> None:
    """Else the order is given to the next owner, who has done it by then and refuses it."""
    for word in ("created", "dropped"):
        registry: Any = Gone(lost=lost)
        catalog: Any = Owner()
        buckets = Buckets(MapRows(registry, Place((), "x"), lambda: ""), catalog)
        ordered = buckets.create("new") if word == "created" else buckets.drop(SOME.name)
        with pytest.raises(UnknownOutcomeError, match=f"was {word}") as caught:
            await ordered
        assert not caught.value.retriable
        # Of the next owner's map nothing is changed, and it is known that nothing was.
        with pytest.raises(PartitionNotActiveError):
            await (buckets.create("new") if word == "created" else buckets.drop(SOME.name))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), 2),
        (("replica_set",), "x"),
        (("row", "epoch"), -1),
        (("row", "revision"), "1"),
        (("row", "owner"), None),
        (("row", "counted"), ["a"]),
        (("row", "counted"), [f"{n:016x}" for n in range(65)]),
        (("row", "previous"), [B]),
        (("row",), []),
        (("buckets",), [{"name": "a"}]),
        (("buckets",), [{"name": "", "version": 1, "compression": "", "quota": 0}]),
        (("buckets",), [{"name": "a", "version": 1, "compression": "x", "quota": 0}]),
        (("buckets",), [{"name": "a", "version": 1, "compression": "", "quota": 0}] * 33),
        (("dropped",), [2**64]),
    ],
)
def test_a_map_that_cannot_be_is_not_believed(where: tuple[str, ...], value: object) -> None:
    text: Any = json.loads(KNOWN.encode())
    inside = text
    for name in where[:-1]:
        inside = inside[name]
    inside[where[-1]] = value
    with pytest.raises(UprError, match="the map of the cluster cannot be read") as caught:
        Map.decode(json.dumps(text).encode())
    assert caught.value.reason == "MAP_UNREADABLE"
    for data in (b"", b"\xff", b"[]", b"null", DEEP):
        with pytest.raises(UprError):
            Map.decode(data)


DEEP = b"[" * 200_000


def test_a_node_that_cannot_be_read_has_no_address() -> None:
    assert decode_node(encode_node("h:1", "0.1")) == "h:1"
    for value in (b"1", b'"' + b"x" * 300 + b'"', b'"\\ud800:1"', DEEP):
        assert decode_node(b'{"address": ' + value + b"}") == ""
    for data in (b"", b"{}"):
        assert decode_node(data) == ""
