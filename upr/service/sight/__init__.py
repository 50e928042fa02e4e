"""What operators see of a running server over HTTP: its counts, its metrics, and whether it is ready."""
