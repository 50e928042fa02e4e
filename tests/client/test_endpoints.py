"""What a client makes of its target, TLS and token."""

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from upr_client import Client
from upr_client.endpoints import (
    authorization,
    check_token,
    credentials_of,
    endpoints_of,
    is_local,
    moves_on,
    was_not_done,
)
from upr_client.errors import InvalidArgumentError
from upr_protocol.errors import (
    NoRoomError,
    PartitionNotActiveError,
    ShuttingDownError,
    UnavailableError,
)


@pytest.mark.parametrize(
    ("target", "endpoints"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,a:1", ("a:1", "b:2")),
        (["a:1", "[::1]:65535"], ("a:1", "[::1]:65535")),
        (("unix:/run/upr.sock",), ("unix:/run/upr.sock",)),
        ("dns:///host:7711", ("dns:///host:7711",)),
    ],
)
def test_targets(target: str | list[str], endpoints: tuple[str, ...]) -> None:
    assert endpoints_of(target) == endpoints
    with Client(target) as client:
        assert (client.target, client.endpoints) == (endpoints[0], endpoints)


@pytest.mark.parametrize(
    "target",
    [
        "",
        "a",
        "\udcff:1",
        "unix:\udcff",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:1,,b:1",
        "a:x",
        [],
        [7],
        "a:" + "9" * 5000,
        "http://a:1",
    ],
)
def test_targets_that_are_none(target: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="endpoint"):
        Client(target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": 7711}, "target is 7711; must be HOST:PORT"),
        ({"connect_timeout": 0}, "connect_timeout is 0; must be above 0"),
        ({"request_timeout": None}, "request_timeout is None; must be above 0"),
        ({"retry_seconds": "2"}, "retry_seconds is '2'; must be 0 or more"),
        ({"retry_seconds": -1}, "retry_seconds is -1; must be 0 or more"),
        ({"retry_seconds": float("nan")}, "retry_seconds is nan; must be 0 or more"),
        ({"retry_seconds": math.inf}, "retry_seconds is inf; .* at most 1000000000 .None means"),
        ({"request_timeout": math.inf}, "request_timeout is inf; must be above 0, and at most"),
        (
            {"connect_timeout": 1e10},
            "connect_timeout is 10000000000.0; must be above 0, and at most",
        ),
    ],
)
def test_options_of_a_client_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        Client(**{"target": "a:1", **options})


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("dns:///localhost:1", True),
        ("unix:/a", True),
        ("10.0.0.1:1", False),
        ("localhost.example.org:1", False),
        ("127.0.0.1.example.org:1", False),
        ("[::2]:1", False),
        ("0.0.0.0:1", False),
    ],
)
def test_what_stays_on_this_machine(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


def test_a_token_is_not_sent_for_everybody_to_read() -> None:
    with pytest.raises(InvalidArgumentError, match=r"sent to far:1 without encryption \(pass tls"):
        Client("localhost:1,far:1", token="t")
    with pytest.raises(InvalidArgumentError, match="without encryption"):
        Client("far:1", token=lambda: "t", tls=False)
    check_token("t", ["localhost:1"], encrypted=False)
    check_token("t", ["far:1"], encrypted=True)
    check_token(None, ["far:1"], encrypted=False)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "\xe4", lambda: "", lambda: 7])
def test_tokens_that_cannot_be_sent(token: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="visible ASCII") as caught:
        authorization(token)
    assert "two" not in str(caught.value)


def test_tls_is_none_true_or_credentials() -> None:
    credentials = grpc.ssl_channel_credentials()
    assert credentials_of(credentials) is credentials
    assert credentials_of(None) is credentials_of(False) is None
    assert isinstance(credentials_of(True), grpc.ChannelCredentials)
    wrong: Any
    for wrong in ("yes", 1, b"pem"):
        with pytest.raises(InvalidArgumentError, match="tls is "):
            Client("localhost:1", tls=wrong)
    wrong = 7
    with pytest.raises(InvalidArgumentError, match="token is int"):
        Client("localhost:1", token=wrong)


@pytest.mark.parametrize("options", [{"tls": True}, {"token": "t"}, {"target": ["a:1", "b:1"]}])
def test_a_channel_that_is_given_brings_its_own(options: dict[str, Any]) -> None:
    channel = grpc.insecure_channel("localhost:1")
    with channel, pytest.raises(InvalidArgumentError, match="channel is given"):
        Client(**{"target": "localhost:1", "channel": channel, **options})


def test_which_errors_make_another_endpoint_worth_trying() -> None:
    assert moves_on(UnavailableError("gone"))
    assert moves_on(ShuttingDownError("stopping"))
    assert moves_on(PartitionNotActiveError("replica"))
    assert not moves_on(NoRoomError("full"))


@pytest.mark.parametrize(
    ("code", "details", "never"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", True),
        ("UNAVAILABLE", "DNS resolution failed for nowhere:1", True),
        ("UNAVAILABLE", "errors resolving nowhere:1: [field:hostname lookup error]", True),
        ("UNAVAILABLE", "Socket closed", False),
        ("UNAVAILABLE", None, False),
        ("DEADLINE_EXCEEDED", "failed to connect to all addresses", False),
    ],
)
def test_only_what_had_no_connection_was_not_done(
    code: str, details: str | None, never: bool
) -> None:
    class Failed(grpc.RpcError):
        code: Callable[[], grpc.StatusCode]
        details: Callable[[], str | None]

    error = Failed()
    error.code = lambda: grpc.StatusCode[code]
    error.details = lambda: details
    assert was_not_done(error) is never
    assert not was_not_done(grpc.RpcError())
