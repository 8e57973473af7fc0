"""Heads of forwarded requests and answers: the headers that are forwarded, and the others."""

from typing import Final

from contrail_edge.http.headers import X_REQUEST_ID, elements
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header

FORWARDED: Final = b"contrail-forwarded"
"""Marks a forwarded request, so that it is not forwarded again."""

# Hop-by-hop headers (RFC 9110, section 7.6.1), and those that say where a body ends. The latter are
# written again for each connection. A copy that the next process reads differently could smuggle a
# second request inside the body of the first.
_OF_ONE_CONNECTION: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_SET_BY_EDGE: Final = frozenset(
    {
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"date",
        b"server",
        b"vary",
        X_REQUEST_ID,
    }
)
_CHUNKED: Final = (b"transfer-encoding", b"chunked")


def length_header(length: int) -> Header:
    """Return the Content-Length of a body of ``length`` bytes."""
    return b"content-length", b"%d" % length


def passed_on(headers: list[Header]) -> list[Header]:
    """Return the end-to-end headers."""
    named = {one for name, value in headers if name == b"connection" for one in elements(value)}
    return [
        (name, value)
        for name, value in headers
        if name not in _OF_ONE_CONNECTION and name not in named
    ]


def request_head(request: Request, length: int | None) -> bytes:
    """Return the head of ``request`` for another process, with a body of ``length`` bytes.

    ``length`` is None for a chunked body.
    """
    headers = [
        one for one in passed_on(request.raw_headers) if one[0] not in (X_REQUEST_ID, FORWARDED)
    ]
    if length is None:
        headers.append(_CHUNKED)
    elif length or b"content-length" in request.headers:
        headers.append(length_header(length))
    method: str = request.scope["method"]
    return head_bytes(request, method, headers)


def handshake_head(request: Request) -> bytes:
    """Return the head of a handshake, with its hop-by-hop headers, which ask for the upgrade."""
    own = (X_REQUEST_ID, FORWARDED, b"content-length", b"transfer-encoding")
    headers = [one for one in request.raw_headers if one[0] not in own]
    return head_bytes(request, "GET", headers)


def head_bytes(request: Request, method: str, headers: list[Header]) -> bytes:
    """Return a request line with headers; add the request id and the mark of forwarding."""
    target = request.raw_path
    if request.query_string:
        target += b"?" + request.query_string
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target)]
    lines += [b"%b: %b" % header for header in headers]
    lines += [b"%b: %b" % (X_REQUEST_ID, request.request_id), FORWARDED + b": 1", b"", b""]
    return b"\r\n".join(lines)


def answer_headers(headers: list[Header]) -> list[Header]:
    """Return the headers of a peer's answer that go to the client, without the length."""
    return [one for one in passed_on(headers) if one[0] not in _SET_BY_EDGE]
