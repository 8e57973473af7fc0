"""Times at which something must be looked at again, the earliest first."""

import heapq
from typing import Final, Generic, TypeVar

K = TypeVar("K", int, tuple[int, int])
_STALE_MAX: Final = 64


class Agenda(Generic[K]):
    """Keys, each with the time of its next look. Times are of any one clock and unit.

    A look at nothing that is due costs the same however many keys there are.
    """

    __slots__ = ("_heap", "_times")

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        # (time, key), a heap. A pair is stale if `_times` has another time for the key.
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._times)

    def time_of(self, key: K) -> float | None:
        """The time of ``key``; None if it is not entered."""
        return self._times.get(key)

    def enter(self, key: K, time: float) -> None:
        """Set the time of ``key``."""
        if self._times.get(key) == time:
            return
        self._times[key] = time
        # Stale pairs may be at most as many as others, so memory follows the number of keys.
        if len(self._heap) > 2 * len(self._times) + _STALE_MAX:
            self._heap = [(at, one) for one, at in self._times.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (time, key))

    def leave(self, key: K) -> None:
        """Take ``key`` out, if it is entered."""
        self._times.pop(key, None)

    def take(self, now: float) -> list[K]:
        """Take out the keys whose time is ``now`` or earlier, in this order."""
        taken: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            time, key = heapq.heappop(self._heap)
            if self._times.get(key) == time:
                del self._times[key]
                taken.append(key)
        return taken
