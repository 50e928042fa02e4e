"""``upr-admin check``: verify a closed data directory whole."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from upr_cli_kit import exit_codes
from upr_cli_kit.options import NamedPath, partitions_option
from upr_cli_kit.output import Progress, note, output_options, print_result
from upr_protocol.limits import PARTITIONS

if TYPE_CHECKING:
    from upr.storage.check.contents import Finding
    from upr.storage.check.directory import BucketReport


def _text(report: "BucketReport", finding: "Finding") -> str:
    """Return one line: where, and what."""
    where = [f"bucket {report.name or report.version}"]
    if finding.partition is not None:
        where.append(f"partition {finding.partition}")
    if finding.above is not None and finding.end is not None:
        where.append(f"seqnos {finding.above + 1} to {finding.end}")
    if finding.file:
        byte = "" if finding.offset is None else f" byte {finding.offset}"
        where.append(f"{report.version}/{finding.file}{byte}")
    return f"{finding.severity}: {', '.join(where)}: {finding.what}"


def damaged_partitions(report: "BucketReport") -> list[int]:
    """Return the partitions that damage was found in, ascending."""
    found = {f.partition for f in report.findings if f.severity == "damage"}
    return sorted(partition for partition in found if partition is not None)


def _ranges(ranges: Iterable[list[int]]) -> str:
    return ", ".join(f"{above + 1} to {end}" for above, end in ranges) or "nothing"


def to_text(reports: "Iterable[BucketReport]") -> str:
    """Return the findings, what can still be read, and a summary for each bucket, as lines."""
    lines = []
    for report in reports:
        name = report.name or report.version
        lines += [_text(report, finding) for finding in report.findings]
        damaged = damaged_partitions(report)
        lines += [
            f"readable: bucket {name}, partition {p}: seqnos {_ranges(report.readable.get(p, []))}"
            for p in damaged
        ]
        if report.unusable:
            lines.append(f"bucket {name}: not checked: {report.unusable}")
        elif report.damaged:
            count = sum(finding.severity == "damage" for finding in report.findings)
            lines.append(f"bucket {name}: damaged: {count} findings in {len(damaged)} partitions")
        else:
            high = sum(ranges[-1][1] for ranges in report.readable.values())
            lines.append(f"bucket {name}: fine: {high} seqnos in {len(report.readable)} partitions")
    return "\n".join(lines)


def to_json(reports: "Iterable[BucketReport]") -> dict[str, Any]:
    """Return what was found as a JSON document; seqno ranges are ``[above, end]``, above exclusive."""
    buckets = [
        {
            "bucket": report.name or None,
            "bucket_version": report.version,
            "damaged": report.damaged,
            "unusable": report.unusable or None,
            "findings": [finding.to_json() for finding in report.findings],
            "readable": {str(p): report.readable.get(p, []) for p in damaged_partitions(report)},
        }
        for report in reports
    ]
    return {"damaged": any(bucket["damaged"] for bucket in buckets), "buckets": buckets}


def exit_code(reports: "Sequence[BucketReport]") -> int:
    """Return 0 when all is fine, 1 for damage, 2 when something cannot be judged."""
    if any(report.unusable for report in reports):
        return exit_codes.USAGE
    return exit_codes.BAD_ANSWER if any(report.damaged for report in reports) else exit_codes.OK


@click.command("check")
@click.argument("directory", type=NamedPath(), metavar="DIR")
@partitions_option
@output_options
def check(directory: Path, partitions: list[int] | None, as_json: bool) -> int:
    """Verify the data directory DIR, which no server may be using. Changes nothing.

    Exit status: 0 all is fine, 1 damage was found, 2 DIR cannot be judged, or its part in a set cannot be read.
    """
    from upr.storage.check.directory import check_directory
    from upr.storage.directory import bucket_folders, not_buckets, read_standing

    total = PARTITIONS if partitions is None else len(partitions)
    total *= len(bucket_folders(directory))
    with closing(Progress("partitions", total)) as progress:
        reports = check_directory(directory, partitions, progress.update)
    print_result(as_json, to_json(reports), to_text(reports) or "there are no buckets")
    for name in not_buckets(directory):
        note(
            f"buckets/{name} is not the folder of a bucket: it is not checked, and no server serves it"
        )
    if any(report.damaged for report in reports):
        note("there is no repair: take the data from a replica or a backup")
    # Behind the rest, which can be checked without it; no server starts with a broken one.
    read_standing(directory, "", replica=False)
    return exit_code(reports)
