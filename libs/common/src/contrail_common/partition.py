"""The shard of a subject: a pure function that any client can compute.

::

    shard = FNV-1a 32 (key) mod shards

The key is the UTF-8 of the subject's tokens at the positions ``shard_by`` (from 1), in that order
and with nothing in between. A position that the subject does not have is left out. Without
``shard_by`` the key is the whole subject, with its dots. This is JetStream's function
``partition``. FNV-1a is the hash of Fowler, Noll and Vo: for each byte, xor, then multiply by the
prime.
"""

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np

from contrail_common.subjects import is_wildcard
from contrail_common.texts import U32Array

SHARDS_MAX: Final = 64
POSITIONS_MAX: Final = 16
POSITION_MAX: Final = 256
"""Largest position in ``shard_by``, which has at most ``POSITIONS_MAX`` of them."""

_OFFSET_BASIS: Final = 0x811C9DC5
_PRIME: Final = 0x01000193
_MASK: Final = 0xFFFF_FFFF
_VECTOR_MIN: Final = 16
"""Hashing fewer subjects is faster one by one."""


def fnv1a_32(data: bytes) -> int:
    """Return the FNV-1a hash (32 bits) of ``data``."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def partition_key(subject: str, shard_by: tuple[int, ...]) -> bytes:
    """Return the part of ``subject`` that is hashed."""
    if not shard_by:
        return subject.encode()
    tokens = subject.split(".")
    return "".join([tokens[at - 1] for at in shard_by if at <= len(tokens)]).encode()


@functools.lru_cache(maxsize=65_536)
def shard_of(subject: str, shards: int, shard_by: tuple[int, ...] = ()) -> int:
    """Return the shard (from 0) of the literal ``subject`` in a stream with ``shards`` shards."""
    return fnv1a_32(partition_key(subject, shard_by)) % shards


def shards_of(subjects: Sequence[str], shards: int, shard_by: tuple[int, ...] = ()) -> U32Array:
    """Return the result of :func:`shard_of` for each of ``subjects``: u32[len(subjects)]."""
    if len(subjects) < _VECTOR_MIN:
        found = [shard_of(subject, shards, shard_by) for subject in subjects]
        return np.array(found, np.uint32)
    keys = [partition_key(subject, shard_by) for subject in subjects]
    return _hashes(keys) % np.uint32(shards)


def _hashes(keys: Sequence[bytes]) -> U32Array:
    """Return the FNV-1a 32 hash of each key.

    Each step takes one more byte of all keys that have it; longer keys are sorted first.
    """
    # Longest first: then the keys that have a byte at some place are always a prefix.
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths)
    starts, lengths = (ends - lengths)[order], lengths[order]
    heap = np.frombuffer(b"".join(keys), np.uint8).astype(np.uint32)
    values = np.full(len(keys), _OFFSET_BASIS, np.uint32)
    longest = int(lengths[0])
    # For each place, the number of keys that have a byte there.
    reach = np.searchsorted(-lengths, -np.arange(longest), side="left").tolist()
    prime = np.uint32(_PRIME)
    for at, count in enumerate(reach):
        values[:count] = (values[:count] ^ heap[starts[:count] + at]) * prime
    hashed = np.empty_like(values)
    hashed[order] = values
    return hashed


def shard_of_filter(pattern: str, shards: int, shard_by: tuple[int, ...] = ()) -> int | None:
    """Return the shard of all subjects that ``pattern`` matches; None if there may be several.

    ``pattern`` may be literal. With wildcards there is one shard if they are at positions that
    ``shard_by`` does not name.
    """
    if shards == 1:
        return 0
    if not is_wildcard(pattern):
        return shard_of(pattern, shards, shard_by)
    tokens = pattern.split(".")
    known = len(tokens) - 1 if tokens[-1] == ">" else len(tokens)
    open_ended = known < len(tokens)
    for position in shard_by:
        if position <= known:
            if tokens[position - 1] == "*":
                return None
        elif open_ended:
            return None
    # Only the tokens that `shard_by` names are hashed, and all of them are literal here.
    return shard_of(pattern, shards, shard_by) if shard_by else None


def share(total: int, shards: int, shard: int) -> int:
    """Return the share of shard ``shard`` in a stream's limit; the first shards get the remainder.

    A ``total`` below 0 means no limit, and is returned as it is.
    """
    if total < 0:
        return total
    return total // shards + (shard < total % shards)
