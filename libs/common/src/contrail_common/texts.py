"""Columns of texts: the bytes of all of them, and the offsets at which each begins and ends.

Offsets are Arrow's: ``n + 1`` ascending u32 from 0, in the byte order of the machine (little).
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

_FEW: Final = [struct.Struct(f"<{count + 1}I") for count in range(17)]
"""Offsets of up to 16 elements. Below that, numpy's calls cost more than the work they save."""

_SPACE: Final = np.uint8(0x20)
_DELETE: Final = np.uint8(0x7F)
_CONTINUATION: Final = 0b1000_0000
"""The two high bits of a byte of UTF-8 that does not begin a character."""

U32Array = NDArray[np.uint32]
I64Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
"""One element for each of several things: true for those that are meant."""


class Texts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``n`` texts: ``offsets`` (u32[n + 1]) into ``heap``, the UTF-8 of all of them."""

    offsets: bytes
    heap: bytes

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Texts":
        """Return ``texts`` as a column."""
        heap = "".join(texts)
        if heap.isascii():
            return cls(offsets_of(map(len, texts), len(texts)), heap.encode())
        encoded = [text.encode() for text in texts]
        return cls(offsets_of(map(len, encoded), len(encoded)), b"".join(encoded))

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self.offsets) // 4 - 1

    def lengths(self) -> I64Array:
        """Return the bytes of each text."""
        return lengths_of(self.offsets)

    def are_printable(self) -> bool:
        """Return True if ``str.isprintable`` is true for every text."""
        # For ASCII, the usual case, this takes a tenth of the time. The subtraction wraps, so that
        # control characters below the space become high numbers.
        codes = np.frombuffer(self.heap, np.uint8) - _SPACE
        ascii_alone = bool((codes < _DELETE - _SPACE).all())
        return ascii_alone or self.heap.decode().isprintable()

    def each(self) -> list[str]:
        """Return the texts."""
        heap, spans = self.heap, pairwise(as_u32(self.offsets).tolist())
        if heap.isascii():
            text = heap.decode()
            return [text[start:stop] for start, stop in spans]
        return [heap[start:stop].decode() for start, stop in spans]

    def slice(self, start: int, stop: int) -> "Texts":
        """Return the texts from ``start`` up to ``stop``."""
        if stop - start == self.count:
            return self
        return Texts(*cut(self.offsets, start, stop, self.heap))

    def select(self, positions: I64Array) -> "Texts":
        """Return the texts at ``positions``."""
        offsets, within = pick(self.offsets, positions)
        return Texts(offsets, gather(self.heap, within))

    def is_sound(self, count: int) -> bool:
        """Return True if there are ``count`` texts, each of them UTF-8."""
        heap = self.heap
        return are_offsets(self.offsets, count, len(heap)) and (
            heap.isascii() or is_utf8(heap, self.offsets)
        )


def join_texts(parts: Sequence[Texts]) -> Texts:
    """Return the texts of all ``parts``, one part after another."""
    return Texts(
        join_offsets([part.offsets for part in parts]), b"".join([part.heap for part in parts])
    )


def as_u32(data: bytes | memoryview) -> U32Array:
    """Return ``data`` as an array, without a copy."""
    return np.frombuffer(data, np.uint32)


def offsets_of(lengths: Iterable[int], count: int) -> bytes:
    """Return the offsets of ``count`` elements with these ``lengths``."""
    if count < len(_FEW):
        return _FEW[count].pack(0, *accumulate(lengths))
    offsets = np.zeros(count + 1, np.uint32)
    np.cumsum(np.fromiter(lengths, np.uint32, count), out=offsets[1:])
    return offsets.tobytes()


def lengths_of(offsets: bytes) -> I64Array:
    """Return the lengths of the elements."""
    ends = as_u32(offsets).astype(np.int64)
    lengths: I64Array = ends[1:] - ends[:-1]
    return lengths


def are_offsets(data: bytes, count: int, end: int) -> bool:
    """Return True if ``data`` has ``count + 1`` ascending offsets from 0 to ``end``."""
    if min(count, end) < 0 or len(data) != 4 * (count + 1):
        return False
    # Most batches have one message.
    if count == 1:
        return data == _FEW[1].pack(0, end)
    if count < len(_FEW):
        few = _FEW[count].unpack(data)
        return few[0] == 0 and few[-1] == end and few == tuple(sorted(few))
    offsets = as_u32(data)
    return (
        int(offsets[0]) == 0
        and int(offsets[-1]) == end
        # Numpy's functions for it are written in Python, and take a third longer.
        and 1 not in (offsets[1:] < offsets[:-1]).tobytes()
    )


def is_utf8(heap: bytes, offsets: bytes) -> bool:
    """Return True if ``heap`` is UTF-8 and no offset is inside a character."""
    if heap.isascii():
        return True
    try:
        heap.decode()
    except UnicodeDecodeError:
        return False
    # The whole may be UTF-8 although an offset cuts a character in two.
    starts = as_u32(offsets)
    first = np.frombuffer(heap, np.uint8)[starts[starts < len(heap)]]
    return not bool((first & 0b1100_0000 == _CONTINUATION).any())


def cut_offsets(offsets: bytes, start: int, stop: int) -> tuple[bytes, int, int]:
    """Return the offsets of the elements from ``start`` up to ``stop``, and where they are."""
    part = as_u32(offsets)[start : stop + 1]
    return (part - part[0]).tobytes(), int(part[0]), int(part[-1])


def cut(offsets: bytes, start: int, stop: int, heap: bytes) -> tuple[bytes, bytes]:
    """Return offsets and bytes of the elements from ``start`` up to ``stop``."""
    part, low, high = cut_offsets(offsets, start, stop)
    return part, heap[low:high]


def chosen(offsets: bytes, positions: I64Array, heap: bytes) -> tuple[bytes, bytes]:
    """Return offsets and bytes of the elements at ``positions``.

    Neighbours are copied as one, others one by one. For elements of more than 60 bytes or so, this
    is faster than :func:`pick` and :func:`gather`, which handle each byte.
    """
    ends = as_u32(offsets)
    starts, stops = ends[:-1][positions], ends[1:][positions]
    picked = np.zeros(len(positions) + 1, np.uint32)
    np.cumsum(stops - starts, out=picked[1:])
    if not len(positions):
        return picked.tobytes(), b""
    apart = starts[1:] != stops[:-1]
    spans = zip(
        starts[np.append(True, apart)].tolist(),
        stops[np.append(apart, True)].tolist(),
        strict=True,
    )
    return picked.tobytes(), b"".join([heap[start:stop] for start, stop in spans])


def pick(offsets: bytes, positions: I64Array) -> tuple[bytes, I64Array]:
    """Return the offsets of the elements at ``positions``, and the places of all their bytes."""
    starts = as_u32(offsets).astype(np.int64)
    lengths = (starts[1:] - starts[:-1])[positions]
    ends = np.cumsum(lengths)
    picked = np.zeros(len(positions) + 1, np.uint32)
    picked[1:] = ends
    moved = np.repeat(starts[positions] - (ends - lengths), lengths)
    return picked.tobytes(), moved + np.arange(len(moved))


def gather(heap: bytes, indices: I64Array) -> bytes:
    """Return the bytes at ``indices``."""
    return np.frombuffer(heap, np.uint8)[indices].tobytes()


def join_offsets(parts: Sequence[bytes]) -> bytes:
    """Return the offsets of all ``parts``, one part after another."""
    base = np.uint32(0)
    joined = [bytes(4)]
    for part in map(as_u32, parts):
        joined.append((part[1:] + base).tobytes())
        base += part[-1]
    return b"".join(joined)
