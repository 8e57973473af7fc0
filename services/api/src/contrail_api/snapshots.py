"""Archives of streams: out as a stream of bytes, and in as a new stream."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Final

import msgspec

from contrail_api.stream_json import info_response
from contrail_common.errors import ApiError
from contrail_common.model import StreamInfo
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, StreamResponse
from contrail_edge.inputs.negotiation import BYTES_TYPE, acceptable, content_type
from contrail_edge.inputs.query import parse_query
from contrail_link.contract import RESTORE_PIECE_BYTES_MAX, StorageLink

SNAPSHOT_TYPE: Final = "application/vnd.contrail.snapshot"
ARCHIVE_TYPES: Final = (SNAPSHOT_TYPE, BYTES_TYPE)
"""An archive says itself what it is, so its bytes may also come and go as just that."""
_PIECE_BYTES: Final = RESTORE_PIECE_BYTES_MAX // 2


class SnapshotQuery(msgspec.Struct):
    """Parameters of a snapshot."""

    consumers: Annotated[bool, msgspec.Meta(description="Include the stream's consumers.")] = True


class Snapshots:
    """The routes of archives."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    async def snapshot(self, request: Request) -> Answer:
        """The stream as it is now."""
        query = parse_query(request.query_string, SnapshotQuery)
        form = acceptable(request.headers.get(b"accept"), ARCHIVE_TYPES)
        chunks = await self._link.snapshot(request.path_values["stream"], query.consumers)
        return StreamResponse(200, chunks, form.encode())

    async def restore(self, request: Request) -> Answer:
        """A stream out of the body, which is taken as it comes."""
        given = request.headers.get(b"content-type")
        if given is not None:
            content_type(given, ARCHIVE_TYPES)
        token = await self._link.begin_restore(request.path_values["stream"])
        try:
            info = await self._restored(request, token)
        except BaseException:
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
    """The body in pieces that storage takes, none much smaller than it could be."""
    held = bytearray()
    async with aclosing(request.chunks(sys.maxsize)) as chunks:
        async for chunk in chunks:
            held += chunk
            while len(held) >= _PIECE_BYTES:
                yield bytes(held[:_PIECE_BYTES])
                del held[:_PIECE_BYTES]
    if held:
        yield bytes(held)
