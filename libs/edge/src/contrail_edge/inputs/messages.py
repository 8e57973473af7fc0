"""Stored messages in JSON."""

from collections.abc import Iterable

import msgspec

from contrail_common.model import Headers, StoredMessage
from contrail_common.timeunits import format_time
from contrail_edge.inputs.schema_marks import TimeText

NO_HEADERS: Headers = {}


class MessageFields(msgspec.Struct):
    """The fields that stored and delivered messages have in every format."""

    stream: str
    """Name of the stream."""
    seq: int
    """Sequence of the message."""
    subject: str
    """Subject of the message."""
    time: TimeText
    """Time at which the message was stored."""
    headers: Headers
    """Message headers, each with its values."""


class Message(MessageFields):
    """A stored message. The payload is in ``data`` if it is UTF-8 text, else in ``data_base64``.

    ``shard`` is present for a stream with several shards.
    """

    data: str | msgspec.UnsetType = msgspec.UNSET
    """Payload, if it is UTF-8 text."""
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    """Payload in base64, if it is not UTF-8 text or base64 was requested."""
    shard: int | msgspec.UnsetType = msgspec.UNSET
    """Shard of the message, if the stream has several."""


def message_json(stream: str, stored: StoredMessage, *, base64: bool = False) -> Message:
    """Return ``stored`` for JSON; with ``base64``, text payloads are encoded too."""
    text, raw = payload_json(stored.payload, base64=base64)
    return Message(
        stream,
        stored.seq,
        stored.subject,
        format_time(stored.time_ns),
        stored.headers or NO_HEADERS,
        text,
        raw,
        msgspec.UNSET if stored.shard is None else stored.shard,
    )


def messages_json(stream: str, found: Iterable[StoredMessage], *, base64: bool) -> list[Message]:
    """The JSON forms of several messages."""
    return [message_json(stream, stored, base64=base64) for stored in found]


def payload_json(
    payload: bytes, *, base64: bool
) -> tuple[str | msgspec.UnsetType, bytes | msgspec.UnsetType]:
    """``data`` and ``data_base64`` of a payload: exactly one is set."""
    if not base64:
        try:
            return payload.decode(), msgspec.UNSET
        except UnicodeDecodeError:
            pass
    return msgspec.UNSET, payload


def payload_form(text: str) -> bool:
    """Whether ``?payload=`` asks for base64; ValueError for an unknown form."""
    if text not in ("", "auto", "base64"):
        raise ValueError("must be base64 or auto")
    return text == "base64"
