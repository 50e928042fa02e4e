"""The sync flavour, generated from ``_async`` by tools/unasync.py, but for ``io.py``."""
