"""A leader's rounds, and what the answers to them prove: that a majority followed it, and when."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

_REMEMBERED: Final = 1024
_NEVER: Final = float("-inf")


class Rounds:
    """Counts rounds, and notes the newest one that each peer has answered in the current term.

    The age of an answer is that of its round: answers that waited in a socket while this process
    was stopped say nothing about the present. Peers in `unfit` count as if they never answered.
    """

    def __init__(self, peers: Iterable[str], clock: Callable[[], float]) -> None:
        # Seconds; never goes backwards.
        self._clock = clock
        # By peer: the newest round answered in this term.
        self._answered = dict.fromkeys(peers, 0)
        # By peer: when that round was sent.
        self._heard = dict.fromkeys(self._answered, _NEVER)
        # When the newest rounds were sent; the last one is `newest`.
        self._sent: deque[float] = deque(maxlen=_REMEMBERED)
        # When this term of leadership began.
        self._started = _NEVER
        # The place of the member that completes a majority, among peers sorted by what they
        # answered: with its leader, half of all members (rounded down) and one more.
        self._last_of_majority = (len(self._answered) + 1) // 2 - 1
        self.newest = 0
        """The number of the last round; never used again by this process."""
        self.unfit: set[str] = set()
        """Peers that do not vote."""

    def start(self) -> None:
        """Begin the rounds of a new term."""
        self._started = self._clock()
        self.unfit.clear()
        for peer in self._answered:
            self._answered[peer], self._heard[peer] = 0, _NEVER

    def begin(self) -> int:
        """Begin a round, and return its number."""
        self.newest += 1
        self._sent.append(self._clock())
        return self.newest

    def note_answer(self, peer: str, number: int) -> None:
        """Note that `peer` has answered a round."""
        if peer not in self.unfit and self._answered[peer] < number <= self.newest:
            self._answered[peer] = number
            age = self.newest - number
            if age < len(self._sent):
                self._heard[peer] = self._sent[-1 - age]

    def forget(self, peer: str) -> None:
        """Forget the answers of a peer that does not vote for now."""
        self.unfit.add(peer)
        self._answered[peer], self._heard[peer] = 0, _NEVER

    def heard_at(self, peer: str) -> float:
        """When the newest answered round was sent, but at least the start of this leadership."""
        return _NEVER if peer in self.unfit else max(self._heard[peer], self._started)

    def majority_heard_at(self) -> float:
        """When the newest round was sent that a majority has answered; -inf if none was."""
        if not self._heard:
            return self._clock()
        return sorted(self._heard.values(), reverse=True)[self._last_of_majority]

    def confirmed(self) -> int:
        """The newest round that a majority has answered; 0 if none was."""
        if not self._answered:
            return self.newest
        return sorted(self._answered.values(), reverse=True)[self._last_of_majority]
