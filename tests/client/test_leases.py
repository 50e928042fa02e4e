"""A lease is a time above 0 or left to the server: nothing else is taken for one."""

import math

import pytest

from upr_client import Client
from upr_protocol.errors import InvalidArgumentError


@pytest.mark.parametrize("lease", [0, 0.0, -1, math.nan])
def test_no_lease_is_taken_for_another(lease: float) -> None:
    with Client("127.0.0.1:1") as client:
        bucket = client.bucket()
        for ask in (bucket.create_cut, bucket.renew_cut):
            with pytest.raises(InvalidArgumentError, match="a lease of"):
                ask("name", lease=lease)
