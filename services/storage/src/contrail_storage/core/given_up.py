"""Messages that a consumer gave up on; they stay in the stream so that they can be inspected.

A stream with retention ``interest`` keeps them although they are no longer pending, whatever
other consumers acknowledge (JetStream keeps them by its redelivered state). They are removed by
limits, purges and deletes, with their consumer, and when ``max_deliver`` is raised.
"""

from collections.abc import Iterable, Iterator
from typing import Final

PAGE: Final = 1_024


class GivenUp:
    """A set of sequences: one bit each, in pages of 1,024, with about 200 bytes for a page in use.

    ``_pages`` has no empty page, and no sequence is below ``_low_seq``.
    """

    def __init__(self, pages: Iterable[tuple[int, bytes]] = ()) -> None:
        """The set whose pages :meth:`pages` listed."""
        self._pages: dict[int, int] = {}
        self._low_seq = 0
        self.take_up(pages)

    def __bool__(self) -> bool:
        return bool(self._pages)

    def __contains__(self, seq: int) -> bool:
        number, at = divmod(seq, PAGE)
        return bool(self._pages.get(number, 0) >> at & 1)

    def __iter__(self) -> Iterator[int]:
        for number, bits in sorted(self._pages.items()):
            yield from (number * PAGE + at for at in range(bits.bit_length()) if bits >> at & 1)

    def span(self) -> tuple[int, int]:
        """The lowest and the highest sequence; there must be one."""
        low, high = min(self._pages), max(self._pages)
        bits = self._pages[low]
        first = low * PAGE + (bits & -bits).bit_length() - 1
        return first, high * PAGE + self._pages[high].bit_length() - 1

    def add(self, seq: int) -> None:
        """Note a sequence."""
        number, at = divmod(seq, PAGE)
        self._pages[number] = self._pages.get(number, 0) | 1 << at
        # Only a lower bound: it spares `trim` a look at the pages while nothing is below.
        self._low_seq = min(self._low_seq, seq)

    def discard(self, seq: int) -> bool:
        """Remove a sequence; return whether it was in the set."""
        if seq not in self:
            return False
        number, at = divmod(seq, PAGE)
        self._pages[number] ^= 1 << at
        if not self._pages[number]:
            del self._pages[number]
        return True

    def trim(self, first_seq: int) -> None:
        """Remove the sequences below ``first_seq``."""
        if first_seq <= self._low_seq:
            return
        self._low_seq = first_seq
        number, at = divmod(first_seq, PAGE)
        for lower in [page for page in self._pages if page < number]:
            del self._pages[lower]
        left = self._pages.pop(number, 0) >> at << at
        if left:
            self._pages[number] = left

    def clear(self) -> None:
        """Remove all sequences."""
        self._pages.clear()

    def pages(self) -> list[tuple[int, bytes]]:
        """Number and bits of each page, ascending: bit i, little-endian, is the i-th sequence."""
        return [
            (number, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
            for number, bits in sorted(self._pages.items())
        ]

    def take_up(self, pages: Iterable[tuple[int, bytes]]) -> None:
        """Add the pages that :meth:`pages` listed; none of their sequences is here yet."""
        for number, row in pages:
            bits = int.from_bytes(row, "little")
            if bits:
                self._pages[number] = bits
                self._low_seq = 0


def pages_are_sound(pages: list[tuple[int, bytes]], last_seq: int) -> bool:
    """Whether untrusted pages ascend and have only sequences from 1 to ``last_seq``."""
    numbers = [number for number, _ in pages]
    ascend = all(low < high for low, high in zip([-1, *numbers], numbers, strict=False))
    return ascend and all(
        0 < len(row) <= PAGE // 8
        and number * PAGE + int.from_bytes(row, "little").bit_length() - 1 <= last_seq
        for number, row in pages
    )
