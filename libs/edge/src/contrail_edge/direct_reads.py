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
    """Answers a read at once if ``peek`` can, otherwise by the route's handler in a task.

    ``peek`` returns None whenever it is not sure of the handler's answer.
    """

    __slots__ = ("_peek",)

    def __init__(self, handler: ReadHandler, peek: Callable[[Request], Response | None]) -> None:
        super().__init__(lambda request, _: handler(request))
        self._peek = peek

    def __call__(self, request: Request, body: bytes, reply: Reply) -> None:
        """Answer now, or start the task."""
        answer = self._peek(request)
        if answer is None:
            super().__call__(request, body, reply)
        else:
            reply(answer)
