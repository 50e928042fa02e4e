"""Engines of a backup: a pool of local processes, or Spark."""
