"""A failover in plain words: an active server dies, its replica is promoted, a follower undoes what never happened.

Run by ``tools/dev.py demo --failover``. The replica is stopped before the active server dies, and gets only a part
of what a follower has seen. After the promotion the follower, the former active server and the new one are
compared, row by row.
"""

import argparse
import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.demo import WAIT_SECONDS, put_away, say, tell, until
from upr_client import AsyncClient, ChangeBatch, Only, Rollback, Tuning
from upr_client.testing import ServerProcess
from upr_client.types import AsyncBucket
from upr_protocol.errors import UprError
from upr_protocol.partitioning import partition_of

FIRST, KEPT, LOST = 418, 426, 434
"""Where the replica is for sure, where it is held up, and how far the follower sees."""
MORE = 10
"""Rows written after the promotion."""
PARTITION = partition_of(b"order")
FILLER = b"filler"
assert partition_of(FILLER) != PARTITION


def keys() -> list[bytes]:
    """Return keys of one partition, in which everything happens."""
    numbered = (b"order-%d" % number for number in itertools.count())
    of_it = (key for key in numbered if partition_of(key) == PARTITION)
    return list(itertools.islice(of_it, LOST + MORE))


@dataclass
class Follower:
    """What a follower keeps of the partition: each row under its seqno; and the seqnos of those that it undid."""

    rows: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    undone: list[int] = field(default_factory=list)

    @property
    def seqno(self) -> int:
        """Up to where it has everything."""
        return max(self.rows, default=0)

    def apply(self, batch: ChangeBatch) -> None:
        """Keep a batch of changes."""
        for _, seqno, _, key, value in batch.changes:
            self.rows[seqno] = key, value

    def undo(self, rollback: Rollback) -> None:
        """Forget what lies above the rollback's seqno."""
        above = [seqno for seqno in self.rows if seqno > rollback.seqno]
        for seqno in above:
            del self.rows[seqno]
        self.undone += above
        say(f"follower  {rollback.words}")
        say(
            f"          it goes back to its snapshot marker {rollback.seqno}, and undoes {len(above)} mutations"
        )


async def until_true(ask: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a server says what is waited for; TimeoutError when it did not in time."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                if await ask():
                    return
            except UprError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(0.05)


async def is_in_step(client: AsyncClient) -> bool:
    """Return whether a replica has all that its upstream told of."""
    followed = [bucket.upstream for bucket in (await client.admin.status()).buckets]
    return bool(followed) and all(one and one.in_step and not one.lag for one in followed)


async def counts_others(client: AsyncClient) -> bool:
    """Return whether an active server counts its replicas, and itself no more: what it acknowledges outlives it."""
    topology = await client.admin.topology()
    counted = [member.directory for member in topology.members if member.counted]
    return bool(counted) and topology.directory not in counted


async def rows_of(bucket: AsyncBucket) -> dict[int, tuple[bytes, bytes | None]]:
    """Return what a server has of the partition."""
    reader = Follower()
    async with bucket.changes(
        until="now", only=Only(partitions=[PARTITION]), read_from="any"
    ) as changes:
        async for batch in changes.batches():
            if isinstance(batch, ChangeBatch):
                reader.apply(batch)
    return reader.rows


@contextlib.asynccontextmanager
async def followed(
    bucket: AsyncBucket, follower: Follower, stability: str = "disk"
) -> AsyncIterator[None]:
    """Follow the partition beside the body; where that failed, what the body waited for did not happen because of it."""

    async def follow() -> None:
        changes = bucket.changes(
            only=Only(partitions=[PARTITION], stability=stability),
            tuning=Tuning(retry_seconds=WAIT_SECONDS),
            on_rollback=follower.undo,
        )
        async with changes:
            async for batch in changes.batches():
                follower.apply(batch)

    following = asyncio.create_task(follow())
    try:
        yield
    except UprError:
        if following.done() and (error := following.exception()) is not None:
            raise error from None
        raise
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class Failover:
    """One run, with a folder for each of two servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Those of later options are made when it is known where the other one listens.
        self.a, self.b = ServerProcess(folder / "a"), ServerProcess(folder / "b")
        self._keys = keys()
        self._follower = Follower()

    async def run(self) -> bool:
        """Tell the whole story; return whether all three have the same in the end."""
        await asyncio.to_thread(self.a.start)
        self.b = ServerProcess(self._folder / "b", ["--replicate-from", self.a.target])
        await asyncio.to_thread(self.b.start)
        say(f"servers   A at {self.a.target} is active, B at {self.b.target} is its replica")
        both = f"{self.a.target},{self.b.target}"
        async with (
            AsyncClient(both, retry_seconds=WAIT_SECONDS) as client,
            AsyncClient(self.a.target) as at_a,
            AsyncClient(self.b.target) as at_b,
        ):
            await until_true(lambda: is_in_step(at_b))
            await until_true(lambda: counts_others(at_a))
            async with followed(client.bucket(), self._follower):
                await self._lose(client.bucket(), at_b)
                await self._promote(client.bucket(), at_b)
                return await self._come_back(at_b)

    async def _write(
        self, bucket: AsyncBucket, first: int, last: int, value: bytes, durability: str = "disk"
    ) -> None:
        """Write one row for each seqno above ``first``, in one batch that ends in a snapshot marker."""
        await bucket.write_many([(key, value) for key in self._keys[first:last]], durability)

    async def _lose(self, bucket: AsyncBucket, at_b: AsyncClient) -> None:
        """Write what B gets, then what it does not get, and kill A."""
        await self._write(bucket, 0, FIRST, b"written")
        # Two snapshot markers for the follower, also when a frame could have held both writes.
        await until(lambda: self._follower.seqno == FIRST)
        # A replica is in step with what it was told of, which need not be the newest write.
        await self._write(bucket, FIRST, KEPT, b"written", "replicated(1)")
        await until(lambda: self._follower.seqno == KEPT)
        await until_true(lambda: is_in_step(at_b))
        say(f"writer    {KEPT} mutations of partition {PARTITION} acknowledged; A and B have them")
        self.b.pause()
        # More than every buffer between A and B holds, in another partition: what follows does not leave A.
        await bucket.set(FILLER, bytes(16 * 2**20))
        await self._write(bucket, KEPT, LOST, b"only A has this")
        await until(lambda: self._follower.seqno == LOST)
        say(
            f"writer    {LOST - KEPT} more, while B is stopped: A and the follower have {LOST}, B {KEPT}"
        )
        self.a.kill()
        say(f"A         SIGKILL to process {self.a.pid}; B goes on")
        self.b.resume()

    async def _promote(self, bucket: AsyncBucket, at_b: AsyncClient) -> None:
        say(f"operator  $ upr-admin promote --target {self.b.target}")
        done = await at_b.admin.promote()
        say(
            f"B         is active in epoch {done.epoch}; {done.records} partitions have a new failover record"
        )
        log = (await at_b.admin.failover_logs("default", [PARTITION]))[PARTITION]
        say(f"          the log of partition {PARTITION}: {', '.join(map(str, log))}")
        for _, partition, seqno, high in done.lost:
            say(
                f"          A was known to have {seqno + 1} to {high} of partition {partition}, too"
            )
        # The writer knows both servers, and finds the one that is active.
        await self._write(bucket, LOST, LOST + MORE, b"written at B")
        await until(lambda: bool(self._follower.undone) and self._follower.seqno == KEPT + MORE)
        say(
            f"writer    {MORE} mutations acknowledged by B; the follower has everything up to {KEPT + MORE}"
        )

    async def _come_back(self, at_b: AsyncClient) -> bool:
        again = ["--listen", self.a.target, "--replicate-from", self.b.target]
        put_away(self.a)
        self.a = ServerProcess(self._folder / "a", again)
        await asyncio.to_thread(self.a.start)
        say("A         started again, as a replica of B, on the data that it had")
        async with AsyncClient(self.a.target) as at_a:
            await until_true(lambda: is_in_step(at_a))
            data = self.a.directory
            command = [sys.executable, "-m", "upr.cli", "admin", "undone", "list", str(data)]
            say("operator  $ upr-admin undone list DATA_OF_A")
            told = await asyncio.to_thread(
                subprocess.run, command, stdout=subprocess.PIPE, text=True, check=True
            )
            for line in told.stdout.splitlines():
                say(f"          {line.replace(str(data), 'DATA_OF_A')}")
            states = [await rows_of(at_a.bucket()), await rows_of(at_b.bucket())]
        equal = states[0] == states[1] == self._follower.rows and len(states[0]) == KEPT + MORE
        if equal:
            say(f"RESULT    A, B and the follower have the same {KEPT + MORE} mutations")
        else:
            sizes = [len(state) for state in (*states, self._follower.rows)]
            say(f"RESULT    A, B and the follower DIFFER: {sizes} mutations")
        return equal


async def demonstrate(folder: Path) -> bool:
    """Run it in a folder; return whether it ended well."""
    story = Failover(folder)
    try:
        return await story.run()
    finally:
        put_away(story.a, story.b)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return tell(demonstrate)


if __name__ == "__main__":
    sys.exit(main())
