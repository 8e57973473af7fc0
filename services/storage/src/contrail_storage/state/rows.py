"""The rows of a group's state, and how they become pieces of bytes and rows again."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from crc32c import crc32c

from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import META_SHARD
from contrail_storage.store.rocks_store import Operation

PIECE_BYTES: Final = (1 << 20) - 1_024
"""What is sent at once. A row may be in several pieces."""
# The groups of shards first: an install that ends early leaves no rows of an unknown shard.
_SHARD_KINDS: Final = (
    keys.GROUP,
    *(kind for kind in keys.SHARD_KINDS if kind not in (keys.GROUP, keys.STOPPED)),
)
_ROW: Final = struct.Struct("<II")
_END: Final = struct.Struct("<QI")
_MORE, _LAST = b"\1", b"\0"

Bytes = bytes | memoryview
Row = tuple[bytes, bytes]
"""Key and value."""


class BrokenStateError(Exception):
    """What was fetched is not what was sent."""


def prefixes(group: int, shard_ids: Sequence[int]) -> Iterator[bytes]:
    """The prefixes of all rows of a group with these shards, in the order of sending."""
    if group == keys.META_GROUP:
        yield from (keys.shard_key(kind, META_SHARD) for kind in keys.META_KINDS)
        return
    for kind in _SHARD_KINDS:
        yield from (keys.shard_key(kind, shard_id) for shard_id in shard_ids)


def removals(group: int, shard_ids: Iterable[int]) -> Iterator[list[tuple[bytes, bytes]]]:
    """The ranges of keys that a group has, those of each shard together."""
    if group == keys.META_GROUP:
        yield [_range(keys.shard_key(kind, META_SHARD)) for kind in keys.META_KINDS]
        return
    for shard_id in shard_ids:
        yield [_range(keys.shard_key(kind, shard_id)) for kind in keys.SHARD_KINDS]


def _range(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, keys.prefix_end(prefix)


def shards_of(group: int, rows: Iterable[Row]) -> list[int]:
    """The shards of a group on disk, by the rows of kind `GROUP`."""
    found = ((keys.last_number(key, 4), int.from_bytes(value, "big")) for key, value in rows)
    return sorted(shard for shard, home in found if home == group and not keys.is_in_memory(shard))


def packed(rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the rows in pieces of up to `PIECE_BYTES`, and an end that proves all of them."""
    # Parts of the next piece, and their bytes.
    held: list[Bytes] = []
    size = count = check = 0
    for key, value in rows:
        count += 1
        for part in (_ROW.pack(len(key), len(value)) + key, value):
            rest: Bytes = part
            while size + len(rest) >= PIECE_BYTES:
                view = memoryview(rest)
                held.append(view[: PIECE_BYTES - size])
                rest = view[PIECE_BYTES - size :]
                piece, check = _piece(held, check)
                yield piece
                held, size = [], 0
            held.append(rest)
            size += len(rest)
    if size:
        piece, check = _piece(held, check)
        yield piece
    yield _LAST + _END.pack(count, check)


def _piece(parts: list[Bytes], check: int) -> tuple[bytes, int]:
    piece = b"".join([_MORE, *parts])
    return piece, crc32c(memoryview(piece)[1:], check)


class Unpacking:
    """Makes rows of pieces, which come in order."""

    def __init__(self, group: int) -> None:
        self._kinds = keys.META_KINDS if group == keys.META_GROUP else _SHARD_KINDS
        # What belongs to a row whose end is missing.
        self._held = bytearray()
        self._count = self._check = 0
        self.complete = False
        """Whether all rows are there."""

    def operations_of(self, piece: bytes) -> list[Operation]:
        """What writes the rows that end in a piece. Raises BrokenStateError."""
        body = memoryview(piece)[1:]
        if piece[:1] == _LAST and len(body) == _END.size:
            if self._held or _END.unpack(body) != (self._count, self._check):
                raise BrokenStateError("rows are missing")
            self.complete = True
            return []
        if piece[:1] != _MORE or self.complete:
            raise BrokenStateError("this is no piece of a state")
        self._check = crc32c(body, self._check)
        self._held += body
        rows: list[Operation] = []
        at = 0
        while len(self._held) - at >= _ROW.size:
            key_bytes, value_bytes = _ROW.unpack_from(self._held, at)
            value_at = at + _ROW.size + key_bytes
            end = value_at + value_bytes
            if end > len(self._held):
                break
            key = bytes(self._held[at + _ROW.size : value_at])
            if key[:1] not in self._kinds:
                raise BrokenStateError(f"a row of kind {key[:1]!r} does not belong to the group")
            rows.append(("put", key, bytes(self._held[value_at:end])))
            at = end
        del self._held[:at]
        self._count += len(rows)
        return rows
