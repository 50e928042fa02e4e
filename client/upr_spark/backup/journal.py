"""What a restore has done, so that one that was killed is gone on with.

``journal/<id>/<attempt>/plan.json``    what is written where, and in which groups of partitions
``journal/<id>/<attempt>/0007.json``    a group that was written, durably
``journal/<id>/<attempt>/ended.json``   it is not gone on with: it is done, or what it wrote was found wrong

The id is made of what is written and of the version of the bucket, which a bucket that is created anew does not share.
An attempt that ended is removed as far as that is allowed, and counts for nothing either way.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from upr_protocol.errors import UprError
from upr_spark.backup.documents import Json, canonical, seal, sha256, unseal
from upr_spark.backup.errors import RepositoryDamagedError
from upr_spark.backup.storage import Storage

_FOLDER = "journal/"


class Journal:
    """The journal of one attempt.

    Attributes:
        groups: the partitions of each group.
        resumed: whether it is the one of an earlier run.
    """

    def __init__(
        self, storage: Storage, folder: str, groups: Sequence[Sequence[int]], resumed: bool
    ) -> None:
        self._storage = storage
        self._folder = folder
        self.groups = groups
        self.resumed = resumed
        self._writable = True

    @classmethod
    def find(cls, storage: Storage, what: Json) -> Self | None:
        """Return the journal of an attempt at the same that did not end; None when there is none.

        Args:
            storage: the repository's.
            what: all that makes a restore the same one.
        """
        folder = _folder(what)
        names = set(storage.names(folder))
        for name in sorted(names):
            attempt = name.removesuffix("plan.json")
            if attempt == name or f"{attempt}ended.json" in names:
                continue
            plan = _read(storage, name)
            if plan is not None and plan["what"] == what:
                return cls(storage, attempt, plan["groups"], True)
        return None

    @classmethod
    def begin(
        cls,
        storage: Storage,
        what: Json,
        groups: Sequence[Sequence[int]],
        say: Callable[[str], Any],
    ) -> Self:
        """Begin one; where the repository cannot be written that is said, and nothing is recorded.

        Args:
            storage: the repository's.
            what: as in ``find``.
            groups: the partitions of each group.
            say: called with a warning.
        """
        journal = cls(storage, f"{_folder(what)}{secrets.token_hex(8)}/", groups, False)
        journal._put("plan.json", {"what": what, "groups": [list(group) for group in groups]}, say)
        return journal

    def record(self, index: int, document: Json, say: Callable[[str], Any]) -> None:
        """Record a group that was written."""
        self._put(_group(index), document, say)

    def recorded(self) -> dict[int, Json]:
        """Return what was recorded, by the groups' numbers."""
        found = {}
        for index in range(len(self.groups)):
            document = _read(self._storage, self._folder + _group(index))
            if document is not None:
                found[index] = document
        return found

    def end(self) -> None:
        """Let no later run go on with it."""
        with suppress(OSError, UprError):
            self._storage.put_if_absent(f"{self._folder}ended.json", seal({}))
            names = self._storage.names(self._folder)
            # That it ended stays known until the plan is gone.
            for name in sorted(names, key=lambda name: (name.endswith("ended.json"), name)):
                self._storage.delete(name)

    def _put(self, name: str, document: Json, say: Callable[[str], Any]) -> None:
        if not self._writable:
            return
        try:
            self._storage.put_if_absent(self._folder + name, seal(document))
        except (OSError, UprError) as error:
            self._writable = False
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            say(
                f"warning: the repository takes no journal ({words}): a restore that is interrupted begins anew"
            )


def _folder(what: Json) -> str:
    return f"{_FOLDER}{sha256(canonical(what))[:32]}/"


def _group(index: int) -> str:
    return f"{index:04d}.json"


def _read(storage: Storage, name: str) -> Json | None:
    try:
        return unseal(storage.read(name), name)
    except (FileNotFoundError, RepositoryDamagedError):
        # Without it a group is written once more.
        return None
