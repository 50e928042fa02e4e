"""``python -m upr_backup`` is the command ``upr-backup``."""

from upr_backup.cli.entry import main

main()
