"""Reads a bucket's folder as a server does, and prints as JSON what it got: digests, or errors.

Run as a script: damaged pages may kill whoever reads them.
"""

import hashlib
import json
import sys
from pathlib import Path

from upr.storage.journal import Journal
from upr.storage.keyspace import PartitionRow
from upr.storage.read import read_blocks
from upr.storage.store import ReadRequest, Store
from upr_protocol.errors import UprError

READ_BYTES = 2**20


def read_partition(store: Store, partition: int, row: PartitionRow | UprError) -> str:
    if isinstance(row, UprError):
        raise row
    digest = hashlib.sha256(repr((row.state, row.purge_seqno, row.stored_high)).encode())
    at = 0
    while at < row.stored_high:
        request = ReadRequest(partition, at)
        (result,) = read_blocks(store, [request], READ_BYTES)
        if result.error is not None:
            raise result.error
        for block in result.blocks:
            digest.update(block.data)
            at = int(block.runs["end_seqno"][-1])
    return digest.hexdigest()


def read_journal(folder: Path, version: int) -> str:
    digest = hashlib.sha256()
    journal = Journal(folder, version)
    for commit in journal.replay():
        digest.update(repr((commit.number, commit.entries)).encode())
    journal.close()
    return digest.hexdigest()


def main(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    store = Store(folder / "store")
    identity = store.identity()
    found["identity"] = repr(identity)
    for partition, row in store.partitions().items():
        try:
            found[str(partition)] = read_partition(store, partition, row)
        except UprError as error:
            found[str(partition)] = f"error: {error}"
    found["journal"] = read_journal(folder / "journal", int(folder.name, 16))
    store.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
