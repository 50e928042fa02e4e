"""The guarantee of that name, for ``tests/guarantees.py``."""

from tests.history import Branches, Event, History, Place, Readers, refuse


def _answer(branches: Branches, event: Event) -> tuple[str, int | None]:
    """What a Start is answered, from the present log as the specification reads it."""
    p, log = event["partition"], branches.logs[event["partition"]]
    ids = [failover_id for failover_id, _ in log]
    following = dict(zip(ids, [seqno for _, seqno in log[1:]], strict=False))
    failover_id, seqno, data_id = event["id"], event["seqno"], event["data_id"]
    if failover_id is None:
        return ("rollback", 0) if seqno else ("started", None)
    if failover_id != ids[-1]:
        return "rollback", following.get(failover_id, 0)
    if not seqno:
        return "started", None
    if data_id is not None and data_id != ids[-1] and following.get(data_id, 0) < seqno:
        return "rollback", following.get(data_id, 0)
    if seqno > event["high"]:
        return "rollback", log[-1][1]
    return ("rollback", 0) if seqno < branches.purge.get(p, 0) else ("started", None)


def rollback_honesty(history: History) -> None:
    """A rollback is told exactly when id, seqno and data id demand it; what stays is true in the new branch."""
    branches, readers = Branches(history), Readers(states=False)
    owed: dict[Place, tuple[Event, int | None]] = {}
    for event in history:
        branches.take(event)
        kind = event["event"]
        if kind == "hello":
            _check_hello(branches, event)
        elif kind == "start":
            if (event["reader"], event["partition"]) in owed:
                refuse("it was to roll back", owed[event["reader"], event["partition"]][0], event)
            _check_start(branches, readers, event)
            if event["answer"] == "rollback":
                place = event["reader"], event["partition"]
                owed[place] = event, _true_up_to(branches, readers, event)
        elif kind == "rollback":
            _check_rollback(readers, owed.pop((event["reader"], event["partition"]), None), event)
        elif kind in ("anew", "loaded", "unheard", "lost"):
            owed.pop((event["reader"], event["partition"]), None)
        readers.take(event)
    for event, _ in owed.values():
        refuse("it was to roll back, and did not", event)


def _check_hello(branches: Branches, event: Event) -> None:
    log = branches.logs[event["partition"]]
    expected: tuple[str, int | None] = ("ok", None)
    if event["id"] is not None and event["id"] != log[-1][0]:
        following = {log[i][0]: log[i + 1][1] for i in range(len(log) - 1)}
        expected = "rollback", following.get(event["id"], 0)
    if (event["answer"], event["seqno"]) != expected or event["newest"] != log[-1][0]:
        refuse(f"under the log {log} it is {expected}", event)


def _check_start(branches: Branches, readers: Readers, event: Event) -> None:
    p, held = event["partition"], readers.of(event)
    if event["answer"] == "refused":
        return
    expected = _answer(branches, event)
    if (event["answer"], event.get("told")) != expected or event["newest"] != branches.newest(p):
        refuse(f"under the log {branches.logs[p]} it is {expected}", event)
    # The log may have forgotten; this remembers every branch.
    if event["answer"] == "started" and event["seqno"] and held.id is not None:
        limit = branches.true_up_to(p, held.id)
        if limit is not None and max(held.seqno, held.horizon) > limit:
            refuse(f"it goes on at {held.seqno}, its branch was left at {limit}", event)


def _true_up_to(branches: Branches, readers: Readers, event: Event) -> int | None:
    """Up to where what the reader has is true now; None: all of it."""
    held = readers.of(event)
    return 0 if held.id is None else branches.true_up_to(event["partition"], held.id)


def _check_rollback(readers: Readers, owed: tuple[Event, int | None] | None, event: Event) -> None:
    held, to = readers.of(event), event["to"]
    told, true_up_to = owed or (None, None)
    if told is None or (told["told"], told["newest"]) != (event["told"], event["newest"]):
        refuse("it was not told so", told, event)
    limit = event["told"]
    if max(held.seqno, held.horizon) <= limit:
        right = to == held.seqno
    else:
        right = to == max((m for m in held.markers if m < limit), default=0)
        right = right or (to == limit and to in held.markers)
    if not right:
        refuse(f"at {held.seqno}, horizon {held.horizon}, markers {sorted(held.markers)}", event)
    if true_up_to is not None and to > true_up_to:
        refuse(f"what it keeps up to {to} is true only up to {true_up_to}", event)
