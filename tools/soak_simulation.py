"""Soak test of the engine in its simulated world, in two processes: seeds that once showed a fault, and ever new ones until
the time is up.

A seed decides everything: which world (see ``tests/simulation/worlds.py``), its block sizes, and each of its steps. On a
violation the seed, a command that shows it again, with as few steps as some tries find, and the lines to be kept in
``tests/simulation/corpus`` are printed, and the status is 1. At the end it is said which statements of engine, replica, cluster
and protocol core no world has reached.
"""

import argparse
import ast
import functools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.harness import skip_syncs
from tests.simulation import worlds

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
REPORT_SECONDS = 30.0
TRACE_EVERY = 8
"""Of so many pairs of worlds one is traced, which takes longer."""
TRACED_CALLS = 40
"""So many calls of a function are traced, and then one in as many."""
LOOKED_AT = ("upr/engine", "upr/replica", "upr/cluster", "client/upr_protocol")
TOLD = (
    "crashes",
    "power losses",
    "disk errors",
    "clock jumps",
    "clean restarts",
    "rollbacks",
    "purges",
    "forced purges",
    "cuts",
    "connections",
    "cuts of connections",
    "black holes to the server",
    "black holes to the client",
    "ghosts",
    "clients died",
    "died at a failpoint",
    "pauses",
    "lost disks",
    "failed disks",
    "outages of etcd",
    "cuts from etcd",
    "losses of etcd",
    "drops",
    "promotions",
    "takeovers",
    "forced promotions",
    "lost by force",
    "cut off in a stretch",
    "undone at disk",
)
Lines = set[tuple[str, int]]
"""(file, line number) of what was reached."""


@dataclass(slots=True)
class Outcome:
    """What became of one seed.

    Attributes:
        world: the name of the world that it ran in.
        elapsed: how long the world lived by its own time, microseconds.
        violation: the traceback, empty when all was right.
        reached: what was reached, if it was traced.
    """

    world: str
    seed: int
    steps: int
    counts: dict[str, int]
    elapsed: int
    violation: str = ""
    reached: Lines = field(default_factory=set)


def run_seed(name: str, seed: int, steps: int, traced: bool = False) -> Outcome:
    """Run the world of that name and seed for so many steps, and to its end."""
    reached: Lines = set()
    world: worlds.Runnable | None = None
    with tempfile.TemporaryDirectory(prefix="upr-world-") as folder, worlds.prepared(seed):
        if traced:
            sys.settrace(tracer(reached))
        try:
            world = worlds.KINDS[name].world(Path(folder) / "world", seed)
            world.run(steps)
            violation = ""
        except Exception:
            violation = traceback.format_exc()
        finally:
            sys.settrace(None)
    counts, elapsed = ({}, 0) if world is None else (world.counts, world.elapsed)
    return Outcome(name, seed, steps, counts, elapsed, violation, reached)


def tracer(reached: Lines) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that notes the lines of the files that are looked at."""
    folders = tuple(str(ROOT / folder) + os.sep for folder in LOOKED_AT)
    files: dict[CodeType, str] = {}
    calls: Counter[CodeType] = Counter()

    def trace_lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            reached.add((files[frame.f_code], frame.f_lineno))
        return trace_lines

    def trace_calls(frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(folders):
            return None
        calls[code] += 1
        if calls[code] > TRACED_CALLS and calls[code] % TRACED_CALLS:
            return None
        if code not in files:
            files[code] = str(Path(code.co_filename).relative_to(ROOT))
        return trace_lines

    return trace_calls


def fewer_steps(seed: int, steps: int, run: Callable[[int, int], Outcome]) -> Outcome:
    """Return a failing run of a seed with no more steps than it is known to fail with.

    By bisection: a world of fewer steps is the beginning of the longer one, and then its end, so a shorter one
    fails too or is too short; mostly.
    """
    found = run(seed, steps)
    passing = -1
    while found.violation and found.steps - passing > 1:
        tried = run(seed, (passing + found.steps) // 2)
        if tried.violation:
            found = tried
        else:
            passing = tried.steps
    return found


def statements(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of each statement inside functions; of a compound one, of its head."""
    tree = ast.parse(file.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function:
                continue
            if isinstance(node, ast.Pass | ast.Try | ast.Global | ast.Nonlocal | ast.FunctionDef):
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            yield node.lineno, max(last, node.lineno)


def not_reached(reached: Lines) -> dict[str, list[tuple[int, int]]]:
    """Return for each file that is looked at the line ranges of statements that were not reached."""
    lines: dict[str, set[int]] = {}
    for name, line in reached:
        lines.setdefault(name, set()).add(line)
    missed: dict[str, list[tuple[int, int]]] = {}
    for folder in LOOKED_AT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            if "/wire/v1/" in name:
                continue
            seen = lines.get(name, set())
            each = sorted(set(statements(file)))
            ranges = [(a, b) for a, b in each if seen.isdisjoint(range(a, b + 1))]
            if ranges and len(ranges) == len(each):
                missed[name] = [(0, 0)]
            elif ranges:
                missed[name] = joined(ranges, each)
    return missed


def joined(ranges: list[tuple[int, int]], each: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges between which no other statement lies."""
    result: list[tuple[int, int]] = []
    chosen = set(ranges)
    before = False
    for one in each:
        if one in chosen:
            if before:
                result[-1] = (result[-1][0], max(one[1], result[-1][1]))
            else:
                result.append(one)
        before = one in chosen
    return result


class Soak:
    """One run over known seeds, and then over seeds that follow each other."""

    def __init__(
        self,
        known: Iterable[worlds.Run],
        first_seed: int,
        steps: int | None,
        world: str | None,
    ) -> None:
        self._known = deque(known)
        self._first = self._next = first_seed
        self._steps = steps
        self._world = world
        self._began = time.monotonic()
        self.seeds = self.traced = self.elapsed = 0
        self.counts: Counter[str] = Counter()
        self.reached: Lines = set()

    def run(self, seconds: float) -> Outcome | None:
        """Run worlds until the time is up; return the first that went wrong."""
        self._began = said = time.monotonic()
        pending: set[Future[Outcome]] = set()
        with ProcessPoolExecutor(
            PROCESSES, mp_context=get_context("spawn"), initializer=skip_syncs
        ) as pool:
            while True:
                # One at least, so that a seed can be shown again in no time.
                begun = not self._known and self._next > self._first
                over = begun and time.monotonic() - self._began >= seconds
                while not over and len(pending) < 2 * PROCESSES:
                    pending.add(self._submit(pool))
                    over = seconds <= 0
                if not pending:
                    return None
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for outcome in sorted((one.result() for one in done), key=lambda one: one.seed):
                    self._note(outcome)
                    if outcome.violation:
                        pool.shutdown(wait=True, cancel_futures=True)
                        return outcome
                if time.monotonic() - said >= REPORT_SECONDS:
                    said = time.monotonic()
                    self.report()

    def _submit(self, pool: ProcessPoolExecutor) -> Future[Outcome]:
        if self._known:
            run = self._known.popleft()
            return pool.submit(run_seed, run.world, run.seed, run.steps)
        seed, self._next = self._next, self._next + 1
        traced = (seed - self._first) // 2 % TRACE_EVERY == 0
        name = self._world or worlds.kind_of(seed)
        return pool.submit(run_seed, name, seed, self._steps or worlds.KINDS[name].steps, traced)

    def _note(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.elapsed += outcome.elapsed
        self.counts.update(outcome.counts)
        if outcome.reached:
            self.traced += 1
            self.reached |= outcome.reached

    def report(self) -> None:
        """Print how far it is."""
        told = ", ".join(f"{self.counts[what]} {what}" for what in TOLD)
        say(
            f"{time.monotonic() - self._began:.0f} s: {self.seeds} seeds, "
            f"{self.elapsed / 3600e6:.1f} simulated hours, {told}"
        )

    def report_whole(self) -> None:
        """Print everything that was counted, and what was never reached."""
        self.report()
        say(", ".join(f"{what}: {count}" for what, count in sorted(self.counts.items())))
        say(f"statements that none of {self.traced} traced worlds has reached:")
        for name, ranges in not_reached(self.reached).items():
            words = [f"{a}-{b}" if b > a else str(a) for a, b in ranges]
            say(f"  {name}: {'all' if ranges == [(0, 0)] else ', '.join(words)}")


def say(words: str) -> None:
    """Print a line at once."""
    print(words, flush=True)


def show(outcome: Outcome) -> None:
    """Print a violation, with as few steps as can be found cheaply, and how to see it again."""
    name = outcome.world
    command = f"python3 tools/dev.py soak --simulation --minutes 0 --world {name}"
    print(f"VIOLATION with seed {outcome.seed}; looking for fewer steps", file=sys.stderr)
    skip_syncs()
    found = fewer_steps(outcome.seed, outcome.steps, functools.partial(run_seed, name))
    if not found.violation:
        found = outcome
        print("not a second time: something is not decided by the seed", file=sys.stderr)
    print(found.violation, file=sys.stderr)
    print(f"VIOLATION with seed {found.seed} in {found.steps} steps; again with:", file=sys.stderr)
    print(f"  {command} --seed {found.seed} --steps {found.steps}", file=sys.stderr)
    words = found.violation.strip().splitlines()[-1][:100] if found.violation else ""
    print("to be kept in tests/simulation/corpus:", file=sys.stderr)
    print(f'[[run]]\nworld = "{name}"\nseed = {found.seed}', file=sys.stderr)
    print(f"steps = {found.steps}\nshowed = {json.dumps(words)}", file=sys.stderr)


def main() -> int:
    """Return 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="tools/dev.py soak --simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="0: one seed")
    parser.add_argument("--seed", type=int, default=None, help="the first one")
    parser.add_argument("--steps", type=int, default=None, help="of each world")
    parser.add_argument("--world", choices=list(worlds.KINDS), default=None, help="this kind only")
    options = parser.parse_args()
    seed = random.randrange(10**6, 10**9) if options.seed is None else options.seed
    say(f"simulation soak of {options.minutes} minutes, first seed {seed}")
    # Who names a seed, a world or steps wants to see these.
    chosen = (options.seed, options.steps, options.world) != (None, None, None)
    known = [] if chosen or options.minutes <= 0 else worlds.corpus()
    soak = Soak(known, seed, options.steps, options.world)
    try:
        violation = soak.run(options.minutes * 60)
    except KeyboardInterrupt:
        return 130
    if violation is not None:
        show(violation)
        return 1
    soak.report_whole()
    say("no violation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
