"""The report as Markdown, as CSV files, and as tables for the console."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table as ConsoleTable

from contrail_flights.plot import draw
from contrail_flights.report import Report, Table, Value

CONSOLE_ROWS: Final = 10
_NAME_CHARS: Final = 25
PLOT: Final = "delays.png"
PAGE: Final = "report.md"
_HEADINGS: Final = {
    "carrier": "code",
    "origin": "from",
    "dest": "to",
    "mean_delay": "mean",
    "median_delay": "median",
    "p90_delay": "p90",
}


def save(report: Report, facts: Sequence[str], folder: Path) -> Path:
    """Write page, plot and one CSV per table into ``folder``; returns the page.

    ``facts`` are the lines at the head of the page: the checks and the rates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for table in report.tables:
        _write_csv(table, folder / f"{table.name}.csv")
    draw(report, folder / PLOT)
    page = folder / PAGE
    page.write_text(_markdown(report, facts), encoding="utf-8")
    return page


def console_table(table: Table) -> ConsoleTable:
    """The first rows of ``table``, as Rich prints them."""
    shown = ConsoleTable(title=table.title, title_justify="left", title_style="bold", box=None)
    for name in table.columns:
        text = _is_text(table, name)
        shown.add_column(_heading(name), justify="left" if text else "right", no_wrap=True)
    for row in table.rows[:CONSOLE_ROWS]:
        shown.add_row(*[_clipped(_shown(value)) for value in row])
    return shown


def _clipped(text: str) -> str:
    """``text``, shortened so that a row fits 80 columns; numbers and codes never need that."""
    return text if len(text) <= _NAME_CHARS else f"{text[: _NAME_CHARS - 1].rstrip()}…"


def _write_csv(table: Table, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(table.rows)


def _markdown(report: Report, facts: Sequence[str]) -> str:
    lines = ["# Flights from New York City in 2013", ""]
    lines += [f"- {fact}" for fact in facts]
    lines += ["", "Delays are in minutes; p90 is the 90th percentile: one flight in ten is later."]
    lines += ["", f"![Delays by airline and airport, and the busiest routes]({PLOT})", ""]
    for table in report.tables:
        lines += [f"## {table.title}", "", *_markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    rules = ["---" if _is_text(table, name) else "---:" for name in table.columns]
    rows = [[_heading(name) for name in table.columns], rules]
    rows += [[_shown(value).replace("|", r"\|") for value in row] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in rows]


def _heading(column: str) -> str:
    return _HEADINGS.get(column, column)


def _is_text(table: Table, column: str) -> bool:
    return any(isinstance(value, str) for value in table.column(column))


def _shown(value: Value) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
    return value
