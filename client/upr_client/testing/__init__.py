"""Testing kit for users of the SDK; programs in production do not need it.

``ServerProcess`` is a real server in a child process, ``ScriptedServer`` one in memory that does on demand what is
hard to force on a real one, and ``check_position_store`` says whether a position store of your own is one. The
fixtures for pytest are in ``upr_client.testing.pytest_plugin``.
"""

from upr_client.testing.calls import Call
from upr_client.testing.positions import check_position_store
from upr_client.testing.process import ServerProcess, ServerProcessError
from upr_client.testing.scripted import ScriptedServer, keys_in

__all__ = [
    "Call",
    "ScriptedServer",
    "ServerProcess",
    "ServerProcessError",
    "check_position_store",
    "keys_in",
]
