"""The feed of the page, against what was done to real servers."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import StartServer
from tests.harness import poll, wait_until
from tests.raw import RawClient, start_at
from tests.service.pages import ask, http_of
from tests.service.test_access import Guarded
from upr.cli.admin import main as admin
from upr.service.access.rules import ANYONE
from upr.service.admin import Process
from upr.service.buckets.catalog import Catalog
from upr.service.overload.callers import Turns
from upr.service.sight import feed
from upr.service.sight.web import Request
from upr_client import AsyncClient, Client, Group
from upr_protocol.errors import UprError
from upr_protocol.limits import PAGE_CONSUMERS, PAGE_PROBLEMS, PARTITIONS
from upr_protocol.partitioning import partition_of

HTTP = ("--http", "127.0.0.1:0")
FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
FEEDS = ("/api/status", "/api/bucket", "/api/consumer", "/api/partition", "/api/explain")


def told(address: str, path: str, token: str = "") -> Any:
    """Return a document of the feed."""
    found = ask(address, f"/api/{path}", shown=f"Bearer {token}" if token else "")
    assert found.status == 200, found
    assert found.headers["content-type"] == "application/json"
    return json.loads(found.body)


def refused(address: str, path: str, token: str = "") -> tuple[int, Any]:
    found = ask(address, f"/api/{path}", shown=f"Bearer {token}" if token else "")
    return found.status, json.loads(found.body)


@pytest.mark.asyncio
async def test_a_bucket_is_told_by_columns(server_process: StartServer) -> None:
    again = {"upr.service.sight.feed.LOOK_AGAIN_SECONDS": 0.2}
    server = server_process(*HTTP, "--flush-seconds", "0.1", constants=again)
    address = http_of(server)
    keys = [b"key %d" % number for number in range(3000)]
    expected = [0] * PARTITIONS
    for key in keys:
        expected[partition_of(key)] += 1

    async def bucket() -> Any:
        return await asyncio.to_thread(told, address, "bucket?bucket=default")

    first = await bucket()
    assert (sum(first["high"]), first["contents"], first["consumers"]) == (0, None, [])
    async with AsyncClient(server.target) as client, RawClient(server.target) as raw:
        await client.bucket().write_many([(key, b"x" * 50) for key in keys])
        follow = await raw.follow(consumer="here")
        await follow.start(*(start_at(p) for p in range(PARTITIONS)))
        seen = await poll(
            bucket,
            lambda one: (
                one["contents"] is not None
                and sum(one["contents"]["rows"]) == len(keys)
                and one["streams"] == PARTITIONS
            ),
        )
        await follow.close()
    assert seen["high"] == seen["durable"] == seen["contents"]["rows"] == expected
    assert seen["state"] == [1] * PARTITIONS
    assert all(
        bool(size) == bool(rows)
        for size, rows in zip(seen["contents"]["bytes"], expected, strict=True)
    )
    assert seen["numbers"]["upr_written_rows"] == seen["numbers"]["upr_bucket_mutations"] == 3000
    assert seen["commits"]["count"] >= 1
    assert seen["file_bytes"] > 0
    assert seen["free_bytes"] > 0
    assert (seen["behind"], seen["upstream"], seen["replicas"], seen["problem"]) == (None,) * 2 + (
        [],
        None,
    )


@pytest.mark.long
@pytest.mark.asyncio
async def test_consumers_are_told_by_lag_and_within_bounds(server_process: StartServer) -> None:
    server = server_process(*HTTP)
    address, key = http_of(server), b"key"
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        await bucket.set(key, b"")
        for number in range(PAGE_CONSUMERS + 5):
            await client.admin.reset_consumer(bucket, f"c {number}&", "now", create=True)
            await bucket.set(key, b"%d" % number)

        async def seen() -> Any:
            return await asyncio.to_thread(told, address, "bucket?bucket=default")

        found = await poll(seen, lambda one: sum(one["high"]) == PAGE_CONSUMERS + 6)
    count, at = PAGE_CONSUMERS + 5, partition_of(key)
    # The last ones are closest.
    lags = [(one["name"], one["lag"]) for one in found["consumers"]]
    assert lags == [(f"c {number}&", count - number) for number in range(PAGE_CONSUMERS)]
    assert found["consumers_in_all"] == count
    assert found["lag"] == [count if p == at else 0 for p in range(PARTITIONS)]
    one = told(address, "consumer?bucket=default&name=c+3%26")
    assert one["lag"] == [count - 3 if p == at else 0 for p in range(PARTITIONS)]
    place = told(address, f"partition?bucket=default&partition={at}")
    assert [reader["lag"] for reader in place["consumers"]] == list(range(count, 5, -1))
    assert (place["high"], place["state"], place["purge"]) == (count + 1, "active", 0)
    assert refused(address, "consumer?bucket=default&name=none")[0] == 404


@pytest.mark.asyncio
async def test_members_of_a_group_are_told(server_process: StartServer) -> None:
    server = server_process(*HTTP)
    address = http_of(server)
    resume = Group("team", member="one")
    async with (
        AsyncClient(server.target) as client,
        client.bucket().changes(resume=resume, on_rollback="event") as changes,
    ):

        async def read() -> None:
            async for _ in changes:
                pass

        async def seen() -> Any:
            path = "/api/consumer?bucket=default&name=team"
            return json.loads((await asyncio.to_thread(ask, address, path)).body)

        reading = asyncio.create_task(read())
        found = await poll(
            seen, lambda one: one.get("members") and one["members"][0]["partitions"] == PARTITIONS
        )
        listed = await asyncio.to_thread(told, address, "bucket?bucket=default")
        reading.cancel()
    assert [(one["name"], one["members"]) for one in listed["consumers"]] == [("team", 1)]
    (member,) = found["members"]
    assert (member["name"], member["partitions"], member["releasing"]) == ("one", PARTITIONS, 0)
    assert member["lease_left_seconds"] > 0


def test_explain_answers_as_the_command_does(server_process: StartServer) -> None:
    server = server_process(*HTTP)
    key = b"key"
    at = partition_of(key)
    with Client(server.target) as client:
        for number in range(5):
            client.bucket().set(key, b"%d" % number)
    server.kill()
    server.start()
    address = http_of(server)
    with Client(server.target) as client:
        client.bucket().set(key, b"after")
    place = told(address, f"partition?bucket=default&partition={at}")
    old, new = (record["failover_id"] for record in place["log"])
    assert [record["seqno"] for record in place["log"]] == [0, 5]
    for client_id, seqno, markers in (
        (old, 5, "5"),
        (old, 7, "3,5"),
        (new, 6, ""),
        (new, 9, "5"),
        ("", 4, ""),
        ("abc", 2, "1"),
        (new, 0, ""),
    ):
        query = (
            f"explain?bucket=default&partition={at}&id={client_id}&seqno={seqno}&markers={markers}"
        )
        command = ["explain", str(at), "--seqno", str(seqno), "--target", server.target, "--json"]
        command += ["--id", client_id] if client_id else []
        command += ["--markers", markers] if markers else []
        done = CliRunner().invoke(admin, command)
        assert done.exit_code == 0, done.output
        assert told(address, query) == json.loads(done.stdout)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("partition?bucket=default", "partition is ''; must be 0 to 1023"),
        ("partition?bucket=default&partition=1024", "must be 0 to 1023"),
        ("partition?bucket=default&partition=-1", "must be 0 to 1023"),
        ("partition?bucket=default&partition=" + "9" * 5000, "must be 0 to 1023"),
        ("explain?bucket=default&partition=1&id=x", "must be 1 to 16 hex digits"),
        ("explain?bucket=default&partition=1&seqno=1.5", "seqno is '1.5'"),
        ("explain?bucket=default&partition=1&seqno=%D9%A1", "seqno is"),
        (f"explain?bucket=default&partition=1&seqno={2**48}", "must be 0 to 281474976710655"),
        ("explain?bucket=default&partition=1&markers=" + "1," * 100, "markers are 100"),
    ],
)
def test_what_is_out_of_range_is_refused(http_address: str, query: str, words: str) -> None:
    status, problem = refused(http_address, query)
    assert (status, problem["reason"]) == (400, "INVALID_ARGUMENT")
    assert words in problem["message"]
    assert len(problem["message"]) < 300


def test_nothing_is_open_without_credentials_but_the_checks_and_the_files(
    server_process: StartServer, tmp_path: Path
) -> None:
    guarded = Guarded(server_process, tmp_path, *HTTP)
    address = http_of(guarded.server)
    # The port names its pages to those who ask for one that is not there.
    listed = ask(address, "/none").body.removeprefix("no such page; there are ").split()
    paths = {path.rstrip(",") for path in listed}
    assert paths == {*FILES, *FEEDS, "/metrics", "/healthz", "/readyz"}
    for path in sorted(paths):
        for shown in ("", "Bearer upr_made-up", "Basic dTpw", "Bearer", guarded.owner):
            found = ask(address, f"{path}?bucket=default&partition=1&name=x", shown=shown)
            assert found.headers["content-security-policy"].startswith("default-src 'none'; ")
            if path in FILES:
                # What every server of the version has, to the byte.
                assert found.body == (feed._FOLDER / FILES[path]).read_text()
            elif path in ("/healthz", "/readyz"):
                assert found.body in ("serving\n", "not serving\n")
            else:
                assert (found.status, found.body) == (401, "refused\n"), path
    owner = f"Bearer {guarded.owner}"
    for path in sorted(paths):
        assert ask(address, f"{path}?bucket=default&partition=1", shown=owner).status in (200, 404)
    log, command = guarded.server.log_text(), Path(f"/proc/{guarded.server.pid}/cmdline")
    for secret in (guarded.owner, "made-up"):
        assert secret not in log + command.read_text()


@pytest.mark.long
def test_a_token_of_one_bucket_sees_only_it(server_process: StartServer, tmp_path: Path) -> None:
    guarded = Guarded(server_process, tmp_path, *HTTP)
    address = http_of(guarded.server)
    with Client(guarded.target, token=guarded.owner) as client:
        for name in ("mine", "theirs"):
            client.admin.create_bucket(name)
    tokens = {
        role: guarded.changed(lambda role=role: guarded.add(role, {role: {"mine"}}))  # type: ignore[misc]
        for role in ("read", "admin", "write")
    }
    for role in ("read", "admin"):
        status = told(address, "status", tokens[role])
        assert [one["name"] for one in status["buckets"]] == ["mine"]
        assert (status["viewer"], status["problems"]) == (role, [])
        assert told(address, "bucket?bucket=mine", tokens[role])["name"] == "mine"
        for path in ("bucket", "consumer", "partition", "explain"):
            answers = [
                refused(address, f"{path}?bucket={name}&partition=1&name=x", tokens[role])
                for name in ("theirs", "nowhere", "default", "")
            ]
            # Whether there is such a bucket or not, the refusal is the same to the letter.
            assert answers == [answers[0]] * 4
            assert (answers[0][0], answers[0][1]["reason"]) == (403, "PERMISSION_DENIED")
    assert ask(address, "/api/status", shown=f"Bearer {tokens['write']}").status == 401
    names = [one["name"] for one in told(address, "status", guarded.owner)["buckets"]]
    assert names == ["default", "mine", "theirs"]
    assert refused(address, "bucket?bucket=nowhere", guarded.owner)[0] == 404
    # Troubles of the server, which have paths and names, are told to those who administer all of it.
    guarded.file.write_text(guarded.file.read_text() + "[")
    wait_until(lambda: told(address, "status", guarded.owner)["problems"], "the problem")
    for role in ("read", "admin"):
        assert told(address, "status", tokens[role])["problems"] == []


def test_a_name_that_somebody_else_owns_reads_no_feed(http_address: str) -> None:
    for path in FEEDS:
        assert ask(http_address, path, host="rebound.example").status == 403


@pytest.mark.asyncio
async def test_a_bucket_is_looked_at_once_for_all_who_watch(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        process, turns = Process(1, lambda: 0, lambda: 0), Turns()
        pages = feed.Feed(catalog, process, lambda: True, None, turns).pages()
        request = Request("GET", "/api/bucket", {"bucket": "default"}, {}, "")
        made, faults = list[Any](), [ValueError("a fault")]
        columns = feed._columns

        def counted(host: Any) -> Any:
            made.append(host)
            if faults:
                raise faults.pop()
            return columns(host)

        monkeypatch.setattr(feed, "_columns", counted)
        clock = [1000.0]
        stood = SimpleNamespace(monotonic=lambda: clock[0], thread_time=time.thread_time)
        monkeypatch.setattr(feed, "time", stood)

        async def look() -> Any:
            return json.loads((await pages["/api/bucket"].make(request, ANYONE)).body)

        # A page that could not be made is no page, and that of one who left is there for others.
        with pytest.raises(ValueError, match="a fault"):
            await look()
        leaving = asyncio.create_task(look())
        async with asyncio.timeout(10):
            while len(made) < 2:
                await asyncio.sleep(0)
                leaving.cancel()
        made.clear()
        await look()
        assert made == []
        clock[0] += 1.1
        await asyncio.gather(*(look() for _ in range(10)))
        assert len(made) == 1
        clock[0] += 0.9
        await look()
        assert len(made) == 1
        clock[0] += 0.2
        await look()
        assert len(made) == 2
        # A failover is seen at once.
        partitions = catalog.find("default").bucket.partitions
        partitions.state[5] = 3
        assert (await look())["state"][5] == 3
        before = (await look())["changed"]
        partitions.newest_id[7] += 1
        assert (await look())["changed"] != before
        assert len(made) == 4
        problems = partitions.problems
        problems.update({p: UprError("damaged") for p in range(PAGE_PROBLEMS + 5)})
        clock[0] += 1.1
        found = await look()
        assert (len(found["problems"]), len(found["damaged"])) == (PAGE_PROBLEMS, len(problems))
        await catalog.drop("default", None)
        assert (await pages["/api/bucket"].make(request, ANYONE)).status == 404
    finally:
        await catalog.close()


@pytest.mark.asyncio
async def test_all_answers_have_their_share_together(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        process, turns, charged = Process(1, lambda: 0, lambda: 0), Turns(), list[float]()
        monkeypatch.setattr(turns, "charge", charged.append)
        # The one look of this test is made below.
        monkeypatch.setattr(feed._Sizes, "watch", lambda sizes: None)
        pages = feed.Feed(catalog, process, lambda: True, None, turns).pages()
        query = {"bucket": "default", "partition": "1"}
        for path in ("status", "partition", "explain", "bucket"):
            request = Request("GET", f"/api/{path}", query, {}, "")
            assert (await pages[request.path].make(request, ANYONE)).status == 200
        assert len(charged) == 4
        assert min(charged) > 0
        # A look rests nine times as long as it took, and no other bucket's is made meanwhile.
        one, clock, rests = asyncio.Lock(), [1000.0], list[tuple[float, bool]]()

        def look(*_: Any) -> None:
            clock[0] += 0.25

        async def rest(seconds: float) -> None:
            rests.append((seconds, one.locked()))

        monkeypatch.setattr(feed, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(feed, "asyncio", SimpleNamespace(sleep=rest))
        monkeypatch.setattr(feed, "look_through", look)
        await feed._Sizes(catalog.find("default"), one)._look()
        assert set(rests) == {(0.25 * 9, True)}
    finally:
        await catalog.close()


def test_problems_are_told_in_words(server_process: StartServer, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    fails.touch()
    armed = f"journal.before_append=error-while:EIO:{fails}"
    server = server_process(*HTTP, environment={"UPR_FAILPOINTS": armed})
    address = http_of(server)

    async def write_and_look() -> Any:
        async with RawClient(server.target) as raw:
            writer = await raw.writer("")
            writing = asyncio.create_task(writer.write([(b"key", b"value")]))
            found = await poll(
                lambda: asyncio.to_thread(told, address, "status"),
                lambda one: one["buckets"][0]["problem"] is not None,
            )
            fails.unlink()
            await writing
            return found

    found = asyncio.run(write_and_look())
    (bucket,) = found["buckets"]
    assert "the journal cannot be written" in bucket["problem"]["message"]
    assert (bucket["problem"]["hint"], found["ready"]) == ("see the server's log", False)
    wait_until(lambda: told(address, "status")["buckets"][0]["problem"] is None, "its end")
