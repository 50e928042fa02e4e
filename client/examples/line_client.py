"""Follow a bucket through the server's text port, without the SDK: what a client of the line protocol must do.

    upr-server --data /tmp/upr-data --text 127.0.0.1:7712
    python line_client.py --target 127.0.0.1:7712 --state lines.json

It prints each change as its partition and JSON, at least once, and ``rollback SEQNO`` where what was printed above did not
happen. The state file has the server's name and, for each partition, tokens of places to go on from.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections import defaultdict
from typing import Any
from urllib.parse import quote

PARTITIONS = 1024
PING_SECONDS, SILENT_SECONDS = 5.0, 15.0
TOKENS = 16
"""Tokens kept of a partition: after a rollback an older one is needed."""


class ServerError(Exception):
    """The server said ERROR, or is another one; words for people."""


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


def put(*words: object) -> None:
    """Print; end where nobody reads any more, as after "| head"."""
    try:
        print(*words, flush=True)
    except BrokenPipeError:
        # No OSError of the connection, which would be made again. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


class LineClient:
    """What is known of each partition, and what to do with each line of the server."""

    def __init__(self, bucket: str, state: str | None, server: str | None) -> None:
        self.bucket = bucket
        self._state, self._server = state, server
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.batches: defaultdict[int, list[str]] = defaultdict(list)
        self.ended: set[int] = set()
        if state and os.path.exists(state):
            try:
                with open(state) as file:
                    kept = json.load(file)
                self._server = server or kept["server"]
                self._tokens.update({int(p): tokens for p, tokens in kept["tokens"].items()})
            except OSError as error:
                raise SystemExit(f"line_client: the state cannot be read: {error}") from None
            except (AttributeError, KeyError, TypeError, ValueError):
                raise SystemExit(
                    f"line_client: {state} is no state of this program; remove it to begin anew"
                ) from None

    def save(self) -> None:
        """Replace the state file as a whole: what it names was printed."""
        if not self._state:
            return
        try:
            with open(self._state + ".new", "w") as file:
                json.dump({"server": self._server, "tokens": self._tokens}, file)
            os.replace(self._state + ".new", self._state)
        except OSError as error:
            # No error of the connection, which would be made again, and bring the same again.
            raise SystemExit(f"line_client: the state cannot be written: {error}") from None

    def ask(self, partition: int) -> bytes:
        """Return the command that asks for what follows the newest token, or for everything."""
        token = self._tokens[partition][-1] if self._tokens[partition] else 0
        return f"REPLICATE {quote(self.bucket, safe='')} {partition} {token}\n".encode()

    def take(self, line: str) -> bytes:
        """Handle a line; return what to answer."""
        command, _, rest = line.partition(" ")
        if command == "SERVER":
            if self._server not in (None, rest):
                raise SystemExit(f"line_client: the server is {rest}; expected {self._server}")
            self._server = rest
        elif command == "RDATA":
            _, partition, token, row = rest.split(" ", 3)
            self._row(int(partition), token, row)
        elif command == "POSITION":
            _, partition, _, token = rest.split(" ")
            self._stand(int(partition), int(token))
        elif command == "ERROR":
            return self._error(rest)
        return b""

    def _row(self, partition: int, token: str, row: str) -> None:
        if row != "null":
            self.batches[partition].append(row)
        if token != "batch":
            for done in self.batches.pop(partition, []):
                put(partition, done)
            self._stand(partition, int(token))

    def _stand(self, partition: int, token: int) -> None:
        tokens = self._tokens[partition]
        # The same place under a newer id replaces the one before.
        if tokens and tokens[-1] % 2**48 == token % 2**48:
            tokens.pop()
        if token % 2**48:
            tokens.append(token)
        del tokens[:-TOKENS]

    def _error(self, words: str) -> bytes:
        reason, _, about = words.partition(" ")
        if reason != "ROLLBACK":
            return self._end(words)
        _, number, limit, _ = about.split(" ", 3)
        partition, seqno = int(number), int(limit)
        tokens = self._tokens[partition]
        asked = tokens.pop() if tokens else 0
        self.batches.pop(partition, None)
        # Without a seqno the server may only not know the id: tokens of another one may do.
        tokens[:] = [
            t for t in tokens if t % 2**48 <= seqno or (not seqno and t >> 48 != asked >> 48)
        ]
        put(partition, "rollback", tokens[-1] % 2**48 if tokens else 0)
        return self.ask(partition)

    def _end(self, words: str) -> bytes:
        """Note the partitions that are not followed any more, to be asked for again later; without any it is the connection."""
        found = re.match(r"\S+ \S+ (\*|[0-9,]+) ", words)
        if not found:
            raise ServerError(words)
        say(f"line_client: {words}")
        ended = range(PARTITIONS) if found[1] == "*" else map(int, found[1].split(","))
        for partition in ended:
            self.ended.add(partition)
            self.batches.pop(partition, None)
        return b""


def follow(client: LineClient, connection: socket.socket) -> None:
    """Follow until the connection ends."""
    client.batches.clear()
    client.ended.clear()
    connection.sendall(b"NAME line_client\n")
    connection.sendall(b"".join(client.ask(partition) for partition in range(PARTITIONS)))
    connection.settimeout(1.0)
    rest, heard, pinged = b"", time.monotonic(), 0.0
    while (now := time.monotonic()) - heard < SILENT_SECONDS:
        if now - pinged >= PING_SECONDS:
            again = b"".join(map(client.ask, sorted(client.ended)))
            client.ended.clear()
            connection.sendall(b"PING %d\n" % (time.time() * 1000) + again)
            pinged = now
        try:
            data = connection.recv(2**16)
        except TimeoutError:
            continue
        if not data:
            raise ConnectionError("the server closed the connection")
        heard = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        answers = b"".join([client.take(line.decode()) for line in lines])
        client.save()
        connection.sendall(answers)
    raise ConnectionError(f"nothing came for {SILENT_SECONDS:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow a bucket through the text port.")
    parser.add_argument("--target", default="127.0.0.1:7712", help="HOST:PORT of the text port")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--state", help="file to go on from; made when it is not there")
    parser.add_argument(
        "--server", help="the name that SERVER must say; by default that of the file"
    )
    parser.add_argument(
        "--retry-seconds", type=float, default=1.0, help="pause before connecting again"
    )
    options = parser.parse_args()
    host, _, port = options.target.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--target is {options.target}; must be HOST:PORT")
    client = LineClient(options.bucket, options.state, options.server)
    address: Any = (host.strip("[]"), int(port))
    has_connected = False
    try:
        while True:
            try:
                with socket.create_connection(address, SILENT_SECONDS) as connection:
                    has_connected = True
                    follow(client, connection)
            except (OSError, ServerError) as error:
                say(f"line_client: {error}")
                if not has_connected:
                    return 1
            time.sleep(options.retry_seconds)
    except KeyboardInterrupt:
        say("stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
