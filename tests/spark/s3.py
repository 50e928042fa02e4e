"""A small S3 server in this process: what an object store promises, and faults that can be asked for.

Path style, one bucket, no signatures: only the access key's id is looked at.
"""

import contextlib
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "backups"
ACCESS_KEY = "upr-test-key"
SECRET = "upr-test-secret"


@dataclass
class Faults:
    """What the server does wrong, until it is told otherwise.

    Attributes:
        refuse: by method, the status and the code that it answers with.
        ignore_condition: objects that are there are replaced although the request forbids it.
        conflicts: so many conditional requests are refused because of another one that is under way.
        lose_answers: so many changes are made, and their connection is closed instead of an answer.
        silent: a request is read and never answered.
        parts: so many parts are accepted, the ones after that refused; None for all.
    """

    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    ignore_condition: bool = False
    conflicts: int = 0
    lose_answers: int = 0
    silent: bool = False
    parts: int | None = None


class S3Server:
    """A server on loopback.

    Attributes:
        objects: by key, bytes and the metadata that came with them.
        written: by key, when that was; seconds since the epoch.
        uploads: by id, the parts of uploads that were neither completed nor aborted.
        requests: method and path with query of every request.
        faults: what it does wrong.
        page: how many names a page of a listing has; few, so that tests meet more than one.
        hook: called with method, key and whether it was done, before and after every request; true drops the request.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.written: dict[str, float] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults = Faults()
        self.page = 7
        self.hook: Callable[[str, str, bool], bool] = lambda method, key, done: False
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self._numbers = itertools.count(1)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_Handler,), {"s3": self})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to have in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def new_upload(self) -> str:
        """Begin an upload in parts, and return its id."""
        upload = f"upload-{next(self._numbers)}"
        self.uploads[upload] = {}
        return upload

    def close(self) -> None:
        self.ended.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Answer(Exception):
    """An answer other than 200, with an error's code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of an answer in one packet: else each waits for an acknowledgement that comes late.
    wbufsize = -1
    disable_nagle_algorithm = True
    s3: S3Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path)[1:].partition("/")
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.s3.requests.append((self.command, self.path))
        if self.s3.faults.silent:
            self.s3.ended.wait()
            self.close_connection = True
            return
        try:
            if self.command in self.s3.faults.refuse:
                raise _Answer(*self.s3.faults.refuse[self.command])
            if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
                raise _Answer(403, "InvalidAccessKeyId")
            if bucket != BUCKET:
                raise _Answer(404, "NoSuchBucket")
            if self.s3.hook(self.command, key, False):
                self.close_connection = True
                return
            with self.s3.lock:
                status, headers, data = getattr(self, f"_{self.command.lower()}")(key, query, body)
            self.s3.hook(self.command, key, True)
        except _Answer as answer:
            status, headers = answer.status, {}
            text = f"<Error><Code>{answer.code}</Code><Message>{answer.code}</Message></Error>"
            data = text.encode()
        if self.command != "GET" and status < 300 and self.s3.faults.lose_answers:
            self.s3.faults.lose_answers -= 1
            self.close_connection = True
            return
        self._send(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _stored(self, key: str) -> tuple[bytes, dict[str, str]]:
        if key not in self.s3.objects:
            raise _Answer(404, "NoSuchKey")
        data, metadata = self.s3.objects[key]
        return data, {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": formatdate(self.s3.written[key], usegmt=True),
            **metadata,
        }

    def _written(self, key: str) -> str:
        written = datetime.fromtimestamp(self.s3.written[key], UTC)
        return written.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _store(self, key: str, data: bytes, metadata: dict[str, str]) -> None:
        self.s3.objects[key] = (data, metadata)
        self.s3.written[key] = time.time()

    def _head(self, key: str, query: dict[str, str], body: bytes) -> Any:
        data, headers = self._stored(key)
        return 200, {**headers, "Content-Length": str(len(data))}, b""

    def _get(self, key: str, query: dict[str, str], body: bytes) -> Any:
        if query.get("list-type") == "2":
            return 200, {}, self._listing(query)
        data, headers = self._stored(key)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, headers, data
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        if first > last:
            raise _Answer(416, "InvalidRange")
        span = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return 206, {**headers, **span}, data[first : last + 1]

    def _listing(self, query: dict[str, str]) -> bytes:
        after = query.get("continuation-token", "")
        keys = sorted(k for k in self.s3.objects if k.startswith(query.get("prefix", "")))
        keys = [key for key in keys if key > after]
        page = keys[: self.s3.page]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.s3.objects[key][0])}</Size>"
            f"<LastModified>{self._written(key)}</LastModified></Contents>"
            for key in page
        )
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return f"<ListBucketResult>{truncated}{token}{rows}</ListBucketResult>".encode()

    def _put(self, key: str, query: dict[str, str], body: bytes) -> Any:
        if "uploadId" in query:
            return self._put_part(query, body)
        condition = self.headers.get("If-None-Match") == "*"
        if condition and self.s3.faults.conflicts:
            self.s3.faults.conflicts -= 1
            raise _Answer(409, "ConditionalRequestConflict")
        if condition and key in self.s3.objects and not self.s3.faults.ignore_condition:
            raise _Answer(412, "PreconditionFailed")
        metadata = {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")}
        self._store(key, body, metadata)
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def _put_part(self, query: dict[str, str], body: bytes) -> Any:
        parts = self._upload(query)
        if self.s3.faults.parts is not None and len(parts) >= self.s3.faults.parts:
            raise _Answer(507, "XMinioStorageFull")
        parts[int(query["partNumber"])] = body
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def _upload(self, query: dict[str, str]) -> dict[int, bytes]:
        if query["uploadId"] not in self.s3.uploads:
            raise _Answer(404, "NoSuchUpload")
        return self.s3.uploads[query["uploadId"]]

    def _post(self, key: str, query: dict[str, str], body: bytes) -> Any:
        if "uploads" in query:
            upload = self.s3.new_upload()
            return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=upload)
        if "delete" in query:
            for name in _texts(body, "Key"):
                self.s3.objects.pop(name, None)
            deleted = [
                f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in _texts(body, "Key")
            ]
            return 200, {}, f"<DeleteResult>{''.join(deleted)}</DeleteResult>".encode()
        parts = self._upload(query)
        numbers = [int(number) for number in _texts(body, "PartNumber")]
        if numbers != sorted(parts) or any(len(parts[n]) < 5 * 2**20 for n in numbers[:-1]):
            raise _Answer(400, "InvalidPart")
        self._store(key, b"".join(parts[number] for number in numbers), {})
        del self.s3.uploads[query["uploadId"]]
        return 200, {}, _xml("CompleteMultipartUploadResult", ETag='"whole"')

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> Any:
        if "uploadId" in query:
            self.s3.uploads.pop(query["uploadId"], None)
        else:
            self.s3.objects.pop(key, None)
        return 204, {}, b""


def _texts(body: bytes, tag: str) -> list[str]:
    found = ElementTree.fromstring(body).iter()
    return [one.text or "" for one in found if one.tag.rpartition("}")[2] == tag]


def _xml(root: str, **fields: str) -> bytes:
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    return f"<{root}>{inner}</{root}>".encode()


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server for a ``with`` block."""
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
