"""The AsyncAPI 3 document of ``/v1/ws``, built from the frames themselves."""

from typing import Any, Final, get_args

import msgspec

from contrail_common.__about__ import __version__
from contrail_edge.openapi.document import with_clean_descriptions
from contrail_edge.ws.handshake import VERSION
from contrail_edge.ws.websocket import CloseCode
from contrail_gateway.core import frames
from contrail_gateway.sockets.codec import CODECS, BatchAcks, ColumnMessages, Failed, Messages
from contrail_gateway.sockets.endpoint import PATH

_SCHEMAS: Final = "#/components/schemas/{name}"
_SERVER_FRAMES: Final[tuple[type[msgspec.Struct], ...]] = (
    frames.Info,
    frames.Ok,
    frames.Subscribed,
    frames.PubAck,
    BatchAcks,
    Failed,
    Messages,
    ColumnMessages,
    frames.Beat,
    frames.Gap,
    frames.Gone,
    frames.Pong,
    frames.Drain,
)
_CLIENT_FRAMES: Final[tuple[type[msgspec.Struct], ...]] = get_args(frames.JsonFrame)

_DESCRIPTION: Final = """\
Publish, subscribe and acknowledge over one WebSocket.

The sub-protocol `contrail.v1.json` uses text frames; each contains a JSON object or an array of
objects. `contrail.v1.msgpack` uses binary frames with the same objects in msgpack, where `data` is
the payload as bytes. The server sends one object per frame. A message is at most 8 MiB, whether in
one frame or in fragments, contains at most 10,000 objects, and is nested at most 64 levels.
permessage-deflate is never accepted.

A client frame with an `id` gets exactly one answer with that `id`: `ok`, `ack`, `acks`, `pong` or
`error`. An `ack`, `nak`, `term` or `in_progress` is applied as far as possible: sequences that the
socket holds are settled, and an `error` names the others.

A token is sent in the `Authorization` header of the handshake, or in `connect` as the first frame,
within 10 seconds. A browser may use a ticket instead, in the parameter `ticket` of the URL.

`credit` is exact: the server does not start a message without credit, and sends a message that it
has started as a whole. Credit in bytes counts subject, headers and payload. The server closes a
socket with 4008 once more than 8 MiB are left unread.

Before a shutdown the server sends `drain` and stops pushing. It accepts messages and
acknowledgements for the time given in `drain`, then closes with 4000.

An ordered subscription over msgpack may request `cols`. Its `msgs` frames then have `cols` instead
of `messages`: each field of all messages is one value of bytes. A server that does not support
`cols` sends `messages`.
"""

_CLOSE_CODES: Final[dict[int, str]] = {
    1002: "protocol error: a frame violates RFC 6455 or is compressed",
    CloseCode.INVALID_DATA: "a text frame is not UTF-8",
    1011: "internal error",
    CloseCode.DRAINING: "the server is shutting down; reconnect",
    CloseCode.SLOW_CONSUMER: "too many bytes were left unread; reconnect",
    CloseCode.RATE_LIMITED: (
        "the server holds too many unfinished messages over all sockets; reconnect"
    ),
    CloseCode.LEADER_LOST: "reserved",
    CloseCode.PROTOCOL_ERROR: "a message is not a valid frame of the sub-protocol",
    CloseCode.UNAUTHENTICATED: "missing or invalid token, or no token in time",
    CloseCode.FORBIDDEN: "reserved",
    CloseCode.REPLACED: "reserved",
    CloseCode.TOO_LARGE: "a message is larger than 8 MiB, or contains too many objects or values",
}


def document() -> dict[str, Any]:
    """The document, as ``openapi/asyncapi.yaml`` holds it."""
    kinds = (*_CLIENT_FRAMES, *_SERVER_FRAMES)
    shapes, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    messages = {
        _name(kind): {
            "name": _operation(kind),
            "title": _operation(kind),
            "summary": _summary(kind),
            "payload": shape,
        }
        for kind, shape in zip(kinds, shapes, strict=True)
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Contrail", "version": __version__, "description": _DESCRIPTION},
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": "127.0.0.1:7420",
                "protocol": "ws",
                "security": [{"$ref": "#/components/securitySchemes/bearer"}],
            }
        },
        "channels": {
            "socket": {
                "address": PATH,
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
                "bindings": {"ws": {"method": "GET", "headers": _handshake()}},
                "x-close-codes": {str(int(code)): why for code, why in _CLOSE_CODES.items()},
            }
        },
        "operations": {
            "fromClient": _direction("receive", "Frames that a client sends.", _CLIENT_FRAMES),
            "fromServer": _direction("send", "Frames that the server sends.", _SERVER_FRAMES),
        },
        "components": {
            "messages": messages,
            "schemas": with_clean_descriptions(components),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _handshake() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "Sec-WebSocket-Version": {"const": VERSION.decode()},
            "Sec-WebSocket-Protocol": {"enum": list(CODECS)},
        },
        "required": ["Sec-WebSocket-Version", "Sec-WebSocket-Protocol"],
    }


def _direction(
    action: str, summary: str, kinds: tuple[type[msgspec.Struct], ...]
) -> dict[str, Any]:
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": "#/channels/socket"},
        "messages": [{"$ref": f"#/channels/socket/messages/{_name(kind)}"} for kind in kinds],
    }


def _name(kind: type[msgspec.Struct]) -> str:
    return kind.__name__


def _operation(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _summary(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].replace("``", "`")
