"""The `contrail` command: status 0 for success, 1 for a failure, 2 for misuse."""

from importlib.metadata import version
from typing import Annotated

import typer

from contrail_client.cli import consumers, messages, serve, streams

app = typer.Typer(
    help="Durable message streaming over HTTP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("config")(serve.show_config)
app.add_typer(streams.app, name="stream")
app.add_typer(consumers.app, name="consumer")
app.command("pub")(messages.publish)
app.command("next")(messages.pull)
app.command("replay")(messages.replay)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version("contrail-client"))
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Durable message streaming over HTTP."""


def run() -> None:
    """Entry point of the console script."""
    app(prog_name="contrail")
