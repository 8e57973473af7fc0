"""The AsyncAPI 3 document of ``/v1/ws``, built from the frames themselves."""

from typing import Any, Final, get_args

import msgspec

from contrail_common.__about__ import __version__
from contrail_common.edge.document import with_clean_descriptions
from contrail_common.edge.handshake import VERSION
from contrail_common.edge.websocket import CloseCode
from contrail_gateway.core import frames
from contrail_gateway.socket_codec import CODECS, BatchAcks, ColumnMessages, Failed, Messages
from contrail_gateway.sockets import PATH

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
Publishing, subscriptions and acknowledgements over one WebSocket.

`contrail.v1.json` uses text frames that hold one JSON object or an array of them;
`contrail.v1.msgpack` uses binary frames with the same objects in msgpack, where the payload of a
message is the bytes of `data`. The server sends one object in each frame. A frame of a client that
has an `id` gets exactly one answer with that `id`: `ok`, `ack`, `acks`, `pong` or `error`. An `ack`
or another settling frame is applied as far as it can be: the sequences that the socket holds are
settled, and an `error` names the others. permessage-deflate is never accepted. A message is at most
8 MiB, in one frame or in fragments, holds at most 10,000 objects, and nests at most 64 levels.

A token comes in the handshake's `Authorization` header or, from browsers, in `connect` as the
first frame. `credit` is exact: no message begins beyond it, and one that begins within it is sent
whole; bytes count subject, headers and payload. What a socket leaves unread may be 8 MiB, then it
is closed with 4008. Before a shutdown the server sends `drain`, pushes no more, takes
acknowledgements and messages for the time that it names, and closes with 4000.

An ordered subscription over msgpack may ask for `cols`: its `msgs` then hold `cols` in place of
`messages`, the fields of all messages each in one value of bytes. A server that does not know
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
    CloseCode.TOO_LARGE: "a message over 8 MiB, or of more objects or values than it may hold",
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
    return (kind.__doc__ or "").partition("\n")[0]
