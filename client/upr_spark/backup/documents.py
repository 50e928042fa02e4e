"""JSON documents that say whether they are whole, compressed.

A document is a line ``upr-backup FORMAT SHA256`` and then the JSON text as gzip. The SHA-256 is of the line's first
part and all that is behind the line, so no bit can change unnoticed. ``tail -n +2 FILE | gzip -dc`` shows the text.
"""

import hashlib
import json
import re
import zlib
from typing import Any, Final

from upr_spark.backup.errors import RepositoryDamagedError, RepositoryError

Json = dict[str, Any]

FORMAT = 2
"""Of everything in a repository. A program that does not know it must not guess."""

_HEAD: Final = re.compile(rb"(upr-backup ([1-9][0-9]{0,8}) )([0-9a-f]{64})\n")
_FIRST_FORMAT: Final = b'{"content":'
_GZIP: Final = 16 + zlib.MAX_WBITS
_TEXT_BYTES_MAX: Final = 2**30


def canonical(value: object) -> bytes:
    """Return the one text of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    """Return a SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def seal(content: Json) -> bytes:
    """Return a document with its format and the SHA-256 of all its bytes."""
    packer = zlib.compressobj(wbits=_GZIP)
    packed = packer.compress(canonical(content)) + packer.flush()
    head = b"upr-backup %d " % FORMAT
    return head + sha256(head + packed).encode() + b"\n" + packed


def unseal(data: bytes, name: str) -> Json:
    """Return the content of a document that ``seal`` made.

    Raises:
        RepositoryDamagedError: a byte is not as it was written.
        RepositoryError: it is of another format.
    """
    head = _HEAD.match(data)
    if head is None:
        # The first format was JSON, and compressed nothing.
        if data.startswith(_FIRST_FORMAT):
            raise _other_format(name, 1)
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document")
    packed = data[head.end() :]
    if sha256(head[1] + packed).encode() != head[3]:
        raise RepositoryDamagedError(f"{name} is damaged: its SHA-256 does not fit its content")
    if int(head[2]) != FORMAT:
        raise _other_format(name, int(head[2]))
    try:
        content = json.loads(_unpacked(packed))
    except (ValueError, zlib.error, RecursionError) as error:
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document") from error
    if not isinstance(content, dict):
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document")
    return content


def _unpacked(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    text = unpacker.decompress(packed, _TEXT_BYTES_MAX)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("more, or less, than one whole text")
    return text


def _other_format(name: str, found: int) -> RepositoryError:
    return RepositoryError(
        f"{name} has format {found}, this program reads {FORMAT}",
        hint="use the program that wrote it, or a newer one",
    )
