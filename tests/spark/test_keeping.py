"""Keeping a repository: repair, the index, tags and pins, the grid, finding a key, taking the lock away."""

import copy
import errno
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.spark.handmade import Handmade, keys, many, write_many
from tests.spark.restoring import document, upr_backup
from tests.spark.s3 import BUCKET, S3Server
from tests.spark.s3_backups import put_folder
from tests.spark.s3_backups import upr_backup as s3_backup
from upr_backup.repository import LocalStorage, listing_cache
from upr_backup.repository.chain import Chain, Keep, Link
from upr_backup.repository.documents import Manifest, seal, unseal
from upr_backup.repository.listing_cache import manifest_name
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository

KEY, *OTHERS = keys(20)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A repository with four backups, an hour apart, in which KEY is set, stays, is deleted and is set again."""
    made = Handmade(tmp_path / "repository")
    made.backup([(KEY, b"first"), (OTHERS[0], b"x")])
    made.backup([(OTHERS[1], b"y")])
    made.backup([(KEY, None)])
    made.backup([(KEY, b"second, longer")])
    return tmp_path / "repository"


def test_a_damaged_newest_manifest_is_set_aside(
    four: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (four / "chain" / "0000000004.json").read_bytes()
    read = LocalStorage.read

    def on_a_bad_sector(self: LocalStorage, name: str) -> bytes:
        if name == "chain/0000000004.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return read(self, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "read", on_a_bad_sector)
        assert upr_backup(four, "list").exit_code == 11
    os.truncate(four / "chain" / "0000000004.json", 100)
    listed = upr_backup(four, "list")
    assert (listed.exit_code, len(listed.stdout.splitlines())) == (11, 4)
    assert "chain/0000000004.json is damaged" in listed.stderr
    for arguments in (["backup"], ["info"], ["expire", "--keep-last", "1"]):
        done = upr_backup(four, *arguments)
        assert (done.exit_code, "'repair'" in done.stderr) == (11, True), done.stderr
    # What is before it is looked at all the same.
    assert upr_backup(four, "info", "2").exit_code == 0
    found = upr_backup(four, "find", KEY.decode(), "--json")
    assert (found.exit_code, [one["last"] for one in json.loads(found.stdout)]) == (11, [2, 3])
    asked = upr_backup(four, "repair")
    assert (asked.exit_code, "--yes" in asked.stderr) == (2, True)
    assert "lost as restore points: backup 4" in asked.stderr
    assert "backup 3, as of 2026" in asked.stderr
    assert document(upr_backup(four, "repair", "--yes", "--json"))["set_aside"] == [4]
    assert upr_backup(four, "verify", "--full").exit_code == 0
    assert [one["id"] for one in json.loads(upr_backup(four, "list", "--json").stdout)] == [1, 2, 3]
    kept = list((four / "aside").iterdir())
    assert [path.read_bytes() for path in kept] == [whole[:100]]
    assert upr_backup(four, "repair").stdout == "the chain is whole\n"
    # A gap has the chain end before it too; what is behind it is set aside as it is.
    (four / "chain" / "0000000002.json").unlink()
    assert document(upr_backup(four, "repair", "--yes", "--json"))["set_aside"] == [2, 3]
    assert upr_backup(four, "verify", "--full").exit_code == 0
    newest, _ = Repository.open(LocalStorage(four)).newest()
    assert newest is not None
    assert newest.number == 1


def test_a_manifest_that_is_gone_alone_is_not_written_over(four: Path) -> None:
    (four / "chain" / "0000000004.json").unlink()
    for command in ("backup", "verify"):
        done = upr_backup(four, command)
        assert (done.exit_code, "chain/0000000004.json is missing" in done.stderr) == (11, True)
    assert document(upr_backup(four, "repair", "--yes", "--json"))["set_aside"] == [4]
    assert upr_backup(four, "verify").exit_code == 0
    assert Repository.open(LocalStorage(four)).newest()[0] is not None


def test_what_rests_on_what_is_set_aside_goes_with_it(tmp_path: Path) -> None:
    made = Handmade(tmp_path / "repository")
    made.backup([(KEY, b"first")])
    made.backup([(OTHERS[0], b"x")])
    two = copy.deepcopy(made)
    made.backup([(KEY, b"lost")])
    made.backup([(OTHERS[1], b"y")])
    place = tmp_path / "repository"
    assert upr_backup(place, "tag", "release", "3").exit_code == 0
    assert upr_backup(place, "merge", "--to", "3").exit_code == 0
    assert document(upr_backup(place, "expire", "--keep-last", "2", "--json"))["first"] == 3
    os.truncate(place / "chain" / "0000000003.json", 100)
    # What had expired, and was not pruned, is what is left.
    assert document(upr_backup(place, "repair", "--yes", "--json"))["set_aside"] == [3, 4]
    assert upr_backup(place, "find", KEY.decode(), "--at", "2").stdout == "first"
    two.backup([(KEY, b"again")])
    assert upr_backup(place, "verify", "--full").exit_code == 0
    assert upr_backup(place, "find", KEY.decode(), "--at", "3").stdout == "again"
    # The name was another backup's.
    assert upr_backup(place, "find", KEY.decode(), "--at", "tag:release").exit_code == 3
    assert Repository.open(LocalStorage(place)).newest()[1] == two.links[-1].sha256


def test_a_chain_that_is_gone_is_no_empty_one(four: Path, tmp_path: Path) -> None:
    shutil.rmtree(four / "chain")
    for arguments in (
        ["list"],
        ["backup"],
        ["verify"],
        ["info"],
        ["export", "--format=parquet", f"--to={tmp_path}/x"],
        ["find", KEY.decode(), "--at", "2h ago"],
    ):
        done = upr_backup(four, *arguments)
        assert (done.exit_code, "every other manifest" in done.stderr) == (11, True), done.output


def test_a_repository_has_a_place_of_its_own(tmp_path: Path, s3: S3Server) -> None:
    init = ["init", "--target", "127.0.0.1:1"]
    (tmp_path / "a" / "somebody's").mkdir(parents=True)
    done = upr_backup(tmp_path / "a", *init)
    assert (done.exit_code, "is not empty" in done.stderr) == (2, True), done.stderr
    # Empty for a repository: the server is asked next, which is not there.
    for name in ("lost+found", ".tmp", "locks"):
        (tmp_path / "b" / name).mkdir(parents=True)
    assert upr_backup(tmp_path / "b", *init).exit_code == 5
    s3.objects["some/prefix/x"] = (b"", {})
    s3.written["some/prefix/x"] = 0.0
    assert "is not empty" in s3_backup(*init).stderr
    assert s3_backup(*init, location=f"s3://{BUCKET}/another").exit_code == 5


def test_a_key_is_found_over_all_points(four: Path, tmp_path: Path) -> None:
    told = json.loads(upr_backup(four, "find", KEY.decode(), "--json").stdout)
    assert [(one["first"], one["last"], one["op"], one["seqno"], one["bytes"]) for one in told] == [
        (1, 2, "set", told[0]["seqno"], 5),
        (3, 3, "delete", told[1]["seqno"], None),
        (4, 4, "set", told[2]["seqno"], 14),
    ]
    shown = upr_backup(four, "find", KEY.decode()).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["backups", "1", "3", "4"]
    assert upr_backup(four, "find", KEY.decode(), "--at", "2").stdout == "first"
    assert upr_backup(four, "find", KEY.decode(), "--at", "4").stdout == "second, longer"
    assert upr_backup(four, "find", KEY.decode(), "--at", "3").exit_code == 3
    assert upr_backup(four, "find", "nobody").exit_code == 3
    assert upr_backup(four, "find", "").exit_code == 2
    # A base is what counts from there on, and earlier points are gone.
    assert upr_backup(four, "merge", "--to", "2").exit_code == 0
    assert json.loads(upr_backup(four, "find", KEY.decode(), "--json").stdout) == told
    assert upr_backup(four, "expire", "--keep-last", "2").exit_code == 0
    after = json.loads(upr_backup(four, "find", KEY.decode(), "--json").stdout)
    assert [one["first"] for one in after] == [2, 3, 4]
    assert (after[0]["op"], after[0]["seqno"]) == ("set", told[0]["seqno"])
    assert after[1:] == told[1:]


def test_tags_name_points_and_pins_keep_them(four: Path, tmp_path: Path) -> None:
    told = document(upr_backup(four, "tag", "before-it", "2", "--pin", "--json"))
    assert told == {"tagged": "before-it", "id": 2, "pin": True}
    assert upr_backup(four, "tag", "newest").stdout == "tagged: newest, backup 4\n"
    for arguments, code in (
        (["tag", "newest", "1"], 4),
        (["tag", "../x"], 2),
        (["tag", "x", "9"], 3),
        (["tag", "nobody", "--remove"], 3),
        (["tag", "newest", "1", "--remove"], 2),
        (["find", KEY.decode(), "--at", "tag:nobody"], 3),
    ):
        assert upr_backup(four, *arguments).exit_code == code, arguments
    assert "before-it (pinned)" in upr_backup(four, "list").stdout
    assert upr_backup(four, "find", KEY.decode(), "--at", "tag:before-it").stdout == "first"
    assert upr_backup(four, "merge", "--to", "2").exit_code == 0
    assert upr_backup(four, "merge", "--to", "3").exit_code == 0
    assert document(upr_backup(four, "expire", "--keep-last", "1", "--json"))["first"] == 2
    told = document(upr_backup(four, "tag", "before-it", "--remove", "--json"))
    assert told == {"removed": "before-it"}
    assert document(upr_backup(four, "expire", "--keep-last", "2", "--json"))["first"] == 3
    # One that cannot be read may be of a pinned backup: nothing expires until somebody takes it away.
    (four / "tags" / "newest.json").write_bytes(b"junk")
    for arguments in (["list"], ["verify"], ["expire", "--keep-last", "1"]):
        done = upr_backup(four, *arguments)
        assert (done.exit_code, "tags/newest.json is damaged" in done.stderr) == (11, True)
    assert upr_backup(four, "tag", "newest", "--remove").exit_code == 0
    with Lock(LocalStorage(four)):
        assert upr_backup(four, "tag", "pinned", "--pin").exit_code == 12
        assert upr_backup(four, "tag", "named").exit_code == 0
    assert upr_backup(four, "expire", "--keep-last", "1").exit_code == 0
    assert upr_backup(four, "info", "--at").exit_code == 2


def test_a_grid_keeps_the_last_of_each_period() -> None:
    hour = 3600 * 10**6
    begin = 1_767_225_600 * 10**6  # 2026-01-01T00:00:00Z, a Thursday

    def link(number: int) -> Link:
        time = begin + number * 6 * hour
        return Link(number, "full", time, time, time, 0, 0, 0, 0, {}, 0, "")

    chain = Chain([link(number) for number in range(1, 400)], dict[int, Manifest]().__getitem__)

    def oldest(**grid: int) -> int:
        return Keep(None, None, grid).oldest(chain, 0)

    # Number 4 * n is midnight at the beginning of day n, and 4 * n + 3 the last of that day; 399 is the last of day 99.
    assert oldest(hourly=3) == 397
    assert oldest(daily=1) == 399
    assert oldest(daily=3) == 4 * 97 + 3
    # Weeks end on Sundays: day 99 is a Friday, 2026-04-10; the last Sundays before are days 94 and 87.
    assert oldest(weekly=3) == 4 * 87 + 3
    # January ends with day 30, February with day 58, March with day 89.
    assert oldest(monthly=4) == 4 * 30 + 3
    assert oldest(monthly=9) == 4 * 30 + 3
    assert oldest(daily=3, monthly=2) == 4 * 89 + 3
    assert Keep(1, None, {}, {7}).oldest(chain, 0) == 7


def test_a_lock_of_elsewhere_is_taken_away(four: Path) -> None:
    assert upr_backup(four, "unlock").stdout == "nobody has the lock\n"
    (four / "locks").mkdir(exist_ok=True)
    lock = {"host": "elsewhere", "pid": 7, "expires": time.time() + 1e6, "token": "x", "began": ""}
    (four / "locks" / "0000000007.json").write_text(json.dumps(lock))
    done = upr_backup(four, "expire", "--keep-last", "1")
    assert (done.exit_code, "process 7 on elsewhere" in done.stderr) == (12, True)
    assert document(upr_backup(four, "unlock", "--json")) == {"unlocked": "process 7 on elsewhere"}
    assert upr_backup(four, "expire", "--keep-last", "1").exit_code == 0
    with Lock(LocalStorage(four)):
        done = upr_backup(four, "unlock")
        assert (done.exit_code, "which runs here" in done.stderr) == (12, True)


def test_a_share_of_the_data_is_read(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    opened = LocalStorage.open

    def note_open(self: LocalStorage, name: str) -> object:
        if name.startswith("data/"):
            read.append(name)
        return opened(self, name)

    monkeypatch.setattr(LocalStorage, "open", note_open)
    seen: set[str] = set()
    random.seed(1)
    for _ in range(20):
        read.clear()
        assert (
            document(upr_backup(four, "verify", "--read-data", "26%", "--json"))["problems"] == []
        )
        assert len(set(read)) == 2
        seen |= set(read)
    assert len(seen) == 4
    for wrong in ("0%", "101%", "x", "nan"):
        assert upr_backup(four, "verify", "--read-data", wrong).exit_code == 2


# The index.


@pytest.mark.long
def test_ten_thousand_points_are_listed_at_once(tmp_path: Path, s3: S3Server) -> None:
    write_many(tmp_path / "repository", 10_000)
    put_folder(s3, tmp_path / "repository")
    s3.page = 1000
    for run, seconds in (
        (lambda *a: upr_backup(tmp_path / "repository", *a), 1.0),
        (s3_backup, 3.0),
    ):
        began = time.process_time()
        done = run("list")
        assert time.process_time() - began < seconds
        assert (done.exit_code, len(done.stdout.splitlines())) == (0, 10_001), done.stderr
    assert len(s3.requests) < 60
    # One that was cut short since is seen all the same.
    os.truncate(tmp_path / "repository" / manifest_name(5000), 50)
    done = upr_backup(tmp_path / "repository", "list")
    assert (done.exit_code, len(done.stdout.splitlines())) == (11, 5000)


def test_an_index_is_never_trusted_more_than_the_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_cache, "AT_ONCE", 3)
    made = Handmade(tmp_path / "repository", 1)
    storage, repository = made.repository.storage, made.repository
    for name, data in many(made, 7).items():
        storage.put_if_absent(name, data)
    expected = repository.chain().links
    for known in (3, 6, 7, 7):
        repository.write_index()
        sizes = repository._sizes()
        assert len(listing_cache.read_index(storage, repository.id, sizes)) == known
        assert repository.chain(indexed=True).links == expected
        assert len(storage.names("index/")) == 1
    # Who has read all of them anyhow puts all of them in.
    listing_cache.remove_index(storage)
    assert upr_backup(tmp_path / "repository", "prune").exit_code == 0
    assert len(listing_cache.read_index(storage, repository.id, repository._sizes())) == 7
    place = tmp_path / "repository" / storage.names("index/")[0]
    good = place.read_bytes()
    for junk in (b"", good[:-1], bytes(100), b"upr-backup 2 " + b"0" * 64 + b"\n"):
        place.write_bytes(junk)
        assert repository.chain(indexed=True).links == expected
    rows = unseal(good, "index")["links"]
    for at in range(len(rows[0])):
        values: list[Any] = [None, [], {}, "x", True, 1.0, -1]
        for value in values:
            if type(value) is not type(rows[0][at]) or value == -1:
                bad = [[*rows[0][:at], value, *rows[0][at + 1 :]], *rows[1:]]
                place.write_bytes(seal({"repository": repository.id, "links": bad}))
                assert listing_cache.read_index(storage, repository.id, sizes) == {}, (at, value)
    place.write_bytes(seal({"repository": repository.id, "links": [[], 5]}))
    assert repository.chain(indexed=True).links == expected
    # An index that tells of other backups than there are: by another repository, or from before a repair.
    listing_cache.write_index(storage, "0" * 32, made.links, sizes)
    assert listing_cache.read_index(storage, repository.id, sizes) == {}
    other = Handmade(tmp_path / "other", 1)
    many(other, 7)
    listing_cache.write_index(storage, repository.id, other.links, sizes)
    assert listing_cache.read_index(storage, repository.id, sizes) == {}
    assert repository.chain(indexed=True).links == expected
    # A manifest that is not the one that the index told of is not restored by it.
    place.write_bytes(good)
    chain = repository.chain(indexed=True)
    path = tmp_path / "repository" / manifest_name(3)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Exception, match="is damaged"):
        chain.by_number(3)
