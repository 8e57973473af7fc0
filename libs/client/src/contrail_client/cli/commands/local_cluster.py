"""`contrail cluster --nodes`, `start-node` and `stop`: a cluster on this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from contrail_client.cli import show
from contrail_client.cli.commands.serve import Config, server
from contrail_client.cli.ending import Failed
from contrail_client.cli.tree import Command

DataDir = Annotated[
    Path,
    typer.Option("--data-dir", metavar="FOLDER", help="Folder for data, logs, ports and secret."),
]


class Restart(StrEnum):
    """What happens to a process that has ended."""

    NO = "no"
    ALWAYS = "always"


def register(app: typer.Typer) -> None:
    """Add the commands to the group of `contrail cluster`."""
    app.callback(invoke_without_command=True)(run)
    app.command("start-node", cls=Command)(start_node)
    app.command("stop", cls=Command)(stop)


def run(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Number of storage nodes: 3 or 5.")] = 3,
    port: Annotated[int, typer.Option(help="Port of the first api.")] = 7420,
    data_dir: DataDir = Path("contrail-cluster"),
    restart: Annotated[
        Restart, typer.Option(help="Whether to start processes again that have ended.")
    ] = Restart.NO,
    config: Config = None,
) -> None:
    """Run a cluster on this machine: storage nodes, two apis and two gateways.

    Each is a process of its own. Prints one line of JSON once they are ready, and stops them on
    SIGTERM or Ctrl-C. Settings other than addresses and names come from the environment and the
    file.
    """
    if context.invoked_subcommand is not None:
        return
    local = server().local_cluster
    options = local.Options(
        data_dir=data_dir,
        nodes=nodes,
        port=port,
        restart=restart is Restart.ALWAYS,
        config=config,
    )
    raise typer.Exit(local.launch(options))


def start_node(
    name: Annotated[str, typer.Argument(help="Name of the process, such as n2 or api1.")],
    data_dir: DataDir = Path("contrail-cluster"),
) -> None:
    """Start a process of a running cluster that has ended. Prints one line of JSON."""
    local = server().local_cluster
    try:
        show.json_line(local.start_process(data_dir, name))
    except local.ControlError as error:
        raise Failed(str(error)) from error


def stop(data_dir: DataDir = Path("contrail-cluster")) -> None:
    """Stop all processes of a running cluster."""
    local = server().local_cluster
    try:
        local.stop_cluster(data_dir)
    except local.ControlError as error:
        raise Failed(str(error)) from error
