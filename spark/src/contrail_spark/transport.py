"""Requests over HTTP/1.1 with the standard library: refusals, retries, and pauses between them.

It runs inside Spark's Python workers. ``http.client`` takes a fraction of the CPU time of a general
HTTP client, and leaves nothing to install on executors.
"""

import email.utils
import http.client
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NoReturn
from urllib.parse import urlencode, urlsplit

from contrail_spark.errors import (
    ProtocolError,
    ServerRefusedError,
    StreamChangedError,
    UnavailableError,
)
from contrail_spark.options import ServerOptions
from contrail_spark.plan import Query

PROBLEM_BYTES_MAX: Final = 64 << 10
ANSWER_BYTES_MAX: Final = 64 << 20
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
RETRY_AFTER_MAX_S: Final = 60.0

ACCEPTED: Final = frozenset({200, 201, 207})
"""207: some messages of a batch were refused."""
CONFLICT: Final = 409
RETRYABLE: Final = frozenset({429, 502, 503, 504})


class InterruptionError(Exception):
    """A failed attempt that may be repeated.

    ``after_s`` is the pause that the server asks for, and ``name`` the name of its problem.
    """

    def __init__(self, reason: str, after_s: float = 0.0, name: str = "") -> None:
        super().__init__(reason)
        self.after_s = after_s
        self.name = name


@dataclass(slots=True)
class Retries:
    """Counts attempts without progress, with exponential, jittered pauses between them."""

    allowed: int
    sleep: Callable[[float], None]
    failed: int = 0

    def progress(self) -> None:
        """Start to count again."""
        self.failed = 0

    def pause_after(self, interruption: InterruptionError) -> None:
        """Wait before the next attempt; UnavailableError if there may be no more."""
        if self.failed >= self.allowed:
            tries = "1 attempt" if not self.failed else f"{self.failed + 1} attempts"
            raise UnavailableError(f"{interruption} ({tries})") from interruption
        backoff = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**self.failed)
        jittered = backoff * random.uniform(0.5, 1.0)
        self.failed += 1
        self.sleep(max(jittered, min(interruption.after_s, RETRY_AFTER_MAX_S)))


@contextmanager
def opened(
    options: ServerOptions, path: str, query: Query, accept: str, what: str
) -> Iterator[http.client.HTTPResponse]:
    """Send a GET request on a connection of its own; the context has the answer.

    ``what`` begins the messages of errors. Failures of the network, in the context too, become
    InterruptionError. Raises OptionError, ServerRefusedError and ProtocolError as `ReplayClient`.
    """
    connection = _connection(options)
    try:
        yield _answer(connection, options, f"{path}?{urlencode(query)}", accept, what)
    except (OSError, http.client.HTTPException) as error:
        raise InterruptionError(f"{what} at {options.url}: {_reason(error)}") from error
    finally:
        connection.close()


class KeptConnection:
    """Sends requests one after another over one connection, which it opens when it has none."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._connection: http.client.HTTPConnection | None = None

    def post(self, target: str, body: bytes, kind: str, what: str) -> bytes:
        """Send ``body``, and return the body of the answer; both have the media type ``kind``.

        Raises InterruptionError for failures of the network too, and otherwise as :func:`opened`.
        """
        connection = self._connection or _connection(self._options)
        # After a failure it may be in the midst of an answer.
        self._connection = None
        headers = {**_headers(self._options, kind), "Content-Type": kind}
        try:
            connection.request("POST", target, body, headers)
            response = _accepted(connection.getresponse(), kind, what)
            answer = response.read(ANSWER_BYTES_MAX)
            if len(answer) == ANSWER_BYTES_MAX:
                raise ProtocolError(f"{what}: the answer has {ANSWER_BYTES_MAX} bytes or more")
            if response.length:  # announced, but not received
                raise InterruptionError(f"{what}: the answer was cut off")
            self._connection = connection
            return answer
        except (OSError, http.client.HTTPException) as error:
            raise InterruptionError(f"{what} at {self._options.url}: {_reason(error)}") from error
        finally:
            if self._connection is None:
                connection.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connection(options: ServerOptions) -> http.client.HTTPConnection:
    parts = urlsplit(options.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(str(parts.hostname), parts.port, timeout=options.timeout_s)


def _answer(
    connection: http.client.HTTPConnection,
    options: ServerOptions,
    target: str,
    accept: str,
    what: str,
) -> http.client.HTTPResponse:
    connection.request("GET", target, headers=_headers(options, accept))
    return _accepted(connection.getresponse(), accept, what)


def _headers(options: ServerOptions, accept: str) -> dict[str, str]:
    headers = {"Accept": accept, "User-Agent": "contrail-spark"}
    if token := options.bearer():
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _accepted(
    response: http.client.HTTPResponse, accept: str, what: str
) -> http.client.HTTPResponse:
    if response.status not in ACCEPTED:
        _raise_refusal(response, what)
    kind = response.headers.get_content_type()
    if kind != accept:
        raise ProtocolError(f"{what}: expected {accept}, but received {kind}")
    return response


def _reason(error: Exception) -> str:
    """The text of an error; its type if it has no text."""
    said = error.strerror if isinstance(error, OSError) else None
    return (said or str(error) or type(error).__name__).lower()


def _raise_refusal(response: http.client.HTTPResponse, what: str) -> NoReturn:
    problem = _problem(response.read(PROBLEM_BYTES_MAX))
    name = str(problem.get("name") or response.reason)
    detail = problem.get("detail") or problem.get("title") or response.reason
    text = f"{what}: {response.status} {name}: {detail}"
    if response.status in RETRYABLE and problem.get("retryable") is not False:
        raise InterruptionError(text, _retry_after_s(response.headers.get("Retry-After")), name)
    if response.status == CONFLICT and name == "incarnation_changed":
        raise StreamChangedError(
            f"{text}. The stream was re-created after this DataFrame was loaded; load it again",
            response.status,
            name,
        )
    raise ServerRefusedError(text, response.status, name)


def _problem(body: bytes) -> dict[str, object]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _retry_after_s(value: str | None) -> float:
    """Seconds in a Retry-After header (RFC 9110, 10.2.3: a number or an HTTP date)."""
    if value is None:
        return 0.0
    if value.isascii() and value.strip().isdigit():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
