"""Complaints about peers: each is logged once a minute and address."""

from typing import Final

import structlog

_log: Final = structlog.get_logger("contrail.peers")
_PAUSE_S: Final = 60.0
_ADDRESSES_MAX: Final = 1024


class Complaints:
    """Logs an event with its reason, unless the address gave cause for the same event before."""

    def __init__(self) -> None:
        # Time of the last line by event and address, the oldest first.
        self._logged: dict[tuple[str, str], float] = {}

    def log(self, now: float, event: str, address: str, reason: str) -> None:
        """Log the event, at most once a minute for each address."""
        key = (event, address)
        last = self._logged.get(key)
        if last is not None and now - last < _PAUSE_S:
            return
        self._logged.pop(key, None)
        if len(self._logged) >= _ADDRESSES_MAX:
            oldest = next(iter(self._logged))
            if now - self._logged[oldest] < _PAUSE_S:
                # More addresses than are remembered: silence is better than a full disk.
                return
            del self._logged[oldest]
        self._logged[key] = now
        _log.warning(event, address=address, reason=reason)
