"""Overload: what keeps peers from taking more than their share of memory, descriptors and the event loop."""
