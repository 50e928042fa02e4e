"""What the guide of upr_spark shows, as it is printed there."""

import re
from pathlib import Path
from typing import Any

import pytest

from upr_client import Client

GUIDE = Path(__file__).parents[2] / "client" / "upr_spark" / "README.md"


@pytest.mark.long
def test_the_examples_run(spark: Any, target: str, tmp_path: Path) -> None:
    with Client(target) as client:
        client.bucket().write_many([(b"%d" % n, b"v") for n in range(100)] + [(b"0", None)])
        examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        assert len(examples) == 3
        names: dict[str, Any] = {
            "frame": spark.createDataFrame([("a", "1"), ("b", "2")], ["key", "value"])
        }
        for example in examples:
            example = example.replace("127.0.0.1:7711", target)
            exec(example.replace("/lake", str(tmp_path)), names)
        assert names["bucket"].count() == 99
        assert spark.read.parquet(str(tmp_path / "changes")).select("key").distinct().count() == 100
        assert client.bucket().get_many([b"a", b"b"]) == {b"a": b"1", b"b": b"2"}
