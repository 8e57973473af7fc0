"""When to reconnect after a lost or refused connection. Pure."""

from contrail_client.calls import Retries
from contrail_client.errors import ApiProblem, ContrailError, Unreachable


class Reconnecting:
    """The pauses between attempts to reconnect. Pure.

    If the server was never reached, it is probably not running: a few attempts suffice. A server
    that was reached once may be away for `reconnect_s`. A temporary refusal counts as reached.
    """

    def __init__(self, retries: Retries, reconnect_s: float) -> None:
        self._retries = retries
        self._reconnect_s = reconnect_s
        self._attempts = 0
        """Failed attempts of the current outage."""
        self._ever = False
        """Whether the server was ever reached."""
        self._opened_s: float | None = None
        """When the connection was opened; None while it is lost."""
        self._away_since_s: float | None = None
        """When the current outage began; a connection that does not last does not end it."""

    def opened(self, now_s: float) -> None:
        """Note that the connection is open."""
        self._ever = True
        self._opened_s = now_s

    def lost(self, error: ContrailError, now_s: float, chance: float) -> float | None:
        """Seconds to wait before the next attempt; None to give up with `error`."""
        may_pass = isinstance(error, Unreachable) or (
            isinstance(error, ApiProblem) and error.retryable
        )
        if not may_pass:
            return None
        if isinstance(error, ApiProblem):
            self._ever = True  # a server is there and cannot serve yet
        if self._opened_s is not None and now_s - self._opened_s >= self._retries.longest_pause_s:
            # The connection lasted for a while: a new outage begins.
            self._attempts = 0
            self._away_since_s = None
        self._opened_s = None
        self._attempts += 1
        if self._away_since_s is None:
            self._away_since_s = now_s
        if self._ever and now_s - self._away_since_s >= self._reconnect_s:
            return None
        if not self._ever and self._attempts >= self._retries.attempts:
            return None
        return self._retries.pause_while(error, True, self._attempts, chance)
