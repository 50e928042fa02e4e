"""Limits and defaults of the protocol, all in one place, the checks of names, numbers and choices, and the way in which people write
sizes, durations and partitions.

Units are in the names. A limit that bounds what a peer may send is checked where the message enters, and
the error names the value and the limit. Source: the specification ("Terminology").
"""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import Final, TypeVar

from upr_protocol.errors import InvalidArgumentError

PARTITIONS: Final = 1024
SEQNO_BITS: Final = 48
SEQNO_MAX: Final = 2**SEQNO_BITS - 1
"""The largest seqno. The first mutation of a partition is 1; 0 means "nothing yet"."""

FAILOVER_ID_MAX: Final = 2**64 - 1
"""Failover ids are random, 64 bits, never 0."""
FAILOVER_LOG_RECORDS: Final = 25
"""Default number of records in a failover log; the oldest are dropped first."""
FAILOVER_LOG_MIN: Final = 2
FAILOVER_LOG_MAX: Final = 1000
"""Bounds of that setting. The logs of all partitions go in one message, at most 19 bytes a record."""
EPOCH_MAX: Final = 2**64 - 1
"""Largest epoch. Epochs count the changes of a partition's state, from 1; 0 means unknown."""
REASON_BYTES_MAX: Final = 500
"""Most bytes of the reason of a partition's state; the rest is truncated."""

KEY_BYTES_MIN: Final = 1
KEY_BYTES_MAX: Final = 4096
VALUE_BYTES_MAX: Final = 20 * 2**20
NAME_BYTES_MAX: Final = 200
"""Names of buckets, consumers, cuts, producers: 1 to 200 bytes of UTF-8 without control characters."""

BLOCK_COLUMN_BYTES: Final = 2**20
"""Most bytes of a block's columns, unless it has one row."""
BLOCK_ROWS_MAX: Final = 2**18
"""Rows in one block. With one-byte keys and empty values 2^18 rows fill about 2.4 MiB of columns."""
RUN_SPAN_MAX: Final = 2**32 - 1
"""Seqnos that one run may span, because a row's offset in its run is a uint32."""

FRAME_BYTES: Final = 512 * 2**10
"""Most bytes of a frame out of the tail, unless a single block is larger."""
READ_BYTES: Final = 768 * 2**10
"""Most bytes of one read of the store, but for its last block. They go in a frame of up to twice FRAME_BYTES: on a slow link
the next heartbeat comes behind it, and must come in time."""
FRAME_PLAIN_BYTES: Final = 4 * 2**20
"""Columns that the compressed blocks of a frame have when decompressed; more only when a single block has."""
MESSAGE_BYTES_MAX: Final = 24 * 2**20
"""The gRPC message limit, both ends: the largest value, its key and room for the envelope."""
SLOW_BYTES_A_SECOND: Final = 64 * 2**10
"""Slowest link that a large message is waited for on, at either end."""
MESSAGE_SECONDS: Final = MESSAGE_BYTES_MAX / SLOW_BYTES_A_SECOND
"""Longest time that one message takes on such a link; nothing else comes before it."""
WRITE_BLOCK_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 64 * 2**10
"""Columns of one Write, so that the numbered block fits into a frame with its envelope."""
FURTHER_COLUMNS_MAX: Final = 16
"""The largest id of a further column, from 1; so also how many a block has, however many blocks are joined."""
CELL_BYTES_MAX: Final = 64 * 2**10
"""Bytes of one cell of a further column."""
WRITE_ROWS_MAX: Final = 10_000
WRITE_ROWS_BYTES_MAX: Final = 2**20
"""Rows of one Write without a block, and its message, unless it is a single row: the server makes an object of each."""

REQUEST_BYTES_MAX: Final = 256 * 2**10
"""Most bytes of a unary request and of the Open of a call; the next two methods have limits of their own."""
GET_BYTES_MAX: Final = 5 * 2**20
SAVE_BYTES_MAX: Final = 4 * 2**20
"""Most bytes of a Get, with GET_KEYS_MAX keys, and of a SavePositions, with complete failover logs and markers of
PARTITIONS."""
FOLLOW_REQUEST_BYTES_MAX: Final = 2**20
"""A message of the client in a Follow call."""
STREAM_WINDOW_BYTES: Final = 2**20
"""Bytes that gRPC receives for a call before the first read; larger messages are allowed once they are read."""
RECEIVE_WATCH_BYTES: Final = 176 * 2**20
RECEIVE_LIMIT_BYTES: Final = 248 * 2**20
"""Anonymous memory of a server, without tails above their default in all: above the second limit, the connections with the
most arriving bytes lose calls, until it would be below the first."""
RECEIVE_CLOSE_BYTES: Final = 288 * 2**20
"""Anonymous memory above which the server closes these connections."""
WAITING_BYTES_MAX: Final = 64 * 2**20
"""Large writes that wait for room in a tail, in all buckets of a server; further ones are refused."""
SMALL_WRITE_BYTES: Final = 256 * 2**10
SMALL_WAITING_BYTES_MAX: Final = 48 * 2**20
"""The same for writes of at most SMALL_WRITE_BYTES, so that large ones leave room for them."""

CREDIT_BYTES: Final = 8 * 2**20
"""Default window of a Follow call."""
CREDIT_BYTES_MAX: Final = 256 * 2**20
CREDIT_RETURN_FRACTION: Final = 4
"""A consumer returns credit when a quarter of its window is consumed."""
CREDIT_FRAMES: Final = 256
"""Frames that may be on their way to a consumer: each costs at least this part of its window. So many that frames, of which
there is one a commit, do not wait for the credit of a consumer that is a third of a second away."""

SECONDS_MAX: Final = 1e9
"""Longest time that a caller may give to something, 31 years: threads and gRPC take no more than about ten times that."""
HEARTBEAT_SECONDS: Final = 5.0
HEARTBEAT_SECONDS_MIN: Final = 0.05
HEARTBEAT_SECONDS_MAX: Final = 3600.0
LATE_INTERVALS: Final = 1.5
"""Silence for this many heartbeat intervals has a client ask whether another server is active by now."""
SILENT_INTERVALS: Final = 3
"""Silence for this many heartbeat intervals ends the call, at either side."""
QUIET_SECONDS: Final = 1.0
"""Time after which a client asks that of a server that owes an answer."""

READER_SECONDS: Final = 60.0
"""Longest time that a consumer's connection may accept nothing while data waits; then its call ends as too slow."""

SENDING_BYTES: Final = 24 * 2**20
"""Bytes on their way to the followers of a server beyond which no further frame is begun; twice: for the followers that
have shown that they read, and for the others. gRPC holds a copy of them."""
SENDING_SECONDS: Final = 4.0
SENDING_BYTES_A_SECOND: Final = 4 * 2**20
"""Longest time, and for a large message slowest rate, in which a connection accepts a message while others wait."""

ANSWERS_BYTES_MAX: Final = 64 * 2**20
SMALL_ANSWER_BYTES: Final = 64 * 2**10
"""Answers of more than the second that clients have not taken, in all, half of it for one peer; a further one is refused,
but a peer's first. gRPC holds two copies."""

ROUND_SECONDS_MAX: Final = 0.25
"""Longest time that a small frame waits for others while the server is busy."""
SHARED_BYTES: Final = 2 * 2**20
"""Memory for what followers of a bucket share because they are at the same place, frames above all."""

MARKERS_NEWEST: Final = 16
"""The newest markers of a position are all kept; older ones are thinned exponentially."""
MARKERS_MAX: Final = MARKERS_NEWEST + SEQNO_BITS
"""At most one older marker for each power of two of distance."""

WRITES_IN_FLIGHT_MAX: Final = 64
"""Most unanswered writes of one call; the server reads no more until it has answered some."""
GROUP_ROWS_MAX: Final = 4096
"""Single writes of one bucket object go together in groups of so many rows, and BLOCK_COLUMN_BYTES or one row, while a
group of their kind is under way."""
GROUP_HALVES_ROWS: Final = 96
"""From so many unanswered single writes of a kind on, half of them go while the server has the others."""
JOINED_BYTES_MAX: Final = BLOCK_COLUMN_BYTES // 2
"""Rows of a ``write_many`` of up to so many bytes go together with those of others."""
JOINED_SMALL_BYTES: Final = 16 * 2**10
"""Calls of ``write_many`` below it go together up to so many bytes, larger ones up to BLOCK_COLUMN_BYTES."""
GATHERED_ROWS_MAX: Final = 4 * GROUP_ROWS_MAX
"""Unanswered single writes of one bucket object; further ones wait before they are taken."""
WRITE_CALLS_MAX: Final = 1250
FOLLOW_CALLS_MAX: Final = 1250
OTHER_CALLS_MAX: Final = 1250
"""Open calls of each kind at one server, from their arrival on; further ones are refused."""
PEER_CALLS: Final = 0.8
"""Part of them that one peer, the clients at one address, may have."""
OPEN_SECONDS: Final = 10.0
"""Longest wait for Open, the first message of a call."""
WRITE_OUTCOME_SECONDS: Final = 30.0
"""A write that is not durable by then is answered "unknown": it stays numbered and may become durable."""
REPLICATED_SECONDS: Final = 10.0
"""A write at ``replicated(k)`` that k replicas have not acknowledged by then is answered "unknown", as above."""
WRITE_NUMBER_MAX: Final = 2**63 - 1
PRODUCER_SECONDS: Final = 24 * 3600
PRODUCERS_MAX: Final = 10_000
"""Producers in the store: the newest 10,000, for a day after their last write."""
PRODUCER_BYTES: Final = 640
"""Approximate memory of a producer besides its name, while it has an open call or entries in the tail."""
PRODUCER_MEMORY_BYTES: Final = 8 * 2**20
"""Most memory of a bucket's producers, for about 12,000. WRITE_CALLS_MAX of them can be connected."""

GET_KEYS_MAX: Final = 1000
"""Keys of one Get."""
GET_ANSWER_BYTES_MAX: Final = 16 * 2**20
"""Most bytes of values in one answer to Get; the client asks again for the rest. A single value may be larger."""
GET_CALLS_MAX: Final = 100
"""Open Gets at one server; a few of them search at a time."""
CLIENT_GETS: Final = 64
"""Open Gets of one client, and as many that wait for writes; further ones wait for their turn."""
AT_LEAST_MAX: Final = 2 * PARTITIONS
"""Writes that one Get waits for. A token may have two of a partition, of before and after a failover."""
AT_LEAST_SECONDS_MAX: Final = 60.0
"""Longest wait of a Get."""
WAITING_GETS_BYTES_MAX: Final = 6 * 2**20
"""Memory of the Gets that wait for writes at one server. A further one is refused."""
WAITING_GET_BYTES: Final = 64 * 2**10
"""Memory that each of them counts for beside its request, so that they are fewer than GET_CALLS_MAX."""
SERVERS_MAX: Final = 32
"""Endpoints that a client remembers, and that a server tells."""

TOMBSTONE_SECONDS: Final = 3 * 24 * 3600.0
"""Age from which a tombstone may be purged, once every reader has passed it."""
PURGE_HOLD_SECONDS: Final = 7 * 24 * 3600.0
"""Age from which only a cut holds a tombstone, and no stream or consumer."""
CLOCK_JUMP_SECONDS: Final = 3600.0
"""Longest absence that counts at once. A longer one may be a step of the day's clock, and counts once the server has
run for this time."""
CUT_LEASE_SECONDS: Final = 3600.0
"""Default lease of a cut."""
CUT_LEASE_SECONDS_MAX: Final = 30 * 24 * 3600.0
CUTS_MAX: Final = 64
"""Cuts of one bucket; compaction cannot join blocks across one."""
BACKUP_CUTS: Final = 8
"""Cuts reserved for backups, whose names begin with BACKUP_CUTS_NAME."""
BACKUP_CUTS_NAME: Final = "upr-backup-"
CUTS_HALF: Final = CUTS_MAX // 2
"""Most cuts of backups in total, and most other cuts of one peer."""
CONSUMER_SECONDS: Final = 30 * 24 * 3600.0
"""Time after which an unused registered consumer expires."""
CONSUMERS_MAX: Final = 1000
"""Registered consumers of one bucket."""
LEASE_SECONDS: Final = 30.0
"""Default lease of a member of a group: for that time a silent member keeps its partitions."""
LEASE_SECONDS_MIN: Final = 1.0
LEASE_SECONDS_MAX: Final = 3600.0
MEMBERS_MAX: Final = 256
"""Members of one group."""
OWNERS_REMEMBERED: Final = 2000
"""Consumers whose last call without a member may still save, and as many groups, open or not; FOLLOW_CALLS_MAX calls can be
open."""
BUCKETS_MAX: Final = 32
"""Buckets of one server: each has a journal, a store and threads of its own."""
SET_MEMBERS_MAX: Final = 64
"""Servers of a set that one of them knows; further ones are not counted, and not met."""
ETCD_STALE_SECONDS: Final = 10.0
"""Age of what a server read of etcd above which it says nothing of now."""
DROPPED_MAX: Final = 256
"""Dropped buckets that the map of a cluster remembers; the oldest are forgotten."""
MEMBER_SECONDS: Final = 3600.0
"""Time after which a server of a set is forgotten that is not counted and was not heard of."""
CONNECTIONS_MAX: Final = 2500
"""Connections to one server; fewer where the process may not open as many files."""
HTTP_CONNECTIONS_MAX: Final = 32
"""Connections to a server's HTTP port; for another one the oldest is closed that has not sent its request."""
HTTP_HEAD_BYTES: Final = 8 * 2**10
"""Largest HTTP request: its line and headers."""
HTTP_SECONDS: Final = 5.0
"""Time in which an HTTP request must have come; its answer must have been taken in twice that."""
METRICS_CONSUMERS: Final = 20
"""Consumers of a bucket that have metrics of their own: those with the largest lag."""
PAGE_SECONDS: Final = 1.0
"""Interval of looks at a bucket, for all who watch it on the HTTP port's page."""
PAGE_CONSUMERS: Final = 50
PAGE_PROBLEMS: Final = 20
"""Consumers and problems of a bucket that the page shows: those with the largest lag, and the lowest partitions."""

TEXT_CONNECTIONS_MAX: Final = 64
TEXT_BUCKETS_MAX: Final = 8
"""Connections to the text port, and buckets that one of them may follow."""
TEXT_LINE_BYTES_MAX: Final = 4096
"""Most bytes of a line of a client, without its line feed."""
TEXT_COMMANDS_A_SECOND: Final = 10_000
"""Commands of one connection; what is above it is read later."""
TEXT_PIECE_BYTES: Final = 256 * 2**10
"""Keys and values that are written as text at once, unless a single row has more."""
TEXT_BUFFER_BYTES: Final = 256 * 2**10
"""Text that a connection may hold, besides what is written at once, while its client does not take it."""
TEXT_SILENT_SECONDS: Final = 60.0
"""Longest wait for the first line of a client that has sent no PING."""

QUOTA_BYTES_MAX: Final = 2**60
"""The largest quota of a bucket, and the largest size that is taken where nothing else limits it."""
DURATION_SECONDS_MAX: Final = 36_500 * 24 * 3600.0
"""The longest duration that is taken where nothing else limits it."""

PURGE_HOLDERS_MAX: Final = 20
"""Holders of a partition's tombstones that an answer to Purge names; of the others it has the number."""

PREFIXES_MAX: Final = 16
"""Key prefixes of an identity. Each is looked for in every key that it writes."""

assert (
    VALUE_BYTES_MAX + KEY_BYTES_MAX + FURTHER_COLUMNS_MAX * CELL_BYTES_MAX + 4096
    <= WRITE_BLOCK_BYTES_MAX
    < MESSAGE_BYTES_MAX
)
assert (
    GET_BYTES_MAX + WAITING_GET_BYTES <= WAITING_GETS_BYTES_MAX < GET_CALLS_MAX * WAITING_GET_BYTES
)
assert CLIENT_GETS < GET_CALLS_MAX
assert CLIENT_GETS * WAITING_GET_BYTES < WAITING_GETS_BYTES_MAX
assert PARTITIONS * FAILOVER_LOG_MAX * 19 < MESSAGE_BYTES_MAX
assert PARTITIONS * (PURGE_HOLDERS_MAX + 1) * (NAME_BYTES_MAX + 100) < MESSAGE_BYTES_MAX
assert FRAME_BYTES < BLOCK_COLUMN_BYTES < CREDIT_BYTES <= CREDIT_BYTES_MAX
assert BLOCK_ROWS_MAX <= RUN_SPAN_MAX < SEQNO_MAX

T = TypeVar("T")


ADMIN_SOCKET: Final = "admin.sock"
"""Name of the Unix socket in the data directory of a server, on which its owner may do everything."""
SOCKET_PATH_MAX: Final = 107
"""Longest path of a Unix socket, in bytes."""


def check_name(name: str, what: str) -> str:
    """Return the name when it is 1 to 200 bytes of UTF-8 without control characters.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError(f"{what} is {name!r}; must be a str")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        # Bytes from a shell that are not UTF-8 become lone surrogates.
        raise InvalidArgumentError(f"{what} {name[:60]!r} is not UTF-8") from None
    if not 1 <= size <= NAME_BYTES_MAX or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        raise InvalidArgumentError(
            f"{what} {name[:60]!r} is {size} bytes; must be 1 to {NAME_BYTES_MAX} without control characters"
        )
    return name


def is_number(value: object, *, whole: bool = False) -> bool:
    """Return whether the value is a number, which a bool is for Python only."""
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)


def check_at_least(value: int, least: int, what: str) -> None:
    """Raise InvalidArgumentError unless the value is a whole number, and the least one or more."""
    if not (is_number(value, whole=True) and value >= least):
        raise InvalidArgumentError(f"{what} is {value!r}; must be a whole number, {least} or more")


def check_seconds(value: float, what: str, *, above: bool = False, endless: bool = False) -> None:
    """Raise InvalidArgumentError unless the value is 0 to SECONDS_MAX; ``above``: more than 0.

    Args:
        endless: the caller takes None for no end.
    """
    # NaN fails both.
    if not (is_number(value) and (value > 0 if above else value >= 0) and value <= SECONDS_MAX):
        least = "above 0" if above else "0 or more"
        raise InvalidArgumentError(
            f"{what} is {value!r}; must be {least}, and at most {SECONDS_MAX:.0f}",
            hint="None means without end" if endless else "",
        )


def check_wait(seconds: float, *, endless: bool = False) -> None:
    """As ``check_seconds``, of a wait: what is left of a time may be negative, and then nothing is waited for."""
    if not (is_number(seconds) and seconds < 0):
        check_seconds(seconds, "seconds", endless=endless)


def several(values: Iterable[T], what: str) -> list[T]:
    """Return the values as a list, which a list is itself; InvalidArgumentError for what has none."""
    if type(values) is list:
        return values
    try:
        found = iter(values)
    except TypeError:
        raise InvalidArgumentError(f"{what} are {values!r}; must be several, as a list") from None
    return list(found)


def choice(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the value of a name, or raise InvalidArgumentError that lists the names there are."""
    if not isinstance(name, str) or name not in table:
        raise InvalidArgumentError(f"{what} is {name!r}; must be one of {', '.join(sorted(table))}")
    return table[name]


_QUANTITY: Final = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) *([a-z]*)", re.ASCII)
_SECONDS: Final = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(24 * 3600),
}
_BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Spark's users write 32m.
_BYTES_BY_WORD: Final = {
    word: count
    for unit, count in _BYTES.items()
    for word in ("" if unit == "B" else unit[0].lower(), unit.lower())
}


def parse_duration(
    text: str, low: float = 0.0, high: float = DURATION_SECONDS_MAX, *, bare: bool = False
) -> float:
    """Return the seconds of a duration: a number with one of the units ms, s, m, h and d, in any case.

    Args:
        low, high: the seconds that it must have.
        bare: whether a number without a unit stands for seconds; 0 always needs none.

    Raises:
        InvalidArgumentError: it is not such a text, or out of range.
    """
    found = _QUANTITY.fullmatch(text.strip().lower())
    number = Fraction(found[1]) if found else Fraction(0)
    unit = (found[2] or ("s" if bare or not number else "")) if found else ""
    seconds = float(number * _SECONDS.get(unit, 0))
    if unit not in _SECONDS or not low <= seconds <= high:
        needs = ", with its unit" if found and not unit else ""
        raise InvalidArgumentError(
            f"{text[:60]!r} must be a duration of {format_duration(low)} to {format_duration(high)}{needs}",
            hint="for example 500ms, 90s, 1.5h or 3d",
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that gives a whole number; in seconds if none does."""
    exact = Fraction(seconds).limit_denominator(10**9)
    for unit, size in reversed(_SECONDS.items()):
        if exact and exact % size == 0 and (unit != "ms" or exact < 1):
            return f"{exact // size}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def parse_size(text: str, low: int = 0, high: int = QUOTA_BYTES_MAX) -> int:
    """Return the bytes of a size: a number of bytes, or one with a unit of KiB, MiB, GiB and TiB, in any case.

    Args:
        low, high: the bytes that it must have.

    Raises:
        InvalidArgumentError: it is not such a text, no whole number of bytes, or out of range.
    """
    found = _QUANTITY.fullmatch(text.strip().lower())
    unit = _BYTES_BY_WORD.get(found[2]) if found else None
    size = Fraction(found[1]) * unit if found and unit else Fraction(-1)
    if size.denominator != 1 or not low <= size <= high:
        raise InvalidArgumentError(
            f"{text[:60]!r} must be a size of {format_size(low)} to {format_size(high)}",
            hint="for example 4096, 512KiB, 64MiB or 1.5GiB",
        )
    return int(size)


def format_size(count: int) -> str:
    """Return a number of bytes in the largest unit that gives a whole number."""
    for unit, size in reversed(_BYTES.items()):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return "0"


def bounded_number(digits: str, name: str, highest: int) -> int:
    """Return the number that decimal digits stand for, or raise InvalidArgumentError."""
    # Python refuses to convert thousands of digits, in words that mean nothing to a user.
    shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
    if len(digits) > 20 or int(digits) > highest:
        raise InvalidArgumentError(f"{name} is {shown}, it must be from 0 to {highest}")
    return int(digits)


def parse_partitions(text: str) -> list[int]:
    """Return the partitions that ``0-63,512`` names, ascending, each once.

    Raises:
        InvalidArgumentError: a part is no partition or range.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise InvalidArgumentError(
                f"{part.strip()[:60]!r} is not a partition or a range of partitions",
                hint="for example 0-63,512",
            )
        low, high = (bounded_number(end, "partition", PARTITIONS - 1) for end in ends)
        if low > high:
            raise InvalidArgumentError(f"the range {part.strip()} ends before it begins")
        chosen.update(range(low, high + 1))
    return sorted(chosen)
