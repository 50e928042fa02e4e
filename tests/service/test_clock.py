"""Time that is simulated, and steps of the day's clock: what was made ages by the time that passes, and by nothing else."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, poll
from tests.service.bucket_state import started
from tests.service.keys import some_keys
from tests.service.test_purging import ends, purge, write
from upr.config import ServerConfig
from upr.engine.consumers import Consumers
from upr.service import clock as clock_module
from upr.service.buckets.bucket_service import BucketService
from upr.service.buckets.keepers import expire_consumers
from upr.service.clock import CLOCK, Clock, Known, read_clock, write_clock
from upr.storage.store import Identity
from upr_client import AsyncClient
from upr_client.errors import CutNotFoundError
from upr_protocol.block import build_block

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
START = 20_000 * DAY
P = 9


class Time:
    """A machine's clocks. ``pass_`` is time that passes, ``step`` somebody who sets the day's clock."""

    def __init__(self) -> None:
        self.day, self.boot = START, 5 * HOUR

    def pass_(self, micros: int) -> None:
        self.day += micros
        self.boot += micros

    def run(self, clock: Clock, micros: int) -> None:
        """Let time pass, while the clock is asked every second."""
        for _ in range(micros // SECOND):
            self.pass_(SECOND)
            clock.now()

    def step(self, micros: int) -> None:
        self.day += micros

    def start(self, known: Known | None = None) -> Clock:
        return Clock(known, day=lambda: self.day, boot=lambda: self.boot)


@pytest.mark.parametrize("step", [DAY, -DAY, 400 * DAY, -400 * DAY])
def test_a_step_of_the_days_clock_makes_nothing_older(
    step: int, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    clock = time.start()
    assert clock.now() == START
    time.step(step)
    time.run(clock, HOUR)
    assert abs(clock.now() - START - HOUR) <= HOUR // 100 + SECOND
    assert abs(clock.before(HOUR) - START) <= HOUR // 100 + SECOND
    assert clock.jumped_seconds == 0
    assert clock.off_seconds == pytest.approx(step / SECOND, abs=60)
    assert ["is far from" in r.getMessage() for r in caplog.records] == [True]
    time.step(-step)
    time.run(clock, 10 * SECOND)
    assert clock.off_seconds == 0
    assert ["is near" in r.getMessage() for r in caplog.records] == [False, True]


def test_the_clock_never_goes_back_and_follows_the_days_clock_slowly() -> None:
    time = Time()
    clock = time.start()
    time.step(-30 * SECOND)
    before = clock.now()
    for _ in range(20_000):
        time.pass_(300_000)
        now = clock.now()
        assert 0.98 * 300_000 <= now - before <= 1.02 * 300_000
        before = now
    assert abs(clock.now() - time.day) < 0.1 * SECOND


def test_a_sleep_of_the_machine_is_time_that_passed() -> None:
    time = Time()
    clock = time.start()
    clock.now()
    time.pass_(3 * HOUR)
    assert abs(clock.now() - START - 3 * HOUR) <= SECOND


def test_a_short_absence_counts_at_once() -> None:
    time = Time()
    known = time.start().known()
    time.pass_(59 * MINUTE)
    clock = time.start(known)
    assert clock.now() == START + 59 * MINUTE
    assert clock.before(30 * MINUTE) == START + 29 * MINUTE
    assert clock.until(START + 30 * MINUTE, HOUR) == START + 30 * MINUTE
    assert (clock.jumped_seconds, clock.left_seconds) == (0, 0)


def test_a_long_absence_counts_when_the_server_has_run_for_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    known = time.start().known()
    time.pass_(2 * DAY)
    clock = time.start(known)
    assert clock.now() == START + 2 * DAY
    assert (clock.jumped_seconds, clock.left_seconds) == (2 * 86_400, 3600)
    assert "far ahead of the newest time" in caplog.text
    # What was made before it ages by the time that the server runs.
    assert clock.before(0) >= START
    assert clock.before(1) < START
    time.run(clock, 10 * MINUTE)
    assert clock.before(10 * MINUTE) >= START
    assert clock.before(11 * MINUTE) < START
    # What is made since is as old as it is.
    assert clock.before(5 * MINUTE) == START + 2 * DAY + 5 * MINUTE
    time.run(clock, 51 * MINUTE)
    assert (clock.jumped_seconds, clock.left_seconds) == (0, 0)
    assert clock.before(2 * DAY) >= START
    assert "counts from now on" in caplog.text


def test_leases_of_before_a_jump_end_by_the_time_that_the_server_runs() -> None:
    time = Time()
    known = time.start().known()
    time.step(DAY)
    clock = time.start(known)
    now = clock.now()
    # Ten minutes were left of the first; of the second more than an hour, but the jump takes it when it counts.
    assert clock.until(START + 10 * MINUTE, HOUR) == now + 10 * MINUTE
    assert clock.until(START + 3 * HOUR, 4 * HOUR) == now + HOUR
    assert clock.until(START + 30 * HOUR, 31 * HOUR) == START + 30 * HOUR
    assert clock.until(START - HOUR, HOUR) <= now


def test_a_restart_within_the_hour_begins_no_sooner(tmp_path: Path) -> None:
    time = Time()
    known = time.start().known()
    time.step(DAY)
    clock = time.start(known)
    time.run(clock, 20 * MINUTE)
    write_clock(tmp_path / CLOCK, clock.known())
    again = read_clock(tmp_path / CLOCK)
    clock = time.start(again)
    assert clock.left_seconds == pytest.approx(40 * 60, abs=2)
    assert clock.before(HOUR) < START
    time.step(DAY)
    clock = time.start(clock.known())
    assert clock.jumped_seconds == pytest.approx(2 * 86_400, abs=2)
    assert clock.left_seconds == 3600
    time.run(clock, 30 * MINUTE)
    assert clock.before(HOUR) < START


def test_a_clock_that_is_set_right_within_the_hour_makes_nothing_older(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    known = time.start().known()
    time.step(DAY)
    clock = time.start(known)
    time.run(clock, 10 * MINUTE)
    time.step(-DAY)
    clock = time.start(clock.known())
    # An hour and ten minutes were left of a lease of the time before, and of one of the jump's time.
    assert clock.until(START + 80 * MINUTE, DAY) - clock.now() == pytest.approx(
        70 * MINUTE, abs=2 * SECOND
    )
    end = clock.now() + 30 * MINUTE
    assert clock.until(end, 30 * MINUTE) == end
    time.run(clock, 3 * HOUR)
    # Three hours and ten minutes have passed, less the hundredth by which the clock goes back to the day's.
    assert clock.before(3 * HOUR) >= START
    assert clock.before(4 * HOUR) < START
    assert "counts from now on" not in caplog.text
    clock = time.start(clock.known())
    time.run(clock, 2 * HOUR)
    assert clock.before(6 * HOUR) < START


def test_a_clock_that_was_ahead_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Times go on from the newest that was stored, so that nothing is younger than it is, or comes from the future."""
    time = Time()
    known = replace(time.start().known(), time=START + DAY)
    clock = time.start(known)
    assert clock.now() == START + DAY
    assert clock.off_seconds == -86_400
    assert clock.jumped_seconds == 0
    time.run(clock, HOUR)
    assert START + DAY + 0.98 * HOUR < clock.now() < START + DAY + HOUR
    assert "is far from" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "number", "empty", "list", "deep", "negative"])
def test_of_a_damaged_file_nothing_is_known(tmp_path: Path, damage: str) -> None:
    path = tmp_path / CLOCK
    assert read_clock(path) is None
    write_clock(path, Known(START, 1, 2, 3))
    assert read_clock(path) == Known(START, 1, 2, 3)
    text = path.read_text()
    wrong = {
        "cut": text[:20],
        "number": text.replace(str(START), str(START + 1)),
        "empty": "",
        "list": "[1]",
        "deep": "[" * 4000,
        "negative": json.dumps({**json.loads(text), "time": -1}),
    }
    path.write_text(wrong[damage])
    assert read_clock(path) == Known(0)
    clock = Time().start(Known(0))
    assert clock.now() == START
    assert clock.before(1) <= 0
    assert clock.until(START - DAY, HOUR) == START + HOUR


@pytest.mark.asyncio
async def test_consumers_outlive_a_step_of_the_clock_and_an_hour_after_a_restart() -> None:
    time = Time()
    known = time.start().known()
    time.step(40 * DAY)
    clock = time.start(known)
    looks = iter([True, False] * 3)

    async def rest(_: float) -> bool:
        return next(looks)

    consumers = Consumers()
    seqnos = np.zeros(1, np.uint64)
    consumers.acknowledge("c", np.arange(1), seqnos, seqnos, START)
    bucket: Any = SimpleNamespace(
        owners=(), consumers={}, consumer_positions=consumers, identity=Identity("b", 1)
    )
    disk: Any = SimpleNamespace(clock=clock)
    time.run(clock, 50 * MINUTE)
    await expire_consumers(disk, bucket, 30 * 86_400, rest)
    assert "c" in consumers
    time.run(clock, 11 * MINUTE)
    await expire_consumers(disk, bucket, 41 * 86_400, rest)
    assert "c" in consumers
    await expire_consumers(disk, bucket, 30 * 86_400, rest)
    assert "c" not in consumers


# A bucket


def hosted(folder: Path, clock: Clock) -> BucketService:
    config = ServerConfig(data=folder, tombstone_seconds=3600.0, purge_hold_seconds=7200.0)
    return BucketService(folder, config, clock=clock)


async def look(host: BucketService) -> tuple[list[str], int]:
    """Have what is too old go; returns the cuts that are left and the purge seqno."""
    host.cuts._expire()
    await host.cuts.finish()
    await purge(host)
    live = host.bucket.cuts.live(host.disk.clock.now())
    return [cut.name for cut in live], int(host.bucket.partitions.purge[P])


@pytest.mark.asyncio
async def test_cuts_and_tombstones_outlive_steps_of_the_clock_and_an_hour_after_a_restart(
    folder: Path,
) -> None:
    time = Time()
    clock = time.start()
    host = hosted(folder, clock)
    gone, kept, last = some_keys(P, 3)
    await write(host, [(gone, b"v"), (kept, b"v")])
    await write(host, [(gone, None), (last, b"v")])
    await host.cuts.create("pinned", [0], 2 * HOUR)
    await host.cuts.create("short", [0], 30 * MINUTE)
    time.step(8 * DAY)
    assert await look(host) == (["pinned", "short"], 0)
    known = clock.known()
    assert await host.close()

    clock = time.start(known)
    host = hosted(folder, clock)
    assert await look(host) == (["pinned", "short"], 0)
    time.run(clock, 31 * MINUTE)
    await host.cuts.create("new", [0], 20 * MINUTE)
    assert await look(host) == (["pinned", "new"], 0)
    time.run(clock, 28 * MINUTE)
    assert await look(host) == (["pinned"], 0)
    time.run(clock, 2 * MINUTE)
    assert await look(host) == ([], 3)
    assert ends(host) == [4]
    assert await host.close()


@pytest.mark.asyncio
async def test_a_clock_set_back_before_a_start_does_not_put_the_flush_off(folder: Path) -> None:
    """A crash leaves the stored time behind what was dated."""
    time = Time()
    config = ServerConfig(data=folder, flush_seconds=0.05)
    host = started(BucketService(folder, config, clock=time.start()))
    written = await host.write(build_block([b"a"], [b"v"]), b"", None, 0)
    time.step(-2 * HOUR)
    host.disk.clock = time.start()
    await host.durable(written.entry)
    async with asyncio.timeout(WAIT_SECONDS):
        while host.bucket.tail.first <= written.entry:
            await host.disk.next_change()
    assert await host.close()


# A server


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_real_server_whose_hour_is_some_seconds(
    server_process: StartServer, tmp_path: Path
) -> None:
    """The day's clock is set forward by ten days while it runs, and before a start."""
    ahead = tmp_path / "ahead"
    options = ("--clock-jump", "3s", "--tombstone-age", "3600s", "--flush-seconds", "0.2")
    server = server_process(*options, environment={"UPR_FAILPOINTS": f"clock.day=number:{ahead}"})
    gone, kept = some_keys(P, 2)

    async def state(client: AsyncClient) -> tuple[list[str], int]:
        bucket = client.bucket("default")
        told = await client.admin.purge(bucket, [P])
        return [cut.name for cut in await client.admin.cuts(bucket)], sum(
            one.purged for one in told
        )

    async with AsyncClient(server.target) as client:
        bucket = client.bucket("default")
        await bucket.write_many([(gone, b"v"), (gone, None), (kept, b"v")])
        await client.admin.create_cut(bucket, "pinned", lease=3600)
        await bucket.changes(until="now", consumer="reader").__aenter__()
        await poll(partial(client.admin.storage, bucket), lambda told: not told.tail_bytes)
        ahead.write_text(str(10 * 86_400))
        await poll(client.admin.status, lambda told: told.clock_off_seconds >= 9 * 86_400)
        assert await state(client) == (["pinned"], 0)
        await client.admin.renew_cut(bucket, "pinned")
    server.kill()
    server.start()
    async with AsyncClient(server.target) as client:
        status = await client.admin.status()
        assert status.clock_off_seconds == 0
        assert status.clock_jumped_seconds == pytest.approx(10 * 86_400, abs=60)
        if status.clock_left_seconds > 1.5:
            assert await state(client) == (["pinned"], 0)
        await poll(client.admin.status, lambda told: not told.clock_left_seconds)
        # Now it counts: who was away for ten days has nothing left.
        await poll(partial(state, client), lambda found: not found[0])
        assert (await client.admin.status()).clock_jumped_seconds == 0
        with pytest.raises(CutNotFoundError):
            await client.admin.renew_cut("default", "pinned")
        of_p = partial(client.admin.partitions, "default", [P])
        await poll(of_p, lambda found: found[0].purge_seqno == 2)


def test_a_server_that_stops_cleanly_knows_when(server_process: StartServer) -> None:
    server = server_process()
    server.terminate()
    known = read_clock(server.data / CLOCK)
    assert known is not None
    assert abs(known.time - clock_module._day()) < 60 * SECOND
