"""Heads of requests that were answered directly, by their bytes, so that none is parsed again.

Publishers send one head over and over, or a few: parsing and checking it takes longer than all
that depends on the body. Whatever the parser and the checks find depends on the bytes of the head
and on settings alone, so a head that has passed them once would always pass them.
"""

from typing import Final

import msgspec
from starlette.types import Scope

from contrail_edge.direct import DirectExchange, DirectTarget
from contrail_edge.http.headers import X_REQUEST_ID

_HEADS_MAX: Final = 1_024
_HEAD_BYTES_MAX: Final = 1_024
"""The most heads, and their longest: 1 MiB, and at most 20 MiB for what they mean."""
_END: Final = b"\r\n\r\n"
_ONCE: Final = (X_REQUEST_ID, b"traceparent", b"idempotency-key", b"nats-")
"""Beginnings of the names of headers that differ from request to request."""


class KnownHead(msgspec.Struct, frozen=True, eq=False):
    """What a head leads to, and the length of the body behind it. Nothing of it must change.

    ``prepared`` is what the handler has made of the head.
    """

    scope: Scope
    target: DirectTarget
    length: int
    prepared: object


class KnownHeads:
    """The known heads of all connections of a process; forgets all of them when there are many."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def split(self, data: bytes) -> tuple[KnownHead, bytes] | None:
        """The head and the body of ``data``, if that is one whole request with a known head."""
        end = data.find(_END) + len(_END)
        known = self._heads.get(data[:end])
        if known is None or len(data) - end != known.length:
            return None
        return known, data[end:]

    def learn(self, data: bytes, exchange: DirectExchange) -> None:
        """Remember the head of ``exchange``, which is complete and whose last bytes are ``data``.

        Only of a POST that is kept alive, and if ``data`` has nothing but this request.
        """
        request = exchange.request
        end = data.find(_END) + len(_END)
        if (
            end > _HEAD_BYTES_MAX
            or len(data) - end != len(exchange.body)
            or exchange.more_body
            or not exchange.keep_alive
            or request.method != "POST"
            or any(name.startswith(_ONCE) for name in request.headers)
        ):
            return
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        self._heads[data[:end]] = KnownHead(
            request.scope, exchange.target, len(exchange.body), request.prepared
        )
