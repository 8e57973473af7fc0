"""Reading and removing messages without a consumer."""

from typing import Annotated, Final

import msgspec

from contrail_api.message_headers import payload_type, to_response
from contrail_api.tail import Tail
from contrail_common import errors
from contrail_common.model import StoredMessage
from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Header, Response, json_response, no_content
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.messages import Message, message_json, messages_json, payload_form
from contrail_edge.inputs.negotiation import (
    EVENTS_TYPE,
    JSON_TYPE,
    NDJSON_TYPE,
    acceptable,
    names_json,
)
from contrail_edge.inputs.query import (
    duration_parameter,
    filter_parameter,
    parse_query,
    time_parameter,
)
from contrail_link.contract import LastRequest, RangeRequest, RangeResult, StorageLink

RANGE_LIMIT_MAX: Final = 10_000
RANGE_BYTES_MAX: Final = 16 << 20
_INERT: Final = [
    (b"x-content-type-options", b"nosniff"),
    # A published HTML page must not run scripts with the origin of this server.
    (b"content-security-policy", b"sandbox"),
]
_SEQ_DIGITS_MAX: Final = 19

Payload = Annotated[
    str,
    msgspec.Meta(
        description="`base64`: return every payload as `data_base64`.",
        extra_json_schema={"enum": ["auto", "base64"]},
    ),
]
Consistency = Annotated[
    str,
    msgspec.Meta(
        description="Which replica answers: `leader` (default) or `any`. With `any`, the headers "
        "`Nats-Last-Sequence` and `Contrail-Applied-Index` tell how up to date the "
        "replica is.",
        extra_json_schema={"enum": ["leader", "any"]},
    ),
]
Shard = Annotated[
    int, msgspec.Meta(ge=0, le=INT64_MAX, description="Shard to use, if the stream has several.")
]
_encoder: Final = msgspec.json.Encoder()


class ReadQuery(msgspec.Struct):
    """Parameters that all reads have."""

    payload: Payload = ""
    consistency: Consistency = "leader"
    shard: Shard | msgspec.UnsetType = msgspec.UNSET


class RangeQuery(ReadQuery):
    """Parameters of a range read."""

    from_seq: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=INT64_MAX, description="Sequence to start from. 0 means the first message."
        ),
    ] = 0
    start_time: Annotated[
        str,
        msgspec.Meta(
            description="Time to start from (RFC 3339), instead of from_seq.",
            extra_json_schema=schema_marks.TIME,
        ),
    ] = ""
    cursor: Annotated[
        str,
        msgspec.Meta(
            description="`cursor` of an earlier answer. Replaces from_seq if several shards "
            "are read together."
        ),
    ] = ""
    subject: Annotated[
        str, msgspec.Meta(description="Filter: only messages with matching subjects.")
    ] = ""
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=RANGE_LIMIT_MAX, description="Maximum number of messages.")
    ] = 256
    max_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=RANGE_BYTES_MAX,
            description="Approximate maximum size of all payloads in bytes.",
        ),
    ] = 1 << 20
    wait: Annotated[
        str,
        msgspec.Meta(
            description="How long to wait for a first message, at most 60s.",
            extra_json_schema=schema_marks.DURATION,
        ),
    ] = ""


class LastQuery(ReadQuery):
    """Parameters of a read of the newest messages."""

    subject: Annotated[
        str, msgspec.Meta(description="Filter: only messages with matching subjects.")
    ] = ">"
    up_to_seq: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=INT64_MAX, description="As of this sequence (inclusive). 0 means the last."
        ),
    ] = 0
    up_to_time: Annotated[
        str,
        msgspec.Meta(
            description="As of this time (RFC 3339, exclusive), instead of up_to_seq.",
            extra_json_schema=schema_marks.TIME,
        ),
    ] = ""
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="Maximum number of items on a page.")
    ] = 256
    page_token: Annotated[
        str,
        msgspec.Meta(
            description="`next_page_token` of the previous page. All other parameters must "
            "stay the same."
        ),
    ] = ""


class SubjectsQuery(msgspec.Struct):
    """Parameters of a listing of subjects."""

    filter: Annotated[
        str, msgspec.Meta(description="Filter: only messages with matching subjects.")
    ] = ">"
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="Maximum number of items on a page.")
    ] = 256
    page_token: Annotated[
        str, msgspec.Meta(description="`next_page_token` of the previous page.")
    ] = ""
    consistency: Consistency = "leader"


class DeletedQuery(msgspec.Struct):
    """Parameters of a listing of deleted sequences."""

    limit: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="Maximum number of items on a page.")
    ] = 256
    page_token: Annotated[
        str, msgspec.Meta(description="`next_page_token` of the previous page.")
    ] = ""
    consistency: Consistency = "leader"
    shard: Shard | msgspec.UnsetType = msgspec.UNSET


class MessageRange(msgspec.Struct, kw_only=True):
    """Messages in order. Continue with ``next_seq``; ``num_pending`` messages remain.

    If several shards are read together, ``cursor`` replaces ``next_seq``.
    """

    messages: list[Message]
    next_seq: int | msgspec.UnsetType = msgspec.UNSET
    cursor: str | msgspec.UnsetType = msgspec.UNSET
    num_pending: int


class LastMessages(msgspec.Struct):
    """One page of the newest messages of subjects."""

    messages: list[Message]
    next_page_token: str | None


class SubjectCount(msgspec.Struct):
    """A subject and its number of messages."""

    subject: str
    messages: int


class SubjectPage(msgspec.Struct):
    """One page of subjects."""

    items: list[SubjectCount]
    next_page_token: str | None


class DeletedPage(msgspec.Struct):
    """One page of ranges of deleted sequences, each as its first and last sequence."""

    items: list[tuple[int, int]]
    next_page_token: str | None


class Reads:
    """The read routes, and the removal of one message."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link
        self._tail = Tail(link)

    async def get(self, request: Request) -> Response:
        """Return one message: its payload as the body, or JSON if the request asks for it."""
        if names_json(request.headers.get(b"accept")):
            return await self.get_json(request)
        stream, _, stored, position = await self._one(request)
        headers = to_response(stream, stored) + position + _INERT
        return Response(200, stored.payload, payload_type(stored), headers)

    async def get_json(self, request: Request) -> Response:
        """Return one message as JSON, whatever the request accepts."""
        stream, base64, stored, position = await self._one(request)
        return json_response(200, message_json(stream, stored, base64=base64), position)

    async def _one(self, request: Request) -> tuple[str, bool, StoredMessage, list[Header]]:
        """Return the stream, whether to use base64, the message, and the replica's position."""
        query = parse_query(request.query_string, ReadQuery)
        base64 = check_read(query)
        stream, seq = request.path_values["stream"], path_seq(request)
        position = await self._position(stream, query.consistency, one_shard(query.shard))
        stored = await self._link.get_message(stream, seq, one_shard(query.shard))
        return stream, base64, stored, position

    async def delete(self, request: Request) -> Answer:
        """Delete one message."""
        query = parse_query(request.query_string, ReadQuery)
        check_read(query)
        stream, seq = request.path_values["stream"], path_seq(request)
        await self._link.delete_message(stream, seq, one_shard(query.shard))
        return no_content()

    async def range(self, request: Request) -> Answer:
        """Return messages from a position on; wait for the first if the request asks for it."""
        query = parse_query(request.query_string, RangeQuery)
        base64 = check_read(query)
        offers = (JSON_TYPE, NDJSON_TYPE, EVENTS_TYPE)
        form = acceptable(request.headers.get(b"accept"), offers)
        if query.from_seq and query.start_time:
            raise invalid_field(
                "start_time", "cannot be used together with from_seq", errors.CONFLICTING_FIELDS
            )
        if query.cursor and (query.from_seq or query.start_time):
            raise invalid_field(
                "cursor",
                "cannot be used together with from_seq or start_time",
                errors.CONFLICTING_FIELDS,
            )
        wait_ns = duration_parameter("wait", query.wait)
        asked = RangeRequest(
            stream=request.path_values["stream"],
            from_seq=query.from_seq,
            start_time_ns=time_parameter("start_time", query.start_time),
            subject=filter_parameter("subject", query.subject),
            limit=query.limit,
            max_bytes=query.max_bytes,
            wait_ns=wait_ns,
            shard=one_shard(query.shard),
            cursor=query.cursor,
        )
        position = await self._position(asked.stream, query.consistency, one_shard(query.shard))
        if form == EVENTS_TYPE:
            events = await self._tail.open(request, asked, base64=base64)
            events.headers.extend(position)
            return events
        read = self._link.read_range(asked)
        found = await (request.while_wanted(read) if wait_ns else read)
        if wait_ns and not found.messages:
            return no_content(position)
        answer = _range_response(asked.stream, found, form, base64=base64)
        answer.headers.extend(position)
        return answer

    async def last(self, request: Request) -> Response:
        """Return the newest message of each matching subject."""
        query = parse_query(request.query_string, LastQuery)
        base64 = check_read(query)
        if query.up_to_seq and query.up_to_time:
            raise invalid_field(
                "up_to_time", "cannot be used together with up_to_seq", errors.CONFLICTING_FIELDS
            )
        asked = LastRequest(
            stream=request.path_values["stream"],
            subject=filter_parameter("subject", query.subject),
            up_to_seq=query.up_to_seq,
            up_to_time_ns=time_parameter("up_to_time", query.up_to_time),
            limit=query.limit,
            token=query.page_token,
            shard=one_shard(query.shard),
        )
        position = await self._position(asked.stream, query.consistency, one_shard(query.shard))
        found, token = await self._link.last_messages(asked)
        messages = messages_json(asked.stream, found, base64=base64)
        return json_response(200, LastMessages(messages, token), position)

    async def subjects(self, request: Request) -> Answer:
        """Return subjects and their number of messages."""
        query = parse_query(request.query_string, SubjectsQuery)
        check_consistency(query.consistency)
        stream = request.path_values["stream"]
        subject = filter_parameter("filter", query.filter)
        position = await self._position(stream, query.consistency)
        counts, token = await self._link.subject_counts(
            stream, subject, query.limit, query.page_token
        )
        items = [SubjectCount(name, messages) for name, messages in counts]
        return json_response(200, SubjectPage(items, token), position)

    async def deleted(self, request: Request) -> Answer:
        """Return the deleted sequences between the first message and the last."""
        query = parse_query(request.query_string, DeletedQuery)
        check_consistency(query.consistency)
        stream = request.path_values["stream"]
        position = await self._position(stream, query.consistency, one_shard(query.shard))
        found = await self._link.deleted_ranges(
            stream, query.limit, query.page_token, one_shard(query.shard)
        )
        return json_response(200, DeletedPage(found.ranges, found.next_token), position)

    async def _position(
        self, stream: str, consistency: str, shard: int | None = None
    ) -> list[Header]:
        """Return headers with the replica's position if ``consistency`` is ``any``.

        Must be called before the read, so that the read is not older.
        """
        if consistency != "any":
            return []
        position = await self._link.read_position(stream, shard)
        return [
            (b"nats-last-sequence", b"%d" % position.last_seq),
            (b"contrail-applied-index", b"%d" % position.applied_index),
        ]


def one_shard(shard: int | msgspec.UnsetType) -> int | None:
    """Return the shard that a request names, or None for all shards together."""
    return None if shard is msgspec.UNSET else shard


def path_seq(request: Request) -> int:
    """Return the sequence in the path."""
    text = request.path_values["seq"]
    if not (text.isascii() and text.isdigit() and len(text) <= _SEQ_DIGITS_MAX):
        raise invalid_field("seq", "must be a sequence number")
    seq = int(text)
    if seq > INT64_MAX:
        raise invalid_field("seq", "must fit in 64 bits")
    return seq


def check_read(query: ReadQuery) -> bool:
    """Check the common parameters of reads; return True if payloads are shown as base64."""
    check_consistency(query.consistency)
    try:
        return payload_form(query.payload)
    except ValueError as error:
        raise invalid_field("payload", str(error)) from None


def check_consistency(consistency: str) -> None:
    """Refuse any value but ``leader`` and ``any``."""
    if consistency not in ("leader", "any"):
        raise invalid_field("consistency", "must be leader or any")


def _range_response(stream: str, found: RangeResult, form: str, *, base64: bool) -> Response:
    messages = messages_json(stream, found.messages, base64=base64)
    if form == JSON_TYPE:
        answer = MessageRange(messages=messages, num_pending=found.num_pending)
        if found.cursor:
            answer.cursor = found.cursor
        else:
            answer.next_seq = found.next_seq
        return json_response(200, answer)
    headers = [
        (b"contrail-cursor", found.cursor.encode())
        if found.cursor
        else (b"contrail-next-seq", b"%d" % found.next_seq),
        (b"nats-num-pending", b"%d" % found.num_pending),
    ]
    return Response(200, _encoder.encode_lines(messages), NDJSON_TYPE.encode(), headers)
