"""A new data directory: every name on the way to a bucket is durable before the bucket is."""

from pathlib import Path

import pytest

from upr.storage import directory as directory_module
from upr.storage.directory import DataDirectory


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
