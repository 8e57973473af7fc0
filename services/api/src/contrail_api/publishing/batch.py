"""Publishing many messages to one stream in one request: JSON, NDJSON and msgpack."""

import asyncio
from typing import Annotated, Final

import msgspec
import structlog

from contrail_api.publishing.atomic import atomic_answer, atomic_batch
from contrail_api.publishing.candidates import Admitted, admitted
from contrail_api.publishing.ndjson import NdjsonBatch
from contrail_api.publishing.numbered import NumberedQuery, set_number
from contrail_api.publishing.packed import packed_batch
from contrail_api.publishing.results import (
    BatchResults,
    Result,
    all_stored,
    encode_lines,
    encode_results,
    encode_runs,
    results_of,
)
from contrail_api.publishing.single import (
    DURABILITY,
    MESSAGE_ERRORS,
    TAG,
)
from contrail_api.publishing.text_items import text_body, text_parts
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import BATCH_MESSAGES_MAX
from contrail_edge.http.problems import BatchResult
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Response
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import Turn, in_turns
from contrail_edge.inputs.item_steps import candidates, is_plain, json_item
from contrail_edge.inputs.json_body import decode_json
from contrail_edge.inputs.json_steps import NESTING_MAX, outline
from contrail_edge.inputs.message_items import (
    Candidate,
    MessageItem,
    candidate,
    check_count,
    payload_of,
)
from contrail_edge.inputs.negotiation import (
    JSON_TYPE,
    MSGPACK_TYPE,
    NDJSON_TYPE,
    acceptable,
    content_type,
)
from contrail_edge.inputs.query import parse_query
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import AnswerDoc, BodyDoc, Direct, Operation, Reply, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishOutcome
from contrail_link.publishing import publish

_FORMS: Final = (JSON_TYPE, NDJSON_TYPE, MSGPACK_TYPE)
DIRECT_TYPES: Final = frozenset(form.encode() for form in _FORMS)
BATCH_DIRECT_BYTES_MAX: Final = 512 << 10
"""Bytes of a body, about two log entries, up to which a batch is answered directly."""
_ANSWERS: Final = (JSON_TYPE, MSGPACK_TYPE)
_ENCODERS: Final = {
    JSON_TYPE: encode_results,
    MSGPACK_TYPE: encode_runs,
    NDJSON_TYPE: encode_lines,
}
_ITEMS_IN_STEP: Final = 64
"""Messages of a short body that are looked at in one step: one by one costs a quarter more."""
_ITEM_DEPTH: Final = 3
"""Levels of nesting around the value of ``json`` in an item of a JSON batch."""
_ITEM_LEVEL: Final = 2
"""Brackets around an item of a JSON batch."""


class JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch of messages for one stream."""

    messages: list[MessageItem]
    """The messages, at most 10,000."""


class BatchQuery(NumberedQuery):
    """Parameters of a batch publish."""

    atomic: Annotated[bool, msgspec.Meta(description="Store either all messages or none.")] = False


_RESULTS: Final = {
    "results": [
        {"seq": 43, "duplicate": False},
        {
            "problem": {
                "type": "urn:contrail:error:subject_not_captured",
                "title": "the stream does not capture the subject",
                "status": 409,
                "detail": "the stream does not capture the subject",
                "code": 20002,
                "name": "subject_not_captured",
                "retryable": False,
                "errors": [],
            }
        },
    ]
}


class BatchAck(msgspec.Struct):
    """``results`` in the order of the messages or, for an atomic batch, all the other fields.

    ``shard`` is present for a stream with several shards.
    """

    results: list[BatchResult] | msgspec.UnsetType = msgspec.UNSET
    """Result of each message, in order, unless the batch is atomic."""
    stream: str | msgspec.UnsetType = msgspec.UNSET
    """Atomic batch: name of the stream."""
    first_seq: int | msgspec.UnsetType = msgspec.UNSET
    """Atomic batch: sequence of the first message."""
    last_seq: int | msgspec.UnsetType = msgspec.UNSET
    """Atomic batch: sequence of the last message."""
    count: int | msgspec.UnsetType = msgspec.UNSET
    """Atomic batch: number of messages."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Atomic batch: shard of the messages, if the stream has several."""


BATCH: Final = Operation(
    operation_id="publish_batch",
    tag=TAG,
    summary="Publish many messages",
    description="Each message is stored or refused independently; the results are in the order of "
    "the messages. A request is limited to 10,000 messages and 16 MiB.\n\nWith "
    "`atomic=true` either all messages are stored, with consecutive sequences, or none. "
    "An atomic batch is limited to 1,000 messages and 2 MiB, and the stream must have "
    "`allow_atomic`.\n\nWith `producer` and `number` no message is stored twice, however late the "
    "batch is repeated. Each message needs an id. Those of a number below the producer's last one "
    "are duplicates, whose `seq` is 0; those of the last number are duplicates if their ids were "
    "known when it was first used, or stored since.\n\nThe Content-Type selects one of two other "
    "body formats. "
    "`application/x-ndjson` has one message per line and is read as a stream. With "
    "`Accept: application/x-ndjson` the results are streamed back line by line; the "
    "status is 200 if the first results are sent before the last are known. "
    "`application/vnd.msgpack` is `[1, [[subject, headers or nil, payload], ...]]` or, "
    "for messages without headers, `[2, [subjects, subject_index, offsets, payload, ids "
    "or nil]]`: distinct subjects, the index of each message's subject (u32), the offset "
    "of each payload and of the end (u32), all payloads, and nil or `[offsets, texts]` "
    "with an id for each message, empty for none; numbers are little-endian.\n\nWith "
    "`Accept: application/vnd.msgpack` the results are runs of consecutive messages: "
    '`{"runs": [{"count", "first_seq", "duplicate"?, "shard"?} or '
    '{"count", "problem"}]}`.',
    query=BatchQuery,
    body={
        JSON_TYPE: BodyDoc(
            shape=JsonBatch,
            example={
                "messages": [
                    {"subject": "orders.eu.created", "json": {"id": 1017}},
                    {"subject": "orders.eu.paid", "data": "1017", "msg_id": "paid-1017"},
                ]
            },
        ),
    },
    answers={
        201: AnswerDoc(
            description="All messages were stored. For an atomic batch, the range of their "
            "sequences.",
            content={
                JSON_TYPE: BodyDoc(
                    shape=BatchAck, example={"results": [{"seq": 43, "duplicate": False}]}
                )
            },
            headers=(DURABILITY,),
        ),
        207: AnswerDoc(
            description="Some messages were refused, or their outcome is unknown.",
            content={JSON_TYPE: BodyDoc(shape=BatchResults, example=_RESULTS)},
            headers=(DURABILITY,),
        ),
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.BATCH_TOO_LARGE,
        errors.SUBJECT_NOT_CAPTURED,
        errors.ATOMIC_DISABLED,
        errors.ATOMIC_UNSUPPORTED,
        errors.ATOMIC_DUPLICATE,
        errors.ATOMIC_TOO_LARGE,
        errors.WRONG_LAST_SEQUENCE_IN_BATCH,
        errors.SHARDED_UNSUPPORTED,
        errors.NUMBER_FORGOTTEN,
        *MESSAGE_ERRORS,
    ),
)
_item_decoder: Final = msgspec.json.Decoder(MessageItem)
_json_decoder: Final = msgspec.json.Decoder(JsonBatch)
_log: Final = structlog.get_logger(__name__)


class BatchPublish:
    """``POST /v1/streams/{stream}/messages``."""

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link
        self._payload_bytes_max = settings.payload_bytes_max
        self._body_bytes_max = settings.body_bytes_max
        self._ndjson = NdjsonBatch(link, settings)
        self._running: set[asyncio.Task[None]] = set()  # the event loop only has weak references

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route(
                "POST",
                "/v1/streams/{stream}/messages",
                self.publish,
                BATCH,
                Direct(self.publish_directly, DIRECT_TYPES, BATCH_DIRECT_BYTES_MAX),
            ),
        )

    async def publish(self, request: Request) -> Answer:
        """Store the messages of the body, each by itself unless the batch is atomic."""
        form = content_type(request.headers.get(b"content-type"), _FORMS)
        stream = request.path_values["stream"]
        query = parse_query(request.query_string, BatchQuery)
        atomic, numbered = query.atomic, query.numbered()
        lines = form == NDJSON_TYPE and not atomic and numbered is None
        offers = (*_ANSWERS, NDJSON_TYPE) if lines else _ANSWERS
        shown = acceptable(request.headers.get(b"accept"), offers)
        if shown == NDJSON_TYPE:
            return await self._ndjson.publish_streaming(request, stream)
        if lines:
            piece = await self._ndjson.publish_all(request, stream)
            return _response(piece.results, piece.durability, shown)
        body = await request.body(self._body_bytes_max)
        asked = await in_turns(self._asked(form, body))
        set_number(asked, numbered)
        if atomic:
            return atomic_answer(await publish(self._link, stream, atomic_batch(asked)), shown)
        ack = await publish(self._link, stream, asked.batch)
        return _response(results_of(asked.refused, ack.results), ack.durability, shown)

    def publish_directly(self, request: Request, body: bytes, reply: Reply) -> None:
        """Store the messages of ``body`` as :meth:`publish` does.

        The request has no query, and its content type is one of ``DIRECT_TYPES``.
        """
        form = request.headers[b"content-type"].decode()
        offers = (*_ANSWERS, NDJSON_TYPE) if form == NDJSON_TYPE else _ANSWERS
        shown = acceptable(request.headers.get(b"accept"), offers)
        stream = request.path_values["stream"]
        steps = self._asked(form, body)
        turn = Turn()
        # Most batches are read within one turn. Only a longer one needs a task.
        try:
            while not turn.over:
                next(steps)
        except StopIteration as read:
            self._publish_then(stream, read.value, shown, reply)
            return
        later = self._publish_later(stream, steps, shown, reply)
        task = asyncio.get_running_loop().create_task(later)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _publish_later(
        self, stream: str, steps: Steps[Admitted], shown: str, reply: Reply
    ) -> None:
        try:
            self._publish_then(stream, await in_turns(steps), shown, reply)
        except ApiError as error:
            reply(error)
        except Exception:
            _log.exception("request_failed")
            reply(ApiError(errors.INTERNAL))

    def _publish_then(self, stream: str, asked: Admitted, shown: str, reply: Reply) -> None:
        def done(outcome: PublishOutcome) -> None:
            if isinstance(outcome, ApiError):
                reply(outcome)
            else:
                results = results_of(asked.refused, outcome.results)
                reply(_response(results, outcome.durability, shown))

        self._link.publish_then(stream, asked.batch, done)

    def _asked(self, form: str, body: bytes) -> Steps[Admitted]:
        if form == MSGPACK_TYPE:
            return packed_batch(body, self._payload_bytes_max)
        if form == NDJSON_TYPE:
            # Stored as one, unlike a body that arrives in pieces.
            return self._ndjson.whole(body)
        return self._json(body)

    def _json(self, body: bytes) -> Steps[Admitted]:
        # Read all payloads first, so that a malformed body is refused before anything is stored.
        batch = text_body(body, self._payload_bytes_max)
        if batch is not None:
            return Admitted(batch, {})
        yield
        if is_plain(body):
            items = decode_json(_json_decoder, body).messages
            check_count(len(items))
            known: list[Candidate] = []
            for start in range(0, len(items), _ITEMS_IN_STEP):
                some = enumerate(items[start : start + _ITEMS_IN_STEP], start)
                known += [self._candidate(item, at) for at, item in some]
                yield
            return (yield from admitted(known))
        found = yield from outline(body, _ITEM_LEVEL, BATCH_MESSAGES_MAX, "messages")
        decode_json(_json_decoder, found.skeleton)
        # The outline has an array of messages for each field of this name, the decoder only the
        # last.
        if len(found.inner) != 1:
            raise ApiError(errors.MALFORMED_BODY, "messages are given twice")
        texts = [body[start:end] for start, end in found.inner[0]]
        batch = yield from text_parts(texts, self._payload_bytes_max)
        if batch is not None:
            return Admitted(batch, {})
        parts = (
            json_item(_item_decoder, text, f"/messages/{at}", self._payload_bytes_max)
            for at, text in enumerate(texts)
        )
        return (yield from admitted((yield from candidates(parts, self._payload_bytes_max))))

    def _candidate(self, item: MessageItem, at: int) -> Candidate:
        payload = payload_of(item, f"/messages/{at}", NESTING_MAX - _ITEM_DEPTH)
        return candidate(item, payload, self._payload_bytes_max, at)


def _response(results: list[Result], durability: str, shown: str) -> Response:
    status = 201 if all_stored(results) else 207
    headers = [(b"durability", durability.encode())]
    return Response(status, _ENCODERS[shown](results), shown.encode(), headers)
