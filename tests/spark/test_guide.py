"""What the guide of upr_spark shows, as it is printed there; its jobs with Delta tables have a test with rollbacks."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_operators_guide import Shell, commands
from upr_client import Client
from upr_client.arrow import record_batch

GUIDE = Path(__file__).parents[2] / "client" / "upr_spark" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
BY_CRON = re.findall(
    r"^```\n(.*?)^```$",
    GUIDE.read_text().partition("\n## Back up by cron, restore\n")[2].partition("\n## ")[0],
    re.DOTALL | re.MULTILINE,
)
"""A walk through the commands with what they print, and the lines of a crontab."""


@pytest.mark.long
def test_the_examples_run(
    spark: Any, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [example for example in EXAMPLES if "DeltaTable" not in example]
    assert (len(examples), len(EXAMPLES)) == (4, 6)
    with Client(target) as client:
        client.bucket().write_many([(b"%d" % n, b"v") for n in range(100)] + [(b"0", None)])
        with client.bucket().changes(until="now") as changes:
            tables = [record_batch(batch) for batch in changes.batches()]
        newest = max(time for table in tables for time in table["time"].to_pylist())
        names: dict[str, Any] = {
            "frame": spark.createDataFrame([("a", "1"), ("b", "2")], ["key", "value"])
        }
        for example in examples:
            example = example.replace("127.0.0.1:7711", target).replace("/lake", str(tmp_path))
            moment = (newest + timedelta(microseconds=1)).isoformat()
            assert "2026-01-01T00:00:00Z" in example or "startingTimestamp" not in example
            exec(example.replace("2026-01-01T00:00:00Z", moment), names)
        assert names["bucket"].count() == 99
        # The stream began behind the hundred, and INSERT INTO came then.
        assert [row.key for row in spark.read.parquet(str(tmp_path / "changes")).collect()] == [
            b"from"
        ]
        assert '{"seqnos": 102, "behind": 0, "partitionsBehind": 0}' in capsys.readouterr().out
        assert client.bucket().get_many([b"a", b"b", b"from"]) == {
            b"a": b"1",
            b"b": b"2",
            b"from": b"SQL",
        }
        assert spark.sql("SELECT value FROM bucket WHERE key = 'a'").collect() == [("1",)]
        client.admin.create_bucket("copy")
        spark.sql(f"""
            CREATE TABLE copy USING upr
            OPTIONS (endpoint '{target}', bucket 'copy', keyEncoding 'utf8', valueEncoding 'utf8')
        """)
        highs = [info.high_seqno for info in client.admin.partitions("default")]
        with pytest.raises(Exception, match="must be left out"):
            spark.sql("INSERT INTO copy SELECT * FROM bucket")
        assert [info.high_seqno for info in client.admin.partitions("default")] == highs
        spark.sql("INSERT INTO copy (key, value, op) SELECT key, value, op FROM bucket")
        assert client.bucket("copy").get_many([b"a", b"0"]) == {b"a": b"1"}
        client.admin.drop_bucket("copy")
    spark.sql("DROP TABLE bucket")
    spark.sql("DROP TABLE copy")


@pytest.mark.long
def test_the_commands_of_the_backup_print_what_the_guide_shows(tmp_path: Path) -> None:
    walk, crontab = BY_CRON
    shell = Shell(tmp_path)
    try:
        for number in (1, 2):
            shell.run(f"upr-server --data /srv/upr/{number} --listen 127.0.0.1:771{number}")
        shell.run("upr-cat set user:1 Ada --target 127.0.0.1:7711")
        compared = 0
        for command, shown in commands(walk):
            # What was backed up just now is not so old.
            told = shell.run(command.replace("2h ago", "0s ago"))
            assert shell.is_as(told, shown), (command, told)
            compared += bool(shown)
        assert compared == 5
        told = shell.run("upr-cat get user:1 --target 127.0.0.1:7712")
        assert told == "Ada\n"
        lines = crontab.splitlines()
        assert len(lines) == 3
        for line in lines:
            *times, command = line.split(maxsplit=5)
            assert all(re.fullmatch(r"\*(/\d+)?|\d+", time) for time in times), line
            assert command.startswith("upr-backup /backups/default ")
            shell.run(command)
        told = shell.run("upr-backup /backups/default list --json")
        assert len(json.loads(told)) == 2
    finally:
        shell.close()
