"""Send the changes of a bucket as CloudEvents over HTTP, in the order of each partition, each at least once.

    python cloudevents.py --target 127.0.0.1:7711 --url http://127.0.0.1:8080/ --positions cloudevents.positions

Each POST has a batch of events in JSON. When the receiver answers 2xx, the position moves past them. While it is away, or
answers 429 or 5xx, the same events are sent again after growing pauses. Any other answer ends the program, because the
receiver will never take that batch.

An event has the key in "subject" and the value in "data"; "keybase64" holds a key that is no printable UTF-8, and
"data_base64" a value that is no UTF-8.
One that is sent again has the same "id", unless the server crashed in between, or another one took over. The type
"upr.rollback" says that what was sent of a partition above "seqno" did not happen; what did is sent next, with new ids, so
that a receiver that drops the ids it knows takes it.
"""

import argparse
import http.client
import itertools
import json
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

from upr_client import Change, ChangeBatch, Client, FilePositions, Rollback, UprError
from upr_client.types import Changes

EVENTS_MAX = 500
BYTES_MAX = 2**20
"""A POST has no more events, and none behind so many bytes of values."""
LONGEST_PAUSE = 30.0


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class RefusedError(Exception):
    """The receiver will not take a batch however often it is sent."""


class Receiver:
    """Who takes the events.

    Args:
        url: where to.
        seconds: longest wait for an answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        try:
            self._url = urlsplit(url)
            host, port = self._url.hostname, self._url.port
        except ValueError as error:
            raise RefusedError(f"{url!r} is no URL: {error}") from None
        if self._url.scheme not in ("http", "https") or not host:
            raise RefusedError(f"{url!r} is no URL of http or https")
        if not url.isascii() or " " in url:
            raise RefusedError(f"{url!r} has letters that a URL writes as %XX")
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=seconds)

    def send(self, events: list[dict[str, Any]]) -> None:
        """Send a batch until it is taken."""
        body = json.dumps(events).encode()
        for attempt in itertools.count():
            try:
                status = self._post(body)
                words = f"the receiver answered {status}"
                if 200 <= status < 300:
                    return
                if status < 500 and status != 429:
                    raise RefusedError(words)
            except (OSError, http.client.HTTPException) as error:
                # The next attempt connects anew.
                self._connection.close()
                words = f"the receiver cannot be reached: {error}"
            # 2 to the power of 1024 is no float any more.
            pause = min(LONGEST_PAUSE, 0.1 * 2 ** min(attempt, 10))
            say(f"{words}; again in {pause:g} s")
            time.sleep(pause)

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> int:
        path = f"{self._url.path or '/'}{'?' if self._url.query else ''}{self._url.query}"
        headers = {"Content-Type": "application/cloudevents-batch+json; charset=utf-8"}
        self._connection.request("POST", path, body, headers)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status


def event_of(source: str, history: int, change: Change) -> dict[str, Any]:
    """Return a change as an event; ``history`` is the partition's newest failover id."""
    partition, seqno, op, key, value = change
    event: dict[str, Any] = {
        "specversion": "1.0",
        # A rollback begins another history, in which the same seqno, or the same change, is another event.
        "id": f"{partition}-{seqno}-{history:016x}",
        "source": source,
        "type": f"upr.{op}",
        "partition": partition,
        "seqno": str(seqno),
    }
    text = key.decode(errors="replace")
    # An attribute must not have control characters.
    if text.encode() == key and text.isprintable():
        event["subject"] = text
    else:
        event["keybase64"] = b64encode(key).decode()
    if value is None:
        return event
    try:
        return {**event, "datacontenttype": "text/plain", "data": value.decode()}
    except UnicodeDecodeError:
        kind = "application/octet-stream"
        return {**event, "datacontenttype": kind, "data_base64": b64encode(value).decode()}


def rollback_event(source: str, rollback: Rollback) -> dict[str, Any]:
    """Return an event that takes events back."""
    return {
        "specversion": "1.0",
        "id": f"{rollback.partition}-{rollback.from_seqno}-{rollback.new_id:016x}-rollback",
        "source": source,
        "type": "upr.rollback",
        "partition": rollback.partition,
        "seqno": str(rollback.seqno),
        "datacontenttype": "text/plain",
        "data": rollback.words,
    }


def batches_of(
    source: str, changes: Changes, item: ChangeBatch | Rollback
) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of what came, in portions of a size that receivers take."""
    if isinstance(item, Rollback):
        yield [rollback_event(source, item)]
        return
    partitions = {change.partition for change in item.changes}
    histories = {p: changes.position(p).failover_id or 0 for p in partitions}
    events, size = [], 0
    for change in item.changes:
        events.append(event_of(source, histories[change.partition], change))
        size += len(change.value or b"")
        if len(events) == EVENTS_MAX or size >= BYTES_MAX:
            yield events
            events, size = [], 0
    if events:
        yield events


def follow(options: argparse.Namespace) -> None:
    """Send until the end, if there is one."""
    receiver = Receiver(options.url, options.answer_seconds)
    # The name of a bucket may have what a URI may not.
    source = f"upr://{options.target}/{quote(options.bucket, safe='')}"
    with closing(receiver), Client(options.target) as client:
        bucket = client.bucket(options.bucket)
        # An error when there is no server. Once this was answered, a server that is away is waited for.
        client.admin.partitions(bucket, [0])
        changes = bucket.changes(
            resume=FilePositions(options.positions),
            until="now" if options.until_now else None,
            on_rollback="event",
            on_status=say,
        )
        with changes:
            # Asking for the next one is what acknowledges the one before.
            for item in changes.batches():
                for events in batches_of(source, changes, item):
                    receiver.send(events)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send changes as CloudEvents over HTTP.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--url", required=True, help="where to POST the events")
    parser.add_argument("--positions", required=True, help="file; made when it is not there")
    parser.add_argument("--answer-seconds", type=float, default=30.0, help="longest wait")
    parser.add_argument("--until-now", action="store_true", help="end when everything is sent")
    try:
        follow(parser.parse_args())
    except KeyboardInterrupt:
        say("stopped")
    except (RefusedError, UprError) as error:
        say(f"cloudevents: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
