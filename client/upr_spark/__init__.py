"""Spark's data source and sink ``upr``; they need the extra ``upr-stream[spark]``."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["configure", "register"]


def register(spark: "SparkSession") -> None:
    """Make the format ``upr`` known to a session; where upr-stream is installed Spark also finds it by itself."""
    session = getattr(spark, "_jsparkSession", None)
    if session is not None and session.sessionState().dataSourceManager().dataSourceExists("upr"):
        # Spark warns of a source that takes the place of another one.
        return
    from upr_spark.source.data_source import UprDataSource

    spark.dataSource.register(UprDataSource)


def configure(builder: Any) -> Any:
    """Return a ``SparkSession.builder`` with what the data source needs of a session.

    Workers run this Python unless ``PYSPARK_PYTHON`` names another, and conditions may be pushed down (with the option
    filterPushdown).
    """
    # Spark's own default is the python3 of the PATH, which need not have this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return builder.config("spark.sql.python.filterPushdown.enabled", "true")
