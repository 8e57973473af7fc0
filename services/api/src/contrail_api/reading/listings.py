"""Lists of what a stream contains: newest messages, subjects, deleted sequences."""

import re
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from contrail_api.reading.parameters import (
    MESSAGE,
    POSITION,
    READING,
    STREAM_PATH,
    Consistency,
    ReadQuery,
    Shard,
    check_consistency,
    check_read,
    one_shard,
    read_as,
)
from contrail_common import errors
from contrail_common.model import StoredMessage
from contrail_common.timeunits import INT64_MAX
from contrail_edge.direct_reads import DirectRead, PeekedAnswer
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Header, Response, json_response
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.messages import Message, messages_json
from contrail_edge.inputs.negotiation import (
    JSON_TYPE,
)
from contrail_edge.inputs.query import (
    filter_parameter,
    parse_query,
    time_parameter,
)
from contrail_edge.routing import AnswerDoc, BodyDoc, Direct, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.read import DeletedRanges, LastRequest


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


class LastMessages(msgspec.Struct):
    """One page of the newest messages of subjects."""

    messages: list[Message]
    """The messages, by sequence."""
    next_page_token: str | None
    """Token of the next page; null on the last page."""


class SubjectCount(msgspec.Struct):
    """A subject and its number of messages."""

    subject: str
    """The subject."""
    messages: int
    """Number of its messages."""


class SubjectPage(msgspec.Struct):
    """One page of subjects."""

    items: list[SubjectCount]
    """The subjects, in byte order."""
    next_page_token: str | None
    """Token of the next page; null on the last page."""


class DeletedPage(msgspec.Struct):
    """One page of ranges of deleted sequences, each as its first and last sequence."""

    items: list[tuple[int, int]]
    """The ranges, each as its first and last sequence."""
    next_page_token: str | None
    """Token of the next page; null on the last page."""


LAST: Final = Operation(
    operation_id="last_messages",
    tag=READING,
    summary="Read the newest message of each subject",
    description="Returns the newest message of each matching subject as of `up_to_seq` "
    "(inclusive), as of `up_to_time` (exclusive), or as of the time at which the first "
    "page is read.\n\nAll pages show the same point in time. Messages published later do "
    "not appear. If a message is removed in between, the next older message of its "
    "subject takes its place, if there is one. A page is ordered by sequence and ends at "
    "about 1 MiB. It may contain fewer messages than `limit`, or none, and still have a "
    "next page. A page token is only valid with the parameters of the request that "
    "returned it; otherwise the answer is 400.\n\nFor a stream with several shards, "
    "pages come shard by shard, and `up_to_seq` requires `shard`.",
    query=LastQuery,
    answers={
        200: AnswerDoc(
            description="A page of messages; empty if nothing matches.",
            headers=POSITION,
            content={
                JSON_TYPE: BodyDoc(
                    shape=LastMessages, example={"messages": [MESSAGE], "next_page_token": None}
                )
            },
        )
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.BAD_REQUEST,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
        errors.CONFLICTING_FIELDS,
    ),
)
SUBJECTS: Final = Operation(
    operation_id="list_subjects",
    tag=READING,
    summary="List subjects of a stream",
    description="Lists the subjects that have messages, in byte order, in pages.",
    query=SubjectsQuery,
    answers={
        200: AnswerDoc(
            description="A page of subjects.",
            headers=POSITION,
            content={
                JSON_TYPE: BodyDoc(
                    shape=SubjectPage,
                    example={
                        "items": [{"subject": "orders.eu.created", "messages": 42}],
                        "next_page_token": None,
                    },
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
DELETED: Final = Operation(
    operation_id="list_deleted",
    tag=READING,
    summary="List deleted sequences of a stream",
    description="Lists the sequences between the first and the last message whose messages were "
    "removed, as ranges `[first, last]` in ascending order, in pages. A long range may "
    "be split at the end of a page.",
    query=DeletedQuery,
    answers={
        200: AnswerDoc(
            description="A page of ranges.",
            headers=POSITION,
            content={
                JSON_TYPE: BodyDoc(
                    shape=DeletedPage,
                    example={"items": [[5, 7], [12, 12]], "next_page_token": None},
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.BAD_REQUEST, errors.INVALID_FIELD),
)


_ONLY_SUBJECT: Final = re.compile(rb"subject=([\w.~!$'()*,;:=@/?-]+)")
"""A query of a subject in characters that need no decoding, and nothing else."""


class Listings:
    """The routes of newest messages, subjects and deleted sequences."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route(
                "GET",
                f"{STREAM_PATH}/last",
                self.last,
                LAST,
                Direct(DirectRead(self.last, self._peek_last)),
            ),
            Route("GET", f"{STREAM_PATH}/subjects", self.subjects, SUBJECTS),
            Route("GET", f"{STREAM_PATH}/deleted", self.deleted, DELETED),
        )

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

        async def read(replica: str) -> tuple[list[StoredMessage], str | None]:
            return await self._link.last_messages(replace(asked, replica=replica))

        position: list[Header] = []
        if query.consistency == "leader":  # the usual case
            found, token = await self._link.last_messages(asked)
        else:
            (found, token), position = await read_as(
                query.consistency, self._link, asked.stream, asked.shard, read
            )
        return _last_page(asked.stream, found, token, position, base64=base64)

    def _peek_last(self, request: Request) -> PeekedAnswer:
        """Return the answer of :meth:`last` about one subject, as far as the link knows it."""
        subject = _ONLY_SUBJECT.fullmatch(request.query_string)
        if subject is None:
            return None
        stream = request.path_values["stream"]
        peeked = self._link.peek_last(stream, subject[1].decode())
        if not isinstance(peeked, StoredMessage):
            return peeked
        return _last_page(stream, [peeked], None, [], base64=False)

    async def subjects(self, request: Request) -> Answer:
        """Return subjects and their number of messages."""
        query = parse_query(request.query_string, SubjectsQuery)
        check_consistency(query.consistency)
        stream = request.path_values["stream"]
        subject = filter_parameter("filter", query.filter)

        async def read(replica: str) -> tuple[list[tuple[str, int]], str | None]:
            return await self._link.subject_counts(
                stream, subject, query.limit, query.page_token, replica
            )

        (counts, token), position = await read_as(query.consistency, self._link, stream, None, read)
        items = [SubjectCount(name, messages) for name, messages in counts]
        return json_response(200, SubjectPage(items, token), position)

    async def deleted(self, request: Request) -> Answer:
        """Return the deleted sequences between the first message and the last."""
        query = parse_query(request.query_string, DeletedQuery)
        check_consistency(query.consistency)
        stream = request.path_values["stream"]
        shard = one_shard(query.shard)

        async def read(replica: str) -> DeletedRanges:
            return await self._link.deleted_ranges(
                stream, query.limit, query.page_token, shard, replica
            )

        found, position = await read_as(query.consistency, self._link, stream, shard, read)
        return json_response(200, DeletedPage(found.ranges, found.next_token), position)


def _last_page(
    stream: str,
    found: list[StoredMessage],
    token: str | None,
    position: list[Header],
    *,
    base64: bool,
) -> Response:
    messages = messages_json(stream, found, base64=base64)
    return json_response(200, LastMessages(messages, token), position)
