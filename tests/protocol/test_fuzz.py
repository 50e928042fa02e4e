"""A short fuzz of everything that reads bytes; ``tools/dev.py soak --fuzz`` is the long one."""

import pytest

from tests.fuzz import Target, describe, fuzz, targets

COUNT = 600


@pytest.mark.parametrize("target", targets(), ids=describe)
def test_any_bytes_give_a_value_or_the_declared_error(target: Target) -> None:
    fuzz(target, 1, COUNT)
