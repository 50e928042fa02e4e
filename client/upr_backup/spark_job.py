"""A backup as a Spark job: ``spark-submit --py-files UPR.zip spark_job.py REPOSITORY [OPTIONS OF upr-backup backup]``.

Master, memory and everything else of Spark is what spark-submit was told. The driver is this process, so the deploy
mode is a client's, or a cluster's where the image has the packages.
"""

import sys


def main() -> None:
    """Run ``upr-backup REPOSITORY backup --engine spark``."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: spark_job.py REPOSITORY [OPTIONS OF upr-backup backup]", file=sys.stderr)
        sys.exit(2)
    sys.argv[2:2] = ["backup", "--engine", "spark"]
    from upr_backup.cli.entry import main as run

    run()


if __name__ == "__main__":
    main()
