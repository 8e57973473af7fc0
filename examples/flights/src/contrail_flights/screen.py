"""The output of the demonstration: steps, progress bars, tables, and commands to try next."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from contrail_flights.checks import Check
from contrail_flights.pages import console_table
from contrail_flights.report import Report
from contrail_flights.suggestions import suggestions


class _Rate(ProgressColumn):
    """Messages a second since the bar began."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        rate = task.completed / seconds if seconds else 0.0
        return Text(f"{rate:>7,.0f} msg/s", style="progress.data.speed", no_wrap=True)


def progress(console: Console) -> Progress:
    """Bars with count, rate and time."""
    return Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=14),
        TextColumn("{task.completed:>7,.0f} of {task.total:>7,.0f}"),
        _Rate(),
        TimeElapsedColumn(),
        console=console,
    )


@contextlib.contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Show a step while it runs, and how long it took."""
    begun = time.perf_counter()
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...")
        yield
    console.print(f"[green]done[/] {what} [dim]({time.perf_counter() - begun:.1f} s)[/]")


def note(console: Console, text: str) -> None:
    """A line below a step; markup in ``text`` is not interpreted."""
    console.print(f"     {text}", markup=False, highlight=False, soft_wrap=True)


def show_report(console: Console, report: Report, checks: Sequence[Check], page: Path) -> None:
    """The heads of the tables, the checks, and where everything is saved."""
    for table in report.tables:
        console.print()
        console.print(console_table(table))
    console.print("\nCompared with the CSV:")
    for check in checks:
        mark = "[green]ok   [/]" if check.agrees else "[bold red]WRONG[/]"
        console.print(f"{mark} {check}", highlight=False, soft_wrap=True)
    console.print(f"\nReport, tables and plot: {page.parent}", highlight=False, soft_wrap=True)


def show_suggestions(console: Console, url: str) -> None:
    """Show commands to try while the server stays up."""
    console.print("\n[bold]Try next[/], in another terminal:")
    for suggestion in suggestions(url):
        console.print(f"\n[dim]# {suggestion.purpose}[/]", highlight=False)
        # Not wrapped, so that a copied command stays one line.
        console.print(
            suggestion.command, markup=False, highlight=False, soft_wrap=True, style="cyan"
        )
    console.print(f"\n[dim]# Documentation of all calls:[/] {url}/docs", highlight=False)
    console.print("\nThe server keeps running. Press Ctrl-C to stop it; the stream is kept.")
