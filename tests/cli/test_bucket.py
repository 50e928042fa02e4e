"""``upr-admin bucket`` against a real server."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.conftest import StartServer
from tests.model import Row
from upr.cli.admin import main
from upr.cli.admin_commands.status import look, top_text
from upr.storage.store import Identity
from upr.storage.undone import write_undone
from upr_client import Client
from upr_client.testing.memory import run_block
from upr_protocol.partitioning import partition_of


def admin(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bucket", *arguments])


def test_create_list_and_drop(target: str) -> None:
    there = ("--target", target)
    made = admin("create", "orders", "--compression", "zstd", *there)
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout.startswith("created: orders, version ")
    document = json.loads(admin("create", "plain", "--json", *there).stdout)
    assert (document["name"], document["compression"]) == ("plain", "none")

    listed = json.loads(admin("list", "--json", *there).stdout)
    assert [one["name"] for one in listed] == ["default", "orders", "plain"]
    assert [one["compression"] for one in listed] == ["none", "zstd", "none"]
    assert all(one["problem"] is None and one["used_bytes"] > 0 for one in listed)
    table = admin("list", *there).stdout.splitlines()
    columns = ["name", "version", "compression", "mutations", "used", "quota", "problem"]
    assert table[0].split() == columns
    assert table[2].split()[:4] == ["orders", listed[1]["version"], "zstd", "0"]

    given = admin("quota", "plain", str(2**20), *there)
    assert (given.exit_code, given.stderr) == (0, "")
    assert given.stdout.startswith("quota: plain, 1.0 MiB; ")
    asked = admin("create", "small", "--quota", "5000", "--json", *there)
    assert json.loads(asked.stdout)["quota_bytes"] == 5000
    quotas = [one["quota_bytes"] for one in json.loads(admin("list", "--json", *there).stdout)]
    assert quotas == [0, 0, 2**20, 5000]

    wrong = admin("drop", "orders", "--version", "0000000000000001", "--yes", *there)
    assert wrong.exit_code == 4
    assert "not 0000000000000001" in wrong.stderr
    dropped = admin("drop", "orders", "--version", listed[1]["version"], "--yes", *there)
    assert (dropped.exit_code, dropped.stderr) == (0, "")
    assert dropped.stdout == f"dropped: orders, version {listed[1]['version']}\n"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_drop_asks_first(target: str, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    with Client(target) as client:
        client.bucket().write_many([(b"%d" % i, b"v") for i in range(12)])
    asked: list[str] = []

    def confirm(text: str, *, err: bool) -> bool:
        assert err
        asked.append(text)
        return answer == "y"

    monkeypatch.setattr(click, "confirm", confirm)
    monkeypatch.setattr("upr_cli_kit.output.can_ask", lambda: True)
    result = CliRunner().invoke(main, ["bucket", "drop", "default", "--target", target])
    assert len(asked) == 1
    assert "12 mutations" in result.stderr
    assert result.exit_code == (0 if answer == "y" else 4)
    assert result.stderr.endswith("nothing was changed\n") == (answer == "n")
    with Client(target) as client:
        assert [info.name for info in client.admin.buckets()] == (
            ["default"] if answer == "n" else []
        )
    help_text = CliRunner().invoke(main, ["bucket", "drop", "--help"]).output
    assert "made anew" in " ".join(help_text.split())


def test_a_damaged_bucket_is_listed_with_its_problem(server_process: StartServer) -> None:
    server = server_process()
    with Client(server.target) as client:
        version = client.admin.create_bucket("orders").version
        client.bucket("orders").set(b"a", b"1")
        client.bucket("orders").set(b"a", b"2")
    server.kill()
    folder: Path = server.data / "buckets" / f"{version:016x}"
    (segment,) = (folder / "journal").glob("*.journal")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    server.start()
    listed = json.loads(admin("list", "--json", "--target", server.target).stdout)
    assert [one["name"] for one in listed] == ["default", "orders"]
    assert listed[1]["problem"]["reason"] == "DATA_DAMAGED"
    assert "damaged" in admin("list", "--target", server.target).stdout.splitlines()[2]
    with Client(server.target) as client:
        shown = top_text(None, look(client))
    assert re.search(r"^default +- +0 +0% ", shown, re.MULTILINE)
    assert re.search(r"^orders +- +\d+ +- .*damaged", shown, re.MULTILINE)


def test_what_was_undone_is_not_put_into_another_bucket_of_the_name(
    target: str, tmp_path: Path
) -> None:
    with Client(target) as client:
        old = next(one.version for one in client.admin.buckets() if one.name == "default")
        rows = [Row(7, b"key", b"undone")]
        lost = run_block(partition_of(b"key"), rows, 6, 7, 7, 1)
        write_undone(tmp_path, Identity("default", old), [lost], {partition_of(b"key"): 6}, 1)
        client.admin.drop_bucket("default", old)
        client.admin.create_bucket("default")
        # Of a seqno below those that were undone: in the old bucket it would be what was there before.
        client.bucket().set(b"key", b"new")
        (file,) = (tmp_path / "undone").iterdir()
        command = ["undone", "apply", str(file), "--if-unchanged", "--target", target]
        refused = CliRunner().invoke(main, command)
        assert client.bucket().get(b"key") == b"new"
        assert refused.exit_code == 4, refused.output
        assert f"not {old:016x}: it was created again" in refused.stderr
        assert "the mutations are of the old one" in refused.stderr
