"""Checks of the head of every request, which come before all others."""

from collections.abc import Sequence
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
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
            codings += [one.strip() for one in value.lower().split(b",")]
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
    for token in value.lower().split(b","):
        name = token.strip()
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
