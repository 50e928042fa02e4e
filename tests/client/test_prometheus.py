"""The metrics of following, as Prometheus would scrape them."""

from prometheus_client import CollectorRegistry, generate_latest

from upr_client import Client, Only
from upr_client.prometheus import ChangesCollector
from upr_client.testing import ScriptedServer, keys_in
from upr_client.types import Changes


def test_what_is_scraped() -> None:
    followed: dict[str, Changes] = {}
    registry = CollectorRegistry()
    registry.register(ChangesCollector(followed))
    with ScriptedServer() as server, Client(server.target) as client:
        for number, key in enumerate(keys_in(7, 3)):
            server.write(key, b"%d" % number)
        with client.bucket().changes(only=Only([7]), on_rollback="event") as changes:
            followed["indexer"] = changes
            assert 'upr_changes_connected{consumer="indexer"} 0.0' in scrape(registry)
            events = iter(changes)
            received = 'upr_changes_received_total{consumer="indexer"} 3.0'
            while received not in (text := scrape(registry)):
                next(events)
            for line in (
                'upr_changes_connected{consumer="indexer"} 1.0',
                'upr_changes_lag{consumer="indexer"} ',
                'upr_changes_stuck_partitions{consumer="indexer"} 0.0',
            ):
                assert line in text
            assert "upr_changes_last_progress_seconds{" in text
            server.roll_back(7, 1)
            while "upr_changes_rollbacks_total{" not in (text := scrape(registry)):
                next(events)
            assert 'rule="next_record"' in text
    registry = CollectorRegistry()
    registry.register(ChangesCollector({}))
    assert "upr_changes" in scrape(registry)


def scrape(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()
