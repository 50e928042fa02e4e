"""The chain of backups against a simple model: every committed restore point is the state at its cut."""

import os

import pytest

from tests.spark.backup_model import World
from upr_backup import retention as prune_module
from upr_backup.errors import BackupNotFoundError, MergeRefusedError, RepositoryDamagedError
from upr_backup.repository.chain import Chain, Keep, Link, needed, segments_of
from upr_backup.repository.documents import Entry, FileRef, Kind, Manifest, check_link
from upr_backup.repository.repository import number_in
from upr_backup.retention import beginning, chosen
from upr_backup.rows import grouped
from upr_cli_kit.exit_codes import REFUSED, exit_code_of

SEEDS = int(os.environ.get("UPR_BACKUP_WORLDS", "30"))
FIRST_SEED = int(os.environ.get("UPR_BACKUP_FIRST_WORLD", "0"))
TURNS = 30


def simulate(seed: int) -> World:
    """Run one world to its end, and check all its restore points on the way."""
    world = World(seed)
    random = world.random
    for _ in range(TURNS):
        world.between()
        act = random.choice(
            (world.run, world.run, world.run, world.merge, world.expire, world.prune)
        )
        act(random.randrange(30) if random.random() < 0.5 else -1)
        if random.random() < 0.3:
            world.check_all()
    world.check_all()
    return world


def test_every_restore_point_is_the_state_at_its_cut() -> None:
    worlds = [simulate(seed) for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)]
    figures = {
        name: sum(getattr(world, name) for world in worlds)
        for name in (
            "commits",
            "crashes",
            "rolled_back",
            "beaten",
            "merges",
            "expired",
            "pruned",
            "voided",
            "waited",
        )
    }
    print(f"\n{SEEDS} worlds: {figures}")
    # That the runs met what they are for.
    least = {"commits": 5, "crashes": 1, "rolled_back": 1, "merges": 1, "expired": 1, "pruned": 5}
    for name, times in least.items():
        assert figures[name] > SEEDS * times, figures
    assert min(figures.values()) > SEEDS // 20, figures


@pytest.mark.parametrize("name", ["run", "merge", "expire", "prune"])
def test_a_crash_at_each_step_loses_nothing(name: str) -> None:
    for seed in range(3):
        steps = 0
        while True:
            world = World(seed)
            for act in (world.run, world.run, world.run, world.merge, world.expire, world.run):
                world.between()
                act()
            world.between()
            crashes = world.crashes
            getattr(world, name)(steps)
            crashed = world.crashes > crashes
            world.check_all()
            for act in (world.run, world.merge, world.expire, world.run, world.prune):
                act()
                world.check_all()
            if not crashed:
                break
            steps += 1


def test_pruning_leaves_only_what_is_needed() -> None:
    removed = 0
    for seed in range(10):
        world = simulate(seed)
        world.tick()
        world.run()
        repository, storage = world.repository, world.storage
        storage.now += 10
        chain = repository.chain()
        made = prune_module.plan(repository, chain, 0, 10_000_000_000)
        removed += len(list(prune_module.prune(repository, made)))
        chain = world.check_all()
        named = {file.path for manifest in chain.rests_on() for file in manifest.files}
        if made.first == chain.first or (made.first, chain.first) == (0, 1):
            # Two merges to one number at a time both stay.
            doubled = {m for m in chain.merged if len(repository.merged_bases(m)) > 1}
            there = [
                name
                for folder in ("data/", "merged/")
                for name in storage.names(folder)
                if name.endswith(".parquet")
                and not (folder == "data/" and number_in(name) > chain.last)
                and not (folder == "merged/" and number_in(name) in doubled and name not in named)
            ]
            assert sorted(named) == sorted(there)
    assert removed


def overtake(seed: int) -> World:
    """Run a world in which expiries and prunes overtake backups, and prunes overtake merges, before the commit."""
    world = World(seed)
    for act in (world.run, world.run, world.merge, world.run, world.run):
        world.between()
        act()
    for _ in range(3):
        world.between()
        world.ambush = (world.prune,)
        world.merge()
        world.server.roll_back()
        world.ambush = (world.expire, world.prune)
        world.run()
        world.check_all()
        world.run()
        world.prune()
        world.check_all()
    return world


@pytest.mark.long
def test_runs_that_are_overtaken_before_their_commit() -> None:
    worlds = [overtake(seed) for seed in range(SEEDS)]
    assert sum(world.waited for world in worlds) > SEEDS // 10
    assert sum(world.voided for world in worlds) > SEEDS // 10


def _manifest(number: int, kind: Kind, start: int, end: int, cut: int | None = None) -> Manifest:
    rows = 1 if end > start else 0
    files = (FileRef(f"data/{number}", 1, "", rows),) if rows else ()
    return Manifest(
        number,
        kind,
        "r",
        "p",
        "c",
        0,
        0,
        0,
        files,
        {7: Entry(start, end, cut, rows, 0, 0 if rows else None, None)},
        (),
    )


def _chain(*manifests: Manifest, merged: tuple[Manifest, ...] = ()) -> Chain:
    known = {manifest.number: manifest for manifest in manifests}
    links = [Link.of(manifest) for manifest in manifests]
    return Chain(links, known.__getitem__, {manifest.number: manifest for manifest in merged})


def _bounds(chain: Chain, number: int) -> list[tuple[int, int]]:
    return [(part.low, part.high) for part in segments_of(needed(chain, number))[7]]


def test_a_cut_clips_earlier_rows_from_its_backup_on() -> None:
    """The specification's 434 / 426 / 418: restored before, the old branch; after, the new one."""
    first = [_manifest(1, "full", 0, 418), _manifest(2, "incremental", 418, 434)]
    chain = _chain(*first, _manifest(3, "incremental", 418, 450, cut=418))
    assert [_bounds(chain, n) for n in (1, 2, 3)] == [
        [(0, 418)],
        [(0, 418), (418, 434)],
        [(0, 418), (418, 450)],
    ]
    assert [m.number for m in needed(chain, 3)] == [1, 2, 3]
    clipped = _chain(*first, _manifest(3, "incremental", 425, 450, cut=425))
    assert _bounds(clipped, 3) == [(0, 418), (418, 425), (425, 450)]


def test_a_merged_base_serves_what_does_not_go_back_into_it() -> None:
    first = [_manifest(1, "full", 0, 418), _manifest(2, "incremental", 418, 434)]
    into = [*first, _manifest(3, "incremental", 418, 450, cut=418)]
    base = _manifest(2, "merged", 0, 434)
    chain = _chain(*into, merged=(base,))
    assert [chain.base(n).kind for n in (1, 2, 3)] == ["full", "merged", "full"]
    assert _bounds(chain, 2) == [(0, 434)]
    assert _bounds(chain, 3) == [(0, 418), (418, 450)]
    assert list(chain.mergeable()) == [3, 1]
    with pytest.raises(
        MergeRefusedError, match="backup 3 goes back to 418 in partition 7"
    ) as error:
        chosen(_chain(*into), 2)
    assert error.value.hint == "these can be: 3, 1"
    assert exit_code_of(error.value) == REFUSED
    # To 0: nothing of the base counts any more, so that no later cut needs anything of it.
    zero = [*first, _manifest(3, "incremental", 0, 500, cut=0)]
    zero.append(_manifest(4, "incremental", 400, 510, cut=400))
    chain = _chain(*zero, merged=(base,))
    assert [chain.base(n).number for n in (2, 3, 4)] == [2, 2, 2]
    assert _bounds(chain, 4) == [(0, 400), (400, 510)]
    assert list(chain.mergeable()) == [4, 2, 1]


def test_a_chain_is_firm_when_its_first_base_serves_its_newest_point() -> None:
    manifests = [
        _manifest(1, "full", 0, 10),
        _manifest(2, "incremental", 10, 20),
        _manifest(3, "incremental", 5, 30, cut=5),
        _manifest(4, "incremental", 30, 40),
    ]
    bases = [_manifest(2, "merged", 0, 20), _manifest(3, "merged", 0, 30)]
    chain = _chain(*manifests, merged=(*bases,))
    assert (chain.whole, chain.firm) == (True, True)
    second, third = chain.begun_at(2), chain.begun_at(3)
    # A run that spares what is below 20 may go back to 25, which only the second backup could serve, and cannot.
    assert (second.whole, second.firm) == (True, False)
    assert (third.whole, third.firm) == (True, True)
    assert [beginning(chain, n) for n in (4, 3, 2)] == [3, 3, 1]
    later = _chain(*manifests, _manifest(5, "full", 0, 50), merged=(*bases,))
    assert later.begun_at(2).firm


def test_what_is_chosen_to_be_merged() -> None:
    manifests = [
        _manifest(1, "full", 0, 10),
        *(_manifest(n, "incremental", n, n) for n in range(2, 9)),
    ]
    chain = _chain(*manifests)
    assert chosen(chain) == 6
    assert chosen(chain, keep=Keep(5, None)) == 4
    assert chosen(chain, keep=Keep(1, None)) == 6, "the newest two are left alone"
    assert chosen(chain, 8) == 8
    assert chosen(chain, 1) is None
    assert chosen(_chain()) is None
    assert chosen(_chain(_manifest(1, "full", 0, 10))) is None
    with pytest.raises(BackupNotFoundError, match="there is no backup 9"):
        chosen(chain, 9)
    assert beginning(chain, 8) == 1
    merged = _chain(*manifests, merged=(_manifest(6, "merged", 0, 10),))
    assert [beginning(merged, n) for n in (8, 6, 5)] == [6, 6, 1]
    assert chosen(merged) is None


def test_groups_fill_the_room_and_no_more() -> None:
    assert grouped({3: 5, 1: 5, 2: 5}, 10) == [[1, 2], [3]]
    assert grouped({1: 50, 2: 1, 3: 9}, 10) == [[1], [2, 3]]
    assert grouped({}, 10) == []


def test_what_does_not_continue_the_chain_is_refused() -> None:
    first = _manifest(1, "full", 0, 10)
    check_link(None, first)
    check_link(first, _manifest(2, "incremental", 10, 12))
    for wrong in (
        _manifest(3, "incremental", 10, 12),
        _manifest(2, "incremental", 11, 12),
        _manifest(2, "incremental", 8, 12),
        _manifest(2, "incremental", 11, 12, cut=11),
        _manifest(2, "full", 10, 12),
    ):
        with pytest.raises(RepositoryDamagedError, match=r"backup \d"):
            check_link(first, wrong)
    with pytest.raises(RepositoryDamagedError, match="not full"):
        check_link(None, _manifest(1, "incremental", 0, 1))
    for number in (0, 2):
        with pytest.raises(BackupNotFoundError):
            needed(_chain(first), number)
