"""Reading and deleting one message."""

from typing import Final

from contrail_api.message_headers import payload_type, to_response
from contrail_api.reading.parameters import (
    BINARY,
    MESSAGE,
    MESSAGES_PATH,
    POSITION,
    READING,
    ReadQuery,
    ShardQuery,
    check_read,
    one_shard,
    path_seq,
    read_as,
)
from contrail_common import errors
from contrail_common.model import StoredMessage
from contrail_common.timeunits import format_time
from contrail_edge.direct_reads import DirectRead, PeekedAnswer
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import (
    Answer,
    Header,
    Response,
    header_template,
    json_response,
    no_content,
)
from contrail_edge.inputs.messages import Message, message_json
from contrail_edge.inputs.negotiation import (
    BYTES_TYPE,
    JSON_TYPE,
    names_json,
)
from contrail_edge.inputs.query import parse_query
from contrail_edge.routing import AnswerDoc, BodyDoc, Direct, HeaderDoc, Operation, Route
from contrail_link.contract import StorageLink

_PATH: Final = f"{MESSAGES_PATH}/{{seq}}"
_INERT: Final = [
    (b"x-content-type-options", b"nosniff"),
    # A published HTML page must not run scripts with the origin of this server.
    (b"content-security-policy", b"sandbox"),
]
_LINES: Final = header_template(
    BYTES_TYPE.encode(),
    [
        (b"nats-stream", b"%b"),
        (b"nats-subject", b"%b"),
        (b"nats-sequence", b"%d"),
        (b"nats-time-stamp", b"%b"),
        *_INERT,
    ],
)
"""The headers of most messages: without any of their own, in a stream with one shard."""
_MESSAGE_HEADERS: Final = (
    HeaderDoc(name="Nats-Stream", description="Name of the stream.", example="ORDERS"),
    HeaderDoc(
        name="Nats-Subject", description="Subject of the message.", example="orders.eu.created"
    ),
    HeaderDoc(name="Nats-Sequence", description="Sequence of the message.", example="42"),
    HeaderDoc(
        name="Nats-Time-Stamp",
        description="Time at which the message was stored.",
        example="2026-01-31T08:00:00.500000000Z",
    ),
    HeaderDoc(
        name="Contrail-Shard",
        description="Shard of the message, if the stream has several.",
        example="3",
    ),
)
GET: Final = Operation(
    operation_id="get_message",
    tag=READING,
    summary="Read one message as its payload",
    description="The response body is the payload, with the content type it was published with. "
    "Everything else is in headers: `Msg-Header-<Name>` is the message header `<Name>`, "
    "or `Msg-Header-<Name>*` in RFC 8187 form if the value is not printable ASCII. With "
    "`Accept: application/json` the answer is that of `get_message_json`.",
    query=ReadQuery,
    answers={
        200: AnswerDoc(
            description="The payload.",
            content={BYTES_TYPE: BINARY},
            headers=(*_MESSAGE_HEADERS, *POSITION),
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.MESSAGE_NOT_FOUND, errors.INVALID_FIELD),
)
GET_JSON: Final = Operation(
    operation_id="get_message_json",
    tag=READING,
    summary="Read one message as JSON",
    description="The message with its subject, time and headers. The payload is in `data` if it is "
    "UTF-8 text, otherwise in `data_base64`.",
    query=ReadQuery,
    answers={
        200: AnswerDoc(
            description="The message.",
            content={JSON_TYPE: BodyDoc(shape=Message, example=MESSAGE)},
            headers=POSITION,
        )
    },
    errors=GET.errors,
)
DELETE: Final = Operation(
    operation_id="delete_message",
    tag=READING,
    summary="Delete one message",
    description="The message can no longer be read once the answer arrives.",
    query=ShardQuery,
    answers={204: AnswerDoc(description="The message was deleted.")},
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.SEQUENCE_NOT_FOUND,
        errors.DELETE_DENIED,
        errors.STREAM_SEALED,
        errors.INVALID_FIELD,
        errors.OUTCOME_UNKNOWN,
    ),
)


class OneMessage:
    """The routes of a single message."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route("GET", _PATH, self.get, GET, Direct(DirectRead(self.get, self._peek))),
            Route("GET", f"{_PATH}/json", self.get_json, GET_JSON),
            Route("DELETE", _PATH, self.delete, DELETE),
        )

    async def get(self, request: Request) -> Response:
        """Return one message: its payload as the body, or JSON if the request asks for it."""
        if names_json(request.headers.get(b"accept")):
            return await self.get_json(request)
        stream, _, stored, position = await self._one(request)
        return _raw(stream, stored, position)

    def _peek(self, request: Request) -> PeekedAnswer:
        """Return the answer of :meth:`get` without parameters, as far as the link knows it."""
        if request.query_string or names_json(request.headers.get(b"accept")):
            return None
        stream = request.path_values["stream"]
        peeked = self._link.peek_message(stream, path_seq(request))
        return _raw(stream, peeked, []) if isinstance(peeked, StoredMessage) else peeked

    async def get_json(self, request: Request) -> Response:
        """Return one message as JSON, whatever the request accepts."""
        stream, base64, stored, position = await self._one(request)
        return json_response(200, message_json(stream, stored, base64=base64), position)

    async def _one(self, request: Request) -> tuple[str, bool, StoredMessage, list[Header]]:
        """Return the stream, whether to use base64, the message, and the replica's position."""
        query = parse_query(request.query_string, ReadQuery)
        base64 = check_read(query)
        stream, seq = request.path_values["stream"], path_seq(request)
        shard = one_shard(query.shard)

        async def read(replica: str) -> StoredMessage:
            return await self._link.get_message(stream, seq, shard, replica)

        if query.consistency == "leader":  # the usual case
            return stream, base64, await read(""), []
        stored, position = await read_as(query.consistency, self._link, stream, shard, read)
        return stream, base64, stored, position

    async def delete(self, request: Request) -> Answer:
        """Delete one message."""
        query = parse_query(request.query_string, ShardQuery)
        stream, seq = request.path_values["stream"], path_seq(request)
        await self._link.delete_message(stream, seq, one_shard(query.shard))
        return no_content()


def _raw(stream: str, stored: StoredMessage, position: list[Header]) -> Response:
    payload, subject = stored.payload, stored.subject
    special = position or stored.headers is not None or stored.shard is not None
    # As everywhere, a line break would forge headers, though no subject can have one.
    if not special and stream.isascii() and subject.isascii() and subject.isprintable():
        time = format_time(stored.time_ns).encode()
        values = (len(payload), stream.encode(), subject.encode(), stored.seq, time)
        return Response(200, payload, lines=_LINES % values)
    # The payload and its type come from a publisher, who may be an attacker of the reader.
    headers = to_response(stream, stored) + position + _INERT
    return Response(200, payload, payload_type(stored), headers)
