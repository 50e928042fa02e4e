"""/metrics and /readyz of real servers, against what was done to them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conftest import StartServer
from tests.harness import poll
from tests.raw import RawClient, start_at
from tests.service.keys import some_keys
from tests.service.pages import Said, ask, http_of, numbers
from upr.service.admin import Process
from upr.service.buckets.catalog import Catalog
from upr.service.overload.callers import Turns
from upr.service.sight.counts import OTHER, REASONS_MAX, count_reason
from upr.service.sight.metrics import STATES, Metrics
from upr_client import AsyncClient
from upr_protocol.limits import CONNECTIONS_MAX, METRICS_CONSUMERS

HTTP = ("--http", "127.0.0.1:0")
Numbers = dict[tuple[str, str], float]


async def asked(address: str, path: str) -> Said:
    return await asyncio.to_thread(ask, address, path)


async def told(address: str) -> Numbers:
    return await asyncio.to_thread(numbers, address)


@pytest.mark.asyncio
async def test_what_was_written_and_read_is_counted(server_process: StartServer) -> None:
    server = server_process(*HTTP, "--max-value-bytes", "1000")
    address = http_of(server)
    idle = await told(address)
    assert idle["upr_ready", ""] == idle["upr_active", ""] == idle["upr_bucket_up", ""] == 1
    assert idle["upr_written_rows_total", ""] == idle["upr_commit_seconds_count", ""] == 0
    async with RawClient(server.target) as raw:
        follow = await raw.follow()
        await follow.start(*(start_at(p) for p in range(1024)))
        writer = await raw.writer("somebody")
        await writer.write([(b"key %d" % i, b"x" * 100) for i in range(50)])
        again = await raw.writer("somebody")
        await again.write([(b"key %d" % i, b"x" * 100) for i in range(50)])
        refused = await writer.write([(b"large", b"x" * 1001)])
        assert refused.HasField("refused")

        async def sent() -> Numbers:
            return await told(address)

        def is_told(found: Numbers) -> bool:
            # The loop is looked at in intervals, and a write is counted behind its answer.
            return (
                found["upr_sent_rows_total", ""] == 50
                and found["upr_writes_total", "refused"] == 1
                and found["upr_loop_delay_seconds_count", ""] > 0
            )

        busy = await poll(sent, is_told)
        assert (busy["upr_followers", ""], busy["upr_streams", ""]) == (1, 1024)
        assert (busy["upr_open_calls", "follow"], busy["upr_open_calls", "write"]) == (1, 2)
        await follow.close()
        await writer.close()
        await again.close()
    assert busy["upr_written_rows_total", ""] == busy["upr_bucket_mutations", ""] == 50
    assert 5000 < busy["upr_written_bytes_total", ""] < 6500
    assert 5000 < busy["upr_sent_bytes_total", ""] < 60_000
    assert busy["upr_sent_frames_total", ""] >= 1
    outcomes = {
        name: busy["upr_writes_total", name] for name in ("applied", "duplicate", "refused")
    }
    assert outcomes == {"applied": 1, "duplicate": 1, "refused": 1}
    assert busy["upr_refusals_total", "INVALID_ARGUMENT"] == 1
    assert busy["upr_commit_seconds_count", ""] == busy["upr_fsync_seconds_count", ""] >= 1
    assert busy["upr_commit_seconds_sum", ""] >= busy["upr_fsync_seconds_sum", ""] > 0
    assert busy["upr_commit_seconds_bucket", "+Inf"] == busy["upr_commit_seconds_count", ""]
    assert busy["upr_tail_limit_bytes", ""] == 64 * 2**20
    assert 0 < busy["upr_tail_bytes", ""] < 20_000
    assert busy["upr_loop_delay_seconds_count", ""] > 0
    assert busy["process_open_fds", ""] > 10
    assert 0 <= busy["upr_connections", ""] < busy["upr_connections_max", ""] <= CONNECTIONS_MAX
    assert busy["upr_metrics_cpu_seconds_total", ""] > 0
    left = await poll(sent, lambda found: found["upr_followers", ""] == 0)
    assert left["upr_follow_ends_total", "CLIENT_LEFT"] == 1


@pytest.mark.asyncio
async def test_trouble_with_the_disk_turns_readiness_and_is_counted(
    server_process: StartServer, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    armed = f"journal.before_append=error-while:EIO:{fails}"
    server = server_process(*HTTP, environment={"UPR_FAILPOINTS": armed})
    address = http_of(server)
    assert (await asked(address, "/readyz")).status == 200
    async with RawClient(server.target) as raw:
        writer = await raw.writer("")
        write = asyncio.create_task(writer.write([(key, b"x") for key in some_keys(7, 9)]))
        found = await poll(lambda: asked(address, "/readyz"), lambda one: one.status == 503)
        assert found.body == "not serving\n"
        # The process serves: nobody should restart it for that.
        assert (await asked(address, "/healthz")).status == 200
        bad = await told(address)
        assert (bad["upr_ready", ""], bad["upr_bucket_up", ""]) == (0, 0)
        names = ("upr_problems_begun_total", "upr_problems_ended_total")
        assert [bad[name, "journal"] for name in names] == [1, 0]
        fails.unlink()
        await poll(lambda: asked(address, "/readyz"), lambda one: one.status == 200)
        assert not (await write).HasField("refused")
        good = await told(address)
        assert (good["upr_ready", ""], good["upr_bucket_up", ""]) == (1, 1)
        assert [good[name, "journal"] for name in names] == [1, 1]
        assert good["upr_problems_begun_total", "flush"] == 0


@pytest.mark.asyncio
async def test_a_bucket_that_only_cannot_be_compacted_is_ready(
    server_process: StartServer, tmp_path: Path
) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    armed = f"merge.before_commit=error-while:EIO:{fails}"
    flushes = ("--tail-bytes", "65536", "--flush-seconds", "0.05")
    server = server_process(*HTTP, *flushes, environment={"UPR_FAILPOINTS": armed})
    address, number = http_of(server), 0
    async with AsyncClient(server.target) as client:

        async def written() -> Numbers:
            nonlocal number
            number += 1
            await client.bucket().set(b"key", b"%d" % number)
            return await told(address)

        bad = await poll(written, lambda one: one["upr_bucket_up", ""] == 0)
        assert bad["upr_problems_begun_total", "merge"] == 1
        assert (await asked(address, "/readyz")).status == 200
        fails.unlink()
        await poll(written, lambda one: one["upr_bucket_up", ""] == 1)


@pytest.mark.asyncio
async def test_a_replica_is_ready_when_it_is_in_step(
    server_process: StartServer, tmp_path: Path
) -> None:
    upstream = server_process(*HTTP)
    target, there = upstream.target, http_of(upstream)
    async with AsyncClient(target) as client:
        await client.bucket().write_many([(b"key %d" % i, b"v") for i in range(100)])
    assert upstream.terminate() == 0
    replica = server_process(*HTTP, "--replicate-from", target)
    here = http_of(replica)
    found = await asked(here, "/readyz")
    assert (found.status, found.body) == (503, "not serving\n")
    assert (await asked(here, "/healthz")).status == 200
    assert (await told(here))["upr_active", ""] == 0
    upstream.start()
    there = http_of(upstream)
    await poll(lambda: asked(here, "/readyz"), lambda one: one.status == 200)

    async def replicated() -> Numbers:
        return await told(here)

    seen = await poll(replicated, lambda one: one["upr_replica_in_step", ""] == 1)
    assert (seen["upr_replica_lag_rows", ""], seen["upr_replica_lag_seconds", ""]) == (0, 0)
    assert seen["upr_written_rows_total", ""] == seen["upr_bucket_mutations", ""] == 100
    assert (seen["upr_replica_connected", ""], seen["upr_replica_undone_rows_total", ""]) == (1, 0)
    lag = "upr_peer_lag_rows", replica.target
    assert (await poll(lambda: told(there), lambda one: one.get(lag) == 0))["upr_active", ""] == 1
    # What one lacks that acknowledges nothing is not known.
    server_process("--replicate-from", target, "--anonymous")
    both = await poll(lambda: told(there), lambda one: one["upr_followers", ""] == 2)
    assert [peer for name, peer in both if name == "upr_peer_lag_rows"] == [replica.target]
    # It serves reads of what it has while the upstream is away, and an alarm tells of that.
    upstream.kill()
    await poll(replicated, lambda one: one["upr_replica_connected", ""] == 0)
    assert (await asked(here, "/readyz")).status == 200


@pytest.mark.asyncio
async def test_the_consumers_furthest_behind_have_metrics_of_their_own(
    server_process: StartServer,
) -> None:
    server = server_process(*HTTP)
    count = METRICS_CONSUMERS + 5
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        for number in range(count):
            await client.admin.reset_consumer(bucket, f"{number}}}", "now", create=True)
            await bucket.set(b"key", b"%d" % number)
    found = await told(http_of(server))
    lags = {name: lag for (title, name), lag in found.items() if title == "upr_consumer_lag_rows"}
    # The last ones are closest.
    assert lags == {f"{number}}}": count - number for number in range(METRICS_CONSUMERS)}
    assert found["upr_consumers", ""] == count
    assert 0 <= found["upr_consumer_idle_seconds", "0}"] < 300


def test_reasons_have_a_bound() -> None:
    counter = Counter[str]()
    for number in range(2 * REASONS_MAX):
        count_reason(counter, f"REASON_{number}")
    count_reason(counter, "REASON_0")
    assert len(counter) == REASONS_MAX + 1
    assert (counter[OTHER], counter["REASON_0"]) == (REASONS_MAX, 2)


@pytest_asyncio.fixture
async def metrics(catalog: Catalog) -> AsyncIterator[Metrics]:
    yield Metrics(catalog, Process(1, lambda: 0, lambda: 0), lambda: True, Turns())
    await catalog.close()


@pytest.mark.asyncio
async def test_those_who_ask_at_once_share_a_page(metrics: Metrics) -> None:
    pages = await asyncio.gather(*(metrics.page() for _ in range(10)))
    assert len({id(page) for page in pages}) == 1
    # Who leaves takes the page from nobody.
    leaving, staying = (asyncio.create_task(metrics.page()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying != pages[0]


@pytest.mark.asyncio
async def test_pages_leave_the_loop_to_others(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(metrics._shared._turns, "charge", waited.append)
    await metrics.page()
    assert waited == [pytest.approx(metrics._shared.spent * 9)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await metrics.page()
    counting.cancel()
    # At least one behind the server, each bucket, its followers, its consumers, and all of them.
    assert turns > 4


@pytest.mark.asyncio
async def test_a_server_of_a_cluster_without_etcd_says_so(server_process: StartServer) -> None:
    server = server_process(*HTTP, "--cluster", "etcd://127.0.0.1:9/prod")
    address = http_of(server)
    found = await poll(lambda: told(address), lambda one: one["upr_set_trouble", "etcd"])
    states = {name: found["upr_set_state", name] for name in STATES}
    assert states == {"owner": 0, "replica": 0, "claiming": 0, "waiting": 1}
    assert (found["upr_grant_seconds", ""], found["upr_set_trouble", "grants"]) == (0, 0)
    later = await told(address)
    assert later["upr_etcd_silent_seconds", ""] > found["upr_etcd_silent_seconds", ""] >= 0
    assert (await asked(address, "/readyz")).status == 503
    async with AsyncClient(server.target) as client:
        status = await client.admin.status()
        assert [one.reason for one in status.problems] == ["CLUSTER_FAILS"]
        assert "cluster prod: etcd at 127.0.0.1:9: " in status.problems[0].message
        assert status.part is not None
        assert (status.part.cluster, status.part.state) == ("prod", "waiting")
        assert "etcd at 127.0.0.1:9: " in (await client.admin.topology()).waiting
    assert server.log_text().count('"part": "reading from etcd"') == 1
