"""Carries out calls over HTTP. The only module that knows httpx."""

import asyncio
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from contrail_client.calls import Answer, Call, Failure, Request, Retries, T, conclude, refusal
from contrail_client.errors import ContrailError, Unreachable
from contrail_client.reconnecting import Reconnecting

DEFAULT_URL: Final = "http://127.0.0.1:7420"
LOOPBACK: Final = {"localhost", "127.0.0.1", "::1"}
CONNECT_S: Final = 5.0
RECONNECT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to reach a server.

    `timeout_s` is the longest silence of the server beyond what a long poll asked for.
    `connections` bounds what is open at once; further requests wait. `reconnect_s` is how long a
    lost WebSocket is opened anew before what uses it fails.
    """

    url: str
    token: str | None = None
    timeout_s: float = 30.0
    connections: int = 32
    retries: Retries = field(default_factory=Retries)
    reconnect_s: float = RECONNECT_S

    def __post_init__(self) -> None:
        """Raise ValueError for an address or a token that is none."""
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("a token must be a single line of ASCII")
        parts = urlsplit(self.url)
        if (
            parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        ):  # .port raises too
            raise ValueError(f"{self.url!r} is not a URL such as http://127.0.0.1:7420")

    def for_httpx(self) -> dict[str, Any]:
        """Arguments of an httpx client."""
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        beyond = beyond_loopback(self.url)
        arguments: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "limits": httpx.Limits(max_connections=self.connections),
            "timeout": self.timeout(0.0),
            # A proxy of the environment cannot reach this machine's loopback.
            "trust_env": beyond,
        }
        if not beyond and urlsplit(self.url).scheme == "http":
            # One that trusts nobody: reading the machine's certificates would take 30 ms.
            arguments["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return arguments

    def timeout(self, wait_s: float) -> httpx.Timeout:
        """Deadlines of one request that the server may hold for `wait_s`."""
        return httpx.Timeout(
            connect=CONNECT_S, read=self.timeout_s + wait_s, write=self.timeout_s, pool=None
        )


def beyond_loopback(url: str) -> bool:
    """Whether the host of `url` is another than this machine, as far as its name says."""
    return urlsplit(url).hostname not in LOOPBACK


def from_environment(url: str | None, token: str | None) -> tuple[str, str | None]:
    """The address and the token to use: `CONTRAIL_URL` and `CONTRAIL_TOKEN` where None is given."""
    if url is None:
        url = os.environ.get("CONTRAIL_URL") or DEFAULT_URL
    if token is None:
        token = os.environ.get("CONTRAIL_TOKEN")
    return url, token or None


class Transport:
    """Synchronous; may be used by several threads."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._http = httpx.Client(**options.for_httpx())

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def reconnecting(self) -> Reconnecting:
        """When to ask again, for what goes on after the server was away."""
        return Reconnecting(self._options.retries, self._options.reconnect_s)

    def run(self, call: Call[T]) -> T:
        """Carry out a call, again where that is safe; raises ContrailError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return conclude(call, self._exchange(call.request))
            except ContrailError as error:
                pause_s = _pause_s(self._options, call, error, attempt)
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def stream(self, request: Request) -> Generator[bytes, None, None]:
        """The body of a read in chunks; raises ContrailError, also between chunks."""
        try:
            with self._http.stream(**_arguments(self._options, request)) as response:
                if not response.is_success:
                    response.read()
                    raise refusal(_answer(response))
                yield from response.iter_raw()
        except httpx.HTTPError as error:
            raise Unreachable(f"{request.path}: {_reason(error)}") from error

    def upload(self, call: Call[T], chunks: Iterable[bytes]) -> T:
        """Carry out a call once, with `chunks` for its body; raises ContrailError."""
        return conclude(call, self._exchange(call.request, chunks))

    def _exchange(
        self, request: Request, chunks: Iterable[bytes] | None = None
    ) -> Answer | Failure:
        arguments = _arguments(self._options, request)
        if chunks is not None:
            arguments["content"] = chunks
        try:
            return _answer(self._http.request(**arguments))
        except httpx.HTTPError as error:
            return _failure(error)


class AsyncTransport:
    """The same for asyncio."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._http = httpx.AsyncClient(**options.for_httpx())

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    def reconnecting(self) -> Reconnecting:
        """As `Transport.reconnecting`."""
        return Reconnecting(self._options.retries, self._options.reconnect_s)

    async def run(self, call: Call[T]) -> T:
        """As `Transport.run`."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return conclude(call, await self._exchange(call.request))
            except ContrailError as error:
                pause_s = _pause_s(self._options, call, error, attempt)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """As `Transport.stream`."""
        try:
            async with self._http.stream(**_arguments(self._options, request)) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(_answer(response))
                async for chunk in response.aiter_raw():
                    yield chunk
        except httpx.HTTPError as error:
            raise Unreachable(f"{request.path}: {_reason(error)}") from error

    async def upload(self, call: Call[T], chunks: AsyncIterable[bytes]) -> T:
        """As `Transport.upload`."""
        return conclude(call, await self._exchange(call.request, chunks))

    async def _exchange(
        self, request: Request, chunks: AsyncIterable[bytes] | None = None
    ) -> Answer | Failure:
        arguments = _arguments(self._options, request)
        if chunks is not None:
            arguments["content"] = chunks
        try:
            return _answer(await self._http.request(**arguments))
        except httpx.HTTPError as error:
            return _failure(error)


def _arguments(options: Options, request: Request) -> dict[str, Any]:
    return {
        "method": request.method,
        "url": request.path,
        "params": request.query or None,
        "headers": list(request.headers),
        "content": request.body or None,
        "timeout": options.timeout(request.wait_s),
    }


def _answer(response: httpx.Response) -> Answer:
    return Answer(response.status_code, response.headers, response.content)


def _failure(error: httpx.HTTPError) -> Failure:
    not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return Failure(sent=not not_sent, reason=_reason(error))


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _pause_s(options: Options, call: Call[Any], error: ContrailError, attempt: int) -> float | None:
    return options.retries.pause_s(call, error, attempt, random.random())
