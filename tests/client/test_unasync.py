"""The generator of the sync flavour notices what is not fresh; that nothing here is not is seen by lint."""

import sys
from pathlib import Path

import pytest

from tools import unasync


def test_a_rule_that_matches_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unasync, "RULES", [*unasync.RULES, (r"\bnowhere_to_be_found\b", "")])
    monkeypatch.setattr(unasync, "_formatted", lambda text, name: text)
    with pytest.raises(SystemExit, match="nowhere_to_be_found"):
        unasync.generate()


@pytest.mark.parametrize("change", ["text", "missing", "surplus"])
def test_a_difference_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: str,
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x.py").write_text("async def f() -> None: ...\n")
    monkeypatch.setattr(unasync, "ROOT", tmp_path)
    monkeypatch.setattr(unasync, "FOLDERS", [("a", "b")])
    monkeypatch.setattr(unasync, "RULES", [(r"\basync ", "")])
    monkeypatch.setattr(sys, "argv", ["unasync"])
    assert unasync.main() == 0
    generated = tmp_path / "b" / "x.py"
    assert generated.read_text().endswith("\ndef f() -> None: ...\n")
    monkeypatch.setattr(sys, "argv", ["unasync", "--check"])
    assert unasync.main() == 0
    if change == "text":
        generated.write_text(generated.read_text() + "\n")
    elif change == "missing":
        generated.unlink()
    else:
        generated = tmp_path / "b" / "y.py"
        generated.write_text("")
    capsys.readouterr()
    assert unasync.main() == 1
    assert f"not fresh: b/{generated.name}" in capsys.readouterr().err
