"""``upr-admin explain`` without a server: the specification's worked handshakes, and every other answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from upr.cli.admin import main

DRF394 = "0000000000d8f394"
QER053 = "0000000000e0e053"
LOG: list[dict[str, Any]] = [
    {"partition": 4, "failover_log": [{"failover_id": "4", "seqno": 0}]},
    {
        "partition": 5,
        "failover_log": [
            {"failover_id": DRF394, "seqno": 0},
            {"failover_id": QER053, "seqno": 426},
        ],
    },
]


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    """What ``failover-log --json`` printed."""
    file = tmp_path / "log.json"
    file.write_text(json.dumps(LOG))
    return file


def run(log: Path, *arguments: str) -> dict[str, Any]:
    """Return the explanation as JSON, and check that the text is there too."""
    command = ["explain", *arguments, "--log", str(log)]
    text = CliRunner().invoke(main, command)
    assert (text.exit_code, text.stderr) == (0, "")
    assert text.stdout.startswith("partition ")
    result = CliRunner().invoke(main, [*command, "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_resuming_client_across_a_failover(log_file: Path) -> None:
    found = run(log_file, "5", "--id", DRF394, "--seqno", "434", "--markers", "350,418,430")
    assert found["hello"]["answer"] == "rollback"
    assert found["hello"]["rollback_seqno"] == 426
    assert found["hello"]["rule"] == "next_record"
    assert found["hello"]["failover_id"] == QER053
    assert found["records"] == LOG[1]["failover_log"]
    assert found["start"] is None
    assert (found["resume"]["seqno"], found["resume"]["undo"]) == (418, True)
    assert found["restart"]["answer"] == "started"
    text = CliRunner().invoke(
        main,
        [
            "explain",
            "5",
            "--id",
            DRF394,
            "--seqno",
            "434",
            "--markers",
            "418",
            "--log",
            str(log_file),
        ],
    )
    assert f"client    undo what is above 418, remember {QER053}, resume from 418" in text.stdout
    assert f"          {QER053} at 426" in text.stdout
    assert "the high seqno is not known" in text.stdout


def test_a_new_client(log_file: Path) -> None:
    found = run(log_file, "5")
    assert (found["hello"]["answer"], found["hello"]["rule"]) == ("ok", "new_client")
    assert found["start"]["answer"] == "started"
    assert found["resume"] is None


def test_a_resuming_client_without_failover(log_file: Path) -> None:
    found = run(log_file, "5", "--id", QER053, "--seqno", "434", "--high", "440")
    assert (found["hello"]["answer"], found["start"]["answer"]) == ("ok", "started")
    assert found["server"]["high_seqno"] == 440
    assert found["records"] == LOG[1]["failover_log"][-1:]


def test_nothing_to_undo_needs_the_horizon(log_file: Path) -> None:
    known = run(log_file, "5", "--id", DRF394, "--seqno", "420", "--horizon", "426")
    assert (known["resume"]["seqno"], known["resume"]["undo"]) == (420, False)
    unknown = run(log_file, "5", "--id", DRF394, "--seqno", "420")
    assert (unknown["resume"]["seqno"], unknown["resume"]["rule"]) == (0, "no_marker")
    at_marker = run(log_file, "5", "--id", DRF394, "--seqno", "420", "--markers", "420")
    assert (at_marker["client"]["horizon"], at_marker["resume"]["undo"]) == (420, False)


def test_a_marker_at_the_record_counts_when_told_so(log_file: Path) -> None:
    place = ["5", "--id", DRF394, "--seqno", "434", "--markers", "418,426"]
    assert run(log_file, *place)["resume"]["seqno"] == 418
    assert run(log_file, *place, "--at-record")["resume"]["seqno"] == 426


def test_data_of_an_older_id_above_its_end(log_file: Path) -> None:
    found = run(log_file, "5", "--id", QER053, "--data-id", DRF394, "--seqno", "430")
    assert found["start"]["rule"] == "data_above_next_record"
    assert found["records"] == LOG[1]["failover_log"]


def test_above_the_high_seqno_is_an_alarm(log_file: Path) -> None:
    found = run(log_file, "5", "--id", QER053, "--seqno", "500", "--high", "450")
    assert (found["start"]["rule"], found["start"]["alarm"]) == ("above_high", True)
    assert found["records"] == LOG[1]["failover_log"][-1:]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[5]",
        '[{"partition": 5}]',
        '[{"partition": 5, "failover_log": []}]',
        '[{"partition": 5, "failover_log": [7]}]',
        '[{"partition": 5, "failover_log": [{"failover_id": 7, "seqno": 0}]}]',
        '[{"partition": 5, "failover_log": [{"failover_id": "7", "seqno": -1}]}]',
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "log.json"
    file.write_text(text)
    result = CliRunner().invoke(main, ["explain", "5", "--log", str(file)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_partition_that_the_log_lacks(log_file: Path) -> None:
    result = CliRunner().invoke(main, ["explain", "6", "--log", str(log_file)])
    assert (result.exit_code, result.stdout) == (3, "")
    assert "has no partition 6" in result.stderr
