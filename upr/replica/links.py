"""Links: channels to the other servers of a set, and to etcd, with TLS and this server's own credentials."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from upr.service.access.files import read_tls, signature
from upr_client.endpoints import Login, authorization, check_token
from upr_protocol.errors import InvalidArgumentError, UprError
from upr_protocol.wire.grpc import CLIENT_OPTIONS

log = logging.getLogger(__name__)

_Metadata = tuple[tuple[str, str], ...] | None


async def next_message(call: Any) -> Any:
    """Return the next message of a call, or raise what ended it."""
    message = await call.read()
    if message is grpc.aio.EOF:
        code, words = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            code, words = grpc.StatusCode.UNAVAILABLE, "the call ended"
        trailing, initial = await call.trailing_metadata(), await call.initial_metadata()
        raise grpc.aio.AioRpcError(code, initial, trailing, words)
    return message


class Link:
    """A channel whose calls carry a token unless they say otherwise, as far as generated stubs use one."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[], _Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        method = self._channel.unary_unary(*arguments, **options)
        return lambda request, **more: method(request, **{"metadata": self._metadata(), **more})

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        method = self._channel.stream_stream(*arguments, **options)
        return lambda **more: method(**{"metadata": self._metadata(), **more})

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; calls that are under way have ``grace`` seconds to end."""
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class Links:
    """How the other servers are called.

    Attributes:
        ca: PEM file of the authorities of their certificates; None for no encryption.
        cert, key: PEM files of this server's certificate, which is shown to them where calls are encrypted.
        token: file of the token that is shown to them; read with each call.
        options: of their channels.

    Raises:
        UprError: a file cannot be read, or used.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: Path | None = None
    options: Sequence[tuple[str, int]] = tuple(CLIENT_OPTIONS)

    def __post_init__(self) -> None:
        self._login().packed()

    @property
    def _files(self) -> tuple[Path | None, Path | None, Path | None]:
        """The files that are used: certificate, key and authorities."""
        return (None, None, None) if self.ca is None else (self.cert, self.key, self.ca)

    def _login(self) -> Login:
        cert, key, ca = self._files
        try:
            login = Login.of(False, ca, cert, key, self.token)
        except InvalidArgumentError as error:
            # One that is being exchanged is gone, or empty, for a moment.
            raise UprError(
                error.message, reason="FILE_UNUSABLE", hint=error.hint, retriable=True
            ) from None
        try:
            is_whole = read_tls(cert, key, ca) == [login.cert, login.key, login.ca]
        except (OSError, ValueError):
            is_whole = False
        if not is_whole:
            raise UprError(
                "the files of TLS that other servers are shown, or known by, cannot be used",
                reason="FILE_UNUSABLE",
                hint=f"mend {', '.join(str(one) for one in self._files if one)}",
                retriable=True,
            )
        return login

    def version(self) -> tuple[object, ...]:
        """Return what changes with the files of TLS, without reading them."""
        return signature(filter(None, self._files))

    def open(self, address: str) -> Any:
        """Return a Link, which generated stubs take for a channel; its certificate is the one that the files have now.

        Raises:
            UprError: a file cannot be read, or used, or the token would be sent over a network for everybody to read.
        """
        login, token = self._login(), self.token
        check_token(token, (address,), login.tls)
        if login.credentials is None:
            channel = grpc.aio.insecure_channel(address, options=self.options)
        else:
            channel = grpc.aio.secure_channel(address, login.credentials, options=self.options)
        return Link(channel, lambda: None if token is None else authorization(token))


class Channels:
    """Channels that stay open, one to each address; a new one takes its place when the files of TLS change.

    What they had counts on until they can be used.

    Args:
        grace: seconds for which calls of one that is replaced may go on.
    """

    def __init__(self, links: Links, grace: float) -> None:
        self._links = links
        self._grace = grace
        self._open: dict[str, tuple[object, Any]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_unusable = False

    def to(self, address: str) -> Any:
        """Return the channel to an address; it is to be used at once.

        Raises:
            UprError: see ``Links.open``.
        """
        known, version = self._open.get(address), self._links.version()
        if known is not None and known[0] == version:
            return known[1]
        try:
            link = self._links.open(address)
        except UprError as error:
            if known is None:
                raise
            if not self._is_unusable:
                self._is_unusable = True
                log.error("changed files cannot be used for links", extra={"error": str(error)})
            return known[1]
        if self._is_unusable:
            self._is_unusable = False
            log.info("files can be used for links again")
        self._drop(address)
        self._open[address] = version, link
        return link

    def _drop(self, address: str) -> None:
        if address in self._open:
            closing = asyncio.create_task(self._open.pop(address)[1].close(self._grace))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def keep(self, addresses: Collection[str]) -> None:
        """Close those that lead elsewhere."""
        for address in self._open.keys() - set(addresses):
            self._drop(address)

    async def close(self) -> None:
        while self._open:
            # Others may be opened meanwhile.
            _, (_, link) = self._open.popitem()
            await link.close()
        await asyncio.gather(*self._closing)
