"""What is asked to be published: its wire forms, and what it becomes or why it is refused."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_api.message_headers import header_problem
from contrail_common.blocks import columns_of
from contrail_common.edge.json_body import check_nesting, malformed
from contrail_common.edge.problems import invalid_field
from contrail_common.errors import ApiError
from contrail_common.header_columns import UniformHeaders, headers_in_columns
from contrail_common.message_batch import MessageBatch, index_subjects
from contrail_common.model import HEADER_BYTES_MAX, MSG_ID, Expected, Headers, PublishMessage
from contrail_common.publishing import check_message, with_control
from contrail_common.subjects import subject_problem
from contrail_common.texts import Texts

TTL_HEADER: Final = "Nats-TTL"
_MSG_ID_LOWER: Final = MSG_ID.lower()
_PLAIN_ID_MAX: Final = 1024
"""A longer message id, in characters or bytes, needs a closer look."""
_OTHER_FORMS: Final = 2
_ID_NAMES: Final = Texts.of([MSG_ID])


class ExpectedJson(Expected, frozen=True, forbid_unknown_fields=True):
    """What the publisher expects of the stream; a message that finds it otherwise is refused."""


class BatchItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One message to publish, with exactly one of ``data``, ``data_base64`` and ``json``."""

    subject: str
    headers: Headers | None = None
    msg_id: str | None = None
    expected: ExpectedJson | None = None
    ttl: str | int | None = None
    data: str | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class PackedItem(PublishMessage, array_like=True, forbid_unknown_fields=True, gc=False):
    """One message of a msgpack batch: ``[subject, headers or nil, payload]``.

    What the headers ask for is set when they are interpreted, never taken from the wire.
    """

    msg_id: None = None
    expected: None = None


class OneValue(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The values of a header that has one."""

    value: str


class OnlyId(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The headers of a message that has an id and nothing else."""

    message_id: OneValue = msgspec.field(name=MSG_ID)


class BareItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message of a msgpack batch without headers."""

    subject: str
    headers: None
    payload: bytes


class IdItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message of a msgpack batch that has an id and no other header."""

    subject: str
    headers: OnlyId
    payload: bytes


Candidate = PublishMessage | ApiError
"""A message that may be published, or why it may not."""


def payload_of(item: BatchItem, at: str, nesting: int) -> bytes:
    """The payload of a JSON item at the pointer ``at``, whose JSON value nests at most ``nesting``.

    Raises INVALID_FIELD unless exactly one form is given, MALFORMED_BODY for a bad JSON value.
    """
    text, raw, value = item.data, item.data_base64, item.json
    if (text is msgspec.UNSET) + (raw is msgspec.UNSET) + (value is msgspec.UNSET) != _OTHER_FORMS:
        raise invalid_field(at, "needs exactly one of data, data_base64 and json")
    if isinstance(text, str):
        return text.encode()
    if isinstance(value, msgspec.Raw):
        return _compact(bytes(value), nesting)
    assert isinstance(raw, bytes)
    return raw


def _compact(value: bytes, nesting: int) -> bytes:
    check_nesting(value, nesting)
    try:
        value.decode()  # the decoder does not look into values that it passes on
    except UnicodeDecodeError as error:
        raise malformed(error) from None
    return msgspec.json.format(value, indent=-1)


def json_candidate(item: BatchItem, payload: bytes, payload_bytes_max: int) -> Candidate:
    """The message of a JSON item, or why it is refused."""
    headers = item.headers
    if headers and item.msg_id is not None:
        for name, values in headers.items():
            if name.lower() == _MSG_ID_LOWER and values != [item.msg_id]:
                return invalid_field("msg_id", f"disagrees with the header {name}")
    headers = with_control(headers, item.msg_id, item.expected)
    if item.ttl is not None:
        headers = {**(headers or {}), TTL_HEADER: [str(item.ttl)]}
    return checked(PublishMessage(item.subject, headers, payload), payload_bytes_max)


def checked(message: PublishMessage, payload_bytes_max: int) -> Candidate:
    """``message`` with its headers interpreted, or why it is refused."""
    headers = message.headers
    if headers:
        message_id = _only_message_id(headers)
        if message_id is not None and len(message.payload) <= payload_bytes_max:
            found = subject_problem(message.subject)
            if found is None:
                message.msg_id = message_id
                return message
        found = header_problem(headers)
        if found is not None:
            return invalid_field("headers", found)
    return check_message(message, payload_bytes_max) or message


def _only_message_id(headers: Headers) -> str | None:
    """The message id when it is the only header and needs no closer look; the common case."""
    values = headers.get(MSG_ID)
    if values is None or len(headers) != 1 or len(values) != 1:
        return None
    message_id = values[0]
    plain = 0 < len(message_id) <= _PLAIN_ID_MAX and message_id.isprintable()
    return message_id if plain else None


@dataclass(slots=True, frozen=True)
class Admitted:
    """The messages of a request that may be published, and why others, by position, may not."""

    batch: MessageBatch
    refused: dict[int, ApiError]


def admitted(candidates: Sequence[Candidate]) -> Admitted:
    """The messages among ``candidates``, and the refusals."""
    return Admitted(
        MessageBatch.of([one for one in candidates if not isinstance(one, ApiError)]),
        {at: one for at, one in enumerate(candidates) if isinstance(one, ApiError)},
    )


PlainItem = BareItem | IdItem | PackedItem


def bare_batch(items: Sequence[PlainItem], payload_bytes_max: int) -> MessageBatch | None:
    """Subjects and payloads of ``items``; None when some are not valid and need a closer look.

    They are checked as a whole, not one by one.
    """
    subjects, index = index_subjects([item.subject for item in items])
    if any(subject_problem(subject) is not None for subject in subjects):
        return None
    columns = columns_of([item.payload for item in items], None)
    if columns.size() > payload_bytes_max and int(columns.sizes().max()) > payload_bytes_max:
        return None
    return MessageBatch(subjects, index, columns)


def id_batch(items: Sequence[IdItem], payload_bytes_max: int) -> MessageBatch | None:
    """As :func:`bare_batch`, with the ids of the messages."""
    ids = Texts.of([item.headers.message_id.value for item in items])
    return _with_headers(bare_batch(items, payload_bytes_max), UniformHeaders(_ID_NAMES, ids))


def uniform_batch(items: Sequence[PackedItem], payload_bytes_max: int) -> MessageBatch | None:
    """As :func:`bare_batch`, with headers when they have the same names in every message."""
    headers = headers_in_columns([item.headers for item in items])
    if not isinstance(headers, UniformHeaders):
        return None
    return _with_headers(bare_batch(items, payload_bytes_max), headers)


def _with_headers(batch: MessageBatch | None, headers: UniformHeaders) -> MessageBatch | None:
    """``batch`` with its headers, which ask for nothing but an id; None if one needs a look."""
    names = headers.names.each()
    if (
        batch is None
        or not all(map(_asks_for_nothing, names))
        or int(headers.sizes().max(initial=0)) > HEADER_BYTES_MAX
        or not headers.values.are_printable()
    ):
        return None
    if MSG_ID in names:
        batch.ids = headers.column(names.index(MSG_ID))
        lengths = batch.ids.lengths()
        if not 0 < int(lengths.min(initial=1)) <= int(lengths.max(initial=1)) <= _PLAIN_ID_MAX:
            return None
    batch.columns.headers = headers
    return batch


@functools.lru_cache(maxsize=4096)
def _asks_for_nothing(name: str) -> bool:
    """Whether a header is stored with the message and means nothing to the service, or is an id."""
    if name == MSG_ID:
        return True
    return not name.lower().startswith("nats-") and header_problem({name: [""]}) is None
