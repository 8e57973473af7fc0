"""The pace of applying: when the event loop turns, and when the store must catch up first."""

import asyncio
from typing import Final

from contrail_storage.replica.proposer import UNWRITTEN_BYTES_MAX, Applied
from contrail_storage.replica.raft_port import Group

TURN_S: Final = 0.005
"""Time of applying after which the event loop turns. One entry may take as long again."""


class ApplyPace:
    """Decides after each applied entry whether the next may follow at once.

    One sync of the log can commit many entries, and a replayed log has many more. All groups of the
    node share one turn of the loop. Runs on the event loop.
    """

    def __init__(self, applied: Applied) -> None:
        # Knows how far the store is behind.
        self._applied = applied
        # Time spent on entries since the last turn that this object has asked for.
        self._used_s = 0.0
        # Whether that turn is due.
        self._turning = False
        # Groups that have been refused their next entry; each is in it once, because it has none
        # applied before it is resumed.
        self._waiting: list[Group] = []

    def may_go_on(self, group: Group, used_s: float) -> bool:
        """Count an entry of ``group`` that took ``used_s``; False: the group is resumed later."""
        self._used_s += used_s
        if self._used_s < TURN_S and self._applied.unwritten_bytes <= UNWRITTEN_BYTES_MAX:
            return True
        self._waiting.append(group)
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        return False

    def _turn(self) -> None:
        self._turning = False
        self._used_s = 0.0
        self.resume()

    def resume(self) -> None:
        """Resume the waiting groups, unless a turn is due or the store is still behind."""
        if self._turning or self._applied.unwritten_bytes > UNWRITTEN_BYTES_MAX:
            return
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            group.resume()
