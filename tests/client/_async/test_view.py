"""A bucket as a dictionary, against a real server."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RunningServer
from upr_client import AsyncClient, Only
from upr_client.errors import ClosedError, InvalidArgumentError

StartServer = Callable[..., RunningServer]


@pytest.mark.asyncio
@pytest.mark.parametrize("at_markers", [False, True])
async def test_a_view_shows_what_is_written(target: str, at_markers: bool) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        await bucket.write_many((b"user:%d" % i, b"%d" % i) for i in range(500))
        await bucket.set(b"order:1", b"1")
        async with bucket.materialize(
            only=Only(key_prefix=b"user:"), at_markers=at_markers
        ) as view:
            assert await view.ready(30)
            assert dict(view.items()) == {b"user:%d" % i: b"%d" % i for i in range(500)}
            # Keys and values by themselves: a key of two bytes looks like a pair.
            await view.reached(await bucket.set(b"user:ab", b"c"), 30)
            assert dict(view)[b"user:ab"] == b"c"
            assert list(zip(view.keys(), view.values(), strict=True)) == list(view.items())
            await view.reached(await bucket.delete(b"user:ab"), 30)
            assert len(view) == 500
            assert b"order:1" not in view
            await view.reached(await bucket.set(b"user:7", b"new"), 30)
            assert view[b"user:7"] == b"new"
            await view.reached(await bucket.delete(b"user:8"), 30)
            assert view.get(b"user:8", b"none") == b"none"
            with pytest.raises(KeyError):
                view[b"user:8"]
            for key in ("user:7", b"", b"k" * 4097):
                with pytest.raises(InvalidArgumentError, match="key is"):
                    view.get(key)  # type: ignore[arg-type]
                with pytest.raises(InvalidArgumentError, match="key is"):
                    view[key]  # type: ignore[index]
        with pytest.raises(ClosedError):
            view.get(b"user:7")


@pytest.mark.asyncio
async def test_a_time_that_nothing_can_wait_for_is_refused(target: str) -> None:
    async with AsyncClient(target) as client:
        bucket = client.bucket()
        token = await bucket.set(b"a", b"1")
        async with bucket.materialize() as view, bucket.changes() as changes:
            waits: list[Callable[[Any], Any]] = [
                view.ready,
                changes.ready,
                partial(view.reached, token),
                partial(changes.reached, token),
            ]
            for wait in waits:
                for seconds in (math.inf, math.nan, 1e10, "1"):
                    with pytest.raises(InvalidArgumentError, match=r"seconds is .* must be 0 or"):
                        await wait(seconds)
            with pytest.raises(InvalidArgumentError, match="seconds is None"):
                await view.reached(token, None)  # type: ignore[arg-type]
            assert await view.ready(30)
            # As of a time that is over.
            assert await view.ready(-1.0)


@pytest.mark.asyncio
async def test_a_view_is_right_after_a_rollback(
    server_process: StartServer, tmp_path: Path
) -> None:
    # Nothing reaches the disk: what was written goes with the process.
    held = tmp_path / "held"
    held.touch()
    server = server_process(environment={"UPR_FAILPOINTS": f"journal.before_append=hold:{held}"})
    async with AsyncClient(server.target) as client:
        bucket = client.bucket()
        async with bucket.materialize(only=Only(stability="memory")) as view:
            assert await view.ready(30)
            lost = await bucket.set(b"key", b"lost", "memory")
            await view.reached(lost, 30)
            assert view[b"key"] == b"lost"
            server.kill()
            server.environment = {}
            server.start()
            kept = await bucket.set(b"other", b"1")
            await view.reached(kept, 60)
            while b"key" in view:
                await view.reached(await bucket.set(b"other", b"1"), 60)
            assert dict(view.items()) == {b"other": b"1"}
