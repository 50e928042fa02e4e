"""Fixtures of the tests of the SDK."""

import pytest

from tests.client.certificates import Certificate, make_certificate
from tests.client.kit import follow, server

__all__ = ["certificate", "follow", "server"]


@pytest.fixture
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate of a server at 127.0.0.1."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))
