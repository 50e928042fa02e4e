"""The examples of the guide run as they are printed, against a real server."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import RunningServer

README = Path(__file__).resolve().parents[2] / "client" / "README.md"


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
