"""Sink: the rows of Spark become writes that a repeated task does not apply twice; ``upr_spark/README.md`` has the promise."""
