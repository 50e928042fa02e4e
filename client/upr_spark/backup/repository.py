"""A repository: its own document, the chain of manifests, and what a run staged.

``repository.json``                     written once
``chain/0000000012.json``               a manifest; that it exists is the commit
``data/0000000012/<random>.parquet``    data files
``staging/0000000013/<attempt>/``       plan.json and 0007.json, a group that was read; nothing counts before the commit

What a killed run left is removed only after the number's manifest is committed: from then on no other run can commit
files that are not in it, however long it was paused.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from upr_spark.backup.chain import Manifest, check_link
from upr_spark.backup.documents import Json, seal, sha256, unseal
from upr_spark.backup.errors import RepositoryDamagedError, RepositoryError
from upr_spark.backup.storage import Storage

_OWN = "repository.json"
_CHAIN = "chain/"
_DATA = "data/"
_STAGING = "staging/"
_MANIFEST = re.compile(r"chain/[0-9]{10}\.json")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that was begun for a number.

    Args:
        number: of the backup it is to become.
        name: random.
        plan: what it set out to do.
    """

    number: int
    name: str
    plan: Json


class Repository:
    """A repository that was opened.

    Attributes:
        storage: where its objects are.
        id: random, 32 hex digits.
        bucket: the bucket's name.
        bucket_version: its random id, 16 hex digits.
        target: where the server was when the repository was made.
    """

    def __init__(self, storage: Storage, data: bytes) -> None:
        content = unseal(data, _OWN)
        self.storage = storage
        try:
            self.id = str(content["id"])
            self.bucket = str(content["bucket"])
            self.bucket_version = str(content["bucket_version"])
            self.target = str(content["target"])
        except KeyError as error:
            raise RepositoryDamagedError(f"{_OWN} lacks the field {error}") from error
        self._sha256 = sha256(data)

    @classmethod
    def create(
        cls, storage: Storage, bucket: str, bucket_version: int, target: str, created: int
    ) -> Self:
        """Make a new repository for a bucket.

        Raises:
            RepositoryError: there is one.
        """
        content = {
            "id": secrets.token_hex(16),
            "bucket": bucket,
            "bucket_version": f"{bucket_version:016x}",
            "target": target,
            "created": created,
        }
        data = seal(content)
        if not storage.put_if_absent(_OWN, data):
            raise RepositoryError("there is a repository here already")
        return cls(storage, data)

    @classmethod
    def open(cls, storage: Storage) -> Self:
        """Open a repository.

        Raises:
            RepositoryError: there is none, or it is of another format.
            RepositoryDamagedError: its document is damaged, or missing below the rest.
        """
        try:
            data = storage.read(_OWN)
        except (FileNotFoundError, NotADirectoryError):
            if storage.names(_CHAIN):
                raise RepositoryDamagedError(f"{_OWN} is missing") from None
            raise RepositoryError(
                "there is no repository here", hint="make one: upr-backup REPOSITORY init"
            ) from None
        return cls(storage, data)

    # The chain.

    def chain(self, on_damage: Callable[[str], Any] | None = None) -> list[Manifest]:
        """Return all committed backups, each checked against the one before it.

        Args:
            on_damage: called with each thing that is wrong, instead of an error; what is behind it is left out.

        Raises:
            RepositoryDamagedError: a manifest is missing, damaged, or not the one that belongs there.
        """
        chain: list[Manifest] = []
        parent = self._sha256
        try:
            for name in self._manifests():
                if name != _manifest_name(len(chain) + 1):
                    raise _gap(len(chain) + 1)
                manifest, digest = self._manifest(name, parent)
                check_link(chain[-1] if chain else None, manifest)
                chain.append(manifest)
                parent = digest
        except RepositoryDamagedError as error:
            if on_damage is None:
                raise
            on_damage(str(error))
        return chain

    def newest(self) -> tuple[Manifest | None, str]:
        """Return the newest backup, and what the next manifest has to name as its parent.

        Only the newest two manifests are read, so that a run costs the same however long the chain is.

        Raises:
            RepositoryDamagedError: the chain has a gap, or one of the two is damaged or not the one that belongs there.
        """
        names = self._manifests()
        for number, name in enumerate(names, 1):
            if name != _manifest_name(number):
                raise _gap(number)
        if not names:
            return None, self._sha256
        before = sha256(self.storage.read(names[-2])) if len(names) > 1 else self._sha256
        return self._manifest(names[-1], before)

    def _manifests(self) -> list[str]:
        """Return the names of all manifests; what else somebody put there is none."""
        return [name for name in self.storage.names(_CHAIN) if _MANIFEST.fullmatch(name)]

    def _manifest(self, name: str, parent: str) -> tuple[Manifest, str]:
        data = self.storage.read(name)
        manifest = Manifest.from_json(unseal(data, name), name)
        if manifest.repository != self.id or manifest.parent != parent:
            raise RepositoryDamagedError(
                f"{name} does not belong behind the one before it: one of the two was changed or swapped"
            )
        return manifest, sha256(data)

    def commit(self, manifest: Manifest) -> bool:
        """Make a backup count; False when its number is taken."""
        return self.storage.put_if_absent(_manifest_name(manifest.number), seal(manifest.to_json()))

    def new_data_name(self, number: int) -> str:
        """Return a name that no other data file has."""
        return f"{_DATA}{number:010d}/{secrets.token_hex(8)}.parquet"

    def lost_manifests(self, chain: list[Manifest]) -> list[str]:
        """Return the manifests behind the end of the chain whose data is there, and that no run is under way for."""
        numbers = {_number(name) for name in self.storage.names(_DATA)}
        staged = {_number(name) for name in self.storage.names(_STAGING)}
        return [_manifest_name(n) for n in sorted(numbers - staged) if n > len(chain)]

    # Staging.

    def stage(self, number: int, plan: Json) -> Attempt:
        """Begin an attempt."""
        attempt = Attempt(number, secrets.token_hex(8), plan)
        self.storage.put_if_absent(f"{_folder(attempt)}plan.json", seal(plan))
        return attempt

    def attempts(self, number: int) -> list[Attempt]:
        """Return the attempts for a number that can be read."""
        found = []
        for name in self.storage.names(f"{_STAGING}{number:010d}/"):
            folder, _, last = name.rpartition("/")
            if last == "plan.json":
                plan = self._staged(name)
                if plan is not None:
                    found.append(Attempt(number, folder.rpartition("/")[2], plan))
        return found

    def staged_group(self, attempt: Attempt, group: int) -> Json | None:
        """Return what was recorded of a group; None when it was not."""
        return self._staged(f"{_folder(attempt)}{group:04d}.json")

    def stage_group(self, attempt: Attempt, group: int, record: Json) -> None:
        """Record a group whose file is durable."""
        self.storage.put_if_absent(f"{_folder(attempt)}{group:04d}.json", seal(record))

    def _staged(self, name: str) -> Json | None:
        try:
            return unseal(self.storage.read(name), name)
        except (FileNotFoundError, RepositoryDamagedError):
            # Nothing depends on it: it is read from the server again.
            return None

    def clean(self, committed: int) -> int:
        """Remove what was staged for numbers up to ``committed`` and is not in their manifests; returns how many.

        Raises:
            RepositoryDamagedError: a manifest cannot be read; nothing of its number was removed.
        """
        removed = 0
        numbers = {_number(name) for name in self.storage.names(_STAGING)}
        for number in sorted(number for number in numbers if 0 < number <= committed):
            name = _manifest_name(number)
            kept = {
                file.path
                for file in Manifest.from_json(unseal(self.storage.read(name), name), name).files
            }
            doomed = [
                name for name in self.storage.names(f"{_DATA}{number:010d}/") if name not in kept
            ]
            # The data first: data without a plan is never looked at again.
            doomed += self.storage.names(f"{_STAGING}{number:010d}/")
            for name in doomed:
                self.storage.delete(name)
            removed += len(doomed)
        return removed


def _manifest_name(number: int) -> str:
    return f"{_CHAIN}{number:010d}.json"


def _folder(attempt: Attempt) -> str:
    return f"{_STAGING}{attempt.number:010d}/{attempt.name}/"


def _number(name: str) -> int:
    """Return the backup's number in the name of a data file or a staged document; 0 for a foreign file."""
    number = name.split("/")[1]
    return int(number) if number.isascii() and number.isdigit() else 0


def _gap(number: int) -> RepositoryDamagedError:
    return RepositoryDamagedError(
        f"{_manifest_name(number)} is missing: the chain has a gap",
        hint="put it back from a copy; restore --at an older backup still works",
    )
