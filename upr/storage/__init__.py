"""Bytes on disk: the data directory, the journal, the LMDB store, and compaction of blocks."""
