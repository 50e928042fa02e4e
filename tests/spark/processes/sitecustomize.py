"""What the Python processes of the session's JVM do first; Python imports this module by itself from ``PYTHONPATH``.

They take pyspark from where it is installed: Spark puts its archive of it in front, of which each process compiles every
module again. And the daemons of the workers in which Spark plans, which cannot be told to be ``tests.spark.workers``,
import what that does.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("/pyspark.zip")]
if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    import tests.spark.workers  # noqa: F401
