"""upr-stream: a partitioned change-stream server."""

__version__ = "0.1.0"
