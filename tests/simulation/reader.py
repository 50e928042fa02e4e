"""A consumer of the simulated world."""

import random

from tests.model import ModelPartition, Row, State, apply, partition_of
from tests.raw import all_rows
from tests.simulation.recording import Recorder, Saved
from upr.engine.follower import Follower
from upr.engine.streams import StartRequest
from upr.storage.read import ReadResult
from upr_protocol.block import Block

KEYS = [b"key%d" % i for i in range(40)]
KEYS = [k for k in KEYS if partition_of(k) % 3 == 0] + KEYS[:4]
USED = sorted({partition_of(k) for k in KEYS})


class Reader:
    """A consumer that keeps what the specification asks of it: id, seqno, horizon, states at markers.

    Attributes:
        registered: it has a consumer name, and acknowledges.
        restless: it begins at 0 again and again, and takes a block at a time.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        *,
        memory: bool,
        registered: bool = False,
        restless: bool = False,
    ) -> None:
        self.name = name
        self.recorder = recorder
        self.memory = memory
        self.registered = registered
        self.restless = restless
        self.follower: Follower | None = None
        self.read: list[ReadResult] | None = None
        self.ids: dict[int, int] = {}
        self.seqnos = dict.fromkeys(USED, 0)
        self.horizons = dict.fromkeys(USED, 0)
        self.states: dict[int, State] = {p: {} for p in USED}
        self.marked: dict[int, dict[int, State]] = {p: {0: {}} for p in USED}
        self.tokens: dict[int, int] = {}
        self.until: dict[int, int] = {}
        self.rollbacks = 0
        self.stored: dict[int, Saved] = {}

    def requests(self, rng: random.Random) -> list[StartRequest]:
        wanted = [p for p in USED if p not in self.tokens and rng.random() < 0.8]
        self.until = {}
        return [
            StartRequest(
                p, self.ids.get(p), self.seqnos[p], self.ids.get(p), until_now=rng.random() < 0.2
            )
            for p in wanted
        ]

    def undo(self, partition: int, limit: int, newest_id: int) -> None:
        """Roll back to the newest marker before the limit, unless there is nothing to undo."""
        self.rollbacks += 1
        if not max(self.seqnos[partition], self.horizons[partition]) <= limit:
            at = max((m for m in self.marked[partition] if m < limit), default=0)
            self.states[partition] = dict(self.marked[partition][at])
            self.marked[partition] = {m: s for m, s in self.marked[partition].items() if m <= at}
            self.seqnos[partition] = self.horizons[partition] = at
        self.ids[partition] = newest_id
        self.recorder.add(
            "rollback",
            reader=self.name,
            partition=partition,
            told=limit,
            newest=newest_id,
            to=self.seqnos[partition],
        )

    def receive(self, block: Block, tokens: list[int], model: dict[int, ModelPartition]) -> None:
        rows: dict[int, list[Row]] = {}
        for partition, seqno, key, value in all_rows([block]):
            rows.setdefault(partition, []).append(Row(seqno, key, value))
        for run, token in zip(block.runs, tokens, strict=True):
            p, start, end, horizon = (
                int(run[name]) for name in ("partition", "start_seqno", "end_seqno", "horizon")
            )
            assert self.tokens.get(p) == token, (
                f"a run of partition {p} under a token that is not open"
            )
            assert start == self.seqnos[p], (
                f"partition {p}: run from {start}, the reader has {self.seqnos[p]}"
            )
            apply(self.states[p], rows.get(p, []))
            self.recorder.run(self.name, token, (p, start, end, horizon), rows.get(p, []))
            self.seqnos[p] = end
            self.horizons[p] = max(self.horizons[p], horizon)
            if horizon == end == self.horizons[p]:
                truth = model[p].state_at(end)
                assert self.states[p] == truth, (
                    f"{self.name}: partition {p} is wrong at marker {end}"
                )
                self.marked[p][end] = dict(self.states[p])
                self.recorder.add("marker", reader=self.name, partition=p, seqno=end)

    def store(self, p: int) -> None:
        """Store position and data of a partition in one step."""
        self.stored[p] = (
            self.ids.get(p),
            self.seqnos[p],
            self.horizons[p],
            dict(self.states[p]),
            dict(self.marked[p]),
        )
        self.recorder.position("stored", self.name, p, self.stored[p])

    def die(self) -> None:
        """Have only what was stored."""
        for p in USED:
            if p not in self.stored:
                self.forget(p)
                continue
            self.recorder.position("loaded", self.name, p, self.stored[p])
            failover_id, self.seqnos[p], self.horizons[p], state, marked = self.stored[p]
            self.states[p], self.marked[p] = dict(state), dict(marked)
            self.ids.pop(p, None)
            if failover_id is not None:
                self.ids[p] = failover_id

    def forget(self, p: int) -> None:
        """Know nothing of a partition any more."""
        self.ids.pop(p, None)
        self.stored.pop(p, None)
        self.seqnos[p] = self.horizons[p] = 0
        self.states[p] = {}
        self.marked[p] = {0: {}}
        self.recorder.add("anew", reader=self.name, partition=p)

    def drop_call(self) -> None:
        self.follower = None
        self.read = None
        self.tokens = {}
