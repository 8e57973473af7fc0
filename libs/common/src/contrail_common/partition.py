"""Which shard of a stream a subject belongs to: a pure function that any client can compute.

::

    shard = FNV-1a 32 (key) mod shards

The key is the UTF-8 of the subject's tokens at the positions ``shard_by`` (from 1), in that order
and with nothing in between; a position that the subject does not have adds nothing. Without
``shard_by`` the key is the whole subject, dots included. It is JetStream's ``partition`` function.
FNV-1a is of Fowler, Noll and Vo: for each byte, xor it in, then multiply by the prime.
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
"""Bounds of ``shard_by``: how many positions, and the largest one."""

_OFFSET_BASIS: Final = 0x811C9DC5
_PRIME: Final = 0x01000193
_MASK: Final = 0xFFFF_FFFF
_VECTOR_MIN: Final = 16
"""Fewer subjects are hashed sooner one by one."""


def fnv1a_32(data: bytes) -> int:
    """The FNV-1a hash (32 bits) of ``data``."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def partition_key(subject: str, shard_by: tuple[int, ...]) -> bytes:
    """What of ``subject`` is hashed."""
    if not shard_by:
        return subject.encode()
    tokens = subject.split(".")
    return "".join([tokens[at - 1] for at in shard_by if at <= len(tokens)]).encode()


@functools.lru_cache(maxsize=65_536)
def shard_of(subject: str, shards: int, shard_by: tuple[int, ...] = ()) -> int:
    """The shard, from 0, of the literal ``subject`` in a stream of ``shards``."""
    return fnv1a_32(partition_key(subject, shard_by)) % shards


def shards_of(subjects: Sequence[str], shards: int, shard_by: tuple[int, ...] = ()) -> U32Array:
    """The shard of each of ``subjects``: u32[len(subjects)], as :func:`shard_of` has it."""
    if len(subjects) < _VECTOR_MIN:
        found = [shard_of(subject, shards, shard_by) for subject in subjects]
        return np.array(found, np.uint32)
    keys = [partition_key(subject, shard_by) for subject in subjects]
    return _hashes(keys) % np.uint32(shards)


def _hashes(keys: Sequence[bytes]) -> U32Array:
    """FNV-1a 32 of each key: byte by byte, of all keys that are that long at once."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths)
    starts, lengths = (ends - lengths)[order], lengths[order]
    heap = np.frombuffer(b"".join(keys), np.uint8).astype(np.uint32)
    values = np.full(len(keys), _OFFSET_BASIS, np.uint32)
    longest = int(lengths[0])
    # How many keys are longer than each place: those come first.
    reach = np.searchsorted(-lengths, -np.arange(longest), side="left").tolist()
    prime = np.uint32(_PRIME)
    for at, count in enumerate(reach):
        values[:count] = (values[:count] ^ heap[starts[:count] + at]) * prime
    hashed = np.empty_like(values)
    hashed[order] = values
    return hashed


def shard_of_filter(pattern: str, shards: int, shard_by: tuple[int, ...] = ()) -> int | None:
    """The one shard of everything that the filter ``pattern`` matches; None when there may be more.

    ``pattern`` may be literal. With wildcards it lies in one shard when they are at positions that
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
    return shard_of(pattern, shards, shard_by) if shard_by else None


def share(total: int, shards: int, part: int) -> int:
    """The part of shard ``part`` in a limit of the whole stream; the first shards have the rest.

    A limit below 0 (none) is none for each.
    """
    if total < 0:
        return total
    return total // shards + (part < total % shards)
