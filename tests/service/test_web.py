"""The HTTP port: its pages, and what bad requests and idle connections cost."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from tests.conftest import StartServer
from tests.harness import RunningServer, poll
from tests.raw import RawClient
from tests.service.pages import ask, connected, http_of, said
from tests.service.test_lifecycle import refused
from upr.service.access.identities import Identity
from upr.service.access.rules import ANYONE
from upr.service.sight import web
from upr_protocol.limits import HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES

FLOOD = 1000


@pytest.fixture
def address(http_address: str) -> str:
    return http_address


def test_pages_are_for_get_and_head(address: str) -> None:
    for path in ("/healthz", "/readyz"):
        found = ask(address, path)
        assert (found.status, found.body) == (200, "serving\n")
        assert found.headers["connection"] == "close"
    full, head = ask(address, "/readyz?verbose=1"), ask(address, "/readyz", "HEAD")
    assert (head.status, head.headers, head.body) == (full.status, full.headers, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        found = ask(address, "/metrics", method)
        assert (found.status, found.headers["allow"]) == (405, "GET, HEAD")
    assert ask(address, "/etc/passwd").status == 404


def test_a_body_does_not_cost_the_client_its_answer(address: str) -> None:
    with connected(address) as sock:
        sock.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
        assert said(sock).status == 405


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET\r\n\r\n",
        b"get /metrics HTTP/1.1\r\n\r\n",
        b"GET metrics HTTP/1.1\r\n\r\n",
        b"GET http://127.0.0.1/metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/2\r\n\r\n",
        b"GET /metrics\x00 HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nno header\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(address: str, request_bytes: bytes) -> None:
    with connected(address) as sock:
        sock.sendall(request_bytes)
        assert said(sock).status == 400


def test_a_head_is_bounded(address: str) -> None:
    for sent in (
        b"GET /metrics HTTP/1.1\r\nX: " + b"x" * HTTP_HEAD_BYTES,
        b"GET /" + b"m" * (2 * HTTP_HEAD_BYTES),
    ):
        with connected(address) as sock:
            sock.sendall(sent)
            assert said(sock).status == 431
    assert ask(address, "/healthz").status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9100", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:9100", 200),
        ("[::1]:9100", 200),
        ("[::1]", 200),
        ("rebound.example:9100", 403),
        ("127.0.0.1.rebound.example", 403),
        ("localhost.rebound.example", 403),
    ],
)
def test_a_page_of_the_web_cannot_read_metrics_of_this_machine(
    address: str, host: str, status: int
) -> None:
    assert ask(address, "/metrics", host=host).status == status
    # A check says serving or not, and no more.
    assert ask(address, "/healthz", host=host).body == "serving\n"


def test_behind_another_address_any_name_may_ask() -> None:
    request = web.Request("GET", "/metrics", {}, {"host": "server.example"}, "10.0.0.1")
    assert web.allowed(request, loopback=False)
    assert not web.allowed(request, loopback=True)


@pytest.mark.parametrize("http", ["0.0.0.0:0", "[::]:0"])
def test_an_http_address_that_is_not_loopback_needs_insecure(
    server_process: StartServer, tmp_path_factory: pytest.TempPathFactory, http: str
) -> None:
    assert "--insecure" in refused(tmp_path_factory.mktemp("refused"), "--http", http)
    server = server_process("--http", "0.0.0.0:0", "--insecure")
    assert ask(http_of(server), "/metrics", host="server.example").status == 200


def test_a_port_in_use_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(tmp_path_factory.mktemp("refused"), "--http", address)
    assert address in line
    assert "--http" in line


def descriptors(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_thousand_connections_take_little_and_keep_no_client_out(
    server_process: StartServer,
) -> None:
    server = server_process(
        "--http", "127.0.0.1:0", constants={"upr.service.sight.web.HTTP_SECONDS": 2.0}
    )
    address = http_of(server)
    before = descriptors(server)
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connected(address)) for _ in range(FLOOD)]

        async def are_few() -> bool:
            return descriptors(server) <= before + HTTP_CONNECTIONS_MAX

        await poll(are_few)
        # The newest has a place, and one that is asked at once needs it only for a moment.
        assert ask(address, "/readyz").status == 200
        async with RawClient(server.target) as raw:
            writer = await raw.writer("")
            assert not (await writer.write([(b"key", b"value")])).HasField("refused")
            assert descriptors(server) <= before + HTTP_CONNECTIONS_MAX + 8
        # The last ones are told that they are late.
        late = [
            (await asyncio.to_thread(said, one)).status
            for one in silent[-HTTP_CONNECTIONS_MAX + 1 :]
        ]
        assert set(late) == {408}
    assert ask(address, "/readyz").status == 200
    log = server.log_text()
    assert log.count("too many HTTP connections") == log.count("have room again") == 1
    assert server.terminate() == 0


@contextlib.asynccontextmanager
async def port(body: bytes) -> AsyncIterator[web.WebPort]:
    async def page(request: web.Request, viewer: Identity) -> web.Answer:
        return web.Answer(200, body)

    async def broken(request: web.Request, viewer: Identity) -> web.Answer:
        raise ValueError("/a/path")

    pages = {"/page": web.Page(page), "/broken": web.Page(broken)}
    one = web.WebPort("127.0.0.1:0", pages, loopback=True, viewer=lambda *_: ANYONE)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@pytest.mark.asyncio
async def test_a_client_that_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HTTP_SECONDS", 1.0)
    async with port(b"x" * 64 * 2**20) as one:
        with connected(one.address) as sock:
            sock.sendall(b"GET /page HTTP/1.1\r\n\r\n")

            async def is_served() -> bool:
                return bool(one._open)

            async def is_gone() -> bool:
                return not one._open

            await poll(is_served)
            await poll(is_gone)
            # A part of it was on its way.
            assert len((await asyncio.to_thread(said, sock)).body) < 64 * 2**20


@pytest.mark.asyncio
async def test_a_client_that_sends_drop_by_drop_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HTTP_SECONDS", 0.1)
    async with port(b"page") as one:
        reader, writer = await asyncio.open_connection(*one.address.split(":"))

        async def drip() -> None:
            for byte in b"GET /page HTTP/1.1\r\n":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        writer.close()


@pytest.mark.asyncio
async def test_a_page_that_fails_tells_no_stranger_why(caplog: pytest.LogCaptureFixture) -> None:
    async with port(b"page") as one:
        found = await asyncio.to_thread(ask, one.address, "/broken")
    assert (found.status, found.body) == (500, "see the server's log\n")
    assert "/a/path" in caplog.text


@pytest.mark.asyncio
async def test_a_stop_waits_for_no_client() -> None:
    async with port(b"page") as one:
        sock = connected(one.address)

        async def is_served() -> bool:
            return bool(one._open)

        await poll(is_served)
    assert not one._open
    sock.close()
