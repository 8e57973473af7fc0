"""Publishing one message, whose payload is the request body."""

import contextlib
import functools
from typing import Annotated, Final

import msgspec

from contrail_api.message_headers import from_request
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import JSON, Answer, Response, header_template
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.inputs.message_items import checked
from contrail_edge.inputs.negotiation import BYTES_TYPE, JSON_TYPE
from contrail_edge.inputs.query import parse_query
from contrail_edge.routing import AnswerDoc, BodyDoc, Direct, HeaderDoc, Operation, Reply, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishOutcome
from contrail_link.publishing import publish, refusal_by_subject

_encoder: Final = msgspec.json.Encoder()
_BY_SUBJECT: Final = ""
"""In place of a stream's name: publish to the stream that captures the subject."""


class PublishQuery(msgspec.Struct):
    """Parameters of a single publish."""

    ack: Annotated[
        str,
        msgspec.Meta(
            description="`none`: answer immediately, without waiting until the message is stored.",
            extra_json_schema={"enum": ["none"]},
        ),
    ] = ""


class PublishAckJson(msgspec.Struct):
    """Where a message was stored.

    ``duplicate`` is true if a message with the same id was already stored, under this ``seq``.
    ``shard`` is present for a stream with several shards.
    """

    stream: str
    """Name of the stream."""
    seq: int
    """Sequence of the message."""
    duplicate: bool
    """True if a message with the same id was already stored."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Shard of the message, if the stream has several."""


TAG: Final = "publishing"
DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="How durable an acknowledged message is: `memory`, `fsync` or `quorum-fsync`.",
    example="fsync",
)
_MESSAGE_HEADERS: Final = (
    HeaderDoc(
        name="Idempotency-Key",
        description="Message id, same as Nats-Msg-Id. A second publish with the same id within the "
        "stream's duplicate window stores nothing.",
        example="order-1017-created",
    ),
    HeaderDoc(
        name="Nats-Msg-Id",
        description="Message id, used to detect duplicates.",
        example="order-1017-created",
    ),
    HeaderDoc(
        name="Nats-Expected-Stream",
        description="Store the message only if this stream captures the subject.",
        example="ORDERS",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Sequence",
        description="Store the message only if the stream's last sequence has this value.",
        example="41",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence",
        description="Store the message only if the subject's last sequence has this value. 0 means "
        "that the subject has no messages.",
        example="40",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Subject-Sequence-Subject",
        description="Subject or filter to which Nats-Expected-Last-Subject-Sequence applies. "
        "Default: the subject of the message.",
        example="orders.eu.*",
    ),
    HeaderDoc(
        name="Nats-Expected-Last-Msg-Id",
        description="Store the message only if the stream's last message has this id.",
        example="order-1016-created",
    ),
    HeaderDoc(
        name="Nats-Rollup",
        description="Replace all earlier messages of the subject (`sub`) or of the stream (`all`). "
        "The stream must have `allow_rollup_hdrs`.",
        example="sub",
    ),
    HeaderDoc(
        name="Nats-TTL",
        description="How long to keep the message: a number of seconds, a duration of at least 1s, "
        "or `never`, which also exempts the message from max_age. 0 has no effect. The "
        "stream must have `allow_msg_ttl`.",
        example="90s",
    ),
    HeaderDoc(
        name="traceparent",
        description="W3C trace context, stored with the message.",
        example="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    HeaderDoc(
        name="tracestate",
        description="Vendor-specific W3C trace data, stored with the message.",
        example="congo=t61rcWkgMzE",
    ),
)
MESSAGE_ERRORS: Final = (
    errors.INVALID_SUBJECT,
    errors.MESSAGE_TOO_LARGE,
    errors.HEADERS_TOO_LARGE,
    errors.EXPECTED_STREAM,
    errors.WRONG_LAST_SEQUENCE,
    errors.LAST_UNSETTLED,
    errors.WRONG_LAST_MSG_ID,
    errors.EXPECTED_SUBJECT_ALONE,
    errors.FEATURE_HEADER,
    errors.ROLLUP_REFUSED,
    errors.TTL_INVALID,
    errors.TTL_DISABLED,
    errors.STREAM_SEALED,
    errors.STORE_FAILED,
    errors.STORAGE_FULL,
    errors.MEMORY_FULL,
    errors.SUBJECT_KEYS_FULL,
    errors.STORAGE_FAILED,
    errors.OUTCOME_UNKNOWN,
)
PUBLISH: Final = Operation(
    operation_id="publish",
    tag=TAG,
    summary="Publish one message",
    description="The request body is the payload and may have any content type. The message "
    "goes to the stream that captures the subject, and is durable once the answer "
    "arrives. With `ack=none` the answer comes immediately and does not mean that the "
    "message will be stored. Request headers named `Msg-Header-<Name>` are stored as "
    "message headers named `<Name>`. A header named `Msg-Header-<Name>*` takes its value "
    "in RFC 8187 form.",
    query=PublishQuery,
    headers=_MESSAGE_HEADERS,
    body={BYTES_TYPE: BodyDoc(shape={"type": "string", "format": "binary"})},
    body_required=False,
    answers={
        201: AnswerDoc(
            description="Stored.",
            content={
                JSON_TYPE: BodyDoc(
                    shape=PublishAckJson,
                    example={"stream": "ORDERS", "seq": 42, "duplicate": False},
                )
            },
            headers=(DURABILITY,),
        ),
        200: AnswerDoc(
            description="A message with this id was already stored, under this sequence.",
            content={
                JSON_TYPE: BodyDoc(
                    shape=PublishAckJson, example={"stream": "ORDERS", "seq": 17, "duplicate": True}
                )
            },
            headers=(DURABILITY,),
        ),
        202: AnswerDoc(
            description="Accepted with `ack=none`. The message may or may not be stored."
        ),
    },
    errors=(
        errors.NO_STREAM_FOR_SUBJECT,
        errors.UNSUPPORTED_MEDIA,
        errors.SHARDED_UNSUPPORTED,
        *MESSAGE_ERRORS,
    ),
)


class SinglePublish:
    """``POST /v1/subjects/{subject}/messages``."""

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link
        self._payload_bytes_max = settings.payload_bytes_max
        self._unanswered_max = settings.unanswered_publishes_max
        self._unanswered_bytes_max = settings.unanswered_bytes_max
        # Publishes with `ack=none` that storage has not finished, and the bytes of their payloads.
        self._unanswered = self._unanswered_bytes = 0

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route(
                "POST",
                "/v1/subjects/{subject}/messages",
                self.publish,
                PUBLISH,
                Direct(self.publish_directly),
            ),
        )

    async def publish(self, request: Request) -> Answer:
        """Store the body under the subject of the path, in the stream that captures it."""
        payload = await request.body(self._payload_bytes_max, errors.MESSAGE_TOO_LARGE)
        message = self._message(request, payload)
        if request.query_string and self._wants_no_ack(request):
            # A wrong subject is an error of the program, so it is reported even without an ack.
            stream = await self._link.stream_for_subject(message.subject)
            self._publish_unanswered(stream, message)
            return Response(202)
        answer = _answer(await publish(self._link, _BY_SUBJECT, [message]))
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def publish_directly(self, request: Request, body: bytes, reply: Reply) -> None:
        """Store ``body`` as :meth:`publish` does, for a request without parameters."""
        prepared = request.prepared
        if isinstance(prepared, PublishMessage) and len(body) <= self._payload_bytes_max:
            # All other checks were of the head, and only the payload differs.
            message = PublishMessage(prepared.subject, prepared.headers, body)
        else:
            message = self._message(request, body)
        self._link.publish_then(_BY_SUBJECT, [message], lambda outcome: reply(_answer(outcome)))

    def _message(self, request: Request, payload: bytes) -> PublishMessage:
        headers = from_request(request.raw_headers)
        message = PublishMessage(request.path_values["subject"], headers, payload)
        candidate = checked(message, self._payload_bytes_max)
        if isinstance(candidate, ApiError):
            raise candidate
        if candidate.is_plain:
            request.prepared = PublishMessage(message.subject, headers, b"")
        return candidate

    @staticmethod
    def _wants_no_ack(request: Request) -> bool:
        wanted = parse_query(request.query_string, PublishQuery).ack
        if wanted not in ("", "none"):
            raise invalid_field("ack", 'must be "none" if given')
        return wanted == "none"

    def _publish_unanswered(self, stream: str, message: PublishMessage) -> None:
        size = len(message.payload)
        # Nothing slows down a client that waits for no acks, so there is a bound.
        if (
            self._unanswered >= self._unanswered_max
            or self._unanswered_bytes + size > self._unanswered_bytes_max
        ):
            raise ApiError(
                errors.OVERLOADED,
                "too many publishes without acknowledgement are in flight",
                applied=False,
            )

        def done(_: PublishOutcome) -> None:
            self._unanswered -= 1
            self._unanswered_bytes -= size

        # The publisher wants no answer, not even if the message is refused at once.
        with contextlib.suppress(ApiError):
            self._link.publish_then(stream, [message], done)
            self._unanswered += 1
            self._unanswered_bytes += size


def _answer(outcome: PublishOutcome) -> Response | ApiError:
    if isinstance(outcome, ApiError):
        return outcome
    result = outcome.results[0]
    if result.code:
        return refusal_by_subject(result.code, result.detail)
    ack = PublishAckJson(outcome.stream, result.seq, result.duplicate)
    if result.shard is not None:
        ack.shard = result.shard
    status, body = 200 if result.duplicate else 201, _encoder.encode(ack)
    return Response(status, body, lines=_template(outcome.durability) % len(body))


@functools.cache  # there are three
def _template(durability: str) -> bytes:
    """Return the template of the headers of all acks with a durability."""
    return header_template(JSON, [(b"durability", durability.encode())])
