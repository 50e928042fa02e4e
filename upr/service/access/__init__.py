"""Access: who calls, and what a caller may do."""
