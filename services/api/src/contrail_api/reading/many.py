"""Reading many messages in one request."""

from typing import Annotated, Final

import msgspec

from contrail_api.reading.parameters import (
    MESSAGE,
    MESSAGES_PATH,
    POSITION,
    READING,
    ReadQuery,
    check_read,
    one_shard,
    read_as,
)
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Headers
from contrail_common.subjects import subject_problem
from contrail_common.timeunits import INT64_MAX, format_time
from contrail_edge.http.problems import Problem, invalid_field, problem
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Response
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.json_body import decode_json
from contrail_edge.inputs.messages import NO_HEADERS, MessageFields, message_json
from contrail_edge.inputs.negotiation import JSON_TYPE, MSGPACK_TYPE, acceptable, content_type
from contrail_edge.inputs.query import parse_query
from contrail_edge.inputs.schema_marks import TimeText
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.read import ManyRequest, ManyResult

MANY_MAX: Final = 1_000
MANY_BYTES_MAX: Final = 4 << 20
"""Bytes of headers and payloads in an answer; its first message may be larger."""
_BODY_BYTES_MAX: Final = 1 << 20
_SUBJECTS_IN_STEP: Final = 64
_STEP_MESSAGES: Final = 64
_STEP_BYTES: Final = 256 << 10


class ManyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which messages to read: by sequence, or the newest of each subject."""

    seqs: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=1, le=INT64_MAX)]],
            msgspec.Meta(min_length=1, max_length=MANY_MAX),
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    """Sequences of the messages, at most 1,000."""
    subjects: (
        Annotated[list[str], msgspec.Meta(min_length=1, max_length=MANY_MAX)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """Subjects without wildcards, at most 1,000: the newest message of each is read."""


class ManyResultJson(msgspec.Struct):
    """A message with the fields of ``get_message_json``, or the ``problem`` instead of them."""

    stream: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the stream."""
    seq: int | msgspec.UnsetType = msgspec.UNSET
    """Sequence of the message."""
    subject: str | msgspec.UnsetType = msgspec.UNSET
    """Subject of the message."""
    time: TimeText | msgspec.UnsetType = msgspec.UNSET
    """Time at which the message was stored."""
    headers: Headers | msgspec.UnsetType = msgspec.UNSET
    """Message headers, each with its values."""
    data: str | msgspec.UnsetType = msgspec.UNSET
    """Payload, if it is UTF-8 text."""
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    """Payload in base64, if it is not UTF-8 text or base64 was requested."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Shard of the message, if the stream has several."""
    problem: Problem | msgspec.UnsetType = msgspec.UNSET
    """Why the message is not returned."""


class ManyMessages(msgspec.Struct):
    """The messages, in the order of the request."""

    results: list[ManyResultJson]
    """Each message, or the problem that prevents it from being returned."""


class PackedMessage(MessageFields, gc=False):
    """A message in msgpack: the payload is the bytes of ``data``."""

    data: bytes
    shard: int | msgspec.UnsetType = msgspec.UNSET


class _Missing(msgspec.Struct):
    problem: Problem


_decoder: Final = msgspec.json.Decoder(ManyBody)
_json: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()
_NOT_FOUND: Final = _Missing(problem(ApiError(errors.MESSAGE_NOT_FOUND, applied=False)))
_LEFT_OUT: Final = _Missing(problem(ApiError(errors.MESSAGE_LEFT_OUT, applied=False)))

GET_MANY: Final = Operation(
    operation_id="get_messages",
    tag=READING,
    summary="Read many messages at once",
    description="Returns the messages with up to 1,000 sequences, or the newest message of each of "
    "up to 1,000 subjects. The results are in the order of the request. A message that "
    "does not exist has the problem `message_not_found`.\n\nAn answer has about 4 MiB of "
    "headers and payloads, but always at least one message. Messages beyond that have the "
    "problem `message_left_out`: ask for them in another request.\n\nWith `Accept: "
    "application/vnd.msgpack` the results are in msgpack, with payloads as bytes in "
    "`data`. If the stream has several shards, sequences need `shard`; subjects do not.",
    query=ReadQuery,
    body={
        JSON_TYPE: BodyDoc(shape=ManyBody, example={"subjects": ["orders.eu.created"]}),
    },
    answers={
        200: AnswerDoc(
            description="A result for each sequence or subject.",
            content={JSON_TYPE: BodyDoc(shape=ManyMessages, example={"results": [MESSAGE]})},
            headers=POSITION,
        )
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
        errors.CONFLICTING_FIELDS,
        errors.MESSAGE_NOT_FOUND,
        errors.MESSAGE_LEFT_OUT,
    ),
)


class ManyMessageReads:
    """``POST /v1/streams/{stream}/messages/get``."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the route with its documentation."""
        return (Route("POST", f"{MESSAGES_PATH}/get", self.get, GET_MANY),)

    async def get(self, request: Request) -> Response:
        """Return the messages that the body asks for."""
        query = parse_query(request.query_string, ReadQuery)
        base64 = check_read(query)
        form = acceptable(request.headers.get(b"accept"), (JSON_TYPE, MSGPACK_TYPE))
        content_type(request.headers.get(b"content-type"), (JSON_TYPE,))
        body = decode_json(_decoder, await request.body(_BODY_BYTES_MAX))
        seqs = [] if body.seqs is msgspec.UNSET else body.seqs
        subjects = [] if body.subjects is msgspec.UNSET else body.subjects
        if bool(seqs) == bool(subjects):
            raise invalid_field("", "must have either seqs or subjects", errors.CONFLICTING_FIELDS)
        await in_turns(_check(subjects))
        asked = ManyRequest(
            stream=request.path_values["stream"],
            seqs=seqs,
            subjects=subjects,
            max_bytes=MANY_BYTES_MAX,
            shard=one_shard(query.shard),
        )

        async def read(replica: str) -> ManyResult:
            return await self._link.get_messages(msgspec.structs.replace(asked, replica=replica))

        found, position = await read_as(
            query.consistency, self._link, asked.stream, asked.shard, read
        )
        packed = form == MSGPACK_TYPE
        encode = (
            _in_msgpack(asked.stream, found) if packed else _in_json(asked.stream, found, base64)
        )
        return Response(200, await in_turns(encode), form.encode(), position)


def _check(subjects: list[str]) -> Steps[None]:
    for at, subject in enumerate(subjects):
        found = subject_problem(subject)
        if found is not None:
            raise invalid_field(f"/subjects/{at}", found, errors.INVALID_SUBJECT)
        if at % _SUBJECTS_IN_STEP == 0:
            yield


def _in_json(stream: str, found: ManyResult, base64: bool) -> Steps[bytes]:
    body, left_out = bytearray(b'{"results":['), set(found.left_out)
    step_end = _STEP_BYTES
    for at, stored in enumerate(found.messages):
        if at:
            body += b","
        if stored is None:
            body += _json.encode(_LEFT_OUT if at in left_out else _NOT_FOUND)
        else:
            _json.encode_into(message_json(stream, stored, base64=base64), body, -1)
        if at % _STEP_MESSAGES == 0 or len(body) > step_end:
            step_end = len(body) + _STEP_BYTES
            yield
    body += b"]}"
    return bytes(body)


def _in_msgpack(stream: str, found: ManyResult) -> Steps[bytes]:
    body, left_out = bytearray(_msgpack_head(len(found.messages))), set(found.left_out)
    step_end = _STEP_BYTES
    times: dict[int, str] = {}
    for at, stored in enumerate(found.messages):
        if stored is None:
            body += _msgpack.encode(_LEFT_OUT if at in left_out else _NOT_FOUND)
        else:
            # Messages that were stored together have the same time.
            time = times.get(stored.time_ns)
            if time is None:
                time = times[stored.time_ns] = format_time(stored.time_ns)
            headers = stored.headers or NO_HEADERS
            shard = msgspec.UNSET if stored.shard is None else stored.shard
            one = PackedMessage(
                stream, stored.seq, stored.subject, time, headers, stored.payload, shard
            )
            _msgpack.encode_into(one, body, -1)
        if at % _STEP_MESSAGES == 0 or len(body) > step_end:
            step_end = len(body) + _STEP_BYTES
            yield
    return bytes(body)


def _msgpack_head(count: int) -> bytes:
    """Return what comes before the results: a map of one, its key, an array of ``count``."""
    return b"\x81" + _msgpack.encode("results") + b"\xdd" + count.to_bytes(4)
