"""The options of reading, in one table, and the settings they give."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from upr_protocol.failover import check_partition, check_seqno
from upr_protocol.limits import CUT_LEASE_SECONDS_MAX, KEY_BYTES_MAX, PARTITIONS
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
from upr_spark.source.offsets import parse_partitions

_BOTH: Final = "batch stream"
_ROWS_MAX: Final = 1 << 20
_NAME_CHARACTERS_MAX: Final = 100
_DIGITS_MAX: Final = 9


def _offsets(*words: str) -> Any:
    def parse(value: str) -> str | dict[str, Any]:
        stripped = value.strip()
        if stripped.lower() in words:
            return stripped.lower()
        try:
            document = json.loads(stripped)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or not document:
            raise ValueError(f"must be {', '.join(words)}, an offset, or seqnos as " + '{"5": 434}')
        return document if "v" in document else _seqnos(document)

    return parse


def _seqnos(document: Mapping[str, Any]) -> dict[str, Any]:
    seqnos: dict[str, Any] = {}
    for partition, seqno in document.items():
        if not (partition.isascii() and partition.isdigit()) or len(partition) > _DIGITS_MAX:
            raise ValueError(f"{partition[:60]!r} is not a partition")
        number = check_partition(int(partition))
        if str(number) in seqnos:
            raise ValueError(f"partition {number} is there twice")
        if isinstance(seqno, bool):
            raise ValueError(f"{json.dumps(seqno)} is not a seqno")
        seqnos[str(number)] = check_seqno(seqno)
    return seqnos


def _name(value: str) -> str:
    stripped = text(value)
    if len(stripped.encode()) > _NAME_CHARACTERS_MAX or not stripped.isprintable():
        raise ValueError(f"must be 1 to {_NAME_CHARACTERS_MAX} bytes without control characters")
    return stripped


def _prefix(value: str) -> bytes:
    if len(value.encode()) > KEY_BYTES_MAX:
        raise ValueError(f"must have {KEY_BYTES_MAX} bytes of UTF-8 at most")
    return value.encode()


MODES: Final = ("fail", "emit", "reset")


READING_OPTIONS: Final = (
    Option(
        "partitions", f"0-{PARTITIONS - 1}", _BOTH, "which to read, as 0-127,512", parse_partitions
    ),
    Option(
        "startingOffsets",
        "earliest",
        _BOTH,
        'where a query without a checkpoint begins: earliest; latest (streams only); an offset; or seqnos as {"5": 434}',
        _offsets("earliest", "latest"),
    ),
    Option(
        "endingOffsets",
        "latest",
        "batch",
        'where a batch read ends: latest, pinned once for each load(); an offset; or seqnos as {"5": 434}',
        _offsets("latest"),
    ),
    Option(
        "numPartitions",
        "8",
        _BOTH,
        "how many tasks read side by side at most",
        whole(1, PARTITIONS),
    ),
    Option("minPartitions", None, _BOTH, "another name of numPartitions", whole(1, PARTITIONS)),
    Option(
        "maxOffsetsPerTrigger",
        None,
        "stream",
        "about how many seqnos a batch advances by; partitions advance whole, and at least one does",
        whole(1, 10**15),
    ),
    Option(
        "onRollback",
        "fail",
        _BOTH,
        "when the server undid what was read: fail raises; emit goes back to an earlier end of a batch and tells it "
        "with a row of op=rollback; reset begins the partition again",
        one_of(*MODES),
    ),
    Option(
        "failOnDataLoss",
        "true",
        _BOTH,
        "whether a partition that cannot be continued raises; else it is read again from the beginning",
        flag,
    ),
    Option(
        "markerHistory",
        "8",
        "stream",
        "how many earlier ends of batches are kept for each partition, to go back to",
        whole(1, 64),
    ),
    Option("leaseName", "upr-spark", _BOTH, "how the names of this query's cuts begin", _name),
    Option(
        "leaseTtl",
        "1h",
        _BOTH,
        "how long the end of a batch stays pinned after it was last renewed",
        duration(1, CUT_LEASE_SECONDS_MAX),
    ),
    Option("includeValue", "true", _BOTH, "whether values are read; else value is null", flag),
    Option("includeDeletions", "true", _BOTH, "whether rows of op=delete are given", flag),
    Option("keyPrefix", "", _BOTH, "only keys that begin with this text", _prefix),
    Option(
        "keyEncoding",
        "binary",
        _BOTH,
        "type of the column key: binary or utf8",
        one_of("binary", "utf8"),
    ),
    Option(
        "valueEncoding",
        "binary",
        _BOTH,
        "type of the column value: binary or utf8",
        one_of("binary", "utf8"),
    ),
    Option("batchRows", "8192", _BOTH, "rows of an Arrow batch, about", whole(1, _ROWS_MAX)),
    Option("batchBytes", "4MiB", _BOTH, "bytes of an Arrow batch, about", size(1024, 256 << 20)),
    Option(
        "flowControlBytes",
        "16MiB",
        _BOTH,
        "how much the server may send ahead to each task",
        size(64 << 10, 256 << 20),
    ),
    Option(
        "minPollInterval",
        "100ms",
        "stream",
        "how often the server is asked for news at most",
        duration(0.001, 3600),
    ),
    Option(
        "filterPushdown",
        "false",
        "batch",
        "whether conditions on partition narrow what is read; needs spark.sql.python.filterPushdown.enabled=true",
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
        starting, ending: a word, an offset's document, or seqnos by partition.
        tasks: how many input partitions at most.
        max_offsets: of one batch; None for no limit.
        rules: about changed histories.
        cut_name: how names of cuts begin.
        credit_bytes: of one task.
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


def read_settings(options: Mapping[str, str]) -> Settings:
    """Return what options say. Nothing is connected.

    Args:
        options: as Spark gives them; names in any case.

    Raises:
        UprSparkError: UPR_BAD_OPTION, one is not known, missing, cannot be read or is out of its range.
    """
    check_known(options, OPTIONS, _RENAMED)
    values = read_options(READING_OPTIONS, options)
    for name in ("startingOffsets", "endingOffsets"):
        if isinstance(values[name], dict) and "v" not in values[name]:
            _check_named(name, values[name], values["partitions"])
    rules = Rules(values["onRollback"], values["failOnDataLoss"], values["markerHistory"])
    return Settings(
        read_connection(options),
        values["partitions"],
        values["startingOffsets"],
        values["endingOffsets"],
        values["minPartitions"] or values["numPartitions"],
        values["maxOffsetsPerTrigger"],
        rules,
        values["leaseName"],
        values["leaseTtl"],
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
    )


def _check_named(name: str, seqnos: Mapping[str, int], partitions: tuple[int, ...]) -> None:
    named = {int(partition) for partition in seqnos}
    missing = sorted(set(partitions) - named)
    other = sorted(named - set(partitions))
    if missing or other:
        wrong = f"{len(missing)} are missing, the first is {missing[0]}" if missing else ""
        wrong = wrong or f"partition {other[0]} is not read"
        raise bad_option(
            name,
            None,
            f"must name each partition that is read: {wrong}",
            "set the option partitions to those that it names",
        )
