"""What a history is, and the two things that are read off it: the branches that are true, and what readers hold.

A history is a plain list of events, each a dictionary whose ``event`` names its kind, in the order in which the
world saw them. It holds only what crosses the boundary of the server or of a reader. Nothing here knows the code
of the server or of the SDK. Logs are lists of (id, seqno), oldest first; runs of a write are (partition, id,
start, end); ``p: ...`` is a dictionary by partition.

opened        logs {p: log}
sent          producer, number, rows [(partition, key, value or None)] in the writer's order
acknowledged  producer, number, durability ("memory" or "disk"), duplicate, runs
refused, unknown  producer, number
survived      producer, number, runs: a write of unknown outcome that was found after a restart
restart       clean, partitions {p: {before, after, high, durable, high_after, purge}}; before, high and durable are
              what was last told of the process that ended, None where it was not asked; damaged: something was lost that was
              durable; put_back {p: log}: an older copy was put back, which had these logs,
              or the bucket was dropped and made anew with these
hello         reader, partition, id, answer ("ok" or "rollback"), seqno, newest
start         reader, partition, id, seqno, data_id, answer ("started", "rollback" or "refused"), newest, high, purge;
              token and until of one that started, told of a rollback, reason of a refusal; remote: its reader hears of
              the answer, and of a restart, over a network
unheard       reader, partition: the answer to its last Start never reached it
rollback      reader, partition, told, newest, to: what the reader did
anew          reader, partition: it forgot all it knew
run           reader, partition, token, start, end, horizon, rows [(seqno, key, value or None)]; restarts, how many came
              before it was sent, if that is not all before the event
marker        reader, partition, seqno: one that the reader took; restarts, as of a run; state, what its data is then
stopped       reader, partition: it asked for the end of the stream
ended         reader, partition, token, reason
left          reader: it closed its call
stored, loaded  reader, partition, id, data_id, seqno, horizon, markers
handed_in     reader, partition, kept_as, save, and as stored: a position on its way to the server, numbered by ``save``, which
              keeps it as that of the consumer ``kept_as``; loaded and anew say kept_as, and loaded save, if it came from there
lost          reader, partition: it follows it no longer
granted       consumer, owner, partitions: what the server says is the owner's; shared: it is a member of a group
no_owner      nobody owns anything: the server is about to be started anew
accepted      consumer, owner, saves {p: save}: these may be stored
kept, unkept  consumer, partition; save of what is kept: a transaction has stored it, or removed what there was
saved         consumer, saves {p: save}: the server answered that they are stored
told          consumer, owner, saves {p: save or None}: what the server says is stored
resetting     consumer, partitions: an operator has what is stored of these removed
forgetting, forgotten  consumer: an operator had it forgotten; he was told so
call_ended    reader: the server has ended its call, which the reader may not know
frame         reader, window, outstanding (before it), bytes; reached {p: end of the newest run}, if the reader is remote
tail          bytes, limit, largest (one write)
purge         partition, seqno, age, young, held (microseconds)
cut_made, cut_released  name; pins {p: seqno}
cut_read      name, partition, outcome ("FINISHED" or "SNAPSHOT_GONE"), state
settled       readers, high {p: seqno}: nothing more was written, and these read to the end
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, NoReturn

from tests.model import Row, State, apply

Event = dict[str, Any]
History = list[Event]
Place = tuple[str, int]
Mutation = tuple[bytes, bytes | None]
Given = tuple[int, int, int, bytes, bytes | None]
"""Partition, id, seqno, key, value."""
_SHOWN = 400


def refuse(why: str, *events: Event | None) -> NoReturn:
    """Fail, with the events that contradict each other."""
    shown = [str(event)[:_SHOWN] for event in events if event is not None]
    raise AssertionError("\n  ".join([why, *shown]))


def numbered(rows: Iterable[tuple[int, bytes, bytes | None]], runs: list[Any]) -> list[Given]:
    """Return the rows of a write with the ids and seqnos that its answer gave to them."""
    given = {partition: (failover_id, start) for partition, failover_id, start, _ in runs}
    result: list[Given] = []
    for partition, key, value in rows:
        if partition in given:
            failover_id, seqno = given[partition]
            given[partition] = failover_id, seqno + 1
            result.append((partition, failover_id, seqno + 1, key, value))
    return result


class Writes:
    """What each write put where, as far as it was answered or found."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], list[Any]] = {}

    def take(self, event: Event) -> list[Given]:
        """Return the rows that an event gives a place to: those of an answer, or of a write found later."""
        kind = event["event"]
        if kind == "sent":
            self._sent[event["producer"], event["number"]] = event["rows"]
        elif (kind == "acknowledged" and not event["duplicate"]) or kind == "survived":
            rows = self._sent.get((event["producer"], event["number"]))
            assert rows is not None, f"answered, and never sent: {event}"
            return numbered(rows, event["runs"])
        return []


class Branches:
    """The true history of each partition at every moment.

    ``take`` each event in turn. What is written is known ahead, because an answer may be seen after its row was.

    Attributes:
        records: every record of the branch that is true now, by partition, none forgotten.
        left: (partition, id) -> the seqno above which what was numbered under the id is not true any more.
        purge: the purge seqno by partition.
    """

    def __init__(self, history: History) -> None:
        self.records: dict[int, list[tuple[int, int]]] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.logs: dict[int, list[tuple[int, int]]] = {}
        self.purge: dict[int, int] = {}
        self._written: dict[tuple[int, int, int], Mutation] = {}
        self._rows: dict[int, list[Mutation | None]] = {}
        self._last: dict[int, dict[bytes, int]] = {}
        self._later: dict[int, dict[int, int]] = {}
        self._states: dict[int, tuple[list[int], list[State]]] = {}
        self._past: list[Branches] = []
        writes = Writes()
        for event in history:
            for partition, failover_id, seqno, key, value in writes.take(event):
                self._written.setdefault((partition, failover_id, seqno), (key, value))

    def take(self, event: Event) -> None:
        """Take note of new records and purge seqnos."""
        if event["event"] == "opened":
            for p, log in event["logs"].items():
                self.records[p] = self.logs[p] = list(log)
        elif event["event"] == "purge":
            p = event["partition"]
            self.purge[p] = max(self.purge.get(p, 0), event["seqno"])
        elif event["event"] == "restart":
            self._past.append(self._as_it_is())
            for p, told in event["partitions"].items():
                self.purge[p] = told["purge"]
                self.logs[p] = told["after"]
                if "put_back" in event:
                    self._put_back(p, event["put_back"][p])
                if told["after"][-1] != self.records[p][-1]:
                    self._branch(p, *told["after"][-1])

    def _as_it_is(self) -> "Branches":
        other = Branches([])
        for name, value in self.__dict__.items():
            other.__dict__[name] = dict(value) if isinstance(value, dict) else value
        return other

    def when_sent(self, event: Event) -> "Branches":
        """What was true when a run or marker was sent: restarts may have come since."""
        restarts = event.get("restarts", len(self._past))
        return self if restarts == len(self._past) else self._past[restarts]

    def _branch(self, p: int, new_id: int, at: int) -> None:
        for failover_id, _ in self.records[p]:
            self.left[p, failover_id] = min(self.left.get((p, failover_id), at), at)
        self.records[p] = [(i, seqno) for i, seqno in self.records[p] if seqno <= at]
        self.records[p].append((new_id, at))
        for cache in (self._rows, self._last, self._later, self._states):
            cache.pop(p, None)

    def _put_back(self, p: int, log: list[tuple[int, int]]) -> None:
        """The branch of an older log is the true one again."""
        now = self.records[p]
        same = next((i for i, (a, b) in enumerate(zip(now, log, strict=False)) if a != b), None)
        same = min(len(now), len(log)) if same is None else same
        fork = min(
            (records[same][1] for records in (now, log) if len(records) > same), default=None
        )
        if fork is not None:
            for failover_id, _ in now[same:]:
                self.left[p, failover_id] = min(self.left.get((p, failover_id), fork), fork)
        for failover_id, _ in log:
            self.left.pop((p, failover_id), None)
        self.records[p] = list(log)
        for cache in (self._rows, self._last, self._later, self._states):
            cache.pop(p, None)

    def newest(self, p: int) -> int:
        """The newest id."""
        return self.records[p][-1][0]

    def true_up_to(self, p: int, failover_id: int) -> int | None:
        """Up to where what has that id's branch is true now; None: all of it. An id never given is true nowhere."""
        if failover_id == self.newest(p):
            return None
        return self.left.get((p, failover_id), 0)

    def id_at(self, p: int, seqno: int) -> int:
        """The id under which a seqno, from 1, was given."""
        records = self.records[p]
        return records[max(bisect_left(records, seqno, key=lambda r: r[1]) - 1, 0)][0]

    def _know(self, p: int, seqno: int) -> list[Mutation | None]:
        rows = self._rows.setdefault(p, [])
        last = self._last.setdefault(p, {})
        later = self._later.setdefault(p, {})
        while len(rows) < seqno:
            at = len(rows) + 1
            row = self._written.get((p, self.id_at(p, at), at))
            rows.append(row)
            if row is not None:
                if row[0] in last:
                    later[last[row[0]]] = at
                last[row[0]] = at
        return rows

    def row(self, p: int, seqno: int) -> Mutation | None:
        """The mutation at a seqno; None when nobody was told of one."""
        return self._know(p, seqno)[seqno - 1]

    def newer(self, p: int, seqno: int, horizon: int) -> bool:
        """Whether the key at a seqno was written again at or below the horizon."""
        self._know(p, horizon)
        return self._later[p].get(seqno, horizon + 1) <= horizon

    def state_at(self, p: int, seqno: int) -> State:
        """The live keys and their values at a seqno."""
        rows = self._know(p, seqno)
        at, states = self._states.setdefault(p, ([0], [{}]))
        nearest = bisect_right(at, seqno) - 1
        if at[nearest] == seqno:
            return states[nearest]
        above = [Row(0, *row) for row in rows[at[nearest] : seqno] if row is not None]
        state = apply(dict(states[nearest]), above)
        at.insert(nearest + 1, seqno)
        states.insert(nearest + 1, state)
        return state


class Held:
    """What one reader has of one partition, from the events alone.

    Attributes:
        id: the newest id it was told.
        marker: the seqno of the marker that the last run ended in, None when it may not take one.
        runs: what it received and did not undo.
        states: whether to keep states; without them ``state`` and those of the markers are empty.
    """

    def __init__(self, states: bool = True) -> None:
        self.states = states
        self.id: int | None = None
        self.seqno = self.horizon = 0
        self.state: State = {}
        self.markers: dict[int, State] = {0: {}}
        self.marker: int | None = None
        self.runs: list[Event] = []

    def receive(self, event: Event) -> None:
        """Take a run."""
        if self.states:
            apply(self.state, [Row(*row) for row in event["rows"]])
        end = self.seqno = event["end"]
        self.horizon = max(self.horizon, event["horizon"])
        self.marker = end if self.horizon == end else None
        if self.marker is not None:
            self.markers[end] = dict(self.state)
        self.runs.append(event)

    def go_back(self, to: int, newest: int) -> None:
        """Take the place and the id after a rollback."""
        self.id = newest
        if to != self.seqno:
            self.state = dict(self.markers.get(to, {}))
            self.seqno = self.horizon = to
        self.markers = {m: s for m, s in self.markers.items() if m <= to}
        self.runs = [run for run in self.runs if run["start"] < to]
        self.marker = None

    def stood_at(self, seqno: int) -> bool:
        """Whether it stood there, with everything below and nothing above, since it last began or went back."""
        if seqno in (0, self.seqno) or seqno in self.markers:
            return True
        for run in self.runs:
            if run["start"] < seqno <= run["end"]:
                return seqno == run["end"] or any(row[0] == seqno for row in run["rows"])
        return False

    def horizon_at(self, seqno: int) -> int:
        """The horizon that a position at a seqno where it stood must have."""
        marker = max(m for m in (0, *self.markers) if m <= seqno)
        since = (r["horizon"] for r in self.runs if r["start"] < seqno and r["end"] > marker)
        return max(since, default=0) if seqno > marker else marker

    def copy(self) -> "Held":
        """Return what is stored when this is stored."""
        other = Held(self.states)
        other.__dict__.update(self.__dict__)
        other.state, other.markers = dict(self.state), dict(self.markers)
        other.runs = list(self.runs)
        return other


class Readers:
    """What every reader holds of every partition; ``take`` each event in turn.

    Args:
        states: whether to keep states, see ``Held``.
    """

    def __init__(self, states: bool = True) -> None:
        self._states = states
        self._held: dict[Place, Held] = {}
        self._stored: dict[Place, Held] = {}
        self._handed_in: dict[int, Held] = {}

    def of(self, event: Event) -> Held:
        """The reader's part that an event is about."""
        return self.at(event["reader"], event["partition"])

    def at(self, reader: str, partition: int) -> Held:
        """One partition of one reader."""
        held = self._held.get((reader, partition))
        if held is None:
            held = self._held[reader, partition] = Held(self._states)
        return held

    def take(self, event: Event) -> None:
        """Take note of what an event changes."""
        kind = event["event"]
        if kind == "run":
            self.of(event).receive(event)
        elif kind == "start" and event["answer"] == "started":
            self.of(event).id = event["newest"]
        elif kind == "rollback":
            self.of(event).go_back(event["to"], event["newest"])
        elif kind == "anew":
            self._held.pop((event["reader"], event["partition"]), None)
        elif kind == "stored":
            self._stored[event["reader"], event["partition"]] = self.of(event).copy()
        elif kind == "handed_in":
            self._handed_in[event["save"]] = self.of(event).copy()
        elif kind == "loaded":
            place = event["reader"], event["partition"]
            stored = self._stored.get(place)
            if "save" in event:
                stored = self._handed_in[event["save"]]
            if stored is not None:
                held = self._held[place] = stored.copy()
                held.id, held.seqno, held.horizon = event["id"], event["seqno"], event["horizon"]
                kept = {0, *event["markers"]}
                held.markers = {m: s for m, s in held.markers.items() if m in kept}
