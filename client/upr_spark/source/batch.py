"""What a batch read shows: from where to where, decided once for a DataFrame as far as Spark allows it."""

from collections.abc import Mapping

from upr_protocol.errors import CutNotFoundError
from upr_protocol.failover import format_failover_id
from upr_spark.errors import UprSparkError, bad_option
from upr_spark.source.offsets import Offset, parse_offset
from upr_spark.source.options import Settings
from upr_spark.source.planner import Asked, check_followed, random_token, starting_offset
from upr_spark.source.planning import CutPoint, PinPoint, Range, next_offset, plan_ranges
from upr_spark.source.server import bucket_mismatch

_ATTEMPTS = 5


def pin_now(server: Asked, settings: Settings) -> CutPoint:
    """Pin the partitions as they are now, under a new name."""
    name = f"{settings.cut_name}-{random_token()}"
    return server.make_cut(name, settings.partitions, settings.lease)


def plan_batch(
    server: Asked, settings: Settings, cut_name: str | None
) -> tuple[list[Range], str | None]:
    """Return what a batch read reads, and the name of the cut at which it ends.

    Args:
        cut_name: the cut that was made when the DataFrame was; None makes one now, where one is needed.

    Raises:
        UprSparkError: UPR_SNAPSHOT_GONE, what was pinned is not any more; UPR_BAD_OPTION, startingOffsets or
            endingOffsets do not fit the bucket; UPR_ROLLBACK_REQUIRED or UPR_DATA_LOSS, as the rules say.
    """
    start = starting_offset(server, settings, None)
    _check_bucket(server, start)
    for _ in range(_ATTEMPTS):
        cut = _end(server, settings, cut_name)
        answers = server.ask(start.ids, whole=True)
        if all(cut.pins[p].failover_id == answers[p].newest_id for p in settings.partitions):
            break
        if cut_name is not None:
            raise _gone(f"the server's history changed since the cut {cut_name!r} was made")
        if cut.name:
            server.release(cut.name)
    else:
        raise _gone("the server's history changes while the read is planned")
    if settings.ending != "latest":
        _check_order(start, cut)
    try:
        end = next_offset(start, answers, cut, settings.rules)
    except UprSparkError:
        if cut_name is None and cut.name:
            server.release(cut.name)
        raise
    return ([] if end is None else plan_ranges(start, end)), cut.name or None


def _end(server: Asked, settings: Settings, cut_name: str | None) -> CutPoint:
    if isinstance(settings.ending, dict):
        return _explicit_end(server, settings, settings.ending)
    if cut_name is None:
        return pin_now(server, settings)
    cut = server.find_cut(cut_name, settings.lease)
    if cut is None:
        raise _gone(f"the lease of the cut {cut_name!r} has ended")
    return cut


def _explicit_end(server: Asked, settings: Settings, ending: Mapping[str, object]) -> CutPoint:
    """Return the end that the option names, under the newest ids."""
    ids: dict[int, int | None] = dict.fromkeys(settings.partitions)
    if "v" in ending:
        offset = parse_offset(ending)
        check_followed(offset, settings, "endingOffsets")
        _check_bucket(server, offset)
        ids = offset.ids
        seqnos = {p: entry.seqno for p, entry in offset.entries.items()}
    else:
        seqnos = {int(p): int(str(seqno)) for p, seqno in ending.items()}
    answers = server.ask(ids, whole=False)
    for partition, answer in answers.items():
        seqno = seqnos[partition]
        if answer.rollback is not None and answer.rollback < seqno:
            raise _gone(f"partition {partition}: seqno {seqno} was undone: {answer.words}")
        if answer.high < seqno:
            raise bad_option(
                "endingOffsets",
                None,
                f"partition {partition} is to end at {seqno}, its high seqno is {answer.high}",
                f"the newest failover id is {format_failover_id(answer.newest_id)}",
            )
    return CutPoint("", {p: PinPoint(answers[p].newest_id, seqnos[p]) for p in seqnos})


def _check_order(start: Offset, cut: CutPoint) -> None:
    for partition, entry in start.entries.items():
        if entry.seqno > cut.pins[partition].seqno:
            raise bad_option(
                "endingOffsets",
                None,
                f"partition {partition} ends at {cut.pins[partition].seqno}, and begins at {entry.seqno}",
            )


def _check_bucket(server: Asked, offset: Offset) -> None:
    if not server.bucket_version:
        server.ask({next(iter(offset.entries)): None}, whole=False)
    if server.bucket_version != offset.bucket_version:
        raise bucket_mismatch(
            f"the offset is of a bucket of version {offset.bucket_version:016x}, the server's has "
            f"{server.bucket_version:016x}"
        )


def _gone(words: str) -> UprSparkError:
    return UprSparkError(
        "SNAPSHOT_GONE",
        words,
        hint="load() again, which pins what is there then; leaseTtl says how long a cut holds without being read",
        details={"reason": CutNotFoundError.default_reason},
    )
