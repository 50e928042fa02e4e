"""Honest clients beside hostile ones: what 10 followers and 2 writers keep of their rate, and the server's memory.

``dev.py bench hostile`` ends with status 1 where an attack takes more than it may. The honest load and each attack are processes of their own, the attack at ``nice 19``; each
attack has a server of its own, which the honest load has to itself before and after it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.harness import RunningServer
from tools.bench.attacks import ATTACKS, GUARDED
from tools.bench.common import process_cpu, say, server
from upr.service.access.identities import add_identity
from upr_client import AsyncClient
from upr_client.types import AsyncBucket
from upr_protocol.errors import UprError

WRITERS: Final = 2
FOLLOWERS: Final = 10
BATCHES_A_SECOND: Final = 20
ROWS: Final = 50
"""1,000 rows a second and writer."""
IN_FLIGHT: Final = 60
"""Batches of a writer that wait for their answer at most: a rate, not a delay, is what is measured."""
KEYS: Final = 20_000
PREFIX: Final = b"honest-"
SLOT_SECONDS: Final = 0.5
BEFORE_SECONDS: Final = 6.0
AFTER_SECONDS: Final = 8.0
ENOUGH: Final = 0.8
BACK_SECONDS: Final = 4.0
ANONYMOUS_MIB: Final = 512


@dataclass(slots=True)
class Outcome:
    """One attack.

    Attributes:
        written, followed: the share of the rate before that was kept during the attack.
        write_p50, write_p99: of a write's answer during the attack, milliseconds.
        back_seconds: until a slot after the attack reached ENOUGH of the rate before; None: it did not.
        sync_ms: the longest fsync of a few bytes in a file of its own, on the same disk, during the attack.
        anonymous_mib: the server's largest RssAnon.
        attacker_cpu, server_cpu: cores during the attack.
    """

    attack: str
    written: float
    followed: float
    write_p50: float
    write_p99: float
    back_seconds: float | None
    sync_ms: float
    anonymous_mib: int
    attacker_cpu: float
    server_cpu: float


def missed(one: Outcome) -> list[str]:
    """Return what an attack takes more of than it may, in words."""
    found = [
        f"{share:.0%} of what is {what} was left; must be at least {ENOUGH:.0%}"
        for share, what in ((one.written, "written"), (one.followed, "followed"))
        if share < ENOUGH
    ]
    if one.anonymous_mib > ANONYMOUS_MIB:
        found.append(f"the server took {one.anonymous_mib} MiB; must be at most {ANONYMOUS_MIB}")
    if one.back_seconds is None or one.back_seconds > BACK_SECONDS:
        back = "not back" if one.back_seconds is None else f"back after {one.back_seconds:.1f} s"
        found.append(f"the rate was {back}; must be within {BACK_SECONDS:g} s")
    return [f"{one.attack}: {words}" for words in found]


# The honest load: a process that prints a line for each slot of time.


async def honest(target: str) -> None:
    """Write and follow until the process is killed; print (time, rows acknowledged, rows followed, delays)."""
    acknowledged = 0
    followed = 0
    delays: list[float] = []
    token = os.environ.get("UPR_TOKEN")
    places = asyncio.Semaphore(WRITERS * IN_FLIGHT)

    async def send(bucket: AsyncBucket, rows: list[tuple[bytes, bytes]]) -> None:
        nonlocal acknowledged
        began = time.monotonic()
        try:
            await bucket.write_many(rows)
        except UprError:
            return
        finally:
            places.release()
        acknowledged += ROWS
        delays.append((time.monotonic() - began) * 1000)

    async def write(number: int) -> None:
        async with AsyncClient(target, token=token) as client, asyncio.TaskGroup() as sending:
            bucket = client.bucket()
            at = time.monotonic()
            for batch in itertools.count():
                # What was missed is made up for, a second of it at most.
                at = max(at + 1 / BATCHES_A_SECOND, time.monotonic() - 1)
                await asyncio.sleep(max(at - time.monotonic(), 0))
                first = batch * ROWS
                rows = [
                    (PREFIX + b"%d-%d" % (number, row % KEYS), b"x" * 128)
                    for row in range(first, first + ROWS)
                ]
                await places.acquire()
                sending.create_task(send(bucket, rows))

    async def follow() -> None:
        nonlocal followed
        while True:
            try:
                async with (
                    AsyncClient(target, token=token) as client,
                    client.bucket().changes(start="now") as changes,
                ):
                    async for batch in changes.batches():
                        # Not decoded: ten followers in one process would be the limit themselves.
                        followed += sum(block.keys.count(PREFIX) for block in batch.blocks)
            except UprError:
                await asyncio.sleep(0.1)

    async def tell() -> None:
        nonlocal acknowledged, followed
        while True:
            await asyncio.sleep(SLOT_SECONDS)
            print(json.dumps([time.monotonic(), acknowledged, followed, delays]), flush=True)
            acknowledged = followed = 0
            delays.clear()

    loads = [write(number) for number in range(WRITERS)] + [follow() for _ in range(FOLLOWERS)]
    await asyncio.gather(tell(), *loads)


@dataclass(frozen=True, slots=True)
class _Slot:
    at: float
    acknowledged: int
    followed: int
    delays: list[float]


class _Watch:
    """Reads the honest process's lines, the server's memory and the disk's delays, in threads."""

    def __init__(self, running: RunningServer, token: str) -> None:
        self.slots: list[_Slot] = []
        self.anonymous_kib = 0
        self.syncs: list[tuple[float, float]] = []
        self._pid = running.pid
        self._done = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.hostile", "--honest", running.target],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({"UPR_TOKEN": token} if token else {}),
        )
        runs = (self._read, self._look, self._sync)
        self._threads = [threading.Thread(target=run) for run in runs]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.slots.append(_Slot(*json.loads(line)))

    def _look(self) -> None:
        while not self._done.wait(0.05):
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.anonymous_kib = max(self.anonymous_kib, int(line.split()[1]))

    def _sync(self) -> None:
        """Note when fsyncs of a file that nothing else writes began, and the seconds that each took."""
        with tempfile.TemporaryFile() as file:
            while not self._done.wait(0.25):
                began = time.monotonic()
                os.pwrite(file.fileno(), b"probe", 0)
                os.fsync(file.fileno())
                self.syncs.append((began, time.monotonic() - began))

    def close(self) -> None:
        """End the honest load."""
        self._process.kill()
        self._process.wait()
        self._done.set()
        for thread in self._threads:
            thread.join()


def measure(attack: str, seconds: float) -> Outcome:
    """Run one attack beside the honest load on a new server."""
    # What the attack before has left to be written would be in the way of this one's fsyncs.
    os.sync()
    options, token = [], ""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if attack in GUARDED:
            file = Path(folder) / "identities"
            token = add_identity(file, "honest", {"read": None, "write": None})
            options = ["--tokens", str(file)]
        running = stack.enter_context(server(*options))
        watch = _Watch(running, token)
        try:
            while sum(slot.followed > 0 for slot in watch.slots) < 4:
                time.sleep(SLOT_SECONDS)
            time.sleep(BEFORE_SECONDS)
            began, server_began = time.monotonic(), process_cpu(running.pid)
            before = [slot for slot in watch.slots if slot.at > began - BEFORE_SECONDS + 1]
            hostile = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.attacks", attack, running.target],
                stderr=subprocess.DEVNULL,
            )
            time.sleep(seconds)
            attacker_cpu = process_cpu(hostile.pid)
            server_cpu = process_cpu(running.pid) - server_began
            ended = time.monotonic()
            hostile.kill()
            hostile.wait()
            time.sleep(AFTER_SECONDS)
        finally:
            watch.close()
    # The attacker's interpreter starts for about a second.
    during = [slot for slot in watch.slots if began + 1.5 < slot.at <= ended]
    after = [slot for slot in watch.slots if slot.at > ended + SLOT_SECONDS]
    usual = statistics.mean(slot.acknowledged for slot in before)
    usual_followed = statistics.mean(slot.followed for slot in before)
    delays = sorted(delay for slot in during for delay in slot.delays) or [float("inf")]
    back = next(
        (
            slot.at - ended
            for slot in after
            if slot.acknowledged >= ENOUGH * usual and slot.followed >= ENOUGH * usual_followed
        ),
        None,
    )
    return Outcome(
        attack,
        statistics.mean(slot.acknowledged for slot in during) / usual,
        statistics.mean(slot.followed for slot in during) / usual_followed,
        delays[len(delays) // 2],
        delays[int(len(delays) * 0.99)],
        back,
        max((took for at, took in watch.syncs if began < at <= ended), default=0.0) * 1000,
        watch.anonymous_kib // 1024,
        attacker_cpu / seconds,
        server_cpu / seconds,
    )


def main() -> int:
    reader = argparse.ArgumentParser(prog="tools/dev.py bench hostile", description=__doc__)
    reader.add_argument("--only", action="append", choices=list(ATTACKS), help="of the attacks")
    reader.add_argument("--seconds", type=float, default=10.0, help="of each attack (default: 10)")
    reader.add_argument("--json", action="store_true", help="one JSON document")
    reader.add_argument("--honest", metavar="HOST:PORT", help=argparse.SUPPRESS)
    options = reader.parse_args()
    if options.honest:
        asyncio.run(honest(options.honest))
        return 0
    outcomes: list[Outcome] = []
    head = f"{'attack':<20}{'written':>8}{'followed':>9}{'p50 ms':>8}{'p99 ms':>8}{'back s':>7}{'sync ms':>8}{'MiB':>6}{'attacker':>9}{'server':>7}"
    if not options.json:
        print(head, flush=True)
    for attack in options.only or ATTACKS:
        one = measure(attack, options.seconds)
        outcomes.append(one)
        say(f"{attack}: {one.written:.0%} of the writes")
        if not options.json:
            back = "never" if one.back_seconds is None else f"{one.back_seconds:.1f}"
            print(
                f"{one.attack:<20}{one.written:>8.0%}{one.followed:>9.0%}{one.write_p50:>8.0f}{one.write_p99:>8.0f}"
                f"{back:>7}{one.sync_ms:>8.0f}{one.anonymous_mib:>6}{one.attacker_cpu:>9.2f}{one.server_cpu:>7.2f}",
                flush=True,
            )
    if options.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=1))
    wrong = [words for one in outcomes for words in missed(one)]
    for words in wrong:
        print(f"error: {words}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
