"""Cost of TLS and tokens: ingest, drain and single writes with them and without, in turn, as ratios of medians."""

import asyncio
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from tools.bench.common import Figure, Row, batches, drain, say, server, write_batches
from tools.bench.cpu import watch
from tools.bench.singles import awaited_sets
from upr.service.access.identities import add_identity
from upr_client import AsyncClient

PAIRS: Final = 5
"""Runs of each kind; the order within a pair changes from one to the next."""
BATCH: Final = 2000
CALLS_AT_ONCE: Final = 16
TASKS: Final = 64
SINGLES: Final = 10_000
Found = dict[str, tuple[float, float]]
"""By measure, rows a second, and CPU microseconds a row of the server."""


async def _ingest(client: AsyncClient, rows: list[Row]) -> int:
    await write_batches(client.bucket(), batches(rows, BATCH), CALLS_AT_ONCE)
    return len(rows)


async def _singles(client: AsyncClient) -> int:
    return len(await awaited_sets(client.bucket(), TASKS, SINGLES))


async def _run(running: Any, rows: list[Row], login: dict[str, Any]) -> Found:
    """Measure one server, which is new, over one connection that is open before."""
    found: Found = {}
    async with AsyncClient(running.target, **login) as client:
        await client.bucket().set(b"warm", b"")
        works: dict[str, Callable[[], Coroutine[Any, Any, int]]] = {
            "ingest, write_many": lambda: _ingest(client, rows),
            "drain from the tail to blocks": lambda: drain(client),
            f"set, awaited, {TASKS} tasks": lambda: _singles(client),
        }
        for name, work in works.items():
            spent = watch(running)
            count = await work()
            taken, used, _ = spent()
            found[name] = count / taken, used / count * 1e6
    return found


def measure_secure(rows: list[Row]) -> Iterator[Figure]:
    """Yield the ratio of each measure with TLS and a token to without; the note has the ratio of the server's CPU."""
    with tempfile.TemporaryDirectory(prefix="upr-bench-") as name:
        folder = Path(name)
        chain, key = folder / "chain.pem", folder / "key.pem"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        command += " -subj /CN=upr -addext subjectAltName=IP:127.0.0.1"
        subprocess.run(
            [*command.split(), "-keyout", str(key), "-out", str(chain)],
            check=True,
            capture_output=True,
        )
        token = add_identity(folder / "identities", "bench", {"read": None, "write": None})
        secure = ["--tls-cert", str(chain), "--tls-key", str(key)]
        secure += ["--tokens", str(folder / "identities")]
        login: dict[str, Any] = {"tls": chain, "token": token}
        kinds: list[tuple[list[str], dict[str, Any]]] = [([], {}), (secure, login)]
        found: list[list[Found]] = [[], []]
        for pair in range(PAIRS):
            for kind in (0, 1) if pair % 2 else (1, 0):
                options, shown = kinds[kind]
                with server(*options) as running:
                    found[kind].append(asyncio.run(_run(running, rows, shown)))
            say(f"secure: {pair + 1} of {PAIRS} pairs")
    for measure in found[0][0]:
        ratios = []
        for column in (0, 1):
            plain, encrypted = (
                statistics.median(one[measure][column] for one in runs) for runs in found
            )
            ratios.append(encrypted / plain)
        note = f"server's CPU a row: {ratios[1]:.2f}"
        yield Figure(f"TLS and token: {measure}", ratios[0], "ratio", note=note)
