"""Parts of a range that read well: slices of time, bins of sizes and gaps, ticks of axes. Pure."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from contrail_pipeline.summary.figures import Bin

MS: Final = 1_000
S: Final = 1_000_000
MINUTE: Final = 60 * S
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
YEAR: Final = 365 * DAY

SLICES_MAX: Final = 120
_ROUND: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_WIDTHS: Final = (
    *(number * MS for number in _ROUND),
    *(number * S for number in (1, 2, 5, 10, 15, 30)),
    *(number * MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
    *(number * DAY for number in (1, 2, 7, 14, 28, 91)),
)
_BINS: Final = 24
_LOG_RATIO: Final = 20
"""Sizes that differ more than this get bins that double, instead of bins of equal width."""
_GAP_STEPS: Final = (1, 3)
_TICKS: Final = 4


def slice_width(first_us: int, last_us: int) -> int:
    """The width of the slices of a range of times: a round one, for at most SLICES_MAX slices."""
    for width in _WIDTHS:
        if last_us // width - first_us // width < SLICES_MAX:
            return width
    return YEAR * max(1, math.ceil((last_us - first_us) / (YEAR * (SLICES_MAX - 1))))


def size_edges(least: int, most: int) -> list[int]:
    """Lower bounds of bins for sizes: of equal width if they are alike, otherwise doubling."""
    if most <= least:
        return [least]
    if most > _LOG_RATIO * max(least, 1):
        low = max(least, 1).bit_length() - 1
        doubling = [1 << power for power in range(low, most.bit_length())]
        return [0, *doubling] if least == 0 else doubling
    width = _round_up((most - least + 1) / _BINS)
    return list(range(least // width * width, most + 1, width))


def gap_edges(most: int) -> list[int]:
    """Lower bounds of bins for times between messages: 0, 1, 3, 10, 30 ... microseconds."""
    edges = [0]
    power = 1
    while power <= most:
        edges += [step * power for step in _GAP_STEPS if step * power <= most]
        power *= 10
    return edges


def bin_of(value: int, edges: Sequence[int]) -> int:
    """The position of the bin that has the value."""
    return bisect_right(edges, value) - 1


def filled_bins(counts: Mapping[int, int], edges: Sequence[int]) -> tuple[Bin, ...]:
    """All bins, also those without values; the last one has no upper bound."""
    uppers = [*edges[1:], None]
    return tuple(
        Bin(low, high, counts.get(at, 0))
        for at, (low, high) in enumerate(zip(edges, uppers, strict=True))
    )


def _round_up(number: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ... that is not below the number."""
    power = int(10 ** max(0, math.floor(math.log10(max(number, 1)))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= number)


def ticks(most: int) -> list[int]:
    """About four round numbers from 0 on, the last of which is not below `most`."""
    return _ticks(most, _round_up(max(most, 1) / _TICKS))


def size_ticks(most: int) -> list[int]:
    """As `ticks`, for bytes: multiples of a power of two."""
    return _ticks(most, 1 << max(0, math.ceil(math.log2(max(most, 1) / _TICKS))))


def _ticks(most: int, step: int) -> list[int]:
    return list(range(0, -(-max(most, 1) // step) * step + 1, step))


def time_ticks(start_us: int, end_us: int, count: int) -> tuple[int, list[int]]:
    """A step and at most `count` round times in a range; from months on, the first day of one."""
    for step in _WIDTHS[:-2]:
        first = -(-start_us // step) * step
        if (end_us - first) // step < count:
            return step, list(range(first, end_us + 1, step))
    months = _months(start_us, end_us)
    for every in (1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1_200):
        found = [at for number, at in months if number % every == 0]
        if len(found) <= count:
            return every * 28 * DAY, found
    return YEAR, []


def _months(start_us: int, end_us: int) -> list[tuple[int, int]]:
    """The first days of the months of a range, each with the number of the month since year 0."""
    start = datetime.fromtimestamp(start_us / S, UTC)
    end = datetime.fromtimestamp(end_us / S, UTC)
    numbers = range(start.year * 12 + start.month - 1, end.year * 12 + end.month)
    days = (
        (number, int(datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC).timestamp()) * S)
        for number in numbers
    )
    return [(number, at) for number, at in days if start_us <= at <= end_us]


def gaps_between(slices: Sequence[tuple[int, int]]) -> list[int]:
    """The times from the last message of each slice to the first one of the next slice."""
    return [after - before for (_, before), (after, _) in pairwise(slices)]
