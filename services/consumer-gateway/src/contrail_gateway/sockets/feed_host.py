"""The socket of a subscription, as its feed sees it."""

import asyncio
from typing import Protocol

from contrail_common.ack_tokens import AckTokens
from contrail_common.errors import ApiError
from contrail_gateway.core.frames import FrameId, ServerFrame
from contrail_gateway.core.pulled import Pulled
from contrail_gateway.core.session import Session
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.deliveries import SignTokens
from contrail_gateway.sockets.metrics import SessionCounts
from contrail_link.contract import StorageLink


class Host(Protocol):
    """The part of a socket's session that its feeds use."""

    link: StorageLink
    tokens: AckTokens
    counts: SessionCounts
    session: Session

    def send(self, frame: ServerFrame) -> None: ...

    def refuse(self, frame_id: FrameId | None, sid: str | None, error: ApiError) -> None:
        """Send an error."""
        ...

    def push(self, sub: Subscription, pulled: Pulled, sign: SignTokens | None) -> None:
        """Send messages."""
        ...

    def answered(self, count: int, size: int) -> None:
        """Note that ``count`` messages or acknowledgements of ``size`` bytes were answered."""
        ...

    async def wait_writable(self) -> None:
        """Wait until the peer has read enough of what was sent."""
        ...

    def ended(self, sid: str) -> None:
        """Remove the subscription ``sid``."""
        ...

    def later(self, work: "asyncio.Future[None]") -> None:
        """Keep a reference to work that outlives the socket."""
        ...
