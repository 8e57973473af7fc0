"""The arguments and options that several commands share, how they are read and completed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from contrail_client.blocking.client import Contrail
from contrail_client.calls import Retries
from contrail_client.cli import show
from contrail_client.cli.context import read_context, read_file
from contrail_client.cli.ending import Failed, Misuse
from contrail_client.errors import ContrailError
from contrail_client.models import Consistency
from contrail_client.operations.ensuring import exists_otherwise

_SHOWN_MAX: Final = 100
# Completion must not make the shell wait for a server that is away.
_PATIENCE_S: Final = 1.0


def stream_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Streams whose names begin with `incomplete`."""
    try:
        with _client(ctx) as client:
            found = islice(client.list_streams(prefix=incomplete), _SHOWN_MAX)
            return [info.name for info in found]
    except (ContrailError, ValueError):
        return []


def consumer_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Consumers of the stream named before whose names begin with `incomplete`."""
    try:
        with _client(ctx) as client:
            found = client.list_consumers(str(ctx.params.get("stream") or ""))
            names = (info.name for info in found if info.name.startswith(incomplete))
            return list(islice(names, _SHOWN_MAX))
    except (ContrailError, ValueError):
        return []


StreamName = Annotated[str, typer.Argument(help="Name of the stream.", autocompletion=stream_names)]
ConsumerName = Annotated[
    str, typer.Argument(help="Name of the consumer.", autocompletion=consumer_names)
]
FieldsFile = Annotated[
    Path | None,
    typer.Option("--fields", help="JSON file with configuration fields; - reads standard input."),
]
SetFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set any configuration field. The value is JSON or text; null resets the field.",
    ),
]
HeaderTexts = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="Message header; may be repeated."),
]
FromSeq = Annotated[int | None, typer.Option(metavar="SEQ", help="First sequence of the range.")]
ToSeq = Annotated[int | None, typer.Option(metavar="SEQ", help="Last sequence of the range.")]
StartTime = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only messages stored at or after this time (RFC 3339)."),
]
EndTime = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Only messages stored before this time (RFC 3339)."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="If it already exists, replace its whole configuration; fields not given are reset.",
    ),
]
FromReplica = Annotated[
    Consistency | None,
    typer.Option("--consistency", help="With any, a replica may answer that is up to 10 s old."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Print only payloads, one per line.")]


def fields_of(file: Path | None, assignments: list[str] | None, **options: Any) -> dict[str, Any]:
    """Fields of a configuration: those of the file, then `--set`, then the options given."""
    fields = _read_object(file)
    for text in assignments or []:
        name, value = _pair(text, "a field")
        try:
            fields[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            fields[name] = value
    return fields | {name: value for name, value in options.items() if value is not None}


def headers_of(texts: list[str] | None) -> dict[str, list[str]]:
    """Headers from NAME=VALUE; ValueError for anything else."""
    headers: dict[str, list[str]] = {}
    for text in texts or []:
        name, value = _pair(text, "a header")
        headers.setdefault(name, []).append(value)
    return headers


@contextmanager
def hint_at_edit(edit: str) -> Iterator[None]:
    """Say how to change an existing configuration, after a refused attempt to create it."""
    try:
        yield
    except ContrailError as error:
        if exists_otherwise(error):
            error.add_note(
                f"Use `{edit}` to change single fields, or --replace to replace the "
                "whole configuration."
            )
        raise


def confirm(question: str, yes: bool) -> None:
    """Ask before something is destroyed, unless `--yes` was given.

    Raises Misuse if there is no terminal to ask on, and Failed if the answer is no.
    """
    if yes:
        return
    # A script must not hang at a question, and must not destroy anything by accident.
    if sys.stdin is None or not sys.stdin.isatty():
        raise Misuse(
            f"{question} Cannot ask for confirmation without a terminal; pass --yes to confirm"
        )
    show.errors.print(f"{question} [y/N] ", end="", markup=False, soft_wrap=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Failed("nothing was changed")


def _pair(text: str, what: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{what} must be NAME=VALUE, not {text!r}")
    return name, value


def _read_object(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    stdin = str(file) == "-"
    data = typer.get_binary_stream("stdin").read() if stdin else read_file(file)
    where = "standard input" if stdin else str(file)
    if not data.strip():
        raise ValueError(f"{where} is empty")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from error


def _client(ctx: typer.Context) -> Contrail:
    given = ctx.params
    context = read_context(
        given.get("server"), given.get("token_file"), given.get("config"), os.environ
    )
    return Contrail(
        context.url, token=context.token, timeout_s=_PATIENCE_S, retries=Retries(attempts=1)
    )
