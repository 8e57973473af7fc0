# Generated from transport/aio.py by `make blocking`. Change that file, not this one.
"""Sends calls over HTTP."""

import random
import time
from collections.abc import Generator, Iterable

import httpx

from contrail_client.calls import Answer, Call, Failure, Request, T, conclude, refusal
from contrail_client.errors import ContrailError, Unreachable
from contrail_client.reconnecting import Reconnecting
from contrail_client.transport import Options, answer_of, arguments_of, failure_of, reason_of


class Transport:
    """The HTTP connections of a client. Threads may share one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._http = httpx.Client(**options.for_httpx())

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def reconnecting(self) -> Reconnecting:
        """The pauses between attempts of something that outlasts an outage of the server."""
        return Reconnecting(self.options.retries, self.options.reconnect_s)

    def run(self, call: Call[T]) -> T:
        """Carry out a call, and retry it where that is safe; raises ContrailError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return conclude(call, self._exchange(call.request))
            except ContrailError as error:
                pause_s = self.options.retries.pause_s(call, error, attempt, random.random())
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def stream(self, request: Request) -> Generator[bytes, None, None]:
        """The body of a read, in chunks; raises ContrailError before or between chunks."""
        try:
            with self._http.stream(**arguments_of(request, self.options)) as response:
                if not response.is_success:
                    response.read()
                    raise refusal(answer_of(response))
                yield from response.iter_raw()
        except httpx.HTTPError as error:
            raise Unreachable(f"{request.path}: {reason_of(error)}") from error

    def upload(self, call: Call[T], chunks: Iterable[bytes]) -> T:
        """Carry out a call with `chunks` as its body; never retries. Raises ContrailError."""
        return conclude(call, self._exchange(call.request, chunks))

    def _exchange(
        self, request: Request, chunks: Iterable[bytes] | None = None
    ) -> Answer | Failure:
        arguments = arguments_of(request, self.options)
        if chunks is not None:
            arguments["content"] = chunks
        try:
            return answer_of(self._http.request(**arguments))
        except httpx.HTTPError as error:
            return failure_of(error)
