"""How long work that keeps failing rests before it is tried again."""


class Backoff:
    """Pauses between tries: the first is ``first_s``, each doubles the last, up to ``most_s``."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = 0.0
        self._reason = ""

    @property
    def pause_s(self) -> float:
        """How long to rest now; 0 while nothing has failed since the last success."""
        return self._pause_s

    def failed(self, reason: str) -> bool:
        """Note a failure; True when its reason is not that of the last one, so worth a log line."""
        self._pause_s = min(max(self._first_s, 2 * self._pause_s), self._most_s)
        before, self._reason = self._reason, reason
        return reason != before

    def succeeded(self) -> None:
        """The next failure is a new one."""
        self._pause_s = 0.0
        self._reason = ""
