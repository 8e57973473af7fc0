"""Large JSON in slices: its nesting, the positions of its parts, and removing its white space.

The time for a slice does not depend on its contents. Nothing here checks that the text is JSON. The
decoder does that, and sees every byte of a text except the commas between its parts.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.steps import Steps

NESTING_MAX: Final = 64
CONTAINERS_MAX: Final = 64
"""Maximum number of arrays and objects on the wanted level; messages have less than a tenth."""

_SLICE_BYTES: Final = 128 << 10
"""Size of a slice, which takes a few milliseconds at most."""
_QUOTE: Final = ord('"')
_COMMA: Final = ord(",")


def _table(marked: dict[bytes, int]) -> NDArray[np.int8]:
    table = np.zeros(256, np.int8)
    for chars, value in marked.items():
        table[list(chars)] = value
    return table


_STEP: Final = _table({b"[{": 1, b"]}": -1})
_IS_STRUCTURE: Final = _table({b'",[]{}': 1}).astype(np.bool_)
_IS_BARE: Final = _table({b'",:[]{} \t\r\n': 1}) == 0
_IS_BLANK: Final = _table({b" \t\r\n": 1}).astype(np.bool_)


@dataclass(frozen=True, slots=True)
class _Structure:
    """The brackets and commas of a slice: positions, characters, and the depth after each."""

    positions: NDArray[np.int64]
    chars: NDArray[np.uint8]
    depths: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Outline:
    """A text in parts.

    ``skeleton`` is the text without the contents of its arrays and objects on one level. For each
    of these, ``inner`` has the spans (first byte, byte after the last) of its elements, in order
    and with white space.
    """

    skeleton: bytes
    inner: list[list[tuple[int, int]]]


def _slices(text: bytes) -> Iterator[tuple[int, bytes, NDArray[np.uint8]]]:
    """Yield the position of each slice, its bytes, and the same without escaped quotes."""
    start = 0
    while start < len(text):
        part = text[start : start + _SLICE_BYTES]
        # An odd number of backslashes at the end: the last one escapes the first byte after the
        # slice.
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the slice would end inside an escape
            part = text[start : start + _SLICE_BYTES + 1]
        plain = part
        if b"\\" in part:
            plain = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield start, part, np.frombuffer(plain, np.uint8)
        start += len(part)


def _structure(text: bytes, limit: int) -> Iterator[_Structure]:
    """Yield the structure of each slice; raise MALFORMED_BODY if it is deeper than ``limit``."""
    depth, in_string = 0, False
    for start, _, plain in _slices(text):
        positions = np.flatnonzero(_IS_STRUCTURE[plain])
        chars = plain[positions]
        # Each quote begins or ends a string: a running parity says where strings are.
        inside = np.bitwise_xor.accumulate(chars == _QUOTE) ^ in_string
        depths = np.cumsum(np.where(inside, 0, _STEP[chars]), dtype=np.int32) + depth
        if chars.size:
            if depths.max() > limit:
                raise ApiError(
                    errors.MALFORMED_BODY, f"the JSON is nested deeper than {limit} levels"
                )
            depth, in_string = int(depths[-1]), bool(inside[-1])
        outside = ~inside & (chars != _QUOTE)
        yield _Structure(positions[outside] + start, chars[outside], depths[outside])


def nesting_in_steps(text: bytes, limit: int = NESTING_MAX) -> Steps[None]:
    """Refuse JSON that nests arrays and objects deeper than ``limit`` (MALFORMED_BODY)."""
    for _ in _structure(text, limit):
        yield


def count_values(text: bytes) -> Steps[int]:
    """Count arrays, objects and commas; there is at most one value more."""
    count = 0
    for found in _structure(text, NESTING_MAX):
        count += int(np.count_nonzero(_STEP[found.chars] >= 0))
        yield
    return count


def outline(text: bytes, level: int, most: int | None = None, of: str = "") -> Steps[Outline]:
    """Cut ``text`` at its arrays and objects inside of ``level`` brackets.

    With ``most``, their contents are also cut at commas. Raises BATCH_TOO_LARGE as soon as there
    are more parts than that; ``of`` names them in the error. Without it, each is one part.
    """
    cuts: list[tuple[int, int]] = []
    parts = containers = 0
    for found in _structure(text, NESTING_MAX):
        step = _STEP[found.chars]
        opens = (step == 1) & (found.depths == level)
        cut = opens | ((step == -1) & (found.depths == level - 1))
        containers += int(np.count_nonzero(opens))
        if containers > CONTAINERS_MAX:
            raise ApiError(errors.MALFORMED_BODY, "too many arrays and objects", applied=False)
        if most is not None:
            commas = (step == 0) & (found.depths == level)
            parts += int(np.count_nonzero(commas))
            if parts >= most:
                raise ApiError(errors.BATCH_TOO_LARGE, f"the limit is {most} {of}", applied=False)
            cut |= commas
        cuts += zip(found.positions[cut].tolist(), step[cut].tolist(), strict=True)
        yield
    return _cut(text, cuts)


def _cut(text: bytes, cuts: list[tuple[int, int]]) -> Outline:
    kept: list[bytes] = []
    inner: list[list[tuple[int, int]]] = []
    behind = 0
    opened = False
    for at, step in cuts:
        if step == 1:
            kept.append(text[behind : at + 1])
            inner.append([])
            opened = True
        elif opened:  # the decoder refuses a bracket that closes without having been opened
            inner[-1].append((behind, at))
            opened = step == 0
            if not opened:
                behind = at
                continue
        else:
            continue
        behind = at + 1
    if opened:
        raise ApiError(errors.MALFORMED_BODY, "an array or object is not closed", applied=False)
    kept.append(text[behind:])
    for spans in inner:
        if len(spans) == 1 and not text[slice(*spans[0])].strip():
            spans.clear()
    return Outline(b"".join(kept), inner)


def compact(value: bytes) -> Steps[bytes]:
    """Return ``value`` without the white space outside of its strings.

    Raises MALFORMED_BODY if only white space separates two values, as in ``1 2``, because they
    would become one value.
    """
    kept: list[bytes] = []
    in_string = bare = blank_before = False
    for _, part, plain in _slices(value):
        inside = np.bitwise_xor.accumulate(plain == _QUOTE) ^ in_string
        in_string = bool(inside[-1])
        blank = _IS_BLANK[plain] & ~inside
        staying = np.flatnonzero(~blank)
        if staying.size:
            # Bytes of numbers and words. Two of them with white space in between would become one.
            bares = _IS_BARE[plain[staying]] & ~inside[staying]
            parted = np.diff(staying, prepend=-1) > 1
            parted[0] |= blank_before
            if np.any(bares & parted & np.concatenate(([bare], bares[:-1]))):
                raise ApiError(errors.MALFORMED_BODY, "two JSON values without a comma")
            bare = bool(bares[-1])
        blank_before = bool(blank[-1])
        kept.append(np.frombuffer(part, np.uint8)[staying].tobytes() if blank.any() else part)
        yield
    return b"".join(kept)


def check_utf8(text: bytes) -> Steps[None]:
    """Raise UnicodeDecodeError if ``text`` is not UTF-8."""
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _SLICE_BYTES):
        decoder.decode(text[start : start + _SLICE_BYTES])
        yield
    decoder.decode(b"", final=True)
