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
"""Maximum number of values in the body of a management request; a configuration has far fewer.

Each value may cause an error, and reporting it takes a hundred times as long as reading the value.
"""
_UNSLICED_BYTES: Final = 1 << 20
"""A body of the wrong shape is read again up to this size, to find out if it is JSON at all."""

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

    def decode(self, buf: bytes | memoryview, /) -> _T_co:
        """Return the decoded value."""
        ...


def check_nesting(text: bytes, limit: int = NESTING_MAX) -> None:
    """Refuse JSON that nests arrays and objects deeper than ``limit`` (MALFORMED_BODY).

    Only the decoder checks that ``text`` is JSON.
    """
    # Fewer brackets than levels cannot nest too deeply. That is true of almost every body.
    if text.count(b"[") + text.count(b"{") > limit:
        at_once(nesting_in_steps(text, limit))


def check_values(text: bytes, limit: int) -> None:
    """Refuse JSON of more than ``limit`` values (BODY_TOO_LARGE)."""
    if text.count(b",") + text.count(b"{") + text.count(b"[") < limit:
        return
    # Characters inside strings were counted too, so count again without them.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = np.frombuffer(unescaped.translate(None, _NOT_VALUES), np.uint8)
    outside = ~np.bitwise_xor.accumulate(structure == _QUOTE)
    if np.count_nonzero(outside & (structure != _QUOTE)) >= limit:
        raise ApiError(
            errors.BODY_TOO_LARGE, f"the body contains more than {limit} JSON values", applied=False
        )


def decode_untyped(body: bytes, values_max: int | None = None) -> Any:
    """Decode a JSON body; raise MALFORMED_BODY, or BODY_TOO_LARGE above ``values_max`` values."""
    check_nesting(body)
    if values_max is not None:
        check_values(body, values_max)
    try:
        return _untyped.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def decode_json(decoder: Decoder[_T_co], body: bytes) -> _T_co:
    """Decode a JSON body.

    Raises MALFORMED_BODY if it is not JSON or nested too deeply, and INVALID_FIELD with a JSON
    Pointer if it has another shape than the decoder's type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if len(body) <= _UNSLICED_BYTES:
            decode_untyped(body)  # raises MALFORMED_BODY if the rest is not JSON
        raise mistyped(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def decode_part(decoder: Decoder[_T_co], part: bytes | memoryview, at: str) -> _T_co:
    """Decode a part of a body, JSON or msgpack; ``at`` is its JSON Pointer.

    Raises the errors of :func:`decode_json`, but only looks at the part up to the first error.
    """
    try:
        return decoder.decode(part)
    except msgspec.ValidationError as error:
        raise mistyped(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None


def malformed(error: Exception) -> ApiError:
    """Return the error for a body that does not have the format of its Content-Type."""
    return ApiError(errors.MALFORMED_BODY, str(error))


def mistyped(error: msgspec.ValidationError, at: str = "") -> ApiError:
    """Return the error for a value of the wrong shape; its JSON Pointer begins with ``at``."""
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
    """Return the JSON Pointer (RFC 6901) of a msgspec path such as ``$.messages[3].data``.

    A msgspec path does not contain the keys of mappings. The pointer then ends at the mapping.
    """
    pointer = ""
    for step in _PATH_STEP.finditer(path.partition("[...]")[0]):
        pointer += "/" + escape_pointer(step[1] if step[1] is not None else step[2])
    return pointer


def escape_pointer(token: str) -> str:
    """Return ``token`` as one reference token of a JSON Pointer."""
    return token.replace("~", "~0").replace("/", "~1")
