"""Print the changes of a bucket as they come, and go on where it stood at the next start.

    python follow.py --target 127.0.0.1:7711 --positions follow.positions
    python follow.py --start now --prefix user:
    python follow.py --start 2026-05-01T12:00:00+00:00

A change is printed at least once: the file is written once a second, so after a crash the last ones come again.
"""

import argparse
import os
import signal
import sys
from datetime import datetime
from typing import Literal

from upr_client import Change, Client, FilePositions, Marker, Only, Rollback, UprError


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


def show(event: Change | Marker | Rollback) -> None:
    """Print one event as a line."""
    if isinstance(event, Change):
        value = "-" if event.value is None else repr(event.value)
        print(event.partition, event.seqno, event.op, repr(event.key), value, flush=True)
    elif isinstance(event, Rollback):
        # What was printed above this seqno did not happen. What did is printed next.
        print(event.partition, event.seqno, "rollback", len(event.keys), "keys", flush=True)


def start(text: str) -> Literal["beginning", "now"] | datetime:
    """Return what ``--start`` names."""
    if text == "beginning":
        return "beginning"
    return "now" if text == "now" else datetime.fromisoformat(text)


def follow(options: argparse.Namespace) -> None:
    """Print until the end, if there is one."""
    positions = FilePositions(options.positions) if options.positions else None
    with Client(options.target) as client:
        bucket = client.bucket(options.bucket)
        # An error when there is no server. Once this was answered, a server that is away is waited for.
        client.admin.partitions(bucket, [0])
        changes = bucket.changes(
            resume=positions,
            until="now" if options.until_now else None,
            only=Only(key_prefix=options.prefix.encode()),
            start=options.start,
            on_rollback="event",
            on_status=say,
        )
        stopped = []

        def stop(number: int, _: object) -> None:
            # A KeyboardInterrupt could come in the middle of receiving. The second Ctrl-C ends the process.
            signal.signal(number, signal.SIG_DFL)
            stopped.append(number)
            changes.stop()

        with changes:
            signal.signal(signal.SIGINT, stop)
            for event in changes:
                show(event)
        if stopped:
            say("stopped")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the changes of a bucket.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--positions", help="file to go on from; made when it is not there")
    parser.add_argument(
        "--start",
        type=start,
        default="beginning",
        help='where to begin without a position: "beginning", "now", or a time with its offset from UTC',
    )
    parser.add_argument("--prefix", default="", help="only keys that begin with it")
    parser.add_argument("--until-now", action="store_true", help="end when everything is printed")
    try:
        follow(parser.parse_args())
    except BrokenPipeError:
        # Nobody reads any more, as after "| head": what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        say("stopped")
    except UprError as error:
        say(f"follow: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
