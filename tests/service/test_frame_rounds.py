"""The pace of small frames: rounds that come less often under load, and more often again when it is gone."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import WAIT_SECONDS
from upr.service.overload import frame_rounds
from upr.service.overload.frame_rounds import (
    FULL_SHARE,
    ROUND_FRAMES,
    ROUNDS,
    SHARE,
    TIMER_SECONDS,
    Pace,
    Rounds,
)
from upr_protocol.limits import ROUND_SECONDS_MAX


class Clock:
    def __init__(self) -> None:
        self.pace = Pace()
        self.now = 0.0

    def rounds(self, count: int, frames: int, seconds: float, late: float = 0.0) -> float:
        """Have rounds one right after the other; return the interval behind the last."""
        for _ in range(count):
            self.now += self.pace.left(self.now) + late
            self.pace.begin(self.now, waited=bool(late))
            self.now += seconds
            self.pace.end(self.now, frames)
        return self.pace.interval


def test_a_follower_alone_never_waits() -> None:
    clock = Clock()
    assert clock.rounds(50, 1, 0.1) == 0
    assert clock.pace.left(clock.now) == 0


@given(st.integers(2, 1000), st.floats(0.0005, 0.02))
def test_the_interval_becomes_a_multiple_of_what_a_round_takes(frames: int, seconds: float) -> None:
    clock = Clock()
    share = FULL_SHARE if frames >= ROUND_FRAMES else SHARE
    wanted = min(seconds * (frames - 1) / frames * share, ROUND_SECONDS_MAX)
    before = 0.0
    for _ in range(30):
        interval = clock.rounds(1, frames, seconds)
        assert before <= interval <= wanted
        before = interval
    assert before == pytest.approx(wanted, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10)), max_size=50))
def test_the_interval_is_bounded_and_shrinks_when_the_load_is_gone(
    load: list[tuple[int, float]],
) -> None:
    clock = Clock()
    for frames, seconds in load:
        assert 0 <= clock.rounds(1, frames, seconds, late=seconds / 2) <= ROUND_SECONDS_MAX
    began = clock.now
    assert clock.rounds(12, 64, 0.0) < TIMER_SECONDS
    assert clock.now - began < 3 * ROUND_SECONDS_MAX
    assert clock.pace.left(clock.now) == 0


def test_a_single_pause_of_the_process_changes_nothing() -> None:
    clock = Clock()
    steady = clock.rounds(40, 8, 0.002)
    for _ in range(5):
        clock.rounds(1, 8, 0.4)
        assert clock.rounds(1, 8, 0.002) == pytest.approx(steady, rel=1e-3)


def test_rounds_that_begin_late_are_load_too() -> None:
    assert Clock().rounds(40, 8, 0.002, late=0.011) > Clock().rounds(40, 8, 0.002) + 0.01
    assert Clock().rounds(40, 8, 0.002, late=TIMER_SECONDS) == pytest.approx(
        Clock().rounds(40, 8, 0.002), rel=1e-3
    )


@pytest.mark.asyncio
async def test_a_member_alone_sends_however_far_the_next_round_is() -> None:
    rounds = Rounds()
    rounds.pace.begin(time.monotonic(), waited=False)
    rounds.pace.interval = 1000.0
    for members in (1, 2, 1):
        rounds.members = members
        assert rounds.join(lambda: None) == (members == 1)


@pytest.mark.asyncio
async def test_those_who_wait_are_woken_together_and_may_all_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = Rounds()
    first, others = asyncio.Event(), [asyncio.Event() for _ in range(5)]
    assert rounds.join(first.set), "nobody has sent for long"
    assert rounds.join(others[0].set), "the round lasts until all who are awake have sent"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # However slow the machine is, all ask in time.
    now = time.monotonic()
    monkeypatch.setattr(frame_rounds, "time", SimpleNamespace(monotonic=lambda: now))
    rounds.pace.begin(now, waited=False)
    rounds.pace.interval = 0.02
    woken: list[tuple[int, bool]] = []

    async def follow(number: int) -> None:
        assert not rounds.join(others[number].set)
        assert not rounds.join(others[number].set), "asking twice is waiting once"
        await others[number].wait()
        woken.append((number, rounds.join(others[number].set)))

    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*map(follow, range(5)))
    assert woken == [(number, True) for number in range(5)]


@pytest.mark.asyncio
@pytest.mark.parametrize("members", [ROUND_FRAMES + 5, 10 * ROUND_FRAMES])
async def test_many_have_their_turns_in_several_rounds_those_first_who_waited_longest(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds()
    rounds.members = members
    most = max(ROUND_FRAMES, -(-members // ROUNDS))
    turns: list[list[int]] = []
    open_round = rounds._open

    def opened(*arguments: Any, **options: Any) -> None:
        turns.append([])
        open_round(*arguments, **options)

    monkeypatch.setattr(rounds, "_open", opened)

    async def follow(number: int) -> None:
        for _ in range(3):
            woken = asyncio.Event()
            while not rounds.join(woken.set):
                await woken.wait()
                woken.clear()
            turns[-1].append(number)
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*map(follow, range(members)))
    assert max(map(len, turns)) == most
    order = [number for one in turns for number in one]
    assert order == [*range(members)] * 3
