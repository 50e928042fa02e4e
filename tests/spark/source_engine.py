"""A small model of Spark's engine that runs the data source's planning and reading against a model server.

It logs the end of a batch, reads, hands over to the sink and commits; it may break off between any two of these, and
then goes on from what it had logged, with another planner.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tests.spark.source_model import (
    LEASE,
    PARTITIONS,
    Crash,
    ModelFollower,
    ModelServer,
    Row,
    Weather,
    newest,
)
from upr_spark.errors import UprSparkError
from upr_spark.options import Connection
from upr_spark.source.offsets import parse_offset
from upr_spark.source.options import Rules, Settings
from upr_spark.source.plan import Control, Planner, grouped, plan_ranges
from upr_spark.source.task import Reading, Rows


class Sink:
    """Keeps rows as they come and undoes what control rows say; by batch, as a whole.

    Args:
        again: whether a batch that is repeated is applied once more; else it is known and left out.
    """

    def __init__(self, again: bool) -> None:
        self.rows: list[dict[int, Row]] = [{} for _ in range(PARTITIONS)]
        self._again = again
        self._seen: set[int] = set()
        self.controls = 0

    def apply(
        self, batch: int, controls: Sequence[Control], rows: Sequence[tuple[int, Row]]
    ) -> None:
        if batch in self._seen and not self._again:
            return
        self._seen.add(batch)
        for control in controls:
            self.controls += 1
            kept = self.rows[control.partition]
            self.rows[control.partition] = {s: r for s, r in kept.items() if s <= control.seqno}
        for partition, row in rows:
            self.rows[partition][row.seqno] = row


def model_settings(rules: Rules, starting: Any, limit: int | None) -> Settings:
    """Return settings of a query in the model.

    Args:
        starting: the option startingOffsets; or times by partition.
    """
    times = starting if isinstance(starting, dict) and 0 in starting else {}
    starting = "earliest" if times else starting
    return Settings(
        Connection("127.0.0.1:1", "default", 1, 1, 1),
        tuple(range(PARTITIONS)),
        starting,
        "latest",
        2,
        limit,
        rules,
        "cut",
        LEASE,
        True,
        True,
        b"",
        False,
        False,
        10,
        1000,
        1000,
        0.1,
        False,
        times,
    )


class Engine:
    """Spark's micro-batch engine with its checkpoint, and whoever starts it again.

    Args:
        seed: of everything that is random.
        mode: which rules the query begins with; "any" changes them at each start.
        starting: the option startingOffsets.
    """

    def __init__(self, seed: int, mode: str, weather: Weather, starting: Any) -> None:
        self.random = Random(seed)
        self.server = ModelServer(self.random, weather)
        self.sink = Sink(self.random.random() < 0.5)
        self.mode = mode
        self.rules = Rules("fail", history=self.random.choice([1, 3, 8]))
        self._starting = starting
        self._ends: list[str] = []
        self._committed = 0
        self._steps = -1
        self._cuts = 0
        self.errors: list[str] = []
        self._choose_rules()

    def _choose_rules(self) -> None:
        modes = ("fail", "emit", "reset") if self.mode == "any" else (self.mode,)
        self.rules = replace(self.rules, mode=self.random.choice(modes))  # type: ignore[arg-type]

    def _step(self) -> None:
        self.server.happen()
        if self._steps == 0:
            raise Crash
        self._steps -= 1

    def _token(self) -> str:
        self._cuts += 1
        return str(self._cuts)

    def run(self, batches: int) -> bool:
        """Start the query and let it plan so many times; return whether it had nothing left to do."""
        limit = self.random.choice([None, 1, 4])
        settings = model_settings(self.rules, self._starting, limit)
        planner = Planner(self.server, settings, self._token)
        if self.random.random() < 0.2:
            planner.prepare_available_now()
        if len(self._ends) > self._committed:
            self._batch(planner, self._committed)
        for _ in range(batches):
            self._step()
            first = not self._ends
            start = json.dumps(planner.initial()) if first else self._ends[-1]
            end = json.dumps(planner.latest(json.loads(start), limit))
            if end == start and not first:
                if self.server.calm:
                    return True
                continue
            self._step()
            self._ends.append(end)
            self.server.thaw(parse_offset(json.loads(end)))
            self._batch(planner, self._committed)
        return False

    def _batch(self, planner: Planner, number: int) -> None:
        self._step()
        start = json.loads(self._ends[number - 1]) if number else planner.initial()
        end = parse_offset(json.loads(self._ends[number]))
        planner.planned(end)
        controls: list[Control] = []
        rows: list[tuple[int, Row]] = []
        for group in grouped(plan_ranges(parse_offset(start), end), 2):
            reading = Reading(group, self.rules, in_batch=False)
            for item in reading.read(ModelFollower(self.server, group)):
                self._step()
                if isinstance(item, Rows):
                    ends = {one.partition: one.end_seqno for one in group}
                    rows += [
                        (p, row)
                        for p, row in item.content[0]
                        if not item.cut_off or row.seqno <= ends[p]
                    ]
                else:
                    controls += item
        self._step()
        self.sink.apply(number, controls, rows)
        self._step()
        self._committed += 1

    def _recover(self, error: UprSparkError) -> None:
        """Do what the error's hint says."""
        self.errors.append(error.code)
        if error.code == "DATA_LOSS":
            self.rules = replace(self.rules, fail_on_data_loss=False)
        elif error.code == "ROLLBACK_REQUIRED":
            assert self.rules.mode == "fail"
            self.rules = replace(self.rules, mode=self.random.choice(["emit", "reset"]))
        elif error.code == "SNAPSHOT_GONE":
            assert self.rules.mode != "reset"
            assert self.server.lapses
            self.rules = replace(self.rules, mode="reset")
            self.mode = "reset"
        else:
            assert error.retriable, str(error)

    def live(self) -> None:
        """Run with crashes and whatever the weather brings, then until nothing is left to do."""
        for _ in range(self.random.randint(1, 6)):
            self._steps = self.random.randint(0, 60)
            self._choose_rules()
            self._attempt(self.random.randint(1, 12))
        self._steps, self.server.calm = -1, True
        for _ in range(60):
            if self._attempt(40):
                return
        raise AssertionError(f"the query does not come to an end: {self.errors}")

    def _attempt(self, batches: int) -> bool:
        try:
            return self.run(batches)
        except Crash:
            return False
        except UprSparkError as error:
            self._recover(error)
            return False

    def check(self) -> None:
        """The sink holds what the server holds, as far as it was asked for."""
        end = parse_offset(json.loads(self._ends[-1]))
        for index, at in enumerate(self.server.partitions):
            base = end.entries[index].base
            held = newest(list(self.sink.rows[index].values()), base)
            expected = newest(at.all_rows, base)
            assert held == expected, (index, base, at, self.sink.rows[index])
