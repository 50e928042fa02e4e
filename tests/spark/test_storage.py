"""Storages: one contract for folders and object stores; what goes wrong with a store; a whole life on S3."""

import errno
import hashlib
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from tests.spark.s3 import BUCKET, S3Server
from tests.spark.s3_backups import LOCATION, upr_backup
from upr_backup.errors import (
    LockedError,
    RepositoryError,
    StorageTimeoutError,
    StorageUnreachableError,
)
from upr_backup.repository import LocalStorage, Storage, check_storage, open_storage
from upr_backup.repository.lock import Lock
from upr_backup.repository.object_store import ObjectStorage
from upr_protocol.errors import InvalidArgumentError

REAL = os.environ.get("UPR_TEST_STORAGE")
"""A location of a real object store, as s3://BUCKET/PREFIX: the contract is then checked there too."""


@pytest.fixture(params=["folder", "memory", "s3", *(["real"] if REAL else [])])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "folder":
        yield open_storage(str(tmp_path / "new" / "folder"))
    elif request.param == "memory":
        memory = MemoryStore()
        yield ObjectStorage("memory://", lambda _: memory)
    elif request.param == "s3":
        request.getfixturevalue("s3")
        yield open_storage(LOCATION)
    else:
        real = open_storage(f"{REAL}/{secrets.token_hex(8)}")
        yield real
        for folder in ("chain/", "data/", "locks/"):
            for name in real.names(folder):
                real.delete(name)


def test_an_object_is_made_once(storage: Storage) -> None:
    name = "chain/0000000001.json"
    assert storage.names("chain/") == []
    for ask in (storage.read, storage.size, storage.open):
        with pytest.raises(FileNotFoundError) as missing:
            ask(name)
        assert name in str(missing.value.filename)
        assert missing.value.errno == errno.ENOENT
    storage.delete(name)
    assert storage.put_if_absent(name, b"one") is True
    # The same bytes again are another one's too.
    assert [storage.put_if_absent(name, data) for data in (b"two", b"one")] == [False, False]
    assert (storage.read(name), storage.size(name)) == (b"one", 3)
    storage.delete(name)
    assert storage.names("chain/") == []
    assert storage.put_if_absent(name, b"") is True
    assert (storage.read(name), storage.size(name)) == (b"", 0)
    check_storage(storage)
    assert storage.names("locks/") == []


def test_of_many_that_create_a_name_one_wins(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            name = f"chain/{number:010d}.json"
            won = list(pool.map(lambda me, n=name: storage.put_if_absent(n, b"%d" % me), range(8)))
            assert sum(won) == 1
            assert storage.read(name) == b"%d" % won.index(True)


def test_names_are_those_below_a_folder(storage: Storage) -> None:
    names = [f"data/{number:010d}/{part}.parquet" for number in range(5) for part in "abcd"]
    for name in [*reversed(names), "data.json", "database/1", "chain/ü +&<%41"]:
        storage.put_if_absent(name, b"")
    assert storage.names("data/") == names
    assert storage.names("data/0000000003/") == names[12:16]
    assert storage.names("chain/") == ["chain/ü +&<%41"]
    assert storage.names("locks/") == []
    everything = sorted([*names, "data.json", "database/1", "chain/ü +&<%41"])
    assert storage.names("") == everything
    storage.put_if_absent("locks/1", b"four")
    (found,) = storage.stored("locks/")
    assert (found.name, found.bytes) == ("locks/1", 4)
    assert abs(found.written - time.time()) < 300


def test_a_big_object_is_read_in_any_order(storage: Storage) -> None:
    """More than two parts, and more than two buffers of the reader."""
    data = random.Random(1).randbytes(37 * 2**20)
    sink = storage.create("data/1/big")
    for start in range(0, len(data), 3_000_001):
        assert sink.write(data[start : start + 3_000_001])
    assert sink.size == len(data)
    assert sink.finish() == hashlib.sha256(data).hexdigest()
    sink.close()
    assert storage.size("data/1/big") == len(data)
    with pytest.raises(FileExistsError):
        storage.create("data/1/big")
    with storage.open("data/1/big") as file:
        assert file.seek(-10, os.SEEK_END) == len(data) - 10
        assert file.read() == data[-10:]
        assert file.read(1) == b""
        for start, size in ((0, 5), (8 * 2**20 - 3, 6), (100, 20 * 2**20), (len(data) - 1, 9)):
            file.seek(start)
            assert file.read(size) == data[start : start + size]
            assert file.tell() == min(start + size, len(data))
        file.seek(3)
        assert file.seek(7, os.SEEK_CUR) == 10
        assert file.read(3) == data[10:13]
    empty = storage.create("data/1/empty")
    assert empty.finish() == hashlib.sha256(b"").hexdigest()
    assert storage.read("data/1/empty") == b""


def test_what_is_given_up_leaves_nothing(storage: Storage) -> None:
    for size in (100, 40 * 2**20):
        sink = storage.create("data/1/lost")
        sink.write(bytes(size))
        sink.close()
        # On a full disk it would take the room that the next run needs.
        assert storage.names("data/") == []


def test_parquet_is_read_by_row_groups(s3: S3Server) -> None:
    storage = open_storage(LOCATION)
    source = random.Random(1)
    table = pa.table({"key": [source.randbytes(60) for _ in range(200_000)]})
    sink = storage.create("data/1/a.parquet")
    # What pyarrow makes of a sink, as the data files do.
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write_table(table, row_group_size=10_000)
    sink.finish()
    s3.requests.clear()
    with storage.open("data/1/a.parquet") as file:
        parquet = pq.ParquetFile(file)
        assert parquet.read_row_group(3).equals(table.slice(30_000, 10_000))
        assert [method for method, _ in s3.requests] == ["HEAD", "GET", "GET"]
        # An error of the store goes through pyarrow as it is.
        s3.faults.refuse["GET"] = (503, "SlowDown")
        with pytest.raises(StorageUnreachableError, match="SlowDown"):
            parquet.read_row_group(19)
    s3.faults.refuse["GET"] = (403, "AccessDenied")
    with pytest.raises(PermissionError, match="AccessDenied"):
        storage.read("data/1/a.parquet")


def test_a_lost_answer_does_not_make_a_winner_a_loser(s3: S3Server) -> None:
    storage = open_storage(LOCATION)
    s3.faults.lose_answers = 1
    assert storage.put_if_absent("chain/1", b"mine") is True
    assert s3.faults.lose_answers == 0
    assert [method for method, _ in s3.requests[:2]] == ["PUT", "PUT"]
    s3.faults.lose_answers = 1
    storage.delete("chain/1")
    assert storage.names("chain/") == []
    # S3 refuses a request also because of another one that is deleting the object.
    s3.faults.conflicts = 2
    s3.requests.clear()
    assert storage.put_if_absent("chain/1", b"mine") is True
    assert [method for method, _ in s3.requests] == ["PUT", "GET", "PUT", "GET", "PUT"]
    assert storage.read("chain/1") == b"mine"
    s3.faults.conflicts = 100
    assert storage.put_if_absent("chain/2", b"mine") is False


def test_two_runs_do_not_hold_one_lock(storage: Storage) -> None:
    now = [1000.0]
    first, second = (Lock(storage, 60, lambda: now[0]) for _ in range(2))
    with first:
        with pytest.raises(LockedError):
            second.__enter__()
        now[0] += 61
        with second, pytest.raises(LockedError):
            first.keep(now=True)

    def tried(_: int) -> bool:
        with suppress(LockedError):
            Lock(storage).__enter__()
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(tried, range(8))) <= 1


def test_a_location_is_opened_again_elsewhere(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for location, same in (
        ("a/../b", str(tmp_path / "b")),
        (f"file://{tmp_path}/with%20space", f"{tmp_path}/with space"),
        (f"S3://{BUCKET}//some/prefix/", LOCATION),
        ("gs://b", "gs://b"),
        ("az://container/x", "az://container/x"),
        ("odd:name", str(tmp_path / "odd:name")),
    ):
        opened = open_storage(location)
        assert opened.location == same
        assert open_storage(opened.location).location == same
    program = (
        "import sys\n"
        "from upr_backup.repository import open_storage\n"
        "assert 'obstore' not in sys.modules\n"
        "print(open_storage(sys.argv[1]).read('chain/1').decode())\n"
    )
    open_storage(LOCATION).put_if_absent("chain/1", b"here")
    command = [sys.executable, "-c", program, LOCATION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("here\n", "")


@pytest.mark.parametrize(
    "location",
    [
        "s3://",
        "s3:///prefix",
        "s3:/bucket/prefix",
        "http://host/x",
        "s3://key:secret@bucket/x",
        "az://container/x?sig=secret",
        "s3://bucket/../x",
        "s3://buc ket/x",
        "file://host/x",
        "file:/x",
    ],
)
def test_a_location_that_is_none_is_refused(location: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        open_storage(location)
    assert "secret" not in str(refused.value)


REFUSALS = [
    ({"GET": (403, "AccessDenied")}, 2, "403 AccessDenied"),
    ({"GET": (401, "Unauthorized")}, 2, "401 Unauthorized"),
    ({"GET": (400, "ExpiredToken")}, 2, "400 ExpiredToken"),
    ({"GET": (301, "PermanentRedirect")}, 2, "AWS_REGION"),
    ({"GET": (418, "Teapot")}, 2, "418 Teapot"),
    ({"GET": (503, "SlowDown")}, 5, "503 SlowDown"),
    ({"GET": (404, "NoSuchBucket")}, 3, f"no bucket '{BUCKET}'"),
]


@pytest.mark.parametrize(("refuse", "code", "words"), REFUSALS)
def test_a_store_that_refuses_gets_one_line(
    s3: S3Server, refuse: dict[str, tuple[int, str]], code: int, words: str
) -> None:
    s3.faults.refuse = refuse
    done = upr_backup("list")
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr


ENVIRONMENTS: list[tuple[dict[str, str | None], int, str]] = [
    ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, 5, "Connection refused"),
    ({"AWS_ENDPOINT_URL": "nonsense"}, 2, "AWS_ENDPOINT_URL is no URL"),
    ({"AWS_ENDPOINT_URL": "http://[::1"}, 2, "AWS_ENDPOINT_URL is no URL"),
    ({"AWS_ALLOW_HTTP": None}, 2, "AWS_ALLOW_HTTP=true allows that"),
    ({"AWS_ACCESS_KEY_ID": "wrong"}, 2, "InvalidAccessKeyId"),
    ({"AWS_CONDITIONAL_PUT": "wrong"}, 2, "a setting of the object store"),
    # The machine's role is asked for at an address where nobody is.
    (
        {
            "AWS_ACCESS_KEY_ID": None,
            "AWS_SECRET_ACCESS_KEY": None,
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
        },
        2,
        "there are no credentials",
    ),
]


@pytest.mark.parametrize(("changes", "code", "words"), ENVIRONMENTS)
def test_a_wrong_environment_gets_one_line(
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    code: int,
    words: str,
) -> None:
    for name, value in changes.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    done = upr_backup("list")
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr


def test_a_store_that_is_silent_or_missing_gets_one_line(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = upr_backup("list", location="s3://other/x")
    assert (done.exit_code, "no bucket 'other'" in done.stderr) == (3, True), done.stderr
    # What the S3 console makes for a folder is no harm, a name with an empty part is none of ours.
    open_storage(LOCATION).put_if_absent("chain/x", b"")
    s3.objects["some/prefix/chain/"] = s3.objects["some/prefix/chain/x"]
    s3.written["some/prefix/chain/"] = 0.0
    assert open_storage(LOCATION).names("chain/") == ["chain/x"]
    s3.objects["some/prefix/chain//y"] = s3.objects.pop("some/prefix/chain/x")
    s3.written["some/prefix/chain//y"] = 0.0
    done = upr_backup("list")
    assert (done.exit_code, "an object with an empty part" in done.stderr) == (2, True), done.stderr
    s3.objects.clear()
    done = upr_backup("list")
    assert (done.exit_code, "no repository here" in done.stderr) == (2, True), done.stderr
    monkeypatch.setenv("AWS_TIMEOUT", "300ms")
    s3.faults.silent = True
    done = upr_backup("list")
    assert (done.exit_code, "did not answer in time" in done.stderr) == (6, True), done.stderr
    with pytest.raises(StorageTimeoutError, match=r"some/prefix/chain/7"):
        open_storage(LOCATION).put_if_absent("chain/7", b"")


def test_an_interrupt_is_heard_while_a_store_is_silent(s3: S3Server) -> None:
    asked = threading.Event()

    def never(*_: object) -> bool:
        asked.set()
        s3.ended.wait()
        return True

    s3.hook = never
    command = [sys.executable, "-m", "upr_backup", LOCATION, "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert asked.wait(60)
        started.send_signal(signal.SIGINT)
        said = started.communicate(timeout=60)
    assert (started.returncode, said[0], said[1].split()) == (130, b"", [b"interrupted"])


def test_what_cannot_be_written_says_why(s3: S3Server) -> None:
    storage = open_storage(LOCATION)
    s3.faults.parts = 1
    sink = storage.create("data/1/a")

    def fill() -> None:
        for _ in range(9):
            sink.write(bytes(16 * 2**20))
        sink.finish()

    with pytest.raises(OSError, match="No space left") as full:
        fill()
    assert full.value.errno == errno.ENOSPC
    sink.close()
    assert (s3.objects, s3.uploads) == ({}, {})
    s3.faults.refuse = {"PUT": (403, "AccessDenied")}
    with pytest.raises(PermissionError, match="AccessDenied") as refused:
        storage.put_if_absent("chain/1", b"")
    assert refused.value.filename == f"{LOCATION}/chain/1"


def test_a_store_without_conditional_writes_is_refused(s3: S3Server, tmp_path: Path) -> None:
    check_storage(LocalStorage(tmp_path / "folder"))
    s3.faults.ignore_condition = True
    with pytest.raises(RepositoryError, match="If-None-Match is ignored"):
        check_storage(open_storage(LOCATION))
    assert s3.objects == {}


def test_obstore_missing_is_one_line(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    done = upr_backup("list")
    assert done.exit_code == 2
    assert "pip install 'upr-stream[backup]'" in done.stderr
