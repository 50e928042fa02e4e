"""What the guide of upr_spark shows, as it is printed there; its jobs with Delta tables have a test with rollbacks."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from upr_client import Client
from upr_client.arrow import record_batch

GUIDE = Path(__file__).parents[2] / "client" / "upr_spark" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


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
