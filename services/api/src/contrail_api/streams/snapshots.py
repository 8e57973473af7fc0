"""Snapshots of streams as archives, and restoring streams from them."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Final

import msgspec

from contrail_api.streams.shown import CREATED, info_response
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamInfo
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, StreamResponse
from contrail_edge.inputs.negotiation import BYTES_TYPE, acceptable, content_type
from contrail_edge.inputs.query import parse_query
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.admin import RESTORE_PIECE_BYTES_MAX

SNAPSHOT_TYPE: Final = "application/vnd.contrail.snapshot"
ARCHIVE_TYPES: Final = (SNAPSHOT_TYPE, BYTES_TYPE)
"""An archive identifies itself, so it may also be sent and received as plain bytes."""
_PIECE_BYTES: Final = RESTORE_PIECE_BYTES_MAX // 2


class SnapshotQuery(msgspec.Struct):
    """Parameters of a snapshot."""

    consumers: Annotated[bool, msgspec.Meta(description="Include the stream's consumers.")] = True


_TAG: Final = "streams"
_ARCHIVE: Final = {
    form: BodyDoc(shape={"type": "string", "format": "binary"}) for form in ARCHIVE_TYPES
}
SNAPSHOT: Final = Operation(
    operation_id="snapshot_stream",
    tag=_TAG,
    summary="Take a snapshot of a stream",
    description="Returns an archive of the stream as of one point in time: its messages, subjects, "
    "consumers, and the message ids within the duplicate window. The stream stays "
    "available meanwhile. The archive is not encrypted and does not contain deleted "
    "messages. An incomplete download lacks the end record, and cannot be restored.",
    query=SnapshotQuery,
    answers={200: AnswerDoc(description="The archive.", content=_ARCHIVE)},
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.INVALID_FIELD,
        errors.NOT_ACCEPTABLE,
        errors.DATA_LOST,
        errors.OVERLOADED,
    ),
)
RESTORE: Final = Operation(
    operation_id="restore_stream",
    tag=_TAG,
    summary="Restore a stream",
    description="Creates a stream from an archive, under the name in the path, which may "
    "differ from the archived name. Sequences, times, subjects, message ids and "
    "consumers are restored; the stream gets a new incarnation. Either the whole stream "
    "is restored or nothing. The Content-Type may also be "
    "`application/vnd.contrail.snapshot`, or be omitted.",
    body={BYTES_TYPE: _ARCHIVE[BYTES_TYPE]},
    answers={201: CREATED},
    errors=(
        errors.UNSUPPORTED_MEDIA,
        errors.STREAM_RESTORE_EXISTS,
        errors.SUBJECT_OVERLAP,
        errors.ARCHIVE_INVALID,
        errors.STREAM_CONFIG_INVALID,
        errors.STREAM_NAME_SEPARATOR,
        errors.STREAM_LIMIT,
        errors.OVERLOADED,
        errors.OUTCOME_UNKNOWN,
    ),
)


class Snapshots:
    """The routes of snapshots."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route("GET", "/v1/streams/{stream}/snapshot", self.snapshot, SNAPSHOT),
            Route("PUT", "/v1/streams/{stream}/restore", self.restore, RESTORE),
        )

    async def snapshot(self, request: Request) -> Answer:
        """Return an archive of the stream as it is now."""
        query = parse_query(request.query_string, SnapshotQuery)
        form = acceptable(request.headers.get(b"accept"), ARCHIVE_TYPES)
        chunks = await self._link.snapshot(request.path_values["stream"], query.consumers)
        return StreamResponse(200, chunks, form.encode())

    async def restore(self, request: Request) -> Answer:
        """Create a stream from the archive in the body, which is stored while it arrives."""
        given = request.headers.get(b"content-type")
        if given is not None:
            content_type(given, ARCHIVE_TYPES)
        token = await self._link.begin_restore(request.path_values["stream"])
        try:
            info = await self._restored(request, token)
        except BaseException:
            # Also if the client has left: otherwise storage keeps the pieces for a minute.
            with suppress(ApiError):
                await self._link.abort_restore(token)
            raise
        return info_response(info, created=True)

    async def _restored(self, request: Request, token: str) -> StreamInfo:
        offset = 0
        async with aclosing(_pieces(request)) as pieces:
            async for piece in pieces:
                await self._link.append_restore(token, offset, piece)
                request.consumed(len(piece))
                offset += len(piece)
        return await self._link.commit_restore(token)


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces of ``_PIECE_BYTES``; the last may be smaller."""
    held = bytearray()
    # An archive may be larger than any other body. It is never in memory as a whole.
    async with aclosing(request.chunks(sys.maxsize)) as chunks:
        async for chunk in chunks:
            held += chunk
            while len(held) >= _PIECE_BYTES:
                yield bytes(held[:_PIECE_BYTES])
                del held[:_PIECE_BYTES]
    if held:
        yield bytes(held)
