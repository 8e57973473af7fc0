"""JSON messages of a subject, a text and perhaps an id, read straight to columns.

Most batches have no others. The general way reads each of them with the same result, but one by
one, which takes five times as long. What has another form, or may be refused, is left to it.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar, cast

import msgspec

from contrail_api.publishing.candidates import checked_columns, joined, with_ids
from contrail_common.columns.blocks import MessageColumns
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.texts import Texts
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.item_steps import is_plain
from contrail_edge.inputs.message_items import check_count

_BODY_BYTES_MAX: Final = 512 << 10
"""A longer body is divided into its messages first. Reading 512 KiB takes 15 ms at worst."""
_STEP_BYTES: Final = 1 << 20
_PARTS_IN_STEP: Final = 500


class _Item(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    subject: str
    data: str


class _IdItem(_Item, forbid_unknown_fields=True, gc=False):
    msg_id: str


_T = TypeVar("_T")


class _Body(msgspec.Struct, Generic[_T], forbid_unknown_fields=True):
    messages: list[_T]


# Decoding messages of the other form usually fails at the first one.
_bodies: Final = (msgspec.json.Decoder(_Body[_Item]), msgspec.json.Decoder(_Body[_IdItem]))
_items: Final = (msgspec.json.Decoder(_Item), msgspec.json.Decoder(_IdItem))


def text_body(body: bytes, payload_bytes_max: int) -> MessageBatch | None:
    """Return the messages of a JSON batch; None if they must be read one by one.

    Raises BATCH_TOO_LARGE for too many messages.
    """
    # The decoder keeps the last of two arrays of messages. The general way does the same in a plain
    # body, and refuses two of them in any other.
    if not (is_plain(body) or (len(body) <= _BODY_BYTES_MAX and body.count(b"[") == 1)):
        return None
    for decoder in _bodies:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            items = decoder.decode(body).messages
            check_count(len(items))
            return _in_columns(items, payload_bytes_max)
    return None


def text_parts(parts: Sequence[bytes], payload_bytes_max: int) -> Steps[MessageBatch | None]:
    """Do the same for messages that are a JSON text each, and not too many."""
    batches: list[MessageBatch] = []
    for start in range(0, len(parts) or 1, _PARTS_IN_STEP):
        batch = _step(parts[start : start + _PARTS_IN_STEP], payload_bytes_max)
        if batch is None:
            return None
        batches.append(batch)
        yield
    return (yield from joined(batches))


def _step(parts: Sequence[bytes], payload_bytes_max: int) -> MessageBatch | None:
    if sum(map(len, parts)) > _STEP_BYTES:
        return None
    for decoder in _items:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _in_columns([*map(decoder.decode, parts)], payload_bytes_max)
    return None


def _in_columns(items: Sequence[_Item], payload_bytes_max: int) -> MessageBatch | None:
    payloads = Texts.of([item.data for item in items])
    columns = MessageColumns(len(items), payloads.offsets, payloads.heap)
    batch = checked_columns([item.subject for item in items], columns, payload_bytes_max)
    if not items or not isinstance(items[0], _IdItem):
        return batch
    return with_ids(batch, Texts.of([item.msg_id for item in cast("Sequence[_IdItem]", items)]))
