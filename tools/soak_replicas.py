"""Failovers under load, world after world, each of ROUNDS rounds and compared at its end.

Run by ``tools/dev.py soak --replicas``. A world has three servers, writers at ``disk`` and ``replicated(1)``, and followers of all
stabilities. In each round a proxy holds one replica's link back and then the other's, the active server is killed, a
drawn replica is promoted, and the old one comes back as a replica. At the end all servers and followers are the same, no
write at ``replicated(1)`` is missing, each one at ``disk`` that was undone is kept, and no follower at ``replicated(1)``
was ever rolled back (``tests/replica/rounds.py``). With ``--join-bytes`` a replica first joins a server that has so much,
under writers, and is promoted after SIGKILL of that (``tests/replica/joining.py``). Between worlds two servers take over from
each other TAKEOVERS times (``tests/replica/test_ownership.py``). A world that has begun is ended. What servers wrote in one with a violation
stays.
"""

import shutil
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
from tests.replica.rounds import GATHERED, Rounds
from tests.replica.test_ownership import take_over
from tools.demo import say, soak_parser
from upr_protocol.limits import parse_size

ROUNDS = 20
TAKEOVERS = 20


@contextmanager
def kept_if_wrong(words: str) -> Iterator[Path]:
    """Give an empty folder, which stays when the body fails; that is told, with the words."""
    folder = Path(tempfile.mkdtemp(prefix="upr-soak-"))
    try:
        yield folder
    except Exception:
        print(f"VIOLATION ({words}): {folder} has what was written and logged", file=sys.stderr)
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


@contextmanager
def starting(folder: Path) -> Iterator[StartServer]:
    """Give what starts a server, which syncs as the command does; all are gone at the end."""
    servers: list[RunningServer] = []

    def start(*options: str, **more: Mapping[str, Any]) -> RunningServer:
        place = folder / str(len(servers))
        place.mkdir()
        servers.append(RunningServer(place, *options, syncs=True, **more))
        return servers[-1].start()

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def one_world(folder: Path, seed: int) -> Counter[str]:
    """Run the rounds of one world; AssertionError for what is not as it must be."""
    with starting(folder) as start:
        with Rounds(start, seed) as rounds:
            for _ in range(ROUNDS):
                rounds.run()
            rounds.check()
        assert rounds.counts[GATHERED], "what a new owner lacked was never tried"
        return rounds.counts


def join_once(size: int) -> None:
    """Have a replica join a server with so many bytes; AssertionError when it lacks something."""
    with kept_if_wrong(f"--join-bytes {size}") as folder, starting(folder) as start:
        written, seconds = join(start, size)
    say(f"joined {size} bytes in {seconds:.1f} s; {written} keys were written meanwhile: fine")


def main() -> int:
    """Return 0 when nothing was wrong; a violation is raised."""
    parser = soak_parser("replicas", __doc__)
    parser.add_argument("--join-bytes", type=parse_size, default=0, help="such as 1GiB")
    options = parser.parse_args()
    seed = options.seed
    say(f"failovers for {options.minutes} minutes, first seed {seed}")
    if options.join_bytes:
        join_once(options.join_bytes)
    ends = time.monotonic() + options.minutes * 60
    total: Counter[str] = Counter()
    while time.monotonic() < ends:
        with kept_if_wrong(f"--seed {seed}") as folder:
            total += one_world(folder, seed)
            (place := folder / "takeovers").mkdir()
            with starting(place) as start:
                pause = take_over(start, TAKEOVERS)
        told = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
        say(
            f"seed {seed}, {ROUNDS} rounds, {TAKEOVERS} takeovers: fine; longest pause of a writer in takeovers"
            f" {pause:.3f} s; so far {told}"
        )
        seed += 1
    say(f"no violation in {total['rounds']} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
