"""Storage of a repository: a folder, or a bucket of an object store, chosen by its location.

``put_if_absent`` is what everything rests on: of all that create one name exactly one succeeds. In a folder that is
a hard link, in an object store a conditional request.
"""

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from upr_backup.errors import RepositoryError
from upr_backup.repository.object_store import SCHEMES, open_object_storage
from upr_backup.repository.storage import LocalStorage, Storage, Stored
from upr_protocol.errors import InvalidArgumentError

__all__ = [
    "LocalStorage",
    "Storage",
    "Stored",
    "check_storage",
    "open_storage",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")
_HINT = "a folder, file:///FOLDER, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"


def open_storage(location: str) -> Storage:
    """Return the storage at a location; nothing is asked of it yet, and it need not exist.

    Args:
        location: a folder's path or ``file://`` URL, or ``s3://``, ``gs://`` or ``az://`` with a bucket and a prefix.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if not location:
        # As a path it would be the working directory, which nobody asked for.
        raise InvalidArgumentError("the location is empty", hint=_HINT)
    found = _URL.match(location)
    if found is None:
        # A process that opens it later may have another working directory.
        return LocalStorage(Path(os.path.abspath(location)))
    scheme = found[1].lower()
    if scheme not in SCHEMES and scheme != "file":
        raise InvalidArgumentError(f"{found[1]}:// is no known kind of location", hint=_HINT)
    if not found[2]:
        raise InvalidArgumentError(f"{found[1]}: is followed by one slash", hint=_HINT)
    rest = location[found.end() :]
    if scheme != "file":
        return open_object_storage(f"{scheme}://{rest}")
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidArgumentError(
            f"a file:// URL has three slashes and the folder's whole path: {location!r}", hint=_HINT
        )
    return LocalStorage(Path("/" + unquote(path)))


def check_storage(storage: Storage) -> None:
    """Check with an object of its own that a storage keeps what commits rest on; that object is gone afterwards.

    Raises:
        RepositoryError: it lets a second writer of a name win, or does not show at once what was written.
        OSError, UprError: it cannot be written to.
    """
    name = f"locks/probe-{secrets.token_hex(8)}"
    first, second = b"first", b"second"
    try:
        if not storage.put_if_absent(name, first):
            raise RepositoryError(f"{storage.location} says that a new random name is taken")
        if storage.put_if_absent(name, second) or storage.read(name) != first:
            raise RepositoryError(
                f"{storage.location} replaces objects although that was forbidden (If-None-Match is ignored): "
                "two runs at once would destroy each other's backups",
                hint="use a store with conditional writes",
            )
        if name not in storage.names("locks/"):
            raise RepositoryError(
                f"{storage.location} does not list at once what was written",
                hint="use a store whose listings are consistent",
            )
    finally:
        with suppress(Exception):
            storage.delete(name)
