"""Write many rows without waiting for each answer.

    python write_fast.py --target 127.0.0.1:7711 --rows 1000000

Ctrl-C ends it early: what was taken until then is written.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from upr_client import Client, UprError
from upr_client.errors import WriteFailedError
from upr_client.types import WriteResults


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class Counter:
    """Counts what was applied, and says so once a second."""

    def __init__(self) -> None:
        self.began = self._said = time.monotonic()
        self.rows = 0

    def add(self, rows: Sequence[tuple[bytes, bytes | None]], results: WriteResults) -> None:
        """Take note of a batch that was applied."""
        self.rows += results.rows
        now = time.monotonic()
        if now - self._said >= 1:
            self._said = now
            say(self)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        return f"{self.rows} rows in {seconds:.1f} s, {self.rows / seconds:,.0f} a second"


def write(options: argparse.Namespace, stopping: threading.Event) -> None:
    value = b"x" * options.value_bytes
    with Client(options.target, retry_seconds=options.retry_seconds) as client:
        bucket = client.bucket(options.bucket)
        # An error at once when there is no server.
        client.admin.partitions(bucket, [0])
        counter = Counter()
        with bucket.writer(durability=options.durability, on_results=counter.add) as writer:
            for number in range(options.rows):
                writer.set(b"row:%d" % (number % options.keys), value)
                if stopping.is_set():
                    break
        print(counter, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write many rows.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000, help="how many different keys")
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--durability", choices=["disk", "memory"], default="disk")
    parser.add_argument(
        "--retry-seconds",
        type=float,
        default=60.0,
        help="how long to wait for a server that is away",
    )
    options = parser.parse_args()
    for name, least in (("rows", 0), ("keys", 1), ("value_bytes", 0)):
        if (given := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} is {given}; must be at least {least}")
    stopping = threading.Event()
    # No KeyboardInterrupt: what was taken is to be written.
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    try:
        write(options, stopping)
    except BrokenPipeError:
        # Nobody reads any more, as after "| head": what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except WriteFailedError as error:
        say(f"write_fast: {error}; partitions {error.partitions[:5]}, keys {error.keys[:5]}")
        return 1
    except UprError as error:
        say(f"write_fast: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
