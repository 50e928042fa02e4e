"""Files that are read again when they change: identities, the server's certificate, and authorities of those that it calls.

What is there now counts until something whole has come. A file that cannot be used is told once in the log, and shown in the
status until it is mended.
"""

import asyncio
import binascii
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Final, Generic, TypeVar

import grpc

from upr_protocol.errors import InvalidArgumentError, UprError

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.4
"""Interval at which files are looked at; they are read when two looks in a row find the same."""
CERTIFICATE: Final = "certificate"
CLIENT_CA: Final = "client_ca"
PEER_CA: Final = "peer_ca"
CLUSTER_CA: Final = "cluster_ca"
IDENTITIES: Final = "identities"
"""The files, as metrics name them."""
ENDS_SOON: Final = 0.1
"""Part of the lifetime of a certificate that is left when the server begins to tell of its end."""
ENDS_SECONDS: Final = 30 * 86400.0
"""Longest time that this is: authorities live for many years."""
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END", re.DOTALL)
_VALIDITY: Final = re.compile(rb"\x30[\x1e-\x22]" + rb"(?:\x17\x0d|\x18\x0f)(\d{12,14})Z" * 2)
"""The validity of an X.509 certificate in DER: two times, of which those before 2050 have two digits for the year."""
_T = TypeVar("_T")


def signature(paths: Iterable[Path]) -> tuple[tuple[int, ...] | None, ...]:
    """Return what changes with files: with their content, and with who may read them."""
    found: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
            times = stat.st_mtime_ns, stat.st_ctime_ns
            found.append((stat.st_dev, stat.st_ino, stat.st_size, *times))
        except OSError:
            found.append(None)
    return tuple(found)


def read_tls(cert: Path | None, key: Path | None, authority: Path | None) -> list[bytes | None]:
    """Return what PEM files have that gRPC can use: of others it says nothing, and an empty one ends the process.

    Raises:
        OSError: they cannot be read, or used.
        ValueError: they change.
    """
    paths = cert, key, authority
    before = [None if path is None else path.read_bytes() for path in paths]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if cert is not None:
        # A password, or OpenSSL asks for one at the terminal.
        context.load_cert_chain(cert, key, password="")
    if authority is not None:
        # By its path: comments in the file may be in any language.
        context.load_verify_locations(authority)
    if before != [None if path is None else path.read_bytes() for path in paths]:
        raise ValueError("the files change")
    return before


def validity_of(certificates: bytes) -> tuple[float, float] | None:
    """Return from when to when that certificate of a PEM file is valid that ends first, in seconds since the epoch; None
    where none tells.
    """
    found = filter(None, map(_validity, _CERTIFICATE.findall(certificates)))
    return min(found, key=itemgetter(1), default=None)


def _validity(pem: bytes) -> tuple[float, float] | None:
    try:
        found = _VALIDITY.search(binascii.a2b_base64(pem))
        return (_seconds(found[1]), _seconds(found[2])) if found else None
    except ValueError:
        return None


def _seconds(text: bytes) -> float:
    year = "%Y" if len(text) == 14 else "%y"
    return datetime.strptime(text.decode() + "+0000", year + "%m%d%H%M%S%z").timestamp()


class Watched(Generic[_T]):
    """A value that is made of files; a UprError if it cannot be made now.

    Args:
        what: names it in log and errors.
        load: makes it; may raise anything.

    Attributes:
        value: the newest one that could be made.
        problem: why the files that are there now cannot be used, if so.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], _T]) -> None:
        self._what = what
        self._paths = paths
        self._load = load
        self.problem: UprError | None = None
        self._used: object = signature(paths)
        self._seen: object = self._used
        try:
            self.value = load()
        except Exception as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UprError:
        if isinstance(error, UprError):
            return error
        # The reason alone: of what is in a key file nothing is shown.
        words = error.strerror if isinstance(error, OSError) else ""
        return UprError(
            f"{self._what} cannot be used: {words or 'malformed'}",
            reason="FILE_UNUSABLE",
            hint=f"mend {', '.join(map(str, self._paths))}",
        )

    async def look(self) -> bool:
        """Read the files again if they changed; return whether there is a new value."""
        try:
            before, self._seen = self._seen, await asyncio.to_thread(signature, self._paths)
            # Who writes a file in place may have written a part of it.
            if self._seen == self._used or self._seen != before:
                return False
            value = await asyncio.to_thread(self._load)
        except Exception as error:
            # Not used: it is read again with the next look, because the trouble may pass by itself.
            self._used = None
            told = self.problem is not None
            self.problem = self._unusable(error)
            if not told:
                log.error(
                    "a changed file cannot be used: what it had counts on",
                    extra={"file": self._what, "error": str(self.problem)},
                )
            return False
        # As it was before the reading: a file that changes meanwhile is read once more.
        self.value, self._used, self.problem = value, self._seen, None
        log.info("a changed file is used", extra={"file": self._what})
        return True


class Expiring(Generic[_T]):
    """Files with certificates, of whose end is told.

    Args:
        files: of each file, what the certificate in it is, and what is to be done when that ends.
        read: returns the value that is made of them, and what each of them has.

    Attributes:
        watched: the value, which is made again when they change.

    Raises:
        UprError: they cannot be used.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        files: Mapping[str, tuple[str, str]],
        read: Callable[[], tuple[_T, Mapping[str, bytes]]],
    ) -> None:
        self._files = files
        self._read = read
        self._validities: dict[str, tuple[float, float] | None] = {}
        self._told: dict[str, str] = {}
        self.watched = Watched(what, paths, self._load)

    def _load(self) -> _T:
        value, found = self._read()
        self._validities = {file: validity_of(pem) for file, pem in found.items()}
        return value

    @property
    def troubles(self) -> dict[str, UprError | None]:
        """By file, why those that are there now cannot be used; else that a certificate has expired, or soon will."""
        found, first = self._endings(), next(iter(self._files))
        return found | {first: self.watched.problem or found[first]}

    @property
    def ends(self) -> dict[str, float]:
        """By file, when the first certificate in it ends, in seconds since the epoch; without those that cannot be told."""
        return {file: one[1] for file, one in self._validities.items() if one is not None}

    def _endings(self) -> dict[str, UprError | None]:
        return {file: self._ending(file, one) for file, one in self._validities.items()}

    def _ending(self, file: str, validity: tuple[float, float] | None) -> UprError | None:
        if validity is None:
            return None
        (first, last), now = validity, time.time()
        if now < last - min(ENDS_SOON * (last - first), ENDS_SECONDS):
            return None
        what, hint = self._files[file]
        return UprError(
            f"{what} {'has expired' if now > last else 'expires'} "
            f"at {datetime.fromtimestamp(last, UTC):%Y-%m-%dT%H:%M:%SZ}",
            reason="CERTIFICATE_EXPIRED" if now > last else "CERTIFICATE_EXPIRES",
            hint=hint,
        )

    def tell(self) -> None:
        """Log once of each file that a certificate in it soon expires, and once that it has."""
        for file, ending in self._endings().items():
            reason = "" if ending is None else ending.reason
            if reason and reason != self._told.get(file):
                log.error("a certificate expires, or has expired", extra={"error": str(ending)})
            self._told[file] = reason


def _of_authority(whose: str, path: Path | None) -> tuple[str, str]:
    return (
        f"the certificate of an authority of {whose}",
        f"put a new one into {path}, or take it out: the file is read again",
    )


def authorities(file: str, whose: str, path: Path) -> Expiring[None]:
    """Return the authorities of servers that this one calls; whoever calls them reads the file as well.

    Raises:
        UprError: the file cannot be used.
    """

    def read() -> tuple[None, Mapping[str, bytes]]:
        _, _, roots = read_tls(None, None, path)
        assert roots is not None
        return None, {file: roots}

    files = {file: _of_authority(whose, path)}
    return Expiring(f"the file of the authorities of {whose}", [path], files, read)


class Certificates:
    """The server's certificate and key, and the authority of its clients' certificates.

    Args:
        client_ca: PEM file of the authorities whose certificates every client must show one of; None for none.

    Raises:
        InvalidArgumentError: a path is given without the one that goes with it.
        UprError: the files cannot be used.
    """

    def __init__(self, cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
        if cert is None or key is None:
            raise InvalidArgumentError(
                "--tls-cert, --tls-key and --tls-client-ca are not all that they need; must be a certificate with its key",
                hint="give --tls-cert and --tls-key, and --tls-client-ca where clients show certificates",
            )
        anew = f"put a new one into {cert}, and its key into {key}: they are read again"
        files = {
            CERTIFICATE: ("the TLS certificate", anew),
            CLIENT_CA: _of_authority("clients", client_ca),
        }
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = (cert, key, client_ca) if client_ca is not None else (cert, key)
        self.expiring = Expiring("the TLS certificate", paths, files, self._read)
        self._given: object = self.expiring.watched.value

    def _read(self) -> tuple[grpc.ServerCertificateConfiguration, Mapping[str, bytes]]:
        chain, key, roots = read_tls(self._cert, self._key, self._client_ca)
        assert chain is not None
        assert key is not None
        found = {CERTIFICATE: chain}
        if roots is not None:
            found[CLIENT_CA] = roots
        return grpc.ssl_server_certificate_configuration([(key, chain)], roots), found

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a port is opened with; each new connection gets the newest certificate."""
        # (The stubs do not know that None means no change.)
        return grpc.dynamic_ssl_server_credentials(
            self.expiring.watched.value,
            self._newest,  # type: ignore[arg-type]
            self._client_ca is not None,
        )

    def _newest(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the newest configuration; None if gRPC has it. gRPC asks before each handshake."""
        newest = self.expiring.watched.value
        if newest is self._given:
            return None
        self._given = newest
        return newest
