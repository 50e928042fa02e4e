"""A replica that joins an active server which has much on its disk, while writers go on; then it is all that is left."""

import random
import time
import zlib

from tests.conftest import StartServer
from tests.harness import WAIT_SECONDS, RunningServer
from tests.replica.rounds import SAFE, Writing
from tests.replica.sets import counted, is_active, wait_for
from upr_client import Client, Only, Rollback

VALUE_BYTES = 4096
BATCH_ROWS = 256
BYTES_PER_SECOND = 2**21
"""What a join takes at least on a machine that does much else."""


def fill(target: str, size: int) -> dict[bytes, int]:
    """Write so many bytes of values; return the checksum of each key's value."""
    rng, found = random.Random(size), dict[bytes, int]()
    with Client(target) as client:
        bucket = client.bucket()
        for first in range(0, size // VALUE_BYTES, BATCH_ROWS):
            rows = [
                (b"row %d" % (first + n), rng.randbytes(VALUE_BYTES)) for n in range(BATCH_ROWS)
            ]
            bucket.write_many(rows)
            found |= {key: zlib.crc32(value) for key, value in rows}
    return found


def checksums(server: RunningServer) -> dict[bytes, int | None]:
    """Return what a server itself shows: the checksum of each key's value."""
    found: dict[bytes, int | None] = {}
    with Client(server.target) as client:
        only = Only(stability="disk")
        with client.bucket().changes(until="now", only=only, read_from="any") as changes:
            for batch in changes.batches():
                assert not isinstance(batch, Rollback)
                for change in batch.changes:
                    value = change.value
                    found[change.key] = None if value is None else zlib.crc32(value)
    return found


def join(start: StartServer, size: int) -> tuple[int, float]:
    """Fill a server, have a replica join under writers at both durabilities, and promote that after SIGKILL.

    Returns: how many keys were acknowledged while it joined, and the seconds that this took.

    Raises:
        AssertionError: the replica lacks something that was there before, or was acknowledged at ``replicated(1)``.
    """
    active = start("--flush-seconds", "0.5")
    expected = fill(active.target, size)
    with (
        Writing([active.target], "early", "disk") as early,
        Writing([active.target], "safe", SAFE) as safe,
    ):
        early.go_on()
        before, began = len(early.acknowledged), time.monotonic()
        replica = start("--replicate-from", active.target)
        seconds = WAIT_SECONDS + size / BYTES_PER_SECOND
        wait_for(lambda: counted(replica.target) == {replica.target}, "the join", seconds)
        written, taken = len(early.acknowledged) - before, time.monotonic() - began
        assert written, "nobody wrote meanwhile"
        for writer in (early, safe):
            writer.go_on()
        # The writers stop; what they were told stays.
        for writer in (early, safe):
            writer.__exit__()
    active.kill()
    with Client(replica.target) as client:
        client.admin.promote()
    assert is_active(replica)
    found = checksums(replica)
    expected |= {key: zlib.crc32(key * 5) for key in safe.acknowledged}
    lacking = [key for key, value in expected.items() if found.get(key) != value]
    assert not lacking, f"{len(lacking)} of {len(expected)} keys, such as {lacking[:3]}"
    return written, taken
