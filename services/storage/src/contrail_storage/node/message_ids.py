"""Hashing message ids for the duplicate window: 128 bits, keyed per stream, a batch at a time.

Multilinear hashing with the stream's secret coefficients (Carter and Wegman's universal classes, in
the form of Lemire and Kaser, "Strongly universal string hashing is fast", 2014): whoever chose two
ids, they get the same 128 bits with a chance of 2^-128, as long as key and hashes stay inside. With
numpy it costs a fifth of a call of BLAKE2b for each id. It is the same in every process.
"""

import functools
import itertools
from hashlib import blake2b, shake_256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.texts import Texts
from contrail_storage.core.dedupe import ID_BYTES, NO_ID

_PART_BYTES: Final = 4
_PARTS: Final = ID_BYTES // _PART_BYTES
_DIRECT_BYTES_MAX: Final = 64
"""Longer ids are digested to as many bytes first."""
_WORDS_MAX: Final = _DIRECT_BYTES_MAX // _PART_BYTES


def hash_id(message_id: str, key: bytes) -> bytes:
    """The hash of one id; NO_ID for the empty one."""
    return hash_ids(Texts.of([message_id]), key) if message_id else NO_ID


def hash_ids(ids: Texts, key: bytes) -> bytes:
    """The hashes of the ids, 16 bytes each; NO_ID for the empty ones."""
    lengths = ids.lengths()
    heap = ids.heap
    stored = lengths
    if int(lengths.max()) > _DIRECT_BYTES_MAX:
        heap, stored = _digested(ids, key)
    words = -(-int(stored.max()) // _PART_BYTES)
    texts = np.zeros((len(lengths), words * _PART_BYTES), np.uint8)
    columns = np.arange(words * _PART_BYTES, dtype=np.uint8)
    texts[columns < stored.astype(np.uint8)[:, None]] = np.frombuffer(heap, np.uint8)
    terms = np.empty((len(lengths), 2 + words), np.uint64)
    terms[:, 0] = 1
    # The length tells apart ids that differ in zeros at the end, and long ids from their digests.
    terms[:, 1] = lengths
    terms[:, 2:] = texts.view(np.uint32)
    hashes = ((terms @ _coefficients(key)[: 2 + words]) >> np.uint64(32)).astype(np.uint32)
    hashes[lengths == 0] = 0
    return hashes.tobytes()


def _digested(ids: Texts, key: bytes) -> tuple[bytes, NDArray[np.int64]]:
    """Heap and lengths with a keyed digest in the place of each long id."""
    ends = np.frombuffer(ids.offsets, np.uint32).tolist()
    texts = [ids.heap[start:end] for start, end in itertools.pairwise(ends)]
    for at, text in enumerate(texts):
        if len(text) > _DIRECT_BYTES_MAX:
            texts[at] = blake2b(text, digest_size=_DIRECT_BYTES_MAX, key=key).digest()
    return b"".join(texts), np.fromiter(map(len, texts), np.int64, len(texts))


@functools.lru_cache(maxsize=1024)
def _coefficients(key: bytes) -> NDArray[np.uint64]:
    """Secret factors of the terms, a column for each part of a hash."""
    rows = 2 + _WORDS_MAX
    return np.frombuffer(shake_256(key).digest(8 * rows * _PARTS), np.uint64).reshape(rows, _PARTS)
