"""JSON documents that say whether they are whole."""

import hashlib
import json
from typing import Any

from upr_spark.backup.errors import RepositoryDamagedError, RepositoryError

Json = dict[str, Any]

FORMAT = 1
"""Of everything in a repository. A program that does not know it must not guess."""


def canonical(value: object) -> bytes:
    """Return the one text of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    """Return a SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def seal(content: Json) -> bytes:
    """Return a document with its format and the SHA-256 of its content."""
    digest = sha256(canonical(content))
    return canonical({"content": content, "format": FORMAT, "sha256": digest}) + b"\n"


def unseal(data: bytes, name: str) -> Json:
    """Return the content of a document that ``seal`` made.

    Raises:
        RepositoryDamagedError: a byte is not as it was written.
        RepositoryError: it is of another format.
    """
    try:
        document = json.loads(data)
        stored_format, content, digest = (
            document["format"],
            document["content"],
            document["sha256"],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document") from error
    if type(stored_format) is not int or not isinstance(content, dict):
        raise RepositoryDamagedError(f"{name} is damaged: it is no sealed document")
    if digest != sha256(canonical(content)):
        raise RepositoryDamagedError(f"{name} is damaged: its SHA-256 does not fit its content")
    if stored_format != FORMAT:
        raise RepositoryError(
            f"{name} has format {stored_format}, this program reads {FORMAT}",
            hint="use the program that wrote it, or a newer one",
        )
    # A flipped bit in the spelling of a number may leave the value as it is; the bytes are then not ours either.
    if data != seal(content):
        raise RepositoryDamagedError(f"{name} is damaged: its bytes are not those written")
    return content
