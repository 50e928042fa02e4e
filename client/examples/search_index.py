"""Keep a search index in step with a bucket, and print the keys whose values have all the words given.

    python search_index.py --target 127.0.0.1:7711 --until-now red apple
    python search_index.py red apple

The first prints what there is, and ends. The second goes on: "+ KEY" when a key begins to match, "- KEY" when it no
longer does.

The index is in memory, so each start reads the bucket from the beginning. One that lasts gets a position store, and a
handler that may be called twice with the same change, as setting a document by its key may be.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable

from upr_client import AsyncClient, Change, Rollback, UprError

NO_WORDS: frozenset[str] = frozenset()


def say(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


def put(words: str) -> None:
    """Print; stop where nobody reads any more, as after "| head"."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


class Index:
    """Which words occur in which keys.

    Args:
        changed: takes a key, and its words before and after.
    """

    def __init__(self, changed: Callable[[bytes, frozenset[str], frozenset[str]], None]) -> None:
        self._changed = changed
        self._keys: defaultdict[str, set[bytes]] = defaultdict(set)
        self._words: defaultdict[int, dict[bytes, frozenset[str]]] = defaultdict(dict)

    def find(self, words: frozenset[str]) -> set[bytes]:
        """The keys that have all of these words, at least one."""
        return set.intersection(*(self._keys[word] for word in words))

    def put(self, partition: int, key: bytes, words: frozenset[str]) -> None:
        """Have the key stand for these words; none removes it."""
        before = self._words[partition].pop(key, NO_WORDS)
        for word in before - words:
            self._keys[word].discard(key)
            if not self._keys[word]:
                # Words that nothing has any more must not pile up.
                del self._keys[word]
        for word in words - before:
            self._keys[word].add(key)
        if words:
            self._words[partition][key] = words
        self._changed(key, before, words)

    async def handle(self, change: Change) -> None:
        """Take in one change. An index elsewhere would be waited for here."""
        text = "" if change.value is None else change.value.decode()
        self.put(change.partition, change.key, frozenset(re.findall(r"\w+", text.lower())))

    def give_up(self, change: Change, error: Exception) -> None:
        """Take a change that cannot be handled: the key is not found any more."""
        say(f"{change.key!r} at seqno {change.seqno} of partition {change.partition}: {error}")
        self.put(change.partition, change.key, NO_WORDS)

    def forget(self, rollback: Rollback) -> None:
        """Empty a partition; with the policy "restart" all of it comes again."""
        say(f"partition {rollback.partition}: anew, {rollback.words}")
        for key in list(self._words[rollback.partition]):
            self.put(rollback.partition, key, NO_WORDS)


async def follow(options: argparse.Namespace) -> None:
    """Index until the end, or until cancelled."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    wanted = frozenset(word.lower() for word in options.words)

    def changed(key: bytes, before: frozenset[str], after: frozenset[str]) -> None:
        was, now = wanted <= before, wanted <= after
        if was != now and not options.until_now:
            put(f"{'+' if now else '-'} {key.decode(errors='replace')}")

    index = Index(changed)
    async with AsyncClient(options.target) as client:
        bucket = client.bucket(options.bucket)
        # An error when there is no server. Once this was answered, a server that is away is waited for.
        await client.admin.partitions(bucket, [0])
        changes = bucket.changes(
            until="now" if options.until_now else None,
            acknowledge="manual",
            on_rollback="restart",
            on_status=say,
        )
        async with changes:
            await changes.run(
                index.handle,
                order="key",
                concurrency=16,
                retries=1,
                dead_letter=index.give_up,
                on_rollback_event=index.forget,
            )
    for key in sorted(index.find(wanted)):
        put(key.decode(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Search the values of a bucket for words.")
    parser.add_argument("--target", default="127.0.0.1:7711", help="HOST:PORT of the server")
    parser.add_argument("--bucket", default="default")
    parser.add_argument("--until-now", action="store_true", help="print what there is, and end")
    parser.add_argument("words", nargs="+", metavar="WORD")
    try:
        asyncio.run(follow(parser.parse_args()))
    except asyncio.CancelledError:
        say("stopped")
    except UprError as error:
        say(f"search_index: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
