"""What is asked to be published: its wire forms, and what it becomes or why it is refused."""

from collections.abc import Sequence
from typing import Final

import msgspec

from contrail_api.message_headers import header_problem
from contrail_common.edge.json_body import check_nesting, malformed
from contrail_common.edge.problems import Problem, invalid_field, problem, result_problem
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.model import MSG_ID, Expected, Headers, PublishMessage
from contrail_common.publishing import check_message, with_control
from contrail_common.subjects import subject_problem

TTL_HEADER: Final = "Nats-TTL"
_MSG_ID_LOWER: Final = MSG_ID.lower()
_PLAIN_ID_CHARS_MAX: Final = 1024
_OTHER_FORMS: Final = 2


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


class BatchResult(msgspec.Struct):
    """Where a message was stored, or why it was not (``problem``).

    ``duplicate`` when its id had been stored before, under this ``seq``.
    """

    seq: int | msgspec.UnsetType = msgspec.UNSET
    duplicate: bool | msgspec.UnsetType = msgspec.UNSET
    problem: Problem | msgspec.UnsetType = msgspec.UNSET


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
    plain = 0 < len(message_id) <= _PLAIN_ID_CHARS_MAX and message_id.isprintable()
    return message_id if plain else None


def packed_candidates(
    items: list[PackedItem], payload_bytes_max: int
) -> tuple[Sequence[Candidate], list[PublishMessage]]:
    """The items of a msgpack batch as :func:`sifted` gives them.

    Most batches have no headers and few subjects; they are checked as a whole, not one by one.
    """
    plain = not any(item.headers for item in items)
    if plain and _largest(items) <= payload_bytes_max and _subjects_valid(items):
        return items, items  # type: ignore[return-value]  # a list of a subtype, only read from
    return sifted([checked(item, payload_bytes_max) for item in items])


def sifted(candidates: list[Candidate]) -> tuple[list[Candidate], list[PublishMessage]]:
    """``candidates``, and the messages among them."""
    return candidates, [one for one in candidates if not isinstance(one, ApiError)]


def _subjects_valid(items: list[PackedItem]) -> bool:
    return all(subject_problem(subject) is None for subject in {item.subject for item in items})


def _largest(items: list[PackedItem]) -> int:
    return max([len(item.payload) for item in items], default=0)


def results_of(
    candidates: Sequence[Candidate], answered: Sequence[PubResult]
) -> tuple[list[BatchResult], bool]:
    """The result of each candidate, in order, and whether all were stored.

    ``answered`` are storage's outcomes of the messages among the candidates.
    """
    stored: list[BatchResult] = [
        BatchResult(one.seq, one.duplicate) for one in answered if not one.code
    ]
    if len(stored) == len(candidates):
        return stored, True
    outcomes = iter(answered)
    return [
        BatchResult(problem=problem(one)) if isinstance(one, ApiError) else _result(next(outcomes))
        for one in candidates
    ], False


def _result(one: PubResult) -> BatchResult:
    if one.code:
        return BatchResult(problem=result_problem(one.code, one.detail))
    return BatchResult(one.seq, one.duplicate)
