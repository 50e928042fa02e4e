"""Where the next call goes, without servers."""

import pytest

from upr_client.endpoints import is_server_name
from upr_client.server_choice import STAYS_MAX, Route, Servers
from upr_protocol.errors import (
    BehindError,
    NoRoomError,
    PartitionNotActiveError,
    ShuttingDownError,
    UnavailableError,
    UprError,
)
from upr_protocol.limits import SERVERS_MAX

GONE = UnavailableError("gone")


def not_active(owner: str = "") -> UprError:
    return PartitionNotActiveError("a replica", retriable=True, owner=owner)


def walk(route: Route, *errors: UprError) -> list[str]:
    """Fail at the current endpoint with each error; return where the route went."""
    went = []
    for error in errors:
        route.failed(error, route.current)
        went.append(route.current)
    return went


@pytest.mark.parametrize(
    ("name", "ok"),
    [
        ("a:1", True),
        ("db-1.example.org:65535", True),
        ("[2001:db8::1]:7711", True),
        ("a" * 253 + ":1", True),
        ("", False),
        ("a", False),
        ("a:0", False),
        ("a:65536", False),
        ("a,b:1", False),
        ("a:1,b:1", False),
        ("unix:7711", False),
        ("UNIX:7711", False),
        ("dns:7711", False),
        ("ipv4:7711", False),
        ("xds:7711", False),
        ("dns1:7711", True),
        ("unix:/run/upr.sock:1", False),
        ("dns:///a:1", False),
        ("dns://resolver/a:1", False),
        ("a b:1", False),
        ("2001:db8::1:7711", False),
        ("a" * 2**20 + ":1", False),
    ],
)
def test_what_may_be_the_name_of_a_server(name: str, ok: bool) -> None:
    assert is_server_name(name) is ok
    servers = Servers(("given:1",))
    servers.learn([name])
    assert servers.all == (("given:1", name) if ok else ("given:1",))


def test_what_was_named_last_is_remembered_and_what_was_given_stays() -> None:
    servers = Servers(("a:1", "b:1"))
    servers.learn(["", "a:1", "c:1", *(f"d:{n}" for n in range(1, 100))])
    assert servers.all[:4] == ("a:1", "b:1", "c:1", "d:1")
    assert len(servers.all) == 2 + SERVERS_MAX
    # A set whose servers all got new addresses, many times over.
    servers.learn(["owner:1"])
    assert servers.all[:3] == ("a:1", "b:1", "owner:1")
    assert len(servers.all) == 2 + SERVERS_MAX
    # As many as a server names are all remembered, and the next answer with the same names changes nothing.
    named = [f"g:{n}" for n in range(1, SERVERS_MAX + 1)]
    servers.learn(named)
    remembered = servers.all
    assert set(remembered) == {"a:1", "b:1", *named}
    servers.learn(named)
    assert servers.all is remembered
    alone = Servers(("a:1",), only_given=True)
    alone.learn(["c:1"])
    assert alone.all == ("a:1",)


def test_it_goes_round_and_many_calls_that_are_lost_at_once_move_it_once() -> None:
    route = Route(Servers(("a:1", "b:1", "c:1")))
    for _ in range(5):
        assert route.failed(GONE, "a:1") is None
    assert route.current == "b:1"
    assert walk(route, UprError("a bug"), NoRoomError("full")) == ["b:1", "b:1"]
    assert walk(route, ShuttingDownError("stopping")) == ["c:1"]
    # One that is lost late.
    assert route.failed(GONE, "a:1") is None
    assert route.current == "c:1"
    assert walk(route, GONE, GONE, GONE, GONE) == ["a:1", "b:1", "c:1", "a:1"]
    alone = Route(Servers(("a:1",)))
    assert walk(alone, GONE, GONE) == ["a:1", "a:1"]


def test_the_one_that_is_named_is_called_at_once_but_not_again_and_again() -> None:
    route = Route(Servers(("a:1", "b:1", "c:1")))
    assert route.failed(not_active("c:1"), "a:1") == 0.0
    assert route.current == "c:1"
    # Another call that was refused meanwhile.
    assert route.failed(not_active("c:1"), "a:1") == 0.0
    # The two name each other.
    assert route.failed(not_active("a:1"), "c:1") is None
    assert route.current == "b:1"
    route.worked("b:1")
    assert route.failed(not_active("a:1"), "b:1") == 0.0
    assert route.current == "a:1"


def test_a_stale_name_keeps_it_from_no_server() -> None:
    # "a" has not heard that "c" is active, and names "b", which is dead.
    route = Route(Servers(("a:1", "c:1", "b:1")))
    assert walk(route, not_active("b:1"), GONE) == ["b:1", "c:1"]
    other = Route(Servers(("a:1", "b:1", "c:1", "d:1")), "d:1")
    assert walk(other, not_active("b:1"), GONE, not_active("b:1"), not_active("b:1")) == [
        "b:1",
        "c:1",
        "a:1",
        "b:1",
    ]


def test_one_that_becomes_active_is_waited_for_but_not_for_ever() -> None:
    route = Route(Servers(("a:1", "b:1")))
    assert route.failed(not_active("b:1"), "a:1") == 0.0
    for _ in range(STAYS_MAX):
        assert route.failed(not_active("b:1"), "b:1") == 0.1
        assert route.current == "b:1"
    assert route.failed(not_active("b:1"), "b:1") is None
    assert route.current == "a:1"


def test_who_is_not_named_by_one_that_may_be_followed() -> None:
    route = Route(Servers(("a:1", "b:1"), only_given=True))
    assert route.failed(not_active("c:1"), "a:1") is None
    assert route.current == "b:1"
    assert route.failed(BehindError("later", owner="a:1"), "b:1") is None
    assert route.current == "a:1"


def test_each_endpoint_once_for_a_call_of_its_own() -> None:
    route = Route(Servers(("a:1", "b:1", "c:1")), "b:1")
    tried: set[str] = set()
    went = []
    named = "c:1"
    while (endpoint := route.another(tried, named)) is not None:
        went.append(endpoint)
        tried.add(endpoint)
        named = "nobody:1"
    assert went == ["c:1", "b:1", "a:1"]
