"""Batches in msgpack as columns: ``[2, [subjects, subject_index, offsets, payload, ids or nil]]``.

``subject_index`` (u32[n]) points into ``subjects``, which are distinct and all used. ``offsets``
(u32[n + 1]) cut ``payload`` into the payloads. ``ids`` is ``[offsets, texts]``: an id for each
message, empty if it has none. All numbers are little-endian. Messages with other headers are sent
in rows.
"""

from typing import Final

import msgspec

from contrail_api.publishing.candidates import Admitted, admitted
from contrail_common import errors
from contrail_common.columns.blocks import MessageColumns
from contrail_common.columns.header_columns import one_header
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import HEADER_BYTES_MAX, MSG_ID, PublishMessage
from contrail_common.subjects import any_subject_problem
from contrail_common.texts import Texts, are_offsets, as_u32, is_utf8
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.json_body import decode_part, malformed
from contrail_edge.inputs.message_items import (
    PLAIN_ID_MAX,
    Candidate,
    check_count,
    checked,
    located,
)
from contrail_edge.inputs.packed_steps import PackedParts

_AT: Final = "/1"
_INDEX_BYTES: Final = 4
_ID_DECODED_MAX: Final = 4 * HEADER_BYTES_MAX
_SUBJECTS_TOGETHER: Final = 100
_IDS_TOGETHER: Final = 1_000
"""Subjects and ids that are checked in one step, which takes two milliseconds at most."""


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    subjects: list[str]
    subject_index: bytes
    offsets: bytes
    payload: bytes
    ids: tuple[bytes, bytes] | None


_decoder: Final = msgspec.msgpack.Decoder(_Columns)


def column_batch(packed: memoryview, payload_bytes_max: int) -> Steps[Admitted]:
    """Return the messages of columns; raise ApiError if the whole body is refused."""
    columns = _decoded(packed)
    yield
    batch = _fitting(columns)
    yield
    if (yield from _is_plain(batch, payload_bytes_max)):
        if batch.ids is not None:
            batch.columns.headers = one_header(MSG_ID, batch.ids)
        return Admitted(batch, {})
    # Some are refused. Checked one by one they are refused as they are in rows.
    found: list[Candidate] = []
    for at in range(batch.count):
        found.append(_checked(batch, at, payload_bytes_max))
        yield
    return (yield from admitted(found))


def _decoded(packed: memoryview) -> _Columns:
    parts = PackedParts(packed)
    head = parts.array(0)
    # The number of subjects comes before them: refuse too many tiny ones before decoding any.
    subjects = None if head is None else parts.array(head[1])
    check_count(0 if subjects is None else subjects[0])
    return decode_part(_decoder, packed, _AT)


def _fitting(columns: _Columns) -> MessageBatch:
    """Return the messages of columns that fit each other. Each message is still to be checked."""
    count, odd = divmod(len(columns.subject_index), _INDEX_BYTES)
    if odd:
        raise invalid_field(f"{_AT}/1", "must consist of 32-bit numbers")
    check_count(count)
    if not are_offsets(columns.offsets, count, len(columns.payload)):
        raise invalid_field(f"{_AT}/2", "must be the ascending offsets of the payloads")
    ids = None if columns.ids is None else Texts(*columns.ids)
    if ids is not None and not are_offsets(ids.offsets, count, len(ids.heap)):
        raise invalid_field(f"{_AT}/4/0", "must be the ascending offsets of the ids")
    _check_index(columns.subject_index, columns.subjects)
    return MessageBatch(
        columns.subjects,
        columns.subject_index,
        MessageColumns(count, columns.offsets, columns.payload),
        ids if ids is not None and ids.heap else None,
    )


def _check_index(index: bytes, subjects: list[str]) -> None:
    # A set: numpy's way lets go of the interpreter's lock, and then another thread takes its turn.
    used = set(as_u32(index).tolist())
    if max(used, default=-1) >= len(subjects):
        raise invalid_field(f"{_AT}/1", "must point into the subjects")
    if len(used) < len(subjects) or len(set(subjects)) < len(subjects):
        raise invalid_field(f"{_AT}/0", "must be distinct, and each be used")


def _is_plain(batch: MessageBatch, payload_bytes_max: int) -> Steps[bool]:
    """Check messages as a whole; False if they must be checked one by one."""
    columns, subjects, ids = batch.columns, batch.subjects, batch.ids
    if columns.size() > payload_bytes_max and int(columns.sizes().max()) > payload_bytes_max:
        return False
    for start in range(0, len(subjects), _SUBJECTS_TOGETHER):
        if any_subject_problem(subjects[start : start + _SUBJECTS_TOGETHER]):
            return False
        yield
    if ids is None:
        return True
    if int(ids.lengths().max()) > PLAIN_ID_MAX:
        return False
    for start in range(0, ids.count, _IDS_TOGETHER):
        some = ids.slice(start, min(start + _IDS_TOGETHER, ids.count))
        if not (is_utf8(some.heap, some.offsets) and some.are_printable()):
            return False
        yield
    return True


def _checked(batch: MessageBatch, at: int, payload_bytes_max: int) -> Candidate:
    subject = batch.subjects[int(as_u32(batch.subject_index)[at])]
    headers = None
    if batch.ids is not None:
        start, end = as_u32(batch.ids.offsets)[at : at + 2].tolist()
        # In rows, headers that are much too large are not decoded either.
        if end - start > _ID_DECODED_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
        if start < end:
            headers = {MSG_ID: [_text(batch.ids.heap[start:end])]}
    _, payload = batch.columns.content(at)
    message = PublishMessage(subject, headers, payload)
    return located(checked(message, payload_bytes_max), message, at)


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise malformed(error) from None
