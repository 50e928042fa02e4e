"""Measure what reading a bucket through Spark costs, beside the same rows from Parquet, in one run.

Both go to Spark's noop sink in local[2]. CPU is taken from /proc: of the server, of the JVM, and of the Python
processes that the JVM started; wall times move with whatever else the machine does. The table, or with ``--json`` one
document, goes to stdout; progress goes to stderr.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.bench.backup import fill
from tools.bench.common import Figure, print_figures, process_cpu, say, server, tree_cpu
from upr_spark import configure, register
from upr_spark.source.data_source import UprDataSource

TARGET_MICROSECONDS: Final = 1.5


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds of CPU: of the JVM, its Python processes, and the server."""

    jvm: float
    python: float
    server: float

    def since(self, before: "Used") -> "Used":
        return Used(self.jvm - before.jvm, self.python - before.python, self.server - before.server)


def used(jvm: int, server_pid: int) -> Used:
    """Return what a JVM, everything below it, and a server have used so far."""
    own = process_cpu(jvm)
    return Used(own, tree_cpu(jvm) - own, process_cpu(server_pid))


def session(folder: Path) -> Any:
    """Return a session with two cores, on loopback."""
    from pyspark.sql import SparkSession

    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = configure(SparkSession.builder.master("local[2]").appName("upr-stream bench"))
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.log.level": "ERROR",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def drop(frame: Any) -> None:
    """Read a frame whole and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def measured(way: Callable[[], None], look: Callable[[], Used], times: int) -> tuple[float, Used]:
    """Return the median of the wall times, and of each kind of CPU."""
    walls, costs = [], []
    for _ in range(times):
        before, began = look(), time.perf_counter()
        way()
        walls.append(time.perf_counter() - began)
        costs.append(look().since(before))
    middle = Used(
        statistics.median(cost.jvm for cost in costs),
        statistics.median(cost.python for cost in costs),
        statistics.median(cost.server for cost in costs),
    )
    return statistics.median(walls), middle


def without_spark(options: dict[str, str]) -> float:
    """Read everything in this process, and return the seconds of CPU."""
    source = UprDataSource(options)
    reader = source.reader(source.schema())
    began = time.process_time()
    for task in reader.partitions():
        for _ in reader.read(task):
            pass
    return time.process_time() - began


def _figure(name: str, seconds: float, rows: int, note: str, target: float | None = None) -> Figure:
    return Figure(name, seconds / rows * 1e6, "us/row", target, note=note)


def measure(rows: int, times: int) -> Iterator[Figure]:
    """Yield microseconds of CPU a row."""
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as name, server() as running:
        folder = Path(name)
        say(f"writing {rows} rows")
        fill(running.target, rows)
        # So that everything is read from where it stays: the store.
        running.terminate()
        running.start()
        say("starting Spark")
        spark = session(folder)
        register(spark)
        jvm = spark.sparkContext._gateway.proc.pid
        options = {"endpoint": running.target}
        frame = spark.read.format("upr").options(**options).load()
        say("writing Parquet")
        frame.write.parquet(str(folder / "parquet"))
        parquet = spark.read.parquet(str(folder / "parquet"))
        assert frame.count() == parquet.count() == rows
        two = spark.read.format("upr").options(**options).schema("key binary, value binary").load()
        ways = {"upr": frame, "upr, columns key and value": two, "Parquet": parquet}
        for title, one in ways.items():
            say(title)
            drop(one)
            wall, cost = measured(partial(drop, one), partial(used, jvm, running.pid), times)
            client = cost.jvm + cost.python
            target = TARGET_MICROSECONDS if title == "upr" else None
            note = f"{rows / wall / 1000:,.0f} krows/s"
            yield _figure(f"{title}: JVM and Python", client, rows, note, target)
            yield _figure(f"{title}: JVM", cost.jvm, rows, "")
            yield _figure(f"{title}: Python", cost.python, rows, "")
            if title != "Parquet":
                yield _figure(f"{title}: server", cost.server, rows, "")
        spark.stop()
        yield _figure("the tasks alone, without Spark", without_spark(options), rows, "")


def main() -> int:
    """Measure, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument(
        "--times", type=int, default=3, help="how often each is read; the median counts"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print_figures(measure(options.rows, options.times), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
