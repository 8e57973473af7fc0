"""Reclaims the space of large values that the store keeps outside its tables (blob files)."""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from contrail_storage.store.rocks_store import StoreClosedError, StoreError

_PAUSE_S: Final = 60.0
_SHORT_PAUSE_S: Final = 2.0
_BYTES_S: Final = 16 << 20
_log = structlog.get_logger("contrail.reclaim")


class ReclaimableStore(Protocol):
    """The part of the store that the reclaimer uses."""

    def reclaim(self, *, pressing: bool = False) -> int:
        """Rewrite a few files that are mostly garbage; return their bytes."""
        ...


class Reclaimer:
    """Rewrites files that are mostly garbage, and joins small ones.

    The store itself removes a file once none of its values is current, which is the common case.
    The reclaimer is for files that mix values of short-lived and long-lived messages.
    """

    def __init__(
        self,
        store: ReclaimableStore,
        pause_s: float = _PAUSE_S,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_short`` says whether the disk is so full that messages are refused."""
        self.reclaimed_bytes = 0
        self._is_short = is_short
        self._store = store
        self._pause_s = pause_s

    async def run(self) -> None:
        """Reclaim until cancelled, at no more than 16 MiB/s."""
        size, rested_s = 0, 0.0
        while True:
            # After work, as long as it would take at 16 MiB/s. Otherwise the pause is short, so
            # that a disk that fills up is noticed, and the work itself is left out until `_pause_s`
            # have passed.
            pause_s = size / _BYTES_S if size else min(self._pause_s, _SHORT_PAUSE_S)
            await asyncio.sleep(pause_s)
            rested_s += pause_s
            short = self._is_short()
            if not (size or short or rested_s >= self._pause_s):
                continue
            rested_s = 0.0
            try:
                size = await asyncio.to_thread(self._store.reclaim, pressing=short)
            except StoreClosedError:
                return
            except StoreError as error:
                # The node still serves, so this must not end it. The store is just too large.
                _log.warning("reclaim_failed", error=str(error))
                size = 0
            self.reclaimed_bytes += size
