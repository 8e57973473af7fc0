"""Durations counted in buckets, for Prometheus histograms."""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets. One more bucket has no upper bound."""

_NAMES: Final = (*map(str, BUCKETS_S), "+Inf")


class Timings:
    """Counts of durations by bucket, and their sum.

    Histograms of the Prometheus library take a lock for each number, which costs ten times as much.
    Here one thread counts, and any thread may read.
    """

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * len(_NAMES)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration of ``seconds``."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def add_all(self, others: "Timings") -> None:
        """Count the durations that ``others`` has counted."""
        self._counts = [a + b for a, b in zip(self._counts, others._counts, strict=True)]
        self.sum_s += others.sum_s

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound with the count of durations up to it, as Prometheus does."""
        return list(zip(_NAMES, accumulate(self._counts), strict=True))
