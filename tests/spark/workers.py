"""The daemon of Spark's Python workers in tests: it has imported what each of them needs, and they are forks of it.

Spark starts one for each kind of worker, and a worker for each plan, task and batch; without this every one of them
imports Arrow, gRPC and the source anew, which takes it longer than what it does. ``test_cluster.py`` has the daemon
that Spark brings.
"""

import grpc.aio  # noqa: F401 (as all below)
import pyarrow  # noqa: F401
import pyspark.sql  # noqa: F401
from pyspark import daemon

import upr_spark.source.data_source  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
