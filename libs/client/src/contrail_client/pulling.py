"""An endless pull: what to ask for next, and what a failure means. Pure."""

from functools import partial
from typing import Final, Generic

from contrail_client import consumers
from contrail_client.calls import Call
from contrail_client.errors import ContrailError, OutcomeUnknown, Unreachable
from contrail_client.models import D, Pull
from contrail_client.reconnecting import Reconnecting
from contrail_client.times import Duration, to_timedelta

BATCH: Final = 10
"""A pull costs about a millisecond, and each message of a batch must be done within `ack_wait`."""

EXPIRES: Final = "30s"


class Pulls(Generic[D]):
    """Asks for one batch after the other, until none came for `timeout_s` (None: without an end).

    A server that is away is asked again, as `Reconnecting` allows. Of a pull without an answer the
    messages come again after the consumer's `ack_wait`.
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
        """When the wait for the next message began; None while what came is being handled."""
        self._over = False

    def call(self, now_s: float) -> Call[Pull[D]] | None:
        """The next request; None when nothing came for long enough."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if self._over:
            return None
        wait_s = self._expires_s
        if self._timeout_s is not None:
            wait_s = min(wait_s, self._quiet_since_s + self._timeout_s - now_s)
        if wait_s <= 0:
            return self._pull(no_wait=True, expires=None)
        return self._pull(no_wait=None, expires=f"{max(round(wait_s * 1_000), 1)}ms")

    def came(self, found: Pull[D], now_s: float) -> None:
        """An answer came, with messages or without."""
        self._reconnecting.opened(now_s)
        if len(found):
            self._quiet_since_s = None
        elif self._timeout_s is not None and self._quiet_since_s is not None:
            self._over = now_s - self._quiet_since_s >= self._timeout_s

    def failed(self, error: ContrailError, now_s: float, chance: float) -> float:
        """Seconds to wait before asking again; raises `error` when it will not pass."""
        passing = Unreachable(str(error)) if isinstance(error, OutcomeUnknown) else error
        pause_s = self._reconnecting.lost(passing, now_s, chance)
        if pause_s is None:
            raise error
        return pause_s
