"""upr-stream: a partitioned change-stream server."""

__version__ = "0.2.0.dev2"
