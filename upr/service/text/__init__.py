"""The text port: changes as lines over TCP."""
