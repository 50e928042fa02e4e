"""The sync flavour, generated from ``_async`` by tools/unasync.py, but for ``adapter.py``."""
