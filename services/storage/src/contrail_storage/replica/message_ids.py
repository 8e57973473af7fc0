"""Hashing message ids for the duplicate window: 128 bits, keyed per stream, a batch at a time.

Multilinear hashing with the stream's secret coefficients (Carter and Wegman's universal classes, in
the form of Lemire and Kaser, "Strongly universal string hashing is fast", 2014): whoever chose two
ids, they get the same 128 bits with a chance of 2^-128, as long as key and hashes stay inside. With
numpy it costs a fifth of a call of BLAKE2b for each id. It is the same in every process.
"""

import functools
import itertools
from hashlib import blake2b, shake_256
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import Texts
from contrail_storage.core.dedupe import ID_BYTES, NO_ID

_PART_BYTES: Final = 4
_PARTS: Final = ID_BYTES // _PART_BYTES
_DIRECT_BYTES_MAX: Final = 64
"""Longer ids are digested to as many bytes first."""
_WORDS_MAX: Final = _DIRECT_BYTES_MAX // _PART_BYTES
_USED: Final = np.tri(_DIRECT_BYTES_MAX + 1, _DIRECT_BYTES_MAX, -1, np.bool_)
"""The bytes that a text of each length has."""


def hash_id(message_id: str, key: bytes) -> bytes:
    """The hash of one id; NO_ID for the empty one."""
    return hash_ids(Texts.of([message_id]), key) if message_id else NO_ID


def hash_ids(ids: Texts, key: bytes) -> bytes:
    """The hashes of the ids, 16 bytes each; NO_ID for the empty ones."""
    lengths = ids.lengths()
    longest = int(lengths.max())
    factors = _factors(key)
    if longest > _DIRECT_BYTES_MAX:
        heap, stored = _digested(ids, key)
        hashes = lengths.astype(np.uint64)[:, None] * factors.length + factors.constant
        hashes[lengths == 0] = 0
        longest = int(stored.max())
    else:
        heap, stored = ids.heap, lengths
        hashes = factors.by_length.take(lengths, 0)
    words = -(-longest // _PART_BYTES)
    texts = np.zeros((len(lengths), words * _PART_BYTES), np.uint8)
    used = _USED[:, : words * _PART_BYTES].take(stored, 0)
    texts[used] = np.frombuffer(heap, np.uint8)
    hashes += texts.view(np.uint32).astype(np.uint64) @ factors.words[:words]
    return hashes.view(np.uint32)[:, 1::2].tobytes()


def _digested(ids: Texts, key: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """Heap and lengths with a keyed digest in the place of each long id."""
    ends = np.frombuffer(ids.offsets, np.uint32).tolist()
    texts = [ids.heap[start:end] for start, end in itertools.pairwise(ends)]
    for at, text in enumerate(texts):
        if len(text) > _DIRECT_BYTES_MAX:
            texts[at] = blake2b(text, digest_size=_DIRECT_BYTES_MAX, key=key).digest()
    return b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts))


class _Factors(NamedTuple):
    """Secret factors of the terms, a column for each part of a hash.

    ``by_length`` is what constant and length come to in ids that are hashed as they are: the length
    tells apart ids that differ in zeros at the end, and long ids from their digests. NO_ID is the
    hash of the empty one.
    """

    constant: NDArray[np.uint64]
    length: NDArray[np.uint64]
    words: NDArray[np.uint64]
    by_length: NDArray[np.uint64]


@functools.lru_cache(maxsize=1024)
def _factors(key: bytes) -> _Factors:
    digest = shake_256(key).digest(8 * (2 + _WORDS_MAX) * _PARTS)
    constant, length, *words = np.frombuffer(digest, np.uint64).reshape(-1, _PARTS)
    lengths = np.arange(_DIRECT_BYTES_MAX + 1, dtype=np.uint64)
    by_length = lengths[:, None] * length + constant
    by_length[0] = 0
    return _Factors(constant, length, np.array(words), by_length)
