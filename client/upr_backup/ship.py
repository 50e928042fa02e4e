"""The project's own code as one file for ``spark-submit --py-files``.

``python -m upr_backup.ship OUT.zip`` writes it from what is installed here.
"""

import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

PACKAGES: Final = ("upr_protocol", "upr_client", "upr_spark", "upr_cli_kit", "upr_backup")
MODULES: Final = ("pyspark_upr",)
NEEDED: Final = ("grpcio", "protobuf", "numpy", "google-crc32c", "pyarrow", "obstore")
"""Packages that executors must have installed."""

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def write_zip(out: Path) -> int:
    """Write the zip, and return how many files are in it; the same code gives the same bytes."""
    root = Path(__file__).parents[1]
    assert all((root / name).is_dir() for name in PACKAGES), "the packages are not side by side"
    found = [path for name in PACKAGES for path in (root / name).rglob("*.py")]
    found += [path for name in MODULES if (path := root / f"{name}.py").exists()]
    files = sorted((path.relative_to(root).as_posix(), path) for path in found)
    folders = {parent for name, _ in files for parent in PurePosixPath(name).parents}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        # A package without __init__.py is found in a zip only where its folder has an entry.
        for folder in sorted(folders - {PurePosixPath(".")}):
            archive.writestr(zipfile.ZipInfo(f"{folder}/", _EPOCH), b"")
        for name, path in files:
            about = zipfile.ZipInfo(name, _EPOCH)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = 0o644 << 16
            archive.writestr(about, path.read_bytes())
    return len(files)


def main() -> int:
    """Write the zip that the command line names; returns the exit status."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m upr_backup.ship OUT.zip", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    try:
        count = write_zip(out)
    except OSError as error:
        print(f"error: {out}: {error.strerror or error}", file=sys.stderr)
        return 2
    job = Path(__file__).with_name("spark_job.py")
    print(f"{count} files; executors also need {', '.join(NEEDED)}", file=sys.stderr)
    print(f"spark-submit --py-files {out} {job} REPOSITORY", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
