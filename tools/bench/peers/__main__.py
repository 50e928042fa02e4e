"""Command ``tools/dev.py bench peers``: this server and its peers, one after the other, on this machine in one run."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from tools.bench.common import say
from tools.bench.peers.measures import ARROW, LONG, MEASURES, OBJECTS, OURS, Measured
from tools.bench.peers.servers import KINDS, MissingServerError, program

RUNS: Final = 3


def measured(measures: Iterable[str], names: Iterable[str], runs: int) -> dict[str, list[Measured]]:
    """Return the figures of each store; the stores take turns, so that a slow minute of the machine meets all."""
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for run in range(1, runs + 1):
        for measure in measures:
            for name in found:
                if measure in KINDS[name].lacks:
                    continue
                load = os.getloadavg()[0]
                say(f"run {run} of {runs}: {measure}, {name} (load {load:.1f})")
                found[name] += (MEASURES | LONG)[measure](name)
    return found


def medians(figures: list[Measured]) -> dict[str, Measured]:
    """Return the median of each measure, with the cores of that run or of the one below."""
    by_measure: dict[str, list[Measured]] = {}
    for figure in figures:
        by_measure.setdefault(figure.measure, []).append(figure)
    return {
        measure: min(
            same, key=lambda f: abs(f.value - statistics.median_low(x.value for x in same))
        )
        for measure, same in by_measure.items()
    }


def ratio(measure: str, by_name: dict[str, dict[str, Measured]], *, fsynced: bool) -> float | None:
    """Return how many times better than the best peer this server is; below 1 it is worse."""
    ours = by_name[OURS][measure]
    theirs = measure.replace(f"to {ARROW}", f"to {OBJECTS}")
    peers = [
        figures[theirs].value
        for name, figures in by_name.items()
        if name != OURS and (KINDS[name].fsynced or not fsynced) and theirs in figures
    ]
    if not peers:
        return None
    return min(peers) / ours.value if ours.unit == "ms" else ours.value / max(peers)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def show(by_name: dict[str, dict[str, Measured]]) -> None:
    """Print the table: a line a measure, a column a store, and how this server stands to the best of the others."""
    names = list(by_name)
    print(f"{'measure':<46}{'unit':>7}" + "".join(f"{name:>16}" for name in names), end="")
    print(f"{'/ best fsync':>16}{'/ best':>9}")
    for measure, ours in by_name[OURS].items():
        values = [by_name[name].get(measure) for name in names]
        cells = "".join(f"{_cell(v.value if v else None):>16}" for v in values)
        ratios = [ratio(measure, by_name, fsynced=fsynced) for fsynced in (True, False)]
        print(f"{measure:<46}{ours.unit:>7}{cells}{_cell(ratios[0]):>16}{_cell(ratios[1]):>9}")
        if any(v and v.server_cores for v in values):
            busy = [f"{v.server_cores:.2f}+{v.client_cores:.2f}" if v else "-" for v in values]
            print(f"{'  cores busy, server + client':<53}" + "".join(f"{b:>16}" for b in busy))
    for name in names:
        lacks = "".join(f"; no {what}: {why}" for what, why in KINDS[name].lacks.items())
        print(f"{name}: a write is acknowledged with {KINDS[name].durability}{lacks}")


def installed(names: list[str]) -> list[str]:
    """Return those whose programs are there; tell how to get the others."""
    found = []
    for name in names:
        try:
            program(KINDS[name].command[0], KINDS[name].package)
            found.append(name)
        except MissingServerError as error:
            say(f"{name} is left out: {error}")
    return found


def main() -> int:
    """Measure and print. Status 1 when a peer did not start."""
    parser = argparse.ArgumentParser(prog="tools/dev.py bench peers", description=__doc__)
    peers = [name for name in KINDS if name != OURS]
    parser.add_argument("--peers", default=",".join(peers), help="some of " + ",".join(peers))
    parser.add_argument("--only", choices=MEASURES | LONG, action="append", help="a part of it")
    parser.add_argument("--runs", type=int, default=RUNS, help="the table has the medians")
    parser.add_argument("--json", action="store_true", help="one JSON document, with every run")
    options = parser.parse_args()
    chosen = [name for name in options.peers.split(",") if name]
    unknown = [name for name in chosen if name not in peers]
    if unknown or options.runs < 1:
        parser.error(
            f"peer is {unknown[0]!r}; must be one of {', '.join(peers)}"
            if unknown
            else f"--runs is {options.runs}; must be at least 1"
        )
    try:
        found = measured(options.only or MEASURES, [OURS, *installed(chosen)], options.runs)
    except MissingServerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if options.json:
        durability = {name: KINDS[name].durability for name in found}
        figures = {name: [asdict(f) for f in found[name]] for name in found}
        print(json.dumps({"durability": durability, "figures": figures}, indent=1))
    else:
        show({name: medians(figures) for name, figures in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
