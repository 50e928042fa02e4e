"""The client of etcd, on a real one: compare-and-set, keys with a lease, changes, deadlines, users."""

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.certificates import make_certificate
from tests.etcd import RunningEtcd, running_etcd
from tests.harness import poll
from upr.cluster.etcd import CALL_SECONDS, Etcd
from upr.cluster.map import MapRows
from upr.cluster.registry import Map, Place
from upr_protocol.errors import InvalidArgumentError, UnavailableError
from upr_protocol.ownership import first_row

pytestmark = [pytest.mark.etcd, pytest.mark.long, pytest.mark.asyncio]
A, B = "a" * 16, "b" * 16


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEtcd]:
    """One for all tests here; each has keys of its own."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


async def test_a_key_is_set_only_at_the_revision_that_is_known(etcd: RunningEtcd) -> None:
    client = Etcd(etcd.endpoints)
    assert await client.swap(b"/s/map", b"1", 0)
    assert not await client.swap(b"/s/map", b"2", 0)
    found = await client.read(b"/s/")
    known = found.entries[b"/s/map"]
    assert (known.value, list(found.entries)) == (b"1", [b"/s/map"])
    assert await client.swap(b"/s/map", b"2", known.revision)
    assert not await client.swap(b"/s/map", b"3", known.revision)
    assert (await client.read(b"/s/")).entries[b"/s/map"].value == b"2"
    await client.close()


async def test_a_change_ends_the_waiting_and_nothing_does_not_last(etcd: RunningEtcd) -> None:
    client = Etcd(etcd.endpoints)
    found = await client.read(b"/c/")
    waiting = asyncio.create_task(client.changed(b"/c/", found.revision))
    await client.swap(b"/other/key", b"", 0)
    await client.swap(b"/c/key", b"", 0)
    async with asyncio.timeout(CALL_SECONDS):
        await waiting
    # What was missed counts too.
    async with asyncio.timeout(CALL_SECONDS):
        await client.changed(b"/c/", found.revision)
    began = time.monotonic()
    await client.changed(b"/c/", (await client.read(b"/c/")).revision)
    assert time.monotonic() - began > CALL_SECONDS / 2
    await client.close()


async def test_a_key_lives_as_long_as_its_session(etcd: RunningEtcd) -> None:
    client = Etcd(etcd.endpoints)

    async def is_there() -> bool:
        return b"/k/me" in (await client.read(b"/k/")).entries

    session = asyncio.create_task(client.session(b"/k/me", b"here", 2))
    await poll(is_there)
    began = time.monotonic()
    while time.monotonic() < began + 3.5:
        # Longer than the lease.
        await asyncio.sleep(0.2)
        assert await is_there()
    session.cancel()
    await poll(is_there, lambda there: not there)
    await client.close()


async def test_an_etcd_that_is_stopped_or_away_is_told_in_time(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        # The first endpoint is nobody's: the next call goes to the next one.
        client = Etcd(["127.0.0.1:9", *etcd.endpoints])
        with pytest.raises(UnavailableError, match=r"etcd at 127\.0\.0\.1:9: "):
            await client.read(b"/s/")
        assert not (await client.read(b"/s/")).entries
        (process,) = etcd.processes
        process.send_signal(signal.SIGSTOP)
        # Until all its threads have stopped it may answer.
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for call in (
            client.read(b"/s/"),
            client.swap(b"/s/a", b"", 0),
            client.session(b"/", b"", 5),
        ):
            began = time.monotonic()
            with pytest.raises(UnavailableError):
                await call
            assert time.monotonic() - began < CALL_SECONDS + 30
        process.send_signal(signal.SIGCONT)
        await client.close()


async def test_the_row_is_changed_by_one_and_again_means_the_same(etcd: RunningEtcd) -> None:
    client = Etcd(etcd.endpoints)
    rows = MapRows(client, Place(tuple(etcd.endpoints), "rows"))
    with pytest.raises(UnavailableError, match="there is no map"):
        await rows.read()
    first = first_row(A)
    assert await rows.begin(Map(B, first))
    assert not await rows.begin(Map(A, first_row(B)))
    second = first.counting(B)
    assert await rows.swap(first, second)
    assert await rows.swap(first, second)
    assert not await rows.swap(first, first.claimed(B, 2))
    assert await rows.read() == second
    await client.close()


async def test_a_user_and_certificates_are_asked_for_and_shown(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    ca, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    with running_etcd(tmp_path / "etcd", tls=tmp_path) as etcd:

        def say(what: str, **text: Any) -> None:
            url = f"{etcd.url(etcd.endpoints[0])}/v3/auth/{what}"
            request = urllib.request.Request(url, json.dumps(text).encode())
            with urllib.request.urlopen(request, context=etcd.context) as answer:
                assert answer.status == 200

        say("user/add", name="root", password="secret")
        say("role/add", name="root")
        say("user/grant", user="root", role="root")
        say("enable")
        file = tmp_path / "user"
        file.write_text("root:secret\n")
        tls = {"ca": ca, "cert": ca, "key": key}
        client = Etcd(etcd.endpoints, user=file, **tls)
        assert await client.swap(b"/s/map", b"1", 0)
        # A token that is not known any more is asked for anew.
        client._token = "old"
        with pytest.raises(UnavailableError):
            await client.read(b"/s/")
        assert len((await client.read(b"/s/")).entries) == 1
        await client.close()
        file.write_text("root:wrong")
        for other in (Etcd(etcd.endpoints, **tls), Etcd(etcd.endpoints, user=file, **tls)):
            with pytest.raises(UnavailableError, match=r"user|password|permission"):
                await other.read(b"/s/")
            await other.close()
        # Neither without a certificate, nor without encryption, nor where another one vouches for etcd.
        (tmp_path / "other").mkdir()
        make_certificate(tmp_path / "other")
        wrong = {**tls, "ca": tmp_path / "other" / "chain.pem"}
        for less in ({"ca": ca}, {}, wrong):
            other = Etcd(etcd.endpoints, **less)
            with pytest.raises(UnavailableError, match="etcd at 127"):
                await other.read(b"/s/")
            await other.close()
    file.write_text("root")
    with pytest.raises(InvalidArgumentError, match="must have one line NAME:PASSWORD"):
        Etcd(["h:1"], user=file)
