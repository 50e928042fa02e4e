"""The test of the tests: deliberate faults, one by one, each of which must turn a named test red.

The faults are in ``tools/mutants/*.toml``. The tree is copied, once a job; each fault is a change of one text of one
function in a copy, made, tested and taken back. A fault whose text is not there exactly once is out of date, and one
that cannot even be imported tests nothing: both end the run with status 2. Status 1: a fault survived.
"""

import argparse
import ast
import ctypes
import functools
import gc
import importlib
import json
import math
import os
import queue
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).resolve().with_suffix("")
TEST_SECONDS = 10
SLOWER = 4
"""A test that hangs because of a fault has seen it; it need not hang for long: TEST_SECONDS, and SLOWER times what it
takes on this machine without any mutant."""
PR_SET_CHILD_SUBREAPER = 36
LAST_SECONDS = 10
"""What a run may take when the time for more is up."""
PLAIN_SECONDS = 3600
"""Of whatever is done without any mutant."""
SLOW_TESTS = ("tests/simulation/", "tests/crash/")
"""Minutes each: a sample leaves out the mutants that only these find."""
NOT_CAUGHT_BY = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
"""A test that ends with one of these has met a typing error of the mutant."""
UNCHANGED = (
    *("pytest", "pytest_asyncio", "pytest_timeout", "xdist.plugin", "hypothesis", "grpc.aio"),
    *(
        "google.protobuf.json_format",
        "numpy",
        "lmdb",
        "click",
        "zstandard",
        "pyarrow",
        "pyspark.sql",
    ),
)
"""What most tests import, and no fault changes."""
_FIELDS = {"name", "means", "file", "old", "new", "tests"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PACKAGES = ("upr", "upr_client", "upr_protocol", "tests")


class MutantError(Exception):
    """The list or the copy is not what it must be; nothing is proven."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deliberate fault.

    Attributes:
        name: short, unique.
        means: what goes wrong, in words.
        file: which file is changed, from the root of the tree.
        old, new: the text, which is there exactly once, and what takes its place.
        tests: pytest node ids; at least one of them must fail.
        where: the function that the text is in, with its class as in ``Journal.append``; empty for the whole file.
    """

    name: str
    means: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run of tests.

    Attributes:
        failed: the first test that failed, empty when none did.
        broken: why the run proves nothing, empty when it does.
    """

    failed: str
    broken: str
    seconds: float


def read_list(folder: Path = LIST) -> list[Mutant]:
    """Return all mutants; MutantError when one has other fields, changes nothing, or repeats a name."""
    mutants: list[Mutant] = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            where = f"{file.name}: {entry.get('name', 'a mutant without a name')}"
            if set(entry) - {"where"} != _FIELDS:
                raise MutantError(f"{where} has the fields {sorted(entry)}, not {sorted(_FIELDS)}")
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            if mutant.old == mutant.new or not mutant.tests:
                raise MutantError(f"{where} changes nothing, or names no test")
            if any(mutant.name == other.name for other in mutants):
                raise MutantError(f"{where} is there twice")
            mutants.append(mutant)
    return mutants


@functools.cache
def _places(text: str) -> dict[str, list[tuple[int, int]]]:
    """Return where in a module each class and function begins and ends, by dotted name: several with overloads."""
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    places: dict[str, list[tuple[int, int]]] = {}

    def note(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFINITIONS):
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                span = begins[first - 1], begins[child.end_lineno or first]
                places.setdefault(prefix + child.name, []).append(span)
                note(child, f"{prefix}{child.name}.")
            else:
                note(child, prefix)

    note(ast.parse(text), "")
    return places


def mutated(mutant: Mutant, root: Path) -> str:
    """Return the text of the mutant's file under a root as the fault makes it.

    Raises:
        MutantError: the old text is not there exactly once, or a module is no Python with the new one.
    """
    file = root / mutant.file
    text = file.read_text() if file.is_file() else ""
    places = _places(text).get(mutant.where, []) if mutant.where else [(0, len(text))]
    count = sum(text.count(mutant.old, *place) for place in places)
    if count != 1:
        where = f"{mutant.where} of {mutant.file}" if mutant.where else mutant.file
        raise MutantError(
            f"{mutant.name} is out of date: its old text is {count} times in {where}, must be once"
        )
    index, (begin, end) = max((text.find(mutant.old, *place), place) for place in places)
    rest = text[index + len(mutant.old) :]
    changed = text[:index] + mutant.new + rest
    # The definition alone: a whole module takes long, and there are hundreds of mutants.
    part = text[begin:index] + mutant.new + rest[: end - index - len(mutant.old)]
    try:
        if file.suffix == ".py":
            ast.parse(f"if True:\n{part}" if part[:1].isspace() else part, mutant.file)
    except SyntaxError as error:
        raise MutantError(f"{mutant.name} is broken: {error}") from error
    return changed


class Tree:
    """A copy of the tree, in which the tests are run.

    Args:
        folder: where to make it; empty.

    Attributes:
        seconds: what each test function takes without any mutant.
        start_seconds: what a run of tests takes besides.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.start_seconds = 0.0
        self._report = folder.with_suffix(".xml")
        self._told = folder.with_suffix(".txt")
        self._server: subprocess.Popen[bytes] | None = None
        path = [str(folder), str(folder / "client")]
        self._environment = {
            **os.environ,
            # More worlds than a run of the tests has: a fault may show in few of them.
            "UPR_SIMULATION_SEEDS": "60",
            "PYTHONPATH": os.pathsep.join(path),
        }

    def copy(self, root: Path = ROOT) -> None:
        """Fill it with what git tracks or would track under a root, as it is in the working tree.

        Raises:
            MutantError: git does not know, or another copy would be imported.
        """
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=False,
        )
        if listed.returncode:
            raise MutantError(f"git ls-files failed: {listed.stderr.decode().strip()}")
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, target)
        # What is compiled later is checked in the same way: by size and second a fault might not be seen.
        options = ["-q", "--invalidation-mode", "checked-hash", "upr", "client", "tests"]
        compiled = self._python(PLAIN_SECONDS, "-m", "compileall", *options)
        if compiled.returncode:
            raise MutantError(f"the tree does not compile:\n{compiled.stdout}{compiled.stderr}")
        self.check_imports()

    def check_imports(self) -> None:
        """Raise MutantError unless the copy's own modules are what its tests import."""
        ask = "; ".join(f"import {name}; print(list({name}.__path__)[0])" for name in _PACKAGES)
        told = self._python(PLAIN_SECONDS, "-c", ask)
        if told.returncode:
            raise MutantError(f"the copy cannot be imported:\n{told.stderr}")
        for place in told.stdout.splitlines():
            if not Path(place).resolve().is_relative_to(self.folder.resolve()):
                raise MutantError(
                    f"the tests would import {place}, not the copy; look at PYTHONPATH and .pth files"
                )

    def _python(self, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, errors = process.communicate(timeout=limit)
            except BaseException:
                # With the servers that its tests may have started.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Have the fault in the copy for a while."""
        file = self.folder / mutant.file
        changed = mutated(mutant, self.folder)
        before = file.read_text()
        file.write_text(changed)
        try:
            yield
        finally:
            file.write_text(before)

    def run_plain(self, tests: Iterable[str]) -> Outcome:
        """Run tests without any mutant, and note what each takes."""
        outcome = self._run(tests, PLAIN_SECONDS, PLAIN_SECONDS)
        if self._report.exists():
            self.seconds = times_of(self._report)
        self.start_seconds = max(outcome.seconds - sum(self.seconds.values()), 0)
        return outcome

    def run(self, tests: Sequence[str], longest: float = math.inf) -> Outcome:
        """Run tests until the first one fails, for so many seconds at most."""
        limit = TEST_SECONDS + SLOWER * sum(self.seconds.get(name, 0) for name in _names(tests))
        # The first test that fails ends the run; those before it took no longer than without the fault.
        seconds = TEST_SECONDS + SLOWER * self.start_seconds + 2 * limit
        return self._run(tests, limit, min(seconds, longest))

    def _run(self, tests: Iterable[str], test_seconds: float, run_seconds: float) -> Outcome:
        self._report.unlink(missing_ok=True)
        began = time.monotonic()
        quiet = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={self._report}"]
        # That hypothesis was imported before.
        quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = self._pytest([*quiet, f"--timeout={test_seconds:.0f}", *tests], run_seconds)
        if status is None:
            return Outcome("", f"the run took more than {run_seconds:.0f} s", run_seconds)
        seconds = time.monotonic() - began
        if not self._report.exists():
            told = self._told.read_text().strip().splitlines()
            return Outcome("", f"pytest ended with {status}: {told[-1:]}", seconds)
        return judge(self._report.read_text(), status, seconds)

    def _pytest(self, arguments: list[str], limit: float) -> int | None:
        """Run pytest in a fork of a process that has imported much; return its status, None if it took too long."""
        if self._server is None:
            self._server = subprocess.Popen(
                # Not with the folder of this file in front of the copy's.
                [sys.executable, "-P", __file__, "--serve", str(self._told)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        asks, tells = self._server.stdin, self._server.stdout
        assert asks is not None
        assert tells is not None
        asks.write(json.dumps(arguments).encode() + b"\n")
        asks.flush()
        process = int(tells.readline())
        in_time = bool(select.select([tells], [], [], limit)[0])
        if not in_time:
            os.killpg(process, signal.SIGKILL)
        status = int(tells.readline())
        return status if in_time else None

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


def children_of(parent: int) -> list[int]:
    """Return the processes of a parent, also those that have ended and were not waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # Another process may end meanwhile.
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def end_children() -> dict[int, int]:
    """Kill all that is left below this process; return the status of each that was, or became, its child."""
    statuses: dict[int, int] = {}
    while left := children_of(os.getpid()):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            statuses[pid] = os.waitpid(pid, 0)[1]
    return statuses


def serve(told: str) -> None:
    """Run pytest with each line of arguments, in a fork each time, printing into a file; say which process it is, and its status."""
    # The servers that its tests may have started have sessions of their own; they become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in UNCHANGED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if child := os.fork():
            print(child, flush=True)
            with open(os.pidfd_open(child)) as ended:
                # Whoever asks has ended, or was ended, when there is something to be read meanwhile.
                select.select([sys.stdin, ended], [], [])
            statuses = end_children()
            print(os.waitstatus_to_exitcode(statuses[child]), flush=True)
            continue
        os.setsid()
        with open(os.devnull) as nothing, open(told, "w") as output:
            for file, descriptor in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(file.fileno(), descriptor)
        # As it is where pytest is the program: processes that are forked later import the main module.
        sys.modules["__main__"] = importlib.import_module("pytest.__main__")
        sys.exit(importlib.import_module("pytest").main(json.loads(line)))


def _names(tests: Iterable[str]) -> set[str]:
    """Return how a report names the functions of tests."""
    parts = (test.partition("[")[0].partition("::") for test in tests)
    return {f"{Path(file).stem}::{function}" for file, _, function in parts}


def _case_name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def times_of(report: Path) -> dict[str, float]:
    """Return what each test function took, by a report of pytest's; those that were skipped took nothing."""
    seconds: dict[str, float] = {}
    for case in ET.fromstring(report.read_text()).iter("testcase"):
        if case.find("skipped") is None:
            name = _case_name(case).partition("[")[0]
            seconds[name] = seconds.get(name, 0) + float(case.get("time") or 0)
    return seconds


def judge(report: str, status: int, seconds: float) -> Outcome:
    """Return what a run came to.

    Args:
        report: pytest's JUnit XML.
        status: that of pytest.
    """
    broken = ""
    for case in ET.fromstring(report).iter("testcase"):
        name = _case_name(case)
        failure, error = case.find("failure"), case.find("error")
        if failure is not None:
            message = failure.get("message", "")
            if message.startswith(NOT_CAUGHT_BY):
                return Outcome("", f"{name}: {message}", seconds)
            return Outcome(name, "", seconds)
        if error is not None:
            broken = broken or f"{name}: {error.get('message', '')}"
    if not broken and status:
        broken = f"pytest ended with status {status} and no test failed"
    return Outcome("", broken, seconds)


def choose(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names, all without names; MutantError when there is none of a name."""
    missing = set(only) - {mutant.name for mutant in mutants}
    if missing:
        raise MutantError(f"there is no mutant {', '.join(sorted(missing))}; --list names them all")
    return [mutant for mutant in mutants if not only or mutant.name in only]


def sample(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """Return a tenth of the mutants, of those whose tests are quick."""
    quick = [one for one in mutants if not one.tests[0].startswith(SLOW_TESTS)]
    return random.Random(seed).sample(quick, -(-len(quick) // 10))


def check_all(mutants: Sequence[Mutant]) -> None:
    """Raise MutantError naming all that are out of date or no Python."""
    wrong: list[str] = []
    for mutant in mutants:
        try:
            mutated(mutant, ROOT)
        except MutantError as error:
            wrong.append(str(error))
    if wrong:
        raise MutantError("\n".join(wrong))


def copies(folder: Path, jobs: int) -> list[Tree]:
    """Return copies of the tree below a folder, one a job."""
    trees = [Tree(folder / f"tree-{number}") for number in range(jobs)]
    trees[0].folder.mkdir()
    trees[0].copy()
    for tree in trees[1:]:
        shutil.copytree(trees[0].folder, tree.folder)
    return trees


def run_plain(trees: Sequence[Tree], tests: Sequence[str], pool: ThreadPoolExecutor) -> None:
    """Run tests without any mutant, each in one of the trees, and tell all what each took; MutantError when one is red."""
    parts = [(tree, tests[number :: len(trees)]) for number, tree in enumerate(trees)]
    parts = [(tree, part) for tree, part in parts if part]
    for outcome in pool.map(lambda part: part[0].run_plain(part[1]), parts):
        if outcome.failed or outcome.broken:
            raise MutantError(f"red without any mutant: {outcome.failed or outcome.broken}")
    seconds = {name: taken for tree in trees for name, taken in tree.seconds.items()}
    start_seconds = max(tree.start_seconds for tree in trees)
    for tree in trees:
        tree.seconds, tree.start_seconds = seconds, start_seconds


def attempted(mutant: Mutant, tree: Tree, until: float) -> Outcome | None:
    """Run the tests of a mutant that is made, twice unless they see it; None where there is no time for that."""
    outcome = None
    # Where the machine stands still, a test that looks at times may not see the fault.
    for _ in range(2):
        left = until - time.monotonic()
        if left <= 0:
            return None
        outcome = tree.run(mutant.tests, left + LAST_SECONDS)
        if outcome.failed:
            break
    return outcome


def try_all(
    mutants: Sequence[Mutant], jobs: int, report: Path | None = None, seconds: float = math.inf
) -> int:
    """Try each mutant; the number of those that survived.

    Args:
        report: of a run without any mutant, in which all were green; None has the tests run here first.
        seconds: after which none is begun, without what comes first.

    Raises:
        MutantError: one is out of date or broken, or its tests are red without it.
    """
    check_all(mutants)
    began = time.monotonic()
    named = sorted({test for mutant in mutants for test in mutant.tests})
    words: dict[str, list[str]] = {"caught": [], "SURVIVED": [], "BROKEN": []}
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()

    def attempt(mutant: Mutant) -> Outcome | None:
        tree = free.get()
        try:
            with tree.changed(mutant):
                return attempted(mutant, tree, until)
        finally:
            free.put(tree)

    with (
        tempfile.TemporaryDirectory(prefix="upr-mutants-") as folder,
        ThreadPoolExecutor(jobs) as pool,
        ExitStack() as opened,
    ):
        trees = copies(Path(folder), jobs)
        for tree in trees:
            opened.callback(tree.close)
        if report is None:
            run_plain(trees, named, pool)
            say(
                f"{len(named)} named tests are green without any mutant, {time.monotonic() - began:.0f} s"
            )
        else:
            for tree in trees:
                tree.seconds = times_of(report)
        until = time.monotonic() + seconds
        for tree in trees:
            free.put(tree)
        for mutant, outcome in zip(mutants, pool.map(attempt, mutants), strict=True):
            if outcome is None:
                continue
            if outcome.broken:
                word, by = "BROKEN", outcome.broken
            elif outcome.failed:
                word, by = "caught", outcome.failed
            else:
                word, by = "SURVIVED", mutant.means
            words[word].append(mutant.name)
            say(f"{word:8} {mutant.name:44} {outcome.seconds:5.1f} s  {by}")
    caught, tried = len(words["caught"]), sum(map(len, words.values()))
    left = f", for {len(mutants) - tried} more there was no time" if tried < len(mutants) else ""
    say(f"{caught} of {tried} mutants caught in {time.monotonic() - began:.0f} s{left}")
    if words["BROKEN"]:
        raise MutantError(f"broken, so that they prove nothing: {', '.join(words['BROKEN'])}")
    return len(words["SURVIVED"])


def say(words: str) -> None:
    """Print a line of the result at once."""
    print(words, flush=True)


def main() -> int:
    """Return 0 when every mutant was caught, 1 when one survived, 2 when the list must be mended."""
    parser = argparse.ArgumentParser(prog="tools/dev.py mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one")
    parser.add_argument("--sample", action="store_true", help="a random tenth of them")
    parser.add_argument("--seed", type=int, help="of the sample: to have the same one again")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="how long to begin with more"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="of pytest (--junitxml): what is green there is not run first",
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    if options.json and not options.list:
        parser.error("--json goes with --list")
    try:
        mutants = choose(read_list(), options.only)
        if options.sample:
            seed = random.randrange(10**6) if options.seed is None else options.seed
            say(f"a tenth of the mutants: --sample --seed {seed}")
            mutants = sample(mutants, seed)
        if options.report:
            green = times_of(options.report)
            mutants = [one for one in mutants if _names(one.tests) <= green.keys()]
        if not options.list:
            return 1 if try_all(mutants, options.jobs, options.report, options.seconds) else 0
    except MutantError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(mutant) for mutant in mutants], indent=2))
        return 0
    for mutant in mutants:
        print(f"{mutant.name}: {mutant.means}\n    {mutant.file}\n    {' '.join(mutant.tests)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
