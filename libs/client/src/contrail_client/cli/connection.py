"""What every client command shares: its options, the client they make, its exit status.

Status: 0 done, 1 failed or refused, 2 misused, 3 not found, 130 interrupted.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, ParamSpec

import typer

from contrail_client.cli import show
from contrail_client.cli.context import Context, read_context
from contrail_client.client import Contrail
from contrail_client.errors import ApiProblem, ContrailError, NotFound, Unreachable
from contrail_client.transport import DEFAULT_URL

FAILED: Final = 1
MISUSED: Final = 2
NOT_FOUND: Final = 3

P = ParamSpec("P")

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="Address of the server; otherwise CONTRAIL_URL.",
        show_default=DEFAULT_URL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token; otherwise CONTRAIL_TOKEN."),
]
Config = Annotated[
    Path | None,
    typer.Option(envvar="CONTRAIL_CONFIG", help="TOML file with a table [client]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value a line.")]


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with."""

    client: Contrail
    url: str
    as_json: bool


Command = Callable[Concatenate[Session, P], None]


def client_command(app: typer.Typer, name: str) -> Callable[[Command[P]], Command[P]]:
    """Register a command that gets a `Session`, with the options that all of them have."""

    def register(command: Command[P]) -> Command[P]:
        def run(
            *,
            server: Server = None,
            token_file: TokenFile = None,
            config: Config = None,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            with connected(server, token_file, config) as (client, context):
                command(Session(client, context.url, as_json), **own)  # type: ignore[call-arg]

        shared = [
            each
            for each in inspect.signature(run).parameters.values()
            if each.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        _, *own = inspect.signature(command).parameters.values()
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + shared
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__doc__ = command.__doc__
        app.command(name)(run)
        return command

    return register


@contextmanager
def connected(
    server: str | None, token_file: Path | None, config: Path | None
) -> Iterator[tuple[Contrail, Context]]:
    """A client; its errors become a message and a status."""
    try:
        context = read_context(server, token_file, config, os.environ)
        with Contrail(context.url, token=context.token) as client:
            yield client, context
    except ContrailError as error:
        _explain(error)
        raise typer.Exit(NOT_FOUND if isinstance(error, NotFound) else FAILED) from error
    except ValueError as error:
        show.failure(str(error))
        raise typer.Exit(MISUSED) from error


def _explain(error: ContrailError) -> None:
    show.failure(str(error))
    match error:
        case ApiProblem(errors=fields):
            for each in fields:
                show.failure(f"  {each.pointer}: {each.message}")
        case Unreachable():
            show.failure("Is a server running there? `contrail serve` starts one.")
