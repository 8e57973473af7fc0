"""The data keys of a node: creating, using and rewrapping them; one small file has them wrapped.

Each process seals with a data key of its own, created when it seals the first value. The key is
in the file and synced before anything that it sealed can be stored.
"""

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    LOG_NAME,
    NodeFileDamagedError,
    copy_of,
    load_identity,
    read_either,
    write_twice,
)
from contrail_storage.seal.frames import HEAD_BYTES, SealBrokenError, frame_head, key_of
from contrail_storage.seal.key_table import (
    WRAP_NONCE_BYTES,
    WrappedKey,
    WrongNodeKeyError,
    decode_table,
    encode_table,
    unwrap_key,
    wrap_key,
)

KEYS_NAME: Final = "keys"
SEALS_MAX: Final = 1 << 32
"""Values that one data key seals at most. Then the keyring creates the next one."""
_DATA_KEY_BYTES: Final = 32


class KeysRefusedError(Exception):
    """The folder cannot be opened with the given node keys. The text says why."""


class _Current(NamedTuple):
    """The data key that seals now. ``next(numbers)`` is atomic, so sealing needs no lock."""

    id: int
    cipher: AESGCM
    numbers: Iterator[int]


class Keyring:
    """A `Sealer` with all data keys of a folder. Thread-safe."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        node_key: bytes,
        data_keys: dict[int, bytes],
        entries: tuple[WrappedKey, ...],
        seals_max: int = SEALS_MAX,
    ) -> None:
        self._files = files
        self._path = directory / KEYS_NAME
        self._node_key = node_key
        self._data_keys = data_keys
        self._entries = entries
        self._seals_max = seals_max
        # By data key, made at first use: a folder may have hundreds of keys, one for each start.
        self._ciphers: dict[int, AESGCM] = {}
        # None until something is sealed: a node that only reads creates no key.
        self._current: _Current | None = None
        self._closed = False
        # For changes of the file. Sealing and opening take it only to create a key.
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, files: Files, directory: Path, node_key: bytes, seals_max: int = SEALS_MAX
    ) -> "Keyring":
        """Create the first data key of a folder, and its file. Raises OSError."""
        keyring = cls(files, directory, node_key, {}, (), seals_max)
        keyring._succeed(None)
        return keyring

    @classmethod
    def load(
        cls,
        files: Files,
        directory: Path,
        node_keys: Sequence[bytes],
        seals_max: int = SEALS_MAX,
    ) -> "Keyring":
        """Unwrap the data keys of a folder with the first of `node_keys` that fits; change nothing.

        Raises KeysRefusedError if none fits, FileNotFoundError, NodeFileDamagedError or OSError.
        """
        try:
            entries = decode_table(read_either(files, directory / KEYS_NAME))
        except ValueError as error:
            raise NodeFileDamagedError(f"{KEYS_NAME} cannot be decoded: {error}") from error
        for node_key in node_keys:
            try:
                unwrap_key(node_key, entries[0])
            except WrongNodeKeyError:
                continue
            data_keys = _unwrap_all(node_key, entries)
            return cls(files, directory, node_key, data_keys, entries, seals_max)
        raise KeysRefusedError(
            f"{directory} is encrypted, but none of the {len(node_keys)} given encryption keys "
            "opens it"
        )

    def seal(self, plain: bytes | memoryview, context: bytes) -> bytes:
        """See `Sealer.seal`."""
        current = self._current or self._succeed(None)
        # Several threads may draw numbers past the maximum. None of these is used.
        while (number := next(current.numbers)) >= self._seals_max:
            current = self._succeed(current)
        head = frame_head(current.id, number)
        return head + current.cipher.encrypt(head, plain, context)

    def open(self, sealed: bytes | memoryview, context: bytes) -> bytes:
        """See `Sealer.open`."""
        key_id = key_of(sealed)
        cipher = self._ciphers.get(key_id) or self._cipher(key_id)
        view = memoryview(sealed)
        try:
            return cipher.decrypt(view[:HEAD_BYTES], view[HEAD_BYTES:], context)
        except InvalidTag:
            raise SealBrokenError("encrypted bytes were modified or moved") from None

    def rotate(self, node_key: bytes) -> bool:
        """Wrap all data keys by `node_key`, in one change of the file, and start a new data key.

        Returns False, without any change, if `node_key` is the current one. Blocks. After an
        OSError the keyring works as before, but the file may be under either node key.
        """
        with self._lock:
            # A new data key as well: values sealed from now on are safe even if somebody has copied
            # the old node key and an old file `keys`.
            if node_key == self._node_key:
                return False
            entries = tuple(
                wrap_key(node_key, one.id, self._data_keys[one.id], _nonce(), one.account)
                for one in self._entries
            )
            self._current = self._begin(node_key, entries)
            self._node_key = node_key
            return True

    def close(self) -> None:
        """Wait for a running change of the file, and allow no other. Blocks.

        Call it before the folder's lock is released: the next holder may change the file.
        """
        with self._lock:
            self._closed = True

    def _cipher(self, key_id: int) -> AESGCM:
        data_key = self._data_keys.get(key_id)
        if data_key is None:
            raise SealBrokenError(f"encrypted with data key {key_id}, which is not in {KEYS_NAME}")
        return self._ciphers.setdefault(key_id, AESGCM(data_key))

    def _succeed(self, spent: _Current | None) -> _Current:
        """Return the data key after `spent`; another thread may have created it in the meantime."""
        with self._lock:
            if self._current is None or self._current is spent:
                self._current = self._begin(self._node_key, self._entries)
            return self._current

    def _begin(self, node_key: bytes, entries: tuple[WrappedKey, ...]) -> _Current:
        if self._closed:
            raise OSError("the node has stopped: its data keys can no longer change")
        key_id = entries[-1].id + 1 if entries else 1
        data_key = os.urandom(_DATA_KEY_BYTES)
        entries = (*entries, wrap_key(node_key, key_id, data_key, _nonce()))
        # Before the key is used: a value sealed with a key that is in no file would be lost.
        write_twice(self._files, self._path, encode_table(entries))
        self._entries = entries
        self._data_keys[key_id] = data_key
        return _Current(key_id, self._cipher(key_id), itertools.count())


def find_keyring(files: Files, directory: Path, node_keys: Sequence[bytes]) -> Keyring | None:
    """Return the keyring of a folder; None if the folder is plain or new. Changes nothing.

    A folder is encrypted from its creation, or never. Raises KeysRefusedError if `node_keys` do
    not fit it, NodeFileDamagedError or OSError.
    """
    identity = load_identity(files, directory)
    # A new encrypted folder gets `keys` before `identity`. A crash between the two leaves only
    # `keys`, and the next start must not continue without encryption.
    is_sealed = has_keys(files, directory) if identity is None else identity.encrypted
    if not is_sealed:
        if node_keys and (identity is not None or LOG_NAME in files.list_names(directory)):
            raise KeysRefusedError(
                f"{directory} contains unencrypted data, but encryption keys were given. "
                "Encryption can only be chosen when a folder is created: start a server "
                "with the keys on a new folder, and publish into it what a replay of the "
                "old one returns"
            )
        return None
    if not node_keys:
        raise KeysRefusedError(f"{directory} is encrypted, but no encryption key was given")
    try:
        return Keyring.load(files, directory, node_keys)
    except FileNotFoundError as error:
        raise NodeFileDamagedError(
            f"{KEYS_NAME} is missing; without it no data in the folder can be read"
        ) from error


def has_keys(files: Files, directory: Path) -> bool:
    """Whether a folder has a file of data keys, sound or not."""
    return not {KEYS_NAME, copy_of(Path(KEYS_NAME)).name}.isdisjoint(files.list_names(directory))


def _unwrap_all(node_key: bytes, entries: Sequence[WrappedKey]) -> dict[int, bytes]:
    try:
        return {entry.id: unwrap_key(node_key, entry) for entry in entries}
    except WrongNodeKeyError as error:
        raise NodeFileDamagedError(f"{KEYS_NAME} is damaged: {error}") from error


def _nonce() -> bytes:
    return os.urandom(WRAP_NONCE_BYTES)
