"""A lease is a time above 0 or left to the server: nothing else is taken for one."""

import math

import pytest

from upr_client import Client
from upr_protocol.errors import InvalidArgumentError


@pytest.mark.parametrize("lease", [0, 0.0, -1, math.nan])
def test_no_lease_is_taken_for_another(lease: float) -> None:
    with Client("127.0.0.1:1") as client:
        for ask in (client.admin.create_cut, client.admin.renew_cut):
            with pytest.raises(InvalidArgumentError, match="lease is"):
                ask("default", "name", lease=lease)
