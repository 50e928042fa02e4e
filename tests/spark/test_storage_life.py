"""A whole life of a repository on S3."""

import json
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.spark.restoring import State, content
from tests.spark.s3 import S3Server
from tests.spark.s3_backups import LOCATION, upr_backup
from upr_backup.cli.commands import main
from upr_client import Client


def killed_at(s3: S3Server, folder: str, done: bool) -> None:
    """Take a backup that is killed when it puts an object into a folder: before that is done, or right after."""
    process: list[subprocess.Popen[bytes]] = []

    def kill(method: str, key: str, is_done: bool) -> bool:
        if method != "PUT" or not key.startswith(f"some/prefix/{folder}/") or is_done != done:
            return False
        process[0].send_signal(signal.SIGKILL)
        process[0].wait()
        return True

    command = [sys.executable, "-m", "upr_backup", LOCATION, "backup"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as started:
        process.append(started)
        s3.hook = kill
        said = started.communicate(timeout=60)[1]
    s3.hook = lambda *_: False
    assert started.returncode == -signal.SIGKILL, said


@pytest.mark.long
def test_a_whole_life_on_an_object_store(
    s3: S3Server, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.faults.ignore_condition = True
    done = upr_backup("init", "--target", target)
    assert (done.exit_code, "If-None-Match is ignored" in done.stderr) == (2, True), done.stderr
    s3.faults.ignore_condition = False
    assert upr_backup("init", "--target", target).exit_code == 0
    for status, error, code in ((403, "AccessDenied", 2), (503, "SlowDown", 5)):
        s3.faults.refuse["PUT"] = (status, error)
        done = upr_backup("backup")
        assert (done.exit_code, f"{status} {error}" in done.stderr) == (code, True), done.stderr
    s3.faults.refuse.clear()
    points: list[State] = []
    state: State = {}
    with Client(target) as client:
        for salt in range(4):
            rows = {b"%d/%d" % (salt, n): b"%d" % n for n in range(300)}
            rows |= {key: b"%d" % salt for key in list(state)[::7]}
            client.bucket().write_many(rows.items())
            state |= rows
            points.append(dict(state))
            if salt == 1:
                killed_at(s3, "data", done=True)
                assert len(json.loads(upr_backup("list", "--json").stdout)) == 1
            elif salt == 2:
                killed_at(s3, "chain", done=False)
                assert len(json.loads(upr_backup("list", "--json").stdout)) == 2
            elif salt == 3:
                # It is committed although nobody was told; there is nothing left to do.
                killed_at(s3, "chain", done=True)
                continue
            taken = upr_backup("backup", "--processes", "1", "--json")
            assert taken.exit_code == 0, taken.stderr
            assert json.loads(taken.stdout)["rows"] == len(rows)
        listed = json.loads(upr_backup("list", "--json").stdout)
        assert [(m["id"], m["kind"]) for m in listed] == [
            (1, "full"),
            *((n, "incremental") for n in (2, 3, 4)),
        ]
        done = upr_backup("verify", "--full")
        assert (done.exit_code, done.stdout) == (0, "all is well\n"), done.stderr
        # Each behind a backup that was killed.
        for number in (2, 4):
            client.admin.create_bucket(f"r{number}")
            into = ["--target", target, "--bucket", f"r{number}", "--at", str(number)]
            done = upr_backup("restore", *into)
            assert done.exit_code == 0, done.stderr
            assert content(client.target, f"r{number}") == points[number - 1]
    key = next(key for key in s3.objects if key.endswith(".parquet"))
    data, metadata = s3.objects[key]
    s3.objects[key] = (data[:-9] + b"?" + data[-8:], metadata)
    done = CliRunner().invoke(main, [LOCATION, "verify", "--full"])
    assert done.exit_code == 11
    del s3.objects[key]
    done = CliRunner().invoke(main, [LOCATION, "verify"])
    assert (done.exit_code, "is missing" in done.stderr) == (11, True)
    assert s3.uploads == {}
