"""Endless pulling: the next request, and how to handle its failure. Pure."""

from functools import partial
from typing import Final, Generic

from contrail_client.calls import Call
from contrail_client.errors import ContrailError, OutcomeUnknown, Unreachable
from contrail_client.models import D, Pull
from contrail_client.operations import consumers
from contrail_client.reconnecting import Reconnecting
from contrail_client.times import Duration, to_timedelta

BATCH: Final = 10
"""Messages of one pull. A pull costs about a millisecond, which speaks for large batches; but all
messages of a batch have to be processed within `ack_wait`."""

EXPIRES: Final = "30s"


class Pulls(Generic[D]):
    """Pulls one batch after the other, until no message came for `timeout_s` (None: endlessly).

    While the server is away, pulls are repeated as `Reconnecting` allows. If the answer to a pull
    is lost, its messages are delivered again after the consumer's `ack_wait`.
    """

    def __init__(
        self,
        stream: str,
        consumer: str,
        reconnecting: Reconnecting,
        *,
        batch: int,
        expires: Duration,
        max_bytes: int | None,
        timeout_s: float | None,
        kind: type[D],
    ) -> None:
        self._pull = partial(
            consumers.pull, stream, consumer, batch=batch, max_bytes=max_bytes, kind=kind
        )
        self._expires_s = to_timedelta(expires).total_seconds()
        self._timeout_s = timeout_s
        self._reconnecting = reconnecting
        self._quiet_since_s: float | None = None
        """When the wait for the next message began; None while the caller handles messages."""
        self._over = False
        """Whether no message came for `timeout_s`."""

    def call(self, now_s: float) -> Call[Pull[D]] | None:
        """The next request; None if no message came for `timeout_s`."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if self._over:
            return None
        wait_s = self._expires_s
        if self._timeout_s is not None:
            wait_s = min(wait_s, self._quiet_since_s + self._timeout_s - now_s)
        if wait_s <= 0:
            return self._pull(no_wait=True, expires=None)
        # At least 1 ms: the server takes 0 for its default.
        return self._pull(no_wait=None, expires=f"{max(round(wait_s * 1_000), 1)}ms")

    def came(self, found: Pull[D], now_s: float) -> None:
        """Note an answer, with or without messages."""
        self._reconnecting.opened(now_s)
        if len(found):
            self._quiet_since_s = None
        elif self._timeout_s is not None and self._quiet_since_s is not None:
            self._over = now_s - self._quiet_since_s >= self._timeout_s

    def failed(self, error: ContrailError, now_s: float, chance: float) -> float:
        """Seconds to wait before the next request; raises `error` if it will not pass."""
        # A repeated pull does no harm, so an unknown outcome is like a server that is away.
        passing = Unreachable(str(error)) if isinstance(error, OutcomeUnknown) else error
        pause_s = self._reconnecting.lost(passing, now_s, chance)
        if pause_s is None:
            raise error
        return pause_s
