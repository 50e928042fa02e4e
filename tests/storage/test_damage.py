"""Damage anywhere in a closed directory is found, or changes nothing that a server would serve.

UPR_DAMAGE_SEEDS sets how many seeds are run; 200 take some minutes.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from tests.storage.closed import Closed, filled
from upr.storage.check.directory import BucketReport, check_directory
from upr.storage.keyspace import TABLES
from upr.storage.lmdb_pages import PageFile

SEEDS = int(os.environ.get("UPR_DAMAGE_SEEDS", "18"))
READ_SECONDS = 60.0
_PAGE = 4096
_META_BYTES = 152


def read_all(closed: Closed) -> dict[str, str] | None:
    """What a server would read; None when reading fails as a whole or kills the reader."""
    script = Path(__file__).with_name("read_all.py")
    command = [sys.executable, str(script), str(closed.bucket)]
    done = subprocess.run(command, capture_output=True, timeout=READ_SECONDS, check=False)
    if done.returncode:
        return None
    found: dict[str, str] = json.loads(done.stdout)
    return found


def stored_values(closed: Closed) -> list[bytes]:
    """Every value in every table."""
    values = []
    store = str(closed.bucket / "store")
    with lmdb.open(store, max_dbs=16, readonly=True, lock=False) as env, env.begin() as txn:
        for name in TABLES:
            with txn.cursor(db=env.open_db(name, txn=txn, create=False)) as cursor:
                values += [bytes(value) for _, value in cursor]
    return values


def flip(file: Path, offset: int, bit: int) -> str:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)
    return f"{file.name} byte {offset} bit {bit}"


def flip_value(closed: Closed, rng: random.Random) -> str:
    value = rng.choice(stored_values(closed))
    data = bytearray(closed.data_file.read_bytes())
    offset, bit = rng.randrange(len(value)), rng.randrange(8)
    # An older state of the page may hold the value too.
    places, found = [], data.find(value)
    while found != -1:
        places.append(found)
        found = data.find(value, found + 1)
    assert places, "a stored value lies in the file in one piece"
    for place in places:
        data[place + offset] ^= 1 << bit
    closed.data_file.write_bytes(data)
    return f"value at {places}, byte {offset} bit {bit}"


def flip_journal(closed: Closed, rng: random.Random) -> str:
    file = rng.choice(closed.journal_files)
    return flip(file, rng.randrange(file.stat().st_size), rng.randrange(8))


def flip_anywhere(closed: Closed, rng: random.Random) -> str:
    return flip(closed.data_file, rng.randrange(closed.data_file.stat().st_size), rng.randrange(8))


def flip_meta(closed: Closed, rng: random.Random) -> str:
    offset = rng.choice([0, _PAGE]) + rng.randrange(_META_BYTES)
    return flip(closed.data_file, offset, rng.randrange(8))


def flip_page_head(closed: Closed, rng: random.Random) -> str:
    pages = closed.data_file.stat().st_size // _PAGE
    offset = rng.randrange(2, pages) * _PAGE + rng.randrange(64)
    return flip(closed.data_file, offset, rng.randrange(8))


def flip_lock(closed: Closed, rng: random.Random) -> str:
    file = closed.bucket / "store" / "lock.mdb"
    return flip(file, rng.randrange(file.stat().st_size), rng.randrange(8))


def truncate_store(closed: Closed, rng: random.Random) -> str:
    size = rng.randrange(closed.data_file.stat().st_size)
    os.truncate(closed.data_file, size)
    return f"{closed.data_file.name} cut to {size}"


def truncate_journal(closed: Closed, rng: random.Random) -> str:
    # Less than the last record: a journal that ends between two records cannot be told from one that never went on.
    file = closed.journal_files[-1]
    size = file.stat().st_size - rng.randint(1, 60)
    os.truncate(file, size)
    return f"{file.name} cut to {size}"


def swap_values(closed: Closed, rng: random.Random) -> str:
    by_size: dict[int, list[bytes]] = {}
    for value in set(stored_values(closed)):
        by_size.setdefault(len(value), []).append(value)
    same = [sorted(values) for _, values in sorted(by_size.items()) if len(values) > 1]
    one, other = rng.sample(rng.choice(same), 2)
    data = closed.data_file.read_bytes()
    marker = rng.randbytes(len(one))
    data = data.replace(one, marker).replace(other, one).replace(marker, other)
    closed.data_file.write_bytes(data)
    return f"two values of {len(one)} bytes swapped"


def overwrite_page(closed: Closed, rng: random.Random) -> str:
    pages = closed.data_file.stat().st_size // _PAGE
    source, target = rng.randrange(pages), rng.randrange(pages)
    data = bytearray(closed.data_file.read_bytes())
    page = bytes(_PAGE) if rng.random() < 0.5 else data[source * _PAGE :][:_PAGE]
    data[target * _PAGE : (target + 1) * _PAGE] = page
    closed.data_file.write_bytes(data)
    return f"page {target} overwritten"


def repoint(closed: Closed, rng: random.Random) -> str:
    """Let a pointer in the file name another page."""
    data = bytearray(closed.data_file.read_bytes())
    pages = len(data) // _PAGE
    with closing(PageFile(closed.data_file)) as file:
        root = file.chosen.main.root
    places: list[int] = []
    for number in (rng.randrange(2, pages), root):
        old = number.to_bytes(8, "little")
        places = places or [at for at in range(0, len(data) - 8, 2) if data[at : at + 8] == old]
    place = rng.choice(places)
    data[place : place + 8] = rng.randrange(2, pages).to_bytes(8, "little")
    closed.data_file.write_bytes(data)
    return f"the 8 bytes at {place} name another page"


ALWAYS_FOUND = (flip_value, flip_journal)
OTHERS = (
    flip_anywhere,
    flip_meta,
    flip_page_head,
    flip_lock,
    truncate_store,
    truncate_journal,
    swap_values,
    overwrite_page,
    repoint,
)
Damage = Callable[[Closed, random.Random], str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Closed:
    closed = filled(tmp_path_factory.mktemp("whole") / "data", 1)
    (report,) = check_directory(closed.path)
    assert report.findings == []
    return closed


@pytest.fixture(scope="module")
def expected(whole: Closed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = read_all(copy_of(whole, tmp_path_factory.mktemp("read") / "data"))
    assert found is not None
    assert not any(text.startswith("error") for text in found.values())
    return found


def copy_of(closed: Closed, folder: Path) -> Closed:
    shutil.copytree(closed.path, folder)
    copy = Closed.__new__(Closed)
    copy.path, copy.version = folder, closed.version
    copy.bucket = folder / "buckets" / closed.bucket.name
    return copy


def check_one(closed: Closed) -> BucketReport:
    (report,) = check_directory(closed.path, hang_seconds=30)
    return report


def serves_nothing_else(closed: Closed, expected: dict[str, str]) -> bool:
    """Whether everything that can be read is what was there before."""
    found = read_all(closed)
    return found is None or all(
        text == expected[what] or text.startswith("error") for what, text in found.items()
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_damage_is_found_or_changes_nothing(
    whole: Closed, expected: dict[str, str], tmp_path: Path
) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        # Every second one in a stored value or a record, the others in turn.
        damage: Damage = (
            ALWAYS_FOUND[seed // 2 % len(ALWAYS_FOUND)]
            if seed % 2
            else OTHERS[seed // 2 % len(OTHERS)]
        )
        closed = copy_of(whole, tmp_path / f"{seed}")
        words = f"seed {seed}: {damage.__name__}: {damage(closed, rng)}"
        report = check_one(closed)
        if damage in ALWAYS_FOUND:
            assert report.damaged, words
            outcome = "found"
        elif report.findings:
            outcome = "found"
        else:
            assert serves_nothing_else(closed, expected), words
            outcome = "nothing changed"
        outcomes[damage.__name__, outcome] += 1
        shutil.rmtree(closed.path)
    print(sorted(outcomes.items()))
    assert sum(outcomes.values()) == SEEDS


def test_a_truncated_file_is_refused_at_every_page(whole: Closed, tmp_path: Path) -> None:
    closed = copy_of(whole, tmp_path / "data")
    with closing(PageFile(closed.data_file)) as file:
        meta = file.chosen
        used = set(range(2, meta.last_page + 1))
        used -= {page for _, pages in file.free_pages(meta) for page in pages}
    rng = random.Random(1)
    for page in sorted(rng.sample(sorted(used), 8), reverse=True):
        os.truncate(closed.data_file, page * _PAGE)
        with pytest.raises(Exception, match="its end is missing"):
            closed.store()
