"""Writes undone, in plain words: a follower sees them before the disk has them, and the server is killed.

Run by ``tools/dev.py demo``. The server's journal is held back before the last writes, so that they are in its memory
and at the follower, and nowhere else. After the kill the follower is told how far to go back. At the end it is
compared with the server, row by row.
"""

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from tools.demo import WAIT_SECONDS, failover_log, put_away, say, tell, until
from tools.demo_failover import FIRST, KEPT, LOST, PARTITION, Follower, followed, keys, rows_of
from upr_client import AsyncClient
from upr_client.testing import ServerProcess
from upr_client.types import AsyncBucket

AGAIN = 10
"""Rows written after the crash: more than were lost, so that the same seqnos have other rows."""
NOW = KEPT + AGAIN


def picture(*lines: tuple[str, int, str]) -> None:
    """Print how far each one is, in plain characters: its name, seqno, and a remark. A new history is drawn with ``+``."""
    for name, seqno, remark in lines:
        marks = [(FIRST, "="), (KEPT, "="), (NOW, "+") if seqno == NOW else (LOST, "=")]
        bar = " ".join(f"{sign * 9} {mark}" for mark, sign in marks if mark <= seqno)
        print(f"            {name:<13} {bar:<42} {remark}".rstrip(), flush=True)


class Undone:
    """One run, with one server, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold"
        held = {"UPR_FAILPOINTS": f"journal.before_append=hold:{self._hold}"}
        self.server = ServerProcess(folder / "data", environment=held)
        self._keys = keys()
        self._follower = Follower()

    async def run(self) -> bool:
        """Tell the whole story; return whether the follower has what the server has in the end."""
        await asyncio.to_thread(self.server.start)
        say(f"server    started on {self.server.target}, with an empty data directory")
        async with AsyncClient(self.server.target, retry_seconds=WAIT_SECONDS) as client:
            bucket = client.bucket()
            async with followed(bucket, self._follower, "memory"):
                await self._write(bucket)
                await self._crash(client)
                return await self._go_on(bucket)

    def _has(self, seqno: int) -> bool:
        return self._follower.seqno == seqno

    async def _write(self, bucket: AsyncBucket) -> None:
        """Write up to LOST, with a snapshot marker for the follower at each step; the last step misses the disk."""
        say(
            f"follower  follows partition {PARTITION}, and wants each write at once: before it is on the disk"
        )
        for first, last in ((0, FIRST), (FIRST, KEPT)):
            await bucket.write_many([(key, b"written") for key in self._keys[first:last]])
            await until(partial(self._has, last))
        say(
            f"writer    {KEPT} mutations acknowledged; {FIRST} and {KEPT} are snapshot markers: complete states"
        )
        self._hold.touch()
        lost = [(key, b"lost") for key in self._keys[KEPT:LOST]]
        await bucket.write_many(lost, "memory")
        await until(lambda: self._follower.seqno == LOST)
        say(f"writer    {LOST - KEPT} more, acknowledged from memory, while the disk is held back")
        picture(("on the disk", KEPT, ""), ("in memory", LOST, ""), ("follower", LOST, ""))

    async def _crash(self, client: AsyncClient) -> None:
        self.server.kill()
        say(f"server    SIGKILL to process {self.server.pid}: what was in memory only is gone")
        self._hold.unlink()
        await asyncio.to_thread(self.server.start)
        say("server    started again, on the same data")
        log = await failover_log(client, PARTITION)
        say(f"          its failover log has a new record, at {KEPT}: {', '.join(map(str, log))}")
        picture(
            ("server", KEPT, ""),
            ("follower", LOST, f"{LOST - KEPT} that never happened"),
        )

    async def _go_on(self, bucket: AsyncBucket) -> bool:
        # At the first marker it is rolled back, at the second it has again what the disk had.
        await until(lambda: bool(self._follower.undone) and self._follower.seqno == KEPT)
        undone = len(self._follower.undone)
        picture(("follower", FIRST, f"{undone} undone, {FIRST + 1} to {LOST}"))
        say(f"follower  received {FIRST + 1} to {KEPT} again, as they are on the disk")
        again = [(key, b"another") for key in self._keys[KEPT:NOW]]
        await bucket.write_many(again)
        await until(lambda: self._follower.seqno == NOW)
        say(
            f"writer    {AGAIN} other mutations: the same seqnos from {KEPT + 1} on, another history"
        )
        picture(("server", NOW, ""), ("follower", NOW, ""))
        equal = await rows_of(bucket) == self._follower.rows and len(self._follower.rows) == NOW
        words = (
            f"has the same {NOW} mutations as the server" if equal else "DIFFERS from the server"
        )
        say(f"RESULT    {undone} mutations were undone, and the follower {words}")
        return equal


async def demonstrate(folder: Path) -> bool:
    """Run it in a folder; return whether it ended well."""
    story = Undone(folder)
    try:
        return await story.run()
    finally:
        put_away(story.server)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return tell(demonstrate)


if __name__ == "__main__":
    sys.exit(main())
