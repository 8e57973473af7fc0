"""When what was lost or refused is asked for again. Pure."""

from contrail_client.calls import Retries
from contrail_client.errors import ApiProblem, ContrailError, Unreachable


class Reconnecting:
    """When a socket that is lost or refused is opened again. Pure.

    Before the first success a few attempts are enough to tell that nobody is there. A server that
    was there, or that says so by refusing for the moment, may be away for `reconnect_s`.
    """

    def __init__(self, retries: Retries, reconnect_s: float) -> None:
        self._retries = retries
        self._reconnect_s = reconnect_s
        self._attempts = 0
        self._ever = False
        self._opened_s: float | None = None
        self._away_since_s: float | None = None

    def opened(self, now_s: float) -> None:
        """A socket is open."""
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
            self._ever = True  # somebody is there, who only cannot serve yet
        if self._opened_s is not None and now_s - self._opened_s >= self._retries.longest_pause_s:
            # It was up for a while: this is the beginning of an outage, not one more failure in it.
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
