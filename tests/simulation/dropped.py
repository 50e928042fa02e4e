"""The simulated network whose bucket is dropped and made anew under its name while clients follow it.

The process may die at each step: before the folder has lost its name, before it is deleted, before the new one has
its name. Then the old bucket is there again, whole and with its version, or it never is. Clients keep the positions
and data of the old one, and are to come to have the new one's and nothing else.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from tests.model import ModelPartition
from tests.simulation.habits import Habits
from tests.simulation.networked import HABITS, NetworkedWorld
from tests.simulation.session import Pause, SimulatedClient
from tests.simulation.world import USED
from upr.engine.streams import BUCKET_GONE
from upr.service.buckets.catalog import DEFAULT_BUCKET, create_bucket
from upr.storage.directory import _NEW
from upr_client.changes.events import Rollback
from upr_protocol.handshake import BUCKET_GONE_RULE


class DroppedClient(SimulatedClient):
    """One whose positions may be of a bucket that is gone."""

    may_raise: ClassVar = {"SUPERSEDED", "BUCKET_GONE", "BUCKET_NOT_FOUND"}
    world: "DroppedWorld"

    def told_gone(self) -> None:
        known = self.following.session.bucket_version
        assert known != self.world.version, "it is there, with the version that was asked for"
        self.world.count("BUCKET_GONE at an Open")

    def _undo_one(self, rollback: Rollback) -> Pause:
        of_another = rollback.old_id not in self.world.ids
        # Of several that were told at once the bucket may be dropped before the last is undone.
        is_old = of_another and rollback.new_id not in self.world.ids
        if rollback.rule == BUCKET_GONE_RULE or not is_old:
            assert (rollback.rule == BUCKET_GONE_RULE) == of_another, rollback
            assert not of_another or rollback.seqno == 0, rollback
        if of_another:
            self.world.count("undone for a new version")
        return super()._undo_one(rollback)


class DroppedWorld(NetworkedWorld):
    """Drops its bucket now and then.

    Attributes:
        versions: of all buckets so far.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._dropping: Iterator[None] | None = None
        self._ids: dict[int, set[int]] = {}
        super().__init__(folder, seed)
        self.versions = {self.version}

    def first_clients(self) -> list[SimulatedClient]:
        return [
            *(DroppedClient(self, f"client {n}", habits, USED) for n, habits in enumerate(HABITS)),
            DroppedClient(self, "client of some", Habits(stability="memory"), USED[::2]),
        ]

    @property
    def version(self) -> int:
        """Of the bucket that is served, or was last."""
        return self.bucket.identity.version

    @property
    def ids(self) -> set[int]:
        """Of every record that the logs of its partitions ever had."""
        return self._ids.setdefault(self.version, set())

    def open(self) -> None:
        super().open()
        for p in USED:
            log = self.bucket.partitions.logs[p].to_pairs()
            self.ids.update(failover_id for failover_id, _ in log)

    def make_cut(self) -> None:
        """No cuts here."""

    # Dropping.

    def step(self, population: Sequence[Callable[[], bool]]) -> None:
        if self._dropping is None and self.rng.random() < 0.01:
            self._dropping = self._drop()
            self._go_on()
        elif self._dropping is None:
            super().step(population)
            return
        chance = self.rng.random()
        if chance < 0.05:
            self._die()
        elif chance < 0.3:
            self._go_on()
        else:
            self.step_network()

    def _go_on(self) -> None:
        assert self._dropping is not None
        if next(self._dropping, self) is self:
            self._dropping = None

    def _drop(self) -> Iterator[None]:
        """Drop the bucket and make another one, as the catalog does, with a pause wherever the process may die."""
        for call in list(self.calls):
            if call.talk is not None:
                call.talk.end(BUCKET_GONE)
                call.told_over()
        self.hosts.clear()
        self.count("drops")
        yield
        self.recorder.ending(self.bucket)
        self.close()
        dropped = self.directory.drop_bucket(self.bucket_folder)
        yield
        if self.rng.random() < 0.5:
            shutil.rmtree(dropped / self.rng.choice(["store", "journal"]))
            yield
            shutil.rmtree(dropped)
            yield
        made = create_bucket(self.directory, DEFAULT_BUCKET)
        unnamed = made.with_suffix(_NEW)
        os.rename(made, unnamed)
        yield
        self.directory.bucket_created(unnamed)
        yield
        self._serve(made)
        shutil.rmtree(dropped, ignore_errors=True)

    def _serve(self, folder: Path) -> None:
        """Serve a bucket that was made; nothing that is known of the old one holds."""
        self.bucket_folder = folder
        self.model = {p: ModelPartition(0) for p in USED}
        self.durable_model = dict.fromkeys(USED, 0)
        self.times = {p: [] for p in USED}
        self.unanswered = []
        for reader in self.readers:
            reader.drop_call()
            for p in USED:
                reader.forget(p)
        self.open()
        assert self.version not in self.versions
        self.versions.add(self.version)
        for p in USED:
            self.model[p].log = self.bucket.partitions.logs[p].to_pairs()
        self.recorder.restarted(self.bucket, clean=True)
        logs = {p: list(self.model[p].log) for p in USED}
        self.recorder.history[-1]["put_back"] = logs
        self.restarts += 1
        self.count("buckets made anew")

    def _die(self) -> None:
        """The process dies in between, and another one starts."""
        self._dropping = None
        known = self.version
        if self.bucket_folder.exists() and self.bucket_folder.name == f"{known:016x}":
            self.crash()
            assert self.version == known
            self.count("dropped buckets there again")
            return
        self._lose_calls()
        self.directory.remove_leftovers()
        named = list(self.directory.buckets())
        assert len(named) <= 1, named
        self.count("crashes without a bucket" if not named else "crashes behind the making")
        self._serve(named[0] if named else create_bucket(self.directory, DEFAULT_BUCKET))

    def save_consumers(self) -> None:
        if self._dropping is None:
            super().save_consumers()

    # The end.

    def drain(self) -> None:
        while self._dropping is not None:
            self._go_on()
        super().drain()

    def settled(self, client: SimulatedClient) -> bool:
        """Also that what it has is the new bucket's: by chance it may stand where it stood in the old one."""
        if client.seqno(client.partitions[0]) < 0:
            return False
        session = client.following.session
        versions = {session.position(p).bucket_version for p in client.partitions}
        return versions == {self.version} and super().settled(client)
