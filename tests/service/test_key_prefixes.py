"""Identities for some keys: they read and write these, and nothing else of a bucket, against a real server."""

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.conftest import StartServer
from tests.service.pages import ask as ask_page
from tests.service.pages import http_of
from tests.service.test_access import Guarded, ask, request_of, served
from upr.service.access.rules import RULES, Scope
from upr.storage.read import all_begin_with
from upr_client import AsyncClient, Client, Only
from upr_client.errors import PermissionDeniedError
from upr_client.lowlevel import write_blocks
from upr_protocol.block import build_block
from upr_protocol.partitioning import partition_of

PARTLY = {"GetPartitions", "Hello", "GetFailoverLog", "Follow", "Write", "Get"}
"""Methods that take a role for some keys."""


@pytest.fixture
def guarded(server_process: StartServer, tmp_path: Path) -> Guarded:
    return Guarded(server_process, tmp_path, "--http", "127.0.0.1:0")


def followed(client: Client, **options: Any) -> dict[bytes, bytes | None]:
    """What a follower of what is there now is sent."""
    found: dict[bytes, bytes | None] = {}
    with client.bucket().changes(until="now", **options) as changes:
        for batch in changes.batches():
            found |= {key: value for _, _, _, key, value in batch.changes}
    return found


def test_keys_are_written_read_and_followed_by_those_whom_they_are_for(guarded: Guarded) -> None:
    roles: Any = {"read": {"default"}, "write": None}
    token = guarded.changed(lambda: guarded.add("alice", roles, prefixes=("alice/", "é/")))
    with (
        Client(guarded.target, token=guarded.owner) as owner,
        Client(guarded.target, token=token) as alice,
    ):
        own, others = alice.bucket(), owner.bucket()
        others.write_many([(b"bob/%d" % i, b"secret") for i in range(200)])
        own.write_many([(b"alice/%d" % i, b"v") for i in range(100)])
        own.set("é/".encode(), b"v")
        for row in (b"bob/1", b"alice", b"alic", b"\xff"):
            with pytest.raises(PermissionDeniedError, match="keys that the caller's roles") as told:
                own.set(row, b"mine")
            assert "begin with 'alice/' or 'é/'" in told.value.hint
            with pytest.raises(PermissionDeniedError):
                own.get_many([b"alice/1", row])
            with pytest.raises(PermissionDeniedError):
                followed(alice, only=Only(key_prefix=row))
        # In whole or not at all; and what comes behind it is taken.
        with pytest.raises(PermissionDeniedError):
            write_blocks(own, [build_block([b"alice/new", b"bob/1"], [b"v", b"v"])])
        assert own.get(b"alice/new") is None
        own.delete(b"alice/0")
        assert others.get(b"bob/1") == b"secret"
        assert own.get_many([b"alice/0", b"alice/1"]) == {b"alice/1": b"v"}

        rows = followed(alice, only=Only(key_prefix=b"alice/"))
        assert rows == {b"alice/0": None, **{b"alice/%d" % i: b"v" for i in range(1, 100)}}
        assert len(followed(alice, only=Only(key_prefix=b"alice/1"))) == 11
        with pytest.raises(PermissionDeniedError):
            followed(alice)
        with pytest.raises(PermissionDeniedError):
            followed(alice, only=Only(key_prefix=b"alice/"), consumer="indexer")

        # A producer of the same name is another one: nobody's writes are taken for repetitions of hers.
        place = partition_of(b"alice/7")
        near = next(key for n in count() if partition_of(key := b"bob/%d" % n) == place)
        for bucket, key in ((own, b"alice/7"), (others, near)):
            block = build_block([key], [b"nightly"])
            first, again = (write_blocks(bucket, [block], once="nightly") for _ in range(2))
            assert first == again
        assert others.get(near) == own.get(b"alice/7") == b"nightly"


@pytest.mark.asyncio
async def test_nothing_about_a_whole_bucket_is_for_an_identity_of_some_keys(
    guarded: Guarded,
) -> None:
    token = guarded.changed(
        lambda: guarded.add("alice", {"read": None, "write": None}, prefixes=("alice/",))
    )
    refused = set()
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        for method in await served(guarded.target, guarded.owner):
            rule = RULES[f"/{method.containing_service.full_name}/{method.name}"]
            if rule.scope is Scope.SOME or method.name == "Write":
                continue
            fields = {rule.bucket: "bucket/default" if rule.is_open else "default"}
            request = request_of(method, fields if rule.scope is Scope.BUCKET else {})
            error = await ask(channel, method, request, token)
            if isinstance(error, PermissionDeniedError):
                refused.add(method.name)
    every = {
        path.rpartition("/")[2] for path, rule in RULES.items() if rule.scope is not Scope.SOME
    }
    # A follower of all keys is refused; a Get of none, and a Hello, are not.
    assert refused == every - PARTLY | {"Follow"}
    async with AsyncClient(guarded.target, token=token) as client:
        assert await client.admin.buckets() == []
        assert (await client.admin.status()).buckets == ()
        keys = [b"alice/%d" % number for number in range(20)] + [b"carol/1"]
        bucket = client.bucket()
        writes = (bucket.set(key, b"v") for key in keys)
        told = await asyncio.gather(*writes, return_exceptions=True)
        # Of writes that go together only the one of another's key fails.
        assert [key for key, one in zip(keys, told, strict=True) if isinstance(one, Exception)] == [
            b"carol/1"
        ]
        assert isinstance(told[-1], PermissionDeniedError)
        follower = client.bucket().changes(only=Only(key_prefix=b"alice/"))
        async with follower:
            lines = [json.loads(line) for line in guarded.file.read_text().splitlines()]
            lines[-1]["key_prefixes"] = ["carol/"]
            guarded.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            # The call ends, and she may not open it again.
            with pytest.raises(PermissionDeniedError):
                async for _ in follower.batches():
                    pass
    address = http_of(guarded.server)
    assert ask_page(address, "/metrics", shown=f"Bearer {token}").status == 401
    for path in ("/api/bucket?bucket=default", "/api/partition?bucket=default&partition=1"):
        assert ask_page(address, path, shown=f"Bearer {token}").status == 403


def test_each_key_of_a_block_begins_with_one_of_the_prefixes() -> None:
    block = build_block([b"a/1", b"a/", b"\xff\x001"], [b"v", None, b""])
    assert all_begin_with(block, [b"a/", b"\xff\x00"])
    for prefixes in ([b"a/"], [b"a/", b"\xff\x01"], [b"a/1", b"\xff"]):
        assert not all_begin_with(block, prefixes)
