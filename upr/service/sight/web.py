"""The HTTP port: few pages, GET and HEAD only, one request a connection.

It runs in the server's event loop on asyncio's streams. What it takes is small: requests without bodies, answers that are
complete in memory. A library for more would be a dependency, and more that strangers can reach.

The newest connection always has a place: the oldest one that has not sent its request loses its own.
"""

import asyncio
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl

from upr.service.access.identities import Identity
from upr.service.access.rules import NOBODY
from upr_protocol.errors import ListenError
from upr_protocol.limits import HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES, HTTP_SECONDS

log = logging.getLogger(__name__)

_BACKLOG: Final = 64
DESCRIPTORS: Final = HTTP_CONNECTIONS_MAX + 2 * _BACKLOG
"""Descriptors that the port may take: connections, and those that were accepted at once and are about to be closed."""
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Policy by which a browser lets the page do nothing with other hosts, and run no code but the server's file."""
_HARDENING: Final = (
    f"Content-Security-Policy: {_POLICY}\r\nReferrer-Policy: no-referrer\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\nX-Content-Type-Options: nosniff\r\n"
)
_HEAD: Final = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]\r\n")


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a page; of several query fields or headers of a name the last one counts.

    Attributes:
        path: without the query.
        headers: by name in lower case.
        peer: the client's address, without the port.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    peer: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """Page of the port, made of the request and of who asks.

    Attributes:
        is_open: whether everyone may see it, so that it says serving or not and no more, or what every server says.
        about_all: whether it is about all buckets, and not about those that its viewer may see.
    """

    make: Callable[[Request, Identity], Awaitable[Answer]]
    is_open: bool = False
    about_all: bool = True


def said(serving: bool) -> Answer:
    return Answer(200, b"serving\n") if serving else Answer(503, b"not serving\n")


def allowed(request: Request, *, loopback: bool) -> bool:
    """Return whether a request may see a page that is not open to everyone.

    Who reaches a loopback address may, but not a page of the Web: a browser on this machine can be led here by a name that
    somebody else owns. Such a name is the request's Host.
    """
    host = request.headers.get("host", "").strip().lower()
    host = host.rpartition(":")[0] if re.search(r"[^:]:\d*$|\]:\d*$", host) else host
    if not loopback or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")) is not None
    except ValueError:
        return False


def _parsed(head: bytes, peer: str) -> Request | None:
    found = _HEAD.match(head)
    if found is None:
        return None
    headers = {}
    for line in head[found.end() :].decode("latin-1").split("\r\n"):
        name, colon, value = line.partition(":")
        if line and (not colon or not name or name != name.strip()):
            return None
        headers[name.lower()] = value.strip()
    path, _, query = found[2].decode().partition("#")[0].partition("?")
    return Request(found[1].decode(), path, dict(parse_qsl(query)), headers, peer)


class WebPort:
    """Listening HTTP port.

    Args:
        address: HOST:PORT; port 0 takes a free one.
        viewer: returns who asks for a page that is not open to everyone; None refuses it.
    """

    def __init__(
        self,
        address: str,
        pages: Mapping[str, Page],
        *,
        loopback: bool,
        viewer: Callable[[Request, Page], Identity | None],
    ) -> None:
        self._listen = address
        self._pages = pages
        self._loopback = loopback
        self._viewer = viewer
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        self._full = False
        self.address = ""

    async def start(self) -> None:
        """Listen, and set ``address`` to the bound one; ListenError if that is impossible."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=HTTP_HEAD_BYTES, backlog=_BACKLOG
            )
        except OSError as error:
            raise ListenError(
                f"{self._listen} cannot be listened on: {error.strerror or 'no such host'}",
                hint="give --http another port; port 0 picks a free one",
            ) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or not self._make_room():
            writer.transport.abort()
            return
        self._open.add(task)
        self._silent[task] = None
        # A drain waits until the system has everything, so that nothing is kept behind a close.
        writer.transport.set_write_buffer_limits(0)
        try:
            async with asyncio.timeout(2 * HTTP_SECONDS):
                await self._answer(task, reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.discard(task)
            self._silent.pop(task, None)
            writer.close()

    def _make_room(self) -> bool:
        """Return whether there is room for another connection, after that of the oldest silent one if necessary.

        The log tells when connections begin to be closed for that, and when there is room again.
        """
        count = len(self._open)
        if self._full and count < HTTP_CONNECTIONS_MAX // 2:
            self._full = False
            log.info("HTTP connections have room again")
        if count < HTTP_CONNECTIONS_MAX:
            return True
        if not self._full:
            self._full = True
            log.warning("too many HTTP connections: the oldest are closed")
        if not self._silent:
            return False
        oldest = next(iter(self._silent))
        self._silent.pop(oldest)
        self._open.discard(oldest)
        oldest.cancel()
        return True

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        method = "GET"
        try:
            async with asyncio.timeout(HTTP_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            self._silent.pop(task, None)
        except asyncio.IncompleteReadError:
            return
        except TimeoutError:
            answer = Answer(408, f"no request within {HTTP_SECONDS:.0f} s\n".encode())
        except asyncio.LimitOverrunError:
            words = f"request is larger than {HTTP_HEAD_BYTES} bytes\n"
            answer = Answer(431, words.encode())
        else:
            request = _parsed(head, peer)
            if request is None:
                answer = Answer(400, b"not a request\n")
            else:
                method = request.method
                answer = await self._page(request)
        _say(writer, method, answer)
        await writer.drain()
        writer.write_eof()
        # What is closed with bytes unread is reset, and the client may lose the answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while await reader.read(HTTP_HEAD_BYTES):
                    pass

    async def _page(self, request: Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None:
            return Answer(404, f"no such page; there are {', '.join(self._pages)}\n".encode())
        if request.method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD\n")
        if not page.is_open and not allowed(request, loopback=self._loopback):
            return Answer(403, b"refused\n")
        viewer = NOBODY if page.is_open else self._viewer(request, page)
        if viewer is None:
            return Answer(401, b"refused\n")
        try:
            return await page.make(request, viewer)
        except Exception:
            log.exception("a page failed", extra={"path": request.path})
            return Answer(500, b"see the server's log\n")


def _say(writer: asyncio.StreamWriter, method: str, answer: Answer) -> None:
    """Write an answer; the body is left out for HEAD."""
    allow = {405: "Allow: GET, HEAD\r\n", 401: "WWW-Authenticate: Bearer\r\n"}.get(
        answer.status, ""
    )
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{allow}{_HARDENING}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + (b"" if method == "HEAD" else answer.body))
