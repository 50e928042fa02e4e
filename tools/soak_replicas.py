"""Failovers under load, world after world, each of ROUNDS rounds and compared at its end.

Run by ``tools/dev.py soak --replicas``. A world has three servers, writers at ``disk`` and ``replicated(1)``, and followers of all
stabilities. In each round a proxy holds one replica's link back and then the other's, the active server is killed, a
drawn replica is promoted, and the old one comes back as a replica. At the end all servers and followers are the same, no
write at ``replicated(1)`` is missing, each one at ``disk`` that was undone is kept, and no follower at ``replicated(1)``
was ever rolled back (``tests/replica/rounds.py``). With ``--join-bytes`` a replica first joins a server that has so much,
under writers, and is promoted after SIGKILL of that (``tests/replica/joining.py``). Between worlds two servers take over from
each other TAKEOVERS times (``tests/replica/test_owning.py``).
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import StartServer
from tests.harness import RunningServer
from tests.replica.joining import join
from tests.replica.rounds import Rounds
from tests.replica.test_owning import take_over
from tools.demo import say

ROUNDS = 20
TAKEOVERS = 20


@contextmanager
def starting(folder: Path) -> Iterator[StartServer]:
    """Give what starts a server; all are gone at the end."""
    servers: list[RunningServer] = []

    def start(*options: str, **more: Mapping[str, Any]) -> RunningServer:
        place = folder / str(len(servers))
        place.mkdir()
        servers.append(RunningServer(place, *options, **more))
        return servers[-1].start()

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def one_world(folder: Path, seed: int, ends: float) -> Counter[str]:
    """Run the rounds of one world, fewer if the time is over.

    Raises:
        AssertionError: something was not as it must be.
    """
    with starting(folder) as start:
        with Rounds(start, seed) as rounds:
            for number in itertools.count(1):
                rounds.run()
                if number == ROUNDS or time.monotonic() >= ends:
                    break
            rounds.check()
        return rounds.counts


def join_once(size: int) -> None:
    """Have a replica join a server with so many bytes.

    Raises:
        AssertionError: the replica lacks something.
    """
    with tempfile.TemporaryDirectory(prefix="upr-soak-") as folder, starting(Path(folder)) as start:
        written, seconds = join(start, size)
    say(f"joined {size} bytes in {seconds:.1f} s; {written} keys were written meanwhile: fine")


def main() -> int:
    """Return 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="tools/dev.py soak --replicas", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first world")
    parser.add_argument("--join-bytes", type=int, default=0, help="what a replica joins first")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    say(f"failovers for {options.minutes} minutes, first seed {seed}")
    if options.join_bytes:
        join_once(options.join_bytes)
    ends = time.monotonic() + options.minutes * 60
    total: Counter[str] = Counter()
    while time.monotonic() < ends:
        with tempfile.TemporaryDirectory(prefix="upr-soak-") as folder:
            try:
                total += one_world(Path(folder), seed, ends)
                (place := Path(folder) / "takeovers").mkdir()
                with starting(place) as start:
                    pause = take_over(start, TAKEOVERS)
            except Exception as error:
                print(f"VIOLATION (seed {seed}): {error!r}", file=sys.stderr)
                return 1
        told = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
        say(
            f"seed {seed}: fine; longest pause of a writer in takeovers {pause:.3f} s; so far {told}"
        )
        seed += 1
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
