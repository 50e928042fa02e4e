"""The log: what somebody else chose cannot forge a field or a line, nor fill the disk."""

import ast
import json
import logging
import shlex
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import upr
from tests.conftest import StartServer
from tests.raw import RawClient
from upr.service.logs import (
    EVENTS_A_SECOND,
    VALUE_CHARACTERS,
    EventLimit,
    JsonFormatter,
    TextFormatter,
    quoted,
)

FORGED = [
    "name=1 level=critical event",
    "a\nINFO stopped clean=True",
    'quote" and \\ backslash',
    "\u2028line",
    "x\u202ey",
    "",
    " lead",
    "\x85",
]


@pytest.mark.parametrize("name", FORGED)
def test_a_value_is_one_word_of_one_line(name: str) -> None:
    record = logging.makeLogRecord({"msg": "follow ended", "consumer": name, "reason": "STOPPED"})
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert shlex.split(line)[-1] == "reason=STOPPED"
    word = line.split(" follow ended ", 1)[1].removesuffix(" reason=STOPPED")
    assert json.loads(word.removeprefix("consumer=")) == name


@pytest.mark.parametrize("name", ["default", "ünïcode-7", "a/b:1", "127.0.0.1:5"])
def test_a_plain_value_stands_as_it_is(name: str) -> None:
    assert quoted(name) == name


def test_a_long_value_is_cut() -> None:
    record = logging.makeLogRecord({"msg": "event", "name_of": "x" * 10**6})
    assert len(TextFormatter().format(record)) < VALUE_CHARACTERS + 200
    assert len(JsonFormatter().format(record)) < VALUE_CHARACTERS + 200


def test_the_time_of_a_json_line_is_an_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.makeLogRecord({"msg": "event"})
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        told = json.loads(JsonFormatter().format(record))["time"]
    time.tzset()
    assert told.endswith("+05:30")
    assert abs(datetime.fromisoformat(told).timestamp() - record.created) < 0.001


def test_no_line_of_a_trace_looks_like_a_line_of_the_log() -> None:
    try:
        raise ValueError("x\n\n2026-11-22 00:00:00,000 critical forged") from KeyError("y")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)}
        )
    _, *others = TextFormatter().format(record).splitlines()
    assert others
    assert all(line.startswith("  ") for line in others)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What gets into a log that is limited by ``limit_of``."""
    found: list[logging.LogRecord] = []
    yield found
    logging.getLogger("limited").handlers.clear()


def limited(limit: EventLimit, found: list[logging.LogRecord]) -> logging.Logger:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler, log = Handler(), logging.getLogger("limited")
    handler.addFilter(limit)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return log


def test_an_event_is_logged_some_times_a_second_and_the_rest_is_counted(
    lines: list[logging.LogRecord],
) -> None:
    clock = Clock()
    limit = EventLimit(clock)
    log = limited(limit, lines)
    for _ in range(50):
        log.info("a start is told whole")
    assert len(lines) == 50
    lines.clear()
    limit.on = True
    for number in range(1000):
        log.info("follow ended", extra={"number": number})
    log.warning("something else")
    assert [record.msg for record in lines] == ["follow ended"] * EVENTS_A_SECOND + [
        "something else"
    ]
    clock.now += 1.5
    log.info("follow ended")
    assert len(lines) == EVENTS_A_SECOND + 2
    limit.tell_suppressed()
    told = lines[-1]
    assert (told.msg, told.levelno, vars(told)["suppressed"]) == ("follow ended", logging.INFO, 990)
    limit.tell_suppressed()
    assert lines[-1] is told


@pytest.mark.asyncio
async def test_clients_cannot_fill_the_log(server_process: StartServer) -> None:
    server = server_process("--log-format", "text")
    async with RawClient(server.target) as client:
        for _ in range(200):
            await (await client.follow(consumer="x\u2028y level=critical")).close()
    assert server.terminate() == 0
    text = server.log_text()
    said = [line for line in text.splitlines() if "follow ended" in line]
    counts = [int(line.rsplit("suppressed=", 1)[1]) for line in said if "suppressed=" in line]
    whole = [line for line in said if "suppressed=" not in line]
    assert len(whole) < 150
    assert len(whole) + sum(counts) == 200
    assert all(r'consumer="x\u2028y level=critical"' in line for line in whole)


def test_the_name_of_an_event_is_constant() -> None:
    """Who searches the log, or counts its lines, finds an event by its name; what differs is in the fields."""
    made, levels = [], {"debug", "info", "warning", "error", "critical", "exception"}
    for file in Path(upr.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_log = ast.unparse(node.func.value) == "log" and node.func.attr in levels
            if is_log and not isinstance(node.args[0], ast.Constant):
                made.append(f"{file}:{node.lineno}: {ast.unparse(node.args[0])}")
    assert made == []


def test_off_a_terminal_the_log_is_json(server_process: StartServer) -> None:
    server = server_process()
    server.terminate()
    lines = [json.loads(line) for line in server.log_text().splitlines()]
    assert [line["event"] for line in lines] == ["serving", "stopping", "stopped"]
