"""The checks that come before all others: of a request's head, and of its caller.

A head must be within its limits and mean the same to every process. A caller must use an allowed
host and origin, and have the bootstrap bearer token if there is one.
"""

import hmac
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.headers import elements
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header
from contrail_edge.http.settings import EdgeSettings

_LINE_OVERHEAD: Final = 4  # the colon, the space and the line break
_CHUNKED: Final = b"chunked"
_NEVER_OF_ONE_CONNECTION: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"origin",
        b"transfer-encoding",
    }
)
"""Headers that Connection must not name.

A process that forwards a request drops the headers that Connection names (RFC 9110, section 7.6.1).
Without one of these, the next process would read a different request.
"""

OPEN_PATHS: Final = frozenset({b"/", b"/docs", b"/livez", b"/openapi.json", b"/readyz"})
"""Paths that need no token: probes and documentation, which show nothing about data."""
_EVENTS: Final = b"text/event-stream"
_TICKET: Final = b"ticket="

_REMEMBERED_MAX: Final = 256


# Heads -------------------------------------------------------------------------------------------


def too_long_target(limits: EdgeSettings) -> ApiError:
    """Return the error for a target above its limit."""
    detail = f"the limit is {limits.target_bytes_max} bytes"
    return ApiError(errors.URI_TOO_LONG, detail, applied=False)


def too_large_head(limits: EdgeSettings) -> ApiError:
    """Return the error for too many header bytes or lines."""
    detail = f"the limit is {limits.head_bytes_max} bytes and {limits.head_lines_max} lines"
    return ApiError(errors.REQUEST_HEADERS_TOO_LARGE, detail, applied=False)


def bad_request(detail: str) -> ApiError:
    """Return the error for a request that is not valid HTTP."""
    return ApiError(errors.BAD_REQUEST, detail, applied=False)


def check_head(url: bytes, headers: Sequence[Header], version: str, limits: EdgeSettings) -> None:
    """Refuse a head above its limits, or one that two processes could read differently.

    Names are lower-case. Raises URI_TOO_LONG, REQUEST_HEADERS_TOO_LARGE, BAD_REQUEST and
    NOT_IMPLEMENTED.
    """
    size = 0
    hosts: list[bytes] = []
    codings: list[bytes] = []
    for name, value in headers:
        size += len(name) + len(value) + _LINE_OVERHEAD
        if name == b"host":
            hosts.append(value)
        elif name == b"connection":
            _check_connection(value)
        elif name == b"transfer-encoding":
            codings += elements(value)
    if len(url) > limits.target_bytes_max:
        raise too_long_target(limits)
    if size > limits.head_bytes_max or len(headers) > limits.head_lines_max:
        raise too_large_head(limits)
    # The guard would check one of several, and a proxy in front may have used another.
    if len(hosts) != 1:
        raise bad_request("exactly one Host header is required")
    if codings:
        _check_codings(codings, version)
    if not url.startswith(b"/"):
        # RFC 9112 section 3.2.2: the authority of such a target overrides the Host header.
        authority = url.partition(b"://")[2].partition(b"/")[0]
        if authority.lower() != hosts[0].lower():
            raise bad_request("the request target names another server than the Host header")


def _check_connection(value: bytes) -> None:
    for name in elements(value):
        if name in _NEVER_OF_ONE_CONNECTION:
            raise bad_request(f"the Connection header must not list {name.decode()}")


def _check_codings(codings: Sequence[bytes], version: str) -> None:
    """Accept only ``chunked`` (RFC 9112, section 6.1); no other coding is supported."""
    # A proxy in front that finds another end would take a part of this body for the next request,
    # or the next request for a part of this body. The parser itself refuses a second
    # Content-Length, and one beside a Transfer-Encoding.
    if codings[-1] != _CHUNKED or codings.count(_CHUNKED) > 1 or version == "1.0":
        raise bad_request("the Transfer-Encoding does not determine where the body ends")
    if len(codings) > 1:
        detail = "the only supported Transfer-Encoding is chunked"
        raise ApiError(errors.NOT_IMPLEMENTED, detail, applied=False)


# Callers -----------------------------------------------------------------------------------------


class Guard:
    """Checks each request before it is handled in any other way.

    The Host check keeps a web page from reaching a local server by DNS rebinding; the Origin check
    keeps it from posting across sites.
    """

    def __init__(self, settings: EdgeSettings) -> None:
        self._hosts = settings.allowed_hosts
        self._origins = settings.allowed_origins
        self._token = None if settings.token is None else settings.token.encode()
        # Values of Host that were allowed before, so that most requests need one look-up. Bounded,
        # because a client can invent any number of them by the port.
        self._good_hosts: set[bytes] = set()

    def check(self, request: Request) -> None:
        """Raise FOREIGN_HOST, FOREIGN_ORIGIN or UNAUTHENTICATED if the request is not allowed."""
        headers = request.headers
        if headers.get(b"host") not in self._good_hosts or b"origin" in headers:
            self.check_site(request)
        if self._token is not None and request.raw_path not in OPEN_PATHS:
            self._check_token(headers.get(b"authorization", b""), self._token)

    def check_socket(self, request: Request) -> bool:
        """Return True if a handshake is authenticated; a browser sends its token in a frame later.

        Raises as :meth:`check` does; UNAUTHENTICATED only if there is a token.
        """
        self.check_site(request)
        header = request.headers.get(b"authorization")
        if self._token is None or header is None:
            return self._token is None
        self._check_token(header, self._token)
        return True

    def ticket(self, request: Request) -> bytes | None:
        """Return the ticket of a request for a socket or for events that has no token, or None.

        Other requests must not use tickets, because URLs are logged and shared.
        """
        headers = request.headers
        if self._token is None or b"authorization" in headers or request.method != "GET":
            return None
        if b"upgrade" not in headers and _EVENTS not in headers.get(b"accept", b""):
            return None
        for part in request.query_string.split(b"&"):
            if part.startswith(_TICKET):
                return part.removeprefix(_TICKET)
        return None

    def good_token(self, token: str) -> bool:
        """Return True if ``token`` is the bearer token, or if the server has none."""
        return self._token is None or hmac.compare_digest(token.encode(), self._token)

    def check_site(self, request: Request) -> None:
        """Raise FOREIGN_HOST or FOREIGN_ORIGIN."""
        headers = request.headers
        host = headers.get(b"host", b"")
        if host not in self._good_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin)

    def _check_host(self, header: bytes) -> None:
        if _host_name(header.decode("latin-1")) not in self._hosts:
            raise ApiError(errors.FOREIGN_HOST, applied=False)
        if len(self._good_hosts) < _REMEMBERED_MAX:
            self._good_hosts.add(header)

    def _check_origin(self, header: bytes) -> None:
        origin = header.decode("latin-1").lower()
        if origin in self._origins:
            return
        scheme, separator, authority = origin.partition("://")
        if scheme in ("http", "https") and separator and _host_name(authority) in self._hosts:
            return
        raise ApiError(errors.FOREIGN_ORIGIN, applied=False)

    @staticmethod
    def _check_token(header: bytes, token: bytes) -> None:
        scheme, _, given = header.partition(b" ")
        if not hmac.compare_digest(given.strip(), token) or scheme.lower() != b"bearer":
            raise ApiError(errors.UNAUTHENTICATED, applied=False)


def _host_name(authority: str) -> str | None:
    """Return the name in ``host[:port]``, lower-case and without brackets; None if invalid."""
    try:
        parts = urlsplit(f"//{authority}")
        if parts.netloc != authority or parts.username is not None or parts.port == 0:
            return None
        return parts.hostname
    except ValueError:
        return None
