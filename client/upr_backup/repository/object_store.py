"""Object stores: S3, Google Cloud Storage, Azure Blob Storage, or a store that speaks like one; and their faults.

Credentials and endpoints come from the environment, as obstore reads them. obstore is imported with the first request.
"""

import errno
import hashlib
import io
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from upr_backup.errors import (
    StorageNotFoundError,
    StorageRefusedError,
    StorageTimeoutError,
    StorageUnreachableError,
)
from upr_backup.repository.storage import ObjectReader, Stored, check_size
from upr_protocol.errors import InvalidArgumentError, MissingPackageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


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
    """Return what another program's words about a location mean, where they are obstore's or hold these; None for others."""
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
    refused = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    if refused or status in (401, 403) or (code and _NOT_ALLOWED.search(code[1])):
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


_T = TypeVar("_T")


def interruptible(call: Callable[[], _T], halt: Callable[[], Any] | None = None) -> _T:
    """Return what a call returns, or raise what it raises; a signal's handler runs while it is waited for.

    Python runs handlers in the main thread only, and not while that is inside of another library. After a
    KeyboardInterrupt the call goes on in a thread that the end of the process ends.

    Args:
        halt: has the call end soon; after a KeyboardInterrupt it is called, and the call is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="object store", daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        if halt is not None:
            halt()
            thread.join()
        raise


SCHEMES: Final = ("s3", "gs", "az")
"""Of the locations that are known here."""

_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ALLOW_HTTP: Final = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")

_FIRST_SECONDS: Final = 5.0
"""Time for retries of the first request: a wrong endpoint is reported soon."""
_RETRY_SECONDS: Final = 60.0
"""Time for retries of later requests."""
_TIMEOUT: Final = "120s"
"""Of one request, so one part needs 1 Mbit/s."""

_PART_BYTES: Final = 16 * 2**20
_PARTS_MAX: Final = 10_000
_PARTS_AT_ONCE: Final = 4
_WRITE_BYTES: Final = 2**20
_READ_BYTES: Final = 8 * 2**20
_LISTED_AT_ONCE: Final = 1000
_TRIES: Final = 4
# Letters only: Azure takes no hyphen in the name of metadata, some proxies before an S3 store no underscore.
_TOKEN: Final = "uprput"


def open_object_storage(location: str) -> "ObjectStorage":
    """Return the storage at ``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX`` or ``az://CONTAINER/PREFIX``.

    Raises:
        InvalidArgumentError: it names no bucket, or carries what does not belong there, as credentials.
    """
    scheme, _, rest = location.partition("://")
    # Nothing of the URL is in the error: it may be a secret.
    if any(sign in rest for sign in "@?#"):
        raise InvalidArgumentError(
            f"a {scheme}:// URL has a bucket and a prefix only, without any of '@', '?' and '#'",
            hint="credentials and endpoint come from the environment",
        )
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise InvalidArgumentError(
            f"the {scheme}:// URL names no bucket", hint=f"as in {scheme}://BUCKET/PREFIX"
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgumentError(f"{bucket!r} is no name of a bucket")
    parts = [part for part in path.split("/") if part]
    if "." in parts or ".." in parts:
        raise InvalidArgumentError("'.' and '..' mean nothing in the prefix of an object store")
    prefix = "/".join(parts)
    plain = "/".join((f"{scheme}://{bucket}", *parts))
    return ObjectStorage(plain, lambda seconds: _open(scheme, bucket, prefix, seconds))


class ObjectStorage:
    """Objects below a prefix of a bucket.

    Args:
        location: what it is called, and for a store that other processes can open what they open it with.
        open_store: returns obstore's store; called with the seconds that requests are tried again.
    """

    def __init__(self, location: str, open_store: "Callable[[float], ObjectStore]") -> None:
        self.location = location
        self._open_store = open_store
        self._store: ObjectStore | None = None
        self._answered = False

    def read(self, name: str) -> bytes:
        return self._ask(name, lambda store: _whole(store, name))

    def open(self, name: str) -> io.BufferedReader:
        """Open an object for reading; what is not asked for is not fetched."""
        size = self.size(name)

        def read(at: int, count: int) -> Any:
            end = min(at + count, size)
            if at >= end:
                return b""
            return self._ask(
                name, lambda store: _obstore().get_range(store, name, start=at, end=end)
            )

        return io.BufferedReader(ObjectReader(size, read), _READ_BYTES)

    def size(self, name: str) -> int:
        return self._ask(name, lambda store: int(_obstore().head(store, name)["size"]))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object by one conditional request.

        A request whose answer was lost is sent again, and is then refused because of itself; so each has a random
        token in the object's metadata, which says whose object it is.
        """
        token = secrets.token_hex(16)
        for _ in range(_TRIES):
            if self._ask(name, lambda store: _put_new(store, name, data, token)):
                return True
            with suppress(FileNotFoundError):
                found = self._ask(name, lambda store: _obstore().get(store, name).attributes)
                return bool(found.get(_TOKEN) == token)
            # Refused because of one that was being deleted.
        return False

    def create(self, name: str) -> "ObjectSink":
        """Begin a new object; it is there only when it is finished."""
        with suppress(FileNotFoundError):
            self.size(name)
            where = f"{self.location}/{name}"
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where)
        return ObjectSink(self, name)

    def new_writer(self, name: str) -> Any:
        return self._ask(
            name,
            lambda store: _obstore().open_writer(
                store, name, buffer_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            ),
        )

    def names(self, prefix: str) -> list[str]:
        return [found.name for found in self.stored(prefix)]

    def stored(self, prefix: str) -> list[Stored]:
        found = self._ask(prefix, lambda store: _listed(store, prefix))
        return sorted(one for one in found if one.name.startswith(prefix))

    def is_empty(self) -> bool:
        return self._ask("", lambda store: not any(_obstore().list(store, chunk_size=1)))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(name, lambda store: _obstore().delete(store, name))

    def sweep(self) -> None:
        """Do nothing: parts of unfinished uploads are no objects, and a rule of the bucket removes them."""

    def _ask(self, name: str, request: "Callable[[ObjectStore], _T]") -> _T:
        """Return what the store answers; from its first answer on, it is tried for longer."""
        if self._store is None:
            _obstore()
            with one_line(self.location, None):
                self._store = self._open_store(_FIRST_SECONDS)
        with one_line(self.location, name):
            store = self._store
            answer = interruptible(lambda: request(store))
        if not self._answered:
            with one_line(self.location, None):
                self._store = self._open_store(_RETRY_SECONDS)
            self._answered = True
        return answer


class ObjectSink:
    """An object that is being written: in parts, several of them on their way at once."""

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._writer = storage.new_writer(name)
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self.size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Append; waits while parts enough are on their way."""
        view = memoryview(data).cast("B")
        if self.size + view.nbytes > _PART_BYTES * _PARTS_MAX:
            raise OSError(
                errno.EFBIG,
                f"{os.strerror(errno.EFBIG)}: the limit is {_PART_BYTES * _PARTS_MAX} bytes",
                f"{self._storage.location}/{self._name}",
            )
        self._hash.update(view)
        self.size += view.nbytes
        self._held += view
        if len(self._held) >= _WRITE_BYTES:
            self._send()
        return view.nbytes

    def _send(self) -> None:
        held, self._held = self._held, bytearray()
        with one_line(self._storage.location, self._name):
            interruptible(lambda: self._writer.write(held))

    def finish(self) -> str:
        """Make the object of its parts."""
        self._send()
        with one_line(self._storage.location, self._name):
            interruptible(self._writer.close)
        self.closed = True
        return self._hash.hexdigest()

    def close(self) -> None:
        """Give the object up unless it is finished; its parts go, as far as the store can be reached."""
        if self.closed:
            return
        self.closed = True
        error = OSError("given up")
        with suppress(Exception):
            interruptible(lambda: self._writer.__exit__(type(error), error, None))


def _obstore() -> Any:
    """Return obstore; MissingPackageError when it is not installed."""
    try:
        import obstore
    except ImportError as error:
        raise MissingPackageError(
            "an object store needs obstore, not installed", hint="pip install 'upr-stream[backup]'"
        ) from error
    return obstore


def _open(scheme: str, bucket: str, prefix: str, retry_seconds: float) -> "ObjectStore":
    from obstore.store import AzureStore, GCSStore, S3Store

    _check_endpoint(scheme)
    kinds: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    # What the environment says of the client stays, which client_options would replace.
    is_set = _ALLOW_HTTP[scheme].replace("ALLOW_HTTP", "TIMEOUT") in os.environ
    config = {} if is_set else {"timeout": _TIMEOUT}
    retry = {"max_retries": 20, "retry_timeout": timedelta(seconds=retry_seconds)}
    store: ObjectStore = kinds[scheme](
        bucket, prefix=prefix or None, config=config, retry_config=retry
    )
    return store


def _check_endpoint(scheme: str) -> None:
    """Check the endpoint in the environment; obstore ends the process's own way at one that is no URL."""
    for variable in _ENDPOINTS[scheme]:
        value = os.environ.get(variable)
        if not value:
            continue
        try:
            parts = urlsplit(value)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            sound = False
        if not sound or "@" in value:
            raise InvalidArgumentError(f"{variable} is no URL as https://HOST:PORT")
        allowed = os.environ.get(_ALLOW_HTTP[scheme], "").lower()
        if parts.scheme == "http" and allowed not in ("1", "true", "on", "yes", "y"):
            raise InvalidArgumentError(
                f"{variable} is http://, without TLS",
                hint=f"{_ALLOW_HTTP[scheme]}=true allows that",
            )


def _put_new(store: "ObjectStore", name: str, data: bytes, token: str) -> bool:
    from obstore.exceptions import AlreadyExistsError

    try:
        _obstore().put(
            store, name, data, mode="create", use_multipart=False, attributes={_TOKEN: token}
        )
    except AlreadyExistsError:
        return False
    return True


def _whole(store: "ObjectStore", name: str) -> bytes:
    found = _obstore().get(store, name)
    check_size(name, int(found.meta["size"]))
    return bytes(found.bytes())


def _listed(store: "ObjectStore", prefix: str) -> list[Stored]:
    chunks = _obstore().list(store, prefix, chunk_size=_LISTED_AT_ONCE)
    return [
        Stored(found["path"], int(found["size"]), found["last_modified"].timestamp())
        for chunk in chunks
        for found in chunk
    ]
