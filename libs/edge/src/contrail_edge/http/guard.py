"""The checks of callers: the Host and Origin allow-lists and the bootstrap bearer token."""

import hmac
from typing import Final
from urllib.parse import urlsplit

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import Request
from contrail_edge.http.settings import EdgeSettings

OPEN_PATHS: Final = frozenset({b"/", b"/docs", b"/livez", b"/openapi.json", b"/readyz"})
"""Paths that need no token: probes and documentation, which show nothing about data."""
_EVENTS: Final = b"text/event-stream"
_TICKET: Final = b"ticket="

_REMEMBERED_MAX: Final = 256


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
