"""Heads of requests that were answered directly, by their bytes, so that none is parsed again.

Clients send one head over and over, but for one part: the length of the body in a publish, and the
target in a read. Parsing and checking a head takes longer than all that depends on this part.
Whatever the parser and the checks find of the rest depends on its bytes and on settings alone, so
a head that has passed them once would always pass them.
"""

import re
from typing import Final

from contrail_edge.direct import DirectExchange, DirectHead
from contrail_edge.http.headers import X_REQUEST_ID

_HEADS_MAX: Final = 1_024
_HEAD_BYTES_MAX: Final = 1_024
"""The most heads, and their longest: 1 MiB, and at most 20 MiB for what they mean."""
_LINE_END: Final = b"\r\n"
_END: Final = b"\r\n\r\n"
_SPACE: Final = b" "
_READ: Final = b"GET "
_VERSION: Final = b"HTTP/1.1\r\n"
_LENGTH: Final = b"ength: "
"""The end of the name of Content-Length as almost all clients write it."""
_BEFORE_LENGTH: Final = b"\r\ncontent-l"
_TARGET: Final = re.compile(rb"/[\w.~!$&'()*+,;:=@/?%-]*")
"""Targets that the parser accepts, whatever follows: a part of those that it accepts."""
_ONCE: Final = (X_REQUEST_ID, b"traceparent", b"idempotency-key", b"nats-")
"""Beginnings of the names of headers that differ from request to request."""


class KnownHeads:
    """The known heads of all connections of a process; forgets all of them when there are many."""

    def __init__(self, target_bytes_max: int) -> None:
        """Targets above ``target_bytes_max`` are left to the parser, which refuses them."""
        self._target_bytes_max = target_bytes_max
        # By what `_cut` finds around the part that differs.
        self._heads: dict[tuple[bytes, bytes], DirectHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def split(self, data: bytes) -> tuple[DirectHead, bytes, bytes] | None:
        """The head of ``data``, what differs in it, and the body.

        None unless ``data`` is one whole request with a known head.
        """
        around, part, body = _cut(data)
        known = self._heads.get(around)
        if known is None or body is None:
            return None
        size = len(body)
        if known.target is None:
            sound = not size and len(part) <= self._target_bytes_max and _TARGET.fullmatch(part)
            return (known, part, body) if sound else None
        if size > known.target.direct.body_bytes_max or part != b"%d" % size:
            return None
        return known, part, body

    def learn(self, data: bytes, exchange: DirectExchange) -> None:
        """Remember the head of ``exchange``, which is complete and whose last bytes are ``data``.

        Only if it is kept alive, and if ``data`` has nothing but this request.
        """
        around, part, body = _cut(data)
        is_read = exchange.method == "GET"
        if is_read:
            sound = bool(_TARGET.fullmatch(part)) and around[1].startswith(_VERSION)
        else:
            sound = bool(part) and around[0].lower().endswith(_BEFORE_LENGTH)
        if (
            not sound
            or len(data) - len(exchange.content) > _HEAD_BYTES_MAX
            or body != exchange.content
            or exchange.more_body
            or not exchange.keep_alive
            or any(name.startswith(_ONCE) for name in exchange.headers)
        ):
            return
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        target = None if is_read else exchange.target
        self._heads[around] = DirectHead(
            exchange.scope, exchange.headers, target, exchange.prepared
        )


def _cut(data: bytes) -> tuple[tuple[bytes, bytes], bytes, bytes | None]:
    """What a head has around the part that differs, this part, and the body.

    The part is the first that looks like it, so equal heads have it in the same place. The body is
    None if the head is not complete.
    """
    head, end, body = data.partition(_END)
    if head.startswith(_READ):
        start, _, rest = head.partition(_SPACE)
        part, _, tail = rest.partition(_SPACE)
    else:
        start, _, rest = head.partition(_LENGTH)
        part, _, tail = rest.partition(_LINE_END)
    return (start, tail), part, body if end else None
