"""A member of a group, for tests that kill and pause it: ``python -m tests.client.group_member TARGET NAME LOG``.

It writes a line for each change that is handed to it: the time, the generation, partition and seqno. A line with
"begin" in place of them says that it takes SIGTERM, one with "end" that it ended by itself.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from upr_client import AsyncClient, Change, Group, Tuning

GROUP = "workers"
LEASE_SECONDS = 1.0


async def main(target: str, name: str, log: Path) -> None:
    """Follow until SIGTERM."""
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    with log.open("a", buffering=1) as out:
        out.write("begin\n")
        following = asyncio.create_task(follow(target, name, out.write))
        stopping = asyncio.create_task(leaving.wait())
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if not leaving.is_set():
            following.result()
        out.write("end\n")


async def follow(target: str, name: str, write: Callable[[str], object]) -> None:
    async with (
        AsyncClient(target, connect_timeout=1.0) as client,
        client.bucket().changes(
            resume=Group(GROUP, member=name, lease_seconds=LEASE_SECONDS),
            tuning=Tuning(heartbeat_seconds=0.2, save_seconds=0.1),
            on_rollback="event",
            on_status=lambda words: print(
                f"{time.time():.3f} {words}", file=sys.stderr, flush=True
            ),
        ) as changes,
    ):
        async for event in changes:
            if isinstance(event, Change):
                write(f"{time.monotonic()} {changes.generation} {event.partition} {event.seqno}\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
