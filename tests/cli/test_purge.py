"""``upr-admin purge`` against a real server."""

import json
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from tests.conftest import StartServer
from upr.cli.admin import main
from upr_cli_kit.output import print_json
from upr_client import Client
from upr_client.admin import PartitionPurge
from upr_protocol.errors import DataDamagedError
from upr_protocol.partitioning import partition_of


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_goes_and_what_stays_is_told(server_process: StartServer, dry_run: bool) -> None:
    server = server_process("--tombstone-age", "86400s")
    with Client(server.target) as client:
        client.bucket().set(b"a", b"1")
        client.bucket().delete(b"a")
    # A clean stop stores everything.
    assert server.terminate() == 0
    server.start()
    options = [*(["--dry-run"] if dry_run else []), "--target", server.target]
    listed = json.loads(CliRunner().invoke(main, ["purge", "--json", *options]).stdout)
    assert listed == [
        {
            "partition": partition_of(b"a"),
            "tombstones": 1,
            "old_tombstones": 0,
            "purged": 0,
            "purge_seqno": 0,
            "holders": [],
            "problem": None,
            "more_holders": 0,
        }
    ]
    table = CliRunner().invoke(main, ["purge", *options]).stdout.splitlines()
    title = "would go" if dry_run else "purged"
    assert title in table[0]
    assert table[1].split() == [str(partition_of(b"a")), "1", "0", "0", "0"]
    # Numbers stand to the right, below the end of their title.
    assert table[1].index("1  ") == table[0].index("tombstones") + len("tombstones") - 1


def test_a_problem_is_told_as_in_every_listing(capsys: pytest.CaptureFixture[str]) -> None:
    problem = DataDamagedError("a block is damaged", hint="restore it")
    print_json(asdict(PartitionPurge(5, 0, 0, 0, 0, (), problem)))
    assert json.loads(capsys.readouterr().out)["problem"] == {
        "reason": "DATA_DAMAGED",
        "message": "a block is damaged",
        "hint": "restore it",
    }
