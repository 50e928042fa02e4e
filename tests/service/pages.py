"""A client of the server's HTTP port that speaks HTTP by hand."""

import json
import socket
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.harness import WAIT_SECONDS, RunningServer, wait_until


class Said(NamedTuple):
    """An answer: its status, headers by name in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: str


def connected(address: str) -> socket.socket:
    """Return a connection."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def said(sock: socket.socket) -> Said:
    """Return the answer that comes over a connection, which the server closes behind it."""
    data = b""
    while part := sock.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Said(int(first.split()[1]), headers, body.decode())


def ask(
    address: str, path: str, method: str = "GET", *, host: str = "localhost", shown: str = ""
) -> Said:
    """Ask for a page, with an Authorization header if something is shown."""
    header = f"Authorization: {shown}\r\n" if shown else ""
    with connected(address) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{header}\r\n".encode())
        return said(sock)


def http_of(server: RunningServer) -> str:
    """Return where a server's newest process serves HTTP, as its log tells."""

    def served() -> dict[str, Any] | None:
        lines = [json.loads(line) for line in server.log_text().splitlines() if '"serving"' in line]
        return next((line for line in lines if line["pid"] == server.pid), None)

    # The log tells it right behind the ready file.
    wait_until(served, server.log_text)
    told = served()
    assert told is not None
    address: str = told["http"]
    return address


def numbers(address: str, shown: str = "") -> dict[tuple[str, str], float]:
    """Return all samples of /metrics, by name and the values of the labels without that of the bucket."""
    found = ask(address, "/metrics", shown=shown)
    assert (found.status, found.headers["content-type"]) == (
        200,
        "text/plain; version=0.0.4; charset=utf-8",
    )
    return {
        (sample.name, ",".join(v for k, v in sorted(sample.labels.items()) if k != "bucket")): value
        for family in text_string_to_metric_families(found.body)
        for sample in family.samples
        for value in [sample.value]
    }
