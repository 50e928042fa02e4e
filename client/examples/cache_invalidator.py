"""A cache of values that forgets a key as soon as it changes: read through, and never stale for longer than the stream takes.

    echo user:1 | python cache_invalidator.py --target 127.0.0.1:7711

It prints the value of each key that it reads from stdin, and says on stderr what came from the server ("miss") and what
from the cache ("hit"), and which keys it forgot. For a key that cannot be read at the moment it only says why.

The stream has keys only, from now on, also of what is in memory at the server only. It says nothing of a value that was read
from a server and lost in its crash before the stream had it. Therefore the cache empties itself on a rollback, and whenever
the stream was interrupted.
"""

import argparse
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable

from upr_client import Client, Only, Rollback, UprError
from upr_client.errors import InvalidArgumentError
from upr_client.types import Bucket, Changes


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class Cache:
    """Values by key.

    Args:
        bucket: read where there is no value.
        room: how many values are kept; those that were used last.
    """

    def __init__(self, bucket: Bucket, room: int) -> None:
        self._bucket = bucket
        self._room = room
        self._values: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._reading: dict[bytes, object] = {}
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[bytes | None, bool]:
        """Return the value, None for none, and whether it was there."""
        reading = object()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key], True
            self._reading[key] = reading
        try:
            value = self._bucket.get(key)
            with self._lock:
                # A key that was forgotten meanwhile has been read too early.
                if self._reading.get(key) is reading:
                    self._values[key] = value
                    if len(self._values) > self._room:
                        self._values.popitem(last=False)
        finally:
            with self._lock:
                if self._reading.get(key) is reading:
                    del self._reading[key]
        return value, False

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget keys that have changed; return those that were there."""
        with self._lock:
            for key in (keys := set(keys)):
                self._reading.pop(key, None)
            known = [key for key in keys if key in self._values]
            for key in known:
                del self._values[key]
        return known

    def empty(self) -> int:
        """Forget all keys; return how many there were."""
        with self._lock:
            count = len(self._values)
            self._values.clear()
            self._reading.clear()
        return count


def invalidate(changes: Changes, cache: Cache) -> None:
    """Forget what changes, until the stream is stopped."""
    stopped = False
    try:
        for batch in changes.batches():
            if isinstance(batch, Rollback):
                say(f"emptied of {cache.empty()} keys: {batch.words}")
                continue
            for key in cache.forget(change.key for change in batch.changes):
                say(f"forgot {key!r}")
        stopped = True
    except UprError as error:
        say(f"cache_invalidator: {error}")
    finally:
        if not stopped:
            # Whatever the cause, nothing would be forgotten any more.
            os._exit(1)


def serve(options: argparse.Namespace) -> None:
    """Answer each line of stdin."""
    with Client(options.target) as client:
        bucket = client.bucket(options.bucket)
        # An error when there is no server. Once this was answered, a server that is away is waited for.
        client.admin.partitions(bucket, [0])
        cache = Cache(bucket, options.room)

        def interrupted(words: object) -> None:
            say(f"emptied of {cache.empty()} keys: {words}")

        with bucket.changes(
            start="now",
            only=Only(keys_only=True, stability="memory"),
            on_rollback="event",
            on_status=interrupted,
        ) as changes:
            follower = threading.Thread(target=invalidate, args=(changes, cache))
            follower.start()
            try:
                # What is read before the stream has begun could change unseen.
                changes.ready()
                for line in sys.stdin.buffer:
                    key = line.rstrip(b"\n")
                    try:
                        value, hit = cache.get(key)
                    except UprError as error:
                        if not error.retriable and not isinstance(error, InvalidArgumentError):
                            raise
                        # The next line may do better: a server that is away comes back.
                        say(error)
                        continue
                    say("hit" if hit else "miss")
                    print("-" if value is None else repr(value), flush=True)
            finally:
                changes.stop()
                follower.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep values until they change.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--room", type=int, default=10_000, help="how many values are kept")
    try:
        serve(parser.parse_args())
    except BrokenPipeError:
        # Nobody reads any more, as after "| head": what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        say("stopped")
    except UprError as error:
        say(f"cache_invalidator: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
