"""Starts whose beginning must be looked for in the store, and those that came behind them: answered in order."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from upr.engine.streams import StartRequest
from upr.storage.by_time import StoredBeginning
from upr_protocol.errors import DataDamagedError

Found = StoredBeginning | DataDamagedError


@dataclass(slots=True)
class _Waiting:
    requests: Sequence[StartRequest]
    stopped: set[int] = field(default_factory=set)


class WaitingStarts:
    """The Starts of one call that are not answered yet.

    Args:
        answer: decides on requests, opens their streams and says so, in one step; then stops the partitions given.
    """

    def __init__(self, answer: Callable[[Sequence[StartRequest], Iterable[int]], None]) -> None:
        self._answer = answer
        self._waiting: deque[_Waiting] = deque()
        self._searching = False

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, requests: Sequence[StartRequest]) -> None:
        """Take a Start; it is answered at once unless it, or one before it, waits for a search."""
        self._waiting.append(_Waiting(requests))
        self._answer_ready()

    def stop(self, partitions: Iterable[int]) -> None:
        """Have the streams that are not open yet end as soon as they are, before anything is sent of them."""
        gone = set(partitions)
        for waiting in self._waiting:
            waiting.stopped |= gone

    def clear(self) -> None:
        """Answer none of them: the call ends."""
        self._waiting.clear()

    def next_search(self) -> list[tuple[int, int]] | None:
        """Return the (partition, time) pairs to be searched for in the store; None when nothing is to be, or is."""
        if self._searching or not self._waiting:
            return None
        self._searching = True
        return [
            (one.partition, one.from_time)
            for one in self._waiting[0].requests
            if one.needs_search and one.from_time is not None
        ]

    def found(self, results: Sequence[Found]) -> None:
        """Take what the search came to, in the order of what was asked for."""
        self._searching = False
        if not self._waiting:
            return
        left = iter(results)
        first = self._waiting[0]
        first.requests = [
            replace(one, stored=next(left)) if one.needs_search else one for one in first.requests
        ]
        self._answer_ready()

    def _answer_ready(self) -> None:
        while self._waiting and not any(one.needs_search for one in self._waiting[0].requests):
            ready = self._waiting.popleft()
            self._answer(ready.requests, ready.stopped)
