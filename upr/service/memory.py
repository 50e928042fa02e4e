"""What memory the process holds, and how it is kept from holding more than it uses."""

import ctypes
from pathlib import Path

import pyarrow as pa

_STATUS = Path("/proc/self/status")
_M_ARENA_MAX = -8
_ARENAS = 2


def share_free_memory() -> None:
    """Have all threads, and pyarrow, take memory from the same few places. Once, before anything is served.

    By default each thread of a process with glibc has an arena of its own, and pyarrow a pool of its own, and what
    one has freed the others do not use. With blocks that go from thread to thread that costs about 60 MiB, for no
    speed.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
    except (AttributeError, OSError, TypeError):
        return


def memory_bytes() -> tuple[int, int]:
    """Return the process's anonymous and its mapped memory in bytes; zeros where there is no /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    anonymous, file, shared = (
        int(fields.get(name, "0 kB").split()[0]) * 1024
        for name in ("RssAnon", "RssFile", "RssShmem")
    )
    return anonymous, file + shared
