"""Lines of the text port: commands of clients, tokens, and changes as RDATA lines. It is pure, and knows no connection.

A token is one decimal number: a failover id times 2^48, plus a seqno. Tokens of different ids are not ordered.
A row is JSON in the form of ``upr-cat follow``, in ASCII, so that no character in it ends a line.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from upr_protocol.block import OP_DELETE, Block, block_keys, block_ops, block_seqnos, block_values
from upr_protocol.errors import InvalidArgumentError, UprError, shown
from upr_protocol.failover import check_partition
from upr_protocol.limits import (
    FAILOVER_ID_MAX,
    SEQNO_BITS,
    SEQNO_MAX,
    TEXT_LINE_BYTES_MAX,
    TEXT_PIECE_BYTES,
    check_name,
)

TOKEN_MAX: Final = FAILOVER_ID_MAX << SEQNO_BITS | SEQNO_MAX
_TOKEN_DIGITS: Final = len(str(TOKEN_MAX))
_ROW_BYTES: Final = 64
"""Bytes that a row adds to its key and value in a piece: about the rest of its line."""
ALL: Final = "*"
"""Stands for all partitions in a REPLICATE."""
_FORMS: Final = "PING [text], NAME name, REPLICATE [bucket [partition|* [token]]], ERROR text"


class Said(NamedTuple):
    """PING, that the client is there; NAME, what it calls itself; or ERROR, why it gives up."""

    kind: str
    words: str


class Replicate(NamedTuple):
    """REPLICATE: follow.

    Args:
        bucket: its name; None for all buckets.
        partition: 0 to 1023; None for all of them.
        token: where the client stands: 0 before everything, None for from now.
    """

    bucket: str | None = None
    partition: int | None = None
    token: int | None = None


Command = Said | Replicate


class LineSplitter:
    """Lines out of the bytes of a connection, in whatever pieces they come. A line feed ends a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that the bytes complete, without their ends.

        Raises:
            InvalidArgumentError: a line is longer than TEXT_LINE_BYTES_MAX; nothing can be made of what follows.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        longest = max(map(len, [*lines, self._rest]))
        if longest > TEXT_LINE_BYTES_MAX:
            raise InvalidArgumentError(
                f"a line is {longest} bytes or more; must be at most {TEXT_LINE_BYTES_MAX}",
                hint="end each command with a line feed",
            )
        return [line.removesuffix(b"\r") for line in lines]


def parse_command(line: bytes) -> Command | None:
    """Return the command of a line, None for a blank one; InvalidArgumentError if it is none, or out of range."""
    try:
        kind, _, rest = line.decode().strip().partition(" ")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"a line is not UTF-8 at byte {error.start}") from None
    match kind:
        case "":
            return None
        case "PING" | "ERROR":
            return Said(kind, rest)
        case "NAME":
            return Said(kind, check_name(rest, kind))
        case "REPLICATE":
            return _replicate(rest.split())
    raise InvalidArgumentError(f"command is {shown(kind)}; must be one of {_FORMS}")


def _replicate(words: Sequence[str]) -> Replicate:
    if len(words) > 3:
        raise InvalidArgumentError(
            f"words behind REPLICATE are {len(words)}; must be at most 3",
            hint="a name with a space is written with %20",
        )
    bucket = _name_of(words[0]) if words else None
    partition = _partition_of(words[1]) if len(words) > 1 else None
    token = parse_token(words[2]) if len(words) > 2 else None
    if token and partition is None:
        raise InvalidArgumentError(
            f"token of all partitions is {token}; must be 0",
            hint="a token is of one partition: send a REPLICATE for each",
        )
    return Replicate(bucket, partition, token)


def _name_of(word: str) -> str:
    try:
        return check_name(unquote(word, errors="strict"), "bucket")
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"bucket is {shown(word)}; must be UTF-8, as %XX") from None


def _partition_of(word: str) -> int | None:
    if word == ALL:
        return None
    number = int(word) if word.isascii() and word.isdigit() and len(word) <= 4 else -1
    try:
        return check_partition(number)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"partition is {shown(word)}; must be 0 to 1023, or {ALL}"
        ) from error


def parse_token(word: str) -> int:
    """Return a token; InvalidArgumentError for what ``token_of`` does not make."""
    is_number = word.isascii() and word.isdigit() and len(word) <= _TOKEN_DIGITS
    token = int(word) if is_number else -1
    if not 0 <= token <= TOKEN_MAX or 0 < token <= SEQNO_MAX:
        raise InvalidArgumentError(
            f"token is {shown(word)}; must be 0, or one that this server sent",
            hint="0 begins before everything; without a token the stream begins now",
        )
    return token


def token_of(failover_id: int, seqno: int) -> int:
    return failover_id << SEQNO_BITS | seqno


def split_token(token: int) -> tuple[int, int]:
    return token >> SEQNO_BITS, token & SEQNO_MAX


def shown_name(name: str) -> str:
    """Return a name as one word of a line: what is no letter, digit or one of ``-._~`` becomes %XX."""
    return quote(name, safe="")


def error_line(error: UprError, *about: object) -> bytes:
    """Return an ERROR line: the reason, what it is about, and words with the hint."""
    words = f"{error.message}; {error.hint}" if error.hint else error.message
    # Words come from clients too: nothing in them may end the line.
    return " ".join(["ERROR", error.reason, *map(str, about), *words.split()]).encode() + b"\n"


def position_line(bucket: str, partition: int, old: int, new: int) -> bytes:
    """Return a POSITION line; ``bucket`` as from ``shown_name``."""
    return f"POSITION {bucket} {partition} {old} {new}\n".encode()


def json_field(name: str, data: bytes) -> str:
    """Return a field of a JSON object: a string where the bytes are UTF-8, else their base64 under NAME_base64."""
    try:
        # ASCII with escapes, because some readers take U+2028 or U+0085 in a string for the end of the line.
        return f'"{name}": {encode_basestring_ascii(data.decode())}'
    except UnicodeDecodeError:
        return f'"{name}_base64": "{base64.b64encode(data).decode()}"'


class Stretch(NamedTuple):
    """The rows of one run.

    Args:
        head: beginning of their lines, up to the token.
        token: of the last row; None when the run ends in no complete marker.
    """

    head: str
    rows: int
    token: int | None


def rdata(block: Block, stretches: Iterable[Stretch]) -> Iterator[bytes]:
    """Yield the RDATA lines of a block, in pieces of about TEXT_PIECE_BYTES of keys and values, or one row."""
    heads: list[str] = []
    for head, rows, token in stretches:
        heads += [f"{head}batch"] * rows
        if rows and token is not None:
            heads[-1] = f"{head}{token}"
    seqnos, ops = block_seqnos(block), block_ops(block)
    keys, values = block_keys(block), block_values(block)
    sizes = [
        len(key) + len(value or b"") + _ROW_BYTES for key, value in zip(keys, values, strict=True)
    ]
    sums = np.cumsum(sizes)
    first = 0
    while first < len(heads):
        sent = int(sums[first - 1]) if first else 0
        last = max(int(np.searchsorted(sums, sent + TEXT_PIECE_BYTES, "right")), first + 1)
        rows_here = slice(first, last)
        lines = [
            f'{head} {{"seqno": {seqno}, "op": "delete", {json_field("key", key)}}}\n'
            if op == OP_DELETE
            else f'{head} {{"seqno": {seqno}, "op": "set", {json_field("key", key)}, '
            f"{json_field('value', value or b'')}}}\n"
            for head, seqno, op, key, value in zip(
                heads[rows_here],
                seqnos[rows_here],
                ops[rows_here],
                keys[rows_here],
                values[rows_here],
                strict=True,
            )
        ]
        yield "".join(lines).encode()
        first = last
