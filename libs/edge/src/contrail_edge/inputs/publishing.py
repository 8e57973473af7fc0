"""Checks of a published message, and the meaning of its ``Nats-*`` headers, as in JetStream."""

import functools
from collections.abc import Mapping
from typing import Final

from contrail_common import errors, model
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.model import Expected, Headers, PublishMessage, Rollup, header_size
from contrail_common.subjects import filter_problem, subject_problem
from contrail_common.timeunits import NS_PER_S, parse_duration

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
_ROLLUPS: Final[Mapping[str, Rollup]] = {"sub": "sub", "all": "all"}
MSG_ID_BYTES_MAX: Final = 4096
_SEQUENCE_DIGITS_MAX: Final = 19


def check_message(message: PublishMessage, payload_max: int) -> ApiError | None:
    """Check subject, size and headers of ``message``; return the error that refuses it, or None.

    If it is valid, the meaning of its headers is set in the message: ``msg_id``, ``ttl_ns`` etc.
    Checks that need the state of the stream follow in storage.
    """
    problem = subject_problem(message.subject)
    if problem is not None:
        return _refused(errors.INVALID_SUBJECT, "subject", problem)
    if len(message.payload) > payload_max:
        return ApiError(
            errors.MESSAGE_TOO_LARGE,
            f"the payload is larger than {payload_max} bytes",
            applied=False,
        )
    if message.headers:
        if header_size(message.headers) > model.HEADER_BYTES_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
        if any(map(_is_control, message.headers)):
            try:
                interpret(message)
            except ApiError as error:
                return error
    return None


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


def _refused(spec: ErrorSpec, field: str, message: str) -> ApiError:
    """Return the error for the subject or a header of a message."""
    return ApiError(spec, message, [FieldProblem(field, message)], applied=False)


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
