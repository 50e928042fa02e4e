"""Sight of a running server for operators: its counts, its metrics, and whether it is ready, over HTTP."""
