"""A Spark session of our own: where it runs, how little it says, and what is missing when it does not start."""

import importlib.util
import logging
import os
import re
import shutil
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from upr_protocol.errors import InvalidArgumentError, MissingPackageError, UprError

DEFAULT_MASTER: Final = "local[*,4]"

_LOCAL: Final = re.compile(r"local(?:\[(?P<cores>\d{1,4}|\*)(?:,(?P<failures>\d{1,4}))?\])?")
_OTHER: Final = ("spark://", "yarn", "k8s://", "local-cluster[")
_FAILURES: Final = 4
_STARTS: Final = 3
_OURS: Final = "spark: "
_CHATTER: Final = ("WARNING", "Using", "Setting", "To adjust")
_LAST_WORDS_SECONDS: Final = 2.0
_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The JVM only hands tasks out: it is to start fast."""
_CLUSTER_CORES: Final = 16
_LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")


class SparkError(UprError):
    """Spark could not be started, or failed for a reason of its own."""

    default_reason = "SPARK"


def check_installed() -> None:
    """Raise MissingPackageError where there is no pyspark, or no Java."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingPackageError(
            "the engine spark needs pyspark, not installed", hint="pip install 'upr-stream[spark]'"
        )
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    if shutil.which(java) is None:
        where = f"in JAVA_HOME, which is {home}" if home else "in PATH, and JAVA_HOME is not set"
        raise MissingPackageError(
            f"Spark needs Java 17 or newer, and there is none {where}",
            hint="on Debian: apt-get install openjdk-17-jre-headless; else install one and set JAVA_HOME",
        )


def checked_master(master: str) -> str:
    """Return a master URL, or raise InvalidArgumentError for what is none.

    A local one lets a task fail as often as a cluster does, for Spark itself never tries again.
    """
    found = _LOCAL.fullmatch(master)
    if found is None:
        if not master.startswith(_OTHER):
            raise InvalidArgumentError(
                f"{master!r} is no Spark master",
                hint="local[N], spark://HOST:PORT, yarn or k8s://HOST:PORT",
            )
        return master
    if found["failures"]:
        return master
    return f"local[{found['cores'] or 1},{_FAILURES}]"


def cores_of(master: str | None) -> int:
    """Return about how many tasks a master runs at a time, before it is asked."""
    found = _LOCAL.fullmatch(master or "")
    if found is None:
        return _CLUSTER_CORES
    return (os.cpu_count() or 1) if found["cores"] == "*" else int(found["cores"] or 1)


def is_submitted() -> bool:
    """Whether spark-submit started this process: then master and settings are its own."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def active_session() -> Any:
    """Return the session that this process has already; None when there is none."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def start_session(master: str | None, settings: Mapping[str, str]) -> Any:
    """Start a session, or raise SparkError.

    Args:
        master: None under spark-submit.
        settings: of Spark, by their names; they go over everything else.
    """
    # Else executors take the python3 of their PATH, which need not have anything of this.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("upr-backup")
    for name, value in {**_own_settings(master), **settings}.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        # pyspark leaves sockets and processes for the collector.
        warnings.simplefilter("ignore")
        for left in reversed(range(_STARTS)):
            said: deque[str] = deque(maxlen=20)
            try:
                if master is None:
                    return builder.getOrCreate()
                with _filtered(said):
                    return _quiet(builder.getOrCreate())
            except Exception as error:
                # A fork of a process that uses gRPC may end before the JVM begins.
                if left and not said and "JAVA_GATEWAY_EXITED" in str(error):
                    continue
                raise SparkError(_why(error, said)) from error
    raise AssertionError


def _quiet(session: Any) -> Any:
    """Return a session whose JVM may end without traces on stderr: what comes of that is reported."""
    session.sparkContext._accumulatorServer.handle_error = lambda request, client: None
    # Without a handler py4j makes one that writes there.
    logging.getLogger().addHandler(logging.NullHandler())
    return session


def is_alive(session: Any) -> bool:
    """Return whether a session's JVM is there and has not been told to stop."""
    try:
        return not session.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False


def end_session(session: Any) -> None:
    """End a session; where its JVM is gone, pyspark forgets that it had one, so that the next session starts another."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context: Any = SparkContext
    sessions: Any = SparkSession
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            session.stop()
            return
        except Exception:
            # It broke off at the JVM; the second time it is done with that.
            with suppress(Exception):
                session.sparkContext.stop()
    with suppress(Exception):
        context._gateway.shutdown()
    context._gateway = context._jvm = context._active_spark_context = None
    sessions._instantiatedSession = sessions._activeSession = None


def _own_settings(master: str | None) -> dict[str, str]:
    own: dict[str, str] = {}
    if master is not None:
        own["spark.master"] = master
        own["spark.ui.enabled"] = own["spark.ui.showConsoleProgress"] = "false"
        own["spark.log.level"] = "ERROR"
        own["spark.driver.extraJavaOptions"] = (
            f"-Dlog4j2.configurationFile={_LOG_SETTINGS} {_JAVA_OPTIONS}"
        )
        own["spark.sql.codegen.wholeStage"] = "false"
        if _LOCAL.fullmatch(master):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            own["spark.driver.host"] = own["spark.driver.bindAddress"] = "127.0.0.1"
    return own


def _why(error: BaseException, said: Iterable[str]) -> str:
    logged = [line.removeprefix(_OURS) for line in said if line.startswith(_OURS)]
    said = logged[-1:] or [line for line in said if not line.startswith(_CHATTER)][-3:]
    return f"Spark did not start: {' '.join([words_of(error), *said])}"


def words_of(error: BaseException) -> str:
    """Return the one line of a failure of Spark that tells most."""
    words = str(error)
    java = getattr(error, "java_exception", None)
    if java is not None:
        words = str(java.getMessage() or java.toString())
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


@contextmanager
def _filtered(said: deque[str]) -> Iterator[None]:
    """Have a JVM that is started meanwhile write its stderr to a thread, which passes on what our log settings made, and
    keeps the newest lines.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    out, into = os.pipe()
    started = threading.Event()
    os.dup2(into, 2)
    os.close(into)

    def forward() -> None:
        with os.fdopen(out, "r", errors="replace") as lines, os.fdopen(saved, "w") as stderr:
            for line in lines:
                said.append(line.strip())
                if started.is_set() and line.startswith(_OURS):
                    stderr.write(line)
                    stderr.flush()

    keep = os.dup(saved)
    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield
        # Until then its errors are part of the one that is raised.
        started.set()
    except BaseException:
        os.dup2(keep, 2)
        # Its last words are still on their way.
        thread.join(_LAST_WORDS_SECONDS)
        raise
    finally:
        os.dup2(keep, 2)
        os.close(keep)
