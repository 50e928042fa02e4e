"""tools/dev.py, without installing anything."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools import dev
from tools.bench import hostile


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that an environment in a temporary repository would run."""
    done: list[str] = []

    def step(words: str, command: list[str], tells: object = None) -> None:
        done.append(words)
        # Only what a demo installs has to leave little behind.
        assert ("PIP_NO_CACHE_DIR=1" in command) == ("of the server" in words)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)

    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "step", step)
    return done


def test_an_environment_is_made_once_and_follows_pyproject(
    tmp_path: Path, steps: list[str]
) -> None:
    environment = dev.Environment(".venv", ["x"])
    install = ["pip into .venv", "packages into .venv"]
    environment.make()
    assert steps == ["make .venv", *install]
    environment.make()
    assert len(steps) == 3
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    environment.make()
    assert steps[3:] == install


def test_a_part_is_enough_until_everything_is_asked_for(tmp_path: Path, steps: list[str]) -> None:
    environment = dev.Environment(".venv", ["all of it"], ["a part"])
    environment.make(whole=False)
    environment.make(whole=False)
    assert steps == ["make .venv", "packages of the server into .venv"]
    whole = ["pip into .venv", "packages into .venv"]
    environment.make()
    assert steps[2:] == whole
    environment.make(whole=False)
    assert len(steps) == 4
    # What has everything is brought up to date with everything.
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    environment.make(whole=False)
    assert steps[4:] == whole
    # So has one of before there were parts.
    stamp = tmp_path / ".venv" / "upr-stamp.json"
    before = json.loads(stamp.read_text())
    del before["packages"]
    stamp.write_text(json.dumps(before))
    environment.make()
    assert len(steps) == 6


def test_an_environment_that_was_moved_here_is_made_anew(tmp_path: Path, steps: list[str]) -> None:
    environment = dev.Environment(".venv", ["x"])
    environment.make()
    stamp = tmp_path / ".venv" / "upr-stamp.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "folder": "/elsewhere/.venv"}))
    (tmp_path / ".venv" / "old").touch()
    del steps[:]
    environment.make()
    assert steps[0] == "make .venv"
    assert not (tmp_path / ".venv" / "old").exists()


def test_one_that_is_not_ours_is_installed_into_and_not_removed(
    tmp_path: Path, steps: list[str]
) -> None:
    environment = dev.Environment(".venv", ["x"])
    environment.make()
    (tmp_path / ".venv" / "upr-stamp.json").unlink()
    (tmp_path / ".venv" / "mine").touch()
    del steps[:]
    environment.make()
    assert "make .venv" not in steps
    assert (tmp_path / ".venv" / "mine").exists()


def test_the_status_is_that_of_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    dev.step("a good one", [sys.executable, "-c", ""])
    with pytest.raises(dev.StepFailed) as failed:
        dev.step("a bad one", [sys.executable, "-c", "raise SystemExit(7)"])
    assert failed.value.status == 7
    with pytest.raises(dev.StepFailed) as failed:
        dev.step("killed", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert failed.value.status == 137
    first, second, third = capfd.readouterr().err.splitlines()
    assert first.startswith("dev: a good one: ok (")
    assert second.startswith("dev: a bad one: FAILED, status 7 (")
    assert third.startswith("dev: killed: FAILED, status 137 (")


def test_what_pip_takes_long_for_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        "Collecting click",
        "  Downloading click-8.3.whl (102 kB)",
        "  Downloading pyarrow-22.whl (47.7 MB)",
        "Installing collected packages: click, pyarrow",
    ]
    talk = f"print({chr(10).join(lines)!r})"
    dev.step("packages", [sys.executable, "-c", talk], dev.PIP_TELLS)
    out, told = capfd.readouterr()
    assert out == ""
    first, *middle, last = told.splitlines()
    assert first == "dev: packages ..."
    assert middle == [f"dev:   {lines[2].strip()}", f"dev:   {lines[3]}"]
    assert last.startswith("dev: packages: ok (")


def test_a_demo_of_a_repository_is_of_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(dev.Environment, "make", lambda _, whole: done.append(f"whole: {whole}"))
    monkeypatch.setattr(dev.Environment, "run", lambda _, words, arguments: done.append(words))
    dev.demo(None, None)
    dev.demo(Path("here"), None)
    dev.demo(None, "failover")
    made = "whole: False"
    assert done[:3] == [made, "demo of writes undone", "demo of a history"]
    assert done[3:] == [made, "demo of a history", made, "demo of a failover"]


def test_what_the_readme_says_to_try_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(dev.__file__).parents[1] / "README.md").read_text()
    part = readme.partition("\n## Try it\n")[2].partition("\n## ")[0]
    typed = re.findall(r"^python3 tools/dev\.py (\S+) +#", part, re.MULTILINE)
    told = dict.fromkeys(re.findall(r"`(demo --[^`]+)`", part))
    done: list[object] = []
    monkeypatch.setattr(dev, "demo", lambda repo, story: done.append((repo, story)))
    monkeypatch.setattr(dev, "test", lambda arguments: done.append(arguments))
    for words in [*typed, *told]:
        monkeypatch.setattr(sys, "argv", ["tools/dev.py", *words.split()])
        assert dev.main() == 0
    assert done[:2] == [(None, None), []]
    assert done[2:] == [(Path("PATH"), None), (None, "failover"), (None, "cluster")]


def test_steps_do_not_see_another_environment_s_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    ask = (
        "import os, sys; assert 'PYTHONPATH' not in os.environ; assert not sys.dont_write_bytecode"
    )
    dev.step("ask", [sys.executable, "-c", ask])


def test_all_the_tests_bring_all_programs_and_the_reference_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(dev, "lint", lambda: done.append("lint"))
    monkeypatch.setattr(dev, "node_packages", lambda: done.append("packages of Node"))
    monkeypatch.setattr(dev.Program, "bring", lambda one: done.append(one.name))
    monkeypatch.setattr(dev.Environment, "make", lambda made: done.append(made.folder.name))
    monkeypatch.setattr(dev.Environment, "run", lambda _, words, *more: done.append(words))
    dev.test([])
    assert done == ["Java", "lint", "tests"]
    dev.test(["--all"])
    programs = ["Java", "Node", "Chromium", "etcd", "PostgreSQL"]
    assert done[3:8] == programs
    assert set(done[8:11]) == {"packages of Node", ".venv-reference", ".venv"}
    assert set(done[11:13]) == {"lint", "tests read"}
    assert done[13:] == ["tests", "a tenth of the mutants"]


def test_what_is_done_beside_is_over_and_its_failure_counts() -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("beside")
        raise dev.StepFailed(3)

    with pytest.raises(dev.StepFailed), dev.beside(fail):
        done.append("here")
    assert sorted(done) == ["beside", "here"]


@pytest.mark.parametrize("arguments", [[], ["dance"], ["setup", "--wrong"]])
def test_usage(arguments: list[str]) -> None:
    command = [sys.executable, str(Path(dev.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: tools/dev.py" in done.stderr


def test_a_soak_is_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(dev, "soak", lambda kind, arguments: given.extend([kind, arguments]))
    words = ["soak", "--simulation", "--minutes", "0", "--world", "network", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", ["tools/dev.py", *words])
    assert dev.main() == 0
    assert given == ["simulation", ["--minutes=0", "--seed=7", "--world=network"]]


def _programs(folder: Path, **scripts: str) -> str:
    """Make programs of a few shell lines, and return the folder as a PATH of its own."""
    folder.mkdir(exist_ok=True)
    for name, lines in scripts.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("program", "lines", "version"),
    [
        ("java", "echo 'openjdk version \"17.0.15\" 2025-04-15' >&2", 17),
        ("java", "echo 'java version \"1.8.0_451\"' >&2", 8),
        ("java", "echo 'openjdk version \"21\" 2023-09-19' >&2", 21),
        ("java", "echo 'no Java runtime' >&2; exit 1", 0),
        ("node", "echo v20.20.2", 20),
        ("node", "echo v8.17.0", 8),
        ("node", "echo broken >&2; exit 1", 0),
        ("chromium", "echo Chromium 120.0.6099.224 built on Debian", 120),
        ("chromium", "echo broken >&2; exit 1", 0),
        ("etcd", "echo 'etcd Version: 3.4.23'; echo Go", 3),
        ("etcd", "exit 1", 0),
    ],
)
def test_the_version_of_a_program(
    program: str, lines: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    # Node counts with its package manager only.
    beside = {"npm": ""} if program == "node" else {}
    monkeypatch.setenv("PATH", _programs(tmp_path / "bin", **{program: lines}, **beside))
    ask = getattr(dev, f"{program}_version")
    assert ask() == version
    (tmp_path / "bin" / ("npm" if beside else program)).unlink()
    assert ask() == 0


def test_the_packages_of_the_example_are_installed_once(tmp_path: Path, steps: list[str]) -> None:
    example = tmp_path / "client" / "examples" / "node"
    (example / "node_modules").mkdir(parents=True)
    (example / "package.json").touch()
    dev.node_packages()
    assert steps == ["packages of the example in Node"]
    os.utime(example / "package.json", (1, 1))
    (example / "node_modules" / ".package-lock.json").touch()
    dev.node_packages()
    assert len(steps) == 1


def test_root_is_brought_java_and_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bin"
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", _programs(folder, apt_get="exit 1"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(dev.StepFailed):
        dev.JAVA.bring()
    error = capfd.readouterr().err
    assert "need Java 17 or newer, there is none here" in error
    assert "apt-get install openjdk-17-jre-headless" in error
    # Debian's newest has no package of 17 any more.
    java = "echo 'openjdk version \"21.0.1\"' >&2"
    command = (
        f'case "$*" in *jdk-21*) printf "#!/bin/sh\\n%s\\n" "{java}" > {folder}/java; '
        f"/bin/chmod 755 {folder}/java;; *jdk-17*) exit 100;; esac"
    ).replace('"21.0.1"', '\\"21.0.1\\"')
    _programs(folder, apt_get=command, env='shift; exec "$@"')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    dev.JAVA.bring()
    assert dev.java_version() == 21
    talk = capfd.readouterr().err
    assert "openjdk-17-jre-headless: FAILED" in talk
    assert "openjdk-21-jre-headless: ok" in talk
    # One that is there and new enough is left alone.
    dev.JAVA.bring()
    assert capfd.readouterr().err == ""


def test_a_demo_without_etcd_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(dev.StepFailed):
        dev.demo(None, "cluster")
    error = capfd.readouterr().err
    assert error.startswith("error: the servers of a cluster need etcd 3 or newer, there is none")
    assert error.endswith("apt-get install etcd-server)\n")


def test_an_attack_that_takes_too_much_is_told() -> None:
    fine = hostile.Outcome("gets", 0.8, 0.8, 1.0, 2.0, 4.0, 1.0, 512, 0.5, 0.5)
    assert not hostile.missed(fine)
    worse = [
        replace(fine, written=0.79),
        replace(fine, followed=0.79),
        replace(fine, back_seconds=4.1),
        replace(fine, back_seconds=None),
        replace(fine, anonymous_mib=513),
    ]
    assert [len(hostile.missed(one)) for one in worse] == [1] * len(worse)
