"""Large messages to publish, and large batches of them, read in steps."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import HEADER_BYTES_MAX
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.json_body import Decoder, decode_part
from contrail_edge.inputs.json_steps import NESTING_MAX, compact, count_values, outline
from contrail_edge.inputs.message_items import (
    HEADERS_MAX,
    Candidate,
    Item,
    candidate,
    payload_of,
)
from contrail_edge.inputs.packed_steps import PackedParts

PLAIN_BYTES: Final = 256 << 10
"""JSON up to this size is decoded in one step."""
PACKED_PLAIN_BYTES: Final = 64 << 10
"""Msgpack up to this size is decoded in one step."""
_PLAIN_TEXT_BYTES: Final = 1 << 20
_PLAIN_VALUES: Final = 4096
"""Longer JSON with at most this many values, up to ``_PLAIN_TEXT_BYTES``, is decoded quickly too:
it is mostly text.
"""
_HEADERS_TEXT_MAX: Final = 6 * HEADER_BYTES_MAX
"""Longest JSON of valid headers. Each character may be an escape of 6 bytes."""
_HEADERS_PACKED_MAX: Final = 4 * HEADER_BYTES_MAX
_ITEM_LEVEL: Final = 2
_FIELDS_MAX: Final = 16
"""Limit for the fields of a message; valid ones have fewer."""

Part = tuple[Item, bytes] | ApiError
"""A requested message and its payload, or the error that refuses only this message."""

_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_HEADERS_KEY: Final = msgspec.msgpack.encode("headers")


def is_plain(text: bytes) -> bool:
    """Return True if decoding ``text`` takes a few milliseconds at most, whatever it contains."""
    if len(text) <= PLAIN_BYTES:
        return True
    if len(text) > _PLAIN_TEXT_BYTES:
        return False
    return text.count(b",") + text.count(b"[") + text.count(b"{") <= _PLAIN_VALUES


def json_item(decoder: Decoder[Any], raw: bytes, at: str, payload_bytes_max: int) -> Steps[Part]:
    """Read the message at the pointer ``at``, whose text is not nested too deeply.

    Headers and payloads that are much too large are refused before they are decoded, even if they
    are not valid JSON.
    """
    if is_plain(raw):
        item = decode_part(decoder, raw, at)
        return item, payload_of(item, at, NESTING_MAX)
    found = yield from outline(raw, _ITEM_LEVEL)
    decode_part(decoder, found.skeleton, at)  # reports errors in the other fields
    yield
    given = decode_part(_fields, found.skeleton, at)
    nested = [name for name, value in given.items() if bytes(memoryview(value)[:1]) in b"[{"]
    # The decoder keeps the last of two fields of one name, the outline has both.
    if len(nested) != len(found.inner):
        raise ApiError(errors.MALFORMED_BODY, "a field must not be given twice")
    inner = {name: spans[0] for name, spans in zip(nested, found.inner, strict=True) if spans}
    if "headers" in inner:
        start, end = inner["headers"]
        count = yield from count_values(raw[start:end])
        if end - start > _HEADERS_TEXT_MAX or count > 2 * HEADERS_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
    if "json" in inner:
        start, end = inner["json"]
        value = yield from compact(raw[start - 1 : end + 1])
        if len(value) > payload_bytes_max:
            limit = f"the payload is larger than {payload_bytes_max} bytes"
            return ApiError(errors.MESSAGE_TOO_LARGE, limit, applied=False)
        raw = raw[: start - 1] + value + raw[end + 1 :]
    yield
    item = decode_part(decoder, raw, at)
    yield
    return item, payload_of(item, at, None if "json" in inner else NESTING_MAX)


def given_item(item: Item, at: str, nesting: int) -> Steps[Part]:
    """Return a decoded message; its JSON value may have at most ``nesting`` levels."""
    yield
    return item, payload_of(item, at, nesting)


def packed_item(decoder: Decoder[Any], raw: bytes, at: str) -> Steps[Part]:
    """Read the msgpack message at the pointer ``at``, a map or an array."""
    if len(raw) > PACKED_PLAIN_BYTES:
        headers = yield from _packed_headers(raw)
        if headers is not None and packed_headers_too_large(raw[slice(*headers)]):
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
    yield
    item = decode_part(decoder, raw, at)
    return item, item.data


def packed_headers_too_large(raw: bytes) -> bool:
    """Return True if headers in msgpack are certainly too large, without decoding them."""
    names = PackedParts(raw).map(0)
    return len(raw) > _HEADERS_PACKED_MAX or (names is not None and names[0] > HEADERS_MAX)


def _packed_headers(raw: bytes) -> Steps[tuple[int, int] | None]:
    """Return the span of the headers in a message, or None if it has none."""
    parts = PackedParts(raw)
    fields = parts.array(0)
    if fields is not None:
        spans = yield from parts.spans(fields[1], min(fields[0], 2))
        return spans[1] if len(spans) > 1 else None
    entries = parts.map(0)
    if entries is None:
        return None
    if entries[0] > _FIELDS_MAX:
        raise ApiError(errors.MALFORMED_BODY, "a message has too many fields")
    spans = yield from parts.spans(entries[1], 2 * entries[0])
    for name, value in zip(spans[::2], spans[1::2], strict=True):
        if raw[slice(*name)] == _HEADERS_KEY:
            return value
    return None


def candidates(parts: Iterable[Steps[Part]], payload_bytes_max: int) -> Steps[list[Candidate]]:
    """Check each of the ``messages``; raise ApiError for an error that refuses the whole batch."""
    found: list[Candidate] = []
    for at, part in enumerate(parts):
        read = yield from part
        yield
        if isinstance(read, ApiError):
            found.append(read)
        else:
            found.append(candidate(*read, payload_bytes_max, at))
        yield
    return found
