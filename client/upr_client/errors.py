"""Errors: every one that the SDK raises. All are ``UprError``."""

from upr_client.positions import PositionBusyError as PositionBusyError
from upr_client.positions import PositionStoreError as PositionStoreError
from upr_protocol.errors import *  # noqa: F403  # All of them, and there is no other place to name them.
