"""Names of subjects by slot, packed as Arrow packs texts: without an object for each name."""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contrail_common.texts import I64Array, Texts

CHUNK: Final = 1_024
"""Names that are packed together."""
_PIECE: Final = 16 * CHUNK
"""Slots whose names are copied together: with the longest names they take 64 MiB."""
_span_at: Final = Struct("<II").unpack_from
"""Two neighbouring offsets of a chunk: where one name begins and ends."""


class PackedNames(Sequence[str | None]):
    """Names by slot; None stands for a slot without a name.

    Names are only appended, by one thread. Other threads may read the names that it has appended.
    """

    __slots__ = ("_chunks", "_newest", "size")

    def __init__(self) -> None:
        # A missing name is an empty text here, because no subject is empty.
        self._chunks: list[Texts] = []
        self._newest: list[str | None] = []  # fewer than CHUNK, after those in the chunks
        self.size = 0
        """Number of slots."""

    @classmethod
    def of(cls, pieces: Iterable[pa.Array]) -> "PackedNames":
        """Return the names in ``pieces``; null and empty texts are missing names."""
        packer = Packer()
        for piece in pieces:
            packer.add(piece)
        return packer.finish()

    @overload
    def __getitem__(self, slot: int) -> str | None: ...

    @overload
    def __getitem__(self, slot: slice) -> list[str | None]: ...

    def __getitem__(self, slot: int | slice) -> str | list[str | None] | None:
        if isinstance(slot, slice):
            return [self[one] for one in range(*slot.indices(self.size))]
        if slot < 0:
            raise IndexError(slot)
        return self.at(slot)

    def at(self, slot: int) -> str | None:
        """The name of a slot, which must not be below zero."""
        # First the newest, then the chunks: see `_pack`.
        newest, chunks = self._newest, self._chunks
        number = slot // CHUNK
        if number < len(chunks):
            chunk = chunks[number]
            start, stop = _span_at(chunk.offsets, (slot - number * CHUNK) * 4)
            return chunk.heap[start:stop].decode() or None
        return newest[slot - len(chunks) * CHUNK]

    def holds(self, slot: int, name: str) -> bool:
        """Whether a slot, which must not be below zero, has this name."""
        newest, chunks = self._newest, self._chunks
        number = slot // CHUNK
        if number < len(chunks):
            chunk = chunks[number]
            start, stop = _span_at(chunk.offsets, (slot - number * CHUNK) * 4)
            return chunk.heap[start:stop] == name.encode()
        return newest[slot - len(chunks) * CHUNK] == name

    def __len__(self) -> int:
        return self.size

    @property
    def memory(self) -> Sequence[object]:
        """What takes the memory of the names, to be freed in pieces after the names."""
        return self._chunks

    def __iter__(self) -> Iterator[str | None]:
        done = 0
        # First the newest, then the chunks: see `_pack`.
        newest = self._newest
        while done < len(self._chunks):
            for name in self._chunks[done].each():
                yield name or None
            done += 1
            newest = self._newest
        yield from newest

    def append(self, name: str | None) -> None:
        """Add a slot with this name."""
        self._newest.append(name)
        self.size += 1
        if len(self._newest) == CHUNK:
            self._pack()

    def _pack(self) -> None:
        # First the chunk, then the list: so another thread finds each name in one of the two.
        self._chunks.append(Texts.of([name or "" for name in self._newest]))
        self._newest = []

    def array(self, low: int, high: int) -> pa.Array:
        """The names of the slots from ``low`` up to ``high``; a missing name is an empty text.

        Names of one chunk are not copied. All together must have less than 2 GiB.
        """
        newest, packed = self._newest, len(self._chunks)
        parts = []
        for number in range(low // CHUNK, min(-(-high // CHUNK), packed)):
            start = max(low - number * CHUNK, 0)
            stop = min(high - number * CHUNK, CHUNK)
            parts.append(text_array(self._chunks[number], start, stop))
        behind = newest[max(low - packed * CHUNK, 0) : max(high - packed * CHUNK, 0)]
        if behind or not parts:
            texts = Texts.of([name or "" for name in behind])
            parts.append(text_array(texts, 0, len(behind)))
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)

    def arrays(self, slots: I64Array) -> Iterator[pa.Array]:
        """Yield the names at ``slots``, in order. The slots should ascend, except in few places."""
        for run in np.split(slots, np.flatnonzero(slots[1:] < slots[:-1]) + 1):
            if not len(run):
                continue
            first = int(run[0]) - int(run[0]) % _PIECE
            starts = np.arange(first, int(run[-1]) + 1, _PIECE)
            cuts = [*run.searchsorted(starts).tolist(), len(run)]
            for at, start in enumerate(starts.tolist()):
                wanted = run[cuts[at] : cuts[at + 1]] - start
                if len(wanted):
                    names = self.array(start, start + int(wanted[-1]) + 1)
                    yield names if len(wanted) == len(names) else take(names, wanted)


class Packer:
    """Packs arrays of names."""

    def __init__(self) -> None:
        self._names = PackedNames()
        self._rest = text_array(Texts.of([]), 0, 0)  # fewer names than a chunk has

    def add(self, piece: pa.Array) -> None:
        """Add names; null and empty texts are missing names."""
        names = pa.concat_arrays([self._rest, piece]) if len(self._rest) else piece
        whole = len(names) - len(names) % CHUNK
        self._names._chunks += _chunks_of(names, whole)
        self._rest = names[whole:]

    def finish(self) -> PackedNames:
        """Return all names."""
        names = self._names
        names._newest = [name or None for name in self._rest.to_pylist()]
        names.size = len(names._chunks) * CHUNK + len(self._rest)
        return names


def text_array(texts: Texts, start: int, stop: int) -> pa.Array:
    """The texts from ``start`` up to ``stop`` as a string array, without a copy."""
    buffers = [None, pa.py_buffer(texts.offsets), pa.py_buffer(texts.heap)]
    return pa.Array.from_buffers(pa.string(), stop - start, buffers, offset=start)


def _chunks_of(names: pa.Array, count: int) -> Iterator[Texts]:
    if not count:
        return
    _, ends, heap = names.buffers()
    offsets = np.frombuffer(ends, np.uint32)[names.offset :]
    for at in range(0, count, CHUNK):
        part = offsets[at : at + CHUNK + 1]
        texts = heap[int(part[0]) : int(part[-1])].to_pybytes() if heap else b""
        yield Texts((part - part[0]).tobytes(), texts)


def take(names: pa.Array, at: I64Array) -> pa.Array:
    """The names at the positions ``at``; an empty text where the position is below zero."""
    known = at >= 0
    # Not pa.array: it imports pandas first, which takes a second if pandas is installed.
    bits = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    buffers = [bits, pa.py_buffer(at.astype(np.int32))]
    return pc.take(names, pa.Array.from_buffers(pa.int32(), len(at), buffers))
