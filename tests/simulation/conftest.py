"""Fixtures of the simulation."""

import pytest

from upr.engine import tail, tail_readers


@pytest.fixture(autouse=True)
def own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back after the test what a world chose: see ``choose_sizes``."""
    for module, name in (
        (tail, "GATHER_MICROS"),
        (tail, "SMALL_BYTES"),
        (tail, "WINDOW_BYTES"),
        (tail_readers, "WINDOW_MEMBERS_MIN"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
