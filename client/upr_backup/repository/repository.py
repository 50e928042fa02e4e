"""A repository: its own document, the chain of manifests, merged bases, what has expired, and what a run staged.

``repository.json``                     written once
``chain/0000000012.json``               a manifest; that it exists is the commit
``data/0000000012/<random>.parquet``    data files
``staging/0000000013/<attempt>/``       plan.json and 0007.json, a group that was read; nothing counts before the commit
``merged/0000000012-<attempt>.json``    a merged base, or that the attempt at one was voided; its files are in the
                                        folder of the same name
``expired/0000000012.json``             what is before this number has expired
``index/0000000160.json``               what a listing shows of the backups up to there; a cache
``tags/release-7.json``                 which backup has the name, and whether it does not expire
``aside/0000000012-<random>.json``      a document that ``repair`` took out of the chain, byte by byte

What a killed run left is removed only after the number's manifest is committed: from then on no other run can commit
files that are not in it, however long it was paused. An attempt at a merged base is voided before its files are
removed, by the very name that would commit it.

An expiry counts only when each restore point from its number on has a base from there on, which is computed when
reading. So one that a backup overtook, whose run did not know of it, takes nothing away.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from upr_backup.errors import (
    BackupNotFoundError,
    RepositoryDamagedError,
    RepositoryError,
    is_damage,
)
from upr_backup.repository import Storage, listing_cache
from upr_backup.repository.chain import Chain, Link
from upr_backup.repository.documents import (
    NOT_WRITTEN_HERE,
    Entry,
    Expiry,
    Json,
    Manifest,
    check_link,
    number_from_json,
    seal,
    sha256,
    text_from_json,
    unseal,
)
from upr_backup.repository.encryption import EncryptedStorage, check_key, mark
from upr_backup.repository.listing_cache import manifest_name
from upr_protocol.errors import AlreadyExistsError

_OWN = "repository.json"
_ID = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"[0-9a-f]{16}")
CHAIN = "chain/"
DATA = "data/"
STAGING = "staging/"
MERGED = "merged/"
EXPIRED = "expired/"
ASIDE = "aside/"
TAGS = "tags/"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of tags."""
_MANIFEST = re.compile(r"chain/([0-9]{10})\.json")
_MERGED = re.compile(r"merged/([0-9]{10})-[0-9a-f]{16}\.json")
_EXPIRED = re.compile(r"expired/([0-9]{10})\.json")
_DOCUMENT = re.compile(r"(chain|expired)/[0-9]{10}\.json|merged/[0-9]{10}-[0-9a-f]{16}\.json")


def _refuse(words: str) -> None:
    """Be the ``on_damage`` that takes no damage."""
    raise RepositoryDamagedError(words)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run that was begun, for the number of the backup that it is to become; its name is random."""

    number: int
    name: str
    plan: Json


class Tag(NamedTuple):
    """What a name stands for.

    Args:
        sha256: of the backup's manifest: after a repair another one may have its number.
        pin: whether the backup does not expire.
    """

    number: int
    sha256: str
    pin: bool


class Repository:
    """A repository that was opened.

    Attributes:
        storage: where its objects are; of an encrypted one what encrypts them.
        key: of an encrypted one, 32 bytes; else None.
        id: random, 32 hex digits.
        bucket_version: the random id of the bucket, 16 hex digits.
        target: where the server was when the repository was made.
    """

    def __init__(self, storage: Storage, data: bytes, key: bytes | None = None) -> None:
        content = unseal(data, _OWN)
        check_key(content, key, storage.location)
        self.key = key
        self._below = storage
        self.storage: Storage = storage if key is None else EncryptedStorage(storage, key)
        try:
            self.id = text_from_json(content["id"], "id")
            self.bucket = text_from_json(content["bucket"], "bucket")
            self.bucket_version = text_from_json(content["bucket_version"], "bucket_version")
            self.target = text_from_json(content["target"], "target")
        except KeyError as error:
            raise RepositoryDamagedError(f"{_OWN} lacks the field {error}") from error
        except ValueError as error:
            raise RepositoryDamagedError(f"{_OWN}: {error}") from error
        # Parts of names at the server.
        if not _ID.fullmatch(self.id) or not _VERSION.fullmatch(self.bucket_version):
            raise RepositoryDamagedError(f"{_OWN}: id or bucket_version is not in hex digits")
        self._sha256 = sha256(data)

    @classmethod
    def create(
        cls,
        storage: Storage,
        bucket: str,
        bucket_version: int,
        target: str,
        created: int,
        key: bytes | None = None,
    ) -> Self:
        """Make a new repository for a bucket.

        Args:
            created: now, in microseconds since the epoch.
            key: 32 bytes, to encrypt it with; None leaves it readable for everybody.

        Raises:
            AlreadyExistsError: there is one.
        """
        content = {
            "id": secrets.token_hex(16),
            "bucket": bucket,
            "bucket_version": f"{bucket_version:016x}",
            "target": target,
            "created": created,
        }
        if key is not None:
            content["encryption"] = mark(content, key)
        data = seal(content)
        if not storage.put_if_absent(_OWN, data):
            raise AlreadyExistsError("there is a repository here already")
        return cls(storage, data, key)

    @staticmethod
    def is_at(storage: Storage) -> bool:
        """Return whether there is a repository, whole or not."""
        try:
            storage.size(_OWN)
        except (FileNotFoundError, NotADirectoryError):
            return bool(storage.names(CHAIN))
        return True

    @classmethod
    def open(cls, storage: Storage, key: bytes | None = None) -> Self:
        """Open a repository, an encrypted one with its key.

        Raises:
            RepositoryError: there is none, it is of another format, or the key is not the one of it.
            RepositoryDamagedError: its document is damaged, or missing below the rest.
        """
        try:
            data = storage.read(_OWN)
        except (FileNotFoundError, NotADirectoryError):
            if storage.names(CHAIN):
                raise RepositoryDamagedError(f"{_OWN} is missing") from None
            raise RepositoryError(
                f"there is no repository here: {storage.location}",
                hint="make one: upr-backup REPOSITORY init",
            ) from None
        return cls(storage, data, key)

    # The chain.

    def chain(self, on_damage: Callable[[str], Any] = _refuse, *, indexed: bool = False) -> Chain:
        """Return the backups that have not expired, each checked against the one before it, and their merged bases.

        Args:
            on_damage: called with each thing that is wrong, instead of an error; what is behind it is left out.
            indexed: whether manifests that the index knows are not read before they are asked for. Each is then
                compared with what the index told of it.

        Raises:
            RepositoryDamagedError: a document is missing, damaged, or not the one that belongs there.
        """
        damage: dict[str, None] = {}
        known: Mapping[int, Link] = {}
        if indexed:
            sizes = self._sizes()
            numbers, known = set(sizes), listing_cache.read_index(self.storage, self.id, sizes)
        else:
            numbers = self._numbers()
        if not numbers:
            self._check_new(damage.setdefault)
        # The newest one first; the one before it only where it does not count, and nothing was removed for it.
        expiries: list[Expiry | None] = [None, *self.expiries(damage.setdefault)]
        for expiry in reversed(expiries):
            chain = self._chain(expiry, numbers, damage.setdefault, known)
            if expiry is None or (chain and chain.whole) or expiry.number - 1 not in numbers:
                break
        for words in damage:
            on_damage(words)
        return chain

    def usable(self, at: object, *, indexed: bool) -> Chain:
        """Return the chain up to its first damaged document, for a backup before that.

        Args:
            at: the backup's number; anything else, as a time, is one that may be behind the damage.
            indexed: as in ``chain``.

        Raises:
            RepositoryDamagedError: there is damage, and the backup is not before it.
        """
        damage: list[str] = []
        chain = self.chain(damage.append, indexed=indexed)
        if damage and not (isinstance(at, int) and chain.first <= at <= chain.last):
            there = f"backups {chain.first} to {chain.last} can be used by ID" if chain else ""
            raise RepositoryDamagedError(damage[0], hint=there)
        return chain

    def chain_from(self, expiry: Expiry) -> Chain:
        """Return the backups that an expiry leaves, whether or not it counts, or is the newest; raises as ``chain``."""
        return self._chain(expiry, self._numbers(), _refuse)

    def _chain(
        self,
        expiry: Expiry | None,
        numbers: set[int],
        on_damage: Callable[[str], Any],
        known: Mapping[int, Link] = MappingProxyType({}),
    ) -> Chain:
        """Return the chain that an expiry leaves, as far as it is whole."""
        links: list[Link] = []
        merged: dict[int, Manifest] = {}
        bases = self._merged_names()
        before: Manifest | None = None
        first = expiry.number if expiry else 1
        try:
            for number in range(first, max(numbers, default=0) + 1):
                if number not in numbers:
                    raise _gap(number)
                if number in known and number not in bases:
                    if expiry and not links and known[number].sha256 != expiry.sha256:
                        raise _misplaced(manifest_name(number))
                    links.append(known[number])
                    before = None
                    continue
                if expiry and not links:
                    manifest, digest = self._read_manifest(number, digest=expiry.sha256)
                else:
                    parent = links[-1].sha256 if links else self._sha256
                    manifest, digest = self._read_manifest(number, parent=parent)
                    if links and before is None:
                        before = self._loaded(links[-1])
                    check_link(before, manifest)
                links.append(Link.of(manifest, digest))
                base = self._base(bases.get(number, ()), manifest, digest, on_damage)
                if base is not None:
                    merged[number] = base
                before = manifest
        except RepositoryDamagedError as error:
            on_damage(str(error))
        if expiry and not links:
            on_damage(str(_gap(first)))
        if expiry and expiry.base and expiry.base not in bases.get(first, ()):
            on_damage(
                f"{expiry.base} is missing: what is before backup {first} was to go because of it"
            )
        by_number = {link.number: link for link in links}
        return Chain(links, lambda number: self._loaded(by_number[number]), merged)

    def newest(self) -> tuple[Manifest | None, str]:
        """Return the newest backup, and what the next manifest has to name as its parent.

        It is the one to go on from: of its positions the markers are left out that a rollback must not go back to,
        because a merged base that holds nothing older is to be beneath what comes next.

        Only a few documents are read, so that a run costs the same however long the chain is.

        Raises:
            RepositoryDamagedError: the chain has a gap, or one of the documents is damaged or not the one that
                belongs there.
        """
        numbers = self._numbers()
        # After the numbers: whoever sees a backup then sees each expiry that its run saw.
        expired = self._expired_numbers()
        expiry = self._expiry(expired[-1]) if expired else None
        last = max(numbers, default=0)
        for number in range(expiry.number if expiry else 1, last):
            if number not in numbers:
                raise _gap(number)
        if numbers:
            self._check_next(last + 1)
        if expiry is None:
            if not numbers:
                self._check_new()
                return None, self._sha256
            parent = self._digest(last - 1) if last > 1 else self._sha256
            return self._read_manifest(last, parent=parent)
        if last < expiry.number:
            raise _gap(expiry.number)
        first, digest = self._read_manifest(expiry.number, digest=expiry.sha256)
        newest = first
        if last > expiry.number:
            before = digest if last == expiry.number + 1 else self._digest(last - 1)
            newest, digest = self._read_manifest(last, parent=before)
        return _horizon(newest, first if expiry.base else None), f"{digest}+{expiry.number}"

    def _numbers(self) -> set[int]:
        """Return the numbers of all manifests; what else somebody put there is none."""
        found = map(_MANIFEST.fullmatch, self.storage.names(CHAIN))
        return {int(one[1]) for one in found if one}

    def _sizes(self) -> dict[int, int]:
        """Return the bytes of all manifests, by number."""
        found = ((_MANIFEST.fullmatch(one.name), one.bytes) for one in self.storage.stored(CHAIN))
        return {int(name[1]): size for name, size in found if name}

    def _check_new(self, on_damage: Callable[[str], Any] = _refuse) -> None:
        """Check that a repository without manifests never had one: a folder that is gone is no empty one."""
        lost = self.lost_manifests(0)
        if lost and not self._numbers():
            on_damage(
                f"{lost[-1]} is missing, and every other manifest: there is data of backups "
                "(put the folder chain back from a copy)"
            )

    def _check_next(self, number: int) -> None:
        """Check that a number is to be taken for the first time: data that no run stages is of a manifest that is lost."""
        folder = f"{number:010d}/"
        if not self.storage.names(DATA + folder) or self.storage.names(STAGING + folder):
            return
        # Another run may have committed it just now.
        if number not in self._aside() | self._numbers():
            raise _gap(number)

    def _aside(self) -> set[int]:
        return {number_in(name) for name in self.storage.names(ASIDE)}

    def write_index(self, whole: Sequence[Link] = ()) -> None:
        """Have the next listing read few manifests; called once in a while after a commit, with the lock held.

        Args:
            whole: the chain, where all of it was read; else as many are added to the index as take no time, unless one is
                damaged: RepositoryDamagedError.
        """
        sizes = self._sizes()
        if whole:
            listing_cache.write_index(self.storage, self.id, whole, sizes)
            return
        known = listing_cache.read_index(self.storage, self.id, sizes)
        first = max(known, default=min(sizes, default=1) - 1) + 1
        links = list(known.values())
        before = self._loaded(links[-1]) if links else None
        for number in range(first, min(max(sizes, default=0) + 1, first + listing_cache.AT_ONCE)):
            parent = links[-1].sha256 if links else None
            manifest, digest = self._read_manifest(number, parent=parent)
            if before is not None:
                check_link(before, manifest)
            links.append(Link.of(manifest, digest))
            before = manifest
        if len(links) > len(known):
            listing_cache.write_index(self.storage, self.id, links, sizes)

    def behind(self, last: int) -> list[str]:
        """Return the documents of numbers behind one: manifests, those that are lost too, merged bases and expiries."""
        names = [name for folder in (CHAIN, MERGED, EXPIRED) for name in self.storage.names(folder)]
        found = {name for name in names if _DOCUMENT.fullmatch(name) and number_in(name) > last}
        found = {n for n in found if not (n.startswith(MERGED) and self._is_voided(n))}
        return sorted(found.union(self.lost_manifests(last)))

    def _is_voided(self, name: str) -> bool:
        # One that is stays: without it the run of that attempt could still commit it.
        with suppress(RepositoryDamagedError):
            return self.is_void(name)
        return False

    def set_aside(self, names: list[str]) -> None:
        """Take what ``behind`` gave out of the chain, so that it can be gone on with.

        The data stays until there are other backups of the numbers. Each document that can be read is kept as it is stored,
        encrypted under its old name where it is, so that it counts again where it is put back.
        """
        listing_cache.remove_index(self.storage)
        # Manifests last, the newest of them first: broken off in between, the rest is damaged where it was.
        for name in sorted(names, reverse=True):
            data = b""
            with suppress(FileNotFoundError, RepositoryDamagedError):
                data = _read(self._below, name)
            # Also of one that is lost or cannot be read: its data is known to be of no backup then.
            aside = f"{ASIDE}{number_in(name):010d}-{secrets.token_hex(8)}.json"
            self._below.put_if_absent(aside, data)
            self._below.delete(name)

    def _digest(self, number: int) -> str:
        return sha256(_read(self.storage, manifest_name(number)))

    def _read_manifest(
        self, number: int, *, parent: str | None = None, digest: str | None = None
    ) -> tuple[Manifest, str]:
        """Return a manifest and its SHA-256; with a parent or a digest, RepositoryDamagedError where it has another one."""
        name = manifest_name(number)
        try:
            data = _read(self.storage, name)
        except FileNotFoundError:
            raise _gap(number) from None
        try:
            manifest = Manifest.from_json(unseal(data, name), name)
        except RepositoryDamagedError as error:
            raise RepositoryDamagedError(error.message, hint=_REPAIR) from error
        found = sha256(data)
        if (
            (manifest.repository, manifest.number) != (self.id, number)
            or manifest.kind == "merged"
            or parent not in (None, manifest.parent_sha256)
            or digest not in (None, found)
        ):
            raise _misplaced(name)
        return manifest, found

    def _loaded(self, expected: Link) -> Manifest:
        manifest, digest = self._read_manifest(expected.number)
        if Link.of(manifest, digest) != expected:
            raise _misplaced(manifest_name(expected.number))
        return manifest

    def commit(self, manifest: Manifest, merged: str | None = None) -> bool:
        """Make a backup count, or a merged base of this name; False when its number is taken, or the attempt was voided."""
        name = manifest_name(manifest.number) if merged is None else merged
        return self.storage.put_if_absent(name, seal(manifest.to_json()))

    # Merged bases.

    def merged_name(self, number: int) -> str:
        return f"{MERGED}{number:010d}-{secrets.token_hex(8)}.json"

    def void_merged(self, name: str, number: int) -> bool:
        """Make an attempt at a merged base never count; False when it was committed."""
        if self.storage.put_if_absent(name, seal(_void(number))):
            return True
        return self.is_void(name)

    def _merged_names(self) -> Mapping[int, list[str]]:
        names: dict[int, list[str]] = {}
        for found in filter(None, map(_MERGED.fullmatch, self.storage.names(MERGED))):
            names.setdefault(int(found[1]), []).append(found[0])
        return names

    def _base(
        self,
        names: Sequence[str],
        manifest: Manifest,
        digest: str,
        on_damage: Callable[[str], Any],
    ) -> Manifest | None:
        """Return the merged base at a backup; None without."""
        bases = []
        for name in names:
            try:
                content = unseal(_read(self.storage, name), name)
                if content == _void(manifest.number):
                    continue
                base = Manifest.from_json(content, name)
                if not _is_base_of(base, manifest, digest):
                    raise RepositoryDamagedError(
                        f"{name} is not a merged base of backup {manifest.number}: it was changed or swapped"
                    )
                bases.append(base)
            except RepositoryDamagedError as error:
                on_damage(str(error))
            except FileNotFoundError:
                on_damage(f"{name} is missing")
        return bases[0] if bases else None

    def merged_bases(self, number: int) -> list[str]:
        """Return the names of the committed merged bases of a number; two only when two merges ran at a time."""
        return [name for name in self._merged_names().get(number, ()) if not self.is_void(name)]

    def is_void(self, name: str) -> bool:
        """Return whether an attempt at a merged base that has a document is void."""
        return unseal(_read(self.storage, name), name) == _void(number_in(name))

    def new_merged_name(self, name: str) -> str:
        """Return a name that no other file has, for an attempt at a merged base."""
        return f"{name.removesuffix('.json')}/{secrets.token_hex(8)}.parquet"

    # What has expired.

    def expire(self, expiry: Expiry) -> bool:
        """Let what is before a number expire; False when that is so already."""
        return self.storage.put_if_absent(_expiry_name(expiry.number), seal(expiry.to_json()))

    def expiries(self, on_damage: Callable[[str], Any] = _refuse) -> list[Expiry]:
        """Return all expiries, by number; ``on_damage`` as in ``chain``."""
        found = []
        for number in self._expired_numbers():
            try:
                found.append(self._expiry(number))
            except RepositoryDamagedError as error:
                on_damage(str(error))
        return found

    def _expired_numbers(self) -> list[int]:
        found = map(_EXPIRED.fullmatch, self.storage.names(EXPIRED))
        return sorted(int(one[1]) for one in found if one)

    def _expiry(self, number: int) -> Expiry:
        name = _expiry_name(number)
        expiry = Expiry.from_json(unseal(_read(self.storage, name), name), name)
        if expiry.number != number or expiry.repository != self.id:
            raise _misplaced(name)
        return expiry

    # Tags.

    def add_tag(self, name: str, tag: Tag) -> bool:
        """Give a backup a name; False when the name is taken."""
        document = {**tag._asdict(), "repository": self.id}
        return self.storage.put_if_absent(_tag_name(name), seal(document))

    def remove_tag(self, name: str) -> None:
        """Take a name away; nothing when there is none."""
        self.storage.delete(_tag_name(name))

    def tag(self, name: str) -> Tag:
        """Return what a name stands for; BackupNotFoundError for nothing, RepositoryDamagedError for a damaged document."""
        path = _tag_name(name)
        try:
            content = unseal(_read(self.storage, path), path)
            number = number_from_json(content["number"], "number", 9_999_999_999, 1)
            tag = Tag(number, text_from_json(content["sha256"], "sha256"), content["pin"] is True)
        except FileNotFoundError:
            raise BackupNotFoundError(
                f"there is no tag {name!r}", hint="'list' shows all"
            ) from None
        except NOT_WRITTEN_HERE as error:
            raise RepositoryDamagedError(f"{path} is no tag: {error}", hint=_UNTAG) from error
        except RepositoryDamagedError as error:
            raise RepositoryDamagedError(error.message, hint=_UNTAG) from error
        if content.get("repository") != self.id:
            raise RepositoryDamagedError(f"{path} is of another repository", hint=_UNTAG)
        return tag

    def tags(self, chain: Chain, on_damage: Callable[[str], Any] = _refuse) -> dict[str, Tag]:
        """Return the tags of the backups of a chain, by name; ``on_damage`` as in ``chain``.

        One that cannot be read may be of a backup that does not expire.
        """
        found = {}
        for path in self.storage.names(TAGS):
            name = path.removeprefix(TAGS).removesuffix(".json")
            if not TAG.fullmatch(name) or path != _tag_name(name):
                continue
            try:
                tag = self.tag(name)
                if chain.link(tag.number).sha256 == tag.sha256:
                    found[name] = tag
            except RepositoryDamagedError as error:
                on_damage(str(error))
            except BackupNotFoundError:
                # Of a backup that has expired or was set aside.
                continue
        return found

    # Data files.

    def new_data_name(self, number: int) -> str:
        """Return a name that no other data file has."""
        return f"{DATA}{number:010d}/{secrets.token_hex(8)}.parquet"

    def lost_manifests(self, last: int) -> list[str]:
        """Return the manifests behind a number whose data is there, and that no run is under way for."""
        numbers = {
            number_in(name)
            for folder in (DATA, listing_cache.INDEX)
            for name in self.storage.names(folder)
        }
        staged = {number_in(name) for name in self.storage.names(STAGING)}
        lost = (numbers | set(self._merged_names())) - staged - self._aside()
        return [manifest_name(n) for n in sorted(lost) if n > last]

    # Staging.

    def stage(self, number: int, plan: Json) -> Attempt:
        attempt = Attempt(number, secrets.token_hex(8), plan)
        self.storage.put_if_absent(f"{_folder(number, attempt.name)}plan.json", seal(plan))
        return attempt

    def attempts(self, number: int) -> list[Attempt]:
        """Return the attempts for a number that can be read."""
        found = []
        for name in self.storage.names(f"{STAGING}{number:010d}/"):
            *_, attempt, last = name.split("/")
            plan = staged(self.storage, name) if last == "plan.json" else None
            if plan is not None:
                found.append(Attempt(number, attempt, plan))
        return found

    def staged_group(self, number: int, attempt: str, group: int) -> Json | None:
        """Return what was recorded of a group; None when it was not."""
        return staged(self.storage, _folder(number, attempt) + group_name(group))

    def stage_group(self, number: int, attempt: str, group: int, record: Json) -> None:
        """Record a group whose file is durable."""
        self.storage.put_if_absent(_folder(number, attempt) + group_name(group), seal(record))

    def clean(self, committed: int) -> None:
        """Remove what was staged for numbers up to ``committed`` and is not in their manifests.

        One that cannot be read is a RepositoryDamagedError, before anything of its number is removed.
        """
        numbers = {number_in(name) for name in self.storage.names(STAGING)}
        numbers &= self._numbers()
        for number in sorted(number for number in numbers if 0 < number <= committed):
            kept = {file.path for file in self._read_manifest(number)[0].files}
            doomed = [
                name for name in self.storage.names(f"{DATA}{number:010d}/") if name not in kept
            ]
            # The data first: data without a plan is never looked at again.
            doomed += self.storage.names(f"{STAGING}{number:010d}/")
            for name in doomed:
                self.storage.delete(name)


def _read(storage: Storage, name: str) -> bytes:
    """Return a whole object; RepositoryDamagedError where its place on the disk cannot be read."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        raise
    except OSError as error:
        if not is_damage(error):
            raise
        raise RepositoryDamagedError(f"{name} cannot be read: {error.strerror or error}") from error


def staged(storage: Storage, name: str) -> Json | None:
    """Return a document; None for one that is not right: its group is then done once more, and a restore without its plan
    is not gone on with.
    """
    try:
        return unseal(storage.read(name), name)
    except (FileNotFoundError, RepositoryDamagedError):
        return None


def group_name(index: int) -> str:
    """Return the name of a group's document, in the folder of its attempt."""
    return f"{index:04d}.json"


def _tag_name(name: str) -> str:
    return f"{TAGS}{name}.json"


def _folder(number: int, attempt: str) -> str:
    return f"{STAGING}{number:010d}/{attempt}/"


def _expiry_name(number: int) -> str:
    return f"{EXPIRED}{number:010d}.json"


def number_in(name: str) -> int:
    """Return the backup's number in the name of an object; 0 for a foreign one."""
    number = name.split("/")[1].partition("-")[0].partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else 0


def _void(number: int) -> Json:
    return {"number": number, "void": True}


def _is_base_of(base: Manifest, manifest: Manifest, digest: str) -> bool:
    return (
        (base.kind, base.number, base.repository, base.parent)
        == ("merged", manifest.number, manifest.repository, digest)
        and base.entries.keys() == manifest.entries.keys()
        and all(base.entries[p].end == entry.end for p, entry in manifest.entries.items())
    )


def _horizon(newest: Manifest, base: Manifest | None) -> Manifest:
    """Return the newest backup without the markers at which a rollback would need what is not in a merged base."""
    if base is None:
        return newest
    entries = {}
    for partition, entry in newest.entries.items():
        end = base.entries[partition].end if partition in base.entries else 0
        entries[partition] = _without_markers(entry, end)
    return replace(newest, entries=entries)


def _without_markers(entry: Entry, end: int) -> Entry:
    if entry.position is None:
        return entry
    markers = [marker for marker in entry.position["markers"] if not 0 < marker < end]
    return entry._replace(position={**entry.position, "markers": markers})


_REPAIR: Final = "put it back from a copy; else 'repair' has the chain end before it; older ones are restored with --at ID"


_UNTAG: Final = "put it back from a copy; else 'tag NAME --remove' takes the name away"


def _misplaced(name: str) -> RepositoryDamagedError:
    return RepositoryDamagedError(
        f"{name} does not belong behind the one before it: one of the two was changed or swapped",
        hint=_REPAIR,
    )


def _gap(number: int) -> RepositoryDamagedError:
    return RepositoryDamagedError(
        f"{manifest_name(number)} is missing: the chain has a gap",
        hint=_REPAIR,
    )
