"""`contrail events`: the events of a server, as they happen."""

from itertools import islice
from typing import Annotated, Any, cast, get_args

import msgspec
import typer
from rich.markup import escape

from contrail_client.cli import show, units
from contrail_client.cli.arguments import consumer_names, stream_names
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.ending import while_read
from contrail_client.models import Event, EventType

_IN_FRONT = ("type", "id", "timestamp", "stream", "consumer")


def _types(incomplete: str) -> list[str]:
    return [each for each in get_args(EventType) if each.startswith(incomplete)]


Stream = Annotated[
    str | None,
    typer.Option("--stream", help="Only events of this stream.", autocompletion=stream_names),
]
Consumer = Annotated[
    str | None,
    typer.Option("--consumer", help="Only events of this consumer.", autocompletion=consumer_names),
]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--type", help="Only events of this type; may be repeated.", autocompletion=_types
    ),
]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    client_command(app, "events")(events)


def events(
    session: Session,
    stream: Stream = None,
    consumer: Consumer = None,
    types: Types = None,
    count: Count = None,
) -> None:
    """Print events of streams, consumers and deliveries as they happen, until Ctrl-C."""
    found = session.client.events(
        stream=stream, consumer=consumer, types=cast(list[EventType], types or [])
    )
    with while_read():
        for event in islice(found, count):
            if session.as_json:
                show.json_line(event)
            else:
                show.console.print(_line(event), soft_wrap=True)


def _line(event: Event) -> str:
    what = "/".join(filter(None, (event.stream, event.consumer)))
    rest: dict[str, Any] = msgspec.to_builtins(event)
    facts = (f"{name}={units.cell(value)}" for name, value in rest.items() if name not in _IN_FRONT)
    when, kind, text = (
        escape(show.printable(text))
        for text in (event.timestamp, event.type, " ".join(filter(None, (what, *facts))))
    )
    return f"[dim]{when}[/dim] [bold]{kind:<16}[/bold] {text}"
