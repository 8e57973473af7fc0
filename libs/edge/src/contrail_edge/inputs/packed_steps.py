"""Large msgpack in steps: the positions of parts of arrays and maps, without decoding them."""

import re
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.json_body import malformed

WINDOW_BYTES: Final = 1 << 20
"""Bytes skipped in one step, which takes a few milliseconds at most.

Texts and bytes may be longer.
"""
PARTS_MAX: Final = 50_000
"""Maximum number of parts of one body: 10,000 messages and their fields."""

_DEPTH_MAX: Final = 8
"""Maximum depth of values that are longer than a window."""
_FIXED_TEXT: Final = range(0xA0, 0xC0)
_TEXT_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED_ARRAY: Final = range(0x90, 0xA0)
_ARRAY_LENGTH_BYTES: Final = {0xDC: 2, 0xDD: 4}
_FIXED_MAP: Final = range(0x80, 0x90)
_MAP_LENGTH_BYTES: Final = {0xDE: 2, 0xDF: 4}
_REST: Final = re.compile(r"trailing characters \(byte (\d+)\)")

_raw: Final = msgspec.msgpack.Decoder(msgspec.Raw)


class PackedParts:
    """The parts of one msgpack text."""

    def __init__(self, packed: bytes | memoryview) -> None:
        self._packed = memoryview(packed)
        self._left = PARTS_MAX

    def array(self, at: int) -> tuple[int, int] | None:
        """Return the length of the array at ``at`` and its first element's position, or None."""
        return self._count(at, _FIXED_ARRAY, _ARRAY_LENGTH_BYTES)

    def map(self, at: int) -> tuple[int, int] | None:
        """Return the size of the map at ``at`` and its first entry's position, or None."""
        return self._count(at, _FIXED_MAP, _MAP_LENGTH_BYTES)

    def spans(self, at: int, count: int) -> Steps[list[tuple[int, int]]]:
        """Return the spans of ``count`` values from ``at`` on: first byte, byte after the last.

        Raises BODY_TOO_LARGE, and MALFORMED_BODY if it is not msgpack.
        """
        found = []
        for _ in range(count):
            end = yield from self._end(at)
            found.append((at, end))
            at = end
        return found

    def _end(self, at: int, depth: int = 0) -> Steps[int]:
        self._left -= 1
        if self._left < 0 or depth > _DEPTH_MAX:
            raise ApiError(errors.BODY_TOO_LARGE, "too many values", applied=False)
        yield
        packed = self._packed
        text = self._count(at, _FIXED_TEXT, _TEXT_LENGTH_BYTES)
        if text is not None:
            length, start = text
            if start + length > len(packed):
                raise ApiError(errors.MALFORMED_BODY, "Input data was truncated")
            return start + length
        # msgspec does not return where a value ends, but its error for what follows the value does.
        try:
            _raw.decode(packed[at : at + WINDOW_BYTES])
        except (msgspec.DecodeError, RecursionError) as error:
            rest = _REST.search(str(error))
            if rest is not None:
                return at + int(rest[1])
            if isinstance(error, RecursionError) or at + WINDOW_BYTES >= len(packed):
                raise malformed(error) from None
        else:
            return min(at + WINDOW_BYTES, len(packed))
        inner = self.array(at)
        if inner is None:
            entries = self.map(at)
            if entries is None:
                raise ApiError(errors.BODY_TOO_LARGE, "a value is too long", applied=False)
            inner = 2 * entries[0], entries[1]
        count, end = inner
        for _ in range(count):
            end = yield from self._end(end, depth + 1)
        return end

    def _count(self, at: int, fixed: range, wide: dict[int, int]) -> tuple[int, int] | None:
        """Return the length in the head at ``at`` and the end of the head, or None."""
        if at >= len(self._packed):
            return None
        first = self._packed[at]
        if first in fixed:
            return first - fixed.start, at + 1
        width = wide.get(first)
        if width is None or at + 1 + width > len(self._packed):
            return None
        return int.from_bytes(self._packed[at + 1 : at + 1 + width]), at + 1 + width
