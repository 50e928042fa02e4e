"""upr-backup on the small S3 server."""

from pathlib import Path

from click.testing import Result

from tests.spark import restoring
from tests.spark.s3 import ACCESS_KEY, BUCKET, SECRET, S3Server

PREFIX = "some/prefix"
LOCATION = f"s3://{BUCKET}/{PREFIX}"


def upr_backup(*arguments: str, location: str = LOCATION) -> Result:
    """Run the command in this process; it says nothing secret, and nothing before an error."""
    done = restoring.upr_backup(location, *arguments)
    assert SECRET not in done.output
    assert ACCESS_KEY not in done.output
    if done.exit_code not in (0, 10):
        assert done.stderr.count("\n") == 1, done.stderr
    return done


def put_folder(server: S3Server, folder: Path) -> None:
    """Put the documents of a local repository at LOCATION, as they are."""
    for path in folder.rglob("*.json"):
        name = f"{PREFIX}/{path.relative_to(folder)}"
        server.objects[name], server.written[name] = (path.read_bytes(), {}), 1e9
