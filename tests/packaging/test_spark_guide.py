"""The guide of upr_spark has every option as the code has it."""

from pathlib import Path

import pytest

from upr_spark.options import CONNECTION_OPTIONS, Option
from upr_spark.sink.options import WRITE_OPTIONS
from upr_spark.source.options import READING_OPTIONS

GUIDE = Path(__file__).parents[2] / "client" / "upr_spark" / "README.md"


@pytest.mark.parametrize(
    "table", [CONNECTION_OPTIONS, READING_OPTIONS, WRITE_OPTIONS], ids=["all", "read", "write"]
)
def test_the_guide_has_the_tables_of_options(table: tuple[Option, ...]) -> None:
    lines = ["| option | default | |", "|---|---|---|"]
    for option in table:
        default = f"`{option.default}`" if option.default else ""
        lines.append(f"| `{option.name}` | {default} | {option.words} |")
    assert "\n".join(lines) in GUIDE.read_text()
