"""Reads that see everything that was committed before they were asked, by any leader."""

from collections import deque
from collections.abc import Callable

ReadDone = Callable[[bool], None]
"""Called once: True when the state may be read, False when this member does not lead any more."""


class Reads:
    """Waiting reads of a leader: for a round, for a majority's answers to it, and for `applied`.

    A round is sent after the read was asked, so its confirmation by a majority proves that no other
    leader had committed anything until then. One round serves all reads that came before it.
    """

    def __init__(self) -> None:
        # Reads that wait for the next round.
        self._new: list[ReadDone] = []
        # (round, index, reads): the round confirms that `index` has everything.
        self._asked: deque[tuple[int, int, list[ReadDone]]] = deque()
        # (index, reads) that are confirmed and wait until that index is handed out.
        self._confirmed: deque[tuple[int, list[ReadDone]]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether no read waits."""
        return not (self._new or self._asked or self._confirmed)

    @property
    def wants_round(self) -> bool:
        """Whether reads wait, and no round is on its way that others wait for."""
        return bool(self._new) and not self._asked

    def add(self, done: ReadDone) -> None:
        """Let a read wait."""
        self._new.append(done)

    def note_round(self, number: int, commit_index: int) -> None:
        """Note a round that was sent when `commit_index` was committed."""
        if self._new:
            self._asked.append((number, commit_index, self._new))
            self._new = []

    def note_confirmed(self, number: int) -> None:
        """Note that a majority has answered a round."""
        while self._asked and self._asked[0][0] <= number:
            _, index, reads = self._asked.popleft()
            self._confirmed.append((index, reads))

    def take_ready(self, applied_index: int) -> list[ReadDone]:
        """Remove and return the reads that may go on."""
        ready: list[ReadDone] = []
        while self._confirmed and self._confirmed[0][0] <= applied_index:
            ready += self._confirmed.popleft()[1]
        return ready

    def take_all(self) -> list[ReadDone]:
        """Remove and return all reads, because leadership has ended."""
        waiting = [reads for _, _, reads in self._asked] + [reads for _, reads in self._confirmed]
        waiting.append(self._new)
        self._asked.clear()
        self._confirmed.clear()
        self._new = []
        return [done for reads in waiting for done in reads]
