"""The chain of backups against a simple model: every committed restore point is the state at its cut."""

import dataclasses

import pytest

from tests.spark.backup_model import World
from upr_spark.backup import chain as chain_module
from upr_spark.backup.chain import Entry, FileRef, Manifest, check_link, needed, segments
from upr_spark.backup.errors import BackupNotFoundError, RepositoryDamagedError

SEEDS = 300
RUNS = 14


def simulate(seed: int) -> World:
    """Run one world to its end, and check all its restore points."""
    world = World(seed)
    for _ in range(RUNS):
        world.between()
        world.run(world.random.randrange(30) if world.random.random() < 0.6 else -1)
    chain = world.repository.chain()
    for manifest in chain:
        world.check(chain, manifest.number)
    for manifest in chain:
        for file in manifest.files:
            assert file.path in world.storage.objects
    return world


def test_every_restore_point_is_the_state_at_its_cut() -> None:
    worlds = [simulate(seed) for seed in range(SEEDS)]
    # That the runs met what they are for.
    assert sum(world.commits for world in worlds) > SEEDS * 5
    assert sum(world.crashes for world in worlds) > SEEDS
    assert sum(world.rolled_back for world in worlds) > SEEDS
    assert sum(world.beaten for world in worlds) > 10


def test_a_crash_at_each_step_loses_nothing() -> None:
    for seed in range(20):
        steps = 0
        while True:
            world = World(seed)
            world.between()
            world.run()
            world.between()
            before = len(world.repository.chain())
            world.run(steps)
            crashed = world.crashes > 0
            world.run()
            chain = world.repository.chain()
            assert len(chain) > before
            for manifest in chain:
                world.check(chain, manifest.number)
            if not crashed:
                break
            steps += 1
        assert steps > 3


def test_the_model_finds_cuts_that_are_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    real = chain_module.segments

    def without_cuts(chain: list[Manifest], number: int) -> object:
        kept = [
            dataclasses.replace(
                m, entries={p: dataclasses.replace(e, cut=None) for p, e in m.entries.items()}
            )
            for m in chain
        ]
        return real(kept, number)

    monkeypatch.setattr("tests.spark.backup_model.segments", without_cuts)
    with pytest.raises(AssertionError):
        _ = [simulate(seed) for seed in range(50)]


def _manifest(number: int, kind: str, start: int, end: int, cut: int | None = None) -> Manifest:
    rows = 1 if end > start else 0
    files = (FileRef(f"data/{number}", 1, "", rows),) if rows else ()
    return Manifest(
        number,
        "full" if kind == "full" else "incremental",
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


def test_a_cut_clips_earlier_rows_from_its_backup_on() -> None:
    """The specification's 434 / 426 / 418: restored before, the old branch; after, the new one."""
    chain = [
        _manifest(1, "full", 0, 418),
        _manifest(2, "incremental", 418, 434),
        _manifest(3, "incremental", 418, 450, cut=418),
    ]
    bounds = {n: [(s.low, s.high) for s in segments(chain, n)[7]] for n in (1, 2, 3)}
    assert bounds == {1: [(0, 418)], 2: [(0, 418), (418, 434)], 3: [(0, 418), (418, 450)]}
    assert [m.number for m in needed(chain, 3)] == [1, 2, 3]
    clipped = [*chain[:2], _manifest(3, "incremental", 425, 450, cut=425)]
    assert [(s.low, s.high) for s in segments(clipped, 3)[7]] == [(0, 418), (418, 425), (425, 450)]


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
            segments([first], number)
