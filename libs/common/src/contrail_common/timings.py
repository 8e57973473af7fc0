"""Counting how long things take, in buckets: what a Prometheus histogram shows."""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets; a last one has none."""

_NAMES: Final = (*map(str, BUCKETS_S), "+Inf")


class Timings:
    """How many took how long, by bucket, and how long all of them took.

    The library's own histograms take a lock for each number, ten times the cost. Here one thread
    counts; another one may read.
    """

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts = [0] * len(_NAMES)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one that took ``seconds``."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and count of all up to it, as the exposition format wants them."""
        return list(zip(_NAMES, accumulate(self._counts), strict=True))
