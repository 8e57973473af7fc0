"""One message to publish: the forms in which clients send it, and its checks."""

import functools
from typing import Annotated, Final

import msgspec

from contrail_common import errors
from contrail_common.columns.header_columns import BAD_HEADER_VALUE, HEADER_NAME, HEADER_NAME_MAX
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import (
    BATCH_MESSAGES_MAX,
    HEADER_BYTES_MAX,
    MSG_ID,
    TTL,
    Expected,
    Headers,
    PublishMessage,
)
from contrail_common.subjects import subject_problem
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.json_body import check_nesting, malformed
from contrail_edge.inputs.publishing import check_message, with_control

_MSG_ID_LOWER: Final = MSG_ID.lower()
_TTL_LOWER: Final = TTL.lower()
PLAIN_ID_MAX: Final = 1024
"""A longer message id, in characters or bytes, is checked as all other headers are."""
_OTHER_FORMS: Final = 2
HEADERS_MAX: Final = HEADER_BYTES_MAX // 5
"""Maximum number of header names and values: each value counts 4 bytes and its name."""


JsonValue = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=schema_marks.JSON)]
TimeToLive = Annotated[str | int | None, msgspec.Meta(extra_json_schema=schema_marks.TTL)]


class ExpectedJson(Expected, frozen=True, forbid_unknown_fields=True):
    """State of the stream that the publisher expects; otherwise the message is refused."""


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One message to publish, with exactly one of ``data``, ``data_base64`` and ``json``."""

    subject: str
    """Subject of the message, without wildcards."""
    headers: Headers | None = None
    """Message headers, each with its values."""
    msg_id: str | None = None
    """Message id, same as the header Nats-Msg-Id."""
    expected: ExpectedJson | None = None
    """Store the message only if the stream has this state."""
    ttl: TimeToLive = None
    """How long to keep the message, same as the header Nats-TTL."""
    data: str | msgspec.UnsetType = msgspec.UNSET
    """Payload as text."""
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    """Payload in base64."""
    json: JsonValue | msgspec.UnsetType = msgspec.UNSET
    """Payload as a JSON value."""


class PackedMessageItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One message to publish in msgpack. The payload is the bytes of ``data``."""

    subject: str
    data: bytes
    headers: Headers | None = None
    msg_id: str | None = None
    expected: ExpectedJson | None = None
    ttl: TimeToLive = None


Item = MessageItem | PackedMessageItem
Candidate = PublishMessage | ApiError
"""A valid message, or the error that refuses it."""


def check_count(count: int) -> None:
    """Raise BATCH_TOO_LARGE if a request has too many messages."""
    if count > BATCH_MESSAGES_MAX:
        raise ApiError(
            errors.BATCH_TOO_LARGE,
            f"the limit is {BATCH_MESSAGES_MAX} messages",
            applied=False,
        )


def payload_of(item: Item, at: str, nesting: int | None) -> bytes:
    """Return the payload of the item at the pointer ``at``.

    Its JSON value may have at most ``nesting`` levels. If ``nesting`` is None, the value was
    checked before, and contains no white space. Raises INVALID_FIELD unless exactly one form is
    given, and MALFORMED_BODY for an invalid JSON value.
    """
    if isinstance(item, PackedMessageItem):
        return item.data
    text, raw, value = item.data, item.data_base64, item.json
    if (text is msgspec.UNSET) + (raw is msgspec.UNSET) + (value is msgspec.UNSET) != _OTHER_FORMS:
        raise _invalid(at, "must contain exactly one of data, data_base64 and json")
    if isinstance(text, str):
        return text.encode()
    if isinstance(value, msgspec.Raw):
        return _compact(bytes(value), nesting)
    assert isinstance(raw, bytes)
    return raw


def _compact(value: bytes, nesting: int | None) -> bytes:
    if nesting is not None:
        check_nesting(value, nesting)
    try:
        value.decode()  # the decoder does not check raw values
    except UnicodeDecodeError as error:
        raise malformed(error) from None
    return value if nesting is None else msgspec.json.format(value, indent=-1)


def candidate(item: Item, payload: bytes, payload_bytes_max: int) -> Candidate:
    """Return the message of an item, or the error that refuses it."""
    headers = item.headers
    if headers and item.msg_id is not None:
        for name, values in headers.items():
            if name.lower() == _MSG_ID_LOWER and values != [item.msg_id]:
                return _invalid("msg_id", f"differs from the header {name}")
    headers = with_control(headers, item.msg_id, item.expected)
    if item.ttl is not None:
        asked = [str(item.ttl)]
        name = next((name for name in headers or () if name.lower() == _TTL_LOWER), TTL)
        if headers and headers.get(name, asked) != asked:
            return _invalid("ttl", f"differs from the header {name}")
        headers = {**(headers or {}), name: asked}
    return checked(PublishMessage(item.subject, headers, payload), payload_bytes_max)


def checked(message: PublishMessage, payload_bytes_max: int) -> Candidate:
    """Return ``message`` with its headers interpreted, or the error that refuses it."""
    headers = message.headers
    if headers:
        ids = headers.get(MSG_ID)
        if ids is not None and len(headers) == 1 and len(ids) == 1:
            # Most messages with headers have only an id. If it is plain, it needs no other check.
            plain = 0 < len(ids[0]) <= PLAIN_ID_MAX and ids[0].isprintable()
            fits = len(message.payload) <= payload_bytes_max
            if plain and fits and subject_problem(message.subject) is None:
                message.msg_id = ids[0]
                return message
        if len(headers) > HEADERS_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
        found = header_problem(headers)
        if found is not None:
            return _invalid("headers", found)
    return check_message(message, payload_bytes_max) or message


def header_problem(headers: Headers) -> str | None:
    """Return why ``headers`` cannot be stored with a message, or None if they can."""
    for name, values in headers.items():
        if len(name) > HEADER_NAME_MAX or not _valid_name(name):
            return (
                f"{name!r} is not a valid header name: it must be 1 to 128 token characters "
                "and not end in *"
            )
        if not values:
            return f"{name} has no value"
        for value in values:
            if not value.isprintable() and BAD_HEADER_VALUE.search(value):
                return f"{name} contains a line break or NUL"
    return None


@functools.lru_cache(maxsize=4096)
def _valid_name(name: str) -> bool:
    return HEADER_NAME.fullmatch(name) is not None


def _invalid(pointer: str, message: str) -> ApiError:
    fields = [FieldProblem(pointer, message)]
    detail = f"{pointer}: {message}" if pointer else message
    return ApiError(errors.INVALID_FIELD, detail, fields)
