"""Found by Spark by its name: ``spark.read.format("upr")`` works wherever upr-stream is installed.

Spark imports this for every user of any data source, so it imports nothing but pyspark's own base class.
"""

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """Becomes the real data source when it is made."""

    def __new__(cls, options: Any) -> Any:
        """Return a ``upr_spark.source.data_source.UprDataSource``."""
        from upr_spark.source.data_source import UprDataSource

        return UprDataSource(options)

    @classmethod
    def name(cls) -> str:
        return "upr"
