"""The figure of the report: delays by airline and by airport, and the busiest routes."""

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from contrail_flights.report import Report, Table, Value

# Blue and vermilion of the palette of Okabe and Ito: distinct with any common colour deficiency,
# and in grey. Shape carries the difference as well.
BAR: Final = "#0072B2"
MARK: Final = "#D55E00"
INK: Final = "#222222"
FAINT: Final = "#5A5A5A"
GRID: Final = "#DDDDDD"

ROUTES_DRAWN: Final = 12
DPI: Final = 150
CLOSE_MINUTES: Final = 5
"""The least distance from the mean to the 90th percentile at which its mark is not covered."""

_LEGAL_FORMS: Final = (" Inc.", " Co.", " Corporation")


def draw(report: Report, file: Path) -> None:
    """Write the figure as a PNG of 1,950 x 1,350 pixels."""
    figure = Figure(figsize=(13, 9), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2,
        2,
        width_ratios=(1.15, 1),
        height_ratios=(1, 2.6),
        left=0.19,
        right=0.975,
        top=0.82,
        bottom=0.07,
        wspace=0.42,
        hspace=0.36,
    )
    _head(figure, report)
    airlines = figure.add_subplot(grid[:, 0])
    _delays(airlines, report.carriers, "Departure delay by airline (flights)", " ")
    airports = figure.add_subplot(grid[0, 1])
    _delays(airports, report.airports, "Departure delay by airport (flights)", "\n")
    _busiest(figure.add_subplot(grid[1, 1]), report.routes)
    marks, names = airlines.get_legend_handles_labels()
    figure.legend(
        [marks[-1], *marks[:-1]],
        [names[-1], *names[:-1]],
        loc="upper left",
        bbox_to_anchor=(0.012, 0.905),
        ncols=3,
        frameon=False,
        fontsize=11,
        columnspacing=2.4,
    )
    figure.savefig(file, dpi=DPI)


def _head(figure: Figure, report: Report) -> None:
    cancelled = sum(int(_number(count)) for count in report.carriers.column("cancelled"))
    share = cancelled / report.tally.count if report.tally.count else 0
    figure.text(0.02, 0.953, "Flights from New York City in 2013", size=20, weight="bold")
    figure.text(
        0.02,
        0.918,
        f"{report.tally.count:,} scheduled flights, of which {cancelled:,} ({share:.1%}) were "
        "cancelled. Read from stream FLIGHTS with Spark.",
        size=12,
        color=FAINT,
    )


def _delays(axes: Axes, table: Table, title: str, gap: str) -> None:
    """Bars for the mean, largest on top; marks for the median and the 90th percentile."""
    labels = [
        f"{_short(str(name))}{gap}({_number(flights):,.0f})"
        for name, flights in zip(table.column("name"), table.column("flights"), strict=True)
    ]
    means, medians, tails = (
        [_number(value) for value in table.column(name)]
        for name in ("mean_delay", "median_delay", "p90_delay")
    )
    rows = range(len(labels))
    axes.barh(rows, means, height=0.62, color=BAR, label="mean")
    for values, marker, colour, label in (
        (medians, "D", INK, "median"),
        (tails, "o", MARK, "90th percentile: one flight in ten is later"),
    ):
        axes.scatter(
            values, rows, marker=marker, s=52, color=colour, edgecolors="white", zorder=3,
            label=label,
        )  # fmt: skip
    for row, mean, tail in zip(rows, means, tails, strict=True):
        _annotate(axes, f"{mean:.1f}", tail if 0 <= tail - mean < CLOSE_MINUTES else mean, row)
    _finish(axes, title, "Minutes behind schedule; below 0 is early", labels)
    axes.axvline(0, color=INK, linewidth=1)


def _busiest(axes: Axes, table: Table) -> None:
    routes = [
        f"{origin} to {destination}"
        for origin, destination in zip(table.column("origin"), table.column("dest"), strict=True)
    ][:ROUTES_DRAWN]
    flights = [_number(value) for value in table.column("flights")][:ROUTES_DRAWN]
    axes.barh(range(len(routes)), flights, height=0.64, color=BAR)
    for row, count in enumerate(flights):
        _annotate(axes, f"{count:,.0f}", count, row)
    _finish(axes, "Busiest routes", "Scheduled flights", routes)
    axes.set_xlim(0, max(flights, default=1) * 1.15)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _annotate(axes: Axes, text: str, value: float, row: int) -> None:
    axes.annotate(
        text, (max(value, 0), row), (7, 0), textcoords="offset points", va="center", color=INK
    )


def _finish(axes: Axes, title: str, unit: str, labels: list[str]) -> None:
    axes.set_title(title, loc="left", size=13, weight="bold", color=INK, pad=8)
    axes.set_xlabel(unit, size=10.5, color=FAINT)
    axes.set_yticks(range(len(labels)), labels, size=10.5)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _short(name: str) -> str:
    for form in _LEGAL_FORMS:
        name = name.removesuffix(form)
    return name


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
