"""Incremental backups of a bucket: the command ``upr-backup``."""
