"""``upr-admin status``, ``top`` and ``storage``: what a server process uses and does, and what a bucket takes on disk."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import click

from upr.cli.admin_commands.topology import part_words
from upr_cli_kit.options import client_option, client_options
from upr_cli_kit.output import columns, print_result, size_text, verbose_option
from upr_cli_kit.screen import has_screen, interval, watch, watched_output_options
from upr_protocol.errors import UprError

if TYPE_CHECKING:
    from upr_client import Client
    from upr_client.admin import BucketInfo, BucketStatus, ConsumerInfo, ServerStatus


_STATUS_COLUMNS = (
    "bucket",
    "tail",
    "limit",
    "volatile",
    "streams",
    "from_store",
    "cuts",
    "damaged",
    "problem",
)


_UPSTREAM_COLUMNS = ("bucket", "upstream", "state", "lag", "lag_seconds", "undone", "problem")
_REPLICA_COLUMNS = ("bucket", "replica", "directory", "registered", "lag")


@click.command("status")
@client_option
@watched_output_options
def status(client: "Client", as_json: bool) -> None:
    """Show memory, open calls, and for each bucket its tail, streams, cuts and damage."""
    found = client.admin.status()
    document = asdict(found)
    document["server_id"] = f"{found.server_id:016x}"
    for bucket in document["buckets"]:
        bucket["version"] = f"{bucket['version']:016x}"
    lines = [f"server            {found.server_version}, {found.server_id:016x}"]
    # Servers of before do not tell them.
    if found.wire:
        lines.append(
            f"formats           wire {found.wire}, disk {found.disk_format}, journal {found.journal_format}"
        )
    lines += [
        f"uptime            {_duration(found.uptime_seconds)}",
        f"anonymous memory  {size_text(found.anonymous_bytes)}",
        f"mapped memory     {size_text(found.mapped_bytes)}",
        f"follow calls      {found.follow_calls}",
        f"write calls       {found.write_calls}",
    ]
    if (text := found.text_port) is not None:
        lines.append(
            f"text port         {text.address}, {text.connections} open, {text.too_slow} ended as too slow"
        )
    lines.append(f"loop delays       {_delays(found)}")
    if found.part is not None and (found.part.cluster or found.part.counted > 1):
        lines.append(f"set               {part_words(found.part)}")
    lines += [f"clock             {words}" for words in _clock(found)]
    lines += [f"problem           {problem}" for problem in found.problems]
    lines += ["", columns(_STATUS_COLUMNS, map(_row, found.buckets)), *_replication(found)]
    print_result(as_json, document, "\n".join(lines))


def _replication(found: "ServerStatus") -> Iterator[str]:
    """Yield what a server follows, and what follows it."""
    following = [_upstream_row(bucket) for bucket in found.buckets if bucket.upstream is not None]
    if following:
        yield ""
        yield columns(_UPSTREAM_COLUMNS, following)
    replicas = [row for bucket in found.buckets for row in _replica_rows(bucket)]
    if replicas:
        yield ""
        yield columns(_REPLICA_COLUMNS, replicas)


def _delays(found: "ServerStatus") -> str:
    """Return up to how much the event loop was late in half and in 99 % of all samples, and at worst."""
    words, seen, shares = [], 0, [0.5, 0.99]
    total = sum(count for _, count in found.loop_delays)
    for bound, count in found.loop_delays:
        seen += count
        while shares and total and seen >= shares[0] * total:
            limit = "more" if bound is None else f"{bound * 1e3:g} ms"
            words.append(f"{shares.pop(0):.0%} up to {limit}")
    return ", ".join([*words, f"longest {found.longest_loop_delay_seconds * 1e3:.0f} ms"])


def _clock(found: "ServerStatus") -> Iterator[str]:
    """Yield what is wrong with the clock."""
    if found.clock_off_seconds:
        where = "ahead of" if found.clock_off_seconds > 0 else "behind"
        yield f"the day's clock is {_duration(abs(found.clock_off_seconds))} {where} the server's"
    if found.clock_jumped_seconds:
        yield (
            f"the server was away for {_duration(found.clock_jumped_seconds)} or the day's clock was set forward:"
            f" that counts in {_duration(found.clock_left_seconds)}"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{rest:02}"


def _row(bucket: "BucketStatus") -> tuple[object, ...]:
    return (
        bucket.name,
        size_text(bucket.tail_bytes),
        size_text(bucket.tail_limit_bytes),
        size_text(bucket.volatile_bytes),
        bucket.streams,
        bucket.streams_from_store,
        bucket.cuts,
        bucket.damaged_partitions,
        bucket.problem.message if bucket.problem is not None else "-",
    )


def _upstream_row(bucket: "BucketStatus") -> tuple[object, ...]:
    upstream = bucket.upstream
    assert upstream is not None
    state = "in step" if upstream.in_step else "following" if upstream.connected else "away"
    return (
        bucket.name,
        upstream.address or "-",
        state,
        upstream.lag,
        f"{upstream.lag_seconds:.1f}",
        upstream.undone,
        upstream.problem.message if upstream.problem is not None else "-",
    )


def _replica_rows(bucket: "BucketStatus") -> Iterator[tuple[object, ...]]:
    for one in bucket.replicas:
        lag = "-" if one.anonymous else one.lag
        yield bucket.name, one.address, one.directory, "no" if one.anonymous else "yes", lag


@click.command("storage")
@client_options
@watched_output_options
def storage(client: "Client", bucket: str, as_json: bool) -> None:
    """Show space, and what journal, flushes and merges wrote since the server was started."""
    found = client.admin.storage(bucket)
    factor = found.write_amplification
    amplification = "nothing since the start"
    if factor is not None:
        amplification = f"{factor:.2f} bytes for each byte ingested"
    lines = {
        "store file": _of(found.used_bytes, found.file_bytes, " in use"),
        "journal": size_text(found.journal_bytes),
        "tail": size_text(found.tail_bytes),
        "blocks": f"{found.blocks}, {found.rows} rows, {size_text(found.block_bytes)}",
        "not compacted": _of(found.unmerged_bytes, found.block_bytes, ""),
        "compression": found.compression or "none",
        "ingested": size_text(found.ingested_bytes),
        "journalled": size_text(found.journalled_bytes),
        "flushed": size_text(found.flushed_bytes),
        "merged": f"{size_text(found.merge_input_bytes)} to {size_text(found.merge_output_bytes)}, "
        f"{found.merge_input_rows} rows to {found.merge_output_rows}, {found.merge_seconds:.1f} s",
        "write amplification": amplification,
        "purged": f"{found.purged_tombstones} tombstones",
        "to merge": f"{found.partitions_to_merge} partitions",
    }
    document = asdict(found) | {
        "bucket_version": f"{found.bucket_version:016x}",
        "compression": lines["compression"],
        "write_amplification": factor,
    }
    width = max(map(len, lines))
    text = "\n".join(f"{name.ljust(width)}  {words}" for name, words in lines.items())
    print_result(as_json, document, text)


def _of(part: int, whole: int, words: str) -> str:
    share = f", {part / whole:.0%}" if whole else ""
    return f"{size_text(part)} of {size_text(whole)}{words}{share}"


_TOP_BUCKETS = ("bucket", "writes/s", "mutations", "tail", "used", "streams", "problem")
_TOP_CONSUMERS = ("consumer", "lag", "lag/s", "members", "bucket")
_NAME_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Look:
    """What ``top`` asked at one moment.

    Args:
        at: the seconds of a clock that does not jump.
        consumers: by bucket's name, as far as the caller may see them.
        problems: why some could not be seen.
    """

    at: float
    status: "ServerStatus"
    buckets: "Sequence[BucketInfo]"
    consumers: "Mapping[str, Sequence[ConsumerInfo]]"
    problems: Sequence[UprError] = ()


@click.command("top")
@click.option(
    "--every",
    **interval(default="1", show_default=True, help="Ask the server each so many seconds."),
)
@client_option
@verbose_option
def top(client: "Client", every: float) -> None:
    """Show what the server does now: writes, consumers and their lag, replicas; until q or Ctrl-C."""
    if not has_screen():
        raise click.UsageError(
            "stdout is no terminal that top could draw on; 'upr-admin status --watch 1' prints anywhere"
        )
    before: Look | None = None

    def text() -> str:
        nonlocal before
        now = look(client)
        shown = top_text(before, now)
        before = now
        return f"upr-admin top, {datetime.now():%H:%M:%S} (q ends it)\n{shown}"

    watch(every, text)


def look(client: "Client") -> Look:
    """Ask a server what ``top`` shows; an error of one bucket hides no other."""
    status, buckets = client.admin.status(), client.admin.buckets()
    consumers, problems = {}, []
    for one in buckets:
        try:
            consumers[one.name] = client.admin.consumers(one.name)
        except UprError as error:
            # Of a bucket that is damaged, was dropped just now, or is not the caller's to read.
            problems.append(error)
    return Look(time.monotonic(), status, buckets, consumers, problems)


def top_text(before: Look | None, now: Look) -> str:
    """Return what happens on a server, for people; without a look before there are no rates."""
    found = now.status
    lines = [
        f"server {found.server_version}, up {_duration(found.uptime_seconds)}, "
        f"memory {size_text(found.anonymous_bytes)}, mapped {size_text(found.mapped_bytes)}",
        f"{found.follow_calls} follow calls, {found.write_calls} write calls, "
        f"longest loop delay {found.longest_loop_delay_seconds * 1e3:.0f} ms",
        *(f"problem: {problem}" for problem in (*found.problems, *now.problems)),
        *(f"clock: {words}" for words in _clock(found)),
    ]
    rate = _rates(before, now)
    at_work = {one.name: one for one in found.buckets}
    lines += ["", columns(_TOP_BUCKETS, [_top_row(one, at_work, rate) for one in now.buckets])]
    lines += _replication(found)
    consumers = [(one, name) for name, ones in now.consumers.items() for one in ones]
    if consumers:
        # Those that need somebody first.
        consumers.sort(key=lambda pair: -pair[0].lag)
        rows = [
            (
                one.name[:_NAME_WIDTH],
                one.lag,
                rate("lag", (name, one.name), one.lag),
                len(one.members) or ("1" if one.connected else "away"),
                name[:_NAME_WIDTH],
            )
            for one, name in consumers
        ]
        lines += ["", columns(_TOP_CONSUMERS, rows)]
    return "\n".join(lines)


def _rates(before: Look | None, now: Look) -> Callable[[str, object, int], int | str]:
    """Return a function that says by how much a number changed in a second, "-" where that is not known."""
    known: dict[tuple[str, object], int] = {}
    if before is not None:
        known |= {("mutations", one.version): one.mutations for one in before.buckets}
        known |= {
            ("lag", (name, one.name)): one.lag
            for name, ones in before.consumers.items()
            for one in ones
        }
    seconds = 0.0 if before is None else now.at - before.at

    def rate(what: str, of: object, count: int) -> int | str:
        earlier = known.get((what, of))
        return "-" if earlier is None or not seconds else round((count - earlier) / seconds)

    return rate


def _top_row(
    one: "BucketInfo",
    at_work: "dict[str, BucketStatus]",
    rate: Callable[[str, object, int], int | str],
) -> tuple[object, ...]:
    working = at_work.get(one.name)
    problem = one.problem or (working.problem if working is not None else None)
    # None in a damaged bucket, and none left on a full disk.
    limit = 0 if working is None else working.tail_limit_bytes
    return (
        one.name[:_NAME_WIDTH],
        rate("mutations", one.version, one.mutations),
        one.mutations,
        f"{working.tail_bytes / limit:.0%}" if working and limit else "-",
        size_text(one.used_bytes),
        0 if working is None else working.streams,
        "-" if problem is None else problem.message,
    )
