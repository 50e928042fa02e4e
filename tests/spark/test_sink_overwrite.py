"""mode("overwrite"): what was there and is not written again goes, at the end and not before."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RunningServer
from tests.spark.sink_rows import UPSERT, Place, batches, refusal, some_rows
from upr_client import Client
from upr_client.testing import ScriptedServer, keys_in
from upr_spark.sink import truncation
from upr_spark.sink.writers import batch_writer, stream_writer

StartServer = Callable[..., RunningServer]

ALLOWED = {"allowTruncate": "true"}


def before(place: Place, count: int = 3000) -> dict[bytes, bytes]:
    """Write something that is there when the job begins, and return it."""
    rows = some_rows(count, tag=1)
    with place.opened() as bucket:
        bucket.write_many([*rows, (b"deleted", b""), (b"deleted", None)])
    return dict(rows)


def overwriting(place: Place, **more: str) -> Any:
    return batch_writer(place.options(**ALLOWED, **more), UPSERT, overwrite=True)


def on_driver(writer: Any) -> Any:
    """The writer as another process gets it."""
    return pickle.loads(pickle.dumps(writer))


def test_overwriting_is_refused_unless_allowed(place: Place) -> None:
    for more in ({}, {"allowTruncate": "false"}):
        error = refusal(
            lambda more=more: batch_writer(place.options(**more), UPSERT, overwrite=True)
        )
        assert (error.code, error.retriable) == ("OVERWRITE_REFUSED", False)
        assert place.bucket in error.message
        assert "allowTruncate" in error.hint


def test_an_overwrite_with_a_name_is_refused(place: Place) -> None:
    # Run again, it would find its own rows there before, and they are not applied once more: all of them would go.
    error = refusal(lambda: overwriting(place, writeId="nightly"))
    assert (error.code, error.details["option"]) == ("BAD_OPTION", "writeId")


def test_a_stream_of_complete_results_is_refused(place: Place) -> None:
    error = refusal(lambda: stream_writer(place.options(**ALLOWED), UPSERT, overwrite=True))
    assert error.code == "OVERWRITE_REFUSED"
    assert "foreachBatch" in error.hint


@pytest.mark.parametrize("durability", ["disk", "memory"])
@pytest.mark.parametrize("at_once", [2_000_000, 100])
def test_what_was_not_written_again_goes_at_the_end(
    place: Place, monkeypatch: pytest.MonkeyPatch, durability: str, at_once: int
) -> None:
    monkeypatch.setattr(truncation, "_ROWS_AT_ONCE", at_once)
    old = before(place)
    writer = overwriting(place, durability=durability)
    # Some keys are there already, some are not, and one has the very value that it had.
    rows = [*some_rows(4000, tag=2)[2000:], next(iter(old.items()))]
    done = on_driver(writer).write(batches(rows))
    with place.opened() as bucket:
        bucket.set(b"1", b"of another writer, meanwhile")
        bucket.delete(b"2")
        bucket.set(b"new", b"of another writer, too")
    meanwhile = {b"1": b"of another writer, meanwhile", b"new": b"of another writer, too"}
    assert place.state() == {
        key: value for key, value in {**old, **dict(rows), **meanwhile}.items() if key != b"2"
    }
    count = place.mutations()
    on_driver(writer).commit([done])
    assert place.state() == {**dict(rows), **meanwhile}
    # Nothing is deleted that is not there: 0 is written again, 1 and 2 by somebody else.
    assert place.mutations() == count + 2000 - 3


def test_what_was_written_is_not_old_before_it_is_on_disk(
    server_process: StartServer, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{held}"})
    place = Place(server.target)
    old = before(place, 20)
    writer = overwriting(place, durability="memory")
    held.touch()
    rows = [(key, b"new") for key in list(old)[:5]]
    writer.commit([writer.write(batches(rows))])
    held.unlink()
    assert place.state() == dict(rows)


def test_a_job_that_fails_deletes_nothing(place: Place) -> None:
    old = before(place)
    writer = overwriting(place)
    rows = some_rows(100, tag=2)
    done = writer.write(batches(rows))
    writer.abort([done, None])
    assert place.state() == {**old, **dict(rows)}


def test_an_empty_bucket_is_overwritten_too(place: Place) -> None:
    writer = overwriting(place)
    rows = some_rows(100)
    writer.commit([writer.write(batches(rows))])
    assert place.state() == dict(rows)


def test_a_result_without_rows_deletes_everything(place: Place) -> None:
    before(place)
    writer = overwriting(place)
    writer.commit([writer.write(iter([]))])
    assert place.state() == {}


def test_a_new_history_since_the_job_began_takes_nothing_that_it_wrote() -> None:
    """What the job writes then has seqnos that were given before, to rows that are lost."""
    with ScriptedServer() as server:
        keys = keys_in(5, 9)
        for key in keys[:6]:
            server.write(key, b"old")
        place = Place(server.target)
        writer = overwriting(place)
        server.roll_back(5, 2)
        rows = [(key, b"new") for key in (keys[1], *keys[6:])]
        done = on_driver(writer).write(batches(rows))
        assert server.state() == {keys[0]: b"old", **dict(rows)}
        on_driver(writer).commit([done])
        assert server.state() == dict(rows)


def test_a_bucket_that_was_made_anew_is_left_alone(place: Place) -> None:
    before(place)
    writer = overwriting(place)
    with Client(place.target) as client:
        client.admin.drop_bucket(place.bucket)
        client.admin.create_bucket(place.bucket)
    before(place)
    error = refusal(lambda: writer.commit([None]))
    assert error.code == "BUCKET_GONE"
    assert "all rows are written" in error.message
    assert len(place.state()) == 3000


def test_a_server_that_cannot_be_asked_where_it_is_refuses_the_job() -> None:
    options = {"endpoint": "127.0.0.1:1", "readTimeout": "1s", **ALLOWED}
    error = refusal(lambda: batch_writer(options, UPSERT, overwrite=True))
    assert (error.code, error.retriable) == ("UNAVAILABLE", True)
