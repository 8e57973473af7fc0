"""JSON and msgpack bodies: nesting bound, decoding, and errors as pointers into the body."""

import re
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.http.steps import at_once
from contrail_edge.inputs.json_steps import NESTING_MAX, nesting_in_steps

VALUES_MAX: Final = 4096
"""Values in the body of a management request; a configuration has far fewer.

Each may become an error, which takes a hundred times as long as to read it.
"""
_LOOKED_THROUGH_BYTES: Final = 1 << 20
"""Up to here a body of the wrong shape is read again, to tell whether it is JSON at all."""

_T_co = TypeVar("_T_co", covariant=True)

_QUOTE: Final = ord('"')
_NOT_VALUES: Final = bytes(set(range(256)) - set(b'",[{'))
_PATH: Final = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD: Final = re.compile(r"missing required field `([^`]*)`")

_untyped: Final = msgspec.json.Decoder()


class Decoder(Protocol[_T_co]):
    """A msgspec decoder, JSON or msgpack."""

    def decode(self, buf: bytes, /) -> _T_co:
        """The decoded value."""
        ...


def check_nesting(text: bytes, limit: int = NESTING_MAX) -> None:
    """Refuse JSON that nests arrays and objects deeper than ``limit`` (MALFORMED_BODY).

    Whether ``text`` is JSON at all is left to the decoder.
    """
    if text.count(b"[") + text.count(b"{") > limit:
        at_once(nesting_in_steps(text, limit))


def check_values(text: bytes, limit: int) -> None:
    """Refuse JSON of more than ``limit`` values (BODY_TOO_LARGE)."""
    if text.count(b",") + text.count(b"{") + text.count(b"[") < limit:
        return
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = np.frombuffer(unescaped.translate(None, _NOT_VALUES), np.uint8)
    outside = ~np.bitwise_xor.accumulate(structure == _QUOTE)
    if np.count_nonzero(outside & (structure != _QUOTE)) >= limit:
        raise ApiError(
            errors.BODY_TOO_LARGE, f"the body contains more than {limit} JSON values", applied=False
        )


def decode_untyped(body: bytes, values_max: int | None = None) -> Any:
    """The value of a JSON body within the bounds; MALFORMED_BODY and BODY_TOO_LARGE otherwise."""
    check_nesting(body)
    if values_max is not None:
        check_values(body, values_max)
    try:
        return _untyped.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def decode_json(decoder: Decoder[_T_co], body: bytes) -> _T_co:
    """A JSON body as the decoder's type.

    Raises MALFORMED_BODY for what is not JSON or nests too deep, and INVALID_FIELD with a JSON
    Pointer for JSON of another shape.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if len(body) <= _LOOKED_THROUGH_BYTES:
            decode_untyped(body)  # the wrong shape was met first, but is the rest JSON at all?
        raise mistyped(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def decode_part(decoder: Decoder[_T_co], part: bytes, at: str) -> _T_co:
    """A part of a body, JSON or msgpack, as the decoder's type; ``at`` points to it.

    Raises as :func:`decode_json`, but looks no further than to what is wrong first.
    """
    try:
        return decoder.decode(part)
    except msgspec.ValidationError as error:
        raise mistyped(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def malformed(error: Exception) -> ApiError:
    """The refusal of a body that is not what its Content-Type says."""
    return ApiError(errors.MALFORMED_BODY, str(error))


def mistyped(error: msgspec.ValidationError, at: str = "") -> ApiError:
    """The refusal of a value of the wrong shape, with its place as a JSON Pointer below ``at``."""
    found = _PATH.match(str(error))
    assert found is not None
    message = found["message"]
    pointer = at + json_pointer(found["path"] or "")
    named = _UNKNOWN_FIELD.search(message) or _MISSING_FIELD.search(message)
    if named is not None:
        pointer += "/" + escape_pointer(named[1])
    return ApiError(
        errors.INVALID_FIELD,
        f"{pointer}: {message}" if pointer else message,
        fields=[FieldProblem(pointer, message)],
    )


def json_pointer(path: str) -> str:
    """The JSON Pointer (RFC 6901) of a msgspec path such as ``$.messages[3].data``.

    A key of a mapping is not named by msgspec; the pointer then ends at the mapping.
    """
    pointer = ""
    for step in _PATH_STEP.finditer(path.partition("[...]")[0]):
        pointer += "/" + escape_pointer(step[1] if step[1] is not None else step[2])
    return pointer


def escape_pointer(token: str) -> str:
    """``token`` as one reference token of a JSON Pointer."""
    return token.replace("~", "~0").replace("/", "~1")
