"""Following changes, decided without I/O: the same in both flavours."""
