"""The client of etcd, on a real one: compare-and-set, keys with a lease, changes, deadlines, users."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.certificates import make_certificate
from tests.etcd import RunningEtcd, running_etcd
from tests.harness import WAIT_SECONDS, poll, until
from tests.proxy import Proxy
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

    began = asyncio.Event()
    session = asyncio.create_task(client.session(b"/k/me", b"here", 2, began.set))
    async with asyncio.timeout(WAIT_SECONDS):
        await began.wait()
    since = time.monotonic()
    while time.monotonic() < since + 3.5:
        # Longer than the lease.
        await asyncio.sleep(0.2)
        assert await is_there()
    session.cancel()
    await poll(is_there, lambda there: not there)
    await client.close()


async def test_a_key_outlives_servers_of_etcd_that_answer_nothing(etcd: RunningEtcd) -> None:
    began, seconds = asyncio.Event(), 8
    with Proxy(etcd.endpoints[0]) as first, Proxy(etcd.endpoints[0]) as second:
        client = Etcd([first.target, second.target, *etcd.endpoints])
        session = asyncio.create_task(client.session(b"/o/me", b"here", seconds, began.set))
        async with asyncio.timeout(WAIT_SECONDS):
            await began.wait()
        for proxy in (first, second):
            proxy.black_hole("to server")
        # Longer than the lease, which nobody else keeps alive.
        await asyncio.wait({session}, timeout=seconds + 2.0)
        assert not session.done()
        assert b"/o/me" in (await client.read(b"/o/")).entries
        session.cancel()
        await client.close()


async def test_one_try_to_keep_a_lease_alive_does_not_wait_longer_to_show_a_user(
    tmp_path: Path,
) -> None:
    file = tmp_path / "user"
    file.write_text("root:secret\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Etcd([f"127.0.0.1:{silent.getsockname()[1]}"], user=file)
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            await client._renew(1, 0.2)
        assert time.monotonic() - began < CALL_SECONDS
        await client.close()


async def test_an_etcd_that_is_stopped_or_away_is_told_in_time(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as etcd:
        # The first endpoint is nobody's: the next call goes to the next one.
        client = Etcd(["127.0.0.1:9", *etcd.endpoints])
        with pytest.raises(UnavailableError, match=r"etcd at 127\.0\.0\.1:9: "):
            await client.read(b"/s/")
        assert not (await client.read(b"/s/")).entries
        watching = Etcd(etcd.endpoints)
        after = (await watching.read(b"/s/")).revision
        (process,) = etcd.processes
        process.send_signal(signal.SIGSTOP)
        # Until all its threads have stopped it may answer.
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for call in (
            client.read(b"/s/"),
            client.swap(b"/s/a", b"", 0),
            client.session(b"/", b"", 5, lambda: None),
            # Also for want of a word that it watches: the read behind it would wait once more.
            watching.changed(b"/s/", after),
        ):
            began = time.monotonic()
            with pytest.raises(UnavailableError):
                await call
            assert time.monotonic() - began < CALL_SECONDS + 30
        process.send_signal(signal.SIGCONT)
        await client.close()
        await watching.close()


async def test_one_that_is_far_away_can_be_connected(etcd: RunningEtcd) -> None:
    # Each piece takes longer than gRPC waits between two attempts at first.
    with Proxy(etcd.endpoints[0]) as proxy:
        proxy.delay(0.15)
        client = Etcd([proxy.target])
        await client.read(b"/far/")
        await client.close()


async def test_the_row_is_changed_by_one_and_again_means_the_same(etcd: RunningEtcd) -> None:
    client = Etcd(etcd.endpoints)
    rows = MapRows(client, Place(tuple(etcd.endpoints), "rows"), lambda: "")
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


def with_users(etcd: RunningEtcd, **users: str) -> None:
    """Have etcd ask for one of these users, by their passwords; one is root."""

    def say(what: str, **text: Any) -> None:
        etcd.ask(f"v3/auth/{what}", json.dumps(text).encode())

    say("role/add", name="root")
    for name, password in users.items():
        say("user/add", name=name, password=password)
        say("user/grant", user=name, role="root")
    say("enable")


async def test_certificates_and_a_user_are_exchanged_under_load(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    ca, key, file = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "user"
    file.write_text("root:secret\n")
    with running_etcd(tmp_path / "etcd", tls=tmp_path) as etcd:
        with_users(etcd, root="secret", next="other")
        client = Etcd(etcd.endpoints, ca=ca, cert=ca, key=key, user=file)
        changes = 0

        async def write() -> None:
            nonlocal changes
            while True:
                try:
                    found = (await client.read(b"/x/")).entries.get(b"/x/a")
                    changes += await client.swap(b"/x/a", b"", found.revision if found else 0)
                except UnavailableError:
                    await asyncio.sleep(0.01)

        async def refused() -> str:
            try:
                await client.read(b"/x/")
            except UnavailableError as error:
                return str(error)
            return ""

        async def goes_on() -> None:
            before = changes
            await until(lambda: changes > before + 1)

        writers = [asyncio.create_task(write()) for _ in range(2)]
        await goes_on()
        # While its files are half there, what they had counts on. gRPC would end the process.
        ca.write_bytes(b"")
        await goes_on()
        key.unlink()
        await goes_on()
        await asyncio.to_thread(make_certificate, tmp_path)
        await asyncio.to_thread(etcd.kill)
        await asyncio.to_thread(etcd.start)
        await goes_on()
        file.write_text("next:wrong\n")
        await poll(refused, lambda why: "password" in why)
        file.write_text("next:other\n")
        await goes_on()
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        await client.close()


async def test_a_user_and_certificates_are_asked_for_and_shown(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    ca, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    with running_etcd(tmp_path / "etcd", tls=tmp_path) as etcd:
        with_users(etcd, root="secret")
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
