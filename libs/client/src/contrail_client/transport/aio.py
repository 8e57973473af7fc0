"""Sends calls over HTTP. `contrail_client.transport.blocking` is generated from this module."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable

import httpx

from contrail_client.calls import Answer, Call, Failure, Request, T, conclude, refusal
from contrail_client.errors import ContrailError, Unreachable
from contrail_client.reconnecting import Reconnecting
from contrail_client.transport import Options, answer_of, arguments_of, failure_of, reason_of


class AsyncTransport:
    """The HTTP connections of a client. Tasks of one event loop may share one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._http = httpx.AsyncClient(**options.for_httpx())

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    def reconnecting(self) -> Reconnecting:
        """The pauses between attempts of something that outlasts an outage of the server."""
        return Reconnecting(self.options.retries, self.options.reconnect_s)

    async def run(self, call: Call[T]) -> T:
        """Carry out a call, and retry it where that is safe; raises ContrailError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return conclude(call, await self._exchange(call.request))
            except ContrailError as error:
                pause_s = self.options.retries.pause_s(call, error, attempt, random.random())
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The body of a read, in chunks; raises ContrailError before or between chunks."""
        try:
            async with self._http.stream(**arguments_of(request, self.options)) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(answer_of(response))
                async for chunk in response.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise Unreachable(f"{request.path}: {reason_of(error)}") from error

    async def upload(self, call: Call[T], chunks: AsyncIterable[bytes]) -> T:
        """Carry out a call with `chunks` as its body; never retries. Raises ContrailError."""
        return conclude(call, await self._exchange(call.request, chunks))

    async def _exchange(
        self, request: Request, chunks: AsyncIterable[bytes] | None = None
    ) -> Answer | Failure:
        arguments = arguments_of(request, self.options)
        if chunks is not None:
            arguments["content"] = chunks
        try:
            return answer_of(await self._http.request(**arguments))
        except httpx.HTTPError as error:
            return failure_of(error)
