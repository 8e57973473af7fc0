"""Batches in msgpack: ``[1, [[subject, headers or nil, payload], ...]]``, or columns (2)."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from contrail_api.publishing.candidates import (
    Admitted,
    BareItem,
    IdItem,
    PackedItem,
    admitted,
    bare_batch,
    ends_of_pieces,
    id_batch,
    joined,
    uniform_batch,
)
from contrail_api.publishing.packed_columns import column_batch
from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Headers
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.item_steps import PACKED_PLAIN_BYTES, packed_headers_too_large
from contrail_edge.inputs.json_body import decode_part
from contrail_edge.inputs.message_items import Candidate, check_count, checked, located
from contrail_edge.inputs.packed_steps import PackedParts

_ROWS: Final = 1
_COLUMNS: Final = 2
_USUAL_HEADS: Final = {bytes((0x92, form)): form for form in (_ROWS, _COLUMNS)}
"""First bytes of a batch: an array of two items, of which the first is the version."""
_AT: Final = "/1"
_SKIPPED_BYTES: Final = 2 << 20
"""Bytes of headers that are skipped, or of ids that are converted, in one step."""
_Item = TypeVar("_Item")


class _RawItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message whose headers are not decoded yet."""

    subject: str
    headers: msgspec.Raw
    payload: bytes


_frame: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_version: Final = msgspec.msgpack.Decoder(int)
_bare_items: Final = msgspec.msgpack.Decoder(list[BareItem])
_id_items: Final = msgspec.msgpack.Decoder(list[IdItem])
_packed_items: Final = msgspec.msgpack.Decoder(list[PackedItem])
_raw_items: Final = msgspec.msgpack.Decoder(list[_RawItem])
_raw_item: Final = msgspec.msgpack.Decoder(_RawItem)
_headers: Final = msgspec.msgpack.Decoder(Headers | None)


def packed_batch(body: bytes, payload_bytes_max: int) -> Steps[Admitted]:
    """Return the messages of a body; raise ApiError if the whole body is refused."""
    version, items = yield from _versioned(body)
    if version == _COLUMNS:
        return (yield from column_batch(items, payload_bytes_max))
    # The number of items comes before them: refuse too many tiny ones before decoding any.
    head = PackedParts(items).array(0)
    check_count(0 if head is None else head[0])
    usual = yield from _usual(items, payload_bytes_max)
    if usual is not None:
        return Admitted(usual, {})
    read: list[PackedItem | ApiError] = []
    sizes: list[int] = []
    if len(items) <= PACKED_PLAIN_BYTES:
        read += decode_part(_packed_items, bytes(items), _AT)
        sizes = [0] * len(read)
    else:
        raws = yield from _raw(items)
        for at, raw in enumerate(raws):
            read.append(_item(raw, f"{_AT}/{at}"))
            sizes.append(len(raw.payload) + len(raw.headers))
            yield
    packed = [one for one in read if not isinstance(one, ApiError)]
    if len(packed) == len(read):
        batch = yield from _in_pieces(uniform_batch, packed, sizes, payload_bytes_max)
        if batch is not None:
            return Admitted(batch, {})
    found: list[Candidate] = []
    for at, one in enumerate(read):
        yield
        if isinstance(one, ApiError):
            found.append(one)
        else:
            found.append(located(checked(one, payload_bytes_max), one, at))
    return (yield from admitted(found))


def _usual(items: memoryview, payload_bytes_max: int) -> Steps[MessageBatch | None]:
    """Return a batch without headers, or with ids only; None if it is another one, or invalid.

    Most batches are such, and are decoded faster this way. Decoding any other fails at its first
    message, and the general form then reports what is wrong.
    """
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        bare = _bare_items.decode(items)
        yield
        return bare_batch(bare, payload_bytes_max)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        with_ids = _id_items.decode(items)
        yield
        if len(items) <= _SKIPPED_BYTES:
            return id_batch(with_ids, payload_bytes_max)
        sizes = [len(one.headers.message_id.value) + len(one.payload) for one in with_ids]
        return (yield from _in_pieces(id_batch, with_ids, sizes, payload_bytes_max))
    return None


def _in_pieces(
    convert: Callable[[list[_Item], int], MessageBatch | None],
    items: list[_Item],
    sizes: Iterable[int],
    payload_bytes_max: int,
) -> Steps[MessageBatch | None]:
    """Return what ``convert`` makes of ``items``, a few at a time; None if it returns that."""
    batches, start = [], 0
    for end in ends_of_pieces(sizes):
        batch = convert(items[start:end], payload_bytes_max)
        if batch is None:
            return None
        batches.append(batch)
        start = end
        yield
    return (yield from joined(batches))


def _versioned(body: bytes) -> Steps[tuple[int, memoryview]]:
    """Return the version and the messages, which are not decoded yet."""
    start = 2
    version = _USUAL_HEADS.get(body[:start])
    if version is None:
        parts = PackedParts(body)
        head = parts.array(0)
        if head is None or head[0] != 2:  # noqa: PLR2004 the version and the messages
            decode_part(_frame, body, "")
            raise ApiError(errors.MALFORMED_BODY, "Input data was truncated")
        [(at, start)] = yield from parts.spans(head[1], 1)
        version = decode_part(_version, body[at:start], "/0")
        if version not in _USUAL_HEADS.values():
            raise invalid_field("/0", f"the batch version must be {_ROWS} or {_COLUMNS}")
    return version, memoryview(body)[start:]


def _raw(items: memoryview) -> Steps[list[_RawItem]]:
    if len(items) <= _SKIPPED_BYTES:
        return decode_part(_raw_items, bytes(items), _AT)
    parts = PackedParts(items)
    head = parts.array(0)
    if head is None:
        return decode_part(_raw_items, bytes(items), _AT)
    spans = yield from parts.spans(head[1], head[0])
    # The spans end with the array. The decoder, which would notice, never sees the whole body.
    if spans and spans[-1][1] != len(items):
        raise ApiError(errors.MALFORMED_BODY, "unexpected data follows the messages")
    raws = []
    for at, (start, end) in enumerate(spans):
        raws.append(decode_part(_raw_item, bytes(items[start:end]), f"{_AT}/{at}"))
        yield
    return raws


def _item(raw: _RawItem, at: str) -> PackedItem | ApiError:
    headers = bytes(raw.headers)
    if packed_headers_too_large(headers):
        return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
    return PackedItem(raw.subject, decode_part(_headers, headers, f"{at}/1"), raw.payload)
