"""Metrics for Prometheus out of ``changes.status()``; needs ``upr-stream[metrics]``."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from upr_client.changes.status import ChangesStatus
from upr_protocol.errors import MissingPackageError

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class HasStatus(Protocol):
    """``Changes`` or ``AsyncChanges``."""

    def status(self) -> ChangesStatus:
        """Return a snapshot."""


_Metrics = dict[str, tuple[str, Callable[[ChangesStatus], float | None]]]

_GAUGES: Final[_Metrics] = {
    "upr_changes_connected": ("Whether there is a call.", lambda s: s.connected),
    "upr_changes_partitions": ("Partitions that are followed.", lambda s: s.partitions),
    "upr_changes_live_partitions": ("Partitions with an open stream.", lambda s: s.live),
    "upr_changes_stuck_partitions": ("Partitions that cannot go on.", lambda s: len(s.problems)),
    "upr_changes_unacknowledged": (
        "Changes handed out and not acknowledged.",
        lambda s: s.unacknowledged,
    ),
    "upr_changes_lag": ("Mutations that the server is ahead.", lambda s: s.lag),
    "upr_changes_lag_seconds": ("Age of what is furthest behind.", lambda s: s.lag_seconds),
    "upr_changes_owned_partitions": ("Partitions of this member of a group.", lambda s: s.owned),
    "upr_changes_last_progress_seconds": (
        "Seconds since the last change or marker came.",
        lambda s: s.last_progress,
    ),
}
_COUNTERS: Final[_Metrics] = {
    "upr_changes_received": ("Changes received.", lambda s: s.changes),
    "upr_changes_reconnects": ("Calls that were lost.", lambda s: s.reconnects),
}


class ChangesCollector:
    """A collector for a registry of prometheus_client: ``REGISTRY.register(ChangesCollector({"indexer": changes}))``.

    It asks for a snapshot when it is scraped, and counts nothing itself. In the asyncio flavour it has to be scraped
    on the event loop, or by a push from it.

    Args:
        changes: what is followed, by the name that becomes the label ``consumer``. What is added later is seen.

    Raises:
        MissingPackageError: prometheus_client is not installed.
    """

    def __init__(self, changes: Mapping[str, HasStatus]) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise MissingPackageError(
                "prometheus_client is not installed", hint="pip install upr-stream[metrics]"
            ) from error
        self._core: Any = core
        self._changes = changes

    def collect(self) -> Iterator["Metric"]:
        """Yield the metrics of all."""
        found = {name: changes.status() for name, changes in list(self._changes.items())}
        for metrics, family in (
            (_GAUGES, self._core.GaugeMetricFamily),
            (_COUNTERS, self._core.CounterMetricFamily),
        ):
            for title, (words, value) in metrics.items():
                metric = family(title, words, labels=["consumer"])
                for name, status in found.items():
                    number = value(status)
                    if number is not None:
                        metric.add_metric([name], float(number))
                yield metric
        rollbacks = self._core.CounterMetricFamily(
            "upr_changes_rollbacks", "Rollbacks by the server's rule.", labels=["consumer", "rule"]
        )
        for name, status in found.items():
            for rule, count in status.rollbacks.items():
                rollbacks.add_metric([name, rule], count)
        yield rollbacks
