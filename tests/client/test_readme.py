"""The examples of the guide and of the project's README run as they are printed, against a real server."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import RunningServer
from upr_client import Client

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "client" / "README.md"


def test_the_examples_run(
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    server = server_process()
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        assert "127.0.0.1:7711" in example
        exec(example.replace("127.0.0.1:7711", server.target), {"__name__": "example"})
    lines = capsys.readouterr().out.splitlines()
    # Of 10,000 users user:2 was deleted and then written again; each is there once, but for its versions.
    assert lines[1:4] == ["10000", "10000", lines[3]]
    assert int(lines[3]) >= 10_000
    assert (tmp_path / "index.positions").exists()


def test_the_examples_of_the_project_run(
    server_process: Callable[..., RunningServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    server = server_process()
    follows, cuts = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    # The first goes on for ever as it is printed.
    follows = follows.replace("changes(positions", "changes(until_now=True, positions")
    names: dict[str, object] = {"__name__": "example"}
    for example in (follows, cuts):
        assert "127.0.0.1:7711" in example
        exec(example.replace("127.0.0.1:7711", server.target), names)
    changed, cut = capsys.readouterr().out.splitlines()
    assert changed.endswith("1 set b'user:2' b'Grace'")
    assert cut == "1 rows as of the cut"
    assert (tmp_path / "position").exists()
    with Client(server.target) as client:
        assert client.bucket().cuts() == []
