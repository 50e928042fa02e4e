"""Fixtures of the tests of stored blocks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.stored_blocks import store_of
from upr.storage import blocks as blocks_module
from upr.storage import compact
from upr.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = store_of(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Blocks of a few rows, and groups of a few blocks."""
    monkeypatch.setattr(blocks_module, "BLOCK_COLUMN_BYTES", 120)
    monkeypatch.setattr(compact, "GROUP_BYTES", 700)
    monkeypatch.setattr(blocks_module, "READ_BYTES", 700)
    monkeypatch.setattr(compact, "SMALL_BYTES", 0)
    return monkeypatch
