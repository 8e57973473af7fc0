"""Large socket messages: find their frames, and the messages of a batch, in short steps."""

from typing import Final, Protocol

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import BATCH_MESSAGES_MAX
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.item_steps import (
    PACKED_PLAIN_BYTES,
    Part,
    is_plain,
    json_item,
    packed_item,
)
from contrail_edge.inputs.json_steps import check_utf8, count_values, nesting_in_steps, outline
from contrail_edge.inputs.message_items import MessageItem, PackedMessageItem, check_count
from contrail_edge.inputs.packed_steps import PackedParts
from contrail_gateway.core.frames import PackedPub, Pub
from contrail_gateway.core.session import SETTLED_MAX, too_many_settled

FRAMES_MAX: Final = 10_000
"""Limit of the frames in one message."""

_FRAMES: Final = "frames in a message"
_LISTED_MAX: Final = 4 * SETTLED_MAX
"""Limit of brackets and commas in a frame that does not publish: three for each range."""
_FIELDS_MAX: Final = 32
_SHORT_BYTES: Final = 4 << 10

Spans = list[tuple[int, int]]
"""Start and end of each part, in bytes; the end is exclusive."""


def check_frames(count: int) -> None:
    """Refuse more frames than a message may hold (BATCH_TOO_LARGE)."""
    if count > FRAMES_MAX:
        raise ApiError(
            errors.BATCH_TOO_LARGE, f"the limit is {FRAMES_MAX} {_FRAMES}", applied=False
        )


class Form(Protocol):
    """Splits the large messages of one sub-protocol. Its methods raise ApiError for bad input."""

    def is_plain(self, text: bytes) -> bool:
        """Return True if any message of this size is decoded in a few milliseconds."""
        ...

    def look_through(self, message: bytes) -> Steps[None]:
        """Check what the decoder does not check, or checks too late."""
        ...

    def frames(self, message: bytes) -> Steps[Spans]:
        """Return the frames of an array."""
        ...

    def skeleton(self, frame: bytes) -> Steps[bytes]:
        """Return the frame with its large arrays and objects left empty."""
        ...

    def items(self, frame: bytes) -> Steps[Spans]:
        """Return the messages of a ``pub_batch``."""
        ...

    def item(self, raw: bytes, at: str, payload_bytes_max: int) -> Steps[Part]:
        """Read one of these messages, at the pointer ``at``."""
        ...

    def pub(self, frame: bytes, payload_bytes_max: int) -> Steps[Part]:
        """Read the message of a ``pub``."""
        ...

    def check_lists(self, frame: bytes) -> Steps[None]:
        """Refuse any other frame whose lists are longer than allowed (BATCH_TOO_LARGE)."""
        ...


class JsonForm:
    """The form of ``contrail.v1.json``."""

    _item: Final = msgspec.json.Decoder(MessageItem)
    _pub: Final = msgspec.json.Decoder(Pub)
    _shell: Final = msgspec.json.Decoder(list[msgspec.Raw])

    def is_plain(self, text: bytes) -> bool:
        """See :class:`Form`."""
        return is_plain(text)

    def look_through(self, message: bytes) -> Steps[None]:
        """See :class:`Form`."""
        yield from check_utf8(message)
        yield from nesting_in_steps(message)

    def frames(self, message: bytes) -> Steps[Spans]:
        """See :class:`Form`."""
        found = yield from outline(message, 1, FRAMES_MAX, _FRAMES)
        self._shell.decode(found.skeleton)
        return found.inner[0]

    def skeleton(self, frame: bytes) -> Steps[bytes]:
        """See :class:`Form`."""
        return (yield from outline(frame, 2)).skeleton

    def items(self, frame: bytes) -> Steps[Spans]:
        """See :class:`Form`."""
        found = yield from outline(frame, 2, BATCH_MESSAGES_MAX, "messages")
        if len(found.inner) != 1:
            raise ApiError(errors.MALFORMED_BODY, "a field must not be given twice")
        return found.inner[0]

    def item(self, raw: bytes, at: str, payload_bytes_max: int) -> Steps[Part]:
        """See :class:`Form`."""
        return json_item(self._item, raw, at, payload_bytes_max)

    def pub(self, frame: bytes, payload_bytes_max: int) -> Steps[Part]:
        """See :class:`Form`."""
        return json_item(self._pub, frame, "", payload_bytes_max)

    def check_lists(self, frame: bytes) -> Steps[None]:
        """See :class:`Form`."""
        if (yield from count_values(frame)) > _LISTED_MAX:
            raise too_many_settled()


class PackedForm:
    """The form of ``contrail.v1.msgpack``."""

    _item: Final = msgspec.msgpack.Decoder(PackedMessageItem)
    _pub: Final = msgspec.msgpack.Decoder(PackedPub)
    _key: Final = msgspec.msgpack.encode("messages")

    def is_plain(self, text: bytes) -> bool:
        """See :class:`Form`."""
        return len(text) <= PACKED_PLAIN_BYTES

    def look_through(self, message: bytes) -> Steps[None]:
        """See :class:`Form`."""
        yield

    def frames(self, message: bytes) -> Steps[Spans]:
        """See :class:`Form`."""
        parts = PackedParts(message)
        head = parts.array(0)
        if head is None:
            raise ApiError(errors.MALFORMED_BODY, "Input data was truncated")
        check_frames(head[0])
        return (yield from _all(parts, head, len(message)))

    def skeleton(self, frame: bytes) -> Steps[bytes]:
        """See :class:`Form`."""
        parts = PackedParts(frame)
        fields = yield from self._fields(parts, frame)
        # A map head of the widest form fits any number of fields.
        kept = [bytes((0xDF,)), (len(fields) // 2).to_bytes(4)]
        for start, end in fields:
            hollow = b""
            if end - start > _SHORT_BYTES:
                hollow = b"\x90" if parts.array(start) else b"\x80" if parts.map(start) else b""
            kept.append(hollow or frame[start:end])
        return b"".join(kept)

    def _fields(self, parts: PackedParts, frame: bytes) -> Steps[Spans]:
        """Return the keys and values of a frame, alternating."""
        head = parts.map(0)
        if head is None:
            raise ApiError(errors.MALFORMED_BODY, "a frame must be an object with an op")
        if head[0] > _FIELDS_MAX:
            raise ApiError(errors.MALFORMED_BODY, "a frame has too many fields")
        return (yield from _all(parts, (2 * head[0], head[1]), len(frame)))

    def items(self, frame: bytes) -> Steps[Spans]:
        """See :class:`Form`."""
        parts = PackedParts(frame)
        fields = yield from self._fields(parts, frame)
        for name, value in zip(fields[::2], fields[1::2], strict=True):
            head = parts.array(value[0])
            if head is not None and frame[slice(*name)] == self._key:
                check_count(head[0])
                return (yield from parts.spans(head[1], head[0]))
        raise ApiError(errors.MALFORMED_BODY, "a batch must have messages")

    def item(self, raw: bytes, at: str, payload_bytes_max: int) -> Steps[Part]:
        """See :class:`Form`."""
        return packed_item(self._item, raw, at)

    def pub(self, frame: bytes, payload_bytes_max: int) -> Steps[Part]:
        """See :class:`Form`."""
        return packed_item(self._pub, frame, "")

    def check_lists(self, frame: bytes) -> Steps[None]:
        """See :class:`Form`."""
        parts = PackedParts(frame)
        fields = yield from self._fields(parts, frame)
        count = 0
        for start, _ in fields[1::2]:
            lists = [start]
            by_shard = parts.map(start)
            if by_shard is not None:
                if by_shard[0] > SETTLED_MAX:
                    raise too_many_settled()
                inner = yield from parts.spans(by_shard[1], 2 * by_shard[0])
                lists = [at for at, _ in inner[1::2]]
            count += sum((parts.array(at) or (0, 0))[0] for at in lists)
        if count > SETTLED_MAX:
            raise too_many_settled()


def _all(parts: PackedParts, head: tuple[int, int], size: int) -> Steps[Spans]:
    """Return all values after a head; the text must end with them."""
    count, start = head
    spans = yield from parts.spans(start, count)
    if (spans[-1][1] if spans else start) != size:
        raise ApiError(errors.MALFORMED_BODY, "unexpected data follows the frame")
    return spans
