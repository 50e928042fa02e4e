"""``upr-admin status|storage|consumers`` against a real server."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.conftest import StartServer
from upr.cli.admin import main
from upr.storage import directory, journal
from upr_cli_kit import exit_codes
from upr_cli_kit.output import size_text
from upr_client import Client, FilePositions
from upr_protocol.failover import parse_failover_id

ROWS = 3000


def run(target: str, *arguments: str) -> Result:
    """Run upr-admin in this process."""
    result = CliRunner().invoke(main, [*arguments, "--target", target])
    assert "Traceback" not in result.output
    return result


def text(target: str, *arguments: str) -> str:
    result = run(target, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def document(target: str, *arguments: str) -> Any:
    return json.loads(text(target, *arguments, "--json"))


def fill(target: str, tmp_path: Path) -> None:
    """Write rows, and have a consumer named "backup" read them."""
    with Client(target) as client:
        bucket = client.bucket()
        bucket.write_many([(b"key %d" % i, b"v" * 100) for i in range(ROWS)])
        positions = FilePositions(tmp_path / "positions")
        with bucket.changes(resume=positions, until="now", consumer="backup") as changes:
            assert sum(batch.rows for batch in changes.batches()) == ROWS


@pytest.fixture
def filled(target: str, tmp_path: Path) -> str:
    """Where a server listens whose rows a consumer named "backup" has read."""
    fill(target, tmp_path)
    return target


def test_status(filled: str) -> None:
    told = document(filled, "status")
    assert told["anonymous_bytes"] > 10 * 2**20
    assert told["mapped_bytes"] > 0
    assert re.fullmatch("[0-9a-f]{16}", told["server_id"])
    assert (told["wire"], told["disk_format"]) == ("upr.v1", directory.FORMAT)
    assert told["journal_format"] == journal.FORMAT
    assert f"wire upr.v1, disk {directory.FORMAT}, journal" in text(filled, "status")
    (bucket,) = told["buckets"]
    assert bucket["name"] == "default"
    assert bucket["tail_limit_bytes"] == 64 * 2**20
    assert 100 * ROWS < bucket["tail_bytes"] < 64 * 2**20
    assert (bucket["streams"], bucket["cuts"], bucket["problem"]) == (0, 0, None)
    shown = text(filled, "status")
    assert told["server_id"] in shown
    assert "64.0 MiB" in shown
    assert re.search(r"^anonymous memory +\d+\.\d MiB$", shown, re.MULTILINE)


def test_a_server_that_does_not_tell_its_formats(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(target) as client:
        told = client.admin.status()
        older = replace(told, wire="", disk_format=0, journal_format=0)
        monkeypatch.setattr(type(client.admin), "status", lambda _: older)
    assert "formats" not in text(target, "status")


def test_storage(server_process: StartServer, tmp_path: Path) -> None:
    server = server_process()
    fill(server.target, tmp_path)
    told = document(server.target, "storage")
    assert told["ingested_bytes"] > 100 * ROWS
    assert told["journalled_bytes"] > told["ingested_bytes"]
    assert told["write_amplification"] == pytest.approx(
        (told["journalled_bytes"] + told["flushed_bytes"] + told["merge_output_bytes"])
        / told["ingested_bytes"]
    )
    assert server.terminate() == 0
    server.start()
    stored = document(server.target, "storage")
    assert stored["rows"] == ROWS
    assert (stored["write_amplification"], stored["compression"]) == (None, "none")
    shown = text(server.target, "storage")
    assert f"{ROWS} rows" in shown
    assert f"{size_text(stored['used_bytes'])} of {size_text(stored['file_bytes'])}" in shown
    assert "nothing since the start" in shown
    assert re.search(r"^not compacted +0 B of ", shown, re.MULTILINE)


def test_consumers(filled: str) -> None:
    (told,) = document(filled, "consumers")
    assert told["name"] == "backup"
    assert (told["connected"], told["lag"]) == (False, 0)
    assert "positions" not in told
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", told["last_ack"])
    (detailed,) = document(filled, "consumers", "--partitions")
    assert len(detailed["positions"]) == told["partitions"] == 1024
    assert sum(position["seqno"] for position in detailed["positions"]) == ROWS
    assert all(parse_failover_id(at["failover_id"]) for at in detailed["positions"])
    header, line = text(filled, "consumers").splitlines()
    assert header.split() == [
        *("name", "connected", "generation", "members", "partitions", "lag", "last_ack", "ago")
    ]
    generation = str(told["generation"])
    assert line.split()[:-1] == ["backup", "no", generation, "0", "1024", "0", told["last_ack"]]
    assert len(text(filled, "consumers", "--partitions").splitlines()) == 1025


def test_forget(filled: str) -> None:
    assert text(filled, "consumers", "forget", "backup") == "forgotten: backup\n"
    assert document(filled, "consumers") == []
    assert len(text(filled, "consumers").splitlines()) == 1
    again = run(filled, "consumers", "forget", "backup")
    assert again.exit_code == exit_codes.NOT_FOUND
    assert "there is no consumer 'backup'" in again.stderr
    assert again.stderr.count("\n") == 1
    wrong = run(filled, "consumers", "forget", "")
    assert wrong.exit_code == exit_codes.USAGE


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_sizes(count: int, words: str) -> None:
    assert size_text(count) == words
