"""A new data directory: every name on the way to a bucket is durable before the bucket is."""

import errno
import os
from pathlib import Path

import pytest

from upr.cli.admin_commands import accept_loss
from upr.service.buckets.catalog import create_bucket
from upr.storage import directory as directory_module
from upr.storage.directory import DataDirectory
from upr.storage.journal import sync_folder
from upr.storage.store import Store
from upr_protocol.errors import DataDamagedError


def test_the_names_of_a_new_directory_are_synced_after_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[Path, set[str]] = {}

    def note(folder: Path) -> None:
        synced[folder] = {path.name for path in folder.iterdir()} if folder != Path("/") else set()

    monkeypatch.setattr(directory_module, "sync_folder", note)
    data = tmp_path / "new" / "data"
    DataDirectory(data).close()
    assert "new" in synced[tmp_path]
    assert "data" in synced[tmp_path / "new"]
    assert "buckets" in synced[data]
    assert "upr-stream.json" in synced[data]
    # What an earlier process made and did not sync is synced by the next.
    synced.clear()
    DataDirectory(data).close()
    assert "buckets" in synced[data]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of folders whose names cannot be made durable; what is taken out works again."""
    names: list[str] = []

    def sync(folder: Path) -> None:
        if folder.name in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_folder(folder)

    monkeypatch.setattr(directory_module, "sync_folder", sync)
    return names


def test_a_bucket_whose_name_cannot_be_made_durable_is_not_there(
    tmp_path: Path, failing: list[str]
) -> None:
    data = DataDirectory(tmp_path / "data")
    failing.append("buckets")
    with pytest.raises(OSError, match="Input/output"):
        create_bucket(data, "orders")
    assert list((tmp_path / "data" / "buckets").iterdir()) == []
    failing.clear()
    # Two folders of one name would keep the next start from serving anything.
    create_bucket(data, "orders")
    assert len(list(data.buckets())) == 1
    data.close()


def test_a_drop_that_could_not_be_made_durable_can_be_repeated(
    tmp_path: Path, failing: list[str]
) -> None:
    data = DataDirectory(tmp_path / "data")
    folder = create_bucket(data, "orders")
    failing.append("buckets")
    with pytest.raises(OSError, match="Input/output"):
        data.drop_bucket(folder)
    failing.clear()
    assert data.drop_bucket(folder).is_dir()
    assert list(data.buckets()) == []
    with pytest.raises(FileNotFoundError):
        data.drop_bucket(folder.with_name("0" * 16))
    data.close()


def test_a_loss_can_be_accepted_beside_a_bucket_that_cannot_be_read(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "data")
    folders = sorted(create_bucket(data, name) for name in ("one", "two"))
    names = []
    for folder in folders:
        store = Store(folder / "store")
        identity = store.identity()
        assert identity is not None
        names.append(identity.name)
        store.close()
    file = folders[0] / "store" / "data.mdb"
    file.write_bytes(b"\xff" * file.stat().st_size)
    folder, store = accept_loss._find(data.buckets(), names[1])
    assert folder == folders[1]
    store.close()
    # It may be the one that was meant.
    with pytest.raises(DataDamagedError):
        accept_loss._find(data.buckets(), names[0])
    data.close()
