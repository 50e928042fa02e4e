"""The data source ``upr``: what Spark reads of a bucket, whole or as a stream."""
