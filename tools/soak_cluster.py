"""What a cluster must survive by itself, under load: world after world, each compared at its end.

Run by ``tools/dev.py soak --cluster``. A world has three servers, an etcd of one or three members, writers and followers
(``tests/cluster/rounds.py``). First comes one of each kind in WORLDS, and what grants cost; then mixed ones, until the time is over.
At the end of each all servers and followers are the same, nothing is missing that was promised, and the figures are told and are
within their limits, which are those of a machine that has nothing else to do. Those that the time was too short for are named.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster.clusters import start_cluster
from tests.cluster.rounds import ETCD, ClusterRounds
from tests.etcd import running_etcd
from tests.harness import RunningServer
from tests.replica.rounds import Writing
from tools.bench.common import process_cpu
from tools.demo import say, soak_parser
from tools.soak_replicas import kept_if_wrong, starting

ROUNDS = 20
RESTARTS = 5
CUT_SECONDS = 9.0
"""Time that a cut lasts: until who is behind it is counted no more, and its key and all grants are gone."""
OUTAGE_SECONDS = 60.0
REPLICA_SECONDS = 20.0
"""Time for which a replica is away besides etcd: twice that after which the last one would be counted no more."""
COST_SECONDS = 20.0
ASK_SECONDS = 0.5, 0.05
"""Intervals at which owners ask for grants; what these cost is the difference."""
TAKES_MEDIAN, TAKES_MAX = 7.0, 10.0
"""Longest time from the loss of an owner to the first answer of the next one."""
PAUSE_MAX = 13.0
"""Longest pause of a writer then."""
BACK_MAX = 5.0
"""Longest time from SIGCONT until an owner that was replaced is a replica in step."""
STALL_MAX = 5.0
"""Longest wait of a writer where the owner stays, without etcd for example, or hands over."""
Round = Callable[[], None]
LINKS = ((0, 1), (0, 2), (1, 2), (0, ETCD), (1, ETCD), (2, ETCD))


def kills(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """SIGKILL the owner."""
    yield from itertools.repeat(rounds.kill, ROUNDS)


def pauses(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """SIGSTOP the owner for 1 to 20 s."""
    for seconds in rng.sample(range(1, ROUNDS + 1), ROUNDS):
        yield partial(rounds.pause, float(seconds))


def outages(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """SIGKILL etcd, for long and a replica as well, and restart it."""
    yield partial(rounds.without_etcd, OUTAGE_SECONDS, REPLICA_SECONDS)
    yield from itertools.repeat(rounds.restart_etcd, ROUNDS)


def leaders(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """The same, and SIGKILL the member of etcd that leads the others."""
    yield from outages(rounds, rng)
    yield from itertools.repeat(partial(rounds.restart_etcd, leader=True), RESTARTS)


def restarts(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """Stop the owner and start it at once, the same with SIGKILL, and restart all, one after the other."""
    yield from itertools.repeat(rounds.restart, RESTARTS)
    yield from itertools.repeat(partial(rounds.restart, cleanly=False), RESTARTS)
    yield from itertools.repeat(rounds.roll, RESTARTS)


def links(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """Cut each link alone and with each other, in both directions and in either."""
    chosen = [*itertools.combinations(LINKS, 1), *itertools.combinations(LINKS, 2)]
    for some in rng.sample(chosen, len(chosen)):
        there = [(b, a) for a, b in some]
        for ways in ([*some, *there], some, there):
            yield partial(rounds.cut, ways, CUT_SECONDS)


def emptied(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """Empty the disk of the owner, of a replica, and of one that an owner needs which died as well; and have one fail."""
    yield rounds.fail_disk
    yield partial(rounds.kill, emptied=True)
    yield rounds.empty_a_replica
    yield rounds.need_a_command


def mixed(rounds: ClusterRounds, rng: random.Random) -> Iterator[Round]:
    """All of it, drawn."""
    while True:
        kind = rng.random()
        if kind < 0.3:
            yield partial(rounds.kill, emptied=rng.random() < 0.2)
        elif kind < 0.6:
            yield partial(rounds.pause, rng.uniform(1.0, 20.0))
        elif kind < 0.7:
            yield rounds.restart_etcd
        elif kind < 0.75:
            yield partial(rounds.without_etcd, rng.uniform(5.0, OUTAGE_SECONDS), REPLICA_SECONDS)
        elif kind < 0.8:
            yield rounds.empty_a_replica
        else:
            drawn = [rng.sample(one, 2) for one in rng.sample(LINKS, rng.choice((1, 2)))]
            yield partial(rounds.cut, [(a, b) for a, b in drawn], rng.uniform(2.0, 15.0))


@dataclass(frozen=True, slots=True)
class World:
    """Kind of a world; see ``ClusterRounds``.

    Attributes:
        fails: whether writes may fail for their caller.
    """

    do: Callable[[ClusterRounds, random.Random], Iterator[Round]]
    members: int = 1
    linked: bool = False
    fails: bool = False


WORLDS = {
    "kills": World(kills),
    "pauses": World(pauses, members=3),
    "etcd1": World(outages),
    "etcd3": World(leaders, members=3),
    "restarts": World(restarts),
    "links": World(links, linked=True, fails=True),
    "emptied": World(emptied),
    "mixed": World(mixed, members=3, linked=True, fails=True),
}


def told(what: str, seconds: Sequence[float], median: float, worst: float) -> str:
    """Return median and worst of some times in words.

    Args:
        median, worst: the longest that they may be.

    Raises:
        AssertionError: they are longer.
    """
    if not seconds:
        return ""
    middle, longest = statistics.median(seconds), max(seconds)
    words = f"{what} {middle:.1f} s at the median, {longest:.1f} s at worst"
    assert middle <= median, f"{words}; must be at most {median} s at the median"
    assert longest <= worst, f"{words}; must be at most {worst} s at worst"
    return f"; {words}"


def run(name: str, folder: Path, seed: int, ends: float) -> tuple[str, bool]:
    """Run a world, fewer rounds if the time is over; return what happened in words, and whether it ran to its end.

    AssertionError for what is not as it must be.
    """
    world, rng, is_whole = WORLDS[name], random.Random(seed), True
    (folder / "servers").mkdir()
    with (
        starting(folder / "servers") as start,
        running_etcd(folder / "etcd", world.members) as etcd,
        ClusterRounds(start, etcd, folder / "stamps", seed, linked=world.linked) as rounds,
    ):
        for number, do in enumerate(itertools.islice(world.do(rounds, rng), 100), 1):
            if time.monotonic() >= ends:
                is_whole = False
                break
            do()
            print(f"\r{name} {number} ", end="", flush=True)
        rounds.check()
        words = ", ".join(f"{count} {what}" for what, count in sorted(rounds.counts.items()))
        assert world.fails or "writes failed" not in words, words
        return (
            words
            + told("a new owner's first answer after", rounds.takes, TAKES_MEDIAN, TAKES_MAX)
            + told("a writer's pause", rounds.pauses, PAUSE_MAX, PAUSE_MAX)
            + told("a replica again after", rounds.back, BACK_MAX, BACK_MAX)
            + told("a writer's longest wait at one owner", rounds.stalls, STALL_MAX, STALL_MAX)
        ), is_whole


def use_of(servers: Sequence[RunningServer]) -> tuple[float, float]:
    """Return which part of a processor the owner has for a while, and each other one."""
    before, began = [process_cpu(one.pid) for one in servers], time.monotonic()
    time.sleep(COST_SECONDS)
    took = time.monotonic() - began
    used = [(process_cpu(one.pid) - then) / took for one, then in zip(servers, before, strict=True)]
    return used[0], statistics.mean(used[1:])


def cost_of_grants(folder: Path) -> str:
    """Return in words what of a processor heartbeats with grants take, idle and under load."""
    found = []
    for number, seconds in enumerate(ASK_SECONDS):
        (place := folder / str(number)).mkdir()
        (place / "servers").mkdir()
        with starting(place / "servers") as start, running_etcd(place / "etcd") as etcd:
            asking = {"upr.replica.fencing.ASK_SECONDS": seconds}
            servers = start_cluster(partial(start, constants=asking), etcd)
            idle = use_of(servers)
            with Writing([servers[0].target], "writer", "replicated(1)"):
                found.append((idle, use_of(servers)))
    more = 1 / ASK_SECONDS[1] - 1 / ASK_SECONDS[0]
    # The owner asks two.
    owner, replica = ((found[1][0][n] - found[0][0][n]) / more / (2 - n) for n in (0, 1))
    (idle, loaded), per_second = found[0], 1 / ASK_SECONDS[0]
    return (
        f"a grant takes {owner * 1e3:.2f} ms of the owner's processor and {replica * 1e3:.2f} ms of a replica's;"
        f" idle these use {idle[0]:.1%} and {idle[1]:.1%} of one, {owner * 2 * per_second:.2%} and {replica * per_second:.2%}"
        f" for grants; under load {loaded[0]:.0%} and {loaded[1]:.0%}"
    )


def main() -> int:
    """Return 0 when nothing was wrong; a violation is raised."""
    parser = soak_parser("cluster", __doc__)
    parser.add_argument("--world", choices=[*WORLDS, "grants"], default=None, help="this kind only")
    options = parser.parse_args()
    seed = options.seed
    say(f"a cluster for {options.minutes} minutes, first seed {seed}")
    whole = options.minutes == 0
    ends = time.monotonic() + (options.minutes * 60 if not whole else 86400)
    names = [options.world] if options.world else [*WORLDS, "grants"]
    if whole and not options.world:
        # It has no end.
        names.remove("mixed")
    left = [name for name in names if name != "mixed"]
    while time.monotonic() < ends:
        for name in names:
            if time.monotonic() >= ends:
                break
            with kept_if_wrong(f"--world {name} --seed {seed}") as folder:
                words, is_whole = (
                    (cost_of_grants(folder), True)
                    if name == "grants"
                    else run(name, folder, seed, ends)
                )
            say(f"{name}, seed {seed}: fine; {words}")
            seed += 1
            if is_whole and name in left:
                left.remove(name)
        if whole:
            break
        names = [options.world or "mixed"]
    if left:
        say(f"NOT RUN, or not to the end: {', '.join(left)}; --minutes 0 runs each to its end")
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
