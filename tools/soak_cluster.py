"""Failovers of a cluster by itself, under load, world after world, each of ROUNDS rounds and compared at its end.

Run by ``tools/dev.py soak --cluster``. A world has three servers, an etcd of one or three members, writers and followers. In each
round the owner is killed or stopped for a while, or etcd is away or restarted (``tests/cluster/rounds.py``). At the end all
are the same and nothing is missing that was promised; the time to the next owner is told.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.cluster.clusters import running_etcd
from tests.cluster.rounds import ClusterRounds
from tools.demo import say
from tools.soak_replicas import starting

ROUNDS = 20


def one_world(folder: Path, seed: int, ends: float) -> tuple[Counter[str], list[float]]:
    """Run the rounds of one world, fewer if the time is over; return what happened, and how long each change took.

    Raises:
        AssertionError: something was not as it must be.
    """
    rng = random.Random(seed)
    (folder / "servers").mkdir()
    with (
        starting(folder / "servers") as start,
        running_etcd(folder / "etcd", rng.choice((1, 3))) as etcd,
        ClusterRounds(start, etcd, folder / "stamps", seed) as rounds,
    ):
        for _ in range(ROUNDS):
            kind = rng.random()
            if kind < 0.4:
                rounds.kill(emptied=rng.random() < 0.2)
            elif kind < 0.8:
                rounds.pause(rng.uniform(1.0, 20.0))
            elif kind < 0.9:
                rounds.restart_etcd()
            else:
                rounds.without_etcd(rng.uniform(5.0, 60.0))
            if time.monotonic() >= ends:
                break
        rounds.check()
        return rounds.counts, rounds.takes


def main() -> int:
    """Return 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="tools/dev.py soak --cluster", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first world")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    say(f"a cluster for {options.minutes} minutes, first seed {seed}")
    ends = time.monotonic() + options.minutes * 60
    total: Counter[str] = Counter()
    takes: list[float] = []
    while time.monotonic() < ends:
        with tempfile.TemporaryDirectory(prefix="upr-soak-") as folder:
            try:
                counts, taken = one_world(Path(folder), seed, ends)
            except Exception as error:
                print(f"VIOLATION (seed {seed}): {error!r}", file=sys.stderr)
                return 1
        total += counts
        takes += taken
        told = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
        middle, worst = statistics.median(takes or [0.0]), max(takes, default=0.0)
        say(f"seed {seed}: fine; so far {told}")
        say(
            f"a new owner's first answer after {middle:.1f} s at the median, {worst:.1f} s at worst"
        )
        seed += 1
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
