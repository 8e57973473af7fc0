"""The `contrail` command.

Status: 0 done, 1 failed or refused, 2 misused, 3 not found, 130 interrupted.
"""

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from contrail_client.cli.commands import (
    bench,
    cluster,
    consumers,
    contexts,
    copying,
    events,
    local_cluster,
    monitoring,
    pipeline,
    publishing,
    receiving,
    reports,
    serve,
    streams,
)
from contrail_client.cli.tree import JSON, Command, CommandLine

app = typer.Typer(
    cls=CommandLine,
    help="Durable message streaming over HTTP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve", cls=Command)(serve.serve)
app.command("storage", cls=Command)(serve.storage)
app.command("api", cls=Command)(serve.api)
app.command("gateway", cls=Command)(serve.gateway)
app.command("config", cls=Command)(serve.show_config)
for module in (reports, copying):
    module.register()
app.add_typer(streams.app, name="stream")
app.add_typer(consumers.app, name="consumer")
local_cluster.register(cluster.app)
app.add_typer(cluster.app, name="cluster")
app.add_typer(contexts.app, name="context")
app.add_typer(monitoring.app, name="server")
monitoring.register(app)
streams.register(app)
publishing.register(app)
receiving.register(app)
events.register(app)
app.add_typer(bench.app, name="bench")
app.add_typer(pipeline.app, name="pipeline")


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
    _as_json: Annotated[
        bool,
        typer.Option(
            JSON,
            help="Print JSON, one value per line, also for errors. May also be "
            "given after the command.",
        ),
    ] = False,
) -> None:
    """Durable message streaming over HTTP."""


def run() -> None:
    """Run the command that the process was started with."""
    command = typer.main.get_command(app)  # takes a while, in which Ctrl-C has a quiet end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command(prog_name="contrail")
