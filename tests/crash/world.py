"""One real server with SDK clients that keep going whatever happens, and a history of what they saw.

Each writer has one write under way, so that every row's place is known from an answer. ``World.settle`` compares
everybody with the reference model, and validates the history.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from tests.crash.clients import RECORDED, Follower, Moved, Writer
from tests.crash.recording import PARTITIONS, Log
from tests.guarantees import (
    applied_once,
    convergence,
    durability,
    identity,
    log_sanity,
    marker_truth,
    no_hole,
    order,
    tombstones,
    validate,
)
from tests.harness import WAIT_SECONDS, RunningServer
from tests.history import Event, History
from tests.model import ModelBucket, partition_of
from tests.raw import OWN_CONNECTION, RawClient
from upr_client import AsyncClient, Client
from upr_client.errors import ClosedError
from upr_client.types import Changes
from upr_protocol.wire.grpc import CLIENT_OPTIONS
from upr_protocol.wire.v1 import admin_service_pb2 as admin

SEEN_WHOLE = (
    identity,
    order,
    marker_truth,
    no_hole,
    durability,
    log_sanity,
    convergence,
    tombstones,
    applied_once,
)
"""What can be validated of what an application sees; the others are about messages of the wire."""
OPTIONS = [
    *(o for o in CLIENT_OPTIONS if o[0] != "grpc.max_reconnect_backoff_ms"),
    ("grpc.max_reconnect_backoff_ms", 100),
    *OWN_CONNECTION,
]
"""What the SDK gives to its channel, but that they try to connect again sooner."""
CONNECT_SECONDS = 1.0


class World:
    """One server with its clients; used with ``async with``, which ends them all.

    Attributes:
        history: see ``tests/history.py``.
        model: which row each partition has at each seqno, from the answers to writers.
    """

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.moved = Moved()
        self.history: History = []
        self.followers: list[Follower] = []
        self.writers: list[Writer] = []
        self.stopping = False
        self.rows: list[dict[int, tuple[bytes, bytes | None]]] = [{} for _ in range(PARTITIONS)]
        self._tasks: list[asyncio.Task[None]] = []
        self._writing: list[asyncio.Task[None]] = []
        self._threads: list[tuple[threading.Thread, list[Changes]]] = []
        self.logs: list[Log] = []

    async def __aenter__(self) -> "World":
        async with RawClient(self.server.target) as client:
            self.logs = await client.logs()
        self.history.append(
            {"event": "opened", "logs": {p: self.logs[p] for p in sorted(RECORDED)}}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for thread, opened in self._threads:
            for changes in opened:
                await asyncio.to_thread(changes.close)
            await asyncio.to_thread(thread.join, WAIT_SECONDS)

    # Clients

    def follow(self, target: str = "", **options: Any) -> Follower:
        """Begin to follow with the asyncio flavour; ``recorded`` is that of ``Follower``."""
        follower = self._follower(options.pop("recorded", True))

        async def run() -> None:
            bucket_options = follower.options(**options)
            async with (
                self.client(target) as client,
                client.bucket().changes(**bucket_options) as changes,
            ):
                async for batch in changes.batches():
                    follower.take(batch)

        self._start(run(), follower)
        return follower

    def follow_in_thread(self, target: str = "", **options: Any) -> Follower:
        """Begin to follow with the flavour for threads, as ``follow``."""
        follower = self._follower(options.pop("recorded", True))
        opened: list[Changes] = []

        def run() -> None:
            address = target or self.server.target
            try:
                with (
                    grpc.insecure_channel(address, OPTIONS) as channel,
                    Client(
                        address,
                        connect_timeout=CONNECT_SECONDS,
                        retry_seconds=None,
                        channel=channel,
                    ) as client,
                    client.bucket().changes(**follower.options(**options)) as changes,
                ):
                    opened.append(changes)
                    for batch in changes.batches():
                        follower.take(batch)
            except ClosedError:
                return
            except BaseException as error:
                follower.failure = error
                self.moved.tell()

        thread = threading.Thread(target=run, name=follower.name, daemon=True)
        thread.start()
        self._threads.append((thread, opened))
        return follower

    def _follower(self, recorded: bool) -> Follower:
        follower = Follower(self, f"follower {len(self.followers)}", recorded)
        self.followers.append(follower)
        return follower

    def write(self, target: str = "", seed: int = 0) -> Writer:
        """Begin to write."""
        writer = Writer(self, f"writer {len(self.writers)}", seed)
        self.writers.append(writer)

        async def run() -> None:
            async with self.client(target) as client:
                await writer.run(client.bucket(producer=writer.name))

        self._start(run(), None)
        self._writing.append(self._tasks[-1])
        return writer

    def _start(self, work: Any, follower: Follower | None) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                if follower is None:
                    raise
                follower.failure = error
            finally:
                self.moved.tell()

        self._tasks.append(asyncio.create_task(run()))

    @asynccontextmanager
    async def client(self, target: str = "") -> AsyncIterator[AsyncClient]:
        """An SDK client with a connection of its own, that never gives up."""
        address = target or self.server.target
        async with (
            grpc.aio.insecure_channel(address, OPTIONS) as channel,
            AsyncClient(
                address, connect_timeout=CONNECT_SECONDS, retry_seconds=None, channel=channel
            ) as client,
        ):
            yield client

    # What is told

    def sent(self, producer: str, number: int, rows: list[tuple[bytes, bytes | None]]) -> None:
        """A write is on its way."""
        placed = [(partition_of(key), key, value) for key, value in rows]
        placed = [row for row in placed if row[0] in RECORDED]
        self.history.append(
            {"event": "sent", "producer": producer, "number": number, "rows": placed}
        )

    def acknowledged(
        self,
        producer: str,
        number: int,
        rows: list[tuple[bytes, bytes | None]],
        runs: list[tuple[int, int, int, int]],
    ) -> None:
        """A write was answered: each of its rows has a place, which nothing else has."""
        mine: dict[int, list[tuple[bytes, bytes | None]]] = {}
        for row in rows:
            mine.setdefault(partition_of(row[0]), []).append(row)
        assert {p for p, _, _, _ in runs} == mine.keys()
        for p, start, end, _ in runs:
            assert end - start == len(mine[p]), (producer, number, p, start, end)
            for seqno, row in enumerate(mine[p], start + 1):
                other = self.rows[p].setdefault(seqno, row)
                assert other is row, f"{p}/{seqno} was given to {row} and {other}"
        self.history.append(
            {
                "event": "acknowledged",
                "producer": producer,
                "number": number,
                "durability": "disk",
                # The SDK does not tell whether it had to send again, and what counts is where the rows are.
                "duplicate": False,
                "runs": [(p, i, start, end) for p, start, end, i in runs if p in RECORDED],
            }
        )

    async def restart(
        self, *, clean: bool = False, between: Callable[[], None] | None = None
    ) -> None:
        """End the server, by SIGKILL or in good order, and start it again, while its clients try and try."""
        if clean:
            status = await asyncio.to_thread(self.server.terminate)
            assert status == 0, f"it ended with {status}:\n{self.server.log_text()}"
        else:
            self.server.kill()
        # Here, because the clients are writing and reading again before the logs are known. What was on its way
        # to them was durable, and is the same in both branches.
        place = len(self.history)
        if between is not None:
            between()
        await asyncio.to_thread(self.server.start)
        event = await self._restarted(clean)
        self.history.insert(place, event)

    async def _restarted(self, clean: bool) -> Event:
        before = self.logs
        async with RawClient(self.server.target) as client:
            self.logs = await client.logs()
            infos = await client.partitions()
        partitions = {}
        for p in sorted(RECORDED):
            after = self.logs[p]
            # With a new record it says how far the partition was; what is asked now is more already.
            high = infos[p].high_seqno if after == before[p] else after[-1][1]
            partitions[p] = {
                "before": before[p],
                "after": after,
                "high": None,
                "durable": None,
                "high_after": high,
                "purge": infos[p].purge_seqno,
            }
        return {"event": "restart", "clean": clean, "partitions": partitions}

    # What must be so

    async def more_writes(self, count: int) -> None:
        """Wait until each writer was answered so many times more."""
        wanted = [(writer, writer.answered + count) for writer in self.writers]
        await self.moved.until(
            lambda: (
                any(task.done() for task in self._writing)
                or all(writer.answered >= number for writer, number in wanted)
            ),
            f"{count} more answers: {[(w.name, w.answered, n) for w, n in wanted]}",
        )
        for task in self._writing:
            if task.done():
                task.result()

    async def gets_on(self, client: Follower | Writer, count: int = 1) -> None:
        """Wait until a follower gets, or a writer is answered, so many times more."""
        wanted = client.done + count
        await self.moved.until(lambda: client.done >= wanted, f"{client.name} gets on")

    async def says(self, follower: Follower, words: str, since: int = 0) -> None:
        """Wait for a status line of the SDK."""
        await self.moved.until(lambda: follower.said(words, since), f"{follower.name}: {words}")

    async def status(self) -> admin.GetStatusResponse:
        """The server's status."""
        async with RawClient(self.server.target) as client:
            answer: admin.GetStatusResponse = await client.admin.GetStatus(
                admin.GetStatusRequest(), timeout=WAIT_SECONDS
            )
        return answer

    async def settle(self) -> None:
        """Let the writers finish, and wait until every follower has everything."""
        self.stopping = True
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*self._writing)
        async with RawClient(self.server.target) as client:
            high = [info.high_seqno for info in await client.partitions()]
        for follower in self.followers:
            await self._read_to(follower, high)
        self._check(high)

    async def _read_to(self, follower: Follower, high: list[int]) -> None:
        """Wait until a follower has everything, for as long as it gets on."""
        while follower.failure is None and not follower.has(high):
            batches, said = follower.batches, follower.statuses[-1:]
            await self.moved.until(
                partial(_moved, follower, batches),
                f"{follower.name} gets on; {sum(high) - sum(follower.reached)} seqnos are missing, it said {said}",
            )
        if follower.failure is not None:
            raise AssertionError(f"{follower.name} failed") from follower.failure

    def _check(self, high: list[int]) -> None:
        model = ModelBucket()
        for p, rows in enumerate(self.rows):
            # Nothing was applied twice, and nothing was lost that was acknowledged.
            assert sorted(rows) == list(range(1, high[p] + 1)), f"partition {p}"
            for seqno in sorted(rows):
                assert model.write(*rows[seqno]) == (p, seqno)
        truth = model.state()
        for follower in self.followers:
            state = follower.state()
            wrong = {k for k in state.keys() | truth.keys() if state.get(k) != truth.get(k)}
            assert not wrong, f"{follower.name}: {sorted(wrong)[:5]}"
            assert not follower.positions.wrong, f"{follower.name}: a position went back"
        self.history.append(
            {
                "event": "settled",
                "readers": [f.name for f in self.followers if f.recorded],
                "high": {p: high[p] for p in sorted(RECORDED)},
            }
        )
        validate(self.history, SEEN_WHOLE)


def _moved(follower: Follower, batches: int) -> bool:
    return follower.failure is not None or follower.batches > batches
