"""Reading keys, against a server in memory."""

import os

import pytest

from tests.client._async.adapter import running
from tests.client.key_values import Faults, KeyValueServer
from tests.client.scripted import VERSION
from upr_client import AsyncClient
from upr_client.errors import (
    ClosedError,
    DataDamagedError,
    InvalidArgumentError,
    ProtocolError,
    TooManyError,
    UnavailableError,
)
from upr_protocol.limits import CLIENT_GETS


@pytest.mark.asyncio
async def test_get_one() -> None:
    server = KeyValueServer()
    server.values[b"k"], server.values[b"empty"] = b"v", b""
    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket("b")
        assert await bucket.get(b"k") == b"v"
        assert await bucket.get(b"empty") == b""
        assert await bucket.get(b"none") is None
        assert bucket.version == VERSION
    first, second, _ = server.gets
    assert (first.bucket, first.HasField("bucket_version")) == ("b", False)
    assert (second.bucket_version, list(second.keys)) == (VERSION, [b"empty"])


@pytest.mark.asyncio
async def test_get_many_asks_in_parts_each_key_once() -> None:
    server = KeyValueServer()
    keys = [b"%d" % i for i in range(2500)]
    server.values.update({key: key * 2 for key in keys[::2]})
    async with running(server), AsyncClient(server.target) as client:
        found = await client.bucket().get_many(iter([*keys, *keys[:100]]))
        assert await client.bucket().get_many([]) == {}
    assert found == server.values
    assert list(found) == keys[::2]
    assert [len(request.keys) for request in server.gets] == [1000, 1000, 500]


@pytest.mark.asyncio
async def test_what_did_not_fit_is_asked_for_again() -> None:
    server = KeyValueServer(answers_max=7)
    server.values.update({b"%d" % i: b"v" for i in range(20)})
    async with running(server), AsyncClient(server.target) as client:
        assert await client.bucket().get_many(server.values) == server.values
    assert [len(request.keys) for request in server.gets] == [20, 13, 6]


@pytest.mark.asyncio
async def test_a_server_that_answers_nothing_is_not_asked_for_ever() -> None:
    server = KeyValueServer(answers_max=0)
    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(ProtocolError, match="0 answers for 1 keys"):
            await bucket.get(b"k")
    assert len(server.gets) == 1


@pytest.mark.asyncio
async def test_a_get_that_finds_no_place_among_others_says_so_in_time() -> None:
    server = KeyValueServer()
    server.values[b"k"] = b"v"
    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket()
        places = bucket._connection.gets
        for _ in range(CLIENT_GETS):
            assert await places.take()
        with pytest.raises(UnavailableError, match="open Gets of the client are 64; must be below"):
            await bucket.get(b"k", seconds=0.01)
        places.give_back()
        # It gives its place back, and so does one that fails.
        server.faults.gets = [DataDamagedError("a bad block")]
        with pytest.raises(DataDamagedError):
            await bucket.get(b"k")
        assert [await bucket.get(b"k") for _ in range(2)] == [b"v", b"v"]
    assert len(server.gets) == 3


@pytest.mark.asyncio
async def test_a_server_with_too_many_calls_is_asked_again() -> None:
    server = KeyValueServer()
    server.values[b"k"] = b"v"
    async with running(server), AsyncClient(server.target) as client:
        bucket, many = client.bucket(), TooManyError("open Gets are 100")
        server.faults.gets = [many, many]
        assert await bucket.get(b"k") == b"v"
        server.faults.gets = [many] * 1000
        with pytest.raises(TooManyError, match="open Gets are 100"):
            await bucket.get(b"k", seconds=0.2)
        # One is for a request of before that may still be on its way.
        server.faults.gets = [TooManyError("too large", retriable=False)] * 2
        with pytest.raises(TooManyError, match="too large"):
            await bucket.get(b"k")


@pytest.mark.asyncio
async def test_a_partition_that_cannot_be_read_is_an_error() -> None:
    server = KeyValueServer(Faults(refused_partitions={3: DataDamagedError("a bad block")}))
    async with running(server), AsyncClient(server.target) as client:
        bucket = client.bucket()
        with pytest.raises(DataDamagedError, match="a bad block"):
            await bucket.get_many([b"1", b"333"])


@pytest.mark.asyncio
async def test_keys_out_of_range_and_clients_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    server = KeyValueServer()
    async with running(server):
        client = AsyncClient(server.target)
        bucket = client.bucket()
        with pytest.raises(InvalidArgumentError, match="key is 0 bytes"):
            await bucket.get(b"")
        with pytest.raises(InvalidArgumentError, match="key is str; must be bytes"):
            await bucket.get_many([b"k", "k"])  # type: ignore[list-item]
        with pytest.raises(InvalidArgumentError, match="key is bytearray; must be bytes"):
            await bucket.get(bytearray(b"k"))  # type: ignore[arg-type]
        for seconds in (0, -1, float("nan")):
            with pytest.raises(InvalidArgumentError, match=r"seconds is .*; must be above 0"):
                await bucket.get(b"k", seconds=seconds)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClosedError, match="another process"):
                await bucket.get(b"k")
        await client.close()
        with pytest.raises(ClosedError, match="the client was closed"):
            await bucket.get(b"k")
        with pytest.raises(ClosedError, match="the client was closed"):
            await bucket.get_many([])
    assert server.gets == []
