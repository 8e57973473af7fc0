"""What a pull may ask for."""

from typing import Annotated, Final, Literal

import msgspec

from contrail_common import errors
from contrail_common.ack_tokens import ALL
from contrail_common.errors import ApiError, ErrorSpec, FieldProblem
from contrail_common.timeunits import INT64_MAX, NS_PER_MS, NS_PER_S, parse_duration
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.schema_marks import Unavailable

EXPIRES_MAX_NS: Final = 60 * NS_PER_S
EXPIRES_DEFAULT_NS: Final = 5 * NS_PER_S
HEARTBEAT_MIN_NS: Final = 100 * NS_PER_MS
BATCH_MAX: Final = 10_000
ACKS_MAX: Final = 10_000
ACKS_BYTES_MAX: Final = 4 << 20
"""Of a body with acknowledgements."""
_ARRAYS_MAX: Final = 4 * ACKS_MAX
"""A message takes two: a range and its list. The others are left to brackets in reasons."""

GivenDuration = Annotated[str | int | None, msgspec.Meta(extra_json_schema=schema_marks.DURATION)]
"""A duration that may be left out; an integer is nanoseconds."""
AckKindText = Literal["ack", "nak", "term", "in_progress"]


class AckRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One acknowledgement. ``delay`` is only allowed with nak, ``reason`` only with term."""

    token: str
    """`ack_token` of the delivery, or of columns."""
    kind: AckKindText = "ack"
    """Kind of acknowledgement. `ack`: processed. `nak`: deliver again. `term`: do not deliver
    again. `in_progress`: restart the time to acknowledge."""
    delay: GivenDuration = None
    """With `nak`: time until the message is delivered again."""
    reason: str | None = None
    """With `term`: text for the event that reports it."""
    ranges: list[tuple[int, int]] | None = None
    """With the token of columns: the first and last position of each range of messages that this
    acknowledges, counted from 0 and ascending. Without it, all messages of the columns."""


class AckBody(msgspec.Struct, forbid_unknown_fields=True):
    """Acknowledgements for one consumer. With ``sync`` the answer comes once they are durable."""

    acks: list[AckRequest]
    """The acknowledgements, in order."""
    sync: bool = False
    """Answer once the acknowledgements are durable."""


class PullBody(msgspec.Struct, forbid_unknown_fields=True):
    """A pull request. ``acks`` of an earlier batch are applied first."""

    batch: Annotated[int, msgspec.Meta(ge=1, le=BATCH_MAX)] = 1
    """Maximum number of messages."""
    expires: GivenDuration = None
    """How long to wait for a first message, at most 60s. Default: 5s."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)] = 0
    """Maximum size of the messages in bytes, payloads and headers; 0 means no limit."""
    no_wait: bool = False
    """Answer immediately if there are no messages."""
    idle_heartbeat: GivenDuration = None
    """With NDJSON: send a heartbeat after this time without messages."""
    min_pending: Unavailable[int | None] = None
    min_ack_pending: Unavailable[int | None] = None
    group: Unavailable[str | None] = None
    id: Unavailable[str | None] = None
    priority: Unavailable[int | None] = None
    acks: list[AckRequest] = []
    """Acknowledgements to apply first."""


def check_ack_count(body: bytes) -> None:
    """Refuse far too many acknowledgements before they are made (BATCH_TOO_LARGE).

    The key of a token stands in each of them, and once more at most where a value is the same text.
    Decoding the ranges that 4 MiB have room for would take 200 ms.
    """
    if body.count(b'"token"') > 2 * ACKS_MAX or body.count(b"[") > _ARRAYS_MAX:
        raise too_many_acks()


def too_many_acks() -> ApiError:
    """The refusal of a request that acknowledges more than `ACKS_MAX` messages."""
    detail = f"a request must not acknowledge more than {ACKS_MAX} messages"
    return ApiError(errors.BATCH_TOO_LARGE, detail, applied=False)


class PullTerms(msgspec.Struct, frozen=True):
    """A valid pull. ``expires_given`` tells a chosen expiry from the default."""

    batch: int
    max_bytes: int
    no_wait: bool
    expires_ns: int
    expires_given: bool
    heartbeat_ns: int


_PRIORITY_FIELDS: Final = ("min_pending", "min_ack_pending", "group", "id", "priority")


def pull_terms(body: PullBody, *, heartbeats: bool) -> PullTerms:
    """The terms of ``body``; ``heartbeats`` is whether its answer has a place for them.

    Raises PULL_INVALID with a pointer.
    """
    for name in _PRIORITY_FIELDS:
        if getattr(body, name) is not None:
            raise _invalid(name, "requires a priority policy, which the consumer does not have")
    expires_ns = _duration("expires", body.expires)
    if expires_ns > EXPIRES_MAX_NS:
        raise _invalid("expires", "must not be longer than 60s")
    expires_given = expires_ns > 0
    if not expires_given and not body.no_wait:
        expires_ns = EXPIRES_DEFAULT_NS
    heartbeat_ns = _duration("idle_heartbeat", body.idle_heartbeat)
    if heartbeat_ns:
        if not heartbeats:
            raise _invalid("idle_heartbeat", "requires an NDJSON answer or a WebSocket")
        if heartbeat_ns < HEARTBEAT_MIN_NS:
            raise _invalid("idle_heartbeat", "must be at least 100ms")
        # JetStream refuses this too.
        if heartbeat_ns * 2 > expires_ns:
            raise _invalid("idle_heartbeat", "must not be longer than half of expires")
    return PullTerms(
        batch=body.batch,
        max_bytes=body.max_bytes,
        no_wait=body.no_wait,
        expires_ns=expires_ns,
        expires_given=expires_given,
        heartbeat_ns=heartbeat_ns,
    )


def check_ack(ack: AckRequest, at: str) -> int:
    """Return the delay in ns; INVALID_FIELD, at the pointer ``at``, for what is not valid."""
    if ack.delay is not None and ack.kind != "nak":
        raise _invalid(f"{at}/delay", "is only allowed with nak", errors.INVALID_FIELD)
    if ack.reason is not None and ack.kind != "term":
        raise _invalid(f"{at}/reason", "is only allowed with term", errors.INVALID_FIELD)
    if ack.ranges is not None:
        _check_ranges(ack, f"{at}/ranges")
    return _duration(f"{at}/delay", ack.delay, errors.INVALID_FIELD)


def _check_ranges(ack: AckRequest, at: str) -> None:
    if not ack.token.endswith(f".{ALL}"):
        raise _invalid(at, "is only allowed with the token of columns", errors.INVALID_FIELD)
    end = -1
    for first, last in ack.ranges or ():
        if not end < first <= last:
            message = "must be positions from 0 on, in ascending ranges that do not overlap"
            raise _invalid(at, message, errors.INVALID_FIELD)
        end = last


def _duration(field: str, value: GivenDuration, spec: ErrorSpec = errors.PULL_INVALID) -> int:
    if value is None:
        return 0
    try:
        duration_ns = parse_duration(value)
    except ValueError as error:
        raise _invalid(field, str(error), spec) from None
    if duration_ns < 0:
        raise _invalid(field, "must not be negative", spec)
    return duration_ns


def _invalid(field: str, message: str, spec: ErrorSpec = errors.PULL_INVALID) -> ApiError:
    pointer = f"/{field}"
    return ApiError(spec, f"{field}: {message}", [FieldProblem(pointer, message)], applied=False)
