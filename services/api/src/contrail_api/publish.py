"""Publishing one message, whose payload is the request body."""

import contextlib
from typing import Annotated, Final

import msgspec

from contrail_api.message_headers import from_request
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import JSON, Answer, Response
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.inputs.message_items import checked
from contrail_edge.inputs.query import parse_query
from contrail_edge.routing import Reply
from contrail_link.contract import PublishOutcome, PubResult, StorageLink
from contrail_link.publishing import publish

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
    seq: int
    duplicate: bool
    shard: int | msgspec.UnsetType = msgspec.UNSET


class SinglePublish:
    """``POST /v1/subjects/{subject}/messages``."""

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link
        self._payload_bytes_max = settings.payload_bytes_max
        self._unanswered_max = settings.unanswered_publishes_max
        self._unanswered_bytes_max = settings.unanswered_bytes_max
        self._unanswered = self._unanswered_bytes = 0

    async def publish(self, request: Request) -> Answer:
        """Store the body under the subject of the path, in the stream that captures it."""
        payload = await request.body(self._payload_bytes_max, errors.MESSAGE_TOO_LARGE)
        message = self._message(request, payload)
        if request.query_string and self._wants_no_ack(request):
            stream = await self._link.stream_for_subject(message.subject)
            self._publish_unanswered(stream, message)
            return Response(202)
        answer = _answer(await publish(self._link, _BY_SUBJECT, [message]))
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def publish_directly(self, request: Request, body: bytes, reply: Reply) -> None:
        """Store ``body`` as :meth:`publish` does, for a request without parameters."""
        message = self._message(request, body)
        self._link.publish_then(_BY_SUBJECT, [message], lambda outcome: reply(_answer(outcome)))

    def _message(self, request: Request, payload: bytes) -> PublishMessage:
        headers = from_request(request.raw_headers)
        message = PublishMessage(request.path_values["subject"], headers, payload)
        candidate = checked(message, self._payload_bytes_max)
        if isinstance(candidate, ApiError):
            raise candidate
        return candidate

    @staticmethod
    def _wants_no_ack(request: Request) -> bool:
        wanted = parse_query(request.query_string, PublishQuery).ack
        if wanted not in ("", "none"):
            raise invalid_field("ack", 'must be "none" if given')
        return wanted == "none"

    def _publish_unanswered(self, stream: str, message: PublishMessage) -> None:
        size = len(message.payload)
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
        return refused(result)
    ack = PublishAckJson(outcome.stream, result.seq, result.duplicate)
    if result.shard is not None:
        ack.shard = result.shard
    body = _encoder.encode(ack)
    durability = (b"durability", outcome.durability.encode())
    return Response(200 if result.duplicate else 201, body, JSON, [durability])


def refused(result: PubResult) -> ApiError:
    """Return the error with which storage refused a message."""
    spec = errors.REGISTRY.get(result.code, errors.INTERNAL)
    # Only an unknown outcome may have had an effect.
    return ApiError(spec, result.detail, applied=None if spec is errors.OUTCOME_UNKNOWN else False)
