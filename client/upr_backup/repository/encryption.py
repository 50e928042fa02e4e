"""Encryption of a repository: each object by itself, with a key that whoever keeps the objects does not have.

An encrypted object is a line ``upr-backup aes-256-gcm 1``, 32 random bytes, and chunks of 64 KiB, each with its tag of 16
bytes. The object's own key is derived (HKDF, SHA-256) from the repository's, the random bytes and the object's name, so an
object does not open under another name. A chunk's nonce is its number and whether it is the last one, so chunks are
neither exchanged nor cut off unnoticed. ``repository.json`` and locks are plain: they have names, numbers and times only. Names and
sizes of objects are not hidden, nor that an older state was put in the place of a newer one.
"""

import hashlib
import hmac
import io
import os
from collections import OrderedDict
from typing import Any, BinaryIO, Final

from upr_backup.errors import RepositoryDamagedError, RepositoryError
from upr_backup.repository.documents import Json, canonical
from upr_backup.repository.storage import ObjectReader, Sink, Storage, Stored
from upr_protocol.errors import InvalidArgumentError, MissingPackageError

KEY_BYTES: Final = 32
"""Of a key: as 64 hex digits in a file."""

_HEAD: Final = b"upr-backup aes-256-gcm 1\n"
_SALT_BYTES: Final = 32
_BEGIN: Final = len(_HEAD) + _SALT_BYTES
_CHUNK_BYTES: Final = 65_536
_TAG_BYTES: Final = 16
_CHUNKS_KEPT: Final = 4
_PLAIN: Final = ("locks/", "repository.json")
_DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")


def parse_key(text: bytes, where: str) -> bytes:
    """Return the key that 64 hex digits are; InvalidArgumentError for anything else, with nothing of it."""
    digits = text.strip()
    if len(digits) != 2 * KEY_BYTES or not _DIGITS.issuperset(digits):
        raise InvalidArgumentError(
            f"the key of {where} has {len(digits)} bytes; must be {2 * KEY_BYTES} hex digits",
            hint="openssl rand -hex 32 makes one",
        )
    return bytes.fromhex(digits.decode())


def mark(content: Json, key: bytes) -> str:
    """Return what a repository's own document has of its key: whoever does not have the key can make none that fits."""
    return hmac.new(key, b"upr-backup repository\n" + canonical(content), "sha256").hexdigest()


def check_key(content: Json, key: bytes | None, location: str) -> None:
    """Raise RepositoryError unless its own document says that a repository has this key, or none where there is none."""
    marked = content.get("encryption")
    if marked is None and key is not None:
        raise RepositoryError(
            f"{location} is not encrypted, and there is a key for it",
            hint="leave the key away if that is right; a repository is encrypted from 'init' on, or never",
        )
    if marked is not None and key is None:
        raise RepositoryError(
            f"{location} is encrypted",
            hint="give its key: --key-file FILE or --key-command COMMAND",
        )
    if key is not None:
        rest = {name: value for name, value in content.items() if name != "encryption"}
        if not isinstance(marked, str) or not hmac.compare_digest(
            marked.encode(), mark(rest, key).encode()
        ):
            raise RepositoryError(
                f"the key is not the one of {location}, or its repository.json was changed",
                hint="each repository has one key, which 'init' was given",
            )


class EncryptedStorage:
    """Objects that are encrypted in another storage, with a key of 32 bytes. Sizes are those of what was encrypted."""

    def __init__(self, storage: Storage, key: bytes) -> None:
        self._storage = storage
        self._key = key
        self.location = storage.location
        """Whoever opens it needs the key as well."""

    def read(self, name: str) -> bytes:
        data = self._storage.read(name)
        if name.startswith(_PLAIN):
            return data
        return self._open(name, io.BytesIO(data), len(data)).read()

    def open(self, name: str) -> io.BufferedReader:
        """Open an object for reading; a chunk is checked before anything of it is given."""
        return self._open(name, self._storage.open(name), self._storage.size(name))

    def _open(self, name: str, file: BinaryIO, size: int) -> io.BufferedReader:
        head = file.read(_BEGIN)
        if len(head) != _BEGIN or not head.startswith(_HEAD):
            file.close()
            raise _damaged(name)
        cipher = _cipher(self._key, head[len(_HEAD) :], name)
        plain = _Plain(name, file, cipher, size)
        reader = ObjectReader(plain.size, plain.read, file.close)
        return io.BufferedReader(reader, _CHUNK_BYTES)

    def size(self, name: str) -> int:
        return _plain_size(name, self._storage.size(name))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if name.startswith(_PLAIN):
            return self._storage.put_if_absent(name, data)
        sealed = io.BytesIO()
        sink = EncryptingSink(sealed, self._key, name)
        sink.write(data)
        sink.end()
        return self._storage.put_if_absent(name, sealed.getvalue())

    def create(self, name: str) -> "EncryptingSink":
        return EncryptingSink(self._storage.create(name), self._key, name)

    def names(self, prefix: str) -> list[str]:
        return self._storage.names(prefix)

    def stored(self, prefix: str) -> list[Stored]:
        return [
            one._replace(bytes=_plain_size(one.name, one.bytes))
            for one in self._storage.stored(prefix)
        ]

    def is_empty(self) -> bool:
        return self._storage.is_empty()

    def delete(self, name: str) -> None:
        self._storage.delete(name)

    def sweep(self) -> None:
        self._storage.sweep()


class EncryptingSink:
    """An object that is encrypted while it is written into another sink; its size is that of what was encrypted."""

    def __init__(self, sink: Sink | io.BytesIO, key: bytes, name: str) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self._number = 0
        salt = os.urandom(_SALT_BYTES)
        self._cipher = _cipher(key, salt, name)
        self.size = 0
        self.closed = False
        sink.write(_HEAD + salt)

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._held += view
        self.size += view.nbytes
        # The last chunk, which may be full, is sealed at the end.
        while len(self._held) > _CHUNK_BYTES:
            self._seal(bytes(self._held[:_CHUNK_BYTES]), False)
            del self._held[:_CHUNK_BYTES]
        return view.nbytes

    def _seal(self, chunk: bytes, last: bool) -> None:
        self._sink.write(self._cipher.encrypt(_nonce(self._number, last), chunk, None))
        self._number += 1

    def end(self) -> None:
        self._seal(bytes(self._held), True)
        self._held.clear()

    def finish(self) -> str:
        """Make the object durable; the SHA-256 is that of what was encrypted."""
        assert not isinstance(self._sink, io.BytesIO)
        self.end()
        self._sink.finish()
        self.closed = True
        return self._hash.hexdigest()

    def close(self) -> None:
        self.closed = True
        self._sink.close()


class _Plain:
    """What an encrypted object holds, decrypted by chunks; the newest ones are kept."""

    def __init__(self, name: str, file: BinaryIO, cipher: Any, size: int) -> None:
        self._name, self._file, self._cipher = name, file, cipher
        self.size = _plain_size(name, size)
        self._chunks = _chunks_of(size)
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def read(self, at: int, count: int) -> bytes:
        # Also of an empty object, whose one chunk says that it is whole.
        if at >= max(self.size, 1):
            return b""
        number, begin = divmod(at, _CHUNK_BYTES)
        return self._chunk(number)[begin : begin + count]

    def _chunk(self, number: int) -> bytes:
        if number not in self._kept:
            from cryptography.exceptions import InvalidTag

            self._file.seek(_BEGIN + number * (_CHUNK_BYTES + _TAG_BYTES))
            sealed = self._file.read(_CHUNK_BYTES + _TAG_BYTES)
            nonce = _nonce(number, number == self._chunks - 1)
            try:
                self._kept[number] = self._cipher.decrypt(nonce, sealed, None)
            except (InvalidTag, ValueError):
                raise _damaged(self._name) from None
            if len(self._kept) > _CHUNKS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]


def _cipher(key: bytes, salt: bytes, name: str) -> Any:
    """Return what encrypts one object, and no other; MissingPackageError without cryptography."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise MissingPackageError(
            "an encrypted repository needs cryptography, not installed",
            hint="pip install 'upr-stream[backup]'",
        ) from error
    # A name in a folder that others write to need not be UTF-8.
    info = b"upr-backup object\n" + name.encode(errors="surrogateescape")
    return AESGCM(HKDF(SHA256(), KEY_BYTES, salt, info).derive(key))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _chunks_of(size: int) -> int:
    return -(-(size - _BEGIN) // (_CHUNK_BYTES + _TAG_BYTES))


def _plain_size(name: str, size: int) -> int:
    """Return the bytes of an object whose encrypted form has so many; those of a plain or a foreign one as they are."""
    if name.startswith(_PLAIN) or size < _BEGIN + _TAG_BYTES:
        return size
    return size - _BEGIN - _chunks_of(size) * _TAG_BYTES


def _damaged(name: str) -> RepositoryDamagedError:
    return RepositoryDamagedError(
        f"{name} is damaged, or was not written with the key of this repository"
    )
