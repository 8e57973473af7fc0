"""`contrail context`: save servers under names, and select one."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from contrail_client.cli import saved, show
from contrail_client.cli.saved import Saved
from contrail_client.cli.tree import JSON, Command, group

app = group("Manage contexts (named servers).")

Name = Annotated[str, typer.Argument(help="Name of the context.")]
AsJson = Annotated[
    bool, typer.Option(JSON, help="Print JSON, one value per line, also for errors.")
]


@app.command("add", cls=Command)
def add(
    name: Name,
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Server URL.")],
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File that contains the token.")
    ] = None,
    description: Annotated[
        str, typer.Option(help="Description of the context.", show_default=False)
    ] = "",
    select: Annotated[bool, typer.Option("--select", help="Select the new context.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save a server under a name, replacing any context of that name."""
    context = Saved(server, str(token_file.absolute()) if token_file else "", description)
    saved.save(os.environ, name, context)
    if select:
        saved.select(os.environ, name)
    show.done(
        f"context {name} saved", {"name": name, **msgspec.to_builtins(context)}, as_json=as_json
    )


@app.command("ls", cls=Command)
def list_contexts(as_json: AsJson = False) -> None:
    """List contexts and mark the selected one."""
    selected = saved.selected_name(os.environ)
    rows = [(name, saved.read(os.environ, name)) for name in saved.names(os.environ)]
    if as_json:
        for name, context in rows:
            facts = {"name": name, "selected": name == selected, **msgspec.to_builtins(context)}
            show.json_line(facts)
        return
    show.table(
        ["", "context", "server", "token file", "description"],
        [
            ("*" if name == selected else " ", name, each.url, each.token_file, each.description)
            for name, each in rows
        ],
    )


@app.command("select", cls=Command)
def select_context(name: Name, as_json: AsJson = False) -> None:
    """Select the context to use from now on."""
    saved.read(os.environ, name)  # a context that does not exist cannot be selected
    saved.select(os.environ, name)
    show.done(f"context {name} selected", {"selected": name}, as_json=as_json)


@app.command("unselect", cls=Command)
def unselect(as_json: AsJson = False) -> None:
    """Stop using a context."""
    saved.unselect(os.environ)
    show.done("no context selected", {"selected": None}, as_json=as_json)


@app.command("rm", cls=Command)
def remove(name: Name, as_json: AsJson = False) -> None:
    """Remove a context. This does not affect the server."""
    saved.read(os.environ, name)
    saved.remove(os.environ, name)
    show.done(f"context {name} removed", {"removed": name}, as_json=as_json)
