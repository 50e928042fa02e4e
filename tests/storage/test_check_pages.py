"""Whatever LMDB lawfully leaves in a file is no contradiction."""

import random
from contextlib import closing
from functools import partial
from pathlib import Path

import lmdb
import pytest

from upr.storage.check.trees import check_pages
from upr.storage.keyspace import TABLES
from upr.storage.lmdb_pages import PageFile, check_length

SIZES = (10, 10, 100, 1500, 3000, 9000, 60_000)


@pytest.mark.parametrize("seed", range(8))
def test_files_after_random_transactions(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    there: dict[tuple[int, bytes], None] = {}
    checked = 0
    with lmdb.open(str(tmp_path), map_size=2**34, max_dbs=16, sync=False) as env:
        tables = [env.open_db(name) for name in sorted(TABLES)]
        for _ in range(25):
            removing = rng.random() < 0.4
            with env.begin(write=True) as txn:
                for _ in range(rng.choice([1, 5, 50, 300])):
                    if removing and there:
                        (table, key), _ = there.popitem()
                        txn.delete(key, db=tables[table])
                        continue
                    table = rng.randrange(len(tables))
                    key = b"%05d" % rng.randrange(600) * rng.choice([1, 1, 20])
                    # Replacing a long value by a short one in one transaction is part of it.
                    txn.put(key, rng.randbytes(1) * rng.choice(SIZES), db=tables[table])
                    there[table, key] = None
                if rng.random() < 0.1:
                    txn.abort()
                    there = {}
            check_length(tmp_path)
            with closing(PageFile(tmp_path / "data.mdb")) as file:
                problems: list[str] = []
                take = partial(lambda to, words, _: to.append(words), problems)
                check_pages(file, take, take)
            assert problems == []
            checked += 1
    assert checked == 25
