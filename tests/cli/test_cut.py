"""``upr-admin cut``."""

import json

from click.testing import CliRunner, Result

from upr.cli import admin
from upr_client import Client


def run(target: str, *arguments: str) -> Result:
    result = CliRunner().invoke(admin.main, ["cut", *arguments, "--target", target])
    assert "Traceback" not in result.output
    return result


def test_create_list_renew_release(target: str) -> None:
    with Client(target) as client:
        partition = client.bucket().set(b"a", b"1").partition
    made = run(target, "create", "nightly", "--lease", "2h")
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("created: nightly, 1024 partitions pinned until 20")
    small = run(target, "create", "small", "--partitions", f"{partition}", "--json")
    document = json.loads(small.stdout)
    assert (document["name"], document["lease_seconds"]) == ("small", 3600)
    (pin,) = document["partitions"]
    assert (pin["partition"], pin["seqno"], len(pin["failover_id"])) == (partition, 1, 16)

    listed = json.loads(run(target, "list", "--json").stdout)
    assert [(cut["name"], cut["lease_seconds"]) for cut in listed] == [
        ("nightly", 7200),
        ("small", 3600),
    ]
    assert "partitions" not in listed[0]
    whole = json.loads(run(target, "list", "--json", "--partitions").stdout)
    assert [len(cut["partitions"]) for cut in whole] == [1024, 1]
    header, first, _ = run(target, "list").stdout.splitlines()
    assert header.split() == ["name", "created", "expires", "lease", "left"]
    assert (first.split()[0], first.split()[3]) == ("nightly", "2h")
    assert len(run(target, "list", "--partitions").stdout.splitlines()) == 1 + 1024 + 1

    renewed = run(target, "renew", "small", "--lease", "1d")
    assert renewed.stdout.startswith("renewed: small, pinned until 20")
    assert json.loads(run(target, "list", "--json").stdout)[1]["lease_seconds"] == 86_400
    assert run(target, "release", "small").stdout == "released: small\n"
    assert [cut["name"] for cut in json.loads(run(target, "list", "--json").stdout)] == ["nightly"]
