"""What obstore's errors mean, in one line each and without anything secret.

An error's text has the whole request in it, with a signature where the URL carries one; so nothing of it is passed on
but the status, the store's own error code, the host, and the operating system's words.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_spark.backup.errors import (
    StorageNotFoundError,
    StorageRefusedError,
    StorageTimeoutError,
    StorageUnreachableError,
)

CREDENTIALS_HINT: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role; ~/.aws is not read",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give the machine an identity",
}
"""By scheme, where credentials come from."""

_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_CODE: Final = re.compile(r"(?:<Code>|\(code: )([A-Za-z0-9_.-]{1,60})[<)]")
_HOST: Final = re.compile(r"https?://(?:[^/\s@]*@)?([A-Za-z0-9_.:\[\]-]+)")
_SYSTEM: Final = re.compile(r'(?:message|error): "([^"\\]{1,120})"')
_KEYS_ASKED_FOR: Final = re.compile(
    r"Error performing token request|https?://"
    r"(?:169\.254\.|sts\.|metadata\.google|[^/\s]+/latest/(?:api/token|meta-data/))"
)
_NO_BUCKET: Final = re.compile(
    r"<Code>(?:NoSuchBucket|ContainerNotFound)<|specified bucket does not exist"
)
_NO_ROOM: Final = re.compile(r"StorageFull|QuotaExceeded|Insufficient.?Storage|QuotaReached")
_NOT_ALLOWED: Final = re.compile(
    r"AccessDenied|Expired|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId"
)


@contextmanager
def one_line(location: str, name: str | None) -> Iterator[None]:
    """Turn what obstore raises about an object into an error of this program.

    Args:
        location: the storage's.
        name: the object's, or a prefix; None while the storage is opened.

    Raises:
        OSError: the object is missing, or the store has no room, lets nobody in, or answers what makes no sense.
        StorageNotFoundError: there is no such bucket.
        StorageRefusedError: the store does not do what was asked.
        StorageTimeoutError, StorageUnreachableError: nothing is known of the outcome.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        # It may be one that was made here.
        raise (error if error.errno else _translated(error, location, name)) from None
    except (BaseError, ValueError) as error:
        raise _translated(error, location, name) from None
    except BaseException as error:
        # What a mistake in obstore raises is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise StorageRefusedError(
            f"{location}: the client of the object store failed; its settings in the environment may be wrong"
        ) from None


def of_object_store(text: str, location: str) -> Exception | None:
    """Return what another program's words about an object store mean; None when they are of something else.

    Args:
        text: as obstore would say it, or with more around it.
        location: what it was about.
    """
    found = _translated(OSError(text), location, "")
    unknown = isinstance(found, OSError) and found.errno == errno.EREMOTEIO
    return None if unknown else found


def _translated(error: Exception, location: str, name: str | None) -> Exception:
    text = str(error)
    where = f"{location}/{name}" if name else location
    scheme = location.partition(":")[0]
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    code = _CODE.search(text)
    answer = " ".join(filter(None, (str(status or ""), code[1] if code else "")))
    if _KEYS_ASKED_FOR.search(text.partition("Debug source")[0]):
        words = f"there are no credentials for the object store ({CREDENTIALS_HINT.get(scheme, scheme)})"
        return PermissionError(errno.EACCES, words, where)
    if _NO_BUCKET.search(text):
        bucket = location.partition("://")[2].partition("/")[0]
        return StorageNotFoundError(f"{where}: there is no bucket {bucket!r} in the object store")
    if status in (401, 403) or (code and _NOT_ALLOWED.search(code[1])) or _is_refusal(error):
        words = f"the object store does not let this user do that ({answer or 'no permission'})"
        return PermissionError(errno.EACCES, words, where)
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(errno.ENOENT, "there is no such object", where)
    if status == 507 or (code and _NO_ROOM.search(code[1])):
        return OSError(errno.ENOSPC, f"No space left in the object store ({answer})", where)
    if "Account must be specified" in text:
        return StorageRefusedError(f"{location}: AZURE_STORAGE_ACCOUNT_NAME is not set")
    if name is None:
        return StorageRefusedError(
            f"{location}: a setting of the object store in the environment is wrong"
        )
    return _other(text, where, status, answer)


def _is_refusal(error: Exception) -> bool:
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


def _other(text: str, where: str, status: int, answer: str) -> Exception:
    host = _HOST.search(text)
    store = f"the object store at {host[1]}" if host else "the object store"
    if "Received redirect" in text or "AuthorizationHeaderMalformed" in text:
        return StorageRefusedError(
            f"{where}: {store} says that the bucket is somewhere else",
            hint="set AWS_REGION to the bucket's region",
        )
    if status == 501:
        return StorageRefusedError(f"{where}: {store} does not know such a request ({answer})")
    if status == 429 or status >= 500 or "Server returned error response" in text:
        return StorageUnreachableError(f"{where}: {store} cannot serve now ({answer})")
    if status:
        return OSError(errno.EREMOTEIO, f"{store} refused the request ({answer})", where)
    if "kind: Timeout" in text or "operation timed out" in text:
        return StorageTimeoutError(f"{where}: {store} did not answer in time")
    if "HTTP error" in text or "HttpError" in text:
        words = _SYSTEM.search(text)
        return StorageUnreachableError(
            f"{where}: {store} cannot be reached" + (f": {words[1]}" if words else ""),
            hint="is the endpoint right, and is it running?",
        )
    if "object with invalid path" in text:
        return StorageRefusedError(
            f"{where}: there is an object with an empty part, '.' or '..' in its name",
            hint="remove it: no program of this project made it",
        )
    return OSError(errno.EREMOTEIO, "the object store answered what makes no sense", where)
