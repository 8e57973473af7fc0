"""The common options of all client commands, and the client that is made from them."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from contrail_client.blocking.client import Contrail
from contrail_client.cli.context import Context, read_context
from contrail_client.cli.tree import JSON, Command
from contrail_client.transport import DEFAULT_URL

P = ParamSpec("P")

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Server URL. Default: CONTRAIL_URL.",
        show_default=DEFAULT_URL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="CONTRAIL_TOKEN_FILE",
        help="File that contains the token. Default: the token in CONTRAIL_TOKEN.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(envvar="CONTRAIL_CONFIG", help="TOML file with a [client] table."),
]
AsJson = Annotated[
    bool, typer.Option(JSON, help="Print JSON, one value per line, also for errors.")
]


@dataclass(frozen=True, slots=True)
class Session:
    """The means of a command: a client, its context, and the form of the output."""

    client: Contrail
    context: Context
    as_json: bool

    def connect(self, **options: Any) -> Contrail:
        """Make another client of the same server, with other options than `client`."""
        # An empty token, because None would make the client read CONTRAIL_TOKEN.
        return Contrail(self.context.url, token=self.context.token or "", **options)


Work = Callable[Concatenate[Session, P], None]


def client_command(app: typer.Typer, name: str) -> Callable[[Work[P]], Work[P]]:
    """Register a command that gets a `Session`, with the options that all of them have."""

    def register(command: Work[P]) -> Work[P]:
        def run(
            *,
            server: Server = None,
            token_file: TokenFile = None,
            config: Config = None,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            context = read_context(server, token_file, config, os.environ)
            with Contrail(context.url, token=context.token or "") as client:
                command(Session(client, context, as_json), **own)  # type: ignore[call-arg]

        # Typer makes an option of each parameter in the signature, so the shared ones have to be
        # there.
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
        app.command(name, cls=Command)(run)
        return command

    return register
