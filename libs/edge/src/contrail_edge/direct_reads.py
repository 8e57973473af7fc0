"""Direct handlers that may wait: for a disk, for another process, or for messages."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import CLIENT_GONE_STATUS, ClientGoneError, Request
from contrail_edge.http.responses import Response
from contrail_edge.routing import ReadHandler, Reply
from contrail_link.contract.read import DiskRead

PeekedAnswer = Response | DiskRead | None
_log = structlog.get_logger(__name__)


class DirectTask:
    """Answers a request by running a handler of its body in a task of its own."""

    __slots__ = ("_handler", "_running")

    def __init__(self, handler: Callable[[Request, bytes], Awaitable[Response]]) -> None:
        self._handler = handler
        self._running: set[asyncio.Task[None]] = set()  # the event loop only has weak references

    def __call__(self, request: Request, body: bytes, reply: Reply) -> None:
        """Start the task; ``reply`` is called exactly once, later."""
        task = asyncio.get_running_loop().create_task(self._answer(request, body, reply))
        self._running.add(task)

    async def _answer(self, request: Request, body: bytes, reply: Reply) -> None:
        answer: Response | ApiError
        try:
            answer = await self._handler(request, body)
        except ApiError as error:
            answer = error
        except ClientGoneError:
            answer = Response(CLIENT_GONE_STATUS)  # counted, and sent to nobody
        except Exception:
            _log.exception("request_failed")
            answer = ApiError(errors.INTERNAL)
        # Here and not in a callback of the task, which would take another step of the event loop.
        self._running.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        reply(answer)


class DirectRead(DirectTask):
    """Answers a read without a task if ``peek`` can, otherwise by the route's handler.

    ``peek`` returns None whenever it is not sure of the handler's answer. If it lacks nothing but a
    block on the disk, it returns the read of that, and is called again when it has ended.
    """

    __slots__ = ("_peek",)

    def __init__(self, handler: ReadHandler, peek: Callable[[Request], PeekedAnswer]) -> None:
        super().__init__(lambda request, _: handler(request))
        self._peek = peek

    def __call__(self, request: Request, body: bytes, reply: Reply) -> None:
        """Answer now, or wait for the disk, or start the task."""
        answer = self._peek(request)
        if isinstance(answer, Response):
            reply(answer)
        elif answer is None:
            super().__call__(request, body, reply)
        else:
            answer.add_done_callback(lambda _: self._answer_read(request, body, reply))

    def _answer_read(self, request: Request, body: bytes, reply: Reply) -> None:
        answer = self._peek(request)
        if isinstance(answer, Response):
            reply(answer)
        else:
            # It was not read, or has left the memory again. Waiting once more might never end.
            super().__call__(request, body, reply)
