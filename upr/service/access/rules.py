"""Rules: which role each method takes, and the permit of each call.

The gate asks for a permit before it reads anything of a call, and has the permit check the bucket of the request as soon as it
is parsed. A call with many requests has it checked with its first one, the Open.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from itertools import filterfalse
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

from upr.service.access.files import Watched
from upr.service.access.identities import (
    ROLES,
    Identities,
    Identity,
    everything,
    read_identities,
)
from upr_protocol.errors import (
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UprError,
    shown,
)
from upr_protocol.limits import BACKUP_CUTS_NAME
from upr_protocol.wire.v1 import change_stream_service_pb2 as stream

log = logging.getLogger(__name__)

OWNER: Final = everything("the owner of the data directory")
ANYONE: Final = everything("anyone")
VIEWERS: Final = ("read", "admin")
"""Roles that see a bucket on the HTTP port; any of them is enough."""
_BEARER: Final = "bearer"
_PREFIXES_SHOWN: Final = 3
_ROLES_HINT: Final = "'upr-admin token list' shows the roles of each identity"
_HEALTH_BUCKET: Final = "bucket/"


class Scope(Enum):
    """What of the server a method is about."""

    BUCKET = "one bucket"
    SOME = "what the caller's buckets show of the server"
    SERVER = "all buckets"


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one method.

    Attributes:
        roles: any of them is enough.
        scope: for which buckets it is needed.
        bucket: the field of the request that names the bucket.
        needs: returns the roles that a request asks for, where they depend on it.
        destroys: returns whether a request takes away what nothing brings back, or lets its caller do so later.
        is_open: whether it needs no credentials, unless it names a bucket.
        keys: returns the keys, or beginnings of keys, that a request asks for; None where it asks for more than keys. Without
            this the method is about whole buckets, and not for roles with key prefixes.
    """

    roles: frozenset[str]
    scope: Scope = Scope.BUCKET
    bucket: str = "bucket"
    needs: Callable[[Any], frozenset[str]] | None = None
    destroys: Callable[[Any], bool] | None = None
    is_open: bool = False
    keys: Callable[[Any], Iterable[bytes] | None] | None = None


def _of(roles: str, **rest: Any) -> Rule:
    return Rule(frozenset(roles.split()), **rest)


def _always(request: Any) -> bool:
    return True


def _follower_roles(opening: Any) -> frozenset[str]:
    # A replica gets the small tables and the producers' numbers too.
    kinds = (stream.FOLLOW_KIND_REPLICA, stream.FOLLOW_KIND_ANONYMOUS_REPLICA)
    return frozenset(("replicate" if opening.kind in kinds else "read",))


def _follower_keys(opening: Any) -> Iterable[bytes] | None:
    # A name is of the bucket: whoever has it holds up purging there, and moves where it resumes.
    return None if opening.consumer or opening.member else (opening.key_prefix,)


def _is_of_backup(request: Any) -> bool:
    # As a follower with a name, it holds up purging for what it has not got.
    by_time = request.create and request.WhichOneof("to") == "to_time"
    return bool(by_time and request.name.startswith(BACKUP_CUTS_NAME))


def _reset_roles(request: Any) -> frozenset[str]:
    return frozenset(("read", "admin") if _is_of_backup(request) else ("admin",))


def _no_keys(request: Any) -> Iterable[bytes]:
    # Seqnos and failover logs; a Write call has each of its writes checked.
    return ()


_ADMIN: Final = "/upr.v1.AdminService/"
_STREAM: Final = "/upr.v1.ChangeStreamService/"
_KEYS: Final = "/upr.v1.KeyValueService/"
_SETS: Final = "/upr.v1.ReplicaService/"
_HEALTH: Final = _of("read admin", bucket="service", is_open=True)
RULES: Final[Mapping[str, Rule]] = {
    f"{_ADMIN}GetPartitions": _of("read write admin", keys=_no_keys),
    f"{_ADMIN}GetStatus": _of("read replicate admin", scope=Scope.SOME),
    f"{_ADMIN}GetStorage": _of("read admin"),
    f"{_ADMIN}Purge": _of("admin"),
    f"{_ADMIN}ListConsumers": _of("read admin"),
    f"{_ADMIN}ForgetConsumer": _of("admin", destroys=_always),
    f"{_ADMIN}ResetConsumer": _of(
        "read admin", needs=_reset_roles, destroys=lambda request: not _is_of_backup(request)
    ),
    f"{_ADMIN}ListBuckets": _of("read replicate admin", scope=Scope.SOME),
    f"{_ADMIN}CreateBucket": _of("admin", bucket="name"),
    f"{_ADMIN}DropBucket": _of("admin", bucket="name", destroys=_always),
    f"{_ADMIN}SetBucketQuota": _of("admin"),
    f"{_STREAM}Hello": _of("read", keys=_no_keys),
    f"{_STREAM}GetFailoverLog": _of("read admin", keys=_no_keys),
    f"{_STREAM}Follow": _of("read replicate", needs=_follower_roles, keys=_follower_keys),
    f"{_STREAM}CreateCut": _of("read"),
    f"{_STREAM}RenewCut": _of("read"),
    f"{_STREAM}ReleaseCut": _of("read"),
    f"{_STREAM}ListCuts": _of("read admin"),
    f"{_STREAM}LoadPositions": _of("read"),
    f"{_STREAM}SavePositions": _of("read"),
    f"{_KEYS}Write": _of("write", keys=_no_keys),
    f"{_KEYS}Get": _of("read", keys=lambda request: request.keys),
    f"{_SETS}GetTopology": _of("read replicate admin", scope=Scope.SOME),
    f"{_SETS}Promote": _of("admin", scope=Scope.SERVER, destroys=lambda request: request.force),
    f"{_SETS}ForgetServer": _of("admin", scope=Scope.SERVER, destroys=_always),
    f"{_SETS}Drain": _of("admin", scope=Scope.SERVER),
    f"{_SETS}Meet": _of("replicate", scope=Scope.SERVER, destroys=_always),
    f"{_SETS}Promise": _of("replicate", scope=Scope.SERVER, destroys=_always),
    f"{_SETS}Grant": _of("replicate", scope=Scope.SERVER, destroys=_always),
    "/grpc.health.v1.Health/Check": _HEALTH,
    "/grpc.health.v1.Health/Watch": _HEALTH,
    # Its answer has the names of all buckets.
    "/grpc.health.v1.Health/List": _of("read admin", scope=Scope.SERVER),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _of(
        " ".join(ROLES), scope=Scope.SOME
    ),
}


@dataclass(slots=True, eq=False)
class Permit:
    """Permit of one call; ``_end`` ends the call when its identity, as it is in the file now, may not have it.

    Attributes:
        peer: the call's, as gRPC has it.
    """

    _method: str
    peer: str
    _rule: Rule
    identity: Identity
    _may_destroy: bool
    _end: Callable[[], object]
    ended: bool = False
    _checked: tuple[str, Collection[str]] | None = None

    def producer(self, name: str) -> bytes:
        """Return the name under which a caller's producer is kept.

        Who may write some keys has producers of its own: numbers that it used up in another's name would have that one's next
        writes taken for repetitions.
        """
        if not self.identity.prefixes:
            return name.encode()
        # Names have no null byte.
        both = f"{self.identity.name}\0{name}".encode()
        return hashlib.blake2b(both, digest_size=16).hexdigest().encode()

    def check(self, request: Any) -> None:
        """Check a request, or the Open of a call with many, which is parsed and nothing more.

        Raises:
            PermissionDeniedError, UnauthenticatedError: the caller may not ask for this.
        """
        rule = self._rule
        if rule.destroys is not None and not self._may_destroy and rule.destroys(request):
            raise self._refused(
                "destroys something, and this server has no identities",
                "give --data DIR instead of --target, on the server's machine as the owner of its data"
                " directory, or in the SDK Client('unix:DIR/admin.sock'); or start the server with --open-admin",
            )
        if rule.is_open:
            name = getattr(request, rule.bucket)
            if name.startswith(_HEALTH_BUCKET):
                self._check_bucket(name.removeprefix(_HEALTH_BUCKET), rule.roles, request)
        elif rule.scope is Scope.BUCKET:
            roles = rule.roles if rule.needs is None else rule.needs(request)
            self._check_bucket(getattr(request, rule.bucket), roles, request)

    def _check_keys(self, request: Any) -> None:
        asked = None if self._rule.keys is None else self._rule.keys(request)
        if asked is None:
            raise self._refused(
                "takes a role for the whole bucket, without key prefixes",
                _ROLES_HINT
                if self._rule.keys is None
                else "leave out the consumer's name, and keep positions in a file",
            )
        begins = methodcaller("startswith", self.identity.prefixes)
        if next(filterfalse(begins, asked), None) is not None:
            raise self.refused_keys()

    def refused_keys(self) -> UprError:
        """Return the error of a caller that asks for a key, or writes one, that its roles are not for; log it."""
        few = " or ".join(shown(x.decode()) for x in self.identity.prefixes[:_PREFIXES_SHOWN])
        return self._refused(
            "asks for keys that the caller's roles are not for",
            f"ask for keys that begin with {few}; a follower gives that as its key prefix",
        )

    def _check_bucket(self, bucket: str, roles: Collection[str], request: Any) -> None:
        if not self.identity.may_partly(roles, bucket):
            # The same words whether or not there is such a bucket: the catalog was not looked at.
            raise self._refused(
                f"takes the role {' or '.join(sorted(roles))} for this bucket",
                _ROLES_HINT,
            )
        if self.identity.prefixes:
            self._check_keys(request)
        self._checked = bucket, roles

    def check_beginning(self) -> None:
        """Check what is known before the request is.

        Raises:
            PermissionDeniedError: the caller has the role for no bucket; for a method about the server, not for all.
        """
        rule, identity = self._rule, self.identity
        if rule.is_open:
            return
        everywhere = rule.scope is Scope.SERVER
        has = identity.may_everywhere if everywhere else identity.may_somewhere
        if not has(rule.roles):
            needed = " or ".join(sorted(rule.roles))
            raise self._refused(
                f"takes the role {needed} for {'all buckets' if everywhere else 'a bucket'}",
                _ROLES_HINT,
            )

    def _refused(self, why: str, hint: str) -> PermissionDeniedError | UnauthenticatedError:
        name = self._method.rpartition("/")[2]
        error: PermissionDeniedError | UnauthenticatedError
        if self.identity is NOBODY:
            error = UnauthenticatedError(
                f"{name} takes a token or a certificate that is in the file of identities",
                hint=_HINT,
            )
        else:
            words = f"{name} {why}; the caller is {self.identity.name!r}"
            error = PermissionDeniedError(words, hint=hint)
        _tell(self._method, self.peer, error)
        return error

    def renew(self, identities: Identities) -> None:
        """Take the identity as it is now, and end the call if that would not be admitted any more."""
        old = self.identity
        if old is OWNER or old is NOBODY:
            return
        new, checked = identities.named(old.name), self._checked
        if (
            new is not None
            and replace(new, roles=old.roles) == old
            and (checked is None or new.may_partly(checked[1], checked[0]))
        ):
            self.identity = new
        elif not self.ended:
            self.ended = True
            self._end()


def _of_token(identities: Identities, shown: str) -> Identity:
    scheme, _, token = shown.partition(" ")
    found = identities.of_token(token.strip())
    if found is None or scheme.lower() != _BEARER:
        raise UnauthenticatedError("the token is unknown or was revoked", hint=_HINT)
    return found


def _tell(method: str, peer: str, error: UprError) -> None:
    """Log a refusal, without what was shown for credentials."""
    log.warning("a call is refused", extra={"peer": peer, "method": method, "error": error.message})


NOBODY: Final = Identity("nobody", {})
_HINT: Final = (
    "give --token-file or UPR_TOKEN_FILE, or token= in the SDK; 'upr-admin token add' makes one"
)
PERMIT: ContextVar[Permit] = ContextVar("PERMIT")
"""Permit of the call that is served. There is none outside of a call: a method that no gate admitted does nothing."""


def ended_error() -> UnavailableError:
    """Return the error of a call whose permit was ended. A client whose token was replaced opens it again."""
    return UnavailableError(
        "the credentials of this call have ended", hint="open it again with those of now"
    )


class Access:
    """Access to one server: admits calls.

    Args:
        tokens: the file of identities; None for none.
        certificates: whether clients have certificates that were verified.
        open_admin: whether anyone may destroy where there are no identities.

    Raises:
        UprError, OSError: the file cannot be read.
    """

    def __init__(
        self, tokens: Path | None = None, certificates: bool = False, open_admin: bool = False
    ) -> None:
        self.watched: Watched[Identities] | None = None
        if tokens is not None:
            self.watched = Watched(
                "the file of identities", (tokens,), lambda: read_identities(tokens)
            )
        self._certificates = certificates
        self._open_admin = open_admin
        self._long: set[Permit] = set()

    @property
    def has_identities(self) -> bool:
        return self.watched is not None or self._certificates

    def admit(self, method: str, context: Any, end: Callable[[], object]) -> Permit:
        """Return the permit of a call of which nothing was read, kept up to date with the file until it is ``left``.

        Args:
            method: with its service, as gRPC has it.
            end: ends the call.

        Raises:
            UnauthenticatedError: it brings no credentials, or unknown ones.
            PermissionDeniedError: it cannot be allowed whatever it asks for.
        """
        rule, peer = RULES.get(method), context.peer()
        try:
            identity = self._caller(context, peer)
            if rule is None:
                raise PermissionDeniedError(f"{method} has no rule; it is served to nobody")
        except (PermissionDeniedError, UnauthenticatedError) as error:
            _tell(method, peer, error)
            raise
        known = identity is not ANYONE or self._certificates or self._open_admin
        permit = Permit(method, peer, rule, identity, known, end)
        permit.check_beginning()
        self._long.add(permit)
        return permit

    def viewer(self, page: str, peer: str, shown: str, *, everything: bool) -> Identity | None:
        """Return who an Authorization header lets see a page, of all buckets with ``everything``; None if nobody.

        The log tells of who is refused.
        """
        if not self.has_identities:
            return ANYONE
        try:
            if self.watched is None or not shown:
                raise UnauthenticatedError(f"{page} takes a token", hint=_HINT)
            caller = _of_token(self.watched.value, shown)
            if not (caller.may_everywhere if everything else caller.may_somewhere)(VIEWERS):
                words = f"{page} takes the role read or admin for {'all buckets' if everything else 'a bucket'}"
                raise PermissionDeniedError(f"{words}; the caller is {caller.name!r}")
        except (PermissionDeniedError, UnauthenticatedError) as error:
            # A browser asks its page's feed without a token, to learn whether it takes one.
            if shown or everything:
                _tell(page, peer, error)
            return None
        return caller

    def left(self, permit: Permit) -> None:
        """The permit's call has ended."""
        self._long.discard(permit)

    def identities_changed(self) -> None:
        """End calls whose identity is not in the file any more, or has lost the role that admitted them."""
        assert self.watched is not None
        for permit in list(self._long):
            permit.renew(self.watched.value)

    def _caller(self, context: Any, peer: str) -> Identity:
        """Return who calls; UnauthenticatedError for a token that nobody has."""
        if peer.startswith("unix:"):
            # No other Unix socket is listened on. Only its owner can connect, who could change the files as well.
            return OWNER
        if self.watched is None:
            return ANYONE
        identities = self.watched.value
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                return _of_token(identities, value if isinstance(value, str) else "")
        if self._certificates:
            shown_by = context.auth_context()
            names = [
                name.decode(errors="replace")
                for key in ("x509_common_name", "x509_subject_alternative_name")
                for name in shown_by.get(key, ())
            ]
            return identities.of_certificate(names) or NOBODY
        return NOBODY
