"""``python -m upr_spark.backup`` is the command ``upr-backup``."""

from upr_spark.backup.entry import main

main()
