"""Simulated crashes lose the process, never the disk: what the system was given is there, synced or not."""

import functools
import os

import lmdb
import pytest


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb, "open", functools.partial(lmdb.open, sync=False))
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
