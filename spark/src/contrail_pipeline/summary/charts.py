"""Charts as SVG: crisp at any size, without scripts or fonts, and in the colours of the page. Pure.

Each chart is drawn twice, for a wide and for a narrow screen, because letters must not shrink with
the lines; the style sheet shows one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from contrail_pipeline.summary import bins, wording
from contrail_pipeline.summary.figures import Bin, Timeline

_WIDTHS: Final = {"wide": 760, "narrow": 360}
_HEIGHT: Final = 220
_LEFT: Final = 52
_RIGHT: Final = 12
_TOP: Final = 30
_BOTTOM: Final = 40
_LETTER: Final = 7.2
"""The usual width of a letter, to keep labels apart."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The drawing area of a chart, and the scale of its upright axis."""

    width: int
    most: float

    @property
    def right(self) -> float:
        """The right end of the area."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        """The lower end of the area."""
        return _HEIGHT - _BOTTOM

    def x(self, share: float) -> float:
        """The position of a share of the width."""
        return _LEFT + share * (self.right - _LEFT)

    def y(self, value: float) -> float:
        """The position of a value."""
        return self.bottom - value / self.most * (self.bottom - _TOP)


def timeline(
    title: str,
    found: Timeline,
    values: Sequence[int],
    unit: str,
    *,
    scale: Callable[[int], list[int]],
    label: wording.Label,
) -> str:
    """Values of the slices of a timeline as bars; the highest one has its value beside it."""
    width = found.width_us
    starts = [each.start_us for each in found.slices]
    first, end = starts[0], starts[-1] + width
    peak = max(range(len(values)), key=values.__getitem__)

    def draw(frame: Frame) -> str:
        def x(at: float) -> float:
            return frame.x((at - first) / (end - first))

        path = "".join(
            f"M{x(start):.1f} {frame.bottom}V{frame.y(value):.1f}H{x(start + width):.1f}"
            f"V{frame.bottom}"
            for start, value in zip(starts, values, strict=True)
        )
        return (
            f'<path class="bar" d="{path}"/>'
            + _time_axis(frame, first, end, x)
            + _mark(frame, x(starts[peak] + width / 2), values[peak], label(values[peak]))
        )

    day = wording.moment(first, bins.DAY)
    last = wording.moment(end - 1, bins.DAY)
    axis = f"time of storage (UTC), {day}" + ("" if day == last else f" to {last}")
    unit = f"{unit} per {wording.width(width)}"
    return _chart(title, _Axis(axis, unit, scale(max(values)), label), draw)


def histogram(title: str, found: Sequence[Bin], axis: str, edge: wording.Label, unit: str) -> str:
    """Numbers of values as bars of equal width, one for each bin."""
    scale = bins.ticks(max(each.count for each in found))

    def draw(frame: Frame) -> str:
        step = (frame.right - _LEFT) / len(found)
        bars = "".join(
            f'<rect class="bar" x="{_LEFT + at * step + 1:.1f}" width="{step - 2:.1f}" '
            f'y="{frame.y(each.count):.1f}" height="{frame.bottom - frame.y(each.count):.1f}">'
            f"<title>{_bin_title(each, edge, unit)}</title></rect>"
            for at, each in enumerate(found)
            if each.count
        )
        return bars + _edges(frame, [edge(each.low) for each in found], step)

    return _chart(title, _Axis(axis, unit, scale, wording.short), draw)


def _bin_title(found: Bin, edge: wording.Label, unit: str) -> str:
    upper = "or more" if found.high is None else f"to {edge(found.high)}"
    return escape(f"{edge(found.low)} {upper}: {found.count:,} {unit}")


def _edges(frame: Frame, labels: Sequence[str], step: float) -> str:
    longest = max(map(len, labels))
    every = max(1, -(-int((longest + 2) * _LETTER) // int(step)))
    parts = []
    for at, label in enumerate(labels):
        if at % every == 0:
            x = _LEFT + at * step
            parts.append(_tick(frame, x, label))
    return "".join(parts)


def _time_axis(frame: Frame, first: int, end: int, x: Callable[[float], float]) -> str:
    step, found = bins.time_ticks(first, end, 4 if frame.width == _WIDTHS["narrow"] else 8)
    return "".join(_tick(frame, x(at), wording.tick(at, step)) for at in found)


def _tick(frame: Frame, x: float, label: str) -> str:
    half = len(label) * _LETTER / 2
    anchor, at = "middle", x
    if x + half > frame.width:
        anchor, at = "end", frame.width - 1
    return (
        f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" '
        f'y2="{frame.bottom + 4}"/>'
        f'<text class="label" x="{at:.1f}" y="{frame.bottom + 17}" text-anchor="{anchor}">'
        f"{escape(label)}</text>"
    )


def _mark(frame: Frame, x: float, value: float, label: str) -> str:
    y = frame.y(value)
    left = x > (_LEFT + frame.right) / 2
    return (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        f'<text class="peak" x="{x - 8 if left else x + 8:.1f}" y="{y - 5:.1f}" '
        f'text-anchor="{"end" if left else "start"}">{escape(label)}</text>'
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """What the two axes show, and the ticks of the upright one."""

    across: str
    upright: str
    scale: Sequence[int]
    label: wording.Label


def _chart(title: str, axis: _Axis, draw: Callable[[Frame], str]) -> str:
    described = escape(f"{title}: {axis.upright}, by {axis.across}")
    drawn = []
    for name, width in _WIDTHS.items():
        frame = Frame(width, axis.scale[-1])
        lines = "".join(
            f'<line class="grid" x1="{_LEFT}" x2="{frame.right}" y1="{frame.y(at):.1f}" '
            f'y2="{frame.y(at):.1f}"/>'
            f'<text class="label" x="{_LEFT - 6}" y="{frame.y(at) + 4:.1f}" text-anchor="end">'
            f"{escape(axis.label(at))}</text>"
            for at in axis.scale
        )
        drawn.append(
            f'<svg class="{name}" viewBox="0 0 {width} {_HEIGHT}" role="img" '
            f'aria-label="{described}">'
            f'<text class="unit" x="0" y="13">{escape(axis.upright)}</text>{lines}{draw(frame)}'
            f'<line class="axis" x1="{_LEFT}" x2="{frame.right}" y1="{frame.bottom}" '
            f'y2="{frame.bottom}"/>'
            f'<text class="unit" x="{frame.right}" y="{_HEIGHT - 6}" text-anchor="end">'
            f"{escape(axis.across)}</text></svg>"
        )
    return "".join(drawn)
