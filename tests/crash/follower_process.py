"""A process that follows with the SDK, for tests that stop and kill it: ``python -m tests.crash.follower_process``.

It says on stdout, a JSON line each, what it is told about its calls and how far it is. A line on stdin is a list of the
1024 seqnos at which it has everything; when it has, it says what it holds and ends.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from upr_client import AsyncClient, ChangeBatch, Tuning
from upr_protocol.limits import PARTITIONS


def digest(state: Mapping[bytes, bytes]) -> str:
    """What two sides compare instead of their states."""
    total = hashlib.sha256()
    for key in sorted(state):
        total.update(b"%d %d " % (len(key), len(state[key])) + key + state[key])
    return total.hexdigest()


def say(**fields: Any) -> None:
    """Print one line."""
    print(json.dumps(fields), flush=True)


class Follower:
    """What the process has."""

    def __init__(self) -> None:
        self.state: dict[bytes, bytes] = {}
        self.reached = [0] * PARTITIONS
        self.goal: list[int] | None = None
        self.there = asyncio.Event()

    def take(self, batch: ChangeBatch) -> None:
        """Apply a batch."""
        for change in batch.changes:
            if change.value is None:
                self.state.pop(change.key, None)
            else:
                self.state[change.key] = change.value
        for block in batch.blocks:
            for partition, end in block.runs[["partition", "end_seqno"]].tolist():
                self.reached[partition] = end
        say(rows=sum(self.reached))
        self.look()

    def look(self) -> None:
        """See whether everything is there."""
        if self.reached == self.goal:
            self.there.set()


async def follow(follower: Follower, target: str, credit: int, heartbeat: float) -> None:
    """Follow for ever."""
    async with (
        AsyncClient(target, connect_timeout=1.0, retry_seconds=None) as client,
        client.bucket().changes(
            tuning=Tuning(credit_bytes=credit, heartbeat_seconds=heartbeat),
            on_status=lambda words: say(status=words),
        ) as changes,
    ):
        async for batch in changes.batches():
            follower.take(batch)


async def main(target: str, credit: int, heartbeat: float) -> None:
    """Follow until everything is there."""
    follower = Follower()
    following = asyncio.create_task(follow(follower, target, credit, heartbeat))
    follower.goal = json.loads(await asyncio.to_thread(sys.stdin.readline))
    follower.look()
    await follower.there.wait()
    say(digest=digest(follower.state))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
