"""The options of reading, in one table, and the settings they give."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from upr_protocol.failover import check_partition, check_seqno
from upr_protocol.limits import (
    BACKUP_CUTS_NAME,
    CUT_LEASE_SECONDS,
    CUT_LEASE_SECONDS_MAX,
    KEY_BYTES_MAX,
    PARTITIONS,
    parse_partitions,
)
from upr_spark.errors import bad_option
from upr_spark.options import (
    CONNECTION_OPTIONS,
    Connection,
    Option,
    check_known,
    duration,
    flag,
    one_of,
    read_connection,
    read_options,
    size,
    text,
    whole,
)

_ROWS_MAX: Final = 1 << 20
_NAME_CHARACTERS_MAX: Final = 100
_DIGITS_MAX: Final = 9
_LOAD_LEASE_SECONDS: Final = 300.0
_MILLISECONDS_MAX: Final = 2**43 * 1000 - 1
LATEST: Final = -1
"""Seqno of options that stands for what is there now."""
_EARLIEST: Final = -2
"""Seqno of options that stands for the beginning."""


def _offsets(words: tuple[str, ...], *signs: int) -> Callable[[str], str | dict[str, Any]]:
    def parse(value: str) -> str | dict[str, Any]:
        stripped = value.strip()
        if stripped.lower() in words:
            return stripped.lower()
        document = _document(
            stripped, f"{', '.join(words)}, an offset, or seqnos as " + '{"5": 434}'
        )
        return document if "v" in document else _by_partition(document, seqno)

    def seqno(value: Any) -> int:
        if isinstance(value, bool):
            raise ValueError(f"{json.dumps(value)} is not a seqno")
        return value if value in signs else check_seqno(value)

    return parse


def _document(value: str, expected: str) -> dict[str, Any]:
    """Return the JSON object that a text is, with something in it."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not document:
        raise ValueError(f"must be {expected}")
    return document


def _by_partition(document: Mapping[str, Any], take: Callable[[Any], int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for partition, value in document.items():
        if not (partition.isascii() and partition.isdigit()) or len(partition) > _DIGITS_MAX:
            raise ValueError(f"{partition[:60]!r} is not a partition")
        number = check_partition(int(partition))
        if str(number) in values:
            raise ValueError(f"partition {number} is there twice")
        values[str(number)] = take(value)
    return values


def _time(value: str) -> int:
    """Return a time in microseconds since the epoch."""
    words = value.strip()
    if words.isascii() and words.isdigit():
        return _milliseconds(int(words[:20]))
    try:
        moment = datetime.fromisoformat(words)
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None:
        raise ValueError(
            "must be milliseconds since the epoch, or a time with its zone as 2026-05-01T12:00:00Z"
        )
    return _milliseconds(moment.timestamp() * 1000)


def _milliseconds(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{json.dumps(value)[:60]} is not a time in milliseconds since the epoch")
    if not 0 <= value <= _MILLISECONDS_MAX:
        raise ValueError(f"{value} is a time; must be 0 to {_MILLISECONDS_MAX} milliseconds")
    return round(value * 1000)


def _times(value: str) -> dict[str, Any]:
    expected = 'milliseconds since the epoch as {"5": 1777636800000}'
    return _by_partition(_document(value, expected), _milliseconds)


def _name(value: str) -> str:
    stripped = text(value)
    if len(stripped.encode()) > _NAME_CHARACTERS_MAX or not stripped.isprintable():
        raise ValueError(f"must be 1 to {_NAME_CHARACTERS_MAX} bytes without control characters")
    if f"{stripped}-".startswith(BACKUP_CUTS_NAME):
        raise ValueError(f"must not be {BACKUP_CUTS_NAME[:-1]}, whose cuts are kept for backups")
    return stripped


def _prefix(value: str) -> bytes:
    if len(value.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"must have {KEY_BYTES_MAX} bytes of UTF-8 at most")
    return value.encode()


READING_OPTIONS: Final = (
    Option("partitions", f"0-{PARTITIONS - 1}", "which to read, as 0-127,512", parse_partitions),
    Option(
        "startingOffsets",
        "earliest",
        'where a query without a checkpoint begins: earliest; latest (streams only); an offset; or seqnos as {"5": 434}, '
        "where -2 is earliest and -1 latest, and a partition that is not named begins at its earliest",
        _offsets(("earliest", "latest"), _EARLIEST, LATEST),
    ),
    Option(
        "startingTimestamp",
        None,
        "instead of startingOffsets: the first mutation committed at or after a time, in milliseconds since the epoch "
        "or as 2026-05-01T12:00:00Z; where there is none, what comes from now on",
        _time,
    ),
    Option(
        "startingOffsetsByTimestamp",
        None,
        'the same by partition, as {"5": 1777636800000}; a partition that is not named begins at its earliest',
        _times,
    ),
    Option(
        "endingOffsets",
        "latest",
        'where a batch read ends: latest, pinned once for each load(); an offset; or seqnos as {"5": 434}, where -1 is '
        "latest, as for a partition that is not named",
        _offsets(("latest",), LATEST),
    ),
    Option("numPartitions", "8", "how many tasks read side by side at most", whole(1, PARTITIONS)),
    Option(
        "minPartitions",
        None,
        "how many at least, where as many partitions have something to read; more than numPartitions then",
        whole(1, PARTITIONS),
    ),
    Option(
        "maxOffsetsPerTrigger",
        None,
        "streams only: about how many seqnos a batch advances by; partitions advance whole, and at least one does",
        whole(1, 10**15),
    ),
    Option(
        "onRollback",
        "fail",
        "when the server undid what was read: fail raises; emit goes back to an earlier end of a batch and tells it "
        "with a row of op=rollback; reset begins the partition again",
        one_of("fail", "emit", "reset"),
    ),
    Option(
        "failOnDataLoss",
        "true",
        "whether a partition that cannot be continued raises; else it is read again from the beginning",
        flag,
    ),
    Option(
        "markerHistory",
        "8",
        "streams only: how many earlier ends of batches are kept for each partition, to go back to",
        whole(1, 64),
    ),
    Option("leaseName", "upr-spark", "how the names of this query's cuts begin", _name),
    Option(
        "leaseTtl",
        None,
        "how long an end stays pinned after it was last renewed: 1h for the end of a micro-batch, 5m for that of a load()",
        duration(1, CUT_LEASE_SECONDS_MAX),
    ),
    Option("includeValue", "true", "whether values are read; else value is null", flag),
    Option("includeDeletions", "true", "whether rows of op=delete are given", flag),
    Option("keyPrefix", "", "only keys that begin with this text", _prefix),
    Option(
        "keyEncoding", "binary", "type of the column key: binary or utf8", one_of("binary", "utf8")
    ),
    Option(
        "valueEncoding",
        "binary",
        "type of the column value: binary or utf8",
        one_of("binary", "utf8"),
    ),
    Option("batchRows", "8192", "rows of an Arrow batch, about", whole(1, _ROWS_MAX)),
    Option("batchBytes", "4MiB", "bytes of an Arrow batch, about", size(1024, 256 << 20)),
    Option(
        "flowControlBytes",
        "16MiB",
        "how much the server may send ahead to each task",
        size(64 << 10, 256 << 20),
    ),
    Option(
        "minPollInterval",
        "100ms",
        "streams only: how often the server is asked for news at most",
        duration(0.001, 3600),
    ),
    Option(
        "filterPushdown",
        "false",
        "batch only: whether conditions on partition, key and time narrow what is read; needs "
        "spark.sql.python.filterPushdown.enabled=true",
        flag,
    ),
)
OPTIONS: Final = (*CONNECTION_OPTIONS, *READING_OPTIONS)
"""Every option of reading, in the order of the documents."""

_RENAMED: Final = {
    "path": 'a bucket is named by .option("bucket", ...); load() takes no path',
    "checkpoint": "checkpointLocation belongs to the writer of the stream",
}

Mode = Literal["fail", "emit", "reset"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do about a history that changed.

    Args:
        mode: "fail" raises; "emit" goes back to a point and says so in a row; "reset" begins the partition again.
        fail_on_data_loss: whether a partition that cannot be continued at all raises.
        history: how many earlier ends are kept for each partition.
    """

    mode: Mode = "fail"
    fail_on_data_loss: bool = True
    history: int = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options of reading say; can be pickled. Times are seconds.

    Args:
        partitions: to be followed, ascending.
        starting, ending: a word, an offset's document, or the seqno of each partition, LATEST for what is there now.
        tasks: how many input partitions at most.
        max_offsets: of one batch; None for no limit.
        rules: about changed histories.
        cut_name: how names of cuts begin.
        lease: of a micro-batch's end.
        load_lease: of a load's.
        credit_bytes: of one task.
        starting_times: where partitions begin that do not begin at ``starting``, microseconds since the epoch.
    """

    connection: Connection
    partitions: tuple[int, ...]
    starting: str | dict[str, Any]
    ending: str | dict[str, Any]
    tasks: int
    max_offsets: int | None
    rules: Rules
    cut_name: str
    lease: float
    include_values: bool
    include_deletes: bool
    key_prefix: bytes
    key_text: bool
    value_text: bool
    batch_rows: int
    batch_bytes: int
    credit_bytes: int
    poll_seconds: float
    pushdown: bool
    starting_times: Mapping[int, int] = field(default_factory=dict)
    load_lease: float = _LOAD_LEASE_SECONDS

    @property
    def begins_late(self) -> bool:
        """Whether a partition begins at what is there now."""
        return _is_late(self.starting)

    @property
    def ends_late(self) -> bool:
        """Whether a partition ends at what is there now."""
        return _is_late(self.ending)


def _is_late(offsets: str | Mapping[str, Any]) -> bool:
    return offsets == "latest" or (not isinstance(offsets, str) and LATEST in offsets.values())


def read_settings(options: Mapping[str, str]) -> Settings:
    """Return what options say. Nothing is connected.

    Args:
        options: as Spark gives them; names in any case.

    Raises:
        UprSparkError: UPR_BAD_OPTION, one is not known, missing, cannot be read or is out of its range.
    """
    check_known(options, OPTIONS, _RENAMED)
    values = read_options(READING_OPTIONS, options)
    for name, rest in (("startingOffsets", 0), ("endingOffsets", LATEST)):
        if isinstance(values[name], dict) and "v" not in values[name]:
            _check_named(name, values[name], values["partitions"])
            named = {p: 0 if seqno == _EARLIEST else seqno for p, seqno in values[name].items()}
            values[name] = dict.fromkeys(map(str, values["partitions"]), rest) | named
    rules = Rules(values["onRollback"], values["failOnDataLoss"], values["markerHistory"])
    return Settings(
        read_connection(options),
        tuple(values["partitions"]),
        values["startingOffsets"],
        values["endingOffsets"],
        max(values["minPartitions"] or 1, values["numPartitions"]),
        values["maxOffsetsPerTrigger"],
        rules,
        values["leaseName"],
        values["leaseTtl"] or CUT_LEASE_SECONDS,
        values["includeValue"],
        values["includeDeletions"],
        values["keyPrefix"],
        values["keyEncoding"] == "utf8",
        values["valueEncoding"] == "utf8",
        values["batchRows"],
        values["batchBytes"],
        values["flowControlBytes"],
        values["minPollInterval"],
        values["filterPushdown"],
        _starting_times(options, values),
        values["leaseTtl"] or _LOAD_LEASE_SECONDS,
    )


def _starting_times(options: Iterable[str], values: Mapping[str, Any]) -> dict[int, int]:
    ways = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    names = {name.lower() for name in options}
    given = [name for name in ways if name.lower() in names]
    if len(given) > 1:
        raise bad_option(
            given[1], None, f"{given[0]} is given too; must be one of the two", "give one of them"
        )
    if values["startingTimestamp"] is not None:
        return dict.fromkeys(values["partitions"], values["startingTimestamp"])
    by_partition = values["startingOffsetsByTimestamp"] or {}
    _check_named("startingOffsetsByTimestamp", by_partition, values["partitions"])
    return {int(partition): time for partition, time in by_partition.items()}


def _check_named(name: str, named: Iterable[str], partitions: Iterable[int]) -> None:
    other = sorted({int(partition) for partition in named} - set(partitions))
    if other:
        raise bad_option(
            name,
            None,
            f"partition {other[0]} is not read; must be one of the option partitions",
            "add it to the option partitions, or leave it out",
        )
