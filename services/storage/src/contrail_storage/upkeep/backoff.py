"""Growing pauses between attempts of work that keeps failing."""


class Backoff:
    """Pauses between attempts: the first is ``first_s``, and each doubles, up to ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = 0.0
        self._reason = ""

    @property
    def pause_s(self) -> float:
        """Seconds to pause now; 0 if nothing has failed since the last success."""
        return self._pause_s

    def failed(self, reason: str) -> bool:
        """Note a failure; True when its reason differs from the last one (worth a log line)."""
        self._pause_s = min(max(self._first_s, 2 * self._pause_s), self._most_s)
        before, self._reason = self._reason, reason
        return reason != before

    def succeeded(self) -> None:
        """Reset the pause: the next failure is a new one."""
        self._pause_s = 0.0
        self._reason = ""
