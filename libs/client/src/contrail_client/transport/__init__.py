"""Options of the connection to a server, and conversions from and to the types of httpx.

No module outside this package uses httpx.
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

    `timeout_s` is the longest silence of the server, in addition to the wait of a long poll. At
    most `connections` are open at once; further requests wait. After `reconnect_s` of failed
    attempts to reopen a lost WebSocket, its publishers and subscriptions fail.
    """

    url: str
    token: str | None = None
    timeout_s: float = 30.0
    connections: int = 32
    retries: Retries = field(default_factory=Retries)
    reconnect_s: float = RECONNECT_S

    def __post_init__(self) -> None:
        """Raise ValueError if the address or the token is not valid."""
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("a token must be a single line of ASCII")
        parts = urlsplit(self.url)
        if (
            parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        ):  # .port raises too
            raise ValueError(f"{self.url!r} is not a URL such as http://127.0.0.1:7420")

    def for_httpx(self) -> dict[str, Any]:
        """Arguments of an httpx client."""
        # Bodies of replays are read as they arrive, without decoding.
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        beyond = beyond_loopback(self.url)
        arguments: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "limits": httpx.Limits(max_connections=self.connections),
            "timeout": self.timeout(0.0),
            # A proxy from the environment cannot reach the loopback of this machine.
            "trust_env": beyond,
        }
        if not beyond and urlsplit(self.url).scheme == "http":
            # Plain HTTP needs no certificates, and reading those of the machine takes 30 ms.
            arguments["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return arguments

    def timeout(self, wait_s: float) -> httpx.Timeout:
        """The timeouts of one request, which the server may hold for `wait_s`."""
        return httpx.Timeout(
            # No limit for the wait for a free connection: the requests that hold one have timeouts.
            connect=CONNECT_S,
            read=self.timeout_s + wait_s,
            write=self.timeout_s,
            pool=None,
        )


def beyond_loopback(url: str) -> bool:
    """Whether the host of `url` is another machine, judged by its name only."""
    return urlsplit(url).hostname not in LOOPBACK


def from_environment(url: str | None, token: str | None) -> tuple[str, str | None]:
    """The address and the token to use; None takes `CONTRAIL_URL` or `CONTRAIL_TOKEN`."""
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
    """Convert an answer whose body has been read."""
    return Answer(response.status_code, response.headers, response.content)


def failure_of(error: httpx.HTTPError) -> Failure:
    """Convert an error of httpx: there is no answer."""
    not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return Failure(sent=not not_sent, reason=reason_of(error))


def reason_of(error: httpx.HTTPError) -> str:
    """The text of an error; its type where httpx gives no text."""
    return str(error) or type(error).__name__
