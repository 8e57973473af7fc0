"""Sealing the content of messages with the keys of their subjects, and opening it again.

AES-256-GCM with a random nonce of 96 bits for each message. The standard allows 2^32 messages under
one key (NIST SP 800-38D, 8.3). Content is bound to the id of its key.
"""

import os
from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray

from contrail_common.columns.blocks import Block, BlockCorruptError, MessageColumns, columns_of
from contrail_common.columns.sealed_columns import (
    NONCE_BYTES,
    NOT_SEALED,
    TAG_BYTES,
    CellBrokenError,
    Seals,
    content_of,
    plain_cell,
)
from contrail_common.model import Headers, StoredMessage
from contrail_common.texts import as_u32
from contrail_storage.seal.key_file import SubjectKeysDamagedError
from contrail_storage.seal.shared_keys import SHARED, SharedKeys
from contrail_storage.seal.subject_keys import SubjectKey, SubjectKeys


class ContentBrokenError(BlockCorruptError):
    """Sealed content does not open although its key exists."""

    base_seq = 0
    """The first sequence of the damaged block, set by readers of several blocks; else 0."""


def seal_columns(
    columns: MessageColumns, index: Sequence[int], keys: Sequence[SubjectKey]
) -> MessageColumns:
    """Return ``columns`` sealed. Message ``n`` is sealed with the key ``keys[index[n]]``."""
    count = columns.count
    headers = [None] * count if columns.headers is None else columns.headers.each()
    ends = as_u32(columns.offsets).tolist()
    # One call for all messages; each would be a system call.
    nonces = os.urandom(NONCE_BYTES * count)
    cells: list[bytes] = []
    ids: list[int] = []
    for at in range(count):
        cell = plain_cell(headers[at], columns.payload[ends[at] : ends[at + 1]])
        key_id = NOT_SEALED
        # An empty message has nothing to hide. It needs no key, so it survives the erasure of its
        # subject until it is removed.
        if cell:
            key_id, name, cipher = keys[index[at]]
            nonce = nonces[NONCE_BYTES * at : NONCE_BYTES * (at + 1)]
            cell = nonce + cipher.encrypt(nonce, cell, name)
        cells.append(cell)
        ids.append(key_id)
    sealed = columns_of(cells, None)
    sealed.seals = Seals.of(ids, columns.sizes())
    return sealed


class ContentOpener:
    """Opens content sealed with subject keys. Thread-safe; may read the key file.

    Every method that opens content may raise ContentBrokenError, and NOT_READY while this node has
    yet to get a shared key.
    """

    def __init__(self, keys: SubjectKeys | None, shared: SharedKeys | None = None) -> None:
        """``keys`` are those of this node alone."""
        self._keys = keys
        self._shared = shared

    def gone(self, columns: MessageColumns) -> NDArray[np.bool_] | None:
        """The messages whose keys were destroyed, as a mask; None if there are none.

        A shared key is destroyed after its messages are removed, so no mask is needed for those.
        """
        if columns.seals is None or self._keys is None:
            return None
        gone = self._keys.gone(columns.seals.key_ids)
        return gone if gone.any() else None

    def message(
        self, shard_id: int, block: Block, position: int, subject: str
    ) -> StoredMessage | None:
        """The message at ``position``; None when its key was destroyed."""
        columns = block.columns
        if columns.seals is None:
            return block.message(position, subject)
        offsets = as_u32(columns.offsets)
        cell = columns.payload[offsets[position] : offsets[position + 1]]
        found = self._content(shard_id, cell, int(columns.seals.key_ids[position]))
        if found is None:
            return None
        time_ns = int(block.times_ns[position])
        return StoredMessage(block.base_seq + position, subject, time_ns, *found)

    def columns(
        self, shard_id: int, columns: MessageColumns, wanted: Iterable[int] | None = None
    ) -> tuple[MessageColumns, list[int]]:
        """Plain columns, and the positions of messages whose keys were destroyed.

        These, and all that are not ``wanted`` (None: all are), are blank.
        """
        if columns.seals is None:
            return columns, []
        payloads = [b""] * columns.count
        headers: list[Headers | None] = [None] * columns.count
        gone: list[int] = []
        ids, ends = columns.seals.key_ids.tolist(), as_u32(columns.offsets).tolist()
        heap = columns.payload
        for at in range(columns.count) if wanted is None else wanted:
            cell = heap[ends[at] : ends[at + 1]]
            found = self._content(shard_id, cell, ids[at])
            if found is None:
                gone.append(at)
            else:
                headers[at], payloads[at] = found
        return columns_of(payloads, headers), gone

    def _content(
        self, shard_id: int, cell: bytes, key_id: int
    ) -> tuple[Headers | None, bytes] | None:
        """Headers and payload of a message; None when its key was destroyed."""
        try:
            if key_id != NOT_SEALED:
                key = self._key(shard_id, key_id)
                if key is None:
                    return None
                if len(cell) < NONCE_BYTES + TAG_BYTES:
                    raise ContentBrokenError(f"{len(cell)} bytes are too few for encrypted content")
                cell = key.cipher.decrypt(cell[:NONCE_BYTES], cell[NONCE_BYTES:], key.name)
            return content_of(cell)
        except InvalidTag:
            raise ContentBrokenError(
                "encrypted content was modified, or belongs to another key"
            ) from None
        except (CellBrokenError, SubjectKeysDamagedError) as error:
            raise ContentBrokenError(str(error)) from error

    def _key(self, shard_id: int, key_id: int) -> SubjectKey | None:
        if key_id >= SHARED and self._shared is not None:
            return self._shared.opening_of(shard_id, key_id)
        if self._keys is None:
            raise SubjectKeysDamagedError("there are no subject keys")
        return self._keys.opening(key_id)
