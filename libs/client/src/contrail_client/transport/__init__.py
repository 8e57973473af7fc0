"""How a server is reached over HTTP: options, and the terms of httpx for requests and answers.

Nothing outside this package knows httpx.
"""

import os
import ssl
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from contrail_client.calls import Answer, Failure, Request, Retries

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


def arguments_of(request: Request, options: Options) -> dict[str, Any]:
    """Arguments of httpx for a request."""
    return {
        "method": request.method,
        "url": request.path,
        "params": request.query or None,
        "headers": list(request.headers),
        "content": request.body or None,
        "timeout": options.timeout(request.wait_s),
    }


def answer_of(response: httpx.Response) -> Answer:
    """The answer that was read whole."""
    return Answer(response.status_code, response.headers, response.content)


def failure_of(error: httpx.HTTPError) -> Failure:
    """Why there is no answer."""
    not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return Failure(sent=not not_sent, reason=reason_of(error))


def reason_of(error: httpx.HTTPError) -> str:
    """The error in words; some of httpx have none."""
    return str(error) or type(error).__name__
