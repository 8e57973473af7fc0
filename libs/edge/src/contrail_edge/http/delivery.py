"""Sending an answer over ASGI, whole or streamed, and dropping a request body that was not read."""

import asyncio
from typing import Any, Final

from starlette.types import Message, Send

from contrail_edge.http.headers import X_REQUEST_ID
from contrail_edge.http.requests import ClientGoneError, Request
from contrail_edge.http.responses import Answer, Response, StreamResponse
from contrail_link.contract.read import Pieces

GATHER: Final = "contrail.gather"
"""Extension of the ASGI scope: sends the pieces of a body's chunk without joining them."""
CUT: Final = "contrail.cut"
"""Extension of the ASGI scope: ends the connection of an answer that stays incomplete."""
_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


class Wire:
    """``send`` of one request, for answers that need more than two plain messages.

    Adds the request id. If the request's body was not read, the whole answer is sent, the body is
    read and dropped for some time, and then the connection ends. Closing it at once would reset it
    while the client is still writing, and the client would never see the answer.
    """

    __slots__ = ("_linger_s", "_request", "_send", "_to_discard", "status")

    def __init__(self, request: Request, send: Send, linger_s: float) -> None:
        self._request = request
        self._send = send
        self._linger_s = linger_s
        self._to_discard = False
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send ``message``, with the additional headers if it is the head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (X_REQUEST_ID, self._request.request_id)]
            if self._request.body_pending:
                headers.append((b"connection", b"close"))
                # A client that waits for 100 Continue does not send a refused body.
                self._to_discard = not self._request.waits_to_be_asked
            headers += self._request.cors_headers([name for name, _ in headers])
            await self._send({**message, "headers": headers})
        elif self._to_discard and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._discard()
            await self._send(_END)
        else:
            await self._send(message)

    async def _discard(self) -> None:
        try:
            async with asyncio.timeout(self._linger_s):
                await self._request.discard_body()
        except (TimeoutError, ClientGoneError):
            pass


async def deliver(request: Request, answer: Answer, send: Send, linger_s: float) -> None:
    """Send ``answer``; raise ClientGoneError if the reader of a stream has left."""
    # The usual case: two messages, without the checks that other answers need.
    if isinstance(answer, Response) and not request.body_pending:
        headers = answer.wire_headers()
        headers.append((X_REQUEST_ID, request.request_id))
        headers += request.cors_headers([name for name, _ in headers])
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        return
    await send_answer(request, answer, Wire(request, send, linger_s).send)


async def send_answer(request: Request, answer: Answer, send: Send) -> None:
    """Send ``answer`` through a ``send`` that adds the common headers."""
    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": answer.wire_headers(),
        }
    )
    if isinstance(answer, Response):
        await send({"type": "http.response.body", "body": answer.body})
    else:
        await _send_chunks(request, answer, send)


async def _send_chunks(request: Request, answer: StreamResponse, send: Send) -> None:
    try:
        if not request.head_only:
            async for chunk in answer.chunks:
                # send() does not report a reader that has left; reading a body does.
                if not request.body_pending and request.gone.done():
                    raise ClientGoneError
                if isinstance(chunk, tuple):
                    await _send_pieces(request, chunk, send)
                else:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    finally:
        close = getattr(answer.chunks, "aclose", None)
        if close is not None:
            await close()
    await send(_END)


def cut(request: Request) -> None:
    """End the connection, so that the reader notices that the end of the answer is missing."""
    end = _extension(request, CUT)
    if end is not None:
        end()


def _extension(request: Request, name: str) -> Any:
    """Return an extension of the server, or None if it has no such extension."""
    return request.scope.get("extensions", {}).get(name)


async def _send_pieces(request: Request, pieces: Pieces, send: Send) -> None:
    gather = _extension(request, GATHER)
    if gather is not None:
        await gather(pieces)
        return
    for piece in filter(len, pieces):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
