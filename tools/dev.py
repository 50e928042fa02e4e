"""The one command of this repository: ``python3 tools/dev.py setup|demo|test|lint|gen|bench|soak|mutants``.

Needs Python 3.11 and git and nothing else: it uses the standard library only, and makes the environment that the
rest needs in ``.venv`` (and, for the code generator, which pins another protobuf, in ``.venv-codegen``). All tests
together need Java, Node, Chromium and etcd as well, which it installs when it may.
"""

from __future__ import (
    annotations,
)  # So that an older Python gets as far as the line that refuses it.

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = "pip>=25.1"  # Knows dependency groups.
PIP_TELLS = re.compile(r"(?!.*: finished)\s*(Downloading .*[MG]B\)|Building |Installing ).*")
"""Lines of pip that are passed on: what takes seconds."""
NOTHING = re.compile(r"(?!)")
EVERYTHING = "--all"
ALL_SECONDS = 690
"""From when on no further mutant is begun."""
BUILT_FROM = (
    "pyproject.toml",
    "client/upr_protocol/_columns.h",
    "upr/storage/_blocks.h",
    "client/upr_protocol/_rows.c",
    "upr/storage/_merge.c",
    "upr/storage/_search.c",
    "upr/service/buckets/_writer.c",
    "tools/build_compiled.py",
)
"""What an environment is made anew for when it changed."""
OTHER_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class StepFailed(Exception):
    """A step ended with a status other than 0; it has said why itself."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Environment:
    """A virtual environment in the repository, made when it is needed.

    Args:
        folder: its name under the repository root.
        requirements: what pip is told to install.
        least: the same where a part is enough; None for everything.
    """

    def __init__(
        self, folder: str, requirements: list[str], least: list[str] | None = None
    ) -> None:
        self.folder = ROOT / folder
        self.python = self.folder / "bin" / "python"
        self._stamp = self.folder / "upr-stamp.json"
        self._requirements = requirements
        self._least = least

    def make(self, whole: bool = True) -> None:
        """Make it, or bring it up to date when something of BUILT_FROM changed since.

        Args:
            whole: with everything; otherwise with everything if it had that, and else with ``least``.
        """
        sources = [ROOT / name for name in BUILT_FROM]
        wanted = {
            # Virtual environments cannot be moved, so one from another place is not this one.
            "folder": str(self.folder),
            "python": sys.version,
            "pyproject": hashlib.sha256(
                b"".join(file.read_bytes() for file in sources if file.exists())
            ).hexdigest(),
        }
        found = self._read_stamp()
        # Without the word it is one that was made before there were parts.
        had_whole = found is not None and found.pop("packages", "all") == "all"
        if found == wanted and self.python.exists() and (had_whole or not whole):
            return
        whole = whole or had_whole or self._least is None
        self._stamp.unlink(missing_ok=True)
        if found is not None and {**found, "pyproject": wanted["pyproject"]} != wanted:
            shutil.rmtree(self.folder)
        if not self._works():
            make = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
            step(f"make {self.folder.name}", make)
        # Python compiles what is imported; most of it never is.
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        pip.append("--no-compile")
        if whole:
            step(f"pip into {self.folder.name}", [*pip, "-q", "--upgrade", PIP])
            step(f"packages into {self.folder.name}", [*pip, *self._requirements], PIP_TELLS)
        else:
            # What is downloaded is kept once: the variable reaches the pip that pip starts for what a build needs, an
            # option does not.
            install = ["env", "PIP_NO_CACHE_DIR=1", *pip, *(self._least or [])]
            step(f"packages of the server into {self.folder.name}", install, PIP_TELLS)
        # Last, so that an interrupted installation is begun anew.
        packages = "all" if whole else "least"
        self._stamp.write_text(json.dumps({**wanted, "packages": packages}))

    def _read_stamp(self) -> dict[str, str] | None:
        try:
            stamp: dict[str, str] = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return None
        return stamp

    def _works(self) -> bool:
        """Whether there is one that can be installed into: unfinished, or made by hand."""
        if not self.python.exists():
            return False
        question = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
        return not subprocess.call([str(self.python), "-c", question], stderr=subprocess.DEVNULL)

    def run(self, words: str, arguments: list[str], tells: re.Pattern[str] | None = None) -> None:
        """Run its Python with arguments, as a step."""
        step(words, [str(self.python), *arguments], tells)


# Half a gigabyte of jars is compressed already: the wheel that pip makes of them need not be.
STORED = ["pyspark", "--config-settings=--build-option=--compression=stored"]
MAIN = Environment(
    ".venv", ["-e", ".[server,metrics,spark,delta]", "--group", "dev", *STORED], ["-e", ".[server]"]
)
CODEGEN = Environment(".venv-codegen", ["--group", "codegen"])
REFERENCE = Environment(".venv-reference", ["--group", "reference"])


def step(words: str, command: list[str], tells: re.Pattern[str] | None = None) -> None:
    """Run a command in the repository root; say on stderr what it was and how long it took.

    Args:
        words: what it is.
        command: the program and its arguments.
        tells: said on stderr as they come, instead of all that the command prints: lines that match.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        # Another environment's modules must not be mixed into this one. And without bytecode each of the hundreds of
        # processes that the tests start would compile every module again.
        if name not in (*OTHER_ENVIRONMENT, "PYTHONDONTWRITEBYTECODE")
    }
    # The order of a set of strings follows from it: a seed of a simulation shows the same world each time.
    environment.setdefault("PYTHONHASHSEED", "0")
    started = time.monotonic()
    if tells:
        print(f"dev: {words} ...", file=sys.stderr, flush=True)
    stdout = subprocess.PIPE if tells else None
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, text=True) as process:
        try:
            for line in process.stdout or ():
                if tells and tells.fullmatch(line.rstrip()):
                    print(f"dev:   {line.strip()}", file=sys.stderr, flush=True)
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to the child as well; what that has to put away comes first.
            process.wait()
            status = 130
    if status < 0:
        status = 128 - status
    result = "ok" if status == 0 else f"FAILED, status {status}"
    print(
        f"dev: {words}: {result} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True
    )
    if status:
        raise StepFailed(status)


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Have something done at the same time, of which each step keeps one core busy; both are over at the end."""
    with ThreadPoolExecutor(1) as other:
        done = other.submit(work)
        yield
        done.result()


def setup() -> None:
    """Make .venv."""
    MAIN.make()


def _major(pattern: str, *command: str) -> int:
    """The major version that a program tells; 0 when there is none that runs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return 0
    found = re.search(pattern, done.stdout + done.stderr)
    return int(found[1]) if done.returncode == 0 and found else 0


def java_version() -> int:
    """The major version of the Java that Spark would start; 0 when there is none that runs."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else "java"
    return _major(r'version "(?:1\.)?(\d+)', program, "-version")


def node_version() -> int:
    """The major version of the Node that would be started; 0 when there is none that runs, or no npm beside it."""
    return _major(r"^v(\d+)", "node", "--version") if shutil.which("npm") else 0


def chromium_version() -> int:
    return _major(r"Chromium (\d+)", "chromium", "--version")


def etcd_version() -> int:
    return _major(r"etcd Version: (\d+)", "etcd", "--version")


def postgres_version() -> int:
    """The major version of PostgreSQL's server; 0 when there is none that runs."""
    # Debian keeps it outside the search path, by version.
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    program = shutil.which("postgres") or str(*places[-1:])
    return _major(r"PostgreSQL\) (\d+)", program, "--version")


@dataclass(frozen=True)
class Program:
    """A program that is not Python's, and that some tests need.

    Args:
        whose: which tests.
        marker: theirs; empty for what is no test.
        least: the oldest major version that will do.
        version: returns the one that is there, 0 for none.
        packages: of Debian, from the best on; one of them is enough.
        variable: of the environment, names a program that is used instead; empty for none.
    """

    name: str
    whose: str
    marker: str
    least: int
    version: Callable[[], int]
    packages: tuple[str, ...]
    variable: str = ""

    def bring(self) -> None:
        """Bring it if it is missing: Debian's package when root; otherwise say what to do, and raise StepFailed."""
        version = self.version()
        if version >= self.least:
            return
        found = f"the one here is {version}" if version else "there is none here"
        if os.geteuid() == 0 and shutil.which("apt-get") and self.variable not in os.environ:
            environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
            step("list of Debian's packages", [*environment, "apt-get", "-qq", "update"])
            install = [*environment, "apt-get", "-qq", "install", "-y", "--no-install-recommends"]
            for package in self.packages:
                with contextlib.suppress(StepFailed):
                    step(f"{self.name}, as {package}", [*install, package])
                if self.version() >= self.least:
                    return
        instead = f" or set {self.variable}" if self.variable else ""
        others = f"; without it, all other tests: tools/dev.py test -m 'not {self.marker}'"
        print(
            f"error: {self.whose} need {self.name} {self.least} or newer, {found}. Install it (on Debian and "
            f"Ubuntu: apt-get install {self.packages[0]}){instead}{others if self.marker else ''}",
            file=sys.stderr,
        )
        raise StepFailed(1)


JAVA = Program(
    "Java",
    "the tests of the Spark connector",
    "spark",
    17,  # Of Spark 4.
    java_version,
    ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless"),
    "JAVA_HOME",
)
NODE = Program("Node", "the tests of the example in it", "node", 18, node_version, ("npm",))
CHROMIUM = Program(
    "Chromium",
    "the tests of the page",
    "browser",
    115,  # The oldest with CSS and JavaScript as the page has them.
    chromium_version,
    ("chromium",),
)
ETCD = Program("etcd", "the tests of clusters", "etcd", 3, etcd_version, ("etcd-server",))


POSTGRES = Program(
    "PostgreSQL",
    "the tests of the examples with it",
    "postgres",
    14,
    postgres_version,
    ("postgresql",),
)


def node_packages() -> None:
    """Install what the example in Node names, where it is not, or names something else since."""
    example = ROOT / "client" / "examples" / "node"
    installed = example / "node_modules" / ".package-lock.json"
    if (
        installed.exists()
        and installed.stat().st_mtime > (example / "package.json").stat().st_mtime
    ):
        return
    options = ["--prefix", str(example), "--no-audit", "--no-fund", "--no-package-lock"]
    step("packages of the example in Node", ["npm", "install", *options])


def lint() -> None:
    """Everything that reads the sources without running them, cheapest first."""
    with beside(CODEGEN.make):
        setup()
    MAIN.run("ruff check", ["-m", "ruff", "check", "."])
    MAIN.run("ruff format", ["-m", "ruff", "format", "--check", "."])
    MAIN.run("sync half of the SDK fresh", ["tools/unasync.py", "--check"])
    contracts = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    MAIN.run("import contracts", ["-c", contracts])
    CODEGEN.run("generated code fresh", ["-m", "tools.gen_protos", "--check"])
    CODEGEN.run("proto rules", ["tools/lint_protos.py"])
    MAIN.run("mypy", ["-m", "mypy", "--num-workers=2"])


def gen() -> None:
    """Write all generated code."""
    setup()
    CODEGEN.make()
    CODEGEN.run("wire code", ["-m", "tools.gen_protos"])
    MAIN.run("sync half of the SDK", ["tools/unasync.py"])


def _bring_others() -> None:
    """Make what tests need besides .venv."""
    node_packages()
    REFERENCE.make()


def _read_tests() -> None:
    """Have pytest keep what it makes of the tests' sources, so that not each of its processes does that at the same time."""
    # What is wrong with them, the run of the tests says.
    with contextlib.suppress(StepFailed):
        MAIN.run("tests read", ["-m", "pytest", "--collect-only", "-qq"], NOTHING)


def test(arguments: list[str]) -> None:
    """Lint and the tests, with ``--all`` the long ones and a tenth of the mutants too; or only what arguments for pytest choose."""
    everything = arguments == [EVERYTHING]
    began = time.monotonic()
    if arguments and not everything:
        setup()
    else:
        JAVA.bring()
        if everything:
            NODE.bring()
            CHROMIUM.bring()
            ETCD.bring()
            POSTGRES.bring()
            with beside(_bring_others):
                setup()
            with beside(_read_tests):
                lint()
        else:
            lint()
        # Most of them wait for something half of the time. Whatever the machine has, five are what the tests are
        # tried with: that keeps two cores busy.
        chosen = [] if everything else ["-m", "not long"]
        arguments = ["-n", "5", "--dist", "worksteal", *chosen]
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.xml"
        MAIN.run("tests", ["-m", "pytest", *arguments, *([f"--junitxml={report}"] * everything)])
        if everything:
            # Fewer on a slow machine: all of it has a quarter of an hour.
            seconds = min(max(int(ALL_SECONDS - (time.monotonic() - began)), 10), 60)
            sample = ["--sample", f"--report={report}", f"--seconds={seconds}", "--jobs=5"]
            MAIN.run("a tenth of the mutants", ["-m", "tools.mutants", *sample])


STORIES = {
    "failover": "a replica takes over, a follower undoes",
    "cluster": "three servers and an etcd: the owner is killed, stopped and cut off",
}
"""Demos of their own, by the option of each."""


def demo(repo: Path | None, story: str | None) -> None:
    """Show writes undone, then a history through a server that is killed; of a repository that is named only that."""
    if story == "cluster":
        replace(ETCD, whose="the servers of a cluster", marker="").bring()
    MAIN.make(whole=False)
    if story:
        MAIN.run(f"demo of a {story}", ["-m", f"tools.demo_{story}"])
        return
    if repo is None:
        MAIN.run("demo of writes undone", ["-m", "tools.demo_undone"])
    MAIN.run("demo of a history", ["tools/demo.py", "--repo", str((repo or ROOT).resolve())])


def bench(arguments: list[str]) -> None:
    """Measure, side by side with a bare gRPC stream; or the Spark source, or backups, or CPU beside a commit."""
    setup()
    if arguments[:1] == ["spark"]:
        JAVA.bring()
        MAIN.run("bench", ["-m", "tools.bench.spark_source", *arguments[1:]])
    elif arguments[:1] == ["peers"]:
        pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--group", "peers"]
        MAIN.run("clients of the peers", pip)
        MAIN.run("bench", ["-m", "tools.bench.peers", *arguments[1:]])
    elif arguments[:1] in (["backup"], ["cpu"], ["hostile"]):
        MAIN.run("bench", ["-m", f"tools.bench.{arguments[0]}", *arguments[1:]])
    else:
        MAIN.run("bench", ["tools/bench/quick.py", *arguments])


def soak(kind: str, arguments: list[str]) -> None:
    """Run one of the long tests."""
    setup()
    if kind == "cluster":
        ETCD.bring()
    elif kind == "spark":
        JAVA.bring()
    MAIN.run(f"soak, {kind}", ["-m", f"tools.soak_{kind}", *arguments])


def mutants(arguments: list[str]) -> None:
    """Make deliberate faults, each of which must turn a named test red."""
    setup()
    MAIN.run("mutants", ["-m", "tools.mutants", *arguments])


SOAKS = {
    "storage": "merge, purge, cut",
    "fuzz": "damage whatever is read",
    "simulation": "engine and files in a simulated world, seed after seed",
    "faults": "a live server and SDK clients: broken networks, SIGKILL, SIGSTOP",
    "replicas": "three servers, SDK clients: held links, SIGKILL, promotions",
    "cluster": "three servers and an etcd: SIGKILL, SIGSTOP, no etcd; nobody promotes",
    "spark": "loads into Spark in a row, beside a backup every minute",
}


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    reader = argparse.ArgumentParser(description=__doc__, prog="tools/dev.py")
    commands = reader.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("setup", help="make .venv")
    demonstration = commands.add_parser(
        "demo", help="writes that a crash undoes; a git history through a server that is killed"
    )
    stories = demonstration.add_mutually_exclusive_group()
    stories.add_argument("--repo", type=Path, help="only the history of this git repository")
    for story, words in STORIES.items():
        stories.add_argument(
            f"--{story}", dest="story", action="store_const", const=story, help=words
        )
    tests = commands.add_parser(
        "test",
        help="lint and tests, with --all the long ones and some mutants too; or pytest with arguments",
    )
    tests.add_argument("arguments", nargs=argparse.REMAINDER, metavar="PYTEST_ARGUMENT")
    commands.add_parser("lint", help="ruff, mypy, import contracts, generated code, proto rules")
    commands.add_parser("gen", help="write generated code")
    measures = commands.add_parser(
        "bench",
        help="measure; [spark|backup|cpu|hostile|peers] --json, --only ingest|singles|reading|get|resume|latency|live|merging|secure|replicas",
    )
    measures.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    soaking = commands.add_parser("soak", help="long tests, bounded by --minutes")
    kinds = soaking.add_mutually_exclusive_group(required=True)
    for kind, words in SOAKS.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=words)
    soaking.add_argument("--minutes", default="10", help="how long (default: 10)")
    soaking.add_argument("--seed", help="to have the same choices again")
    soaking.add_argument("--steps", help="of each simulated world")
    soaking.add_argument("--world", help="only this kind of world, with --simulation or --cluster")
    soaking.add_argument("--join-bytes", help="size of what a replica joins first, with --replicas")
    mutations = commands.add_parser(
        "mutants",
        help="deliberate faults, each must turn a test red; --only NAME, --sample [--seed N] [--seconds S], --jobs N, --list [--json]",
    )
    mutations.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return reader


def main() -> int:
    """Run the subcommand; the status is that of the first step that failed."""
    # Not through the parser, which would take pytest's options for its own.
    passed_on = sys.argv[1:2] in (["test"], ["bench"], ["mutants"])
    options = parser().parse_args(sys.argv[1:2] if passed_on else None)
    try:
        if options.command == "test":
            test(sys.argv[2:])
        elif options.command == "bench":
            bench(sys.argv[2:])
        elif options.command == "demo":
            demo(options.repo, options.story)
        elif options.command == "soak":
            names = ("minutes", "seed", "steps", "world", "join_bytes")
            given = {name.replace("_", "-"): getattr(options, name) for name in names}
            soak(options.kind, [f"--{name}={value}" for name, value in given.items() if value])
        elif options.command == "mutants":
            mutants(sys.argv[2:])
        else:
            {"setup": setup, "lint": lint, "gen": gen}[options.command]()
    except StepFailed as failure:
        return failure.status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever starts it may have an older one)
        sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    sys.exit(main())
