"""A repository that somebody else wrote: nothing outside of it is read, nothing is waited for, and memory has a bound."""

import copy
import hashlib
import json
import os
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.handmade import Handmade, keys
from tests.spark.restoring import upr_backup
from upr_backup import rows
from upr_backup.repository import LocalStorage
from upr_backup.repository.documents import Json, seal, sha256, unseal
from upr_backup.repository.lock import Lock
from upr_backup.repository.repository import Repository
from upr_backup.rows import SCHEMA

MANIFEST = "chain/0000000001.json"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A repository with one backup of 200 keys."""
    Handmade(tmp_path / "repository").backup([(k, b"value of " + k) for k in keys(200)])
    return tmp_path / "repository"


def content(made: Path) -> Json:
    return unseal((made / MANIFEST).read_bytes(), MANIFEST)


def some(manifest: Json) -> Any:
    return next(entry for entry in manifest["partitions"].values() if entry["rows"])


PATHS: list[Any] = [
    "../secret",
    "/etc/passwd",
    "/dev/zero",
    "data/../../x",
    MANIFEST,
    5,
    None,
    "",
    [],
]
PATHS += ["data/\0", "data//etc/passwd", "DATA/0000000001/0123456789abcdef.parquet"]
NUMBERS: list[Any] = [2**70, -1, 1e308, 1.0, True, "1", None, [], 10**400, float("inf")]
OF_A_FILE: dict[str, list[Any]] = {
    "path": PATHS,
    "bytes": NUMBERS,
    "rows": [0, *NUMBERS],
    "sha256": [None, "0", "g" * 64, ["0"] * 64],
}
OF_A_PARTITION: dict[str, list[Any]] = {
    "to": NUMBERS,
    "rows": NUMBERS,
    "data_bytes": NUMBERS,
    "cut": [value for value in NUMBERS if value is not None],
    "file": [1, *NUMBERS],
    "position": [
        *(5, [1], {}, {"failover_id": "a"}, "x", {"failover_id": 1, "markers": []}),
        *({"failover_id": "a", "markers": ["b"]}, {"failover_id": "a", "markers": 7}),
    ],
}
OF_ALL: dict[str, list[Any]] = {
    "number": [0, 2, *NUMBERS],
    "kind": ["x", None, [], {}],
    "parent": [None, 5, "", [], "0" * 64],
    "cut": [None, [], {}, {"name": 1, "time": 1}, {"name": "a", "time": 2**62}],
    "started": [2**62, *NUMBERS],
    "files": [None, 5, {}, [5], [[]], [{}]],
    "partitions": [None, 5, [], {"x": {}}, {"1024": {}}, {"1": 5}],
    "rollbacks": [5, [5], [[]], [[0, 1, 2, 3]], [[0, -1, 0, "a"]]],
    "left_out": [5, [5], {"x": "y"}, {"0": 5}, {"2000": "z"}],
    "repository": [None, 5, "x"],
}


def edits() -> Iterator[tuple[str, Callable[[Json], Any]]]:
    """Yield ways to make a manifest one that was not written here, with what to call them."""
    part: Callable[[Json], Any]
    for table, part in (
        (OF_A_FILE, lambda manifest: manifest["files"][0]),
        (OF_A_PARTITION, some),
        (OF_ALL, lambda manifest: manifest),
    ):
        for field, values in table.items():
            # True is 1, and so is 1.0, where they stand for a 1; not for this program.
            for value in values:
                name = f"{field} is {str(value)[:30]}"
                yield (
                    name,
                    partial(lambda m, p, f, v: p(m).update({f: v}), p=part, f=field, v=value),
                )


def test_what_is_no_manifest_is_one_line(made: Path) -> None:
    good = content(made)
    for number, (name, edit) in enumerate(edits()):
        bad = copy.deepcopy(good)
        edit(bad)
        (made / MANIFEST).write_bytes(seal(bad))
        damage: list[str] = []
        assert not Repository.open(LocalStorage(made)).chain(damage.append), name
        assert damage[0].startswith("chain/0000000001.json"), name
        assert len(damage[0]) < 500
        if number % 40 == 0:
            for arguments in (["verify", "--full"], ["list"]):
                done = upr_backup(made, *arguments)
                assert (done.exit_code, "damage: chain/" in done.stderr) == (11, True), name
    (made / MANIFEST).write_bytes(seal(good))
    assert upr_backup(made, "verify", "--full").exit_code == 0


def bomb(size: int) -> bytes:
    """Return a document that unpacks to so many MiB."""
    packer = zlib.compressobj(1, wbits=31)
    packed = packer.compress(b'{"a":"')
    for _ in range(size):
        packed += packer.compress(b"0" * 2**20)
    packed += packer.compress(b'"}') + packer.flush()
    head = b"upr-backup 2 "
    return head + sha256(head + packed).encode() + b"\n" + packed


def test_a_document_unpacks_to_what_is_bounded(made: Path) -> None:
    (made / MANIFEST).write_bytes(bomb(80))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert upr_backup(made, "list").exit_code == 11
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150 * 1024
    with (made / MANIFEST).open("wb") as file:
        file.truncate(10**12)
    done = upr_backup(made, "verify")
    assert (done.exit_code, "more than 67108864 bytes" in done.stderr) == (11, True), done.stderr


def test_only_plain_files_of_its_own_are_read(made: Path, tmp_path: Path) -> None:
    data = next((made / "data").rglob("*.parquet"))
    whole, manifest = data.read_bytes(), (made / MANIFEST).read_bytes()
    secret = tmp_path / "secret"
    for path, right in ((data, whole), (made / MANIFEST, manifest)):
        secret.write_bytes(right)
        for kind in ("link", "fifo", "folder"):
            path.unlink()
            if kind == "link":
                path.symlink_to(secret)
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                path.mkdir()
            done = upr_backup(made, "verify", "--full")
            assert done.exit_code == 11, (path, done.output)
        path.rmdir()
        path.write_bytes(right)
    assert upr_backup(made, "verify", "--full").exit_code == 0
    # A folder that leads out: what is there is neither read nor removed.
    outside = tmp_path / "outside"
    (made / "data").rename(outside)
    (made / "data").symlink_to(outside)
    before = sorted(outside.rglob("*"))
    for arguments in (
        ["verify"],
        ["prune", "--grace", "0s"],
        ["export", "--format=parquet", f"--to={tmp_path}/x"],
    ):
        done = upr_backup(made, *arguments)
        assert (done.exit_code, "leads out" in done.stderr) == (11, True), (arguments, done.output)
    assert sorted(outside.rglob("*")) == before
    with pytest.raises(Exception, match="leads out"):
        LocalStorage(made).put_if_absent("data/0000000009/x", b"")
    # So does the folder for what is half written, which every run sweeps.
    for path in before:
        os.utime(path, (0, 0))
    (made / ".tmp").rmdir()
    (made / ".tmp").symlink_to(outside / "0000000001")
    for arguments in (["prune"], ["backup"], ["merge"]):
        done = upr_backup(made, *arguments)
        assert (done.exit_code, ".tmp is not used" in done.stderr) == (11, True), done.output
    with pytest.raises(Exception, match="leads out"):
        LocalStorage(made).put_if_absent("chain/0000000009.json", b"")
    assert sorted(outside.rglob("*")) == before
    (made / ".tmp").unlink()
    (made / ".tmp" / "folder").mkdir(parents=True)
    (made / ".tmp" / "link").symlink_to(before[0])
    (made / ".tmp" / "old").write_bytes(b"")
    for name in ("folder", "old", "link"):
        os.utime(made / ".tmp" / name, (0, 0), follow_symlinks=False)
    LocalStorage(made).sweep()
    assert sorted(path.name for path in (made / ".tmp").iterdir()) == ["folder", "link"]


def rewritten(made: Path, table: Any, **options: Any) -> None:
    """Put other rows into the data file, with all that is told of it right."""
    bad = content(made)
    path = made / bad["files"][0]["path"]
    pq.write_table(table, path, compression="zstd", **(options or {"use_dictionary": ["op"]}))
    data = path.read_bytes()
    bad["files"][0].update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    (made / MANIFEST).write_bytes(seal(bad))


def changed(table: Any, name: str, values: Any) -> Any:
    at = SCHEMA.get_field_index(name)
    return table.set_column(at, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))


def test_rows_that_were_not_written_here_are_found(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_ROW_BYTES_MAX", 10_000)
    table = pq.read_table(made / content(made)["files"][0]["path"])
    holes = {
        name: [None, *table.column(name).to_pylist()[1:]]
        for name in ("partition", "seqno", "op", "key", "value")
    }
    cases = [
        (table.slice(1), "has 199 rows, it was written with 200"),
        (table.drop_columns(["time"]), "other columns"),
        *(
            (changed(table, name, holes[name]), "rows with holes")
            for name in holes
            if name != "value"
        ),
        (changed(table, "value", holes["value"]), "neither a set nor a delete"),
        (changed(table, "op", ["x"] * 200), "neither a set nor a delete"),
        (changed(table, "partition", [5000] * 200), "0 rows of partition"),
        (changed(table, "seqno", [-5] * 200), "do not rise"),
        (changed(table, "key", [b""] * 200), "a key in a partition"),
        # Zeros, which are few bytes as they are stored; and one value that is meant for each row.
        (changed(table, "value", [bytes(20_000)] * 200), "unpack to"),
        (changed(table, "op", ["x" * 5000] * 200), "column op is not stored as here"),
    ]
    for number, (bad, words) in enumerate(cases):
        rewritten(made, bad)
        done = upr_backup(made, "verify", "--full")
        assert (done.exit_code, words in done.stderr) == (11, True), (number, done.stderr)
        done = upr_backup(made, "export", "--format=parquet", f"--to={tmp_path}/{number}")
        assert done.exit_code in (0, 11), done.stderr


def test_other_documents_are_not_believed_either(made: Path) -> None:
    own = unseal((made / "repository.json").read_bytes(), "repository.json")
    good = (made / "repository.json").read_bytes()
    for field, value in (
        ("id", "x"),
        ("id", 5),
        ("bucket", []),
        ("bucket_version", "../x"),
        ("target", None),
    ):
        (made / "repository.json").write_bytes(seal({**own, field: value}))
        assert upr_backup(made, "list").exit_code == 11, field
    (made / "repository.json").write_bytes(good)
    (made / "locks").mkdir(exist_ok=True)
    lock = {"host": "elsewhere", "pid": 7, "expires": 1e300, "token": "x", "began": ""}
    bad = [b"", b"[]", b"[" * 10**6, b"7", b'{"host":1}', b"\xff" * 100]
    changes: list[Json] = [{"pid": 2**80}, {"pid": -1}, {"expires": []}, {"host": "\x1b[2J"}]
    bad += [json.dumps({**lock, **change}).encode() for change in changes]
    for number, data in enumerate(bad):
        (made / "locks" / f"{number + 1:010d}.json").write_bytes(data)
        with Lock(LocalStorage(made)):
            pass
        shutil.rmtree(made / "locks")
        (made / "locks").mkdir()
    (made / "expired").mkdir()
    wrong: list[tuple[str, Any]] = [("number", 1.0), ("number", 2**70), ("base", 5), ("time", "x")]
    for field, value in (*wrong, ("sha256", None)):
        expiry = {"number": 1, "repository": own["id"], "sha256": "0" * 64, "base": "", "time": 1}
        (made / "expired" / "0000000001.json").write_bytes(seal({**expiry, field: value}))
        assert upr_backup(made, "list").exit_code == 11, field
    shutil.rmtree(made / "expired")
    for name in ("9999999999.json", "0000000003.json"):
        (made / "chain" / name).write_bytes((made / MANIFEST).read_bytes())
        done = upr_backup(made, "list")
        assert (done.exit_code, "a gap" in done.stderr) == (11, True), done.stderr


def test_what_is_shown_of_it_leaves_the_terminal_alone(made: Path) -> None:
    bad = content(made)
    bad["rollbacks"] = [[0, 1, 0, "\x1b[2Jgone"]]
    path = made / bad["files"][0]["path"]
    (made / MANIFEST).write_bytes(seal(bad))
    shown = upr_backup(made, "info").stdout
    assert ("\x1b" in shown, r"\x1b[2Jgone" in shown) == (False, True)
    (made / MANIFEST).write_bytes(seal({**bad, "kind": "\x1b" * 10**6}))
    assert len(upr_backup(made, "list").stderr) < 500
    (made / MANIFEST).write_bytes(seal(bad))
    table = pq.read_table(path)
    key = table.column("key")[0].as_py().decode()
    for name, value in (("time", 2**62), ("op", "\x1b[2J")):
        rewritten(made, changed(table, name, [value] * 200))
        done = upr_backup(made, "find", key)
        assert (done.exit_code, "not written here" in done.stderr) == (11, True), done.output


def test_a_value_that_is_stored_once_for_all_rows_is_not_unpacked(made: Path) -> None:
    table = pq.read_table(made / content(made)["files"][0]["path"])
    for encoding in (
        {"use_dictionary": ["op", "value"]},
        {"use_dictionary": ["op"], "column_encoding": {"value": "DELTA_BYTE_ARRAY"}},
    ):
        rewritten(made, changed(table, "value", [b"0" * 9000] * 200), **encoding)
        done = upr_backup(made, "verify", "--full")
        assert (done.exit_code, "column value is not stored" in done.stderr) == (11, True), (
            done.output
        )
