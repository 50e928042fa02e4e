"""Sealed documents: small, readable without this program, and no bit of them changes unnoticed."""

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from upr_backup.errors import RepositoryDamagedError, RepositoryError
from upr_backup.repository import documents
from upr_backup.repository.documents import seal, unseal

CONTENT: dict[str, Any] = {"partitions": {"7": {"from": 418, "to": 450}}, "text": "ü", "none": None}


def test_every_flipped_bit_is_found() -> None:
    data = seal(CONTENT)
    assert unseal(data, "chain/1") == CONTENT
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(RepositoryDamagedError, match="chain/1 is damaged"):
                unseal(bytes(flipped), "chain/1")
    for wrong in (b"", data[:-1], data + b"\0", data[1:], data + data, data.upper(), data[:76]):
        with pytest.raises(RepositoryDamagedError, match="chain/1 is damaged"):
            unseal(wrong, "chain/1")


def test_another_format_is_refused_and_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    first = b'{"content":{},"format":1,"sha256":"44136fa355b3678a1146ad16f7e8649e94fb4fc2"}\n'
    with pytest.raises(RepositoryError, match="has format 1, this program reads 2"):
        unseal(first, "chain/1")
    monkeypatch.setattr(documents, "FORMAT", 3)
    newer = seal(CONTENT)
    monkeypatch.undo()
    with pytest.raises(RepositoryError, match="has format 3, this program reads 2"):
        unseal(newer, "chain/1")
    with pytest.raises(RepositoryDamagedError):
        unseal(newer.replace(b"upr-backup 3", b"upr-backup 2"), "chain/1")


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_sealed_and_no_object_is_damage(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "canonical", lambda _: text)
    with pytest.raises(RepositoryDamagedError):
        unseal(seal({}), "chain/1")


def test_a_text_beyond_the_limit_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_TEXT_BYTES_MAX", 100)
    assert unseal(seal({"a": "b" * 80}), "chain/1")
    with pytest.raises(RepositoryDamagedError):
        unseal(seal({"a": "b" * 100}), "chain/1")


def test_a_document_is_small_and_read_by_hand(tmp_path: Path) -> None:
    random = Random(1)
    position = {"bucket_version": "0" * 16, "data_id": None, "format": 1, "horizon": 0}
    entries = {}
    for partition in range(1024):
        end, failover_id = random.randrange(10**6), f"{random.getrandbits(64):016x}"
        where = {"failover_id": failover_id, "log": [[failover_id, 0]], "markers": [end]}
        entries[str(partition)] = {"from": end, "to": end, "position": {**position, **where}}
    data = seal(entries)
    assert len(data) < len(json.dumps(entries)) / 5
    path = tmp_path / "0000000001.json"
    path.write_bytes(data)
    command = f"tail -n +2 '{path}' | gzip -dc"
    shown = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert json.loads(shown.stdout) == entries
