"""The output of the commands: one JSON value a line for machines, tables for people."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TextIO, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from contrail_client.cli import units
from contrail_client.models import ConsumerInfo, Delivered, StreamInfo

T = TypeVar("T")

_FILE_WIDTH: Final = 10_000
"""In a file or pipe nothing is cut off to fit a screen."""


def _console(stream: TextIO | None, *, stderr: bool) -> Console:
    terminal = stream is not None and stream.isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else _FILE_WIDTH)


console = _console(sys.stdout, stderr=False)
errors = _console(sys.stderr, stderr=True)


class Shown(Protocol):
    """A message, however it was received."""

    @property
    def seq(self) -> int:
        """Its sequence."""
        ...

    @property
    def subject(self) -> str:
        """Its subject."""
        ...

    @property
    def time(self) -> str:
        """When it was stored."""
        ...

    @property
    def payload(self) -> bytes:
        """Its payload."""
        ...


def failure(text: str) -> None:
    """Print an error."""
    errors.print(text, style="red", markup=False, soft_wrap=True)


def note(text: str, *, as_json: bool = False) -> None:
    """Print a line about the progress, apart from the output."""
    text = msgspec.json.encode({"note": text}).decode() if as_json else text
    errors.print(text, markup=False, soft_wrap=True)


def warning(text: str, *, as_json: bool = False) -> None:
    """Print a warning: the user probably wants something else."""
    text = msgspec.json.encode({"warning": text}).decode() if as_json else f"warning: {text}"
    errors.print(text, style="yellow", markup=False, soft_wrap=True)


def done(text: str, result: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the result of a command: a sentence for people, JSON for machines."""
    if as_json:
        json_line(result)
    else:
        console.print(printable(text), markup=False, soft_wrap=True)


def json_line(value: Any) -> None:
    """One JSON value on a line of its own."""
    _write(msgspec.json.encode(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; numbers and `units.Figure` stand to the right."""
    shown = list(rows)
    drawn = Table(*columns)
    for at, column in enumerate(drawn.columns):
        if shown and all(_is_figure(row[at]) for row in shown):
            column.justify = "right"
    for row in shown:
        drawn.add_row(*(escape(printable(units.cell(each))) for each in row))
    console.print(drawn)


def listing(
    found: Iterable[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[object]],
    *,
    as_json: bool,
) -> None:
    """Many things of a kind: each as JSON on a line, or a table with a row for each."""
    if as_json:
        for each in found:
            json_line(each)
    else:
        table(columns, map(row, found))


def facts(values: Any, title: str, *, as_json: bool) -> None:
    """A struct or dictionary: as JSON, or as names and values, nested ones with dots."""
    if as_json:
        json_line(values)
        return
    now_ns = time.time_ns()
    drawn = Table("", "", title=escape(printable(title)), show_header=False)
    for name, value in _flat(msgspec.to_builtins(values)):
        drawn.add_row(escape(name), escape(printable(units.field(name, value, now_ns))))
    console.print(drawn)


def configuration(info: StreamInfo | ConsumerInfo, title: str, *, as_json: bool) -> None:
    """The configuration of a stream or consumer; as JSON, everything that is known of it."""
    facts(info if as_json else info.config, title, as_json=as_json)


def _is_figure(value: object) -> bool:
    return isinstance(value, units.Figure | int | float) and not isinstance(value, bool)


def message(found: Shown, *, as_json: bool, raw: bool = False) -> None:
    """One message: a JSON object, the payload alone, or position, time, subject and text."""
    if as_json:
        json_line(_as_api(found) if isinstance(found, Delivered) else found)
    elif raw:
        _write(found.payload)
    else:
        # A payload may come from anybody. Control characters could change what the terminal shows.
        text = printable(found.payload.decode(errors="backslashreplace"))
        head = f"[dim]{found.seq} {escape(found.time)}[/dim] [bold]{escape(found.subject)}[/bold]"
        console.print(f"{head} {escape(text)}", soft_wrap=True)


def printable(text: str) -> str:
    """Text without control characters, so that a payload cannot control the terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


@contextmanager
def progress(what: str, total: int | None, *, shown: bool = True) -> Iterator[Progress]:
    """A bar with the rate of now on stderr, when that is a terminal; its only task is number 0."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=errors, transient=True, disable=not (shown and errors.is_terminal)
    ) as bar:
        bar.add_task(what, total=total)
        yield bar


class _Rate(ProgressColumn):
    """How many a second, of late."""

    def render(self, task: Task) -> Text:
        """The rate, once it is known."""
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _as_api(found: Delivered) -> dict[str, Any]:
    """A message that came in msgpack, as the API has it in JSON."""
    fields = msgspec.structs.asdict(found)
    # The API leaves these fields out where they have no value.
    if not found.ack_token:
        del fields["ack_token"]
    if found.shard is None:
        del fields["shard"]
    try:
        fields["data"] = found.data.decode()
    except UnicodeDecodeError:
        fields["data_base64"] = fields.pop("data")
    return fields


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            for at, each in enumerate(value):
                yield from _flat(each, f"{prefix}{name}.{at}.")
        elif value not in (None, "", [], ()):
            yield prefix + name, value
