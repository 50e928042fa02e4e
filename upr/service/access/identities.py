"""Identities: names with roles, and the file of tokens and certificates that has them.

The file has one JSON object a line; empty lines and lines that begin with ``#`` are passed over, but a file without anything
else than blanks is refused:

    {"name": "indexer", "token_sha256": "<64 hex digits>", "read": ["orders"], "write": true}

``read``, ``write`` and ``admin`` are each ``true`` for all buckets, those of tomorrow too, or a list of names. ``replicate``
is ``true`` only: a replica drops buckets that its upstream does not show. No role contains another. ``certificate`` is a
common name or an alternative name of client certificates that are this identity; an identity may have a token, a
certificate or both.

``key_prefixes`` is a list of texts: ``read`` and ``write`` are for keys that begin with one of them. Such a caller sees
seqnos and markers, which are of whole partitions, and nothing else of other keys.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from upr.storage.journal import replace_durably
from upr_protocol.errors import AlreadyExistsError, InvalidArgumentError, UprError
from upr_protocol.limits import PREFIXES_MAX, check_name

ROLES: Final = ("read", "write", "replicate", "admin")
FILE_BYTES_MAX: Final = 4 * 2**20
"""Largest file of identities."""
_TOKEN_PREFIX: Final = "upr_"
_FIELDS: Final = {"name", "token_sha256", "certificate", "key_prefixes", *ROLES}
_NOBODY: Final = "# nobody may call\n"
"""Content of a file whose last identity is revoked: an empty one is taken for an accident."""
_WHOLE: Final = ("replicate", "admin")
"""Roles that cannot be for some keys."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, and what it may do.

    Attributes:
        roles: by role, the buckets that it is for; None for all.
        digest: SHA-256 of its token, in hex; empty for none.
        certificate: a name in its certificates; empty for none.
        prefixes: beginnings of the keys that its roles are for; empty for all keys.
    """

    name: str
    roles: Mapping[str, frozenset[str] | None]
    digest: str = ""
    certificate: str = ""
    prefixes: tuple[bytes, ...] = ()

    def may(self, roles: Iterable[str], bucket: str) -> bool:
        """Return whether it has one of the roles for a whole bucket, whether or not there is such a bucket."""
        return not self.prefixes and self.may_partly(roles, bucket)

    def may_partly(self, roles: Iterable[str], bucket: str) -> bool:
        """Return whether it has one of the roles for a bucket, or for some keys of it."""
        for role in roles:
            if role in self.roles and ((buckets := self.roles[role]) is None or bucket in buckets):
                return True
        return False

    def may_somewhere(self, roles: Collection[str]) -> bool:
        """Return whether it has one of the roles for any bucket, or for some keys of one."""
        return not self.roles.keys().isdisjoint(roles)

    def may_everywhere(self, roles: Iterable[str]) -> bool:
        """Return whether it has one of the roles for all buckets."""
        return not self.prefixes and any(
            role in self.roles and self.roles[role] is None for role in roles
        )


def everything(name: str) -> Identity:
    return Identity(name, dict.fromkeys(ROLES))


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, in hex.

    A token has 256 random bits. Guessing what has this hash is guessing the token, so a slow hash or a salt, which protect
    words that people choose, would only cost each call time.
    """
    return hashlib.sha256(token.encode()).hexdigest()


class Identities:
    """The identities of a file, found by token or certificate.

    Raises:
        UprError: a line is malformed, or two identities share a name, a token or a certificate.
    """

    def __init__(self, text: str = "") -> None:
        self.all = [one for _, one in _lines(text) if one is not None]
        self._by_digest = {one.digest: one for one in self.all if one.digest}
        self._by_certificate = {one.certificate: one for one in self.all if one.certificate}
        self._by_name = {one.name: one for one in self.all}
        if len(self._by_name) < len(self.all):
            raise _malformed("a name occurs twice; must be unique")
        if len(self._by_digest) + len(self._by_certificate) < sum(
            bool(one.digest) + bool(one.certificate) for one in self.all
        ):
            raise _malformed("a token or a certificate occurs twice; must be of one identity")

    def named(self, name: str) -> Identity | None:
        return self._by_name.get(name)

    def of_token(self, token: str) -> Identity | None:
        """Return the identity of a token.

        How long this takes depends on the hash, and tells nothing about a token: nobody can choose tokens by their hash.
        """
        return self._by_digest.get(digest_of(token))

    def of_certificate(self, names: Iterable[str]) -> Identity | None:
        """Return the identity of the first of a certificate's names that has one."""
        return next((one for n in names if (one := self._by_certificate.get(n)) is not None), None)


_FILE: Final = "file of identities"


def _malformed(words: str) -> UprError:
    return UprError(
        f"{_FILE}: {words}",
        reason="IDENTITIES",
        hint="'upr-admin token add' and 'revoke' write it",
    )


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Have errors of the file say where they are."""
    try:
        yield
    except UprError as error:
        if error.message.startswith(_FILE):
            error.message = f"{_FILE}{place}{error.message.removeprefix(_FILE)}"
        raise


def _lines(text: str) -> Iterator[tuple[str, Identity | None]]:
    """Yield each line, with its end, and its identity, None where it has none."""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        with _placed(f", line {number}"):
            one = _parsed(line)
        yield line, one


def _parsed(line: str) -> Identity | None:
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or not found.keys() <= _FIELDS:
            # Nothing of the line: it may hold a token in the wrong place.
            raise _malformed(f"other fields; must be some of {', '.join(sorted(_FIELDS))}")
        return _identity(found)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, UprError):
            raise
        raise _malformed("no JSON object") from None


def _identity(found: Mapping[str, Any]) -> Identity:
    name = found.get("name")
    if not isinstance(name, str):
        raise _malformed("no name")
    try:
        check_name(name, "identity")
    except InvalidArgumentError as error:
        raise _malformed(error.message) from None
    roles: dict[str, frozenset[str] | None] = {}
    for role in ROLES:
        buckets = found.get(role, False)
        if buckets is True:
            roles[role] = None
        elif role == "replicate" and buckets is not False:
            raise _malformed(
                f"replicate of {name!r} is for some buckets; must be true, or not there"
            )
        elif isinstance(buckets, list) and all(isinstance(one, str) for one in buckets):
            if buckets:
                roles[role] = frozenset(buckets)
        elif buckets is not False:
            raise _malformed(f"{role} of {name!r} must be true or a list of buckets")
    prefixes = found.get("key_prefixes", [])
    if not isinstance(prefixes, list) or not all(isinstance(x, str) and x for x in prefixes):
        raise _malformed(f"key_prefixes of {name!r} must be a list of texts that are not empty")
    if not prefixes and "key_prefixes" in found:
        # Who takes out the last one does not mean all keys.
        raise _malformed(f"key_prefixes of {name!r} are none; must be some, or not there")
    try:
        beginnings = tuple(x.encode() for x in prefixes)
    except UnicodeEncodeError:
        raise _malformed(f"key_prefixes of {name!r} must be UTF-8") from None
    if len(prefixes) > PREFIXES_MAX:
        raise _malformed(
            f"key_prefixes of {name!r} are {len(prefixes)}; must be at most {PREFIXES_MAX}"
        )
    if prefixes and not roles.keys().isdisjoint(_WHOLE):
        raise _malformed(
            f"{name!r} has key_prefixes and the role {' or '.join(_WHOLE)}; must be read and write only"
        )
    digest, certificate = found.get("token_sha256", ""), found.get("certificate", "")
    if not isinstance(certificate, str):
        raise _malformed(f"certificate of {name!r} must be a text")
    is_hash = isinstance(digest, str) and len(digest) == 64
    if digest != "" and not (is_hash and set(digest) <= set("0123456789abcdef")):
        raise _malformed(f"token_sha256 of {name!r} must be 64 hex digits")
    if not digest and not certificate:
        raise _malformed(f"{name!r} has neither a token nor a certificate")
    return Identity(name, roles, digest, certificate, beginnings)


def read_identities(path: Path) -> Identities:
    """Return the identities of a file.

    Raises:
        UprError: it is malformed, blank, or above FILE_BYTES_MAX.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    with _placed(f" {path}"):
        if len(content) > FILE_BYTES_MAX:
            raise _malformed(f"more than {FILE_BYTES_MAX} bytes; must be at most that")
        if not content.strip():
            # A full disk, or a writer that was killed, leaves this too, and nobody could call any more.
            raise _malformed(
                "it has no identity; must have one, or a comment where nobody is to call"
            )
        try:
            return Identities(content.decode())
        except UnicodeDecodeError:
            raise _malformed("not UTF-8") from None


# Writing, for the commands.


def add_identity(
    path: Path,
    name: str,
    roles: Mapping[str, Collection[str] | None],
    certificate: str = "",
    prefixes: Sequence[str] = (),
) -> str:
    """Add an identity to a file, which is made when it is not there; return its new token.

    Args:
        roles, prefixes: as those of ``Identity``.
        certificate: with one, the identity has no token, and "" is returned.

    Raises:
        AlreadyExistsError: there is one of that name.
        UprError: the file is malformed, or a value is out of its range.
    """
    token = "" if certificate else _TOKEN_PREFIX + secrets.token_urlsafe(32)
    line: dict[str, Any] = {"name": name}
    line |= {"certificate": certificate} if certificate else {"token_sha256": digest_of(token)}
    line |= {role: True if among is None else sorted(among) for role, among in roles.items()}
    line |= {"key_prefixes": list(prefixes)} if prefixes else {}

    def added(text: str) -> str:
        if any(one is not None and one.name == name for _, one in _lines(text)):
            raise AlreadyExistsError(f"there is an identity {name!r} already")
        return text + ("" if not text or text.endswith("\n") else "\n") + json.dumps(line) + "\n"

    _change(path, added)
    return token


def revoke_identity(path: Path, name: str) -> bool:
    """Remove an identity from a file; return whether there was one.

    Raises:
        UprError, OSError: the file is malformed, or cannot be read or replaced.
    """
    path.stat()

    def left(text: str) -> str:
        rest = "".join(x for x, one in _lines(text) if one is None or one.name != name)
        return rest if rest.strip() or rest == text else _NOBODY

    return _change(path, left)


def _change(path: Path, change: Callable[[str], str]) -> bool:
    """Change a file in one step, and return whether that made a difference.

    A server never reads a part, and commands that run at the same time wait for each other. A link stays one.
    """
    path = path.resolve()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.read_text() if path.exists() else ""
        with _placed(f" {path}"):
            after = change(before)
        if after != before:
            Identities(after)
            replace_durably(path, after, private=True)
        return after != before
    finally:
        os.close(folder)
