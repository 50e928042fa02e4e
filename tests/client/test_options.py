"""Options of following: each value is checked when it is made, and a combination when it is followed."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from upr_client import Group, MemoryPositions, Only, ServerPositions, Tuning
from upr_client.changes.options import ChangesOptions, HandlingOptions
from upr_client.errors import InvalidArgumentError


def handling(concurrency: int = 8, retries: int = 3) -> HandlingOptions:
    return HandlingOptions(concurrency, "partition", retries, None, None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Only([1024]), "partition is 1024"),
        (lambda: Only(key_prefix=b"k" * 5000), "key_prefix is 5000 bytes"),
        (lambda: Only(key_prefix="k"), "key_prefix is 'k'"),  # type: ignore[arg-type]
        (lambda: Only(stability="stone"), "must be one of disk, memory"),
        (lambda: Tuning(credit_bytes=0), "credit"),
        (lambda: Tuning(heartbeat_seconds=0.0), "heartbeat"),
        (lambda: Tuning(heartbeat_seconds=True), "heartbeat interval is True s; must be"),
        (lambda: Tuning(unacknowledged_max=1.5), "unacknowledged_max is 1.5"),  # type: ignore[arg-type]
        (lambda: handling("5"), "concurrency is '5'; must be 1 to 1024"),  # type: ignore[arg-type]
        (lambda: handling(retries=-1), "retries is -1; must be a whole number, 0 or more"),
        (lambda: handling(retries="3"), "retries is '3'"),  # type: ignore[arg-type]
        (lambda: Tuning(save_seconds=-1.0), "save_seconds is -1.0; must be 0 or more"),
        (lambda: Tuning(retry_seconds=float("nan")), "retry_seconds is nan"),
        (lambda: Tuning(save_seconds=1e10), "save_seconds is 10000000000.0; .* at most 1000000000"),
        (lambda: Tuning(save_seconds="1"), "save_seconds is '1'; must be 0 or more"),  # type: ignore[arg-type]
        (
            lambda: Tuning(unacknowledged_max=0),
            "unacknowledged_max is 0; must be a whole number, 1 or more",
        ),
        (lambda: Group("g", lease_seconds=0.1), "lease_seconds is 0.1; must be 1 to 3600"),
        (lambda: Group("g", lease_seconds="9"), "lease_seconds is '9'"),  # type: ignore[arg-type]
        (lambda: Group("g", member=""), "member"),
        (lambda: Group(b"g"), "group is b'g'; must be a str"),  # type: ignore[arg-type]
        (lambda: Only(7), "partitions is 7; must be several"),  # type: ignore[arg-type]
        (lambda: Group(""), "group"),
        (lambda: ServerPositions("\n"), "consumer"),
    ],
)
def test_a_value_out_of_its_range_is_refused_when_it_is_made(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        make()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": "server"}, "resume is 'server'"),
        ({"only": [1]}, r"only is \[1\]"),
        ({"tuning": None}, "tuning is None"),
        ({"until": "then"}, "until is 'then'"),
        ({"until": {}}, "until names no partition"),
        ({"start": "then"}, "start is 'then'"),
        ({"start": datetime(2020, 1, 1)}, "time zone"),
        ({"consumer": "\n"}, "consumer"),
        ({"acknowledge": "never"}, "acknowledge is 'never'"),
        ({"on_rollback": "ignore"}, "on_rollback is 'ignore'"),
        ({"resume": Group("g"), "consumer": "c"}, "consumer is 'c'.*Group"),
        ({"resume": ServerPositions("s"), "consumer": "c"}, "consumer is 'c'.*ServerPositions"),
        ({"resume": Group("g"), "until": "now"}, "until is 'now'"),
        ({"resume": Group("g"), "only": Only([1])}, r"partitions are \[1\]"),
        ({"start": "now", "until": {1: 1}}, "start is 'now'"),
        ({"only": Only([1, 2]), "until": {1: 1}}, "partition 2 is to be followed"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        ChangesOptions(**options)


def test_a_member_without_a_name_gets_one_for_each_following() -> None:
    group = Group("g")
    names = {ChangesOptions(resume=group).member for _ in range(3)}
    assert len(names) == 3
    assert ChangesOptions(resume=Group("g", member="m")).member == "m"


def test_who_follows_under_which_name() -> None:
    assert ChangesOptions(resume=Group("g")).name == "g"
    assert ChangesOptions(resume=ServerPositions("s")).name == "s"
    assert ChangesOptions(resume=MemoryPositions(), consumer="c").name == "c"
