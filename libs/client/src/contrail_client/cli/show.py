"""What the commands print: one JSON value a line for machines, tables for people."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contrail_client.models import StoredMessage

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def failure(text: str) -> None:
    """A line about what went wrong."""
    errors.print(text, style="red", markup=False, soft_wrap=True)


def json_line(value: Any) -> None:
    """One JSON value on a line of its own."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; cells are shown as they are."""
    drawn = Table(*columns)
    for row in rows:
        drawn.add_row(*(escape(str(cell)) for cell in row))
    console.print(drawn)


def pairs(values: Any, title: str) -> None:
    """Names and values of a struct or dictionary, nested ones with dots."""
    drawn = Table("", "", title=escape(title), show_header=False)
    for name, value in _flat(msgspec.to_builtins(values)):
        drawn.add_row(escape(name), escape(value))
    console.print(drawn)


def message(found: StoredMessage, *, as_json: bool) -> None:
    """One message: a JSON object, or position, time, subject and text."""
    if as_json:
        json_line(found)
    else:
        text = printable(found.payload.decode(errors="backslashreplace"))
        head = f"[dim]{found.seq} {escape(found.time)}[/dim] [bold]{escape(found.subject)}[/bold]"
        console.print(f"{head} {escape(text)}", soft_wrap=True)


def printable(text: str) -> str:
    """Text without control characters: a payload must not steer the terminal it is shown on."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, "", [], ()):
            listed = isinstance(value, list | tuple)
            yield prefix + name, ", ".join(map(str, value)) if listed else str(value)
