"""Checks of a closed data directory; nothing is changed."""
