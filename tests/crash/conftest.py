"""Fixtures of tests that break things."""

import pytest

from tests.crash.clients import reconnect_soon


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDK clients try to connect again soon."""
    reconnect_soon(monkeypatch)
