"""Overload: bounds on the memory, descriptors and event loop time that peers take."""
