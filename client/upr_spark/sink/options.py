"""Options of writing; those of the connection are in ``upr_spark.options``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from upr_protocol.limits import BLOCK_ROWS_MAX
from upr_spark.errors import bad_option
from upr_spark.options import (
    CONNECTION_OPTIONS,
    Connection,
    Option,
    check_known,
    flag,
    one_of,
    read_connection,
    read_options,
    size,
    text,
    whole,
)

UPSERT: Final = "upsert"
APPLY: Final = "apply"

WRITE_OPTIONS: Final = (
    Option(
        "writeMode",
        UPSERT,
        "upsert: every row sets its key; apply: the column op says set or delete",
        one_of(UPSERT, APPLY),
    ),
    Option(
        "durability",
        "disk",
        "disk: a row counts as written when the server has it on disk; memory: when it has a seqno",
        one_of("disk", "memory"),
    ),
    Option(
        "batchRows",
        str(BLOCK_ROWS_MAX),
        "rows that are sent in one message at most, besides the limit of 1 MiB",
        whole(1, BLOCK_ROWS_MAX),
    ),
    Option(
        "maxInFlightBytes",
        "32MiB",
        "rows that a task holds at most: one half is gathered while the other one is on its way",
        size(1 << 20, 1 << 30),
    ),
    Option(
        "allowTruncate",
        "false",
        'whether mode("overwrite") may delete the keys that the job does not write',
        flag,
    ),
    Option(
        "ignoreExtraColumns",
        "false",
        "whether columns that have no meaning here are left out, instead of refused",
        flag,
    ),
    Option(
        "writeId",
        None,
        'batch only, and not with mode("overwrite"): a name for this write; the same rows are not applied again under '
        "it for 24 hours",
        text,
    ),
)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of writing that were read and checked; can be pickled.

    Args:
        connection: how the server is reached.
        mode: UPSERT or APPLY.
        durability: "disk" or "memory".
        block_rows: rows of a block at most.
        chunk_bytes: what is gathered before it is sent.
        allow_truncate, ignore_extra: true or false.
        write_id: None where there is none.
    """

    connection: Connection
    mode: str
    durability: str
    block_rows: int
    chunk_bytes: int
    allow_truncate: bool
    ignore_extra: bool
    write_id: str | None


def read_sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Return the options of a write; nothing is connected.

    Raises:
        UprSparkError: UPR_BAD_OPTION, one is unknown, missing or bad.
    """
    check_known(options, (*CONNECTION_OPTIONS, *WRITE_OPTIONS))
    values = read_options(WRITE_OPTIONS, options)
    if streaming and values["writeId"] is not None:
        raise bad_option(
            "writeId",
            values["writeId"],
            "is for batch writes; a stream names its writes by query and batch",
            "leave it out",
        )
    return SinkOptions(
        read_connection(options),
        values["writeMode"],
        values["durability"],
        values["batchRows"],
        values["maxInFlightBytes"] // 2,
        values["allowTruncate"],
        values["ignoreExtraColumns"],
        values["writeId"],
    )
