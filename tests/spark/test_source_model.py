"""Planning and reading of the data source against a server and an engine in memory; no JVM."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructType

from tests.spark.source_engine import Engine, model_settings
from tests.spark.source_model import ModelServer, Weather
from upr.config import ServerConfig
from upr_protocol.errors import TooManyError
from upr_protocol.handshake import Pin
from upr_protocol.limits import PARTITIONS, parse_partitions
from upr_spark.errors import UprSparkError, find_error
from upr_spark.options import read_connection, size
from upr_spark.source.columns import default_schema
from upr_spark.source.data_source import UprDataSource
from upr_spark.source.offsets import (
    Entry,
    Offset,
    format_partitions,
    parse_offset,
)
from upr_spark.source.options import OPTIONS, Rules, read_settings
from upr_spark.source.plan import (
    Planner,
    Range,
    grouped,
    next_offset,
    plan_batch,
    plan_ranges,
    thinned,
)
from upr_spark.source.server import LOAD, Answer, CutPoint, Server

_WEATHERS = {
    "rollbacks": Weather(),
    "lapses": Weather(lapses=True),
    "purges": Weather(lapses=True, purges=True),
    "everything": Weather(True, True, True, True),
}
_STARTS: tuple[Any, ...] = (
    "earliest",
    "latest",
    {"0": 0, "1": 0, "2": 0},
    {"0": -1, "1": 0, "2": -1},
    {0: 3, 2: 1},
)
"""The option startingOffsets; the last one is times by partition."""


@pytest.mark.parametrize("mode", ["emit", "reset", "fail", "any"])
@pytest.mark.parametrize("weather", list(_WEATHERS))
def test_the_sink_ends_with_what_the_server_has(mode: str, weather: str) -> None:
    engines = []
    for seed in range(40):
        engine = Engine(seed, mode, _WEATHERS[weather], _STARTS[seed % len(_STARTS)])
        engine.live()
        engine.check()
        engines.append(engine)

    assert sum(engine.server.rollbacks for engine in engines) > 40
    if weather == "rollbacks":
        assert not any("SNAPSHOT_GONE" in engine.errors for engine in engines)
    if mode == "emit":
        assert not any("ROLLBACK_REQUIRED" in engine.errors for engine in engines)
    if mode == "reset":
        assert not any("DATA_LOSS" in engine.errors for engine in engines)


# The specification's example: read up to 434 in batches that ended at 418 and 434; the server goes on from 426.

_START = Offset(7, {5: Entry(11, 434, (418, 400))}, "c1")
_ANSWER = Answer(12, 450, 426, "next_record", "words", 426)
_CUT = CutPoint("c2", {5: Pin(12, 450)})


def test_emit_goes_back_to_the_newest_end_of_a_batch_that_is_left() -> None:
    end = next_offset(_START, {5: _ANSWER}, _CUT, Rules("emit"))

    assert end is not None
    assert end.entries[5] == Entry(12, 450, (418, 400), rollback=418)
    assert plan_ranges(_START, end) == [Range(5, 418, 12, 450, 418)]


def test_fail_says_what_is_needed_to_decide() -> None:
    with pytest.raises(UprSparkError) as raised:
        next_offset(_START, {5: _ANSWER}, _CUT, Rules("fail"))

    found = find_error(f"org.apache.spark.Exception: Traceback\n{raised.value}\n\tat java")
    assert found is not None
    assert found.code == "ROLLBACK_REQUIRED"
    assert found.details["partition"] == 5
    assert found.details["old_id"] == f"{11:016x}"
    assert found.details["new_id"] == f"{12:016x}"
    assert found.details["rollback_seqno"] == 426
    assert found.details["newest_point"] == 418
    assert "onRollback=emit" in found.hint
    assert not found.retriable


def test_reset_begins_the_partition_again() -> None:
    end = next_offset(_START, {5: _ANSWER}, _CUT, Rules("reset"))

    assert end is not None
    assert end.entries[5] == Entry(12, 450, (), rollback=0, inexact=True)


@pytest.mark.parametrize("mode", ["emit", "fail"])
def test_what_is_part_of_the_new_history_stays(mode: Any) -> None:
    start = Offset(7, {5: Entry(11, 426, (418,))}, "c1")

    end = next_offset(start, {5: _ANSWER}, _CUT, Rules(mode))

    assert end is not None
    assert end.entries[5] == Entry(12, 450, (426, 418))
    assert plan_ranges(start, end) == [Range(5, 426, 12, 450, None)]


def test_who_began_above_goes_back_to_where_the_server_did_and_holds_nothing() -> None:
    start = Offset(7, {5: Entry(11, 434, base=434)}, "c1")

    end = next_offset(start, {5: _ANSWER}, _CUT, Rules("fail"))

    assert end is not None
    assert end.entries[5] == Entry(12, 450, (), rollback=426, base=426)
    assert plan_ranges(start, end) == [Range(5, 426, 12, 450, None)]


def test_what_begins_above_an_older_cut_stays_there() -> None:
    start = Offset(7, {5: Entry(11, 434, base=434)}, "c1")
    cut = CutPoint("c2", {5: Pin(11, 430)})
    answer = Answer(11, 440, None, "newest_id", "", newest_record=400)

    assert next_offset(start, {5: answer}, cut, Rules("fail")) is None
    # What the server has not any more it has undone.
    end = next_offset(start, {5: replace(answer, high=430)}, cut, Rules("fail"))
    assert end is not None
    assert end.entries[5] == Entry(11, 430, (), rollback=400, base=400)


@pytest.mark.parametrize("mode", ["emit", "fail"])
def test_an_unknown_id_is_lost_data(mode: Any) -> None:
    answer = replace(_ANSWER, rollback=0, rule="unknown_id")

    with pytest.raises(UprSparkError) as raised:
        next_offset(_START, {5: answer}, _CUT, Rules(mode))
    assert raised.value.code == "DATA_LOSS"
    end = next_offset(_START, {5: answer}, _CUT, Rules(mode, fail_on_data_loss=False))
    assert end is not None
    assert end.entries[5].rollback == 0


def test_points_below_the_purge_seqno_are_not_gone_back_to() -> None:
    end = next_offset(_START, {5: replace(_ANSWER, purge=410)}, _CUT, Rules("emit"))
    assert end is not None
    assert end.entries[5].rollback == 418

    end = next_offset(_START, {5: replace(_ANSWER, purge=420)}, _CUT, Rules("emit"))
    assert end is not None
    assert end.entries[5].rollback == 0


def test_less_under_the_same_id_is_a_missing_record() -> None:
    answer = Answer(11, 420, None, "newest_id", "", newest_record=418)
    cut = CutPoint("c2", {5: Pin(11, 420)})

    end = next_offset(_START, {5: answer}, cut, Rules("emit"))

    assert end is not None
    assert end.entries[5] == Entry(11, 420, (418, 400), rollback=418)
    late = next_offset(_START, {5: replace(answer, active=False)}, cut, Rules("emit"))
    assert late is None


def test_a_limit_lets_whole_partitions_through_and_at_least_one() -> None:
    start = Offset(7, {p: Entry(None, 0) for p in range(4)})
    answers = {p: Answer(1, 10) for p in range(4)}
    cut = CutPoint("c", {p: Pin(1, 10) for p in range(4)})

    reached = []
    offset = start
    while (end := next_offset(offset, answers, cut, Rules(), 25)) is not None:
        reached.append([p for p, entry in end.entries.items() if entry.seqno == 10])
        offset = parse_offset(json.loads(json.dumps(end.to_json())))

    assert reached == [[0, 1], [0, 1, 2, 3]]
    one = next_offset(start, answers, cut, Rules(), 1)
    assert one is not None
    assert [entry.seqno for entry in one.entries.values()] == [10, 0, 0, 0]


def _quiet_server() -> ModelServer:
    """A server with something in each partition, where nothing happens by itself."""
    server = ModelServer(Random(1), Weather())
    server.calm = True
    for partition in server.partitions:
        server.write(partition)
    return server


def _planner(server: ModelServer, mode: Any = "fail", starting: Any = "earliest") -> Planner:
    return Planner(server, model_settings(Rules(mode), starting, None))


def _read_up_to_now(server: ModelServer) -> dict[str, Any]:
    planner = _planner(server)
    return planner.latest(planner.initial(), None)


def test_runs_that_find_nothing_leave_no_cuts() -> None:
    server = _quiet_server()
    end = _read_up_to_now(server)

    for _ in range(5):
        planner = _planner(server)
        planner.prepare_available_now()
        assert planner.latest(end, None) is end
        # What is written from now on is of the next run.
        server.write(server.partitions[0])
        assert planner.latest(end, None) is end
        planner = _planner(server)
        end = planner.latest(end, None)
        assert planner.latest(end, None) is end

    assert list(server.cuts) == [end["c"]]


def test_latest_is_where_the_query_first_looked_also_when_it_is_started_again() -> None:
    server = _quiet_server()
    planner = _planner(server, starting="latest")
    start = planner.initial()
    server.write(server.partitions[0])

    # Spark logs where a batch ends, so a batch without rows comes first, that ends here.
    assert planner.latest(start, None) is start
    server.write(server.partitions[1])
    again = _planner(server, starting="latest")
    assert plan_ranges(parse_offset(again.initial()), parse_offset(start)) == []
    again.planned(parse_offset(start))
    end = again.latest(start, None)

    ranges = plan_ranges(parse_offset(start), parse_offset(end))
    assert [one.partition for one in ranges] == [0, 1]


def test_a_query_may_begin_at_a_time_in_some_partitions_and_now_in_others() -> None:
    server = _quiet_server()
    server.partitions[0].high += 5
    for starting, begun in (({0: 4}, [3, 0, 0]), ({"0": 2, "1": -1, "2": 0}, [2, None, 0])):
        planner = _planner(server, starting=starting)
        start = parse_offset(planner.initial())
        now = server.partitions[1].high
        assert [one.seqno for one in start.entries.values()] == [
            now if b is None else b for b in begun
        ]
        # It begins there again when its first batch was interrupted.
        assert start.anchor
        end = parse_offset(planner.latest(planner.latest(planner.initial(), None), None))
        at_end = [one.partition for one in plan_ranges(start, end)]
        assert at_end == [p for p, b in enumerate(begun) if b is not None]


def test_the_lag_is_what_the_newest_batch_leaves() -> None:
    server = _quiet_server()
    planner = Planner(server, model_settings(Rules(), "earliest", 1))
    start = planner.initial()
    assert planner.lag() is None
    highs = [partition.high for partition in server.partitions]

    end = planner.latest(start, 1)
    assert planner.lag() == {"seqnos": sum(highs), "behind": sum(highs[1:]), "partitionsBehind": 2}
    end = planner.latest(planner.latest(end, None), None)
    assert planner.lag() == {"seqnos": sum(highs), "behind": 0, "partitionsBehind": 0}
    server.write(server.partitions[1])
    planner.latest(end, None)
    assert (planner.lag() or {})["behind"] == 0
    assert len(json.dumps(planner.lag())) < 100


def test_a_table_of_sql_has_its_options_with_its_columns() -> None:
    told = {
        "endpoint": "127.0.0.1:1",
        "keyEncoding": "utf8",
        "writeMode": "apply",
        "leaseTtl": "9s",
    }
    properties = {"provider": "upr", "owner": "me", "path": "file:/warehouse/t", "foo": "property"}
    repeated = {f"option.{name}".lower(): value for name, value in told.items()}
    schema = UprDataSource(properties | told | repeated).schema()

    assert schema["key"].dataType == StringType()
    # What Spark gives then is the schema alone, and whatever the query says itself.
    reader: Any = UprDataSource({"leasettl": "8s"}).reader(schema)
    assert (reader._settings.load_lease, reader._settings.key_text) == (8.0, True)
    writer: Any = UprDataSource({}).writer(schema, False)
    assert "127.0.0.1:1" in repr(vars(writer))
    # A frame that is written elsewhere comes with the columns of its table.
    other: Any = UprDataSource({"endpoint": "127.0.0.1:2"}).reader(schema)
    assert (other._settings.load_lease, other._settings.key_text) == (300.0, False)

    # Where names and types match, Spark gives what is read from a table as it is: with that one's options.
    read = pa.RecordBatch.from_pylist([{"partition": 5, "key": b"k"}])
    with pytest.raises(UprSparkError, match="column partition of a table of SQL is given"):
        writer.write(iter([read]))
    with pytest.raises(UprSparkError, match="cannot be overwritten"):
        UprDataSource({"allowtruncate": "true"}).writer(schema, True)
    with pytest.raises(UprSparkError, match="not for streams that write"):
        UprDataSource({}).streamWriter(schema, False)

    with pytest.raises(UprSparkError, match="a table would show it"):
        UprDataSource(properties | {"option.token": "s3cret"}).schema()
    with pytest.raises(UprSparkError, match="option foo: is unknown"):
        UprDataSource(properties | {"option.foo": "1"}).schema()
    with pytest.raises(UprSparkError, match="CREATE TABLE has no list of columns"):
        UprDataSource({}).reader(default_schema(False, False))


def test_who_waits_for_room_takes_no_cut_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, idle = 0.0, {"upr-host-2": 100.0}
    released: list[str] = []

    def pause(server: Server, seconds: float) -> None:
        nonlocal clock
        clock += seconds

    def create(*_: Any, **__: Any) -> Any:
        if released:
            return SimpleNamespace(name="made", pins={})
        raise TooManyError("cuts are 64; must be below 64")

    def cuts(_: Any) -> list[Any]:
        # The first one is renewed each five seconds, the other one was made once.
        used = {"upr-host-1": 100 + clock // 5 * 5, "upr-host-3": 0.0, **idle}
        names = {name: name + LOAD * (name != "upr-host-3") for name in used}
        return [
            SimpleNamespace(name=names[n], expires_time=(at + 9) * 1e6, lease_seconds=9)
            for n, at in used.items()
        ]

    monkeypatch.setattr(Server, "now", lambda _: clock)
    monkeypatch.setattr(Server, "pause", pause)
    server = Server(read_connection({"endpoint": "127.0.0.1:1"}))
    admin = SimpleNamespace(
        create_cut=create, cuts=cuts, release_cut=lambda _, name: released.append(name)
    )
    monkeypatch.setattr(Server, "client", SimpleNamespace(admin=admin))
    monkeypatch.setattr(Server, "bucket", None)

    assert server.make_cut("upr-host-4" + LOAD, [5], 9).name == "made"
    assert released == ["upr-host-2" + LOAD]
    assert 15 <= clock < 20
    released.clear()
    idle.clear()
    with pytest.raises(UprSparkError) as raised:
        server.make_cut("upr-host-4", [5], 9)
    assert (raised.value.code, released) == ("TOO_MANY", [])
    assert clock > 60


def test_a_host_without_an_address_is_refused_before_anything_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    pauses: list[float] = []

    def look(host: str, port: object) -> object:
        asked.append(host)
        if host == "here":
            return []
        raise socket.gaierror(socket.EAI_AGAIN if host == "slow" else socket.EAI_NONAME, "no")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr("upr_spark.options.time.sleep", pauses.append)
    for endpoint, tries in (("nohost:1", 1), ("nohost:1,[::1]:2", 2), ("slow:1", 3)):
        asked.clear()
        with pytest.raises(UprSparkError, match="no address is known") as raised:
            read_connection({"endpoint": endpoint}).check_hosts()
        assert (raised.value.code, len(asked)) == ("UNAVAILABLE", tries)
    assert len(pauses) == 2
    for endpoint in ("nohost:1,here:1", "dns:///nohost:1"):
        read_connection({"endpoint": endpoint}).check_hosts()
    source = UprDataSource({"endpoint": "nohost:1"})
    schema = default_schema(False, False)
    for use in (
        source.schema,
        source.reader(schema).partitions,
        source.streamReader(schema).initialOffset,
        lambda: source.writer(StructType(schema.fields[3:5]), False),
    ):
        with pytest.raises(UprSparkError, match="no address is known"):
            use()
    # A task goes on where the name is gone for a while.
    asked.clear()
    read_connection({"endpoint": "nohost:1"}).open().close()
    assert asked == []


def test_starts_of_a_query_that_cannot_go_on_leave_no_cuts() -> None:
    server = _quiet_server()
    end = _read_up_to_now(server)
    at = server.partitions[0]
    at.all_rows, at.rows, at.high = [], [], 0
    at.log = at.log.with_record(99, 0)

    for _ in range(5):
        with pytest.raises(UprSparkError, match="UPR_ROLLBACK_REQUIRED"):
            _planner(server).latest(end, None)

    assert list(server.cuts) == [end["c"]]
    beyond = _planner(server, starting={"0": 9, "1": 9, "2": 9})
    beyond.prepare_available_now()
    with pytest.raises(UprSparkError, match="UPR_BAD_OPTION"):
        beyond.initial()
    assert list(server.cuts) == [end["c"]]


class _Replica(ModelServer):
    """A replica: what it got last of a partition is not whole yet, so it is not pinned."""

    incomplete: int = 0
    comes_while_asked: int = 0

    def ask(self, ids: Any, *, whole: bool) -> dict[int, Answer]:
        if whole:
            self.incomplete += self.comes_while_asked
            self.comes_while_asked = 0
        answers = super().ask(ids, whole=whole)
        at_0 = replace(answers[0], high=answers[0].high + self.incomplete)
        return answers | {0: at_0}


def test_what_becomes_whole_while_nothing_is_found_is_read_by_the_next_batch() -> None:
    server = _Replica(Random(1), Weather())
    server.calm = True
    for partition in server.partitions:
        server.write(partition)
    planner = _planner(server)
    end = planner.latest(planner.initial(), None)
    server.incomplete, server.comes_while_asked = 1, 1

    assert planner.latest(end, None) is end
    server.partitions[0].high += 2
    server.incomplete = 0

    assert planner.latest(end, None) is not end


class _Unsteady(ModelServer):
    """Its history changes whenever it is asked."""

    def ask(self, ids: Any, *, whole: bool) -> dict[int, Answer]:
        if whole:
            self.roll_back(self.partitions[0])
        return super().ask(ids, whole=whole)


def test_a_batch_that_cannot_be_planned_leaves_no_cuts() -> None:
    settings = model_settings(Rules(), "earliest", None)
    with pytest.raises(UprSparkError, match="UPR_SNAPSHOT_GONE"):
        plan_batch(unsteady := _Unsteady(Random(1), Weather()), settings, None)
    assert unsteady.cuts == {}

    server = _quiet_server()
    left = Entry(99, 1)
    starting = Offset(7, {0: left, 1: left, 2: left}).to_json()
    with pytest.raises(UprSparkError, match="UPR_DATA_LOSS"):
        plan_batch(server, model_settings(Rules(), starting, None), None)
    assert server.cuts == {}


def test_a_query_that_begins_at_the_offset_of_another_leaves_its_cut_alone() -> None:
    server = _quiet_server()
    end = _read_up_to_now(server)
    other = _planner(server, starting=end)

    server.write(server.partitions[0])
    second = other.latest(other.initial(), None)
    server.write(server.partitions[0])
    third = other.latest(second, None)
    other.latest(third, None)

    assert set(server.cuts) == {end["c"], third["c"]}


def test_an_offset_is_the_same_text_after_it_was_read() -> None:
    entries = {
        0: Entry(None, 0),
        5: Entry(11, 434, (418, 400), rollback=418),
        6: Entry(12, 9, base=3),
        7: Entry(11, 2, inexact=True),
    }
    offset = Offset(0xABC, entries, "c2", "c1", anchor=True)

    text = json.dumps(offset.to_json())

    assert parse_offset(json.loads(text)) == offset
    assert json.dumps(parse_offset(json.loads(text)).to_json()) == text
    assert '"p": [[null, 0], [0, 434, 16, 34, ["r", 418]], [1, 9, ["b", 3]], [0, 2, ["x"]]]' in text


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"ps": "0-"},
        {"p": []},
        {"p": [[4, 1]]},
        {"b": "x"},
        {"ids": ["0"]},
        {"p": [[0, -1]]},
    ],
)
def test_a_damaged_or_newer_offset_is_refused(change: dict[str, Any]) -> None:
    document = Offset(1, {5: Entry(11, 434)}).to_json() | change

    with pytest.raises(UprSparkError) as raised:
        parse_offset(document)
    assert raised.value.code == "BAD_OFFSET"
    assert raised.value.hint


def test_an_offset_of_a_thousand_partitions_is_small() -> None:
    points = tuple(range(10_000_000 - 5000, 10_000_000 - 45_000, -5000))
    offset = Offset(1, {p: Entry(11, 10_000_000, points) for p in range(PARTITIONS)}, "c")

    assert len(json.dumps(offset.to_json(), separators=(",", ":"))) < 80_000


def test_partitions_are_written_as_ranges() -> None:
    assert parse_partitions("0-2, 512,1") == [0, 1, 2, 512]
    assert format_partitions((0, 1, 2, 512)) == "0-2,512"
    assert format_partitions(parse_partitions("1023,0-1022")) == "0-1023"


def test_points_thin_out_with_their_distance() -> None:
    points = tuple(range(990, 0, -10))

    kept = thinned(points, 1000, 8)

    assert len(kept) == 8
    assert kept[0] == 990
    assert kept[-1] < 500
    assert list(kept) == sorted(kept, reverse=True)


def test_groups_are_of_about_the_same_weight() -> None:
    ranges = [Range(p, 0, 1, 1000 if p == 3 else 10) for p in range(64)]

    groups = grouped(ranges, 4)

    assert sorted(one.partition for group in groups for one in group) == list(range(64))
    assert [3] in [[one.partition for one in group] for group in groups]
    assert len(grouped(ranges[:2], 8)) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "endpoint"),
        ({"endpoint": "x"}, "endpoint"),
        ({"endpont": "h:1"}, "endpont"),
        ({"path": "x"}, "path"),
        ({"target": "127.0.0.1:2"}, "target"),
        ({"subscribe": "orders"}, "subscribe"),
        ({"tls": "maybe"}, "tls"),
        ({"connecttimeout": "soon"}, "connectTimeout"),
        ({"partitions": "0-1024"}, "partitions"),
        ({"partitions": "9-3"}, "partitions"),
        ({"onrollback": "ignore"}, "onRollback"),
        ({"batchrows": "0"}, "batchRows"),
        ({"batchbytes": "1"}, "batchBytes"),
        ({"leasettl": "31d"}, "leaseTtl"),
        ({"leasename": "upr-backup"}, "leaseName"),
        ({"minpollinterval": "soon"}, "minPollInterval"),
        ({"startingoffsets": '{"5": 434}', "partitions": "6"}, "startingOffsets"),
        ({"startingoffsets": '{"5": -3}'}, "startingOffsets"),
        ({"endingoffsets": '{"5": -2}'}, "endingOffsets"),
        ({"startingtimestamp": "2026-05-01T12:00:00"}, "startingTimestamp"),
        ({"startingtimestamp": "8796093022208000"}, "startingTimestamp"),
        ({"startingtimestamp": "1", "startingoffsets": "earliest"}, "startingTimestamp"),
        ({"startingoffsetsbytimestamp": '{"5": "1"}'}, "startingOffsetsByTimestamp"),
        (
            {"startingoffsetsbytimestamp": '{"5": 1}', "partitions": "6"},
            "startingOffsetsByTimestamp",
        ),
        ({"startingoffsets": '{"5": true}', "partitions": "5"}, "startingOffsets"),
        ({"startingoffsets": '{"5": 1, "05": 1}', "partitions": "5"}, "startingOffsets"),
        ({"startingoffsets": "yesterday"}, "startingOffsets"),
        ({"failondataloss": "yes"}, "failOnDataLoss"),
        ({"bucket": "\n"}, "bucket"),
        ({"token": "s3cret", "endpoint": "example.org:1"}, "token"),
        ({"tokenfile": "/nonexistent/file"}, "tokenFile"),
        ({"tls.ca": "/nonexistent/file"}, "tls.ca"),
        # A file that is no PEM.
        ({"tls": "true", "tls.ca": __file__}, "tls.ca"),
        ({"tls": "true", "tls.cert": __file__, "tls.key": __file__}, "tls.cert"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, str], named: str) -> None:
    given = options if named == "endpoint" else {"endpoint": "127.0.0.1:1"} | options

    with pytest.raises(UprSparkError) as raised:
        read_settings(given)
    assert raised.value.code == "BAD_OPTION"
    assert raised.value.details["option"] == named
    assert raised.value.hint or named in ("startingOffsets", "tls.ca", "tokenFile", "token")
    assert "s3cret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_take_their_values() -> None:
    settings = read_settings(
        {
            "ENDPOINT": "127.0.0.1:1",
            "minpartitions": "30",
            "leasettl": "90s",
            "batchbytes": "2m",
            "partitions": "4-7",
            "startingoffsets": '{"05": 434, "6": -2, "7": -1}',
            "endingoffsets": '{"4": 9, "5": -1}',
            "token": "s3cret",
        }
    )

    assert (settings.tasks, settings.lease, settings.batch_bytes) == (30, 90.0, 2 << 20)
    assert settings.load_lease == 90.0
    assert settings.starting == {"4": 0, "5": 434, "6": 0, "7": -1}
    assert settings.ending == {"4": 9, "5": -1, "6": -1, "7": -1}
    assert settings.begins_late
    assert settings.ends_late
    few = {"endpoint": "127.0.0.1:1", "minpartitions": "3", "partitions": "5,6"}
    assert read_settings(few).tasks == 8
    assert (read_settings(few).lease, read_settings(few).load_lease) == (3600.0, 300.0)
    for time, micros in (("1777636800123", 123_000), ("2026-05-01T14:00:00.5+02:00", 500_000)):
        begun = read_settings(few | {"startingTimestamp": time}).starting_times
        assert begun == dict.fromkeys((5, 6), 1_777_636_800_000_000 + micros)
    by_partition = read_settings(few | {"startingOffsetsByTimestamp": '{"06": 1.5}'})
    assert by_partition.starting_times == {6: 1500}
    assert "s3cret" not in repr(settings)
    assert read_connection({"endpoint": "127.0.0.1:1", "other": "1"}).bucket == "default"
    # The example is where a server listens that was told nothing else.
    with pytest.raises(UprSparkError, match=ServerConfig(data=Path()).listen):
        read_connection({})
    assert size(1, 1 << 30)("1GiB") == size(1, 1 << 30)("1g") == 1 << 30
    assert len({option.name.lower() for option in OPTIONS}) == len(OPTIONS)
