"""``upr-admin consumers`` against a real server with a group."""

import asyncio
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.raw import RawClient
from tests.service.test_groups import member, two
from tests.service.test_positions import NAME, fill, info, load, position, save
from upr.cli.admin import main
from upr_cli_kit import exit_codes
from upr_cli_kit.times import format_micros, parse_time
from upr_protocol.errors import InvalidArgumentError

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


async def run(target: str, *arguments: str) -> Result:
    """Run ``upr-admin consumers`` in this process, beside the loop that holds the group."""
    command = ["consumers", *arguments, "--target", target]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert "Traceback" not in result.output
    return result


async def text(target: str, *arguments: str) -> str:
    result = await run(target, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


async def document(target: str, *arguments: str) -> Any:
    return json.loads(await text(target, *arguments, "--json"))


@pytest.mark.asyncio
async def test_the_members_of_a_group_are_shown_with_what_they_own(
    target: str,
) -> None:
    async with RawClient(target) as client:
        await fill(client, 5, 1023)
        await two(client)
        # It has no position yet, and is listed all the same.
        (told,) = await document(target)
        assert (told["name"], told["connected"], told["partitions"]) == (NAME, True, 0)
        assert [(one["name"], one["partitions"]) for one in told["members"]] == [
            ("a", 512),
            ("b", 512),
        ]
        generation = (await info(client)).generation
        assert await save(client, generation, position(2, 1023), member="b") == []
        await member(client, "c")
        (told,) = await document(target, "list")
        assert (told["lag"], told["partitions"]) == (3, 1)
        assert sum(one["releasing"] for one in told["members"]) == 341
        assert all(0 < one["lease_left_seconds"] <= 30 for one in told["members"])

        shown = (await text(target)).splitlines()
        assert shown[0].split() == [
            *("name", "connected", "generation", "members", "partitions", "lag", "last_ack", "ago")
        ]
        assert shown[1].split()[:2] == [NAME, "yes"]
        assert shown[3] == f"{NAME}:"
        assert [line.split()[:3] for line in shown[5:]] == [
            ["a", "yes", "512"],
            ["b", "yes", "512"],
            ["c", "yes", "0"],
        ]

        (whole,) = [await document(target, "show", NAME)]
        assert len(whole["positions"]) == 1024
        last = whole["positions"][1023]
        assert (last["partition"], last["member"], last["seqno"]) == (1023, "b", 2)
        assert (last["high_seqno"], last["lag"], whole["positions"][0]["last_ack"]) == (5, 3, None)
        line = (await text(target, "show", NAME)).splitlines()[-1].split()
        assert line[:2] == ["1023", "b"]
        assert line[3:6] == ["2", "5", "3"]

        nobody = await run(target, "show", "nobody")
        assert nobody.exit_code == exit_codes.NOT_FOUND
        assert "there is no consumer 'nobody'" in nobody.stderr


@pytest.mark.asyncio
async def test_reset_to_each_place(target: str) -> None:
    async with RawClient(target) as client:
        await fill(client, 5, 9)
        shown = await text(target, "reset", NAME, "--to", "now", "--create", "--yes")
        assert shown == f"reset: {NAME}, all partitions to now; 1024 positions stored\n"
        assert (await load(client))[9].seqno == 5
        told = await document(
            target, "reset", NAME, "--to", "2h ago", "--partitions", "8-9", "--yes"
        )
        assert [(at["partition"], at["seqno"]) for at in told["positions"]] == [(8, 0), (9, 0)]
        since = datetime.fromisoformat(told["to"])
        assert timedelta(hours=1.9) < datetime.now(UTC) - since < timedelta(hours=2.1)
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        await text(target, "reset", NAME, "--to", tomorrow, "--partitions", "9", "--yes")
        assert (await load(client))[9].seqno == 5
        await text(target, "reset", NAME, "--to", "beginning", "--yes")
        assert await document(target) == []


@pytest.mark.asyncio
async def test_reset_asks_first(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = await run(target, "reset", NAME, "--to", "now")
    assert refused.exit_code == exit_codes.USAGE
    assert "--yes" in refused.stderr
    monkeypatch.setattr("upr_cli_kit.output.can_ask", lambda: True)
    command = ["consumers", "reset", NAME, "--to", "now", "--create", "--target", target]
    declined = await asyncio.to_thread(CliRunner().invoke, main, command, "n\n")
    assert declined.exit_code == exit_codes.REFUSED
    assert await document(target) == []
    agreed = await asyncio.to_thread(CliRunner().invoke, main, command, "y\n")
    assert agreed.exit_code == 0
    assert "Reset all partitions of consumer 'indexer' to now?" in agreed.stderr
    assert len(await document(target)) == 1


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        ("2h ago", NOW - timedelta(hours=2)),
        (" 90s Ago", NOW - timedelta(seconds=90)),
        ("1.5d ago", NOW - timedelta(hours=36)),
        ("2026-05-01T12:00:00Z", NOW),
        ("2026-05-01 14:00:00.5+02:00", NOW + timedelta(seconds=0.5)),
        ("1970-01-01T00:00:00Z", datetime.fromtimestamp(0, UTC)),
        ("2026-05-01T07:00:00-05:00", NOW.astimezone(timezone(timedelta(hours=-5)))),
    ],
)
def test_times(words: str, moment: datetime) -> None:
    assert parse_time(words, NOW) == moment


@pytest.mark.parametrize(
    "words", ["", "ago", "-2h ago", "1e300d ago", "3000000d ago", "nan ago", "1969-12-31T23:59Z"]
)
def test_what_is_no_time(words: str) -> None:
    with pytest.raises(InvalidArgumentError, match="for example 2026-05-01T12:00:00Z"):
        parse_time(words, NOW)


def test_times_are_shown_in_utc() -> None:
    assert format_micros(round(NOW.timestamp() * 1e6)) == "2026-05-01T12:00:00+00:00"
    assert format_micros(0) is None
