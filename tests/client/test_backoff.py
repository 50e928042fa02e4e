"""How long to wait before trying again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_client.backoff import LONGEST_SECONDS, Retries, delay


@pytest.mark.parametrize(
    ("attempt", "longest"), [(0, 0.1), (1, 0.2), (2, 0.4), (8, 25.6), (9, 30.0), (10**6, 30.0)]
)
def test_the_bound_doubles_up_to_half_a_minute(attempt: int, longest: float) -> None:
    assert delay(attempt, 1.0) == pytest.approx(longest)
    assert delay(attempt, 0.5) == pytest.approx(longest / 2)
    assert delay(attempt, 0.0) == 0.0


@pytest.mark.parametrize(("attempt", "longest"), [(0, 0.1), (3, 0.8), (4, 1.0), (10**6, 1.0)])
def test_a_server_that_is_away_is_asked_for_every_second(attempt: int, longest: float) -> None:
    assert delay(attempt, 1.0, away=True) == pytest.approx(longest)
    assert delay(attempt, 0.5, away=True) == pytest.approx(longest / 2)


@given(st.integers(0, 10**9), st.floats(0, 1))
def test_the_wait_is_within_its_bounds(attempt: int, random: float) -> None:
    assert 0.0 <= delay(attempt, random) <= LONGEST_SECONDS


def test_each_partition_waits_for_itself() -> None:
    retries = Retries()
    assert retries.failed(1, 100.0, 1.0) == pytest.approx(0.1)
    assert retries.failed(1, 100.1, 1.0) == pytest.approx(0.2)
    assert retries.failed(2, 100.1, 1.0) == pytest.approx(0.1)
    due, next_due = retries.split(np.array([1, 2, 3]), 100.1)
    assert due == [3]
    assert next_due == pytest.approx(100.2)
    assert retries.split(np.array([1, 2, 3]), 100.31) == ([1, 2, 3], None)


def test_success_or_a_long_calm_begins_anew() -> None:
    retries = Retries()
    for _ in range(3):
        retries.failed(1, 0.0, 1.0)
        retries.failed(2, 0.0, 1.0)
    retries.succeeded(np.array([1]))
    assert retries.failed(1, 1.0, 1.0) == pytest.approx(0.1)
    assert retries.failed(2, 1.0, 1.0) == pytest.approx(0.8)
    assert retries.failed(2, 60.0, 1.0) == pytest.approx(0.1)


def test_another_server_is_asked_at_once() -> None:
    retries, both = Retries(), np.array([1, 2])
    retries.failed(1, 100.0, 1.0)
    retries.failed(1, 100.0, 1.0, lasting=True)
    assert retries.split(both, 100.0)[0] == [2]
    retries.moved()
    assert retries.split(both, 100.0) == ([1, 2], None)
    assert retries.failed(1, 100.0, 1.0) == pytest.approx(0.1)


def test_what_lasts_is_asked_for_more_and_more_seldom() -> None:
    retries = Retries()
    now, waits = 0.0, []
    for _ in range(10):
        waits.append(retries.failed(1, now, 1.0, lasting=True))
        now += waits[-1]
    assert waits == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert retries.failed(2, 0.0, 0.0, lasting=True) == 1.0
