"""The long-lived part of a streaming query: which cut serves its batches, and how far each batch goes.

Cuts are kept until no partition of the committed offset needs them; a query that ends leaves its newest to its lease,
so that it can be started again.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from upr_spark.errors import UprSparkError, bad_option
from upr_spark.source.offsets import Entry, Offset, format_partitions, parse_offset
from upr_spark.source.options import Settings
from upr_spark.source.planning import Answer, CutPoint, has_news, has_reached, next_offset
from upr_spark.source.server import bucket_mismatch

_ATTEMPTS: Final = 10
_HISTORY_PAUSE: Final = 0.05


class Asked(Protocol):
    """What a planner needs of a server; see ``server.Server``."""

    @property
    def bucket_version(self) -> int:
        """The version of the bucket that answered last."""

    def now(self) -> float:
        """Seconds."""

    def pause(self, seconds: float) -> None:
        """Let time pass."""

    def ask(self, ids: Mapping[int, int | None], *, whole: bool) -> dict[int, Answer]:
        """Say hello."""

    def make_cut(self, name: str, partitions: Sequence[int], lease: float) -> CutPoint:
        """Pin partitions."""

    def find_cut(self, name: str, lease: float) -> CutPoint | None:
        """Return a cut, renewed."""

    def renew(self, name: str, lease: float) -> bool:
        """Renew a cut."""

    def release(self, name: str) -> None:
        """Give a cut up."""


def random_token() -> str:
    """Return what makes a cut's name its own."""
    return secrets.token_hex(8)


def starting_offset(server: Asked, settings: Settings, cut: CutPoint | None) -> Offset:
    """Return where a query without a checkpoint begins.

    Args:
        cut: for ``latest``.

    Raises:
        UprSparkError: UPR_BAD_OPTION or UPR_BUCKET_MISMATCH, the option startingOffsets does not fit.
    """
    starting, partitions = settings.starting, settings.partitions
    if isinstance(starting, dict) and "v" in starting:
        offset = parse_offset(starting)
        check_followed(offset, settings, "startingOffsets")
        # Its cuts are of the query that it was taken from, which alone renews and releases them.
        return replace(offset, cut=None, earlier_cut=None)
    answers = server.ask(dict.fromkeys(partitions), whole=False)
    if starting == "latest" and cut is not None:
        pins = cut.pins
        entries = {p: _holding_nothing(pins[p].failover_id, pins[p].seqno) for p in partitions}
        return Offset(server.bucket_version, entries, cut.name, anchor=True)
    if isinstance(starting, dict):
        for partition, answer in answers.items():
            if starting[str(partition)] > answer.high:
                raise bad_option(
                    "startingOffsets",
                    None,
                    f"partition {partition} begins at {starting[str(partition)]}, its high seqno is {answer.high}",
                    "a seqno that the partition has, or latest",
                )
        entries = {p: _holding_nothing(answers[p].newest_id, starting[str(p)]) for p in partitions}
        return Offset(server.bucket_version, entries, anchor=True)
    return Offset(server.bucket_version, {p: Entry(None, 0) for p in partitions})


def _holding_nothing(failover_id: int, seqno: int) -> Entry:
    return Entry(failover_id, seqno, base=seqno) if seqno else Entry(None, 0)


def check_followed(offset: Offset, settings: Settings, option: str = "partitions") -> None:
    """Refuse an offset of other partitions than those that are followed.

    Raises:
        UprSparkError: UPR_BAD_OPTION.
    """
    if tuple(offset.entries) != settings.partitions:
        raise bad_option(
            option,
            None,
            f"the offset is of partitions {format_partitions(list(offset.entries))}, followed are "
            f"{format_partitions(settings.partitions)}",
            "partitions of a query cannot change: use the ones of the offset, or a new checkpoint",
        )


class Planner:
    """Plans one streaming query.

    Args:
        server: the bucket.
        settings: of the query.
        token: gives a text for each cut that makes its name one of its own.
    """

    def __init__(
        self, server: Asked, settings: Settings, token: Callable[[], str] = random_token
    ) -> None:
        self._server = server
        self._settings = settings
        self._token = token
        self._held: dict[str, float] = {}
        self._cut: CutPoint | None = None
        self._available_now = False
        self._ended = False
        self._initial: dict[str, Any] | None = None
        self._anchored = True
        self._asked = -settings.poll_seconds
        self._fruitless: dict[int, tuple[int, int]] = {}

    def prepare_available_now(self) -> None:
        """Have everything end at what is there now."""
        self._available_now = True
        self._cut = self._make_cut()

    def initial(self) -> dict[str, Any]:
        """Return where the query begins; the same each time it is asked."""
        if self._initial is None:
            cut = None
            if self._settings.starting == "latest":
                cut = self._cut = self._cut or self._make_cut()
            try:
                offset = starting_offset(self._server, self._settings, cut)
            except UprSparkError as error:
                self._give_up(error, None)
                raise
            self._initial = offset.to_json()
            self._anchored = not offset.anchor
        return self._initial

    def planned(self, end: Offset) -> None:
        """Take note that a batch up to ``end`` is in Spark's log."""
        self._anchored = self._anchored or end.anchor

    def latest(self, start: dict[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the batch that begins at ``start``; ``start`` itself when there is nothing to do.

        Raises:
            UprSparkError: as ``next_offset``; UPR_BUCKET_MISMATCH; or what the server refused.
        """
        if self._ended:
            return start
        if not self._anchored and start == self._initial:
            # Spark stores the ends of batches only. Without an empty batch that ends here, a first batch that is
            # interrupted would begin at a later seqno when it is repeated.
            self._anchored = True
            return start
        offset = parse_offset(start)
        check_followed(offset, self._settings)
        self._wait()
        try:
            end = self._next(offset, limit)
        except UprSparkError as error:
            self._give_up(error, offset)
            raise
        return start if end is None else end.to_json()

    def _next(self, start: Offset, limit: int | None) -> Offset | None:
        """Return the next offset, None when there is nothing to do."""
        for _ in range(_ATTEMPTS):
            answers = self._server.ask(start.ids, whole=False)
            self._check_bucket(start)
            self._keep(start)
            known = set(self._held)
            cut = None
            if self._has_news(start, answers):
                cut = self._usable_cut(start, answers)
            if cut is None:
                self._end_run(start)
                return None
            told = self._server.ask(start.ids, whole=True)
            if not self._is_outdated(start, cut, told):
                end = next_offset(start, told, cut, self._settings.rules, limit)
                if end is not None:
                    return end
                if self._available_now:
                    self._end_run(start)
                    return None
                if cut.name not in known:
                    # What came after the cut may still be something to read, so it is left out.
                    self._fruitless = {p: (a.newest_id, a.high) for p, a in answers.items()}
                    self._drop(cut, start)
                    return None
            self._drop(cut, start)
            self._server.pause(_HISTORY_PAUSE)
        raise UprSparkError(
            "HISTORY_CHANGING",
            f"the server's history changed {_ATTEMPTS} times while a batch was planned",
            hint="start the query again when the server is up",
            retriable=True,
        )

    def _end_run(self, start: Offset) -> None:
        """Nothing is left to do, which a run with a fixed end does not look at again."""
        # Runs that come every minute, and find nothing, would else leave a cut each.
        if self._available_now:
            self._ended = True
            if self._cut is not None:
                self._drop(self._cut, start)

    def _give_up(self, error: UprSparkError, start: Offset | None) -> None:
        """Leave no cut behind: who starts a query again and again that cannot go on would use all that there may be."""
        if self._cut is not None and not error.retriable:
            self._drop(self._cut, start)

    @staticmethod
    def _is_outdated(start: Offset, cut: CutPoint, answers: Mapping[int, Answer]) -> bool:
        """Whether a pin is not part of what the server has now."""
        return any(
            cut.pins[p].failover_id != answers[p].newest_id or cut.pins[p].seqno > answers[p].high
            for p in start.entries
        )

    def _has_news(self, start: Offset, answers: Mapping[int, Answer]) -> bool:
        return any(
            has_news(entry, answers[p])
            and self._fruitless.get(p) != (answers[p].newest_id, answers[p].high)
            for p, entry in start.entries.items()
        )

    def _usable_cut(self, start: Offset, answers: Mapping[int, Answer]) -> CutPoint | None:
        """Return the cut that the next batch ends at; None when everything up to a fixed end was read."""
        cut = self._cut
        if cut is None and start.cut is not None and not self._available_now:
            cut = self._cut = self._server.find_cut(start.cut, self._settings.lease)
        if cut is not None and self._is_outdated(start, cut, answers):
            self._drop(cut, start)
            cut = None
        if cut is not None and not _all_reached(start, cut):
            return cut
        if cut is not None and self._available_now:
            return None
        self._cut = self._make_cut()
        return self._cut

    def _make_cut(self) -> CutPoint:
        name = f"{self._settings.cut_name}-{self._token()}"
        cut = self._server.make_cut(name, self._settings.partitions, self._settings.lease)
        self._held[name] = self._server.now()
        return cut

    def _drop(self, cut: CutPoint, start: Offset | None) -> None:
        """Plan with a cut no more; it is kept while something that was read lies at it."""
        self._cut = None
        if start is None or cut.name not in (start.cut, start.earlier_cut):
            self._release(cut.name)

    def _keep(self, start: Offset) -> None:
        """Renew the cuts that are needed, and give up the others. ``start`` is committed."""
        needed = {start.cut, start.earlier_cut, self._cut.name if self._cut else None} - {None}
        for name in [name for name in self._held if name not in needed]:
            self._release(name)
        now, lease = self._server.now(), self._settings.lease
        for name in sorted(name for name in needed if name is not None):
            renewed = self._held.get(name)
            if renewed is not None and now - renewed < lease / 3:
                continue
            # One that is gone is not looked for at every call.
            self._held[name] = now
            if not self._server.renew(name, lease) and self._cut and self._cut.name == name:
                self._cut = None

    def _release(self, name: str) -> None:
        self._held.pop(name, None)
        self._server.release(name)

    def _wait(self) -> None:
        # An answer of before would call a stream idle to which something was written since.
        left = self._asked + self._settings.poll_seconds - self._server.now()
        if left > 0:
            self._server.pause(left)
        self._asked = self._server.now()

    def _check_bucket(self, offset: Offset) -> None:
        version = self._server.bucket_version
        if version != offset.bucket_version:
            raise bucket_mismatch(
                f"the offset is of a bucket of version {offset.bucket_version:016x}, the server's has {version:016x}"
            )


def _all_reached(start: Offset, cut: CutPoint) -> bool:
    return all(has_reached(entry, cut.pins[p]) for p, entry in start.entries.items())
