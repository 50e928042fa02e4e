"""What makes upr-stream useful to Spark and to backups; ``upr_spark.backup`` needs the extra ``upr-stream[backup]``."""
