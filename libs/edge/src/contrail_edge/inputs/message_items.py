"""One message to publish: its forms on the wire, its checks, and what its headers mean.

``Nats-*`` headers mean the same as in JetStream.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from contrail_common import errors, model
from contrail_common.columns.header_columns import (
    BAD_HEADER_VALUE,
    HEADER_NAME,
    HEADER_NAME_MAX,
    header_size,
)
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.model import Expected, Headers, PublishMessage, Rollup
from contrail_common.subjects import any_subject_problem, filter_problem, subject_problem
from contrail_common.timeunits import NS_PER_S, parse_duration
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.json_body import check_nesting, escape_pointer, malformed

PLAIN_ID_MAX: Final = 1024
"""A longer message id, in characters or bytes, is checked as all other headers are."""
MSG_ID_BYTES_MAX: Final = 4096
HEADERS_MAX: Final = model.HEADER_BYTES_MAX // 5
"""Maximum number of header names and values: each value counts 4 bytes and its name."""
_OTHER_FORMS: Final = 2
_SEQUENCE_DIGITS_MAX: Final = 19
_MSG_ID_LOWER: Final = model.MSG_ID.lower()
_TTL_LOWER: Final = model.TTL.lower()
_REFUSED_PREFIXES: Final = ("nats-schedule", "nats-batch-", "nats-incr", "nats-stream-source")
_CANONICAL: Final = {
    name.lower(): name
    for name in (
        model.MSG_ID,
        model.EXPECTED_STREAM,
        model.EXPECTED_LAST_SEQ,
        model.EXPECTED_LAST_SUBJECT_SEQ,
        model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT,
        model.EXPECTED_LAST_MSG_ID,
        model.ROLLUP,
        model.TTL,
    )
}
_FIELDS_OF_HEADERS: Final = {model.MSG_ID: "/msg_id", model.TTL: "/ttl"}
_ROLLUPS: Final[Mapping[str, Rollup]] = {"sub": "sub", "all": "all"}

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
    if count > model.BATCH_MESSAGES_MAX:
        raise ApiError(
            errors.BATCH_TOO_LARGE,
            f"the limit is {model.BATCH_MESSAGES_MAX} messages",
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


def candidate(item: Item, payload: bytes, payload_bytes_max: int, at: int | None) -> Candidate:
    """Return the message of an item, or the error that refuses it; ``at`` as for `located`."""
    return located(_candidate(item, payload, payload_bytes_max), item, at)


def located(found: Candidate, item: Item | PublishMessage, at: int | None) -> Candidate:
    """Let the named fields of a refusal be pointers into the body.

    ``at`` is the position of ``item`` in ``messages``; None if the body is the item.
    """
    if isinstance(found, ApiError):
        start = "" if at is None else f"/messages/{at}"
        places = [start + _place(item, one.pointer) for one in found.fields]
        found.fields = [
            FieldProblem(place, one.message)
            for place, one in zip(places, found.fields, strict=True)
        ]
    return found


def _place(item: Item | PublishMessage, name: str) -> str:
    if name in item.__struct_fields__:
        return f"/{name}"
    for given in item.headers or ():
        if given.lower() == name.lower():
            return f"/headers/{escape_pointer(given)}"
    return _FIELDS_OF_HEADERS.get(name, "/expected")


def _candidate(item: Item, payload: bytes, payload_bytes_max: int) -> Candidate:
    headers = item.headers
    if headers and item.msg_id is not None:
        for name, values in headers.items():
            if name.lower() == _MSG_ID_LOWER and values != [item.msg_id]:
                return _invalid("msg_id", f"differs from the header {name}")
    headers = with_control(headers, item.msg_id, item.expected)
    if item.ttl is not None:
        asked = [str(item.ttl)]
        name = next((name for name in headers or () if name.lower() == _TTL_LOWER), model.TTL)
        if headers and headers.get(name, asked) != asked:
            return _invalid("ttl", f"differs from the header {name}")
        headers = {**(headers or {}), name: asked}
    return checked(PublishMessage(item.subject, headers, payload), payload_bytes_max)


class PlainItem(Protocol):
    """A message to publish that has at most an id."""

    @property
    def subject(self) -> str:
        """Subject of the message."""
        ...

    @property
    def data(self) -> str | bytes:
        """Payload."""
        ...

    @property
    def msg_id(self) -> str | None:
        """Message id."""
        ...


def plain_messages(
    items: Sequence[PlainItem], payload_bytes_max: int
) -> list[PublishMessage] | None:
    """Return the messages of ``items``, as :func:`candidate` does; None if one is refused."""
    found: list[PublishMessage] = []
    for item in items:
        payload, message_id = item.data, item.msg_id
        if isinstance(payload, str):
            payload = payload.encode()
        headers = None if message_id is None else {model.MSG_ID: [message_id]}
        message = PublishMessage(item.subject, headers, payload)
        if headers and checked(message, payload_bytes_max) is not message:
            return None
        if len(payload) > payload_bytes_max:
            return None
        found.append(message)
    if any_subject_problem({message.subject for message in found}):
        return None
    return found


def with_control(
    headers: Headers | None, msg_id: str | None, expected: Expected | None
) -> Headers | None:
    """Return ``headers`` with those that JetStream stores for ``msg_id`` and ``expected``."""
    if msg_id is None and expected is None:
        return headers
    merged = dict(headers or {})
    if msg_id is not None:
        merged[model.MSG_ID] = [msg_id]
    if expected is not None:
        for name, value in (
            (model.EXPECTED_STREAM, expected.stream),
            (model.EXPECTED_LAST_SEQ, expected.last_seq),
            (model.EXPECTED_LAST_SUBJECT_SEQ, expected.last_subject_seq),
            (model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT, expected.last_subject_seq_subject),
            (model.EXPECTED_LAST_MSG_ID, expected.last_msg_id),
        ):
            if value is not None:
                merged[name] = [str(value)]
    return merged


def checked(message: PublishMessage, payload_bytes_max: int) -> Candidate:
    """Return ``message`` with the meaning of its headers set, or the error that refuses it.

    The fields of the error are names of headers, ``subject`` or ``headers``.

    The meaning is ``msg_id``, ``ttl_ns`` etc. Checks that need the state of the stream follow in
    storage.
    """
    headers = message.headers
    if headers:
        ids = headers.get(model.MSG_ID)
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
    problem = subject_problem(message.subject)
    if problem is not None:
        return _refused(errors.INVALID_SUBJECT, "subject", problem)
    if len(message.payload) > payload_bytes_max:
        detail = f"the payload is larger than {payload_bytes_max} bytes"
        return ApiError(errors.MESSAGE_TOO_LARGE, detail, applied=False)
    if headers:
        if header_size(headers) > model.HEADER_BYTES_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
        if any(map(_is_control, headers)):
            try:
                interpret(message)
            except ApiError as error:
                return error
    return message


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


@functools.lru_cache(maxsize=4096)
def _is_control(name: str) -> bool:
    """Return True if a header has a meaning to the service, in upper or lower case."""
    return name.lower().startswith("nats-")


def interpret(message: PublishMessage) -> None:
    """Set the fields that headers control (``msg_id`` etc.).

    Raise ApiError for an invalid header.
    """
    asked: dict[str, str] = {}
    for name, values in (message.headers or {}).items():
        lowered = name.lower()
        if not lowered.startswith("nats-"):
            continue
        if lowered in _CANONICAL and values:
            asked[_CANONICAL[lowered]] = values[0]
        elif lowered.startswith(_REFUSED_PREFIXES):
            raise _refused(errors.FEATURE_HEADER, name, f"{name} is not supported")
    if not asked:
        return
    message_id = asked.pop(model.MSG_ID, None)
    if message_id:
        if len(message_id.encode()) > MSG_ID_BYTES_MAX:
            detail = f"a message id must not be longer than {MSG_ID_BYTES_MAX} bytes"
            raise _refused(errors.INVALID_FIELD, model.MSG_ID, detail)
        message.msg_id = message_id
    rollup = asked.pop(model.ROLLUP, None)
    if rollup is not None:
        if rollup not in _ROLLUPS:
            detail = f'{model.ROLLUP} must be "sub" or "all", not {rollup[:64]!r}'
            raise _refused(errors.ROLLUP_REFUSED, model.ROLLUP, detail)
        message.rollup = _ROLLUPS[rollup]
    ttl = asked.pop(model.TTL, None)
    if ttl is not None:
        message.ttl_ns = parse_ttl(ttl)
    if asked:
        message.expected = _expected(asked)


def parse_ttl(text: str) -> int:
    """Return the nanoseconds of a time to live, or TTL_NEVER; raise TTL_INVALID.

    As in JetStream: a number of seconds, a duration of at least 1 s, or ``never`` in any case.
    """
    if text.lower() == "never":
        return model.TTL_NEVER
    seconds = text.isascii() and text.isdigit()
    try:
        ttl_ns = parse_duration(f"{text}s" if seconds else text)
    except ValueError:
        ttl_ns = -1
    if ttl_ns < NS_PER_S:
        detail = (
            f'{model.TTL} must be a number of seconds, a duration of at least 1s or "never", '
            f"not {text[:64]!r}"
        )
        raise _refused(errors.TTL_INVALID, model.TTL, detail)
    return ttl_ns


def _expected(asked: dict[str, str]) -> Expected:
    subject = asked.get(model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT)
    last_subject_seq = _sequence(asked, model.EXPECTED_LAST_SUBJECT_SEQ)
    if subject is not None:
        if last_subject_seq is None:
            message = f"requires {model.EXPECTED_LAST_SUBJECT_SEQ}"
            header = model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT
            raise _refused(errors.EXPECTED_SUBJECT_ALONE, header, message)
        problem = filter_problem(subject)
        if problem is not None:
            header = model.EXPECTED_LAST_SUBJECT_SEQ_SUBJECT
            raise _refused(errors.INVALID_SUBJECT, header, problem)
    return Expected(
        stream=asked.get(model.EXPECTED_STREAM),
        last_seq=_sequence(asked, model.EXPECTED_LAST_SEQ),
        last_subject_seq=last_subject_seq,
        last_subject_seq_subject=subject,
        last_msg_id=asked.get(model.EXPECTED_LAST_MSG_ID),
    )


def _sequence(asked: dict[str, str], header: str) -> int | None:
    text = asked.get(header)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _SEQUENCE_DIGITS_MAX):
        raise _refused(errors.INVALID_FIELD, header, f"{header} must be a sequence number")
    return int(text)


def _invalid(pointer: str, message: str) -> ApiError:
    fields = [FieldProblem(pointer, message)]
    detail = f"{pointer}: {message}" if pointer else message
    return ApiError(errors.INVALID_FIELD, detail, fields)


def _refused(spec: ErrorSpec, field: str, message: str) -> ApiError:
    """Return the error for the subject or a header of a message."""
    return ApiError(spec, message, [FieldProblem(field, message)], applied=False)
