"""``upr-admin storage``: what a bucket takes on disk, and what was written for it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from upr.cli.options import server_options
from upr.cli.output import json_option, print_json, size_text, verbose_option

if TYPE_CHECKING:
    from upr_client import StorageInfo


@click.command("storage")
@server_options
@json_option
@verbose_option
def storage(target: str, bucket: str, as_json: bool) -> None:
    """Show space, and what journal, flushes and merges wrote since the server was started."""
    from upr_client import Client

    with Client(target) as client:
        found = client.bucket(bucket).storage()
    if as_json:
        print_json(_document(found))
        return
    lines = {
        "store file": _of(found.used_bytes, found.file_bytes, " in use"),
        "journal": size_text(found.journal_bytes),
        "tail": size_text(found.tail_bytes),
        "blocks": f"{found.blocks}, {found.rows} rows, {size_text(found.block_bytes)}",
        "superseded": "at most " + _of(found.unmerged_bytes, found.block_bytes, ""),
        "compression": found.compression or "none",
        "ingested": size_text(found.ingested_bytes),
        "journalled": size_text(found.journalled_bytes),
        "flushed": size_text(found.flushed_bytes),
        "merged": f"{size_text(found.merge_input_bytes)} to {size_text(found.merge_output_bytes)}, "
        f"{found.merge_input_rows} rows to {found.merge_output_rows}, {found.merge_seconds:.1f} s",
        "write amplification": _amplification(found),
        "purged": f"{found.purged_tombstones} tombstones",
        "to merge": f"{found.partitions_to_merge} partitions",
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        click.echo(f"{name.ljust(width)}  {text}")


def _of(part: int, whole: int, words: str) -> str:
    share = f", {part / whole:.0%}" if whole else ""
    return f"{size_text(part)} of {size_text(whole)}{words}{share}"


def _amplification(found: "StorageInfo") -> str:
    factor = found.write_amplification
    if factor is None:
        return "nothing since the start"
    return f"{factor:.2f} bytes for each byte ingested"


def _document(found: "StorageInfo") -> dict[str, Any]:
    document = asdict(found)
    document["bucket_version"] = f"{found.bucket_version:016x}"
    document["write_amplification"] = found.write_amplification
    return document
