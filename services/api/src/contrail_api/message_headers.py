"""Message headers on raw HTTP: their mapping to request headers and response headers.

``Nats-*``, ``traceparent`` and ``tracestate`` keep their names. ``Idempotency-Key`` becomes
``Nats-Msg-Id``. Every other message header is sent as ``Msg-Header-<Name>``. A Content-Type that
describes the payload is stored too, and is the Content-Type of the raw message when it is read.
"""

import functools
import re
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from contrail_common import errors, model
from contrail_common.columns.header_columns import BAD_HEADER_VALUE, HEADER_NAME
from contrail_common.errors import ApiError
from contrail_common.model import Headers, StoredMessage
from contrail_common.timeunits import format_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import Header

PREFIX: Final = "Msg-Header-"
_PREFIX: Final = b"msg-header-"
_NATS: Final = b"nats-"
_IDEMPOTENCY_KEY: Final = b"idempotency-key"
_TRACE: Final = (b"traceparent", b"tracestate")
_CONTENT_TYPE: Final = b"content-type"
_LEADING: Final = (_PREFIX, _NATS, _IDEMPOTENCY_KEY, *_TRACE, _CONTENT_TYPE)
CONTENT_TYPE: Final = "Content-Type"
"""The message header with the type of the payload."""
BYTES_TYPE: Final = b"application/octet-stream"
_UNTOLD: Final = frozenset({BYTES_TYPE, b"application/x-www-form-urlencoded", b""})
"""Types that do not describe the payload: any bytes, and the default of ``curl -d``."""

_PLAIN_VALUE: Final = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_EXTENDED: Final = re.compile(rb"(?i:utf-8)'[A-Za-z0-9-]*'((?:[\x21-\x24\x26\x2b\x2d\x2e\x30-\x39"
                              rb"\x41-\x5a\x5e-\x7a\x7c\x7e]|%[0-9A-Fa-f]{2})*)")  # fmt: skip
# The `attr-char` of RFC 8187, besides letters and digits.
_EXTENDED_SAFE: Final = "!#$&+-.^_`|~"
_METADATA: Final = frozenset(
    {"nats-stream", "nats-subject", "nats-sequence", "nats-time-stamp", "nats-last-sequence"}
)

# Names whose spelling in JetStream is not Title-Case.
_SPELLINGS: Final = {b"nats-ttl": "Nats-TTL", **{name: name.decode() for name in _TRACE}}


def from_request(raw_headers: list[tuple[bytes, bytes]]) -> Headers | None:
    """Return the message headers of an HTTP request, or None if it has none.

    Raises INVALID_FIELD for a header that is not valid in a message, and if Idempotency-Key and
    Nats-Msg-Id differ.
    """
    headers: Headers | None = None
    kind = b""
    for name, value in raw_headers:
        if name.startswith(_LEADING):
            if name.startswith(_CONTENT_TYPE):
                kind = value if name == _CONTENT_TYPE else kind
                continue
            if headers is None:
                headers = {}
            stored, text = _stored_header(name, value)
            values = headers.setdefault(stored, [])
            if stored == model.MSG_ID and values:
                # A client may send the id under both names, but it must be the same.
                if values != [text]:
                    raise invalid_field("Idempotency-Key", "differs from Nats-Msg-Id")
            else:
                values.append(text)
    if kind not in _UNTOLD:
        headers = {} if headers is None else headers
        try:
            text = kind.decode()
        except UnicodeDecodeError:
            raise _not_utf8("Content-Type") from None
        # Msg-Header-Content-Type is meant for the message only, so it takes precedence.
        headers.setdefault(CONTENT_TYPE, [text])
    return headers


def _stored_header(name: bytes, value: bytes) -> tuple[str, str]:
    shown = name.decode("latin-1")
    if name == _IDEMPOTENCY_KEY:
        return model.MSG_ID, _text(shown, value)
    stored = name
    if name.startswith(_PREFIX):
        stored = name[len(_PREFIX) :]
        if stored.endswith(b"*"):
            return stored_name(stored[:-1], shown), _extended_text(shown, value)
    return stored_name(stored, shown), _text(shown, value)


@functools.lru_cache(maxsize=1024)
def stored_name(lowered: bytes, shown: str) -> str:
    """Return the stored name of an HTTP header: JetStream's spelling, or Title-Case."""
    spelling = _SPELLINGS.get(lowered)
    if spelling is not None:
        return spelling
    text = lowered.decode("latin-1")
    if HEADER_NAME.fullmatch(text) is None:
        raise invalid_field(shown, "is not a valid name for a message header")
    return "-".join(part.capitalize() for part in text.split("-"))


def _text(shown: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _not_utf8(shown) from None


def _not_utf8(shown: str) -> ApiError:
    return invalid_field(shown, f"is not UTF-8; use {shown}* for a value in RFC 8187 form")


def _extended_text(shown: str, value: bytes) -> str:
    found = _EXTENDED.fullmatch(value)
    try:
        if found is not None:
            text = unquote_to_bytes(found[1]).decode()
            if BAD_HEADER_VALUE.search(text) is None:
                return text
    except UnicodeDecodeError:
        pass
    raise invalid_field(shown, "must be in RFC 8187 form, such as UTF-8''na%C3%AFve")


def to_response(stream: str, stored: StoredMessage) -> list[Header]:
    """Return the response headers of a raw message: its metadata, then its own headers.

    Raises NOT_ACCEPTABLE for a header name that HTTP cannot carry.
    """
    sent: list[Header] = [
        _named("nats-stream", stream),
        _named("nats-subject", stored.subject),
        (b"nats-sequence", b"%d" % stored.seq),
        (b"nats-time-stamp", format_time(stored.time_ns).encode()),
    ]
    if stored.shard is not None:
        sent.append((b"contrail-shard", b"%d" % stored.shard))
    if stored.headers is None:
        return sent
    for name, values in stored.headers.items():
        if HEADER_NAME.fullmatch(name) is None:
            detail = (
                "a header name of this message cannot be sent over HTTP; request "
                "application/json instead"
            )
            raise ApiError(errors.NOT_ACCEPTABLE, detail)
        lowered = name.lower()
        # A stored header must not look like the metadata above.
        own = lowered.startswith("nats-") and lowered not in _METADATA
        sent.extend(_sent(name if own else PREFIX + name, values))
    return sent


def payload_type(stored: StoredMessage) -> bytes:
    """Return the Content-Type with which a message was published, if it is valid in HTTP."""
    if stored.headers is None:
        return BYTES_TYPE
    for name, values in stored.headers.items():
        # Publishes by JSON and WebSocket store names as given, in upper or lower case.
        value = next(iter(values), "")
        if name.lower() == "content-type" and value and _PLAIN_VALUE.fullmatch(value):
            return value.encode()
    return BYTES_TYPE


def _named(header: str, name: str) -> Header:
    # Names of streams and subjects have no spaces, and nothing that is not printable.
    if name.isascii():
        return header.encode(), name.encode()
    return f"{header}*".encode(), _extended(name)


def _sent(name: str, values: list[str]) -> list[Header]:
    lowered = name.lower().encode()
    plain = [(lowered, value.encode()) for value in values if _PLAIN_VALUE.fullmatch(value)]
    if len(plain) == len(values):
        return plain
    # Send all values of a name in the same form, to keep their order.
    extended = f"{name.lower()}*".encode()
    return [(extended, _extended(value)) for value in values]


def _extended(text: str) -> bytes:
    return f"UTF-8''{quote(text, safe=_EXTENDED_SAFE)}".encode()
