"""Access for pages of other origins (the CORS protocol of the Fetch standard)."""

import re
from collections.abc import Iterable
from typing import Final

from contrail_edge.http.headers import X_REQUEST_ID, elements
from contrail_edge.http.responses import Header, Response

_METHODS: Final = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_MAX_AGE_S: Final = b"600"
_SENT: Final = frozenset(
    {
        b"accept",
        b"authorization",
        b"content-type",
        b"idempotency-key",
        b"if-match",
        b"if-none-match",
        b"last-event-id",
        b"traceparent",
        b"tracestate",
        X_REQUEST_ID,
    }
)
"""Request headers that a page may send, besides those of messages."""
_SENT_OF_MESSAGES: Final = re.compile(rb"(?:nats|msg-header)-[!#$%&'*+.^_`|~0-9a-z-]+")
_EXPOSED: Final = frozenset(
    {b"allow", b"durability", b"etag", b"location", b"retry-after", X_REQUEST_ID}
)
_EXPOSED_PREFIXES: Final = (b"contrail-", b"msg-header-", b"nats-")


class Cors:
    """The headers of answers that allow pages of the listed origins to read them.

    The browser's credentials are never used: a page sends the token itself.
    """

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self.enabled = bool(origins)
        """False if no origin is listed; answers need no additional headers then."""

    def headers(self, origin: bytes | None, names: Iterable[bytes]) -> list[Header]:
        """Return headers for an answer to ``origin`` that has headers of these ``names``.

        Called only if ``enabled``. The names to expose are listed one by one: there are no
        wildcards for prefixes.
        """
        added: list[Header] = [(b"vary", b"Origin")]
        if self._allows(origin):
            exposed = dict.fromkeys(
                name
                for name in map(bytes.lower, names)
                if name in _EXPOSED or name.startswith(_EXPOSED_PREFIXES)
            )
            added.append((b"access-control-allow-origin", origin or b""))
            added.append((b"access-control-expose-headers", b", ".join(exposed)))
        return added

    def preflight(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        """Return the answer to a preflight request of a listed origin; None for other requests."""
        asked = b"access-control-request-method" in headers
        # Other origins get the usual answer without CORS headers, which the browser refuses.
        if method != "OPTIONS" or not asked or not self._allows(headers.get(b"origin")):
            return None
        wanted = elements(headers.get(b"access-control-request-headers", b""))
        granted = [one for one in wanted if _may_be_sent(one)]
        answer: list[Header] = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", b", ".join(granted)),
            (b"access-control-max-age", _MAX_AGE_S),
            (b"vary", b"Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]
        return Response(204, headers=answer)

    def _allows(self, origin: bytes | None) -> bool:
        return origin is not None and origin.lower() in self._origins


def _may_be_sent(name: bytes) -> bool:
    return name in _SENT or _SENT_OF_MESSAGES.fullmatch(name) is not None
