"""Heads of requests that were answered directly, by their bytes, so that none is parsed again.

Clients send one head over and over, but for one part: the length of the body in a publish, and the
target in a read. Parsing and checking a head takes longer than all that depends on this part.
Whatever the parser and the checks find of the rest depends on its bytes and on settings alone, so
a head that has passed them once would always pass them.
"""

import re
from typing import Final

import msgspec
from starlette.types import Scope

from contrail_edge.direct import DirectExchange, DirectTarget
from contrail_edge.http.headers import X_REQUEST_ID

_HEADS_MAX: Final = 1_024
_HEAD_BYTES_MAX: Final = 1_024
"""The most heads, and their longest: 1 MiB, and at most 20 MiB for what they mean."""
_END: Final = b"\r\n\r\n"
_READ: Final = b"GET "
_VERSION: Final = b" HTTP/1.1\r\n"
_LENGTH: Final = b"ength: "
"""The end of the name of Content-Length as almost all clients write it."""
_LENGTH_LINE: Final = b"\r\ncontent-length: "
_TARGET: Final = re.compile(rb"/[\w.~!$&'()*+,;:=@/?%-]*")
"""Targets that the parser accepts, whatever follows: a part of those that it accepts."""
_ONCE: Final = (X_REQUEST_ID, b"traceparent", b"idempotency-key", b"nats-")
"""Beginnings of the names of headers that differ from request to request."""


class KnownHead(msgspec.Struct, frozen=True, eq=False):
    """What a head leads to. Nothing of it must change.

    ``scope`` and ``headers`` have the target or the Content-Length of the request that it was
    learned from, which says nothing about others. ``prepared`` is what the handler has made of the
    head. ``target`` is None for a read, whose target differs.
    """

    scope: Scope
    headers: dict[bytes, bytes]
    target: DirectTarget | None
    prepared: object


class KnownHeads:
    """The known heads of all connections of a process; forgets all of them when there are many."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def split(self, data: bytes) -> tuple[KnownHead, bytes, bytes] | None:
        """The head of ``data``, what differs in it, and the body.

        None unless ``data`` is one whole request with a known head.
        """
        end = data.find(_END) + len(_END)
        if end > _HEAD_BYTES_MAX:
            return None
        start, stop = _part(data, end)
        known = self._heads.get(data[:start] + data[stop:end])
        if known is None:
            return None
        part, size = data[start:stop], len(data) - end
        if known.target is None:
            return (known, part, b"") if not size and _TARGET.fullmatch(part) else None
        if size > known.target.direct.body_bytes_max or part != b"%d" % size:
            return None
        return known, part, data[end:]

    def learn(self, data: bytes, exchange: DirectExchange) -> None:
        """Remember the head of ``exchange``, which is complete and whose last bytes are ``data``.

        Only if it is kept alive, and if ``data`` has nothing but this request.
        """
        end = data.find(_END) + len(_END)
        start, stop = _part(data, end)
        is_read = exchange.method == "GET"
        if is_read:
            sound = _TARGET.fullmatch(data, start, stop) and data.startswith(_VERSION, stop)
        else:
            sound = data[:start].lower().endswith(_LENGTH_LINE)
        if (
            not sound
            or end > _HEAD_BYTES_MAX
            or len(data) - end != len(exchange.content)
            or exchange.more_body
            or not exchange.keep_alive
            or any(name.startswith(_ONCE) for name in exchange.headers)
        ):
            return
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        self._heads[data[:start] + data[stop:end]] = KnownHead(
            exchange.scope,
            exchange.headers,
            None if is_read else exchange.target,
            exchange.prepared,
        )


def _part(data: bytes, end: int) -> tuple[int, int]:
    """Where the part of a head begins and ends that differs from request to request.

    It is the first place that looks like it, so equal heads have it in the same place.
    """
    if data.startswith(_READ):
        start = len(_READ)
        return start, data.find(b" ", start, end)
    start = data.find(_LENGTH, 0, end) + len(_LENGTH)
    return start, data.find(b"\r", start, end)
