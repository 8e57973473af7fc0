"""The data keys of a folder, each wrapped by the node key.

A data key is wrapped with AES-256-GCM. Its id and its account are authenticated with it, so one
entry cannot be exchanged for another.
"""

import struct
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DEFAULT_ACCOUNT: Final = "default"
WRAP_NONCE_BYTES: Final = 12
_PURPOSE: Final = b"contrail data key"
_ID: Final = struct.Struct(">I")


class WrongNodeKeyError(Exception):
    """The data key was wrapped with another node key, or its entry was changed."""


class WrappedKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A data key as it is stored. Ids ascend and are never used again."""

    id: int
    account: str
    nonce: bytes
    wrapped: bytes


_Table = tuple[WrappedKey, ...]


def wrap_key(
    node_key: bytes, key_id: int, data_key: bytes, nonce: bytes, account: str = DEFAULT_ACCOUNT
) -> WrappedKey:
    """Wrap ``data_key``; ``nonce`` must be 12 random bytes."""
    wrapped = AESGCM(node_key).encrypt(nonce, data_key, _binding(key_id, account))
    return WrappedKey(key_id, account, nonce, wrapped)


def unwrap_key(node_key: bytes, entry: WrappedKey) -> bytes:
    """Unwrap the data key of an entry (32 bytes). Raises WrongNodeKeyError."""
    try:
        cipher = AESGCM(node_key)
        return cipher.decrypt(entry.nonce, entry.wrapped, _binding(entry.id, entry.account))
    except (InvalidTag, ValueError) as error:
        raise WrongNodeKeyError(f"data key {entry.id} is wrapped with another key") from error


def _binding(key_id: int, account: str) -> bytes:
    return _PURPOSE + _ID.pack(key_id) + account.encode()


def encode_table(entries: _Table) -> bytes:
    """Encode the entries as msgpack, the form in which they are stored."""
    return msgspec.msgpack.encode(entries)


def decode_table(payload: bytes) -> _Table:
    """Decode the result of :func:`encode_table`. Raises ValueError unless the ids ascend."""
    entries = msgspec.msgpack.decode(payload, type=_Table)
    ids = [entry.id for entry in entries]
    # The next id is the last one plus 1. Out of order, an id and its nonces could repeat.
    if not ids or ids != sorted(set(ids)):
        raise ValueError("its data keys are not in order")
    return entries
