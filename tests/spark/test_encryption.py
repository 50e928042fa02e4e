"""An encrypted repository: nothing is readable without its key, no bit changes unnoticed, and a wrong key says so."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.spark.handmade import Handmade, keys
from tests.spark.restoring import content, document, upr_backup
from upr_backup.errors import RepositoryDamagedError
from upr_backup.repository import LocalStorage
from upr_backup.repository.encryption import EncryptedStorage
from upr_client import Client

KEY = bytes(range(32))
CHUNK = 65_536


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """The key as a file."""
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    return str(tmp_path / "key")


def test_what_was_written_is_read_in_any_order(tmp_path: Path) -> None:
    plain = LocalStorage(tmp_path)
    storage = EncryptedStorage(plain, KEY)
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7):
        data = bytes(n % 251 for n in range(size))
        assert storage.put_if_absent(f"chain/{size}", data)
        assert not storage.put_if_absent(f"chain/{size}", b"other")
        sink = storage.create(f"data/{size}")
        for at in range(0, size, 10_007):
            sink.write(data[at : at + 10_007])
        sink.finish()
        for name in (f"chain/{size}", f"data/{size}"):
            assert storage.read(name) == data
            assert storage.size(name) == size
            with storage.open(name) as opened:
                for at in (size // 2, 0, size - 3, CHUNK - 2):
                    if at >= 0:
                        opened.seek(at)
                        assert opened.read(5) == data[at : at + 5]
            assert data[:40] not in plain.read(name) or size < 40
    assert {one.name: one.bytes for one in storage.stored("data/")} == {
        f"data/{size}": size
        for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 7)
    }


def test_what_was_changed_is_not_read(tmp_path: Path) -> None:
    storage = EncryptedStorage(LocalStorage(tmp_path), KEY)
    storage.put_if_absent("chain/a", bytes(2 * CHUNK))
    storage.put_if_absent("chain/b", bytes(2 * CHUNK))
    path, sealed = tmp_path / "chain" / "a", (tmp_path / "chain" / "a").read_bytes()
    begin, step = len(sealed) - 2 * (CHUNK + 16), CHUNK + 16
    flips = [0, begin - 40, begin - 1, begin, begin + CHUNK, begin + step + 5, len(sealed) - 1]
    bad = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in flips]
    # Cut off behind a whole chunk, or with chunks exchanged, doubled or of another object.
    first, second = sealed[begin : begin + step], sealed[begin + step :]
    bad += [sealed[: begin + step], sealed[:begin], sealed[:-1], b"", sealed[: begin - 5]]
    bad += [sealed[:begin] + second + first, sealed[:begin] + first + first + second]
    bad.append((tmp_path / "chain" / "b").read_bytes())
    for number, data in enumerate(bad):
        path.write_bytes(data)
        with pytest.raises(RepositoryDamagedError, match="chain/a is damaged"):
            print(number, len(storage.read("chain/a")))
    path.write_bytes(sealed)
    assert storage.read("chain/a") == bytes(2 * CHUNK)
    foreign = tmp_path / os.fsdecode(b"\xff")
    foreign.write_bytes(sealed)
    with pytest.raises(RepositoryDamagedError):
        storage.read(foreign.name)
    with pytest.raises(RepositoryDamagedError):
        EncryptedStorage(LocalStorage(tmp_path), bytes(32)).read("chain/a")


def test_a_wrong_key_says_so(
    tmp_path: Path, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository"
    made = Handmade(folder, key=KEY)
    (key, *_), command = keys(1), f"{sys.executable} -c \"print('{KEY.hex()}')\""
    made.backup([(key, b"the value")])
    made.backup([(key, None)])
    for option in (("--key-file", key_file), ("--key-command", command)):
        assert upr_backup(folder, "verify", "--full", *option).exit_code == 0
        found = upr_backup(folder, "find", key.decode(), "--at", "1", *option)
        assert found.stdout == "the value"
    other = tmp_path / "other"
    other.write_text("00" * 32)
    short = tmp_path / "short"
    short.write_text("secret")
    for options, words in (
        ((), "is encrypted (give its key"),
        (("--key-file", str(other)), "the key is not the one of"),
        (("--key-file", str(short)), "must be 64 hex digits"),
        (("--key-file", str(tmp_path / "nowhere")), "No such file"),
        (("--key-command", "false"), "ended with status 1"),
        (("--key-command", "/nowhere"), "the command of the key failed"),
        (("--key-command", "true"), "must be 64 hex digits"),
        (("--key-file", str(other), "--key-command", "true"), "do not go together"),
    ):
        for arguments in (["list"], ["backup"], ["prune"]):
            done = upr_backup(folder, *arguments, *options)
            assert (done.exit_code, words in done.stderr) == (2, True), (options, done.stderr)
            assert "secret" not in done.stderr
    with monkeypatch.context() as typed_counts:
        typed_counts.setenv("UPR_BACKUP_KEY_FILE", str(other))
        assert upr_backup(folder, "list").exit_code == 2
        assert upr_backup(folder, "list", "--key-command", command).exit_code == 0
    # Nobody who can write there makes it a plain one, or another one, for who has the key.
    own = folder / "repository.json"
    good = own.read_bytes()
    Handmade(tmp_path / "plain")
    own.write_bytes((tmp_path / "plain" / "repository.json").read_bytes())
    done = upr_backup(folder, "list", "--key-file", key_file)
    assert (done.exit_code, "is not encrypted" in done.stderr) == (2, True)
    own.write_bytes(good)
    first, second = sorted((folder / "chain").iterdir())
    whole, last = first.read_bytes(), second.read_bytes()
    first.write_bytes(last)
    done = upr_backup(folder, "list", "--key-file", key_file)
    assert (done.exit_code, "not written with the key" in done.stderr) == (11, True), done.stderr
    # What is set aside counts again where it is put back, and so does a good copy of what was damaged.
    done = upr_backup(folder, "repair", "--yes", "--key-file", key_file)
    assert (done.exit_code, "no backup is left" in done.stderr) == (0, True), done.stderr
    kept = sorted((folder / "aside").iterdir())
    assert [path.read_bytes() for path in kept] == [last, last]
    first.write_bytes(whole)
    kept[1].rename(second)
    assert upr_backup(folder, "verify", "--full", "--key-file", key_file).exit_code == 0


@pytest.mark.long
def test_a_life_with_a_key(
    target: str, tmp_path: Path, key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a server, with workers; and what else is asked for at a shell on the way."""
    folder, state = tmp_path / "repository", {b"key:%d" % n: b"value %d" % n for n in range(3000)}
    monkeypatch.setenv("UPR_BACKUP_KEY_FILE", key_file)
    assert upr_backup(folder, "init", "--target", target).exit_code == 0
    with Client(target) as client:
        client.bucket().write_many(state.items())
        done = upr_backup(
            folder,
            "backup",
            "--processes",
            "2",
            "--group-seqnos",
            "1000",
            "--progress",
            "json",
            "--json",
        )
        assert document(done)["rows"] == 3000
        told = [json.loads(line) for line in done.stderr.splitlines()]
        assert told[-1]["done"] == told[-1]["total"] > 1
        assert (told[-1]["progress"], told[-1]["rows"]) == ("groups read", 3000)
        # Nothing changed, so none is taken; a change is seen.
        skipped = document(upr_backup(folder, "backup", "--skip-unchanged", "--json"))
        assert (skipped["id"], skipped["skipped"]) == (1, True)
        assert not list((folder / "staging").rglob("*.json"))
        assert [cut for cut in client.admin.cuts("default") if "upr-backup" in cut.name] == []
        client.bucket().set(b"key:0", b"another")
        taken = document(upr_backup(folder, "backup", "--skip-unchanged", "--json"))
        assert (taken["id"], taken["rows"], taken["skipped"]) == (2, 1, False)
        assert upr_backup(folder, "merge", "--to", "2").exit_code == 0
        assert upr_backup(folder, "verify", "--full").exit_code == 0
        for path in folder.rglob("*"):
            if path.is_file() and path.parent.name != "locks" and path.name != "repository.json":
                assert path.read_bytes().startswith(b"upr-backup aes-256-gcm 1\n"), path
        where = ("--target", target, "--bucket", "copy")
        dry = document(
            upr_backup(folder, "restore", *where, "--create-bucket", "--dry-run", "--json")
        )
        assert (dry["keys"], dry["dry_run"], dry["verified"]) == (3000, True, "not verified")
        assert "copy" not in [one.name for one in client.admin.buckets()]
        assert upr_backup(folder, "restore", *where).exit_code == 3
        for again in (False, True):
            done = upr_backup(folder, "restore", *where, "--create-bucket")
            assert (done.exit_code, "holds data" in done.stderr) == (
                (4, True) if again else (0, False)
            )
        assert upr_backup(folder, "restore", *where, "--dry-run").exit_code == 4
    assert content(target, "copy") == {**state, b"key:0": b"another"}
