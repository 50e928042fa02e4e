"""Links: channels to the other servers of a set, with TLS and this server's own credentials."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from upr.config import ServerConfig
from upr.service.access.files import signature
from upr_client.endpoints import Login, authorization, check_token
from upr_protocol.wire.grpc import CLIENT_OPTIONS

_Metadata = tuple[tuple[str, str], ...] | None


class Link:
    """A channel whose calls all carry a token, as far as generated stubs use one."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Callable[[], _Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Return a method that takes one request."""
        method = self._channel.unary_unary(*arguments, **options)
        return lambda request, timeout: method(request, timeout=timeout, metadata=self._metadata())

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Return a method whose messages are written and read one by one."""
        method = self._channel.stream_stream(*arguments, **options)
        return lambda: method(metadata=self._metadata())

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; calls that are under way have ``grace`` seconds to end."""
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class Links:
    """How the other servers are called.

    Attributes:
        ca: PEM file of the authorities of their certificates; None for no encryption.
        cert, key: PEM files of this server's certificate, which is shown to them.
        token: file of the token that is shown to them; read with each call.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: Path | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> "Links":
        """Return the links that settings ask for.

        Raises:
            UprError: a file cannot be read.
        """
        if config.peer_ca is None:
            links = cls(token=config.peer_token)
        else:
            links = cls(config.peer_ca, config.tls_cert, config.tls_key, config.peer_token)
        links._login().packed()
        return links

    def _login(self) -> Login:
        return Login.of(False, self.ca, self.cert, self.key, self.token)

    def version(self) -> tuple[object, ...]:
        """Return what changes with the files of TLS, without reading them."""
        return signature([path for path in (self.ca, self.cert, self.key) if path is not None])

    def open(self, address: str) -> Any:
        """Return a Link, which generated stubs take for a channel; its certificate is the one that the files have now.

        Raises:
            UprError: a file cannot be read, or the token would be sent over a network for everybody to read.
        """
        login, token = self._login(), self.token
        check_token(token, (address,), login.tls)
        if login.credentials is None:
            channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, login.credentials, options=CLIENT_OPTIONS)
        return Link(channel, lambda: None if token is None else authorization(token))
