"""The guarantees by name: one validator each, over a recorded history.

A history is described in ``tests/history.py``; ``protos/README.md`` says each guarantee in words, under the same
name. A validator raises AssertionError with the events that contradict each other. None of them asks the server
or the SDK anything: what is true is read off what the writers were told.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tests.history import Branches, Event, History, Place, Readers, Writes, refuse
from tests.rollback_honesty import rollback_honesty

LOG_LIMIT = 25
REASONS = {
    "FINISHED",
    "STOPPED",
    "STATE_CHANGED",
    "HISTORY_CHANGED",
    "SUPERSEDED",
    "TOO_SLOW",
    "STORAGE_ERROR",
    "SNAPSHOT_GONE",
    "SHUTTING_DOWN",
    "SILENT",
    "BUCKET_GONE",
    "PURGED",
    "LEASE_ENDED",
    "POSITIONS_RESET",
}


def identity(history: History) -> None:
    """One mutation for each partition, id and seqno, whoever was told of it and whenever."""
    branches, writes = Branches(history), Writes()
    seen: dict[tuple[int, int, int], tuple[bytes, bytes | None, Event]] = {}
    # Answers come first: a row may be seen before its writer learns where it went.
    for event in history:
        for p, failover_id, seqno, key, value in writes.take(event):
            first = seen.setdefault((p, failover_id, seqno), (key, value, event))
            if first[:2] != (key, value):
                refuse(f"two mutations at partition {p}, seqno {seqno}", first[2], event)
    for event in history:
        branches.take(event)
        if event["event"] != "run":
            continue
        p = event["partition"]
        for seqno, key, value in event["rows"]:
            known = seen.get((p, branches.when_sent(event).id_at(p, seqno), seqno))
            if known is None:
                refuse(f"nobody wrote what is at partition {p}, seqno {seqno}", event)
            if known[:2] != (key, value):
                refuse(f"two mutations at partition {p}, seqno {seqno}", known[2], event)


def order(history: History) -> None:
    """Rows rise within a stream, and each producer's writes got their seqnos in its order."""
    reached: dict[Place, tuple[int, Event]] = {}
    given: dict[tuple[str, int], tuple[int, int, Event]] = {}
    for event in history:
        if event["event"] == "run":
            stream = event["reader"], event["partition"]
            at, before = reached.get(stream, (0, event))
            for seqno, _, _ in event["rows"]:
                if seqno <= at:
                    refuse(f"seqno {seqno} comes after {at}", before, event)
                at = seqno
            reached[stream] = at, event
        elif event["event"] == "start":
            reached[event["reader"], event["partition"]] = event["seqno"], event
        elif event["event"] == "restart":
            # What was numbered above a new record is numbered again.
            for (producer, p), (_, end, old) in list(given.items()):
                high = event["partitions"].get(p, {}).get("high_after", end)
                if high < end:
                    given[producer, p] = 0, high, old
        elif event["event"] == "acknowledged" and not event["duplicate"]:
            for p, _, start, end in event["runs"]:
                number, highest, old = given.get((event["producer"], p), (0, 0, event))
                if number < event["number"] and start < highest:
                    refuse(f"partition {p}: a later write got an earlier seqno", old, event)
                if number > event["number"] and start >= highest:
                    refuse(f"partition {p}: an earlier write got a later seqno", old, event)
                if event["number"] >= number:
                    given[event["producer"], p] = event["number"], end, event


def marker_truth(history: History) -> None:
    """At each marker that a reader may take, it holds the state that was true at that seqno; it takes no other."""
    branches, readers = Branches(history), Readers()
    for event in history:
        branches.take(event)
        if event["event"] == "marker" and readers.of(event).marker != event["seqno"]:
            refuse(f"no marker to be taken at {event['seqno']}", event)
        readers.take(event)
        if event["event"] == "run":
            held = readers.of(event)
            if held.marker is not None:
                truth = branches.when_sent(event).state_at(event["partition"], held.marker)
                if held.state != truth:
                    refuse(f"at {held.marker} is {truth}, the reader has {held.state}", event)
        elif event["event"] == "marker" and "state" in event:
            truth = branches.when_sent(event).state_at(event["partition"], event["seqno"])
            if event["state"] != truth:
                refuse(f"at {event['seqno']} is {truth}, the reader stores {event['state']}", event)


def no_hole(history: History) -> None:
    """From N means above N; runs continue one another; a row is missing only if its run's horizon excuses it."""
    branches, readers = Branches(history), Readers(states=False)
    before: dict[Place, Event] = {}
    for event in history:
        branches.take(event)
        if event["event"] in ("start", "run"):
            place, held = (event["reader"], event["partition"]), readers.of(event)
            at = event["seqno"] if event["event"] == "start" else event["start"]
            if at != held.seqno:
                refuse(f"it stands at {held.seqno}, not at {at}", before.get(place), event)
            if event["event"] == "run":
                _excused(branches.when_sent(event), branches.purge, event)
            before[place] = event
        readers.take(event)


def _excused(branches: Branches, purge: dict[int, int], event: Event) -> None:
    p, start, end, horizon = (event[f] for f in ("partition", "start", "end", "horizon"))
    seqnos = {seqno for seqno, _, _ in event["rows"]}
    if not start < end <= horizon or (seqnos and not start < min(seqnos) <= max(seqnos) <= end):
        refuse("a run with rows outside of it, or without a range", event)
    for seqno in range(start + 1, end + 1):
        if seqno not in seqnos and not branches.newer(p, seqno, horizon):
            row = branches.row(p, seqno)
            purged = seqno <= max(purge.get(p, 0), branches.purge.get(p, 0))
            if row is not None and not (purged and row[1] is None):
                refuse(f"seqno {seqno}, {row}, is missing and nothing newer is at {horizon}", event)


def durability(history: History) -> None:
    """What was acknowledged at ``disk``, or said to be durable, is there after every restart."""
    acknowledged: dict[int, tuple[int, Event]] = {}
    for event in history:
        if event["event"] in ("acknowledged", "survived"):
            if event.get("durability", "disk") != "disk":
                continue
            for p, _, _, end in event["runs"]:
                if end > acknowledged.get(p, (0, event))[0]:
                    acknowledged[p] = end, event
        elif event["event"] == "restart":
            for p, told in event["partitions"].items():
                end, old = acknowledged.get(p, (0, None))
                if event.get("damaged") or "put_back" in event:
                    # The disk lost it, or somebody put something else in its place.
                    acknowledged[p] = min(end, told["high_after"]), old or event
                    continue
                if end > told["high_after"]:
                    refuse(
                        f"partition {p}: {end} was acknowledged, {told['high_after']} is there",
                        old,
                        event,
                    )
                if told["after"] != told["before"] and end > told["after"][-1][1]:
                    refuse(
                        f"partition {p}: {end} was acknowledged, the branch was left before",
                        old,
                        event,
                    )
                kept = told["high"] if event["clean"] else told["durable"]
                if kept is not None and kept > told["high_after"]:
                    refuse(
                        f"partition {p}: {kept} was durable, {told['high_after']} is there", event
                    )


def log_sanity(history: History) -> None:
    """Records rise, ids are new, at most 25; one record more for an unclean restart after writes, at what is
    durable, else none.
    """
    logs: dict[int, tuple[Any, Event]] = {}
    ids: dict[int, set[int]] = {}
    wrote = False
    for event in history:
        wrote = wrote or event["event"] == "sent"
        if event["event"] == "opened":
            logs = {p: (log, event) for p, log in event["logs"].items()}
            ids = {p: {failover_id for failover_id, _ in log} for p, log in event["logs"].items()}
        if event["event"] != "restart":
            continue
        for p, told in event["partitions"].items():
            log = told["after"]
            if told["before"] != logs[p][0]:
                refuse(f"partition {p}: the log changed in between", logs[p][1], event)
            expected = list(event["put_back"][p] if "put_back" in event else told["before"])
            if (wrote or "put_back" in event) and not event["clean"]:
                new_id, at = log[-1] if log else (0, -1)
                if not new_id or new_id in ids[p] or at != told["high_after"]:
                    refuse(
                        f"partition {p}: a new id at {told['high_after']} is missing: {log}", event
                    )
                ids[p].add(new_id)
                expected = [record for record in expected if record[1] <= at] + [(new_id, at)]
            seqnos = [seqno for _, seqno in log]
            if log != expected[-LOG_LIMIT:] or seqnos != sorted(seqnos):
                refuse(f"partition {p}: {log}, expected {expected[-LOG_LIMIT:]}", event)
            logs[p] = log, event
        wrote = False


def convergence(history: History) -> None:
    """When nothing is written any more, everybody who read to the end has the same, and it is what is true."""
    branches, readers = Branches(history), Readers()
    for event in history:
        branches.take(event)
        readers.take(event)
        if event["event"] == "settled":
            for p, high in event["high"].items():
                truth = branches.state_at(p, high)
                for reader in event["readers"]:
                    held = readers.at(reader, p)
                    if (held.seqno, held.state) != (high, truth):
                        refuse(
                            f"{reader}, partition {p}: {held.seqno}, {held.state}, not {truth}",
                            event,
                        )


def bounded_memory(history: History) -> None:
    """The tail stays within its limit and one write, and a reader's frames within its credit, or a quarter of it and one value."""
    for event in history:
        if event["event"] == "tail" and event["bytes"] > event["limit"] + event["largest"]:
            refuse("the tail is above its limit and one write", event)
        if event["event"] == "frame" and event["outstanding"]:
            beyond = event["outstanding"] + event["bytes"] > event["window"]
            # A consumer keeps up to a quarter back until it has more to return.
            if beyond and event["outstanding"] * 4 >= event["window"]:
                refuse("a frame beyond the credit", event)


def liveness(history: History) -> None:
    """Every stream moves to the end or has ended with a reason; nothing comes of one that is not open."""
    readers = Readers(states=False)
    streams: dict[Place, Event] = {}
    shares: dict[str, list[int]] = {}
    for event in history:
        readers.take(event)
        kind = event["event"]
        if kind == "granted" and event["shared"]:
            shares[event["reader"]] = event["partitions"]
        elif kind == "start":
            streams.pop((event["reader"], event["partition"]), None)
            if event["answer"] == "started":
                streams[event["reader"], event["partition"]] = event
            elif event["answer"] == "refused" and not event["reason"]:
                refuse("refused without a reason", event)
        elif kind == "left":
            streams = {place: s for place, s in streams.items() if place[0] != event["reader"]}
        elif kind == "lost":
            streams.pop((event["reader"], event["partition"]), None)
        elif kind == "restart":
            # Who hears of it over a network leaves when it does.
            streams = {place: s for place, s in streams.items() if s.get("remote")}
        elif kind in ("run", "ended"):
            opened = streams.get((event["reader"], event["partition"]))
            if opened is None or opened["token"] != event["token"]:
                refuse("of a stream that is not open", opened, event)
            if kind == "ended":
                until, at = opened["until"], readers.of(event).seqno
                if event["reason"] not in REASONS:
                    refuse(f"{event['reason']!r} is no reason", event)
                if event["reason"] == "FINISHED" and (until is None or at < until):
                    refuse(f"finished at {at}, the end is {until}", opened, event)
                del streams[event["reader"], event["partition"]]
        elif kind == "settled":
            for (reader, p), opened in streams.items():
                if p not in shares.get(reader, [p]):
                    # A Start that was on its way when its member lost the partition opened it; it ended with the share.
                    continue
                at = readers.at(reader, p).seqno
                if p in event["high"] and at != event["high"][p]:
                    refuse(f"{reader}, partition {p}: it stands still at {at}", opened, event)


def positions(history: History) -> None:
    """What is stored is a place with everything below it, never a new id with old data, and comes back whole; after a
    rollback it is stored before a Start (by readers that are remote: these store).
    """
    branches, readers = Branches(history), Readers(states=False)
    stored: dict[Place, Event] = {}
    unsaved: dict[Place, Event] = {}
    fields = ("id", "data_id", "seqno", "horizon", "markers")
    for event in history:
        branches.take(event)
        if event["event"] in ("stored", "handed_in"):
            _check_covered(readers, event)
        if event["event"] == "stored":
            stored[event["reader"], event["partition"]] = event
            unsaved.pop((event["reader"], event["partition"]), None)
        elif event["event"] == "rollback":
            unsaved[event["reader"], event["partition"]] = event
        elif event["event"] == "start" and "remote" in event:
            if (event["reader"], event["partition"]) in unsaved:
                refuse("started, not stored", unsaved[event["reader"], event["partition"]], event)
        elif event["event"] in ("anew", "lost") or "kept_as" in event:
            unsaved.pop((event["reader"], event["partition"]), None)
        elif event["event"] == "loaded":
            unsaved.pop((event["reader"], event["partition"]), None)
            old = stored.get((event["reader"], event["partition"]))
            if old is None or any(event[f] != old[f] for f in fields):
                refuse("loaded something else than was stored", old, event)
        readers.take(event)


def _check_covered(readers: Readers, event: Event) -> None:
    held = readers.of(event)
    if not held.stood_at(event["seqno"]) or event["horizon"] < event["seqno"]:
        refuse(f"stored at {event['seqno']}, it never stood there", event)
    if event["horizon"] < held.horizon_at(event["seqno"]):
        refuse(f"the horizon is {held.horizon_at(event['seqno'])}", event)
    markers = event["markers"]
    if not set(markers) <= set(held.markers) or max(markers, default=0) > event["seqno"]:
        refuse(f"the markers are {sorted(held.markers)}", event)
    if event["seqno"] and (event["id"] != held.id or event["data_id"] is None):
        refuse(f"the data was received under {held.id}", event)


def ownership(history: History) -> None:
    """What a consumer has in the server is its owner's: another stores nothing; it is there as it was said to be
    stored, after a crash too, and goes back by a rollback, a reset or being forgotten only.
    """
    owners: dict[Place, tuple[str, Event]] = {}
    handed: dict[int, tuple[int, Event]] = {}
    owner_of: dict[int, str] = {}
    void: set[int] = set()
    kept: dict[Place, int | None] = {}
    may_be: dict[Place, int] = {}
    went_back: dict[Place, int] = {}
    told_to: dict[Place, str] = {}
    ever: set[int] = set()
    waiting: dict[Place, list[int]] = {}
    replaced: dict[Place, list[int]] = {}
    consumer_of: dict[Place, str] = {}
    for at, event in enumerate(history):
        kind = event["event"]
        if kind in ("anew", "loaded") and "kept_as" in event:
            consumer_of[event["reader"], event["partition"]] = event["kept_as"]
        elif kind == "rollback" and (event["reader"], event["partition"]) in consumer_of:
            name = consumer_of[event["reader"], event["partition"]]
            went_back[name, event["partition"]] = at
        elif kind == "handed_in":
            handed[event["save"]] = at, event
        elif kind == "granted":
            owners = {
                place: owner
                for place, owner in owners.items()
                if place[0] != event["consumer"] or owner[0] != event["owner"]
            }
            for p in event["partitions"]:
                place = event["consumer"], p
                if told_to.get(place) != event["owner"]:
                    # What a former owner was told binds the next one's saves no more.
                    told_to.pop(place, None)
                owners[place] = event["owner"], event
        elif kind == "no_owner":
            owners = {}
        elif kind == "accepted":
            for p, save in event["saves"].items():
                owner, granted = owners.get((event["consumer"], p), ("nobody", None))
                if owner != event["owner"]:
                    refuse(f"partition {p}: the owner is {owner}", granted, event)
                owner_of[save] = owner
                waiting.setdefault((event["consumer"], p), []).append(save)
        elif kind == "kept":
            _check_kept(event, owners, owner_of, handed, kept, went_back, told_to)
            place = event["consumer"], event["partition"]
            # Of those that were accepted before it, it may take the place in one transaction.
            before = waiting.get(place, [])
            done = before.index(event["save"]) + 1 if event["save"] in before else 0
            ever.update([event["save"], *before[:done]])
            del before[:done]
            if event["save"] in void:
                may_be[place] = event["save"]
            else:
                kept[place] = event["save"]
                may_be.pop(place, None)
        elif kind == "resetting":
            for p in event["partitions"]:
                replaced[event["consumer"], p] = list(waiting.get((event["consumer"], p), []))
        elif kind == "unkept":
            place = event["consumer"], event["partition"]
            # What was accepted before a reset may be stored with it in one transaction, of which the reset's row is left.
            ever.update(save for save in replaced.pop(place, []) if save not in void)
            went_back[place] = at
            kept[place] = None
            may_be.pop(place, None)
        elif kind == "saved":
            for p, save in event["saves"].items():
                if save not in ever:
                    refuse(f"partition {p}: said to be stored, and is not", handed[save][1], event)
        elif kind == "forgetting":
            void.update(owner_of)
            for place, save in list(kept.items()):
                if place[0] == event["consumer"]:
                    went_back[place] = at
                    if save is not None:
                        may_be[place] = save
                    kept[place] = None
        elif kind == "forgotten":
            may_be = {place: s for place, s in may_be.items() if place[0] != event["consumer"]}
        elif kind == "told":
            for p, save in event["saves"].items():
                place = event["consumer"], p
                if save != kept.get(place) and (save is None or save != may_be.get(place)):
                    told = handed[save][1] if save is not None else None
                    refuse(f"partition {p}: {kept.get(place)} is stored, not {save}", told, event)
                if owners.get(place, ("", event))[0] == event["owner"]:
                    told_to[place] = event["owner"]
                kept[place] = save
                may_be.pop(place, None)


def _member(owner: str) -> str:
    """Return the member whose call it is."""
    return owner.partition(" in call ")[0]


def _check_kept(
    event: Event,
    owners: dict[Place, tuple[str, Event]],
    owner_of: dict[int, str],
    handed: dict[int, tuple[int, Event]],
    kept: dict[Place, int | None],
    went_back: dict[Place, int],
    told_to: dict[Place, str],
) -> None:
    place = event["consumer"], event["partition"]
    owner, granted = owners.get(place, ("", None))
    saved_by = owner_of[event["save"]]
    # A member that comes back takes over at once, also from a save of its former call that is under way.
    if granted is not None and granted["shared"] and _member(owner) != _member(saved_by):
        refuse("it is another's by now", handed[event["save"]][1], granted, event)
    if told_to.get(place, saved_by) != saved_by:
        refuse(f"{told_to[place]} was told what is stored already", event)
    before = kept.get(place)
    if before is None:
        return
    (at, old), (_, new) = handed[before], handed[event["save"]]
    if old["id"] == new["id"] and new["seqno"] < old["seqno"] and went_back.get(place, -1) < at:
        refuse("a stored position goes back", old, new, event)


def tombstones(history: History) -> None:
    """No key stays alive that was deleted at or below a marker taken; nothing is purged that an open stream above 0
    has not passed, unless it is very old; such a stream gets nothing more.
    """
    branches, readers = Branches(history), Readers()
    streams: dict[Place, Event] = {}
    overtaken: dict[Place, Event] = {}
    sent: dict[Place, int] = {}
    for event in history:
        branches.take(event)
        readers.take(event)
        kind = event["event"]
        place = event.get("reader", ""), event.get("partition", -1)
        if kind == "marker":
            p, at = event["partition"], event["seqno"]
            true = branches.when_sent(event).state_at(p, at)
            risen = set(readers.of(event).state) - set(true)
            if risen:
                refuse(f"{sorted(risen)} were deleted at or below {at}", event)
        elif kind == "start" and event["answer"] == "started":
            streams[place] = event
            overtaken.pop(place, None)
            sent.pop(place, None)
        elif kind == "run" and place in overtaken and "remote" not in streams[place]:
            refuse("a run of a stream that purging has overtaken", overtaken[place], event)
        elif kind == "frame":
            for p, end in event.get("reached", {}).items():
                if (event["reader"], p) in overtaken:
                    refuse("a run of a stream that purging has overtaken", event)
                sent[event["reader"], p] = end
        elif kind in ("ended", "stopped", "lost"):
            streams.pop(place, None)
            overtaken.pop(place, None)
        elif kind in ("left", "call_ended"):
            streams = {one: t for one, t in streams.items() if one[0] != event["reader"]}
            overtaken = {one: t for one, t in overtaken.items() if one[0] != event["reader"]}
        elif kind == "restart":
            streams, overtaken = {}, {}
        elif kind == "purge":
            row = branches.row(event["partition"], event["seqno"])
            if event["age"] < event["young"] or row is None or row[1] is not None:
                refuse(f"{row} must not be purged", event)
            for (reader, p), opened in streams.items():
                until, at = opened["until"], readers.at(reader, p).seqno
                # What is on its way to a remote reader is passed for the server.
                at = max(at, sent.get((reader, p), 0)) if "remote" in opened else at
                finished = until is not None and until <= at
                if p != event["partition"] or (reader, p) in overtaken or finished:
                    continue
                if 0 < at < event["seqno"]:
                    if event["age"] < event["held"]:
                        refuse(f"{reader} stands at {at}", event)
                    overtaken[reader, p] = event


def cuts(history: History) -> None:
    """A cut is one instant of all partitions; while it is held it is read as of it, and never as something else."""
    branches = Branches(history)
    made: dict[str, Event] = {}
    held: set[str] = set()
    high: dict[int, tuple[int, Event]] = {}
    newest: dict[int, tuple[int, Event]] = {}
    for event in history:
        branches.take(event)
        kind = event["event"]
        if kind == "acknowledged" and not event["duplicate"]:
            for p, _, start, end in event["runs"]:
                pin, cut = newest.get(p, (0, event))
                first_time = event["durability"] == "memory"
                if first_time and start < pin:
                    refuse(f"partition {p}: written after the cut, and below it", cut, event)
                high[p] = max(high.get(p, (0, event)), (end, event), key=lambda one: one[0])
        elif kind == "restart":
            for p, told in event["partitions"].items():
                high[p] = told["high_after"], event
        elif kind == "cut_made":
            for p, pin in event["pins"].items():
                if pin < high.get(p, (0, event))[0]:
                    refuse(
                        f"partition {p}: acknowledged before the cut, and above it",
                        high[p][1],
                        event,
                    )
                newest[p] = pin, event
            made[event["name"]] = event
            held.add(event["name"])
        elif kind == "cut_released":
            held.discard(event["name"])
        elif kind == "purge":
            for name in held:
                if made[name]["pins"].get(event["partition"], event["seqno"]) < event["seqno"]:
                    refuse("purged above a cut that is held", made[name], event)
        elif kind == "cut_read":
            _check_cut_read(branches, made[event["name"]], event["name"] in held, event)


def _check_cut_read(branches: Branches, cut: Event, held: bool, event: Event) -> None:
    p = event["partition"]
    if event["outcome"] == "FINISHED":
        truth = branches.state_at(p, cut["pins"][p])
        if event["state"] != truth:
            refuse(f"as of the cut it is {truth}", cut, event)
    elif event["outcome"] != "SNAPSHOT_GONE" or held:
        refuse("gone, though the cut is held", cut, event)


def applied_once(history: History) -> None:
    """A numbered write is applied at most once, whole or not at all, and a repetition is told what the first got."""
    applied: dict[tuple[str, int], Event] = {}
    sent: dict[tuple[str, int], Event] = {}
    for event in history:
        if event["event"] == "sent":
            sent[event["producer"], event["number"]] = event
        elif event["event"] == "restart":
            for write, old in list(applied.items()):
                lost = [
                    end > event["partitions"][p]["high_after"]
                    for p, _, _, end in old["runs"]
                    if p in event["partitions"]
                ]
                if any(lost):
                    if not all(lost) and not (event.get("damaged") or "put_back" in event):
                        refuse("a write was torn apart", old, event)
                    del applied[write]
        elif event["event"] in ("acknowledged", "survived"):
            write = event["producer"], event["number"]
            first = applied.get(write)
            rows = sum(end - start for _, _, start, end in event["runs"])
            if event["event"] == "survived" and rows != len(sent[write]["rows"]):
                refuse("a write was torn apart", sent[write], event)
            if event.get("duplicate"):
                ends = {p: end for p, _, _, end in first["runs"]} if first is not None else {}
                if any(end not in (0, ends.get(p)) for p, _, _, end in event["runs"]) or not ends:
                    refuse("said to have been applied, and was not so", first, event)
            elif first is not None and first["runs"] != event["runs"]:
                refuse("applied twice", first, event)
            else:
                applied[write] = event
        elif event["event"] == "refused" and (event["producer"], event["number"]) in applied:
            refuse("refused and applied", applied[event["producer"], event["number"]], event)


VALIDATORS: tuple[Callable[[History], None], ...] = (
    identity,
    order,
    marker_truth,
    no_hole,
    durability,
    rollback_honesty,
    log_sanity,
    convergence,
    bounded_memory,
    liveness,
    positions,
    ownership,
    tombstones,
    cuts,
    applied_once,
)


def validate(
    history: History, validators: Iterable[Callable[[History], None]] = VALIDATORS
) -> None:
    """Run validators, by default all.

    Raises:
        AssertionError: a guarantee does not hold; the message begins with its name.
    """
    for validator in validators:
        try:
            validator(history)
        except AssertionError as error:
            raise AssertionError(f"{validator.__name__}: {error}") from error
