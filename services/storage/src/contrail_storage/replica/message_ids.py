"""Hashing message ids for the duplicate window: 128 bits, keyed per stream, a batch at a time.

Multilinear hashing with the stream's secret coefficients: Carter and Wegman's universal classes, in
the form of Lemire and Kaser, "Strongly universal string hashing is fast", 2014. Any two ids get the
same 128 bits with a probability of 2^-128, as long as key and hashes stay secret. With numpy it
takes a fifth of the time of a BLAKE2b call for each id. The result is the same in every process.
"""

import functools
import itertools
from hashlib import blake2b, shake_256
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import Texts
from contrail_storage.core.id_index import ID_BYTES, NO_ID

_PART_BYTES: Final = 4
_PARTS: Final = ID_BYTES // _PART_BYTES
_DIRECT_BYTES_MAX: Final = 64
"""Longer ids are first digested to this many bytes."""
_WORDS_MAX: Final = _DIRECT_BYTES_MAX // _PART_BYTES
_USED: Final = np.tri(_DIRECT_BYTES_MAX + 1, _DIRECT_BYTES_MAX, -1, np.bool_)
"""For each length, a mask of the bytes that a text of this length has."""


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
    words = _in_words(heap, stored, longest)
    hashes += words @ factors.words[: words.shape[1]]
    return hashes.view(np.uint32)[:, 1::2].tobytes()


def _in_words(heap: bytes, lengths: NDArray[np.int64], longest: int) -> NDArray[np.uint64]:
    """The texts in rows of 32-bit words, filled up with zeros."""
    row_bytes = -(-longest // _PART_BYTES) * _PART_BYTES
    rows = np.zeros((len(lengths), row_bytes), np.uint8)
    texts = np.frombuffer(heap, np.uint8)
    # Ids of one publisher often have the same length, and are then copied row by row.
    if len(texts) == len(lengths) * longest:
        rows[:, :longest] = texts.reshape(len(lengths), longest)
    else:
        rows[_USED[:, :row_bytes].take(lengths, 0)] = texts
    return rows.view(np.uint32).astype(np.uint64)


def _digested(ids: Texts, key: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """Replace each long id by a keyed digest; return heap and lengths."""
    ends = np.frombuffer(ids.offsets, np.uint32).tolist()
    texts = [ids.heap[start:end] for start, end in itertools.pairwise(ends)]
    # The cost of a hash grows with the longest id, and clients choose it.
    for at, text in enumerate(texts):
        if len(text) > _DIRECT_BYTES_MAX:
            texts[at] = blake2b(text, digest_size=_DIRECT_BYTES_MAX, key=key).digest()
    return b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts))


class _Factors(NamedTuple):
    """Secret factors of the terms, with a column for each part of a hash.

    ``by_length`` is the sum of constant and length term, for ids that are hashed undigested. The
    length distinguishes ids that differ in trailing zeros, and long ids from their digests. The
    empty id has the hash NO_ID.
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
    # So the empty id has the hash NO_ID, in any batch.
    by_length[0] = 0
    return _Factors(constant, length, np.array(words), by_length)
